"""Switches, what sets forwards and takes them back, the report, `graph_steps`, and where
the base lies.

A new switch is a `Part` in `switches.py`: the modules it applies to, and the functions and kernels
that a profile shows when it ran.
"""

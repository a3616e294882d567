"""Workarounds for other libraries (PEFT, transformers, TRL, accelerate, FSDP), and checks whether
somebody has changed them.

If a new release breaks something, mend it here if you can, and name the version in a comment. What
a trainer does inside a step is in `adopt/graph_steps.py`.
"""

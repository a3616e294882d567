"""Readings of a module as it is now, and the reasons why it cannot run fused.

Add a model family as a row of `families.py`. Reading computes nothing and changes nothing.
`site.py` and `aside.py` are what every forward stands on.
"""

"""What a module is now, and why it cannot run fused.

A model family is a row of `families.py`. Reading computes nothing and changes nothing.
"""

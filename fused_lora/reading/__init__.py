"""Readings of a module as it is now, and the reasons why it cannot run fused.

A model family is a row of `families.py`. Reading computes nothing and changes nothing.
"""

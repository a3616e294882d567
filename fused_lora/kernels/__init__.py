"""Triton kernels of whole layers, those that several techniques share, and their launchers.

A launcher trusts its caller. Every kernel has a row in `tests/contract.py` or a test of its own.
"""

"""Triton kernels of whole layers, those that several techniques share, and their launchers.

Add a kernel here if no single technique owns it. A launcher trusts its caller. A kernel gets a row
in `tests/contract.py`, or in `test_launchers.py` if autograd does not call it.
"""

"""Whole decoder layers as autograd functions, on weights and adapters that lie in one buffer.

Change the mathematics of a layer here. It knows tensors and buffers, not modules.
"""

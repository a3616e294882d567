"""Buffers of weights in FP8."""

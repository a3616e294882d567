"""Triton kernels and their launchers: of whole layers, and those that several techniques share."""

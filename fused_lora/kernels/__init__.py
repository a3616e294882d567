"""Triton kernels and their launchers that more than one technique uses."""

"""The forward of a causal language model: its decoder on packed rows, and the fused loss.

Each is set by `fuse` like those of `forwards/`, on which they stand.
"""

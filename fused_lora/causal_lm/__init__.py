"""The forward of a causal language model: its decoder on packed rows, and the fused loss.

Change here how labels, padding and documents reach the loss. `fuse` sets these forwards too; they
build on `forwards/`.
"""

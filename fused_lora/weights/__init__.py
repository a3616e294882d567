"""Where frozen weights lie: one kind a file, in bf16, FP8, 4 bits or sharded.

A new kind is a subclass of `Border` and its buffer in `layer/`.
"""

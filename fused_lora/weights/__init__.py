"""Storage of frozen weights: in bf16, FP8, 4 bits, sharded, or in host memory.

A kind that users ask for is a subclass of `Border`. One that the weights themselves show, as 4 bits
do, extends `DefaultBorder`. Its buffer goes into `layer/`.
"""

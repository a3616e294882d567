"""New parameters on the same memory, which stand in for a module's own while it is captured.

Autograd accumulates a parameter's gradient in a node that remembers the stream it was made on, and
lives as long as somebody holds it. DistributedDataParallel holds all of them, made on CUDA's
default stream, and a captured backward may not wait for that one. A new parameter has no node yet:
it gets one on the capture's stream.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def new_leaves(module: nn.Module, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Context in which new parameters, in this order, replace those of a module. Tied ones stay
    tied."""
    leaves = {one: nn.Parameter(one.detach()) for one in parameters}
    replaced = [
        (owner._parameters, name, one)
        for owner in module.modules()
        for name, one in owner._parameters.items()
        if one in leaves
    ]
    try:
        for owned, name, one in replaced:
            owned[name] = leaves[one]
        yield [*leaves.values()]
    finally:
        for owned, name, one in replaced:
            owned[name] = one

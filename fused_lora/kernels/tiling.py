"""Tiles of the kernels with a tl.dot between a load and a store: how these are cut, and what the
tensor cores are given."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.dropout import ROWS_OF_A_WORD
from fused_mlp.launching import is_interpreted

# Sums for more ranks would not fit into registers: each chunk of this many reads everything anew.
MAX_BLOCK_RANK = 64

# For tiles in flight, at most: four stages of 64 x 160 in bf16 are 81,920. Every GPU with bf16 has
# at least 99 kB for a program. Some of it is needed to hand tiles over to the tensor cores.
SHARED_BYTES = 84_000


class Tiling(NamedTuple):
    """Tiling of a kernel: a tile's rows and columns, the number of ranges into which the programs
    split what they sum over, Triton's warps and stages, and the most registers of a thread."""

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int
    registers: int | None = None


def stages(tiling: Tiling, elements: int, tensor: Tensor) -> int:
    """Return the tiling's stages, or what SHARED_BYTES hold at this many of tensor's elements."""
    return max(min(tiling.stages, SHARED_BYTES // (elements * tensor.element_size())), 1)


def tilings_for_masks(others: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Return the changes to a tiling that leave a tile at most as many rows as a word of a dropout
    mask covers."""
    return [changes for changes in others if changes.get("rows", 0) <= ROWS_OF_A_WORD.value]


def dots_in_fp32(kernel, tensor: Tensor) -> bool:
    """Return True if tl.dot should get fp32: where tensor is fp32, and always in Triton's
    interpreter, which takes the bits of bf16 for integers. At most the order of a sum changes: a
    product of two bf16 or fp16 is exact in fp32, and the sums are fp32 either way."""
    return tensor.dtype == torch.float32 or is_interpreted(kernel)


@triton.constexpr_function
def has_tcgen05():
    """Return True on sm_10x and sm_11x, whose tensor cores take tcgen05 instructions."""
    return tl.target_info.cuda_capability_geq(10) and not tl.target_info.cuda_capability_geq(12)


@triton.constexpr_function
def dots_of_a_tile(dtype, count):
    """Return how many of `count` tl.dot may share a tile of this dtype: all, but one if the tile is
    cast from FP8 beside tcgen05. Triton 3.6 fails there in its pipeliner, 3.7 does not."""
    fails = dtype == tl.float8e4nv and has_tcgen05() and triton.__version__[:4] == "3.6."
    return 1 if fails else count


@triton.jit
def keep(tile, IN_FP32: tl.constexpr):
    """Return tile, of bf16 or fp16, from a no-op instruction that nothing is moved past.

    tl.dot needs its operand in another layout than a store does. Rather than pass a tile from one
    to the other through shared memory, Triton computes everything that leads to it in both layouts.
    For `swiglu_backward_products` with a tile of 32 x 64 in 4 warps, that would be 32 exponentials
    a thread instead of 16, and 171 registers instead of 138. Not beside tcgen05: there Triton's
    pipeliner accepts no such instruction (3.6 and 3.7).
    """
    if not (IN_FP32 or has_tcgen05()):
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    return tile


@triton.jit
def add_product(
    total, tile, factor_row, row_mask, rank, BLOCK_RANK: tl.constexpr, IN_FP32: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """total [columns, BLOCK_RANK] plus tile' factor, for the same rows of both. KEEP: `keep`."""
    k = tl.arange(0, BLOCK_RANK)[None, :]
    factor = tl.load(factor_row + k, mask=row_mask & (k < rank), other=0.0)
    if KEEP:
        tile = keep(tile, IN_FP32)
    if IN_FP32:
        tile, factor = tile.to(tl.float32), factor.to(tl.float32)
    # it says how fp32 is multiplied; bf16 and fp16 go to the tensor cores whatever it says
    return tl.dot(tl.trans(tile), factor, total, input_precision="ieee")

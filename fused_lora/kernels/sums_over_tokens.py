"""Sums over tokens: the gradients of a layer's adapters, all of them in one launch.

    gradient = s x' factor      x [T, columns], factor [T, rank], gradient [columns, rank]

dB = s dy' z is such a gradient, with dy for x. dA = p' x is the transpose of one, with p for the
factor. cuBLAS also splits T into ranges, but separately for every matmul. Each one then needs a
kernel that adds up the ranges, one that clears its workspace and one that scales. That makes 18
kernels for the gradients of q, k, v and o and dA of gate and up. Together these are only 84 tiles
of 128 columns, for 132 multiprocessors.

Traffic: every x is read once, 25.6 kB a token of Qwen2.5-3B for those and dB of down. The factors
come from L2, once for each tile's width of columns. At 64 columns and rank 32 a factor takes half
of x's bytes. On an H200, in ms a call for all of that, 12,800 columns:

    tokens                                  16,384    8,192    4,096    2,048
    cuBLAS's way                            0.1507   0.1024   0.0736   0.0502
    here, with one range                    0.1168   0.0641   0.0359   0.0228
    the bytes at 4.3 TB/s                   0.1002   0.0501   0.0251   0.0125

A program owns some columns of one x and goes down the rows. It keeps the sums [columns, rank] of up
to three factors in registers, and writes the gradients at the end. If a narrower model has too few
columns for enough programs, a program owns only a range of the rows. It then writes partial
sums [splits, columns, rank] in fp32, which a second kernel adds up. There are no atomics: the order
is fixed and gradients are deterministic.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, repeat

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.dropout import is_kept
from fused_mlp.launching import (
    cdiv,
    launch_by_triton,
    next_power_of_2,
    on_device_of,
)

from .autotune import fastest
from .fp8_rows import E4M3
from .products import Product, split_products
from .tiling import (
    MAX_BLOCK_RANK,
    Tiling,
    add_product,
    dots_in_fp32,
    dots_of_a_tile,
    keep,
    stages,
    tilings_for_masks,
)

# splits is a maximum: we take enough to make PROGRAMS, three for each of 132 multiprocessors. The
# 12,800 columns of Qwen2.5-3B are 200 programs in one split, the best of those tried on an H200 at
# 2,048 tokens, and 300 in 3. Timed alone at 16,384 tokens, the 200 are just as fast (0.117 and
# 0.119 ms). In a training step they took 0.160 ms a layer and the 300 took 0.136, on a card with 5%
# faster matmuls.
TILING = Tiling(rows=64, columns=64, splits=8, warps=4, stages=4)
TILING_OF_MANY_ROWS = Tiling(rows=32, columns=128, splits=8, warps=4, stages=4)
MANY_ROWS = 8192
# Of masked x copies are made in registers: with 4 warps 244 for three factors.
TILING_OF_MASKED = TILING_OF_MANY_ROWS._replace(warps=8)
# Where they were not measured. Few, as each takes seconds to compile.
_OTHERS = (
    {"rows": 64, "columns": 64},
    {"rows": 32, "columns": 128},
    {"rows": 32, "columns": 64},
    {"rows": 64, "columns": 64, "stages": 3},
    {"rows": 32, "columns": 128, "stages": 3, "warps": 8},
)
PROGRAMS = 396
# fp32 is multiplied in registers, into which more than this would not fit.
TILING_IN_FP32 = Tiling(rows=16, columns=64, splits=8, warps=8, stages=4)

# The sums [128, 32] of three factors are 96 registers a thread in 4 warps.
FACTORS_OF_A_PROGRAM = 3
RANKS_OF_A_PROGRAM = 128

# In a launch. It is compiled for how many factors each x has, a loop for each.
MAX_XS = 8

_SUM_COLUMNS = 64  # a program of the second kernel


@triton.jit(do_not_specialize=["rows"])
def _sums_over_tokens_kernel(
    xs,  # [rows, columns] each
    x_row_strides,
    columns,
    factors,  # [rows, rank] each, those of the first x first
    factor_row_strides,
    ranks,
    bits,  # of the mask of x for each factor, or None
    gradients,  # [columns, rank] each, written if partials_ptr is None
    column_strides,
    rank_strides,
    scalings,
    # [splits, all_columns, BLOCK_RANK] fp32, written: the factors' one after another; None if there
    # is one split
    partials_ptr,
    all_columns,  # of every factor's x
    rows,
    rows_of_a_split,
    FIRSTS: tl.constexpr,  # which factor is the first of each x; at last, how many there are
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    # every x has its tiles of columns, and one of them has this program's
    tile = tl.program_id(0)
    # where the partial sums of x's first factor begin
    place = tl.program_id(1).to(tl.int64) * all_columns
    for i in tl.static_range(len(FIRSTS) - 1):
        tiles = tl.cdiv(columns[i], BLOCK_COLUMNS)
        if (tile >= 0) & (tile < tiles):
            sums = ()
            # all factors in one loop over the rows, or a loop for each
            COUNT: tl.constexpr = FIRSTS[i + 1] - FIRSTS[i]
            AT_ONCE: tl.constexpr = dots_of_a_tile(xs[i].dtype.element_ty, COUNT)
            for j in tl.static_range(0, COUNT, AT_ONCE):
                sums += _sum_rows(
                    xs[i], x_row_strides[i], columns[i], factors, factor_row_strides, ranks, bits,
                    tile, rows, rows_of_a_split, FIRSTS[i] + j, AT_ONCE,
                    BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_RANK, IN_FP32,
                )  # fmt: skip
            column = (tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)[:, None]
            for j in tl.static_range(len(sums)):
                if partials_ptr is None:
                    _store_gradient(
                        sums[j], FIRSTS[i] + j, gradients, column_strides, rank_strides, ranks,
                        scalings, column, columns[i], BLOCK_RANK,
                    )  # fmt: skip
                else:
                    # all of it, with zeros behind a factor's rank
                    k = tl.arange(0, BLOCK_RANK)[None, :]
                    partial = partials_ptr + (place + j * columns[i] + column) * BLOCK_RANK + k
                    tl.store(partial, sums[j], mask=column < columns[i])
        tile -= tiles
        place += (FIRSTS[i + 1] - FIRSTS[i]) * columns[i]


@triton.jit
def _sum_rows(
    x_ptr, x_row_stride, columns, factors, factor_row_strides, ranks, bits, tile, rows,
    rows_of_a_split, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_RANK: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """This program's sums for one tile of x and the COUNT factors from FIRST on."""
    column = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    sums = (tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32),) * COUNT
    start = tl.program_id(1) * rows_of_a_split
    end = tl.minimum(start + rows_of_a_split, rows)
    for first in range(start, end, BLOCK_ROWS):
        # int64: from 838,861 rows of 2,560 on, an int32 offset overflows
        row = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
        mask = row < end
        x_tile = x_ptr + row * x_row_stride + column
        x = tl.load(x_tile, mask=mask & (column < columns), other=0.0)
        if x.dtype == tl.float8e4nv:  # every dtype has its numbers
            x = keep(x.to(factors[FIRST].dtype.element_ty), IN_FP32)
        added = ()
        for i in tl.static_range(FIRST, FIRST + COUNT):
            factor_row = factors[i] + row * factor_row_strides[i]
            kept = x
            if bits[i] is not None:
                is_one = is_kept(bits[i], first, row, column, columns)
                kept = tl.where(is_one, x, 0.0).to(x.dtype)
            total = add_product(
                sums[i - FIRST], kept, factor_row, mask, ranks[i], BLOCK_RANK, IN_FP32, False
            )
            added += (total,)  # type: ignore[assignment]
        sums = added
    return sums


@triton.jit
def _store_gradient(
    total, i: tl.constexpr, gradients, column_strides, rank_strides, ranks, scalings, column,
    columns, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Write a sum [BLOCK_COLUMNS, BLOCK_RANK], scaled, into these columns of the i-th gradient."""
    k = tl.arange(0, BLOCK_RANK)[None, :]
    gradient = gradients[i] + column * column_strides[i] + k.to(tl.int64) * rank_strides[i]
    total = (total * scalings[i]).to(gradients[i].dtype.element_ty)
    tl.store(gradient, total, mask=(column < columns) & (k < ranks[i]))


@triton.jit(do_not_specialize=["splits"])
def _sum_partials_kernel(
    partials_ptr,  # [splits, all_columns, BLOCK_RANK] fp32
    gradients,  # [columns, rank] each, written
    column_strides,
    rank_strides,
    columns,
    ranks,
    scalings,
    all_columns,
    splits,
    COUNT: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    tile = tl.program_id(0)
    # where the gradient's partial sums begin; int64, as all that is added to it
    place = tile.to(tl.int64) * 0
    for i in tl.static_range(COUNT):
        tiles = tl.cdiv(columns[i], BLOCK_COLUMNS)
        if (tile >= 0) & (tile < tiles):
            column = (tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)[:, None]
            k = tl.arange(0, BLOCK_RANK)[None, :]
            mask = (column < columns[i]) & (k < ranks[i])
            total = tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32)
            # unrolled: the loads overlap
            for split in tl.range(0, splits, loop_unroll_factor=4):
                partial = partials_ptr + (place + split * all_columns + column) * BLOCK_RANK + k
                total += tl.load(partial, mask=mask, other=0.0)
            _store_gradient(
                total, i, gradients, column_strides, rank_strides, ranks, scalings, column,
                columns[i], BLOCK_RANK,
            )  # fmt: skip
        tile -= tiles
        place += columns[i]


def sums_over_tokens(sums: Sequence[tuple[Tensor, Sequence[Product]]]) -> None:
    """Write the gradients of all products, the sums over the rows of an x and a factor.

    Equivalent PyTorch, but that it adds in fp32 and rounds once, at the store::

        for x, products in sums:
            for factor, gradient, scaling, mask in products:
                kept = x if mask is None else x * unpacked(mask) * mask.scale
                gradient.copy_(scaling * kept.t() @ factor)

    Args:
        sums: pairs of x [T, columns] and any number of products over it. Products of one x share
            the read of x, up to three of them of a rank up to 32. T is the same for all x, and may
            be 0. So are device and dtype, which is bf16, fp16 or fp32; an x without masks may be
            e4m3. Rows may lie any stride apart. A product's factor [T, rank] is like x, of any
            rank. Its gradient [columns, rank] has any strides, and is bf16, fp16 or fp32. Gradients
            do not overlap.

    Deterministic. One launch for up to 8 x of up to three factors each, or two where the rows are
    split into ranges. Nothing is copied from the host: a CUDA graph may hold the launches.
    """
    if not sums:
        return
    first = sums[0][0]
    widest = max([p.factor.shape[1] for _, products in sums for p in products], default=0)
    if first.shape[0] == 0:
        for _, products in sums:
            for product in products:
                product.gradient.zero_()
    elif widest:
        block_rank = min(max(next_power_of_2(widest), 16), MAX_BLOCK_RANK)  # tl.dot wants 16
        at_once = min(FACTORS_OF_A_PROGRAM, RANKS_OF_A_PROGRAM // block_rank)
        slots: list[_Slot] = []
        for x, products in sums:
            if widest > MAX_BLOCK_RANK:
                products, _ = split_products(products)
            slots += [(x, products[i : i + at_once]) for i in range(0, len(products), at_once)]
        with on_device_of(first):
            for i in range(0, len(slots), MAX_XS):
                _launch(slots[i : i + MAX_XS], block_rank)


_Slot = tuple[Tensor, Sequence[Product]]  # an x and its products


def _launch(slots: Sequence[_Slot], block_rank: int) -> None:
    """The kernel, and that which adds up the ranges if there are several, for at most MAX_XS."""
    kernel = _sums_over_tokens_kernel
    xs, products = zip(*slots, strict=True)
    every = [*chain.from_iterable(products)]
    factors, gradients, scalings, masks = zip(*every, strict=True)
    first, rows = factors[0], factors[0].shape[0]
    bits = masks  # None each
    is_masked = any(masks)
    if is_masked:
        scalings = tuple([product.scale for product in every])
        bits = tuple([mask and mask.bits for mask in masks])
    dtypes = tuple([x.dtype for x in xs])
    # codes take the tiling of many rows at few as well: on an H100 at 2,048 a layer's sums take
    # 0.026 ms with it, the best of seven
    is_small = rows < MANY_ROWS and E4M3 not in dtypes
    tiling = TILING if is_small else TILING_OF_MANY_ROWS
    if is_masked:
        tiling = TILING_OF_MASKED
    if first.dtype == torch.float32:
        tiling = TILING_IN_FP32
    columns = tuple([x.shape[1] for x in xs])
    if not any(columns):  # an empty grid cannot be launched
        return
    counts = [*map(len, products)]
    firsts = tuple(accumulate(counts, initial=0))
    columns_of_factors = tuple(chain.from_iterable(map(repeat, columns, counts)))
    all_columns = sum(columns_of_factors)
    x_row_strides = tuple([x.stride(0) for x in xs])
    factor_row_strides = tuple([factor.stride(0) for factor in factors])
    ranks = tuple([factor.shape[1] for factor in factors])
    strides = tuple(zip(*[gradient.stride() for gradient in gradients], strict=True))

    def launch(tiling: Tiling) -> None:
        tiles, splits, rows_of_a_split = _grid(columns, rows, tiling, PROGRAMS)
        elements = tiling.rows * (tiling.columns + max(counts) * block_rank)
        partials = None
        if splits > 1:
            partials = first.new_empty(splits, all_columns, block_rank, dtype=torch.float32)
        launch_by_triton(
            kernel, (tiles, splits),
            xs, x_row_strides, columns, factors, factor_row_strides, ranks, bits,
            gradients, *strides, scalings,
            partials, all_columns, rows, rows_of_a_split, firsts,
            tiling.rows, tiling.columns, block_rank, dots_in_fp32(kernel, first),
            num_warps=tiling.warps, num_stages=stages(tiling, elements, first),
        )  # fmt: skip
        if splits > 1:
            launch_by_triton(
                _sum_partials_kernel, (_tiles(columns_of_factors, _SUM_COLUMNS),),
                partials, gradients, *strides, columns_of_factors, ranks, scalings,
                all_columns, splits, len(gradients), _SUM_COLUMNS, block_rank, num_warps=4,
            )  # fmt: skip

    shape = columns, firsts, block_rank, is_masked, dtypes
    others = tilings_for_masks(_OTHERS) if is_masked else _OTHERS
    launch(fastest(kernel, first, rows, shape, tiling, others, launch))


@lru_cache
def _grid(
    columns: tuple[int, ...], rows: int, tiling: Tiling, programs: int
) -> tuple[int, int, int]:
    """Return the tiles of columns, the ranges of rows and the rows of a range."""
    tiles = _tiles(columns, tiling.columns)
    splits = max(min(tiling.splits, programs // tiles), 1)
    rows_of_a_split = cdiv(cdiv(rows, splits), tiling.rows) * tiling.rows
    return tiles, cdiv(rows, rows_of_a_split), rows_of_a_split


@lru_cache
def _tiles(columns: tuple[int, ...], width: int) -> int:
    return sum([cdiv(n, width) for n in columns])

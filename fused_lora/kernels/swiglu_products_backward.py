"""SwiGLU's backward, with the adapters' matmuls over its tensors while they are in registers.

For hidden h = silu(gate) up (or gelu, by tanh, for silu: GeGLU), adapted projections gate and up
before it and down after it:

    dgate, dup     as `swiglu_backward` or `geglu_backward`, into rows any stride apart
    dA  = p' h     of down; p = dy s B [rows, rank] is what its own backward computed
    dB  = s dgate' z,  s dup' z     of gate and up; z = x A' [rows, rank] of each

As a separate matmul, each would read h or dgate | dup once more, and only dA needs h at all. In
[rows, intermediate] tensors, the traffic is 5 here (dh, gate, up; dgate, dup), and 9 with separate
matmuls (h written, then h, dgate and dup read once more). On an H200 at 16,384 rows of 11,008 that
takes 0.514 and 0.836 ms; a tensor is 361 MB. In addition, p and z are read from L2, once for each
tile's width of columns. Partial sums [3, splits, intermediate, rank] in fp32 are written and read:
at rank 32, 4.2 MB a split each way.

A program owns some columns and a range of rows. It keeps three sums [columns, rank] in registers
while it goes down the rows, and a second kernel adds up the ranges. There are no atomics: the order
is fixed and gradients are deterministic. tl.dot gets h, dgate and dup rounded to the dtype in which
they are stored, and adds in fp32, as a matmul of the stored tensors would.

Where DoRA scales gate and up before this (`magnitudes.py`), dgate and dup are the gradients of what
it scales, and the sums over tokens for the gradients of the magnitudes come from the same pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.dropout import is_kept
from fused_mlp.launching import cdiv, launch, next_power_of_2, on_device_of

from .activation import activate
from .autotune import fastest
from .fp8_swiglu import CODED_REGISTERS, Coded, load_scales, store_codes
from .magnitudes import ColumnScale, operands_of, sum_magnitudes
from .products import Product, SwiGLUProducts
from .tiling import MAX_BLOCK_RANK, Tiling, add_product, dots_in_fp32, stages

# The best of 15 shapes on an H200, at 2,048 to 16,384 rows of 11,008, after 394 at 16,384 alone:
# 0.473 ms there, and 0.476 in 4 warps, 4 ranges and at most 168 registers, which are the 0.514 of
# another visit above. The three sums [128, 32] are 48 registers a thread.
BACKWARD_TILING = Tiling(rows=16, columns=128, splits=3, warps=8, stages=3)
# With magnitudes, whose sums and factors are 32 more: the best of 14 shapes, 0.504 ms where LoRA
# takes 0.467 and the tiling above 0.639; at 2,048 rows 74, 66 and 98 µs.
SCALED_TILING = Tiling(rows=16, columns=64, splits=3, warps=4, stages=3, registers=128)
# Where it was not measured: more programs, less shared memory, fewer registers in the sums.
_OTHERS = (
    {"splits": 6},
    {"stages": 2},
    {"warps": 4, "splits": 4},
    {"columns": 64, "warps": 4},
    {"rows": 32, "columns": 64, "warps": 4, "splits": 2},
    {"rows": 32, "stages": 2},
)

# A program of the second kernel. It reads 17 MB from L2 for 11,008 columns, in 2,064 programs. With
# 64 columns, 516 of them and loads that waited for each other it took 10 µs.
_SUM_COLUMNS = 16


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward_products_kernel(
    grad_hidden_ptr,  # [rows, intermediate]
    gate_up_ptr,  # [rows, 2 intermediate]
    factor_ptr,  # [2 intermediate] fp32, what scales gate_up, or None
    bias_ptr,  # [2 intermediate], what is added then, or None
    sums_ptr,  # [splits, 2 intermediate] fp32, of gradients times gate_up, written; or None
    grad_gate_up_ptr,  # [rows, 2 intermediate], written, or None
    coded,  # `Coded`, the same in FP8, written, or None
    hidden_factor_ptr,  # [rows, rank], of hidden's product, or None; likewise the next two
    gate_factor_ptr,
    up_factor_ptr,
    hidden_bits_ptr,  # of the mask of hidden's product, or None
    partials_ptr,  # [3, splits, intermediate, BLOCK_RANK] fp32, written
    grad_hidden_row_stride,
    gate_up_row_stride,
    grad_gate_up_row_stride,
    codes_row_stride,
    hidden_factor_row_stride,
    gate_factor_row_stride,
    up_factor_row_stride,
    rows,
    rows_of_a_split,
    intermediate,
    hidden_rank,
    gate_rank,
    up_rank,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    IS_GELU: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    split = tl.program_id(1)
    dtype = gate_up_ptr.dtype.element_ty
    sum_hidden = tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32)
    sum_gate = tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32)
    sum_up = tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32)
    start = split * rows_of_a_split
    end = tl.minimum(start + rows_of_a_split, rows)
    if sums_ptr is not None:
        # each thread's own until the end: with a sum over rows in the loop it takes 2.9 ms
        sum_u_gate = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        sum_u_up = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if factor_ptr is not None:
        scale_gate = tl.load(factor_ptr + column, mask=column < intermediate, other=0.0)
        scale_up = tl.load(
            factor_ptr + intermediate + column, mask=column < intermediate, other=0.0
        )
    if bias_ptr is not None:
        bias_gate = tl.load(bias_ptr + column, mask=column < intermediate, other=0.0)
        bias_up = tl.load(bias_ptr + intermediate + column, mask=column < intermediate, other=0.0)
        bias_gate, bias_up = bias_gate.to(tl.float32), bias_up.to(tl.float32)
    if coded is not None:
        scales = load_scales(coded, start, end, column, intermediate, BLOCK_ROWS)
    for first in range(start, end, BLOCK_ROWS):
        # int64: from 97,542 rows of 2 x 11,008 on, an int32 offset overflows
        row = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
        mask = (row < end) & (column < intermediate)
        # 0.0 outside: there hidden and both gradients are 0.0, and add nothing to a sum
        grad_hidden_tile = grad_hidden_ptr + row * grad_hidden_row_stride + column
        grad_hidden = tl.load(grad_hidden_tile, mask=mask, other=0.0).to(tl.float32)
        gate_tile = gate_up_ptr + row * gate_up_row_stride + column
        u_gate = tl.load(gate_tile, mask=mask, other=0.0).to(tl.float32)
        u_up = tl.load(gate_tile + intermediate, mask=mask, other=0.0).to(tl.float32)
        gate, up = u_gate, u_up
        if factor_ptr is not None:
            gate, up = gate * scale_gate, up * scale_up
        if bias_ptr is not None:
            gate, up = gate + bias_gate, up + bias_up
        activated, slope = activate(gate, IS_GELU, IN_FP32)
        hidden = (activated * up).to(dtype)
        grad_gate = grad_hidden * up * slope
        grad_up = grad_hidden * activated
        if sums_ptr is not None:
            sum_u_gate += grad_gate * u_gate
            sum_u_up += grad_up * u_up
        if factor_ptr is not None:
            grad_gate, grad_up = grad_gate * scale_gate, grad_up * scale_up
        if coded is not None:
            scales = store_codes(
                coded, codes_row_stride, grad_gate, grad_up, scales, row, end, column,
                intermediate, mask, BLOCK_ROWS, BLOCK_COLUMNS, IN_FP32,
            )  # fmt: skip
        grad_gate = grad_gate.to(dtype)
        grad_up = grad_up.to(dtype)
        if grad_gate_up_ptr is not None:
            grad_gate_tile = grad_gate_up_ptr + row * grad_gate_up_row_stride + column
            tl.store(grad_gate_tile, grad_gate, mask=mask)
            tl.store(grad_gate_tile + intermediate, grad_up, mask=mask)
        if hidden_factor_ptr is not None:
            if hidden_bits_ptr is not None:
                is_one = is_kept(hidden_bits_ptr, first, row, column, intermediate)
                hidden = tl.where(is_one, hidden, 0.0).to(dtype)
            sum_hidden = add_product(
                sum_hidden, hidden, hidden_factor_ptr + row * hidden_factor_row_stride, row < end,
                hidden_rank, BLOCK_RANK, IN_FP32, True,
            )  # fmt: skip
        if gate_factor_ptr is not None:
            sum_gate = add_product(
                sum_gate, grad_gate, gate_factor_ptr + row * gate_factor_row_stride, row < end,
                gate_rank, BLOCK_RANK, IN_FP32, True,
            )  # fmt: skip
        if up_factor_ptr is not None:
            sum_up = add_product(
                sum_up, grad_up, up_factor_ptr + row * up_factor_row_stride, row < end,
                up_rank, BLOCK_RANK, IN_FP32, True,
            )  # fmt: skip
    if hidden_factor_ptr is not None:
        _store_partial(
            partials_ptr, 0, sum_hidden, intermediate, hidden_rank, BLOCK_COLUMNS, BLOCK_RANK
        )
    if gate_factor_ptr is not None:
        _store_partial(
            partials_ptr, 1, sum_gate, intermediate, gate_rank, BLOCK_COLUMNS, BLOCK_RANK
        )
    if up_factor_ptr is not None:
        _store_partial(partials_ptr, 2, sum_up, intermediate, up_rank, BLOCK_COLUMNS, BLOCK_RANK)
    if sums_ptr is not None:
        place = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        sums_ptr += split.to(tl.int64) * 2 * intermediate + place
        tl.store(sums_ptr, tl.sum(sum_u_gate, axis=0), mask=place < intermediate)
        tl.store(sums_ptr + intermediate, tl.sum(sum_u_up, axis=0), mask=place < intermediate)


@triton.jit
def _store_partial(
    partials_ptr, product, total, intermediate, rank, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Write a program's sum [BLOCK_COLUMNS, BLOCK_RANK] to where it belongs in partials."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[:, None]
    first = (product * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * intermediate
    k = tl.arange(0, BLOCK_RANK)[None, :]
    tile = partials_ptr + (first + column) * BLOCK_RANK + k
    tl.store(tile, total, mask=(column < intermediate) & (k < rank))


@triton.jit(do_not_specialize=["splits"])
def _sum_products_kernel(
    partials_ptr,  # [3, splits, intermediate, BLOCK_RANK] fp32
    hidden_ptr,  # [intermediate, rank], written, or None; with its strides, rank and scaling
    hidden_column_stride,
    hidden_rank_stride,
    hidden_rank,
    hidden_scaling,
    gate_ptr,  # likewise
    gate_column_stride,
    gate_rank_stride,
    gate_rank,
    gate_scaling,
    up_ptr,  # likewise
    up_column_stride,
    up_rank_stride,
    up_rank,
    up_scaling,
    splits,
    intermediate,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Write the sum over the splits, times scaling, of this program's product and columns."""
    gradients = hidden_ptr, gate_ptr, up_ptr
    column_strides = hidden_column_stride, gate_column_stride, up_column_stride
    rank_strides = hidden_rank_stride, gate_rank_stride, up_rank_stride
    ranks = hidden_rank, gate_rank, up_rank
    scalings = hidden_scaling, gate_scaling, up_scaling
    column = (tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[:, None]
    k = tl.arange(0, BLOCK_RANK)[None, :]
    for i in tl.static_range(3):
        if gradients[i] is not None and tl.program_id(1) == i:
            mask = (column < intermediate) & (k < ranks[i])
            total = tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32)
            # unrolled: the loads overlap
            for split in tl.range(0, splits, loop_unroll_factor=4):
                first = (column + (i * splits + split) * intermediate) * BLOCK_RANK
                total += tl.load(partials_ptr + first + k, mask=mask, other=0.0)
            gradient = gradients[i] + column * column_strides[i]
            gradient += k.to(tl.int64) * rank_strides[i]
            total = (total * scalings[i]).to(gradients[i].dtype.element_ty)
            tl.store(gradient, total, mask=mask)


def swiglu_backward_products(
    grad_hidden: Tensor,
    gate_up: Tensor,
    products: SwiGLUProducts,
    grad_gate_up: Tensor | None,
    activation: str = "silu",
    coded: Coded | None = None,
    scale: ColumnScale | None = None,
) -> None:
    """Compute `swiglu_backward`, and the given products over hidden, grad_gate and grad_up.

    Equivalent PyTorch, for `swiglu_backward` of fused_mlp/swiglu.py::

        tensors = swiglu_backward(grad_hidden, *gate_up.chunk(2, dim=1))
        grad_gate_up.copy_(torch.cat(tensors[1:], dim=1))
        for x, product in zip(tensors, products[:3]):
            product.gradient.copy_(product.scaling * x.t() @ product.factor)

    The ranks may differ. Only hidden's product may have a mask. With activation "gelu_tanh" this is
    `geglu_backward` of fused_mlp/geglu.py. With coded, it writes codes of grad_gate_up in addition,
    or instead. With a scale, gate_up is what it scales, grad_gate_up is the gradient of that, and
    `products.magnitudes` get theirs, sums over the rows as `scale_columns_backward` has them.
    """
    *three, magnitudes = products
    if len(gate_up) == 0:
        for product in three:
            if product is not None:
                product.gradient.zero_()
        for gradient in magnitudes:
            if gradient is not None:
                gradient.zero_()
        return
    with on_device_of(gate_up):
        _launch(grad_hidden, gate_up, grad_gate_up, products, activation, coded, scale)
        most = max(0 if product is None else product.factor.shape[1] for product in three)
        for first in range(MAX_BLOCK_RANK, most, MAX_BLOCK_RANK):
            hidden, gate, up = (
                None if product is None or product.factor.shape[1] <= first
                else Product(product.factor[:, first:], product.gradient[:, first:], *product[2:])
                for product in three
            )  # fmt: skip
            rest = SwiGLUProducts(hidden, gate, up)
            _launch(grad_hidden, gate_up, None, rest, activation, None, scale)


def _launch(
    grad_hidden: Tensor,
    gate_up: Tensor,
    grad_gate_up: Tensor | None,
    products: SwiGLUProducts,
    activation: str,
    coded: Coded | None,
    scale: ColumnScale | None,
) -> None:
    """Both kernels, for as many ranks as a block holds."""
    rows, intermediate = grad_hidden.shape
    *three, magnitudes = products
    factors = [None if product is None else product.factor for product in three]
    ranks = [0 if factor is None else min(factor.shape[1], MAX_BLOCK_RANK) for factor in factors]
    block_rank = max(next_power_of_2(max(ranks)), 16)  # tl.dot wants 16 at least
    kernel = _swiglu_backward_products_kernel
    with_strides = grad_hidden, gate_up, grad_gate_up, coded and coded.codes, *factors
    row_strides = [0 if tensor is None else tensor.stride(0) for tensor in with_strides]
    gradients: list[Any] = []  # one by one: `launch` remembers no tuples
    for product, rank in zip(three, ranks, strict=True):
        if product is None:
            gradients += None, 0, 0, 0, 0.0
        else:
            gradients += product.gradient, *product.gradient.stride(), rank, product.scale
    mask = None if products.hidden is None else products.hidden.mask
    has_sums = any(gradient is not None for gradient in magnitudes)

    def run(tiling: Tiling) -> None:
        rows_of_a_split = cdiv(cdiv(rows, tiling.splits), tiling.rows) * tiling.rows
        splits = cdiv(rows, rows_of_a_split)
        elements = 3 * tiling.rows * (tiling.columns + block_rank)
        partials = gate_up.new_empty(3, splits, intermediate, block_rank, dtype=torch.float32)
        sums = partials.new_empty(splits, 2 * intermediate) if has_sums else None
        launch(
            kernel, (cdiv(intermediate, tiling.columns), splits),
            grad_hidden, gate_up, *operands_of(scale), sums, grad_gate_up, coded, *factors,
            mask and mask.bits, partials, *row_strides,
            rows, rows_of_a_split, intermediate, *ranks,
            tiling.rows, tiling.columns, block_rank, activation == "gelu_tanh",
            dots_in_fp32(kernel, gate_up),
            num_warps=tiling.warps, num_stages=stages(tiling, elements, gate_up),
            maxnreg=tiling.registers,
        )  # fmt: skip
        launch(
            _sum_products_kernel, (cdiv(intermediate, _SUM_COLUMNS), 3),
            partials, *gradients, splits, intermediate, _SUM_COLUMNS, block_rank, num_warps=4,
        )  # fmt: skip
        if scale is not None and sums is not None:
            sum_magnitudes(sums, scale, (intermediate, intermediate), magnitudes)

    is_there = [one is not None for one in (grad_gate_up, coded, mask, scale)]
    shape = intermediate, *ranks, *is_there, has_sums, activation
    shipped = BACKWARD_TILING._replace(registers=coded and CODED_REGISTERS)
    if scale is not None and coded is None:
        shipped = SCALED_TILING
    run(fastest(kernel, gate_up, rows, shape, shipped, _OTHERS, run))

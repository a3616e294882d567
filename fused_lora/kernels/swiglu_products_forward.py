"""SwiGLU's forward, with the matmul of its output and the down projection's A in the same pass.

    h = silu(gate) up,  z = h A'     for A [rank, intermediate]

(or gelu, by tanh, for silu: GeGLU). DoRA scales gate and up before it (`magnitudes.py`).

With z at hand the down projection can grow in K, y = [h | z] [W | s B]', like the projections that
widen. Growing in N would not need another pass over h either, but it costs time twice. y would get
extra columns for z, and 2,048 + 32 of them fill tiles worse than 2,048: 1.197 ms instead of 1.097
on an H200, at 16,384 tokens. And the adapter's output would be added to y afterwards, in a separate
pass (0.106 ms).

Traffic per layer, at 16,384 tokens, hidden 2,048, intermediate 11,008, rank 32, in bf16: 3 tensors
of 361 MB, the same as without z; partial sums of 2.1 MB a split each way; and A, 0.7 MB, from L2
for every tile's height of rows, which is 361 MB for 32 rows. It takes 0.323 ms, and 0.268 without
z. The matmul is added to a copy of the residual that the norm writes: 67 MB in the norm and 134 in
the matmul. Otherwise y would take 67 MB, and a pass that reads y and the residual and writes
their sum 201.

A program owns some rows and a range of columns, and keeps one sum [rows, rank] in registers. A
second kernel adds up the ranges. Deterministic. tl.dot gets h as it is stored and adds in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.dropout import Mask, is_kept
from fused_mlp.launching import cdiv, launch, next_power_of_2, on_device_of

from .activation import activate
from .autotune import fastest
from .magnitudes import ColumnScale, operands_of, rescale
from .tiling import MAX_BLOCK_RANK, Tiling, dots_in_fp32, keep, stages, tilings_for_masks

SUM_ROWS = 64  # a program of the second kernel


def forward_tiling(rows: int) -> Tiling:
    """About 512 programs for 132 multiprocessors: on an H200 one range of columns is best at 16,384
    rows, and 8 are at 2,048."""
    tile_rows, programs = 32, 512
    splits = max(programs // max(cdiv(rows, tile_rows), 1), 1)
    return Tiling(rows=tile_rows, columns=128, splits=splits, warps=4, stages=2)


# Where that was not measured: more on its way, more warps, narrower, lower and higher tiles.
_OTHERS = (
    {"stages": 3},
    {"warps": 8},
    {"columns": 64, "stages": 4},
    {"rows": 16, "stages": 3},
    {"rows": 64, "columns": 64, "stages": 3},
    {"rows": 64, "warps": 8},
)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_forward_product_kernel(
    gate_up_ptr,  # [rows, 2 intermediate]
    A_ptr,  # [rank, intermediate]
    factor_ptr,  # [2 intermediate] fp32, what scales gate_up, or None
    bias_ptr,  # [2 intermediate], what is added then, or None
    hidden_ptr,  # [rows, intermediate], written, or None
    bits_ptr,  # of the mask of hidden for the product, or None
    partials_ptr,  # [splits, rows, BLOCK_RANK] fp32, written
    gate_up_row_stride,
    A_row_stride,
    hidden_row_stride,
    rows,
    intermediate,
    columns_of_a_split,
    rank,
    scale,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    IS_GELU: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    # int64: from 97,542 rows of 2 x 11,008 on, an int32 offset overflows
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    split = tl.program_id(1)
    k = tl.arange(0, BLOCK_RANK)
    total = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
    start = split * columns_of_a_split
    end = tl.minimum(start + columns_of_a_split, intermediate)
    for first in range(start, end, BLOCK_COLUMNS):
        column = (first + tl.arange(0, BLOCK_COLUMNS))[None, :]
        mask = (row < rows) & (column < end)
        # 0.0 outside: there hidden is 0.0, and adds nothing to a sum
        gate_tile = gate_up_ptr + row * gate_up_row_stride + column
        gate = tl.load(gate_tile, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_tile + intermediate, mask=mask, other=0.0).to(tl.float32)
        gate = rescale(gate, factor_ptr, bias_ptr, column, column < end)
        up = rescale(up, factor_ptr, bias_ptr, column + intermediate, column < end)
        activated, _ = activate(gate, IS_GELU, IN_FP32)
        hidden = (activated * up).to(gate_up_ptr.dtype.element_ty)
        if hidden_ptr is not None:
            tl.store(hidden_ptr + row * hidden_row_stride + column, hidden, mask=mask)
        A_tile = A_ptr + k.to(tl.int64)[:, None] * A_row_stride + column
        A = tl.load(A_tile, mask=(k < rank)[:, None] & (column < end), other=0.0)
        if bits_ptr is not None:
            first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
            is_one = is_kept(bits_ptr, first_row, row, column, intermediate)
            hidden = tl.where(is_one, hidden, 0.0).to(hidden.dtype)
        hidden = keep(hidden, IN_FP32)
        if IN_FP32:
            hidden, A = hidden.to(tl.float32), A.to(tl.float32)
        total = tl.dot(hidden, tl.trans(A), total, input_precision="ieee")
    if bits_ptr is not None:
        total = total * scale
    tile = partials_ptr + (split.to(tl.int64) * rows + row) * BLOCK_RANK + k[None, :]
    tl.store(tile, total, mask=row < rows)


@triton.jit(do_not_specialize=["splits", "rows"])
def _sum_z_kernel(
    partials_ptr,  # [splits, rows, BLOCK_RANK] fp32
    z_ptr,  # [rows, rank], written
    copy_ptr,  # [rows, rank], written, or None
    z_row_stride,
    copy_row_stride,
    splits,
    rows,
    rank,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    k = tl.arange(0, BLOCK_RANK)[None, :]
    mask = (row < rows) & (k < rank)
    total = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
    for split in range(splits):
        tile = partials_ptr + (row + split * rows) * BLOCK_RANK + k
        total += tl.load(tile, mask=mask, other=0.0)
    z = total.to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + row * z_row_stride + k, z, mask=mask)
    if copy_ptr is not None:
        tl.store(copy_ptr + row * copy_row_stride + k, z, mask=mask)


def swiglu_forward_product(
    gate_up: Tensor,
    A: Tensor,
    hidden: Tensor | None,
    copy: Tensor | None = None,
    mask: Mask | None = None,
    activation: str = "silu",
    scale: ColumnScale | None = None,
) -> Tensor:
    """Return a new z = hidden A' [rows, rank], for hidden = silu(gate) * up.

    Equivalent PyTorch, for gate_up [rows, 2 intermediate] and A [rank, intermediate]; hidden and
    copy are written if given::

        hidden.copy_(swiglu_forward(*gate_up.chunk(2, dim=1)))  # or geglu_forward, of fused_mlp
        z = hidden @ A.t()
        copy.copy_(z)

    Given the columns of [hidden | z] as hidden and copy, it writes the input of a matmul that grows
    in K. With a mask, z is computed from what the mask keeps of hidden, scaled. With "gelu_tanh"
    for the activation it is GeGLU's. With a scale, [gate | up] is scaled before it. The sums are
    fp32 and round once.
    """
    rows, rank = gate_up.shape[0], A.shape[0]
    z = gate_up.new_empty(rows, rank)
    if rows and rank:
        with on_device_of(gate_up):
            _launch(gate_up, A[:MAX_BLOCK_RANK], hidden, z, copy, mask, activation, scale)
            for first in range(MAX_BLOCK_RANK, rank, MAX_BLOCK_RANK):
                some = slice(first, first + MAX_BLOCK_RANK)
                more = None if copy is None else copy[:, some]
                _launch(gate_up, A[some], None, z[:, some], more, mask, activation, scale)
    return z


def _launch(
    gate_up: Tensor,
    A: Tensor,
    hidden: Tensor | None,
    z: Tensor,
    copy: Tensor | None,
    mask: Mask | None,
    activation: str,
    scale: ColumnScale | None,
) -> None:
    """Both kernels, for as many ranks as A has rows."""
    rows, (rank, intermediate) = gate_up.shape[0], A.shape
    block_rank = max(next_power_of_2(rank), 16)  # tl.dot wants 16 at least
    kernel = _swiglu_forward_product_kernel

    def run(tiling: Tiling) -> None:
        columns_of_a_split = (
            cdiv(cdiv(intermediate, tiling.splits), tiling.columns) * tiling.columns
        )
        splits = cdiv(intermediate, columns_of_a_split)
        elements = tiling.columns * (2 * tiling.rows + block_rank)
        partials = gate_up.new_empty(splits, rows, block_rank, dtype=torch.float32)
        launch(
            kernel, (cdiv(rows, tiling.rows), splits),
            gate_up, A, *operands_of(scale), hidden, mask and mask.bits, partials,
            gate_up.stride(0), A.stride(0), 0 if hidden is None else hidden.stride(0),
            rows, intermediate, columns_of_a_split, rank, mask.scale if mask else 1.0,
            tiling.rows, tiling.columns, block_rank, activation == "gelu_tanh",
            dots_in_fp32(kernel, gate_up),
            num_warps=tiling.warps, num_stages=stages(tiling, elements, gate_up),
        )  # fmt: skip
        launch(
            _sum_z_kernel, (cdiv(rows, SUM_ROWS),),
            partials, z, copy, z.stride(0), 0 if copy is None else copy.stride(0),
            splits, rows, rank, SUM_ROWS, block_rank, num_warps=4,
        )  # fmt: skip

    shape = intermediate, rank, hidden is None, mask is None, activation, scale is None
    others = _OTHERS if mask is None else tilings_for_masks(_OTHERS)
    run(fastest(kernel, gate_up, rows, shape, forward_tiling(rows), others, run))

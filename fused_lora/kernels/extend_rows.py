"""Rows [x | z], z = x A', for a projection that is added to the residual.

A bordered matmul reads its input as [x | x A']. Norms and our own attention write x there at once.
The output of a library's attention is copied there by `extend_rows`, in the pass that makes z.

Why not add the adapter after the matmul? A y that is rounded to bf16 and a residual in bf16 often
add up to an exact tie, and then the sign of the smallest z B' decides it. Adapters of 1e-6 changed
the loss 2.4 times as much as in fp32. One matmul with one rounding gets them right on average.

Traffic in tensors of x's size: 2, or 1 where x is in place. Sums are fp32 and round once, at the
store. Deterministic.
"""

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch, next_power_of_2

from .tiling import MAX_BLOCK_RANK, Tiling, dots_in_fp32, stages

# The fastest tried on an H100, at 2,048 to 16,384 rows of 2,048 and of 4,096, or within 2% of it.
TILING = Tiling(rows=64, columns=128, splits=1, warps=4, stages=3)


@triton.jit(do_not_specialize=["rows"])
def _extend_rows_kernel(
    x_ptr,  # [rows, columns]
    A_ptr,  # [rank, columns]
    extended_ptr,  # [rows, columns + rank], written, its first columns only where x is elsewhere
    z_ptr,  # [rows, rank], written
    rows,
    columns,
    rank,
    x_row_stride,
    A_row_stride,
    extended_row_stride,
    z_row_stride,
    COPIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    k = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    copies = COPIES & (tl.program_id(1) == 0)  # once, and not for each block of the rank
    z = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0)
        A_tile = A_ptr + k.to(tl.int64)[:, None] * A_row_stride + column
        A = tl.load(A_tile, mask=(k < rank)[:, None] & (column < columns), other=0.0)
        if COPIES:
            tl.store(extended_ptr + row * extended_row_stride + column, x, mask=mask & copies)
        if IN_FP32:
            x, A = x.to(tl.float32), A.to(tl.float32)
        z = tl.dot(x, tl.trans(A), z, input_precision="ieee")
    z = z.to(z_ptr.dtype.element_ty)
    mask = (row < rows) & (k < rank)[None, :]
    tl.store(z_ptr + row * z_row_stride + k[None, :], z, mask=mask)
    tl.store(extended_ptr + row * extended_row_stride + columns + k[None, :], z, mask=mask)


def extend_rows(x: Tensor, A: Tensor, extended: Tensor, z: Tensor) -> None:
    """Write x and, beside it, x A' into extended, and x A' once more into z.

    Equivalent PyTorch, for x [rows, columns], A [rank, columns], z [rows, rank] and extended
    [rows, columns + rank], all of one dtype, the product summed in fp32::

        z.copy_(x @ A.t())
        extended.copy_(torch.cat((x, z), 1))

    x may be extended's first columns, which then stay. z is for whoever saves it, and need not
    keep all of extended.
    """
    kernel = _extend_rows_kernel
    (rows, columns), rank = x.shape, A.shape[0]
    if rows == 0:
        return
    tile_rows = min(max(next_power_of_2(rows), 16), TILING.rows)  # tl.dot wants 16 at least
    block_rank = min(max(next_power_of_2(rank), 16), MAX_BLOCK_RANK)
    launch(
        kernel, (cdiv(rows, tile_rows), cdiv(rank, block_rank)),
        x, A, extended, z, rows, columns, rank,
        x.stride(0), A.stride(0), extended.stride(0), z.stride(0),
        x.data_ptr() != extended.data_ptr(), tile_rows, TILING.columns, block_rank,
        dots_in_fp32(kernel, x), num_warps=TILING.warps,
        num_stages=stages(TILING, (tile_rows + block_rank) * TILING.columns, x),
    )  # fmt: skip

"""RMSNorm and its backward, writing FP8 codes (`fp8_rows.py`) without a separate pass.

    norm_codes              y = x r w,   r = 1 / sqrt(mean(x^2) + eps)      as codes alone
    norm_backward_codes     grad_x = r (g - n mean(g n)) + grad_residual,   n = x r,  g = grad_y w
                            in bf16, and times W's scales as codes: the gradient that o takes

where w is the weight, or 1 + weight if that is zero-centred. A program holds a row in registers to
average its squares, so it can also find the row's largest element.

Traffic in tensors of x's size in bf16: the forward takes 1.5, where y in bf16 takes 2 and coding it
another 1.5. The backward takes 4.5, where the gradient takes 4 and coding it another 1.5.
Arithmetic is fp32, and rounds once to e4m3. Deterministic.
"""

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import is_interpreted, launch

from .fp8_rows import new_codes, store_row
from .row_norm import load_weight, norm_row, norm_row_backward
from .rows import block_of


@triton.jit
def _norm_codes_kernel(
    x_ptr,  # [rows, hidden]
    weight_ptr,  # [hidden]
    codes_ptr,  # [rows, padded], its first columns are written
    scales_ptr,  # [rows], written
    rstd_ptr,  # [rows], written
    x_row_stride,
    padded,
    hidden,
    eps,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    weight = load_weight(weight_ptr, columns, mask, ZERO_CENTERED)
    y, rstd = norm_row(x, weight, hidden, eps)
    y = tl.where(mask, y, 0.0)  # not 0 times an rstd of infinity
    store_row(y, codes_ptr + row * padded, scales_ptr + row, columns, mask, ROUND)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _norm_backward_codes_kernel(
    grad_y_ptr,  # [rows, hidden]
    grad_residual_ptr,  # [rows, hidden]
    x_ptr,  # [rows, hidden], what was normalised
    weight_ptr,  # [hidden]
    rstd_ptr,  # [rows] fp32
    column_scales_ptr,  # [hidden], what codes are multiplied by
    grad_x_ptr,  # [rows, hidden], written
    codes_ptr,  # [rows, padded], its first columns are written
    scales_ptr,  # [rows], written
    grad_y_row_stride,
    grad_residual_row_stride,
    x_row_stride,
    grad_x_row_stride,
    padded,
    hidden,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + row * grad_y_row_stride + columns, mask=mask, other=0.0)
    residual_row = grad_residual_ptr + row * grad_residual_row_stride
    residual = tl.load(residual_row + columns, mask=mask, other=0.0).to(tl.float32)
    weight = load_weight(weight_ptr, columns, mask, ZERO_CENTERED)
    column_scales = tl.load(column_scales_ptr + columns, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    grad_x, _ = norm_row_backward(grad_y.to(tl.float32), x, weight, rstd, hidden)
    grad_x = (grad_x + residual).to(grad_x_ptr.dtype.element_ty)
    tl.store(grad_x_ptr + row * grad_x_row_stride + columns, grad_x, mask=mask)
    y = tl.where(mask, grad_x.to(tl.float32) * column_scales, 0.0)
    store_row(y, codes_ptr + row * padded, scales_ptr + row, columns, mask, ROUND)


def norm_codes(
    x: Tensor, weight: Tensor, eps: float, padded: int, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new (codes [rows, padded] in e4m3, scales [rows, 1] and rstd [rows], both in fp32) of
    the norm of x [rows, hidden]. Only the first columns of the codes are written.

    Equivalent PyTorch, for x and weight [hidden] of one dtype, bf16, fp16 or fp32::

        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        y = x.float() * rstd[:, None] * weight.float()  # zero_centered: 1 + weight.float()
        scales = y.abs().amax(1, keepdim=True) / 224
        codes[:, :hidden] = (y / scales).to(torch.float8_e4m3fn)

    The scale of a row with NaN or infinity in it is NaN. Rows of x may lie any stride apart.
    """
    rows, hidden = x.shape
    codes, scales = new_codes(x, padded)
    rstd = x.new_empty(rows, dtype=scales.dtype)
    if rows:
        block, warps = block_of(hidden)
        launch(
            _norm_codes_kernel, (rows,), x, weight, codes, scales, rstd, x.stride(0), padded,
            hidden, eps, zero_centered, block, is_interpreted(_norm_codes_kernel), num_warps=warps,
        )  # fmt: skip
    return codes, scales, rstd


def norm_backward_codes(
    grad_y: Tensor, grad_residual: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_x: Tensor,
    column_scales: Tensor, padded: int, zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the gradient of x, which was normalised and goes on as the residual, into grad_x.

    Returns new (codes [rows, padded] in e4m3, scales [rows, 1] in fp32) of grad_x times
    column_scales. Only the first columns of the codes are written.

    Equivalent PyTorch, for [rows, hidden] tensors of one dtype and column_scales [hidden] in fp32::

        residual_norm_backward(grad_y, grad_residual, x, weight, rstd, grad_x, zero_centered)
        return fp8_rows(grad_x, padded, column_scales)
    """
    rows, hidden = x.shape
    codes, scales = new_codes(x, padded)
    if rows:
        block, warps = block_of(hidden)
        launch(
            _norm_backward_codes_kernel, (rows,),
            grad_y, grad_residual, x, weight, rstd, column_scales, grad_x, codes, scales,
            grad_y.stride(0), grad_residual.stride(0), x.stride(0), grad_x.stride(0), padded,
            hidden, zero_centered, block, is_interpreted(_norm_backward_codes_kernel),
            num_warps=warps,
        )  # fmt: skip
    return codes, scales

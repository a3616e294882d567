"""RMSNorm to codes of FP8 (`fp8_rows.py`), without rows in bf16 in between.

    y = x r w,   r = 1 / sqrt(mean(x^2) + eps)      as codes with a scale for each row

where w is the weight, or 1 + weight if that is zero-centred. A program has a row in registers, as
the mean of its squares wants, and so its largest.

Traffic in tensors of x's size in bf16: 1.5, where y in bf16 is 2 and its codes 1.5. Arithmetic is
fp32, and rounds once to e4m3. Deterministic.
"""

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import launch

from ..rms_norm import block_of, rstd_of
from .fp8_rows import ROW_LARGEST, SMALLEST, e4m3, new_codes, rounds
from .residual import check_hidden
from .rows import check_rows


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
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    rstd = rstd_of(x, hidden, eps)
    y = x * rstd * weight
    y = tl.where(mask, y, 0.0)  # not 0 times an rstd of infinity
    largest = tl.maximum(tl.max(tl.abs(y), 0), SMALLEST)
    not_finite = tl.sum(y * 0.0, 0)  # or NaN, which may get lost of maxima and casts
    codes = e4m3(y * (ROW_LARGEST / largest), ROUND)
    tl.store(codes_ptr + row * padded + columns, codes, mask=mask)
    tl.store(scales_ptr + row, largest / ROW_LARGEST + not_finite)
    tl.store(rstd_ptr + row, rstd)


def norm_codes(
    x: Tensor, weight: Tensor, eps: float, padded: int, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [rows, padded] in e4m3, of which the first columns are written, scales [rows, 1] and
    rstd [rows], both in fp32) of the norm of x [rows, hidden], new.

    Equivalent PyTorch, for x and weight [hidden] of one dtype, bf16, fp16 or fp32::

        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        y = x.float() * rstd[:, None] * weight.float()  # zero_centered: 1 + weight.float()
        scales = y.abs().amax(1, keepdim=True) / 224
        codes[:, :hidden] = (y / scales).to(torch.float8_e4m3fn)

    The scale of a row with NaN or infinity in it is NaN. Rows of x may lie any stride apart.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or no kernel can run on them.
    """
    check_rows("norm_codes", _norm_codes_kernel, x.shape, x=x)
    check_hidden("norm_codes", x, weight)
    rows, hidden = x.shape
    codes, scales = new_codes(x, padded)
    rstd = x.new_empty(rows, dtype=scales.dtype)
    if rows:
        block, warps = block_of(hidden)
        launch(
            _norm_codes_kernel, (rows,), x, weight, codes, scales, rstd, x.stride(0), padded,
            hidden, eps, zero_centered, block, rounds(_norm_codes_kernel), num_warps=warps,
        )  # fmt: skip
    return codes, scales, rstd

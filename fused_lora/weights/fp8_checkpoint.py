"""Base layers that are FP8 in the checkpoint, in FP8 layers and beside them.

A layer that runs whole in FP8 (`layer/fp8/`) multiplies codes with a scale for each row. Codes from
a checkpoint with such scales lie in the buffer unchanged; those with a single scale are copied.
Codes with block scales are quantised again, one weight at a time, because the sums of a matmul run
over many blocks. The parameters, also as saved, stay the checkpoint's.

transformers' matmuls of these layers have no gradient. So if a layer steps aside in training, its
base layers multiply by the dequantised codes, in temporary memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foreign.ownership import STAND_IN
from ..foreign.versions import class_forward
from ..kernels.fp8_rows import codes_and_scales
from ..reading.codes import BlockScales, scales_of, why_not_codes
from ..reading.site import FusedForward

HOOK = "ct_decompress_hook"  # where compressed-tensors keeps its hook's handle


def rowwise_codes(weight: Tensor, scales: BlockScales) -> tuple[Tensor, Tensor]:
    """Return (codes [out, in], scales [out] in fp32): the checkpoint's, if it has row scales."""
    rows, _ = weight.shape
    grid = scales.over(weight.shape)
    if grid.shape[1] > 1:
        return codes_and_scales(_dequantised(weight, scales))
    return weight.detach(), grid[:, 0].repeat_interleave(scales.block[0])[:rows]


def _dequantised(weight: Tensor, scales: BlockScales) -> Tensor:
    """Return the dequantised codes, a new [out, in] in fp32."""
    rows, columns = weight.shape
    block_rows, block_columns = scales.block
    factors = scales.over(weight.shape).repeat_interleave(block_rows, 0)[:rows]
    return weight.float().mul_(factors.repeat_interleave(block_columns, 1)[:, :columns])


def drop_idle_hook(model: nn.Module) -> None:
    """Remove compressed-tensors' hook that decompresses a model at its first forward, if nothing is
    left to decompress. It would wrap every module's forward, including ours."""
    for module in model.modules():
        hook = vars(module).get(HOOK)
        if hook and not any(hasattr(one, "quantization_scheme") for one in module.modules()):
            hook.remove()
            delattr(module, HOOK)


# --- where a layer steps aside -------------------------------------------------------------------


def let_train(base: nn.Module) -> None:
    """Give a layer of codes an input gradient, until `unfuse`."""
    base.forward = FusedForward(_forward_of_codes, base, STAND_IN).forward


def _forward_of_codes(base: Any, _: frozenset[str], x: Tensor) -> Tensor:
    scales = scales_of(base)
    # checkpointing first runs a training layer without gradients, and must get the same result
    trains = base.training or torch.is_grad_enabled()
    if not trains or scales is None or why_not_codes(base) is not None:
        return class_forward(base, x)
    y = _LinearOfCodes.apply(x, base.weight, *scales)
    return y if base.bias is None else y + base.bias


class _LinearOfCodes(torch.autograd.Function):
    """Matmul x W' that saves only the codes: ``F.linear(x, W)`` would keep each W for backward."""

    @staticmethod
    def forward(ctx, x, weight, values, block):
        ctx.save_for_backward(weight, values)
        ctx.block = block
        return F.linear(x, _dequantised(weight, BlockScales(values, block)).to(x.dtype))

    @staticmethod
    def backward(ctx, dy):
        weight, values = ctx.saved_tensors
        W = _dequantised(weight, BlockScales(values, ctx.block))
        return dy @ W.to(dy.dtype), None, None, None

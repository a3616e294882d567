"""Base layers that are FP8 in the checkpoint: their codes and scales, as transformers keeps them.

A layer that runs whole in FP8 (`layer/fp8/`) multiplies codes with a scale for each row. Codes from
a checkpoint with such scales lie in the buffer unchanged; those with a single scale are copied.
Codes with block scales are quantised again, one weight at a time, because the sums of a matmul run
over many blocks. The parameters, also as saved, stay the checkpoint's.

transformers' matmuls of these layers have no gradient. So if a layer steps aside in training, its
base layers multiply by the dequantised codes, in temporary memory.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foreign.forwards import STAND_IN, why_not_own_forward
from ..foreign.versions import class_forward
from ..kernels.fp8_rows import E4M3, codes_and_scales
from .site import FusedForward

COMPRESSED = "load with CompressedTensorsConfig(use_optimized_inference=True)"
HOOK = "ct_decompress_hook"  # where compressed-tensors keeps its hook's handle
# The name of the parameter with the scales, by class.
SCALES = {
    "transformers.integrations.finegrained_fp8.FP8Linear": "weight_scale_inv",
    "transformers.integrations.compressed_tensors.CompressedTensorsFP8Linear": "weight_scale",
}


class BlockScales(NamedTuple):
    """Scales of a weight's codes, in the order of its blocks. block: the size, [rows, columns]."""

    values: Tensor
    block: tuple[int, int]

    def over(self, shape: torch.Size) -> Tensor:
        """Return the scales as [blocks of rows, blocks of columns] in fp32."""
        return self.values.detach().float().reshape(self._grid(shape))

    def fits(self, shape: torch.Size) -> bool:
        rows, columns = self._grid(shape)
        return self.values.numel() == rows * columns

    def _grid(self, shape: torch.Size) -> tuple[int, int]:
        (rows, columns), (block_rows, block_columns) = shape, self.block
        return -(-rows // block_rows), -(-columns // block_columns)


def is_of_codes(base: Any) -> bool:
    """Return True for a transformers linear layer whose weight is FP8 codes."""
    return _scales_in(base) is not None


def _scales_in(base: Any) -> str | None:
    cls = type(base)
    if cls is nn.Linear:  # most are, and this runs in every forward
        return None
    return SCALES.get(f"{cls.__module__}.{cls.__qualname__}")


def scales_of(base: Any) -> BlockScales | None:
    """Return the scales of a linear layer's codes, None if its weight is not codes."""
    name = _scales_in(base)
    if name is None:
        return None
    rows, columns = base.weight.shape
    # compressed-tensors has one per row, the other class one per block or a single one
    block = (1, columns) if name == "weight_scale" else base.block_size or (rows, columns)
    return BlockScales(getattr(base, name), tuple(block))


def why_not_codes(base: Any) -> str | None:
    """Return the reason if such a layer's weight is not its class's frozen codes."""
    weight, scales = base.weight, scales_of(base)
    if type(weight) not in (nn.Parameter, Tensor) or weight.dtype != E4M3:
        return (
            f"its base weight is {weight.dtype}, no longer FP8 codes: load the model anew and do "
            "not cast it"
        )
    if weight.requires_grad:
        return "its base weight is trained: freeze it, requires_grad_(False)"
    if scales is None or not scales.fits(weight.shape):
        return f"its base weight {list(weight.shape)} has scales for another size"
    return why_not_own_forward(base)


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

"""Base layers that are FP8 in the checkpoint: their codes and scales, as transformers keeps them.

A layer that runs whole in FP8 (`layer/fp8/`) multiplies codes with a scale for each row. Those of a
checkpoint that has such scales lie in the buffer as they are; those with one scale for all are
copied. Those with a scale for each block are made codes anew, one weight at a time: what a product
sums over lies in many blocks. The parameters, and what is saved of them, stay the checkpoint's.

transformers' own products of these layers have no gradient. So where a layer steps aside in
training, its base layers multiply what their codes stand for, in memory of the moment.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.fp8_rows import E4M3, codes_and_scales
from ..foreign.forwards import STAND_IN, why_not_own_forward
from ..foreign.versions import class_forward
from ..site import FusedForward

COMPRESSED = "load with CompressedTensorsConfig(use_optimized_inference=True)"
HOOK = "ct_decompress_hook"  # where compressed-tensors keeps the handle of its own
# The parameter that has the scales, by class.
SCALES = {
    "transformers.integrations.finegrained_fp8.FP8Linear": "weight_scale_inv",
    "transformers.integrations.compressed_tensors.CompressedTensorsFP8Linear": "weight_scale",
}


class BlockScales(NamedTuple):
    """Scales of a weight's codes, in the order of its blocks, each of these [rows, columns]."""

    values: Tensor
    block: tuple[int, int]

    def over(self, shape: torch.Size) -> Tensor:
        """[blocks of rows, blocks of columns] in fp32"""
        return self.values.detach().float().reshape(self._grid(shape))

    def fits(self, shape: torch.Size) -> bool:
        rows, columns = self._grid(shape)
        return self.values.numel() == rows * columns

    def _grid(self, shape: torch.Size) -> tuple[int, int]:
        (rows, columns), (of_rows, of_columns) = shape, self.block
        return -(-rows // of_rows), -(-columns // of_columns)


def is_of_codes(base: Any) -> bool:
    """Return True for a linear layer of transformers' whose weight is FP8 codes."""
    return _scales_in(base) is not None


def _scales_in(base: Any) -> str | None:
    cls = type(base)
    if cls is nn.Linear:  # as most are, at every forward
        return None
    return SCALES.get(f"{cls.__module__}.{cls.__qualname__}")


def scales_of(base: Any) -> BlockScales | None:
    """The scales of a linear layer's codes, None where its weight is no codes."""
    name = _scales_in(base)
    if name is None:
        return None
    rows, columns = base.weight.shape
    # compressed-tensors' are one for each row, the others' of blocks, or one for all
    block = (1, columns) if name == "weight_scale" else base.block_size or (rows, columns)
    return BlockScales(getattr(base, name), tuple(block))


def why_not_codes(base: Any) -> str | None:
    """Return the reason if such a layer's weight is not the frozen codes that its class has."""
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


def hint_for_layer(base: nn.Module) -> str:
    """Say what to do with a layer of codes, where it may not run as it is."""
    return ": ask for layer=True, fp8=True, or load the model in bf16" if is_of_codes(base) else ""


def hint_for_codes(weight: Tensor) -> str:
    """Say what to do with the codes that compressed-tensors keeps until a model's first forward."""
    return f"is FP8 codes: {COMPRESSED}" if weight.dtype == E4M3 else ""


def rowwise_codes(weight: Tensor, scales: BlockScales) -> tuple[Tensor, Tensor]:
    """(codes [out, in], scales [out] in fp32), the checkpoint's own where these are of rows."""
    rows, _ = weight.shape
    grid = scales.over(weight.shape)
    if grid.shape[1] > 1:
        return codes_and_scales(_dequantised(weight, scales))
    return weight.detach(), grid[:, 0].repeat_interleave(scales.block[0])[:rows]


def may_lie_in_buffer(scales: BlockScales) -> bool:
    """Return True if the codes may be a view of a buffer, rows apart: the other class's kernels
    want them side by side."""
    return scales.block[0] == 1


def _dequantised(weight: Tensor, scales: BlockScales) -> Tensor:
    """The numbers that codes stand for, [out, in] in fp32, new."""
    rows, columns = weight.shape
    of_rows, of_columns = scales.block
    factors = scales.over(weight.shape).repeat_interleave(of_rows, 0)[:rows]
    return weight.float().mul_(factors.repeat_interleave(of_columns, 1)[:, :columns])


def drop_idle_hook(model: nn.Module) -> None:
    """Take away compressed-tensors' hook that decompresses a model at its first forward, where
    nothing of it is to be: it would wrap the forward of every module, and with them ours."""
    for module in model.modules():
        hook = vars(module).get(HOOK)
        if hook and not any(hasattr(one, "quantization_scheme") for one in module.modules()):
            hook.remove()
            delattr(module, HOOK)


# --- where a layer steps aside -------------------------------------------------------------------


def let_train(base: nn.Module) -> None:
    """Let a layer of codes have a gradient of its input, until `unfuse`."""
    base.forward = FusedForward(_forward_of_codes, base, STAND_IN).forward


def _forward_of_codes(base: Any, _: frozenset[str], x: Tensor) -> Tensor:
    scales = scales_of(base)
    # checkpointing runs a layer in training without gradients first: it is to come to the same
    trains = base.training or torch.is_grad_enabled()
    if not trains or scales is None or why_not_codes(base) is not None:
        return class_forward(base, x)
    y = _LinearOfCodes.apply(x, base.weight, *scales)
    return y if base.bias is None else y + base.bias


class _LinearOfCodes(torch.autograd.Function):
    """x W' of codes, which alone are saved: ``F.linear(x, W)`` would keep each W for backward."""

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

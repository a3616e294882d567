"""Codes and scales of base layers that are FP8 in the checkpoint, as transformers keeps them.

`weights/fp8_checkpoint.py` trains on them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..foreign.ownership import why_not_own_forward
from ..kernels.fp8_rows import E4M3

COMPRESSED = "load with CompressedTensorsConfig(use_optimized_inference=True)"
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

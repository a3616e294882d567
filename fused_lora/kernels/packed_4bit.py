"""4-bit weights: bitsandbytes' NF4 and FP4, and MXFP4.

    w = values[code] absmax         [out, in], with one absmax for each block of 32 to 4,096 values

A code is half a byte, the first of two in the high half. It chooses one of a format's 16 values.
With double quantisation absmax is itself quantised, to a byte:

    absmax = values[code] absmax + offset

MXFP4 is double quantisation with powers of two: its absmax, the scale of 32 values, is 2^(code -
127). The first of two codes is in the low half. bf16 holds its weights exactly.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp.launching import cdiv

FP32 = torch.float32

# Those of bitsandbytes.
BLOCKSIZES = tuple(2**i for i in range(5, 13))

PART = 2**24  # values that `dequantized` holds in fp32 at once


class Nested(NamedTuple):
    """Double quantisation: absmax = values[code] * absmax[block // blocksize] + offset, in fp32.

    values: [256] fp32. absmax: [ceil(blocks / blocksize)] fp32. offset: [] fp32. blocksize: a power
    of two, 256 in bitsandbytes.
    """

    values: Tensor
    absmax: Tensor
    offset: Tensor
    blocksize: int


class Packed4bit(NamedTuple):
    """A weight [out, in] in 4 bits.

    codes: contiguous, of any dtype: two codes a byte, the first in the high half, in the order of
        the weight's rows.
    shape: (out, in). values: [16] fp32, the format's.
    absmax: [blocks] fp32, or uint8 if nested. blocksize: a power of two from 32 to 4096.
    is_low_first: the first of two codes is in the low half.
    """

    codes: Tensor
    shape: tuple[int, int]
    values: Tensor
    absmax: Tensor
    blocksize: int
    nested: Nested | None
    is_low_first: bool = False


def dequantized(weight: Packed4bit, dtype: torch.dtype) -> Tensor:
    """Return a weight [out, in] of whole blocks, dequantised by PyTorch's operations into new
    memory. The bits are the kernel's."""
    codes, absmax = weight.codes.view(torch.uint8).flatten(), weight.absmax
    byte = torch.arange(256, device=codes.device)
    halves = (byte & 15, byte >> 4) if weight.is_low_first else (byte >> 4, byte & 15)
    pairs = weight.values[torch.stack(halves, dim=1)]
    if weight.nested is not None:
        values, outer, offset, blocksize = weight.nested
        outer = outer.repeat_interleave(blocksize)[: len(absmax)]
        absmax = values[absmax.int()] * outer + offset
    whole = codes.new_empty(weight.shape, dtype=dtype)
    blocks = whole.view(-1, weight.blocksize)
    step = max(1, PART // weight.blocksize)
    parts = codes.split(step * weight.blocksize // 2), blocks.split(step), absmax.split(step)
    for part, into, scales in zip(*parts, strict=True):
        torch.mul(pairs[part.int()].view_as(into), scales[:, None], out=into)
    return whole


def misfits(weight: Packed4bit, into: Tensor, first_rows: Tensor) -> Iterator[tuple[str, str]]:
    """Yield (given, wanted) where a weight and its rows do not fit together or to the first."""
    codes, shape, values, absmax, blocksize, nested, _ = weight
    if into.ndim != 2 or into.shape != tuple(shape):
        yield f"shape {list(shape)} and rows {list(into.shape)}", "[out, in] for both"
    elif into.numel() and (into.stride(1) != 1 or into.stride(0) < into.shape[1]):
        yield f"rows with strides {into.stride()}", "contiguous rows that do not overlap"
    if into.dtype != first_rows.dtype:
        yield f"rows in {into.dtype}", f"{first_rows.dtype}, like weight 0"
    if blocksize not in BLOCKSIZES:
        yield f"blocksize {blocksize}", "a power of two from 32 to 4096"
    blocks, size = cdiv(into.numel(), blocksize), cdiv(into.numel(), 2)
    if codes.nbytes < size or not codes.is_contiguous():
        contiguous = "contiguous" if codes.is_contiguous() else "not contiguous"
        yield f"{codes.nbytes} bytes of codes, {contiguous}", f"{size} contiguous bytes"
    wanted_tensors = [("values", values, FP32, 16)]
    if nested is None:
        wanted_tensors.append(("absmax", absmax, FP32, blocks))
    else:
        if nested.blocksize < 1 or nested.blocksize.bit_count() > 1:
            yield f"nested.blocksize {nested.blocksize}", "a power of two"
        wanted_tensors += [
            ("absmax", absmax, torch.uint8, blocks),
            ("nested.values", nested.values, FP32, 256),
            ("nested.absmax", nested.absmax, FP32, cdiv(blocks, nested.blocksize)),
            ("nested.offset", nested.offset, FP32, 1),
        ]
    for name, tensor, dtype, size in wanted_tensors:
        if tensor.dtype != dtype or tensor.numel() != size or not tensor.is_contiguous():
            yield f"{name} {list(tensor.shape)} in {tensor.dtype}", f"{size} contiguous {dtype}"
    for tensor in (codes, into, *(tensor for _, tensor, *_ in wanted_tensors)):
        if tensor.device != first_rows.device:
            yield f"a tensor on {tensor.device}", f"all on {first_rows.device}"

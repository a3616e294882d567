"""Dropout before an adapter's A: its masks, one bit an element, and what they let through.

PEFT computes, in training, for each projection by itself

    z = dropout(x) A',      dropout(x) = x m,      m = 0 or 1 / (1 - p)

and so dA = p' (x m) and dx = m (p A) for p = s dy B. A mask is kept as bits, a sixteenth of a bf16
tensor's bytes, so that backward has it without drawing it again, and a kernel that reads x anyhow
loads one word for each 32 of a column's elements.

A word of 32 bits, each 1 with a probability of keep / 65,536, is made of 16 random words, one for
each bit of `keep` from the least significant on, by `word | random` where that bit is 1 and `word &
random` where it is 0: whatever probability P a bit had, it then has (1 + P) / 2, or P / 2. The word
is the mask: nothing is compared and nothing packed. The random words are Philox's, for a counter of
(place in the mask, which four of the 16, which projection) and a seed that lies on the device, so
that a CUDA graph that draws the seed draws other masks at each replay. By arithmetic, the masks of
Qwen2.5-3B's seven projections at 16,384 tokens (48 MB) are 48 million calls of Philox.

Philox: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Dropout: Srivastava
et al., JMLR 15, 2014.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import cdiv, check_runnable, launch

ROWS_OF_A_WORD: tl.constexpr = tl.constexpr(32)
KEEP_BITS: tl.constexpr = tl.constexpr(16)
WHOLE = 1 << KEEP_BITS.value  # of which `keep` is a part
# The fewest that pass all statistical tests of TestU01's BigCrush (Salmon et al.)
PHILOX_ROUNDS: tl.constexpr = tl.constexpr(7)

BLOCK_WORDS = 512
# Of x in the elementwise kernel: 4,096 elements over 8 warps.
BLOCK_ROWS, BLOCK_COLUMNS = 32, 128


class Mask(NamedTuple):
    """The elements of x [rows, columns] that dropout keeps: it is ``x * unpacked(bits) * scale``.

    bits: [ceil(rows / 32), columns] int32. Of x[r, c] it is bit r % 32 of bits[r // 32, c], so that
    elements side by side have words side by side. scale: 1 / the probability to be kept.
    """

    bits: Tensor
    scale: float


Masks = Sequence[Mask | None]  # of projections one after another, None for one without dropout


def parts_of(masks: Masks | None) -> tuple[list[Tensor | None], list[float] | None]:
    """The masks' tensors, for save_for_backward, and their scales, from which `masks_of` has them
    again."""
    if masks is None:
        return [], None
    return [m and m.bits for m in masks], [m.scale if m else 1.0 for m in masks]


def masks_of(bits: Sequence[Tensor | None], scales: list[float] | None) -> Masks | None:
    if scales is None:
        return None
    return [
        None if one is None else Mask(one, scale) for one, scale in zip(bits, scales, strict=True)
    ]


@triton.jit
def _keep_bits_kernel(
    seed_ptr,  # [1] int64
    bits_ptr,  # [words] int32, written
    words,
    which,  # of the seed's streams; Inductor has an argument named stream of its own
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low, high = place.to(tl.uint32), (place >> 32).to(tl.uint32)
    seed = tl.load(seed_ptr)
    word = low * 0
    for i in tl.static_range(0, KEEP_BITS, 4):
        # below the lowest 1 of KEEP every word would be 0
        if KEEP % (16 << i) != 0:
            drawn = tl.philox(seed, low, high, low * 0 + i, low * 0 + which, PHILOX_ROUNDS)
            for j in tl.static_range(4):
                word = word | drawn[j] if (KEEP >> (i + j)) % 2 == 1 else word & drawn[j]
    tl.store(bits_ptr + place, word.to(tl.int32, bitcast=True), mask=place < words)


@triton.jit
def is_kept(bits_ptr, first, row, column, columns):
    """Return which of a tile of x are kept, outside of x anything. Its rows from `first` on share a
    row of words: up to 32 of them, a power of two, of which `first` is a multiple. row is [rows,
    1], column [1, columns of the tile]."""
    tl.static_assert(row.shape[0] <= ROWS_OF_A_WORD)
    word_row = (tl.zeros([1, 1], tl.int64) + first) // ROWS_OF_A_WORD
    words = tl.load(bits_ptr + word_row * columns + column, mask=column < columns, other=0)
    return ((words >> (row % ROWS_OF_A_WORD).to(tl.int32)) & 1) != 0


@triton.jit
def _drop_kernel(
    x_ptr,  # [rows, columns]
    bits_ptr,
    total_ptr,  # [rows, columns], written
    rows,
    columns,
    x_row_stride,
    total_row_stride,
    scale,
    ADDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_row_stride + column, mask=mask).to(tl.float32)
    kept = is_kept(bits_ptr, first, row, column, columns)
    total = tl.where(kept, x * scale, 0.0)
    place = total_ptr + row * total_row_stride + column
    if ADDS:
        total += tl.load(place, mask=mask).to(tl.float32)
    tl.store(place, total.to(total_ptr.dtype.element_ty), mask=mask)


def draw_seed(device: torch.device) -> Tensor:
    """A seed for `draw_masks`, int64 of one element, from the device's own generator: what
    torch.manual_seed decides, and drawn anew by every replay of a CUDA graph."""
    return torch.randint(2**63 - 1, (1,), device=device)


def kept_share(dropout: float) -> int:
    """The probability to be kept, of 65,536: the nearest to 1 - dropout that is not 0."""
    return max(round((1.0 - dropout) * WHOLE), 1)


def draw_masks(
    name: str,
    seed: Tensor | None,
    dropouts: Sequence[float | None],
    rows: Sequence[int],
    columns: Sequence[int],
) -> Masks | None:
    """The masks of projections whose inputs have these rows and columns: None for one without
    dropout, and None for all if none has any.

    Every element is kept with a probability of 1 - dropout to the nearest of 65,536 parts, whatever
    becomes of the others. Every projection has its own stream of the seed's numbers; but one whose
    dropout is None has the mask of the projection before it, whose A is its own, too.

    Raises:
        ValueError, in the name of the public function `name`: a dropout is not in [0, 1), or there
        is dropout and no seed of one int64.
    """
    if not any(dropouts):
        return None
    for dropout in dropouts:
        if dropout is not None and not 0.0 <= dropout < 1.0:
            raise ValueError(f"{name}: dropout is {dropout}, should be at least 0 and less than 1")
    if seed is None or seed.dtype != torch.int64 or seed.numel() != 1:
        given = "none" if seed is None else f"{list(seed.shape)} {seed.dtype}"
        raise ValueError(
            f"{name}: there is dropout, and the seed is {given}, should be one int64: give it "
            "draw_seed(x.device)"
        )
    masks: list[Mask | None] = []
    for i, (dropout, height, width) in enumerate(zip(dropouts, rows, columns, strict=True)):
        keep = kept_share(dropout or 0.0)
        if dropout is None and masks:
            masks.append(masks[-1])
        elif keep == WHOLE:
            masks.append(None)
        else:
            bits = keep_bits(seed, i, keep, height, width)
            masks.append(Mask(bits, WHOLE / keep))
    return masks if any(masks) else None


def keep_bits(seed: Tensor, stream: int, keep: int, rows: int, columns: int) -> Tensor:
    """Bits [ceil(rows / 32), columns] int32, each 1 with a probability of keep / 65,536, for 0 <
    keep < 65,536: `Mask` says which is whose. The same for the same seed, stream and shape."""
    bits = seed.new_empty(cdiv(rows, ROWS_OF_A_WORD.value), columns, dtype=torch.int32)
    words = bits.numel()
    if words:  # an empty grid cannot be launched
        grid = (cdiv(words, BLOCK_WORDS),)
        launch(_keep_bits_kernel, grid, seed, bits, words, stream, keep, BLOCK_WORDS, num_warps=4)
    return bits


def drop(x: Tensor, mask: Mask) -> Tensor:
    """x m [rows, columns], new, in x's dtype. Equivalent: ``x * unpacked(mask) * mask.scale``."""
    return _launch(x, mask, torch.empty_like(x, memory_format=torch.contiguous_format), False)


def add_dropped(total: Tensor, x: Tensor, mask: Mask) -> Tensor:
    """total, to which x m is added in place; in fp32, rounded once."""
    return _launch(x, mask, total, True)


def _launch(x: Tensor, mask: Mask, total: Tensor, adds: bool) -> Tensor:
    check_runnable("dropout", _drop_kernel, x)
    rows, columns = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    if x.numel():
        grid = cdiv(rows, BLOCK_ROWS), cdiv(columns, BLOCK_COLUMNS)
        launch(
            _drop_kernel, grid, x, mask.bits, total, rows, columns, x.stride(0), total.stride(0),
            mask.scale, adds, BLOCK_ROWS, BLOCK_COLUMNS, num_warps=8,
        )  # fmt: skip
    return total

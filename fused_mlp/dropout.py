"""Dropout before an adapter's A, with masks of one bit per element.

In training PEFT computes for each projection

    z = dropout(x) A',      dropout(x) = x m,      m = 0 or 1 / (1 - p)

and therefore dA = p' (x m) and dx = m (p A) for p = s dy B. We keep a mask as bits, a sixteenth of
a bf16 tensor's bytes. Backward need not draw it again, and a kernel that reads x anyway loads one
word for 32 elements of a column.

Each bit of a mask is 1 with a probability of keep / 65,536. A word of 32 bits is made of 16 random
words, one for each bit of `keep` from the least significant on: `word | random` if that bit is 1,
`word & random` if it is 0. A bit's probability P becomes (1 + P) / 2 or P / 2. The final word is
the mask, without comparing or packing. The random words come from Philox, with the counter (place
in the mask, which four of the 16, which projection) and a seed on the device: a CUDA graph that
draws the seed draws new masks at each replay. The masks of Qwen2.5-3B's seven projections at 16,384
tokens (48 MB) take 48 million calls of Philox.

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
WHOLE = 1 << KEEP_BITS.value  # `keep` out of WHOLE is the probability to be kept
# The fewest rounds that pass all statistical tests of TestU01's BigCrush (Salmon et al.)
PHILOX_ROUNDS: tl.constexpr = tl.constexpr(7)

BLOCK_WORDS = 512
# A tile of x in the elementwise kernel: 4,096 elements over 8 warps.
BLOCK_ROWS, BLOCK_COLUMNS = 32, 128


class Mask(NamedTuple):
    """The elements of x [rows, columns] that dropout keeps: ``x * unpacked(bits) * scale``.

    bits: [ceil(rows / 32), columns] int32. Bit r % 32 of bits[r // 32, c] is that of x[r, c], so
    neighbours in a row have neighbouring words. scale: 1 / the probability to be kept.
    """

    bits: Tensor
    scale: float

    def at(self, rows: slice) -> "Mask":
        """Return the mask of these rows of x. The first row begins a word of bits."""
        words = ROWS_OF_A_WORD.value
        return Mask(self.bits[rows.start // words : cdiv(rows.stop, words)], self.scale)


Masks = Sequence[Mask | None]  # one per projection, None for one without dropout


def parts_of(masks: Masks | None) -> tuple[list[Tensor | None], list[float] | None]:
    """Split masks into tensors, for save_for_backward, and scales. `masks_of` joins them again."""
    if masks is None:
        return [], None
    return [m and m.bits for m in masks], [m.scale if m else 1.0 for m in masks]


def masks_of(bits: Sequence[Tensor | None], scales: list[float] | None) -> Masks | None:
    if scales is None:
        return None
    return [
        None if one is None else Mask(one, scale) for one, scale in zip(bits, scales, strict=True)
    ]


@triton.jit(do_not_specialize=["which"])
def _keep_bits_kernel(
    seed_ptr,  # [1] int64
    bits_ptr,  # [words] int32, written
    words,
    which,  # the seed's stream; Inductor has an argument of that name
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
    """Return which elements of a tile of x are kept; outside of x, anything.

    Its rows from `first` on share a row of words: up to 32 rows, a power of two that divides
    `first`. row is [rows, 1], column [1, columns of the tile].
    """
    tl.static_assert(row.shape[0] <= ROWS_OF_A_WORD)
    word_row = (tl.zeros([1, 1], tl.int64) + first) // ROWS_OF_A_WORD
    words = tl.load(bits_ptr + word_row * columns + column, mask=column < columns, other=0)
    return ((words >> (row % ROWS_OF_A_WORD).to(tl.int32)) & 1) != 0


@triton.jit(do_not_specialize=["rows"])
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
    """Draw a seed for `draw_masks`, one int64, from the device's own generator.

    torch.manual_seed sets that generator, and every replay of a CUDA graph draws a new seed.
    """
    return torch.randint(2**63 - 1, (1,), device=device)


def kept_share(dropout: float) -> int:
    """Return the probability to be kept, in parts of 65,536: nearest to 1 - dropout, and not 0."""
    return max(round((1.0 - dropout) * WHOLE), 1)


def draw_masks(
    name: str,
    seed: Tensor | None,
    dropouts: Sequence[float | None],
    rows: Sequence[int],
    columns: Sequence[int],
) -> Masks | None:
    """Draw the masks of projections whose inputs have these rows and columns.

    A projection without dropout has None. If none has dropout, the result is None. Each element is
    kept independently with a probability of 1 - dropout, to the nearest of 65,536 parts. Each
    projection has its own stream of the seed's numbers. One whose dropout is None shares the mask
    of the projection before it, as both have one A.

    Raises:
        ValueError, in the name of the public function `name`: a dropout is not in [0, 1), or there
        is dropout without a seed of one int64.
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
    """Return bits [ceil(rows / 32), columns] int32, laid out as in `Mask`.

    Each is 1 with a probability of keep / 65,536, for 0 < keep < 65,536. The same seed, stream and
    shape give the same bits.
    """
    bits = seed.new_empty(cdiv(rows, ROWS_OF_A_WORD.value), columns, dtype=torch.int32)
    words = bits.numel()
    if words:  # an empty grid cannot be launched
        grid = (cdiv(words, BLOCK_WORDS),)
        launch(_keep_bits_kernel, grid, seed, bits, words, stream, keep, BLOCK_WORDS, num_warps=4)
    return bits


def drop(x: Tensor, mask: Mask) -> Tensor:
    """Return x m [rows, columns], new, in x's dtype: ``x * unpacked(mask) * mask.scale``."""
    return _launch(x, mask, torch.empty_like(x, memory_format=torch.contiguous_format), False)


def add_dropped(total: Tensor, x: Tensor, mask: Mask) -> Tensor:
    """Add x m to total in place, in fp32 with one rounding, and return total."""
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

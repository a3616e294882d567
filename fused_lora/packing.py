"""Packed batches of one size: documents in groups of at most so many tokens, in rows of just that.

collate = DataCollatorWithFlattening()
for group in pack(map(len, ids), 16_384):
    batch = fill_row(collate([documents[i] for i in group]), 16_384)
    loss = model(**batch).loss  # or a GraphedStep, which captures one graph for them all
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED = {"input_ids": 0, "labels": -100, "position_ids": 0}  # and what fills them


def pack(lengths: Iterable[int], tokens: int) -> list[list[int]]:
    """Group documents, by their places in `lengths`, so that none has more than `tokens` together.

    Best fit decreasing: the longest first, each to the group that it fills most.

    Raises:
        ValueError: a document is longer than that.
    """
    lengths = list(lengths)
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of each group, in order, and which it is
    for place in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length = lengths[place]
        if length > tokens:
            raise ValueError(
                f"pack: document {place} has {length:,} tokens, more than {tokens:,}: cut it, or "
                "ask for longer rows"
            )
        at = bisect_left(room, (length, 0))
        left, group = room.pop(at) if at < len(room) else (tokens, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(place)
        insort(room, (left - length, group))
    return groups


def fill_row(batch: dict[str, Any], tokens: int) -> dict[str, Tensor]:
    """Fill up a packed batch [1, T], as DataCollatorWithFlattening makes it, to [1, tokens].

    Returns its input_ids, labels and position_ids, with a document of padding at the end that has
    no labels. What else says where documents begin (cu_seq_lens_q, max_length_q) is left out:
    position_ids do, and a number that changes would be another CUDA graph.

    Raises:
        ValueError: it has no position_ids, more than one row, or more tokens.
    """
    missing = [name for name in PACKED if name not in batch]
    if missing:
        raise ValueError(f"fill_row: the batch has no {', '.join(missing)}: collate it flattened")
    rows, given = batch["input_ids"].shape
    if rows != 1 or given > tokens:
        raise ValueError(
            f"fill_row: the batch is {rows} x {given:,} tokens, should be one row of {tokens:,} at "
            "most: give it fewer documents (fused_lora.pack)"
        )
    filled = {
        name: F.pad(batch[name], (0, tokens - given), value=filler)
        for name, filler in PACKED.items()
    }
    filled["position_ids"][0, given:] = torch.arange(tokens - given)
    return filled

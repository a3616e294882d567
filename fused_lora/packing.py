"""Packed batches of one size: group documents by a token budget, then pad each row up to it.

collate = DataCollatorWithFlattening()
for group in pack(map(len, ids), 16_384):
    batch = fill_row(collate([documents[i] for i in group]), 16_384)
    loss = model(**batch).loss  # or a GraphedStep, which captures one graph for them all
"""

import operator
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOSS_MASKS = ("completion_mask", "assistant_masks")  # of the tokens that keep their label
PACKED = {"input_ids": 0, "labels": -100, "position_ids": 0}  # and their filler


def pack(lengths: Iterable[int], tokens: int) -> list[list[int]]:
    """Group documents into rows of at most `tokens` tokens. Returns their indices into `lengths`.

    Best fit decreasing: longest first, each into the fullest group that still has room.

    Raises:
        ValueError: a length is not a whole number, is negative, or exceeds `tokens`.
    """
    tokens = _whole("tokens", tokens, least=1)
    lengths = [_whole(f"document {place}", one) for place, one in enumerate(lengths)]
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, group), sorted
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


def _whole(what: str, length: Any, least: int = 0) -> int:
    """Return a number of tokens as an int. NumPy integers and integer tensors are accepted."""
    try:
        whole = operator.index(length)
    except TypeError:
        whole = least - 1
    if whole < least:
        raise ValueError(
            f"pack needs lengths in whole tokens of at least {least}, got {length!r} for {what}"
        )
    return whole


def fill_row(batch: dict[str, Any], tokens: int) -> dict[str, Tensor]:
    """Pad a packed batch [1, T], as DataCollatorWithFlattening makes it, to [1, tokens].

    Returns its input_ids, labels and position_ids, with unlabelled documents of padding at the end,
    each at most as long as the longest other. Other keys that mark where documents begin
    (cu_seq_lens_q, max_length_q) are left out: position_ids say it already, and a number that
    changes would make another CUDA graph.

    Raises:
        ValueError: the batch has no position_ids, more than one row, no tokens or more than
            `tokens`, or labels or position_ids of another shape.
    """
    missing = [name for name in PACKED if not isinstance(batch.get(name), Tensor)]
    if missing:
        raise ValueError(
            f"fill_row: the batch has no tensor {', '.join(missing)}: collate it flattened"
        )
    shape = batch["input_ids"].shape
    if len(shape) != 2 or any(batch[name].shape != shape for name in PACKED):
        given = ", ".join(f"{name} {list(batch[name].shape)}" for name in PACKED)
        raise ValueError(
            f"fill_row needs input_ids, labels and position_ids [1, T], got {given}: collate it "
            "flattened"
        )
    rows, given = shape
    if rows != 1 or not 0 < given <= tokens:
        raise ValueError(
            f"fill_row: the batch is {rows} x {given:,} tokens, should be one row of 1 to "
            f"{tokens:,}: choose its documents with fused_lora.pack"
        )
    filled = {
        name: F.pad(batch[name], (0, tokens - given), value=filler)
        for name, filler in PACKED.items()
    }
    # no longer than a document, because RoPE may depend on the longest
    places = filled["position_ids"]
    places[0, given:] = torch.arange(tokens - given, device=places.device) % (places.max() + 1)
    return filled


class FilledRows:
    """A collator for a trainer: documents end to end in one row, then padding.

    Batches whose rows have one length share a CUDA graph (`graph_steps`). Like
    DataCollatorWithFlattening and TRL's padding_free, it returns position_ids that begin anew with
    each document, and no label at a document's first token.

        FilledRows(8_192)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}])

    An example is a document, or several that were packed, with their `seq_lengths`. Its labels are
    its `labels`, or else its tokens, except where a `completion_mask` or `assistant_masks` is 0.

    Args:
        tokens: a row gets this length, or the smallest multiple of it that is enough.

    Raises:
        ValueError: tokens is below 1; the batch has no tokens; or an example's labels, masks or
            seq_lengths do not match its tokens.
    """

    def __init__(self, tokens: int):
        self.tokens = _whole("a row", tokens, least=1)

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        row: dict[str, list[Tensor]] = {name: [_whole_numbers([])] for name in PACKED}
        for place, example in enumerate(examples):
            ids, labels, lengths = _document(example)
            if len(labels) != len(ids) or sum(lengths) != len(ids):
                raise ValueError(
                    f"FilledRows: example {place} has {len(ids):,} tokens, {len(labels):,} labels "
                    f"and documents of {sum(lengths):,}: give each token one"
                )
            row["input_ids"].append(ids)
            row["position_ids"] += map(torch.arange, lengths)
            row["labels"].append(labels)
        given = {name: torch.cat(parts)[None] for name, parts in row.items()}
        given["labels"] = given["labels"].masked_fill(given["position_ids"] == 0, -100)
        return fill_row(given, -(-given["input_ids"].numel() // self.tokens) * self.tokens)


def _document(example: dict[str, Any]) -> tuple[Tensor, Tensor, list[int]]:
    """Return an example's tokens, its labels and the lengths of its documents."""
    ids = _whole_numbers(example["input_ids"])
    labels, lengths = example.get("labels"), example.get("seq_lengths")
    if labels is None:
        masks = [example[name] for name in LOSS_MASKS if example.get(name) is not None]
        labels = ids
        for mask in map(_whole_numbers, masks):
            if len(mask) != len(ids):
                labels = mask  # and is refused
                break
            labels = labels.masked_fill(mask == 0, -100)
    return ids, _whole_numbers(labels), [len(ids)] if lengths is None else [*map(int, lengths)]


def _whole_numbers(given: Any) -> Tensor:
    # Python would take 4 ms more for a row of 8,192, which a short step waits for
    return torch.as_tensor(given, dtype=torch.int64, device="cpu")

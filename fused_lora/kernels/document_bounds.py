"""Bounds of packed documents: for each token, where its document begins and ends in the row.

In a packed batch, position_ids begin anew with each document. Attention takes the bounds instead of
a mask, as a tensor of two numbers per token. Its shape does not depend on the number of documents
or on their lengths, so one CUDA graph replays any of them.
"""

import torch
from torch import Tensor


def documents_of(position_ids: Tensor) -> Tensor:
    """Return where the document of each token begins and ends, [batch, 1, 2, positions] in int32.

    position_ids: [batch, positions] in any integer dtype. A document begins where they do not go up
    by one, as in transformers. Nothing waits for the device.

    `documents[b, 0, 0, t]` is the first position of t's document, `documents[b, 0, 1, t]` the one
    after its last. As a mask it has four dimensions, which transformers hands on as it is, and a
    dtype that is no mask's.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    positions = begins.shape[1]
    place = torch.arange(positions, device=begins.device, dtype=torch.int32).expand_as(begins)
    firsts = torch.where(begins, place, 0).cummax(1).values
    # the next beginning after each token
    next_begin = torch.full_like(firsts, positions)
    next_begin[:, :-1] = torch.where(begins[:, 1:], place[:, 1:], positions)
    ends = next_begin.flip(1).cummin(1).values.flip(1)
    return torch.stack([firsts, ends], 1)[:, None]


def seq_idx_of(documents: Tensor) -> Tensor:
    """Return the first position of each token's document, as its number, [batch, positions]."""
    return documents[:, 0, 0]


def begins_of(seq_idx: Tensor) -> Tensor:
    """Return which tokens are the first of their document, [batch, positions]. seq_idx: a number
    for each token's document, likewise."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    torch.ne(seq_idx[:, 1:], seq_idx[:, :-1], out=begins[:, 1:])
    return begins


def is_documents(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int32


def mask_of_documents(documents: Tensor, window: int | None = None) -> Tensor:
    """Return what scaled_dot_product_attention takes for them, [batch, 1, positions, positions]:
    True where a token may attend, which is up to itself within its document.

    window: how many tokens it sees, itself the last; None: all of these.
    """
    place = torch.arange(documents.shape[3], device=documents.device)
    firsts = documents[:, :, 0, :, None]
    if window is not None:
        firsts = torch.maximum(firsts, place[:, None] - (window - 1))
    return (place >= firsts) & (place <= place[:, None])

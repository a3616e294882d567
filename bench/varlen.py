"""Plain PEFT's attention to packed documents, as those have it who installed FlashAttention.

transformers' own "flash_attention_2" wants a package that is built for one torch and one CUDA.
PyTorch has the same kernels, and this gives them what transformers gives that package: the
documents' lengths. On the CPU, which has no such kernels, documents are attended to one by one.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "varlen"


def register() -> str:
    """Make it known to transformers; returns the name for `attn_implementation`."""
    AttentionInterface.register(NAME, _attend)
    return NAME


def lengths_of(documents: Tensor) -> dict[str, Any]:
    """Return what DataCollatorWithFlattening(return_flash_attn_kwargs=True) adds to a batch, from
    the documents' lengths, int32."""
    ends = F.pad(documents.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(documents.max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _attend(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, cu_seq_lens_q: Tensor | None = None, max_length_q: int = 0, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    if cu_seq_lens_q is None:  # rows that are full
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=True
        )
    q, k, v = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    ends, longest = cu_seq_lens_q, max_length_q
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        attended = varlen_attn(
            q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0)
        )
        return attended.unsqueeze(0), None
    each = [
        F.scaled_dot_product_attention(
            *(heads[:, :, first:end] for heads in (query, key, value)),
            is_causal=True, scale=scaling, enable_gqa=True,
        )
        for first, end in pairwise(ends.tolist())
    ]  # fmt: skip
    return torch.cat(each, 2).transpose(1, 2), None

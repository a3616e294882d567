"""Attention on [q | k | v] as two functions, forward and backward by hand, RoPE's in the latter.

An autograd function that contains attention has to call attention's backward itself, and to save
the tensors for that call like any others. A graph kept from forward would hold them where
checkpointing and offloading do not see them. We use the first of these that can run:

    forward     `causal_attention.py`, of up to 64 positions without a mask, of documents, and with
                sinks or a window
                cuDNN or FlashAttention, whichever scaled_dot_product_attention itself would use:
                PyTorch has a pair of calls for each
                scaled_dot_product_attention, for all else: heads of 512 or that it pads, and masks,
                with which cuDNN's gradients can be NaN
    backward    `causal_attention_backward.py`, of up to 512 positions, and of what only our
                forward takes
                the backend's own
                scaled_dot_product_attention once more, under autograd: it works everywhere, and
                costs one more forward of attention
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import causal_attention
from .causal_attention import Attention, causal_attention_forward
from .causal_attention_backward import causal_attention_backward
from .document_bounds import is_documents, mask_of_documents
from .qkv_rope import rope_backward, rotate_back, split_heads
from .rows import as_rows

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
aten = torch.ops.aten

# With more rows, a backend's backward runs for a few heads at a time. What it returns and its
# workspace, 44 KiB a token of Llama-3.1-8B for all heads, then exist for these alone. On an H200
# four groups take the same time at 65,536 tokens: there is enough work in each.
MANY_ROWS = 16_384
GROUPS_OF_HEADS = 8  # at most

WIDEST = 256  # head_dim that these two take
WIDEST_EVERYWHERE = 128  # that they have a backward for on every card


class AttentionSaved(NamedTuple):
    """Results of `attention_forward` for its backward, None for those that its backend lacks."""

    attention: Attention
    backend: int | None = None  # FLASH or CUDNN, where it ran on one of them
    logsumexp: Tensor | None = None
    seed: Tensor | None = None
    offset: Tensor | None = None


def attention_forward(
    qkv: Tensor,
    mask: Tensor | None,
    attention: Attention,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, AttentionSaved]:
    """Return (attended, saved); saved is for `attention_backward`.

    attended is out where one of our kernels computes it.

    Equivalent PyTorch::

        q, k, v = split_heads(qkv, positions, heads, kv_heads)
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, scale=scaling, is_causal=mask is None, enable_gqa=True)
        attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)

    qkv is [batch * positions, (heads + 2 kv_heads) head_dim], q and k in it rotated; mask is None,
    for causal, documents (`document_bounds.py`), or what scaled_dot_product_attention takes.
    sinks: as `causal_attention_forward` has them.

    Raises:
        ValueError: documents do not fit qkv, or there are sinks, or a window without documents, and
            our kernels cannot run.
    """
    positions, heads, kv_heads, scaling, _, window = attention
    is_bounded = is_documents(mask)
    if is_bounded:
        assert mask is not None
        _check_documents(qkv, mask, positions)
    documents, mask = _documents_or_mask(qkv, mask, attention)
    is_needed = sinks is not None or (window is not None and not is_bounded)
    fits = documents is not None
    if mask is None and (is_needed or positions <= causal_attention.FORWARD_POSITIONS):
        fits = fits or causal_attention.fits_kernels(qkv, attention)
    if is_needed and not fits:
        raise ValueError(
            f"attention with sinks or a window: [q | k | v] is {list(qkv.shape)} in {qkv.dtype} "
            f"for {positions} positions{'' if mask is None else ', with a mask'}, should be up to "
            f"{causal_attention.MAX_POSITIONS} positions or have documents_of's bounds as its only "
            "mask, and have heads that our kernels take"
        )
    if fits:
        attended, logsumexp = causal_attention_forward(qkv, attention, documents, out, sinks)
        return attended, AttentionSaved(attention, logsumexp=logsumexp)
    q, k, v = split_heads(qkv, positions, heads, kv_heads)
    backend = _backend(q, k, v, mask, scaling)
    is_causal = positions > 1
    saved = AttentionSaved(attention)
    if backend == FLASH:
        attended, logsumexp, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scaling
        )
    elif backend == CUDNN:
        attended, logsumexp, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scaling
        )
    else:
        attended = _attend(q, k, v, mask, scaling)
    if backend is not None:
        saved = AttentionSaved(attention, backend, logsumexp, seed, offset)
    # a view on a GPU, where the heads of a token lie side by side as they do in qkv
    return as_rows(attended.transpose(1, 2).flatten(2)), saved


def attention_backward(
    grad: Tensor,
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    attended: Tensor,
    saved: AttentionSaved,
    grad_qkv: Tensor,
) -> None:
    """Write the gradient of qkv, as it was before cos and sin rotated it (if any), into grad_qkv.

    grad and attended are [batch * positions, heads * head_dim]. All else is what forward took and
    returned.
    """
    attention = saved.attention
    positions, heads, kv_heads, scaling, interleaved, _ = attention
    documents, mask = _documents_or_mask(qkv, mask, attention)
    if saved.logsumexp is not None and causal_attention.fits_kernels(qkv, attention, documents):
        # cuDNN's has one dimension more
        logsumexp = saved.logsumexp.reshape(-1, heads, positions)
        # these kernels rotate whole heads back, of paired halves
        is_whole = cos is None or (not interleaved and cos.shape[2] * heads == attended.shape[1])
        angles = (cos, sin) if is_whole else (None, None)
        causal_attention_backward(
            grad, qkv, angles, attended, logsumexp, attention, grad_qkv, documents
        )
        if not is_whole:
            assert cos is not None and sin is not None
            rotate_back(grad_qkv, cos, sin, heads, kv_heads, interleaved)
        return
    q, k, v = split_heads(qkv, positions, heads, kv_heads)
    grad, attended = (
        rows.view(q.shape[0], positions, heads, q.shape[3]).transpose(1, 2)
        for rows in (grad, attended)
    )
    if saved.backend is None:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            again = _attend(q, k, v, mask, scaling)
        grad_q, grad_k, grad_v = torch.autograd.grad(again, (q, k, v), grad)
    elif len(qkv) > MANY_ROWS and kv_heads > 1:
        _backward_by_heads((grad, q, k, v, attended), saved, grad_qkv)
        if cos is not None and sin is not None:
            rotate_back(grad_qkv, cos, sin, heads, kv_heads, interleaved)
        return
    else:
        grad_q, grad_k, grad_v = _backend_backward(grad, q, k, v, attended, saved)
    rope_backward(grad_q, grad_k, grad_v, cos, sin, grad_qkv, interleaved)


def _backward_by_heads(
    operands: tuple[Tensor, ...], saved: AttentionSaved, grad_qkv: Tensor
) -> None:
    """Write the gradients of q, k and v into grad_qkv, a group of heads after the other. operands:
    as `_backend_backward` takes them, [batch, heads, positions, head_dim]."""
    positions, heads, kv_heads, *_ = saved.attention
    assert saved.logsumexp is not None
    count = max(n for n in range(1, GROUPS_OF_HEADS + 1) if kv_heads % n == 0)
    targets = split_heads(grad_qkv, positions, heads, kv_heads)
    every = (one.chunk(count, dim=1) for one in (*operands, saved.logsumexp, *targets))
    for grad, q, k, v, attended, logsumexp, *to in zip(*every, strict=True):
        its = saved._replace(logsumexp=logsumexp.contiguous())
        for target, one in zip(to, _backend_backward(grad, q, k, v, attended, its), strict=True):
            target.copy_(one)
        del one  # it would be there beside the next group's


def _check_documents(qkv: Tensor, documents: Tensor, positions: int) -> None:
    given = list(documents.shape), documents.device, documents.is_contiguous()
    wanted = [qkv.shape[0] // max(positions, 1), 1, 2, positions]
    if given != (wanted, qkv.device, True):
        raise ValueError(
            f"a mask in int32 bounds documents: it is {given[0]} on {given[1]}, should be {wanted} "
            f"on {qkv.device} and contiguous: documents_of makes it"
        )


def _documents_or_mask(
    qkv: Tensor, mask: Tensor | None, attention: Attention
) -> tuple[Tensor | None, Tensor | None]:
    """A mask by what it is. Documents that no kernel of ours attends to are a mask like others."""
    if not is_documents(mask):
        return None, mask
    assert mask is not None
    if causal_attention.fits_kernels(qkv, attention, mask):
        return mask, None
    return None, mask_of_documents(mask, attention.window)


def _backend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, saved: AttentionSaved
) -> tuple[Tensor, Tensor, Tensor]:
    (*_, scaling, _, _), backend, logsumexp, seed, offset = saved
    positions, is_causal = q.shape[2], q.shape[2] > 1
    if backend == FLASH:
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, attended, logsumexp, None, None, positions, positions, 0.0, is_causal,
            seed, offset, scale=scaling,
        )  # fmt: skip
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, attended, logsumexp, seed, offset, None, None, None, positions, positions,
        0.0, is_causal, scale=scaling,
    )  # fmt: skip


def _backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> int | None:
    """Return the backend that scaled_dot_product_attention would use, if we call its kernels."""
    # narrower heads may be padded, and cuDNN has no backward for a single position
    if q.device.type != "cuda" or mask is not None or q.shape[3] % 8 or q.shape[3] > WIDEST:
        return None
    if q.shape[2] == 1:
        return None
    trains_wide = q.shape[3] > WIDEST_EVERYWHERE and not torch.is_inference_mode_enabled()
    if trains_wide:  # have the choice look for a backward
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.set_grad_enabled(trains_wide):
        choice = torch._fused_sdp_choice(
            q, k, v, None, 0.0, True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    return choice if choice in (FLASH, CUDNN) else None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)  # as autocast does in forward, which is off in backward
    if is_grouped and mask is not None:
        # with a mask and grouped heads only the unfused kernel runs, which keeps all of q k'
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        is_grouped = False
    # with a mask, at 64, 192, 320 ... positions, cuDNN's gradient of q can be NaN (PyTorch's issue
    # 196678); and during a capture it may ask for memory that nothing can be given
    with nullcontext() if mask is None else sdpa_kernel(WITHOUT_CUDNN):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None and q.shape[2] > 1, scale=scaling,
            enable_gqa=is_grouped,
        )  # fmt: skip

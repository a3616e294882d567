"""The last linear layer and its cross entropy as one autograd function, in chunks of tokens.

Forward, for hidden h [T, hidden], weight W [vocabulary, hidden], labels y and N labelled tokens:

    x    = h W' + b                                            [T, vocabulary]
    loss = sum_t (log sum_v exp x_tv - x_t,y_t) / N

Backward, for an incoming scalar g:

    dx = softmax(x) - onehot(y)      dh = g/N dx W      dW = g/N dx' h      db = g/N sum_t dx_t

dx, dx W and dx' h do not depend on g, so the forward computes them while it has a chunk's x. One
kernel reduces x to losses and overwrites it with dx. The backward only multiplies by the number
g/N. We keep that factor out of dx, which then stays within [-1, 1]: fp16 would lose dx/16,384
before a loss scaler could help.

For 16,384 tokens and 151,936 words in bf16:
- memory: PyTorch's backward holds three [T, vocabulary] in fp32 at once, 29.9 GB. We hold one chunk
  of 512 tokens in bf16, 0.16 GB, and until the backward dx W, 67 MB at 2,048 features. A
  trainable weight adds its gradient in fp32, 1.24 GB.
- traffic: PyTorch moves 40 bytes per logit, 99.6 GB: matmul 2, cast 6, log-softmax 8; backward of
  the loss 4, of log-softmax 12, of the cast 6, matmul 2. We move 10 bytes, 24.9 GB: matmul 2,
  kernel 6, matmul 2. W, 0.62 GB, is read twice per chunk.

Linear layer and cross entropy in chunks, gradient in the forward: Liger-Kernel (Hsu et al., arXiv
2410.10989). No stored logits, unlabelled tokens skipped: Cut Your Losses (Wijmans et al., arXiv
2411.09009). Softmax's sum in one pass: Milakov and Gimelshein, arXiv 1805.02867. Written from the
equations above. We leave z-loss and label smoothing to PyTorch: `linear_cross_entropy` has no such
option, and a model with a fused loss runs its class's forward for them.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp.launching import check_runnable
from fused_mlp.utils import compute_dtype, refuse_second_derivative

from ..kernels.logits import NOT_SCALED, LogitScaling, _cross_entropy_kernel
from .fp8_head import Fp8Head
from .head import Head
from .label_check import checking

# Tokens of a chunk. An H200 takes 34.7 ms for the loss of 16,384 tokens, 151,936 words and 2,048
# features. In chunks of 4,096 tokens, whose logits take 1.0 GiB more, it takes 33.0. Each chunk
# reads and writes the gradient of a trained weight in fp32, 2.5 GB there: these are twice as large.
CHUNK_TOKENS = 512


def usual_chunk(weight: Tensor) -> int:
    return CHUNK_TOKENS * (2 if weight.requires_grad else 1)


class Targets(NamedTuple):
    """The operands of LinearCrossEntropy that it does not differentiate."""

    labels: Tensor  # [...], hidden's shape without the last dimension
    num_items: Tensor | None  # 0-d fp32, divides the sum; None: count the labels not ignored
    ignore_index: int
    chunk_tokens: int
    rows: Tensor | None  # [n], from `labelled_rows`; None: all
    max_labelled: int | None
    with_gradient: bool  # the caller's grad mode; needs_input_grad is True even under no_grad
    head: type[Head]
    scaling: LogitScaling


class LinearCrossEntropy(torch.autograd.Function):
    """``LinearCrossEntropy.apply(hidden, weight, bias, targets)``: see `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets):
        needs = [need and targets.with_gradient for need in ctx.needs_input_grad[:3]]
        need_hidden, need_weight, need_bias = needs
        ctx.hidden_shape = hidden.shape
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype

        # cast to autocast's dtype here, so autocast has nothing to cast below
        dtype = compute_dtype(hidden)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        rows = hidden.reshape(-1, hidden.shape[-1])
        labels, which = targets.labels.reshape(-1).contiguous(), targets.rows
        labelled = labels != targets.ignore_index
        num_items = labelled.sum() if targets.num_items is None else targets.num_items
        if targets.max_labelled is not None:
            # more labels are an error that the host cannot see: make everything NaN
            num_items = torch.where(labelled.sum() > targets.max_labelled, torch.nan, num_items)
        if which is not None:
            labels = labels.index_select(0, which)

        count, chunk = labels.shape[0], targets.chunk_tokens
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)  # sums many chunks
        grad_rows = weight.new_empty(count, rows.shape[1]) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        head = targets.head(weight, bias, min(count, chunk))
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            x = (rows[part] if which is None else rows.index_select(0, which[part])).to(dtype)
            grad_x = None if grad_rows is None else grad_rows[part]
            loss += head.loss(
                x, labels[part], targets.ignore_index, targets.scaling, grad_x, grad_weight,
                grad_bias,
            )  # fmt: skip

        ctx.save_for_backward(grad_rows, grad_weight, grad_bias, which, num_items)
        return (loss / num_items).float()

    @staticmethod
    def backward(ctx, grad_loss):
        refuse_second_derivative("linear_cross_entropy", "F.cross_entropy")
        *gradients, which, num_items = ctx.saved_tensors
        # With nothing labelled the loss may be NaN, but gradients are 0, as in PyTorch.
        scale = (grad_loss / num_items).masked_fill(num_items == 0, 0.0)
        grad_hidden, grad_weight, grad_bias = (
            None if gradient is None else _scaled(gradient, scale, dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        if grad_hidden is not None:
            if which is not None:
                tokens, features = ctx.hidden_shape[:-1].numel(), ctx.hidden_shape[-1]
                zeros = grad_hidden.new_zeros(tokens, features)
                grad_hidden = zeros.index_copy_(0, which, grad_hidden)
            grad_hidden = grad_hidden.view(ctx.hidden_shape)
        return grad_hidden, grad_weight, grad_bias, None


def labelled_rows(
    labels: Tensor, ignore_index: int = -100, max_labelled: int | None = None
) -> Tensor:
    """Return the indices [n], int64, of labels [...] (any integer dtype) that are not ignored.

    Equivalent PyTorch: ``(labels.flatten() != ignore_index).nonzero().squeeze(1)``. The host waits
    for n. With max_labelled it does not: n is then max_labelled, or the number of labels if that is
    smaller. Labelled tokens come first, then ignored ones, each in their order.
    """
    labelled = labels.flatten() != ignore_index
    if max_labelled is None:
        return labelled.nonzero().squeeze(1)
    return (~labelled).byte().argsort(stable=True)[:max_labelled]


@torch.compiler.disable  # one graph break here, where the host may wait, not several inside
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    num_items_in_batch: int | Tensor | None = None,
    chunk_tokens: int | None = None,
    drop_ignored: bool = True,
    max_labelled: int | None = None,
    rows: Tensor | None = None,
    check_labels: bool = True,
    fp8: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy of a linear layer's output, without ever holding [tokens, vocabulary].

    Equivalent PyTorch::

        logits = F.linear(hidden, weight, bias).float().reshape(-1, len(weight))
        logits = softcap * torch.tanh(logits / softcap)  # unless it is None
        options = {"ignore_index": ignore_index, "reduction": "sum"}
        loss = F.cross_entropy(logits, labels.flatten(), **options) / num_items_in_batch
        # num_items_in_batch=None: (labels != ignore_index).sum()

    It does not shift the labels. With nothing labelled all gradients are 0. The loss is then NaN,
    like PyTorch's mean, or 0 if `num_items_in_batch` is given.

    Args:
        hidden: [..., hidden], bf16, fp16 or fp32; any strides, any number of tokens including none.
        weight: [vocabulary, hidden], bias: [vocabulary], in hidden's dtype, or any under autocast.
            Frozen ones cost nothing. The weight may be tied to an embedding.
        labels: [...], int64 or int32. `ignore_index` adds no loss and has a gradient of 0. Any
            other label outside the vocabulary is a ValueError (`label_check.py`). It comes at once
            if the host waits to count labels, else in the next call, and the loss is NaN.
        check_labels: False if the caller has checked them.
        num_items_in_batch: divides the sum; counted over all micro-batches of a step.
        chunk_tokens: tokens whose logits exist at a time. By default 512, or 1,024 if the
            weight is trained.
        fp8: multiply in FP8 (`fp8_head.py`), at lower precision. It needs a frozen weight and bias,
            both dimensions of weight multiples of 16, and on a GPU bf16. Off by default.
        softcap: what the logits approach, as in Gemma, above 0. Not with fp8.
        drop_ignored: leave ignored tokens out of the matmuls. The host waits once, to learn how
            many are left. False computes them in vain and never waits (in a CUDA graph capture).

    Returns:
        The loss, 0-d fp32. Logits are rounded to the compute dtype: autocast's if it is on, else
        hidden's. Softmax, loss and sums over chunks are fp32. Each gradient has the dtype of its
        tensor, and is computed only if `requires_grad` asks for it.

    Saved for backward: the gradients themselves, unscaled. Those of labelled tokens [labelled,
    hidden] are in the compute dtype, those of weight and bias in fp32. Nothing under no_grad. It
    writes to no input or saved tensor, so a second backward is right. Deterministic. Not twice
    differentiable.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, no kernel can run on them, or a label is
            outside the vocabulary.
        RuntimeError: from backward, under create_graph=True.
        TypeError: label_smoothing, z_loss or another unknown option: use PyTorch's lines above.
    """
    tensors = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    check_head_operands("linear_cross_entropy", tensors)
    head, num_items = Fp8Head if fp8 else Head, num_items_in_batch
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        given = list(num_items.shape)
        raise ValueError(f"linear_cross_entropy needs num_items_in_batch as a number, got {given}")
    if softcap is not None and (fp8 or softcap <= 0.0):
        raise ValueError(f"linear_cross_entropy: softcap is {softcap}, should be above 0, fp8 off")
    for key, count in (("chunk_tokens", chunk_tokens), ("max_labelled", max_labelled)):
        if count is not None and count < 1:
            raise ValueError(f"linear_cross_entropy needs {key} above 0, got {count}")
    if isinstance(num_items, Tensor) and num_items.device == hidden.device:
        num_items = num_items.float().reshape(())
    elif num_items is not None:
        # filled on the device: the host would wait for a copy from the CPU
        num_items = torch.full((), float(num_items), dtype=torch.float32, device=hidden.device)
    waits = rows is None and drop_ignored and max_labelled is None
    check = checking(labels, len(weight), ignore_index, waits) if check_labels else nullcontext()
    with check:
        if rows is None and (drop_ignored or max_labelled is not None):
            rows = labelled_rows(labels, ignore_index, max_labelled)
    with_gradient = torch.is_grad_enabled()
    head.check("linear_cross_entropy", weight, bias)
    targets = Targets(
        labels, num_items, ignore_index, chunk_tokens or usual_chunk(weight), rows, max_labelled,
        with_gradient, head,
        NOT_SCALED if softcap is None else LogitScaling(1.0 / softcap, softcap),
    )  # fmt: skip
    return LinearCrossEntropy.apply(hidden, weight, bias, targets)


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * scale in `dtype`, in one pass and rounded once. The scale becomes [1]: on a
    GPU PyTorch rounds a 0-d one to the gradient's dtype first, and bf16 ones are all 0.2% off."""
    out = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    return torch.mul(gradient, scale.view(1), out=out)


def check_head_operands(
    name: str, optional: dict[str, Tensor | None], in_fp32: bool = False
) -> None:
    """Raise ValueError unless shapes, dtypes and devices fit together and a kernel can run. name:
    the function to blame. in_fp32: any dtype is cast."""
    tensors = {key: tensor for key, tensor in optional.items() if tensor is not None}
    hidden, weight, labels, *bias = tensors.values()
    given = ", ".join(
        f"{key} {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for key, tensor in tensors.items()
    )
    fits = hidden.ndim > 0 and weight.ndim == 2 and 0 not in weight.shape
    fits = fits and (*labels.shape, weight.shape[1]) == hidden.shape
    if not fits or any(tensor.shape != weight.shape[:1] for tensor in bias):
        raise ValueError(
            f"{name} needs hidden [..., hidden], weight [vocabulary, hidden], labels [...] and "
            f"bias [vocabulary], got {given}"
        )
    if len({tensor.device for tensor in tensors.values()}) > 1:
        raise ValueError(f"{name} needs tensors on one device, got {given}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} needs labels in int64 or int32, got {given}")
    check_runnable(name, _cross_entropy_kernel, hidden)
    is_cast = in_fp32 or torch.is_autocast_enabled(hidden.device.type)
    if not is_cast and any(tensor.dtype != hidden.dtype for tensor in (weight, *bias)):
        raise ValueError(f"{name} needs one dtype, or torch.autocast, got {given}")

"""Log-probabilities of labels under the last linear layer, and statistics of its distribution.

For hidden h [T, hidden], weight W [vocabulary, hidden], labels y, temperature t, softcap c and
logit scale s:

    x = h W' + b                     [T, vocabulary], rounded to the compute dtype
    z = c tanh(s x / c) / t          s x / t without a softcap
    log p = z - log sum_v exp z_v    in fp32, as everything below

    log_probs = log p_y              entropy = -sum_v p_v log p_v         mean_logits = mean_v z_v
    is_top1 = argmax_v z_v == y      log_sum_sq_probs = log sum_v p_v^2

Backward, for incoming gradients g of log_probs and e of entropy:

    dz = g (onehot(y) - p) - e p (log p + entropy)      dx = dz z'(x)      dh = dx W      dW = dx' h

One kernel reduces a chunk's x to all of these numbers. Without e, dh is g times a row that does not
depend on g. If W, b and the adapter are frozen, the same kernel therefore overwrites x with that
row's dx, and the forward keeps dx W: two matmuls in all. If they are trained, the backward
recomputes x, and a second kernel overwrites it with dx: three matmuls, four with dW. So it does for
e; with a frozen head that is four, one of them in vain.

An adapter B A of the layer adds (h A') B' to x, which is one more matmul of rank r into x.

Memory for 8,192 tokens, 4,096 features and 151,936 words in bf16, where PyTorch's logits in fp32
take 5.0 GB and their backward three times that:
- forward: a chunk of 512 tokens, 0.16 GB, and dx W, 67 MB. It saves that and h, 134 MB; if
  something is trained or there is no entropy to differentiate, one of the two.
- backward: dh, 67 MB; where it recomputes x, a chunk as well, 0.16 GB. A trained weight adds
  its gradient in fp32, 2.49 GB, and in its own dtype, 1.24 GB.
- statistics: 4 bytes per token each.

The definitions are those of TRL's FusedCausalLMOutput (`trl/trainer/utils.py`), whose trainers read
these fields. Chunks and one pass: the sources of `cross_entropy.py`.
"""

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_mlp.utils import compute_dtype, refuse_second_derivative, without_autocast

from ..kernels.logits import LogitScaling, Statistics, cross_entropy_, log_probs_gradient_
from ..rerun import join, split
from .cross_entropy import check_head_operands, labelled_rows, usual_chunk
from .head import HeadChunk, HeadChunks, HeadOperands, add_gradients, picked, placed
from .label_check import checking

OPTIONAL = ("entropy", "is_top1", "log_sum_sq_probs", "mean_logits")


class LogProbs(NamedTuple):
    """Results for labels [...]: each field has their shape, and is 0 where a label is ignored."""

    log_probs: Tensor  # fp32, differentiable
    entropy: Tensor | None  # fp32, differentiable
    is_top1: Tensor | None  # bool: the label is the first of the largest logits
    log_sum_sq_probs: Tensor | None  # fp32
    mean_logits: Tensor | None  # fp32, of the scaled logits
    loss: Tensor  # 0-d fp32: -log_probs.sum() / the number of items


class HeadAdapter(NamedTuple):
    """A LoRA adapter of the last layer, which adds scaling * B A to its weight."""

    A: Tensor  # [r, hidden]
    B: Tensor  # [vocabulary, r]
    scaling: float


class Request(NamedTuple):
    """The settings of a call."""

    ignore_index: int
    chunk_tokens: int
    outputs: Collection[str]  # of OPTIONAL
    scaling: LogitScaling
    dtype: torch.dtype  # of the matmuls
    with_gradient: bool  # the caller's grad mode; needs_input_grad is True even under no_grad


class LogProbsTargets(NamedTuple):
    """The operands of LinearLogProbs that it does not differentiate."""

    labels: Tensor  # [...], hidden's shape without the last dimension
    rows: Tensor | None  # [n], from `labelled_rows`; None: all
    request: Request


class LinearLogProbs(torch.autograd.Function):
    """``LinearLogProbs.apply(hidden, weight, bias, z, B, targets)``: see `log_probs` and
    `HeadOperands`. Returns the first five fields of LogProbs."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, z, B, targets):
        ctx.set_materialize_grads(False)  # entropy is often only logged
        labels, rows, request = targets
        operands = HeadOperands(hidden, weight, bias, z, B, labels, rows)
        needs = [need and request.with_gradient for need in ctx.needs_input_grad[:5]]
        need_hidden, need_weight, need_bias, need_z, need_B = needs
        keeps_rows = (need_hidden or need_z) and not (need_weight or need_bias or need_B)
        chunks = HeadChunks(operands, request.dtype, request.chunk_tokens)

        def numbers(is_wanted: bool, dtype=torch.float32) -> Any:
            return chunks.weight.new_empty(chunks.count, dtype=dtype) if is_wanted else None

        losses, wanted = numbers(True), [name in request.outputs for name in OPTIONAL]
        statistics = Statistics(
            numbers(any(needs)), numbers(any(needs)), numbers(wanted[0]), numbers(wanted[2]),
            numbers(wanted[3]), numbers(wanted[1], torch.int8),
        )  # fmt: skip
        grad_hidden = chunks.new_rows(operands.hidden) if keeps_rows and need_hidden else None
        grad_z = chunks.new_rows(operands.z) if keeps_rows and need_z else None
        with without_autocast(operands.hidden):
            for chunk in chunks:
                losses[chunk.part] = cross_entropy_(
                    chunk.logits, chunk.labels, request.ignore_index, keeps_rows,
                    Statistics(*_cut(chunk.part, *statistics)), request.scaling,
                )  # fmt: skip
                # of the losses: minus that of log_probs
                _add_gradients(chunks, chunk, _cut(chunk.part, grad_hidden, grad_z))

        recompute_from = None
        if any(needs) and (statistics.entropies is not None or not keeps_rows):
            read = Statistics(statistics.maxima, statistics.log_sums, statistics.entropies)
            recompute_from = operands._replace(rows=None), read
        tensors, ctx.rest = split((grad_hidden, grad_z, rows, recompute_from))
        ctx.save_for_backward(*tensors)
        ctx.request, ctx.keeps_rows = request, keeps_rows
        ctx.like = [
            one if one is None else (one.shape, one.dtype) for one in (hidden, weight, bias, z, B)
        ]
        outputs = [
            None if one is None else chunks.in_full(one).view(labels.shape)
            for one in (
                -losses,
                statistics.entropies,
                None if statistics.is_top1 is None else statistics.is_top1.bool(),
                statistics.log_sums_of_squares,
                statistics.means,
            )
        ]
        ctx.mark_non_differentiable(*(output for output in outputs[2:] if output is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy=None, *_):
        refuse_second_derivative("log_probs", "F.log_softmax")
        grad_hidden, grad_z, rows, recompute_from = join(ctx.rest, ctx.saved_tensors)
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * len(ctx.needs_input_grad)
        incoming: list[Any] = [
            None if one is None else picked(one.reshape(-1), rows).float().contiguous()
            for one in (grad_log_probs, grad_entropy)
        ]
        factor = None
        if ctx.keeps_rows and grad_entropy is None:
            factor = -incoming[0][:, None]
            gradients = [grad_hidden, None, None, grad_z, None]
        else:
            operands, statistics = recompute_from
            gradients = _recomputed(
                operands._replace(rows=rows), ctx.request, statistics, incoming,
                ctx.needs_input_grad[:5],
            )  # fmt: skip
        finished = [
            None if one is None else _finished(one, factor, its_rows, *like)
            for one, its_rows, like in zip(
                gradients, (rows, None, None, rows, None), ctx.like, strict=True
            )
        ]
        return *finished, None


def _recomputed(
    operands: HeadOperands, request: Request, statistics: Statistics, incoming: list[Any],
    needs: Any,
) -> list[Any]:  # fmt: skip
    """Return the gradients of hidden's rows, weight, bias, z's rows and B, from recomputed
    logits. incoming: the gradients [n] of log_probs and entropy, or None."""
    chunks = HeadChunks(operands, request.dtype, request.chunk_tokens)
    grad_hidden = chunks.new_rows(operands.hidden) if needs[0] else None
    grad_z = chunks.new_rows(operands.z) if needs[3] else None
    grad_weight = _sum_over_tokens(operands.weight) if needs[1] else None
    grad_bias = _sum_over_tokens(operands.bias) if needs[2] else None
    grad_B = _sum_over_tokens(operands.B) if needs[4] else None
    with without_autocast(operands.hidden):
        for chunk in chunks:
            grad_log_probs, grad_entropies = _cut(chunk.part, *incoming)
            log_probs_gradient_(
                chunk.logits, chunk.labels, request.ignore_index,
                Statistics(*_cut(chunk.part, *statistics)), grad_log_probs, grad_entropies,
                request.scaling,
            )  # fmt: skip
            rows = _cut(chunk.part, grad_hidden, grad_z)
            _add_gradients(chunks, chunk, rows, grad_weight, grad_B)
            if grad_bias is not None:
                grad_bias.add_(chunk.logits.sum(0, dtype=torch.float32))
    return [grad_hidden, grad_weight, grad_bias, grad_z, grad_B]


def _add_gradients(
    chunks: HeadChunks, chunk: HeadChunk, rows: list[Any], grad_weight: Any = None,
    grad_B: Any = None,
) -> None:  # fmt: skip
    """Write the gradients of a chunk's x and z into rows, and add those of weight and B. Its
    logits are overwritten with their gradient."""
    grad_x, grad_z = rows
    add_gradients(chunk.logits, chunk.x, chunks.weight, grad_x, grad_weight)
    if chunk.z is not None and chunks.B is not None:
        add_gradients(chunk.logits, chunk.z, chunks.B, grad_z, grad_B)


def _sum_over_tokens(like: Any) -> Tensor:
    return like.new_zeros(like.shape, dtype=torch.float32)


def _finished(
    gradient: Tensor, factor: Tensor | None, rows: Tensor | None, shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return gradient, times the factor [n, 1] in one pass, in a tensor's shape and dtype."""
    if factor is not None:
        out = gradient.new_empty(gradient.shape, dtype=dtype)
        gradient = torch.mul(gradient, factor, out=out)
    rows_of_all = torch.Size((shape[:-1].numel(), shape[-1]))
    return placed(gradient.to(dtype), rows, rows_of_all).view(shape)


def _cut(part: slice, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor[part] for tensor in tensors]


@torch.compiler.disable  # one graph break here, where the host may wait, not several inside
def log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: HeadAdapter | None = None,
    outputs: Collection[str] = OPTIONAL,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    in_fp32: bool = False,
    ignore_index: int = -100,
    num_items_in_batch: int | Tensor | None = None,
    chunk_tokens: int | None = None,
    drop_ignored: bool = True,
    rows: Tensor | None = None,
    check_labels: bool = True,
) -> LogProbs:
    """Return log-probabilities of labels, without ever holding [tokens, vocabulary].

    Equivalent PyTorch::

        logits = F.linear(hidden, weight + adapter.scaling * adapter.B @ adapter.A, bias).float()
        logits = softcap * torch.tanh(logits * logit_scale / softcap) / temperature
        log_p = logits.log_softmax(-1)
        log_probs = log_p.gather(-1, labels[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        is_top1 = logits.argmax(-1) == labels
        log_sum_sq_probs = (2 * log_p).logsumexp(-1)
        mean_logits = logits.mean(-1)
        # each of these is 0 where labels == ignore_index
        loss = -log_probs.sum() / num_items_in_batch  # None: the labels not ignored, at least 1

    It does not shift the labels: give TRL's shift_labels, or shift labels by one yourself.

    Args:
        hidden: [..., hidden], bf16, fp16 or fp32; any strides, any number of tokens including none.
        weight: [vocabulary, hidden], bias: [vocabulary], in hidden's dtype, or any under autocast
            or in_fp32. Frozen ones cost nothing. The weight may be tied to an embedding.
        labels: [...], int64 or int32; outside the vocabulary as in `linear_cross_entropy`.
        adapter: of the layer, in any dtype.
        outputs: the fields to compute beside log_probs and loss; the others are None.
        in_fp32: multiply in fp32, outside autocast. A weight in another dtype is copied.
        num_items_in_batch, chunk_tokens, drop_ignored, check_labels: as `linear_cross_entropy`.
        rows: the tokens not ignored, if `labelled_rows` has found them already.

    Returns:
        LogProbs. Logits are rounded to the compute dtype: autocast's if it is on, else hidden's.
        Each gradient has the dtype of its tensor. A chunk's gradient over logits is rounded to the
        compute dtype; sums over chunks are fp32.

    Saved for backward: see above. Nothing under no_grad. It writes to no input or saved tensor.
    Deterministic. Not twice differentiable.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, no kernel can run on them, a label is
            outside the vocabulary, an output is unknown, or temperature or softcap is not above 0.
        RuntimeError: from backward, under create_graph=True.
    """
    tensors = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    check_head_operands("log_probs", tensors, in_fp32)
    if unknown := ", ".join({*outputs} - {*OPTIONAL, "log_probs"}):
        raise ValueError(f"log_probs needs outputs among {', '.join(OPTIONAL)}, got {unknown}")
    numbers = {"temperature": temperature, "softcap": softcap, "chunk_tokens": chunk_tokens}
    for key, number in numbers.items():
        if number is not None and number <= 0:
            raise ValueError(f"log_probs needs {key} above 0, got {number}")
    if rows is None:
        check = checking(labels, len(weight), ignore_index, drop_ignored)
        with check if check_labels else nullcontext():
            rows = labelled_rows(labels, ignore_index) if drop_ignored else None
    z, B = None, None
    dtype = torch.float32 if in_fp32 else compute_dtype(hidden)
    with without_autocast(hidden) if in_fp32 else nullcontext():
        if adapter is not None:
            B, A = adapter.B, adapter.A.float() if in_fp32 else adapter.A
            z = F.linear(hidden.to(A.dtype), A) * adapter.scaling
    request = Request(
        ignore_index, chunk_tokens or usual_chunk(weight), outputs,
        _scaling(temperature, softcap, logit_scale), dtype, torch.is_grad_enabled(),
    )  # fmt: skip
    found = LinearLogProbs.apply(hidden, weight, bias, z, B, LogProbsTargets(labels, rows, request))
    items = num_items_in_batch
    if items is None:
        items = (labels != ignore_index).sum().clamp(min=1)
    return LogProbs._make((*found, -found[0].sum() / items))


def _scaling(temperature: float, softcap: float | None, logit_scale: float) -> LogitScaling:
    if softcap is not None:
        return LogitScaling(logit_scale / softcap, softcap / temperature)
    scale = logit_scale / temperature
    return LogitScaling(None if scale == 1.0 else scale)

"""DecoderLayer: the blocks of a decoder layer with their adapters as one autograd function.

Forward runs the blocks one after the other, backward in reverse. `block.py` says what a block is
and has the mathematics of its ends; `attention_block.py`, `mlp_block.py` and `mixer_block.py` what
lies between. A layer is an attention and an MLP. One function for both takes one launch to copy
all adapters into the borders, and one to sum their gradients over tokens.

Base, adapter and residual are added in fp32 and rounded once. Otherwise small adapters come out
several times too large or too small (`kernels/extend_rows.py`).
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_mlp.utils import refuse_second_derivative, without_autocast

from ..kernels.rows import as_rows
from ..rerun import restore, store
from .adapter_sums import AdapterSums
from .attention_block import AttentionBlock
from .block import BlockBackward, Gradient, handed_over
from .buffer import Incoming, WeightGroup
from .filling import Adapter, Filling
from .mixer_block import MixerBlock
from .mlp_block import MLPBlock
from .operands import (
    BlockFactors,
    Dropouts,
    Kinds,
    Trained,
    check_block,
    check_input,
    draw_dropouts,
    kinds_of,
)
from .residual import apply_norm

NAME = "DecoderLayer"
Blocks = Sequence[AttentionBlock | MixerBlock | MLPBlock]


class Saved(NamedTuple):
    """Results of DecoderLayer's forward that its backward needs, by block."""

    hidden: Tensor | None  # None where it is no residual that the first block reads again
    dtype: torch.dtype  # of hidden
    totals: tuple[Tensor, ...]  # [T, hidden], before each further block, and before norm_next
    blocks: tuple[Any, ...]
    factors: tuple[BlockFactors, ...]  # theirs
    saved: tuple[Any, ...]
    adapters: tuple[tuple[Adapter, ...], ...]
    dropouts: tuple[Dropouts, ...]
    kinds: tuple[Kinds | None, ...]  # of what else is trained; None: nothing
    rstd: Tensor | None  # of norm_next, whose input is the last of totals


class DecoderLayer(torch.autograd.Function):
    """``DecoderLayer.apply(hidden, found, gate, *trained, blocks)``: a decoder layer's blocks.

    Equivalent PyTorch::

        for block in blocks:
            hidden = block(hidden)  # what each computes is in its own docstring

    with the projections' lora_dropout in training. An attention or a mixer alone may have a
    norm_next: then ``hidden, norm_next(hidden)``.

    Args:
        hidden: [batch, positions, hidden], bf16, fp16 or fp32, of any strides, batch 0 included. It
            may be fp32 while the buffers are in 16 bits, under autocast to their dtype: the
            residual and its gradient then stay fp32.
        found, gate: of a MixerBlock, which comes first; else None.
        trained: of each block the A [r, in] and B [out, r] of its projections, in bf16, fp16 or
            fp32. They are copied into the borders, in the buffers' dtype and scaled. Where the
            block trains_others, a bias of each projection follows and then a magnitude of each
            (DoRA's), [out] in any dtype, and the weights of its two norms in hidden's, None for one
            that is not there or not trained. Biases and norms replace the block's. Gradients are
            summed in fp32.
        blocks: an AttentionBlock or a MixerBlock, an MLPBlock, or both in this order, with norms in
            hidden's dtype.

    Returns:
        [batch, positions, hidden], new, in hidden's dtype, twice with a norm_next. Everything
        between matmuls is fp32 and rounds once. Each gradient has the dtype of its tensor, and
        exists only if that tensor requires one. The gradients of A and B are contiguous. hidden's
        is not: its rows are padded.

    Saved for backward: hidden (by BeforeMixer, if there is a mixer), cos, sin, mask, all norms, the
    adapters and what the blocks' files list: 70.2 kB a token of Qwen2.5-3B. The buffers are kept
    beside them: where another forward has filled the borders since, backward fills them again. No
    input, no incoming gradient and no saved tensor is written, so a second backward through a
    retained graph is right. Deterministic if attention's backward is, as
    `causal_attention_backward.py` is. Not twice differentiable.

    With dropout (`buffer.py`, `fused_mlp/dropout.py`) z comes from masked inputs, and so does dA.
    The gradient of an input starts as the adapters' part, and the frozen matmul is added to it. A
    mask for each projection is drawn before its block and saved, one bit an element. Under
    checkpointing we keep only the seed, from which the second forward draws the same masks.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is dropout and no seed.
        RuntimeError: from backward, under create_graph=True, or if an adapter was changed in place
            since.
    """

    @staticmethod
    def forward(ctx, hidden, found, gate, *operands):
        *row, blocks = operands
        if found is not None:
            blocks = blocks[0]._replace(found=found, gate=gate), *blocks[1:]
        every = list(_by_block(row, blocks))
        if any(trained.biases for trained in every):
            blocks = tuple(map(_with_others, blocks, every))
        name = _function_of(blocks)
        check_input(name, hidden, blocks[0].frame.inputs)
        for block, trained in zip(blocks, every, strict=True):
            check_block(f"{name}, {type(block).__name__}", hidden, trained, block.frame)
            block.check(name, hidden)
        adapters = tuple(trained.adapters for trained in every)
        filling, groups = _filled(blocks)
        filling.fill(groups, list(chain.from_iterable(adapters)))
        unscaled, factors = blocks, tuple(map(_factors_of, blocks, every))
        blocks = tuple(map(_scaled, blocks, factors))
        # not a view itself, or autograd would forbid to change it in place
        output = normed = rstd = None
        last = blocks[-1].frame
        if blocks[-1].output_needed and last.norm_next is None:
            dtype = hidden.dtype if last.adds else last.output.A.dtype
            output = hidden.new_empty(*hidden.shape[:2], last.output.out, dtype=dtype)
        total, totals, all_saved, all_dropouts = as_rows(hidden), [], [], []
        for i, block in enumerate(blocks):
            is_last = i == len(blocks) - 1
            target = output.flatten(0, 1) if is_last and output is not None else None
            dropouts = draw_dropouts(name, block.frame, len(total))
            total, saved = block.forward(total, target, dropouts)
            all_saved.append(saved)
            all_dropouts.append(dropouts)
            if not is_last or last.norm_next is not None:
                totals.append(total)
            elif output is not None and total is not target:
                # a recompute took the total that it had kept, and wrote nothing
                output = total.detach().view(output.shape)
        if last.norm_next is not None:
            normed = torch.empty_like(total)
            rstd = apply_norm(total, last.norm_next, normed, None)
            output, normed = (one.detach().view(hidden.shape) for one in (total, normed))
        store(ctx, Saved(
            hidden if found is None and blocks[0].frame.adds else None, hidden.dtype,
            tuple(totals), tuple(map(_without_seed, unscaled)), factors, tuple(all_saved), adapters,
            tuple(all_dropouts), tuple(map(kinds_of, every)), rstd,
        ))  # fmt: skip
        if normed is not None:
            return output, normed
        return hidden.new_zeros(1).expand(hidden.shape) if output is None else output

    @staticmethod
    def backward(ctx, grad_output, *grad_normed):
        saved: Saved = restore(ctx)
        refuse_second_derivative(_function_of(saved.blocks), "the unfused layer")
        need_hidden, _, _, *row, _ = ctx.needs_input_grad
        hidden, adapters = saved.hidden, saved.adapters
        blocks = tuple(map(_scaled, saved.blocks, saved.factors))
        filling, groups = _filled(blocks)
        filling.refill(groups, list(chain.from_iterable(adapters)))
        sums = AdapterSums()
        gradients: list[Tensor | None] = []
        with without_autocast(grad_output):
            runs = [
                BlockBackward(block.frame, dropouts, its_adapters, needed, kinds, sums)
                for block, dropouts, its_adapters, needed, kinds in zip(
                    blocks, saved.dropouts, adapters, _by_block(row, blocks), saved.kinds,
                    strict=True,
                )
            ]  # fmt: skip
            rows = filling.handover.take(grad_output, blocks[-1].frame.output.grad_columns)
            gradient = Gradient(as_rows(grad_output), None if rows is None else Incoming(rows))
            first = None if hidden is None else as_rows(hidden)
            residuals, left = [first, *saved.totals], list(saved.saved)
            if (rstd := saved.rstd) is not None:
                total, norm = saved.totals[-1], blocks[-1].frame.norm_next
                gradient = runs[-1].total_gradient(
                    as_rows(grad_normed[0]), gradient.total, total, norm, rstd, None
                )
                del residuals[-1], total
            dtype = saved.dtype
            del saved  # what a block has saved can go once its backward is through
            for i in reversed(range(len(blocks))):
                gradient, its_gradients = blocks[i].backward(
                    runs[i], residuals.pop(), left.pop(), gradient, need_hidden or i > 0,
                    runs[i - 1] if i else None,
                )  # fmt: skip
                gradients[:0] = its_gradients
            sums.compute()
        grad_hidden = handed_over(filling, gradient, grad_output, dtype)
        return grad_hidden, *runs[0].mixer_grads, *gradients, None


def _function_of(blocks: Blocks) -> str:
    return NAME if blocks[0].frame.adds else LoRA_Attention.__name__


def _with_others(block: Any, trained: Trained) -> Any:
    name = f"{_function_of((block,))}, {type(block).__name__}"
    return block._replace(frame=block.frame.with_others(name, trained))


def _factors_of(block: Any, trained: Trained) -> BlockFactors:
    return block.frame.factors(trained)


def _scaled(block: Any, factors: BlockFactors) -> Any:
    frame = block.frame.scaled(factors)
    return block if frame is block.frame else block._replace(frame=frame)


def _without_seed(block: Any) -> Any:
    return (
        block._replace(frame=block.frame._replace(seed=None))
        if block.frame.seed is not None
        else block
    )


def _by_block(values: Sequence, blocks: Blocks) -> Iterator[Trained]:
    """Name the values for the tensors of each block."""
    wanted = [block.frame.tensors for block in blocks]
    if len(values) != sum(wanted):
        raise ValueError(
            f"{_function_of(blocks)}: {len(values)} trained tensors given, should be {sum(wanted)}"
            ": A and B of each projection of a block, and where it trains others a bias and a "
            "magnitude of each and two norms, None for one that is not trained"
        )
    first = 0
    for block, count in zip(blocks, wanted, strict=True):
        yield Trained.from_flat(values[first : first + count], block.frame.projections)
        first += count


def _filled(blocks: Blocks) -> tuple[Filling, list[WeightGroup]]:
    """Return what fills the borders of these blocks, and their buffers."""
    return blocks[0].frame.filling, [group for block in blocks for group in block.frame.groups]


class LoRA_Attention(DecoderLayer):
    """``LoRA_Attention.apply(hidden, None, None, *trained, (block,))``: an attention alone, as an
    AttentionBlock without norms that does not add.

    Equivalent PyTorch, with the names of AttentionBlock::

        hidden = hidden.to(compute_dtype)
        output = o_proj(attention(q_proj(hidden), k_proj(hidden), v_proj(hidden)))
    """

"""The switches `attention` and `rope`: the forwards they set on an attention and on its o."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fused_mlp.launching import DTYPES
from fused_mlp.utils import compute_dtype

from ..foreign.ownership import fused_parts_of, owner_of
from ..foreign.parallel import is_in_fsdp
from ..layer.attention_block import AttentionBlock
from ..layer.buffer import PlacedWeight
from ..layer.decoder_layer import LoRA_Attention
from ..layer.operands import Frame
from ..layer.scratch import Scratches
from ..reading.aside import say_left, say_once, step_aside
from ..reading.forms import AttentionForm
from ..reading.four_bit import is_4bit
from ..reading.known import known_form, why_not_class
from ..reading.projection import Projection, seed_for, split_projection
from ..reading.refusal import attempt, refuse
from ..weights.borders import LayerBorders, borders_of
from ..weights.default_border import DefaultBorder
from ..weights.four_bit_parts import why_not_input
from .attend import (
    attend,
    full_angles,
    head_norms_of,
    mask_for_attention,
    q_scale_of,
    rotates,
    sinks_and_window_of,
    why_not_head_norms,
    why_not_inputs,
    why_not_rotated,
    why_not_sdpa,
    why_not_sinks,
)
from .linear import (
    Reads,
    bases_under,
    largest_ranks,
    read_output,
    read_projections,
    run_alone,
    run_together,
    with_reads,
)

NONE = Reads([], {})

# --- sites ----------------------------------------------------------------------------------------


def qkv_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield attentions that have q, k and v as three layers or as one."""
    for name, module in model.named_modules():
        if _output_name(module) in module._modules and projections_of_qkv(module):
            yield name, module


def projections_of_qkv(attention: nn.Module) -> set[str]:
    return attention._modules.keys() & {"q_proj", "k_proj", "v_proj", "qkv_proj"}


def rotating_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the attentions that rotate q and k. Unknown classes are included."""
    for name, module in qkv_attentions(model):
        if rotates(module):
            yield name, module


def output_projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, attention in qkv_attentions(model):
        yield from _with_adapters(name, attention, _output_name(attention))


def lone_projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the projections that run fused in modules which otherwise stay the library's."""
    for name, module in model.named_modules():
        yield from _with_adapters(name, module, *known_form(module, "Projections") or ())


def _with_adapters(owner: str, module: nn.Module, *names: str) -> Iterator[tuple[str, nn.Module]]:
    for name in names:
        projection = module._modules.get(name)  # a class may do without one
        if projection is not None and not _is_without_adapter(projection):  # best left alone
            yield f"{owner}.{name}", projection


def _is_without_adapter(projection: nn.Module) -> bool:
    return type(projection) is nn.Linear or is_4bit(projection)


# --- as they are now ------------------------------------------------------------------------------


def read_qkv(attention: Any) -> Reads:
    """Return q, k and v as they are now; they may be one projection."""
    refuse(why_not_class(attention, "Attention"))
    return read_projections(attention, _names_of_qkv(attention))


def _names_of_qkv(attention: Any) -> list[str]:
    """Return the names of the layers for q, k and v that an attention has."""
    names = known_form(attention, "Attention").projections
    return [name for name in names if getattr(attention, name, None) is not None]


def split_qkv(attention: Any, reads: list[Projection]) -> list[Projection]:
    """Return q, k and v of an attention, whether it has three layers for them or one."""
    if len(reads) > 1:
        return reads
    return split_projection(reads[0], _sizes(attention, len(reads[0].weight)))


def _sizes(attention: Any, together: int) -> list[int]:
    """Return how many outputs of the one layer belong to q, k and v."""
    q = output_of(attention).in_features
    return [q, *[(together - q) // 2] * 2]


def output_of(attention: Any) -> Any:
    """Return an attention's layer for o. In an unknown class that is o_proj."""
    return getattr(attention, _output_name(attention), None)


def _output_name(attention: nn.Module) -> str:
    return (known_form(attention, "Attention") or AttentionForm()).output


def read_rotating(attention: Any) -> None:
    """Raise a Refusal if our kernel cannot rotate the q and k of an attention."""
    refuse(why_not_class(attention, "Attention"))
    refuse(why_not_rotated(getattr(getattr(output_of(attention), "weight", None), "dtype", None)))


def fits_buffers(attention: Any, reads: Sequence[Projection], dtype: torch.dtype) -> bool:
    """Return True if an attention has buffers, and they can take these projections to compute in
    this dtype."""
    if borders_of(attention) is None or is_in_fsdp(attention):
        return False
    return all(
        not isinstance(read.weight, PlacedWeight)
        and read.weight.dtype == dtype
        and (read.bias is None or read.bias.requires_grad or read.bias.dtype == dtype)
        and {read.A.dtype, read.B.dtype} <= set(DTYPES)
        for read in reads
    )


# --- forward --------------------------------------------------------------------------------------


def self_attention_forward(
    attention: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values=None,
    **options,
):
    """Run the class's forward with fused q, k and v, a fused rotary embedding, or both. If both are
    wanted and possible, run the whole attention as one function."""
    if (reason := why_not_class(attention, "Attention")) is not None:
        mask = mask_for_attention(attention, attention_mask, hidden_states.dtype)
        return step_aside(
            attention, reason, hidden_states, position_embeddings=position_embeddings,
            attention_mask=mask, past_key_values=past_key_values, **options,
        )  # fmt: skip
    reads = _read_fused(attention, hidden_states) if "attention" in parts else NONE
    if reads.are_all and ("rope" in parts or not rotates(attention)):
        reason = why_not_inputs(attention_mask, past_key_values, options) or why_not_sinks(
            attention, hidden_states, attention_mask
        )
        if reason is None and (o := _read_rest(attention, reads.fit, hidden_states)) is not None:
            return _run_as_one(
                attention, reads.fit, o, hidden_states, position_embeddings, attention_mask, options
            )
        if reason is not None and torch.is_grad_enabled():  # inference may use anything
            say_once(attention, reason)
    qkv = _run_qkv(attention, reads, hidden_states)
    mask = mask_for_attention(attention, attention_mask, qkv[0].dtype)
    return attend(attention, parts, qkv, position_embeddings, mask, past_key_values, **options)


def _read_fused(attention: Any, hidden_states: Tensor) -> Reads:
    """Return q, k and v as they are now. If they do not run fused, warn and return NONE."""
    reads, reason = attempt(read_qkv, attention)
    if reason := reason or why_not_input(hidden_states, reads.fit):
        say_once(attention, reason)
        return NONE
    say_left(attention, reads.left)
    return reads


def _run_qkv(attention: Any, reads: Reads, hidden_states: Tensor) -> Sequence[Tensor]:
    """Run q, k and v: as one function, each by itself, or PEFT's way. Without v, or without k and
    v, return the others."""
    names = _names_of_qkv(attention)
    is_joined = len(known_form(attention, "Attention").projections) == 1
    if reads.are_all and (is_joined or len(names) == 3):
        return run_together(attention, reads.fit, hidden_states, partial(split_qkv, attention))
    run = partial(run_alone, attention) if reads.fit else nn.Module.__call__
    outputs = [run(getattr(attention, name), hidden_states) for name in names]
    if not is_joined:
        return outputs
    return outputs[0].split(_sizes(attention, outputs[0].shape[-1]), -1)


# --- as one function ------------------------------------------------------------------------------


def _read_rest(
    attention: Any, qkv: Sequence[Projection], hidden_states: Tensor
) -> Projection | None:
    """Return o as it is now, for an attention whose q, k and v are fused, or None if the attention
    cannot run as one function."""
    o = output_of(attention)
    if (
        why_not_sdpa(attention)
        or why_not_head_norms(attention)
        or not ("attention" in fused_parts_of(o) or _is_without_adapter(o))
    ):
        return None
    read, reason = attempt(read_output, o)
    if reason or why_not_input(hidden_states, [read]):
        return None
    computed = compute_dtype(hidden_states)
    fits = hidden_states.dtype in (computed, torch.float32)
    return read if fits and fits_buffers(attention, [*qkv, read], computed) else None


def _run_as_one(
    attention: Any, qkv: list[Projection], o: Projection, hidden_states: Tensor,
    position_embeddings: tuple, mask: Any, options: dict,
) -> tuple[Tensor, None]:  # fmt: skip
    """Run q, k, v, attention and o as one LoRA_Attention, on buffers of their weights."""
    borders = borders_of(attention)
    assert borders is not None
    parts = [split_qkv(attention, qkv), [o]]
    names = _names_of_qkv(attention), [_output_name(attention)]
    ranks = [largest_ranks(attention, *one) for one in zip(names, parts, strict=True)]
    inputs, output = borders.find_or_make([qkv, [o]], parts, ranks, o.weight.dtype)
    assert inputs is not None and output is not None
    bare = Frame(None, inputs, output, borders, adds=False)
    trained, frame = with_reads([*parts[0], o], bare)
    frame = frame._replace(seed=seed_for(hidden_states, *frame.dropout_rates))
    block = attention_block(attention, frame)
    block = in_call(block, attention, hidden_states, position_embeddings, mask, options)
    return LoRA_Attention.apply(hidden_states, None, None, *trained, (block,)), None


def attention_block(attention: Any, frame: Frame) -> AttentionBlock:
    form = known_form(attention, "Attention")
    heads, kv_heads, _ = (out // attention.head_dim for out in frame.inputs.out_features)
    return AttentionBlock(
        frame, heads // 2 if form.has_gate else heads, kv_heads, attention.scaling,
        head_norms_of(attention), form.has_gate, form.interleaved,
    )  # fmt: skip


def in_call(
    block: AttentionBlock, attention: Any, hidden: Tensor, position_embeddings: tuple, mask: Any,
    options: dict,
) -> AttentionBlock:  # fmt: skip
    """Return an attention's block with what a call of it, or of its layer, gives."""
    cos = sin = None
    if rotates(attention):
        cos, sin = full_angles(attention, *position_embeddings)
    sinks, window = sinks_and_window_of(attention, mask)
    return block._replace(
        positions=hidden.shape[1], cos=cos, sin=sin, mask=mask,
        q_scale=q_scale_of(attention, options), window=window, sinks=sinks,
    )  # fmt: skip


# --- when `fuse` is called ------------------------------------------------------------------------


def runs_as_one(attention: nn.Module) -> bool:
    """Return True if the parts that an attention runs fused make one function of it."""
    parts = fused_parts_of(attention)
    is_known = bool(projections_of_qkv(attention)) and known_form(attention, "Attention")
    return bool(is_known and "attention" in parts and ("rope" in parts or not rotates(attention)))


def give_borders_alone(attentions: Sequence[Any]) -> None:
    """Give attentions that run as one, outside whole layers, buffers for their weights. The first
    forward moves them there."""
    known = [*filter(None, map(borders_of, attentions))]
    scratches = known[0].scratches if known else Scratches()  # a CUDA graph may hold this memory
    seen: set[int] = set()
    for attention in attentions:
        owner: Any = owner_of(attention)
        bases = list(bases_under(attention, (*_names_of_qkv(attention), _output_name(attention))))
        weights = {id(base.weight) for base in bases}
        if weights & seen:  # layer_replication: they lie in the first one's buffers
            owner.borders = None
            continue
        seen |= weights
        owner.borders = owner.borders or LayerBorders(DefaultBorder, groups=2)
        owner.borders.scratches = scratches
        for base in bases:
            DefaultBorder.take_in(base)

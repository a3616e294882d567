"""The switch `layer`: the forward of a whole decoder layer, on buffers of weights.

`layer_reading.py` reads the layer. It runs as one function, or with a mixer as two around that. One
that cannot runs its other fused parts one by one, and warns once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..foreign.ownership import fused_parts_of
from ..foreign.parallel import FLATTENED, is_dtensor, may_shard_later
from ..foreign.versions import CACHE, by_name, class_forward
from ..kernels.rows import Handover
from ..layer.attention_block import AttentionBlock
from ..layer.decoder_layer import DecoderLayer
from ..layer.mixer_block import MixerBlock
from ..layer.mlp_block import MLPBlock
from ..layer.operands import Frame
from ..layer.residual import Norm
from ..layer.scratch import Scratches
from ..layer.shards import Gathering
from ..reading import unchanged
from ..reading.aside import say_once
from ..reading.known import known_form, layer_form
from ..reading.projection import Projection, bias_of, seed_for, trains_bias
from ..reading.refusal import attempt, refuse
from ..reading.site import KERNELS_WANT_A_GPU
from ..rerun import once, saving_last
from ..weights.borders import Border, borders_of
from ..weights.sharded_weight import ShardedWeight
from . import layer_reading as reading
from .attend import mask_for_attention, q_scale_of, rotates, window_beside
from .attention import attention_block
from .mixer_layer import has_mixer, run_mixer
from .mlp import activation_of
from .rms_norm import finished, normed_layer_forward

# what a call tells a layer that its mixer does not take
NOT_THE_MIXERS = {
    "attention_mask", "position_ids", CACHE, "use_cache", "position_embeddings", "per_layer_input",
}  # fmt: skip


def layer_forward(layer: Any, parts: frozenset[str], hidden_states: Tensor, *inputs, **options):
    """Run a layer as one, or else in parts."""
    if reading.is_flattened_in(layer):
        raise RuntimeError(f"a fused {type(layer).__name__} cannot run: {FLATTENED}")
    call = by_name(layer, inputs) | options
    # a recompute computes what the forward did: nothing is read again
    found, reason = once(lambda: attempt(_read_call, layer, hidden_states, call), is_small=True)
    if not reason:
        return _run(layer, found, hidden_states, call)
    # inference may be called in any way, with a cache for example
    if torch.is_grad_enabled():
        say_once(layer, reason)
    # a mixer takes a mask [batch, positions]; the class's forward takes no documents
    if not has_mixer(layer) and not fused_parts_of(layer.self_attn):
        mask = call.get("attention_mask")
        call["attention_mask"] = mask_for_attention(layer.self_attn, mask, hidden_states.dtype)
    if "rms_norm" in parts:
        return normed_layer_forward(layer, parts, hidden_states, **call)
    return class_forward(layer, hidden_states, **call)


class LayerOperands(NamedTuple):
    """The operands that are the same in every call while the layer does not change."""

    trained: tuple[Tensor | None, ...]  # by the blocks
    mixing: AttentionBlock | MixerBlock
    mlp: MLPBlock
    norms_dtype: torch.dtype
    weights_dtype: torch.dtype
    # projections that the trained ones are computed from, in every call and in its recompute as
    # well: autograd has to see an adapter's bias scaled, or the B of several projections split
    computed_from: tuple[tuple[Projection, ...], ...] = ()


def _read_call(layer: Any, hidden: Tensor, call: dict[str, Any]) -> LayerOperands:
    """Return a layer's operands. Raises a Refusal if it cannot run as one in this call."""
    refuse(reading.why_not_call(layer, call))

    def read() -> LayerOperands:
        reads = reading.read_whole(layer)
        refuse(reading.why_not_hidden(hidden, reading.dtype_of(layer), reads[0][0].weight.dtype))
        return read_operands(layer, reads)

    found = unchanged.result(layer, read, _without_buffers, _with_buffers)
    refuse(reading.why_not_hidden(hidden, found.norms_dtype, found.weights_dtype))
    return found


def _without_buffers(found: LayerOperands) -> LayerOperands:
    """Return operands to keep until the next call: a buffer is freed once weights have left it."""
    if found.computed_from:
        found = found._replace(trained=())
    first, second = found.mixing.frame, found.mlp.frame
    return _with(found, *(group.layout for group in (*first.groups, *second.groups)))


def _with_buffers(kept: LayerOperands) -> LayerOperands | None:
    first, second = kept.mixing.frame, kept.mlp.frame
    borders: Any = first.filling
    groups = borders.again((*first.groups, *second.groups))
    return None if groups is None else _with(kept, *groups)


def _with(found: LayerOperands, qkv: Any, o: Any, gate_up: Any, down: Any) -> LayerOperands:
    mixing, mlp = found.mixing, found.mlp
    first = mixing.frame._replace(inputs=qkv, output=o)
    second = mlp.frame._replace(inputs=gate_up, output=down)
    return found._replace(mixing=mixing._replace(frame=first), mlp=mlp._replace(frame=second))


def _run(layer: Any, operands: LayerOperands, hidden: Tensor, call: dict[str, Any]) -> Tensor:
    trained, mixing, mlp, *_, computed_from = operands
    first, second = mixing.frame, mlp.frame
    if computed_from:
        parts, _ = reading.parts_and_ranks(layer, computed_from)
        trained = *_trained(parts[:2], first), *_trained(parts[2:], second)
    seed = seed_for(hidden, *first.dropout_rates, *second.dropout_rates)
    if seed is not None:
        first, second = first._replace(seed=seed), second._replace(seed=seed)
    mask = call.get("attention_mask")
    found = gate = None
    if isinstance(mixing, MixerBlock):
        options = {name: one for name, one in call.items() if name not in NOT_THE_MIXERS}
        before = 2 * len(first.inputs.out_features)  # A and B of each in-projection
        hidden, found, gate, mixing = run_mixer(
            layer, hidden, mask, trained[:before], first, options
        )
        trained = trained[before:]
    else:
        attention = layer.self_attn
        cos, sin = call["position_embeddings"] if rotates(attention) else (None, None)
        mixing = mixing._replace(
            frame=first, positions=hidden.shape[1], cos=cos, sin=sin, mask=mask,
            q_scale=q_scale_of(attention, call), window=window_beside(attention, mask),
        )  # fmt: skip

    def run(output_needed: bool) -> Tensor:
        blocks = mixing, mlp._replace(frame=second, output_needed=output_needed)
        return DecoderLayer.apply(hidden, found, gate, *trained, blocks)

    return finished(layer, saving_last(run), call.get("per_layer_input"))


def read_operands(layer: Any, reads: list[list[Projection]]) -> LayerOperands:
    """Return a layer's operands, whose weights are in buffers then."""
    borders = borders_of(layer)
    assert borders is not None
    parts, ranks = reading.parts_and_ranks(layer, reads)
    qkv, o, gate_up, down = borders.find_or_make(reads, parts, ranks, reading.dtype_of(layer))
    form = layer_form(layer)
    multiplier = getattr(layer, form.multiplier) if form.multiplier else 1.0
    norms = reading.norms_of(layer)
    (norm_form,) = {known_form(norm, "RMSNorm") for norm in norms.values()}
    before_attention, after_attention, before_mlp, after_mlp = (
        Norm(norms[name].weight, getattr(norms[name], norm_form.eps), norm_form.zero_centered)
        if name
        else None
        for name in reading.names_of_norms(form)
    )
    # the layer before has a down like this one
    first = Frame(
        before_attention, qkv, o, borders, after_attention, multiplier,
        columns_before=down.grad_columns,
    )  # fmt: skip
    masks_before = sum(map(len, parts[:2]))
    second = Frame(
        before_mlp, gate_up, down, borders, after_mlp, multiplier, masks_before=masks_before
    )
    (mixing_trains, first), (mlp_trains, second) = (
        _with_reads(parts[:2], first),
        _with_reads(parts[2:], second),
    )
    is_split = sum(map(len, parts)) > sum(map(len, reads))
    is_computed = is_split or any(read.lora_bias is not None for one in reads for read in one)
    return LayerOperands(
        (*mixing_trains, *mlp_trains),
        MixerBlock(first) if has_mixer(layer) else attention_block(layer.self_attn, first),
        MLPBlock(second, activation_of(reading.mlp_of(layer))),
        reading.dtype_of(layer), reads[0][0].weight.dtype,
        tuple(map(tuple, reads)) if is_computed else (),
    )  # fmt: skip


def _with_reads(
    parts: Sequence[Sequence[Projection]], frame: Frame
) -> tuple[tuple[Tensor | None, ...], Frame]:
    """Return what a block trains, and the block with all else that its projections say."""
    trained = _trained(parts, frame)
    rates = tuple(read.dropout for group in parts for read in group)
    return trained, frame._replace(dropout_rates=rates, trains_others=len(trained) > 2 * len(rates))


def _trained(parts: Sequence[Sequence[Projection]], frame: Frame) -> tuple[Tensor | None, ...]:
    """Return the tensors that a block trains, as `Trained` has them."""
    reads = [read for group in parts for read in group]
    adapters = [tensor for read in reads for tensor in (read.A, read.B)]
    norms = [
        norm.weight if norm and norm.weight.requires_grad else None
        for norm in (frame.norm, frame.norm_after)
    ]
    biases = [bias_of(read) if any(map(trains_bias, reads)) else None for read in reads]
    others = [*biases, *norms]
    return *adapters, *([] if all(other is None for other in others) else others)


# --- when `fuse` is called ------------------------------------------------------------------------


def give_borders(layers: Sequence[tuple[str, Any]]) -> None:
    """Connect the borders of a model's fused layers, given in the order of a forward. Move the
    weights of those that can run as one now into buffers."""
    handover, scratches = Handover(), Scratches()
    # sharded weights are gathered while the layer before them runs, which has other matrices
    gathering, alternating = Gathering(), (Scratches(), Scratches())
    first_with: dict[int, str] = {}
    for index, (name, layer) in enumerate(layers):
        borders = borders_of(layer)
        assert borders is not None
        weights = [base.weight for base in reading.base_layers(layer)]
        replica_of = next(filter(None, (first_with.get(id(weight)) for weight in weights)), None)
        first_with.update((id(weight), name) for weight in weights if replica_of is None)
        is_sharded = any(isinstance(weight, ShardedWeight) for weight in weights)
        borders.scratches = alternating[index % 2] if is_sharded else scratches
        borders.handover, borders.index = handover, index
        borders.gathering, borders.replica_of = gathering, replica_of
        reads, reason = attempt(reading.read_whole, layer)
        if not reason and not _waits(reads[0][0].weight, borders.kind):
            borders.find_or_make(
                reads, *reading.parts_and_ranks(layer, reads), reading.dtype_of(layer)
            )
        for base in reading.base_layers(layer):
            borders.kind.take_in(base)


def _waits(weight: Tensor, kind: type[Border]) -> bool:
    """Return True if a layer's weights stay where they are until its first forward: where it cannot
    run before the model is moved, or where fully_shard may take them."""
    if weight.device.type == "meta" or is_dtensor(weight) or (kind.may_wait and may_shard_later()):
        return True
    return weight.device.type == "cpu" and KERNELS_WANT_A_GPU

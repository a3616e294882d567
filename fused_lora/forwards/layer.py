"""The switch `layer`: the forward of a whole decoder layer, on buffers of weights.

`layer_reading.py` reads the layer. It runs as one function, or with a mixer as two around that. A
mixture of experts is another function behind its first block (`mixture.py`). If an MLP cannot run
so, attention or the mixer still runs as a block. A layer that cannot do that either runs its other
fused parts one by one. Both warn once.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..foreign.ownership import fused_parts_of
from ..foreign.parallel import FLATTENED, is_dtensor, may_shard_later
from ..foreign.versions import CACHE, by_name, class_forward
from ..kernels.rows import Handover
from ..layer.attention_block import AttentionBlock
from ..layer.decoder_layer import DecoderLayer
from ..layer.gathering import Gathering
from ..layer.mixer_block import MixerBlock
from ..layer.mlp_block import MLPBlock
from ..layer.operands import Frame, Trained
from ..layer.residual import Norm
from ..layer.scratch import Scratches
from ..reading import unchanged
from ..reading.aside import say_once
from ..reading.known import known_form, layer_form
from ..reading.projection import Projection, seed_for
from ..reading.refusal import attempt, refuse
from ..reading.site import KERNELS_WANT_A_GPU
from ..rerun import once, saving_last
from ..weights.borders import Border, borders_of
from ..weights.four_bit_parts import why_not_input
from ..weights.sourced_weight import SourcedWeight
from . import layer_reading as reading
from .attend import mask_for_attention
from .attention import attention_block, in_call
from .linear import trained_by, with_reads
from .mixer_layer import has_mixer, run_mixer
from .mixture import Mixture, run_mixture
from .mlp import activation_of
from .rms_norm import active_norm, after_attention, finished, normed_layer_forward

# what a call tells a layer that its mixer does not take
NOT_THE_MIXERS = {
    "attention_mask", "position_ids", CACHE, "use_cache", "position_embeddings", "per_layer_input",
}  # fmt: skip


def layer_forward(layer: Any, parts: frozenset[str], hidden_states: Tensor, *inputs, **options):
    """Run a layer as one, or its first block, or else in parts."""
    if reading.is_flattened_in(layer):
        raise RuntimeError(f"a fused {type(layer).__name__} cannot run: {FLATTENED}")
    call = by_name(layer, inputs) | options
    # a recompute computes what the forward did: nothing is read again
    found, reason = once(lambda: attempt(_read_call, layer, hidden_states, call), is_small=True)
    why = reason or found.left
    # inference may be called in any way, with a cache for example
    if why and torch.is_grad_enabled():
        say_once(layer, why)
    if not reason:
        return _run(layer, found, hidden_states, call)
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
    mlp: MLPBlock | None  # None: there is a mixture, or the class's forward runs it
    mixture: Mixture | None
    left: str  # the reason why the class's forward runs it; "": it does not
    norms_dtype: torch.dtype
    weights_dtype: torch.dtype
    # projections that the trained ones are computed from, in every call and in its recompute as
    # well: autograd has to see an adapter's bias scaled, or the B of several projections split
    computed_from: tuple[tuple[Projection, ...], ...] = ()


def _read_call(layer: Any, hidden: Tensor, call: dict[str, Any]) -> LayerOperands:
    """Return a layer's operands. Raises a Refusal if no block of it can run in this call."""
    refuse(reading.why_not_call(layer, hidden, call))

    def read() -> LayerOperands:
        running = reading.read_running(layer)
        norms = reading.dtype_of(layer)
        refuse(reading.why_not_hidden(hidden, norms, running.weights_dtype(norms)))
        return read_operands(layer, running)

    found = unchanged.result(layer, read, _without_buffers, _with_buffers)
    refuse(reading.why_not_hidden(hidden, found.norms_dtype, found.weights_dtype))
    if found.mixture is not None:
        refuse(why_not_input(hidden, found.mixture.shared) or None)
    return found


def _without_buffers(found: LayerOperands) -> LayerOperands:
    """Return operands to keep until the next call: a buffer is freed once weights have left it."""
    if found.computed_from:
        found = found._replace(trained=())
    return _with(found, *(group and group.layout for group in _groups_of(found)))


def _with_buffers(kept: LayerOperands) -> LayerOperands | None:
    borders: Any = kept.mixing.frame.filling
    groups = borders.again(_groups_of(kept))
    return None if groups is None else _with(kept, *groups)


def _groups_of(found: LayerOperands) -> tuple:
    """Return what the four buffers hold, None for those of an MLP that does not run."""
    return *found.mixing.frame.groups, *(found.mlp.frame.groups if found.mlp else (None, None))


def _with(found: LayerOperands, qkv: Any, o: Any, gate_up: Any, down: Any) -> LayerOperands:
    first = found.mixing.frame._replace(inputs=qkv, output=o)
    found = found._replace(mixing=found.mixing._replace(frame=first))
    if found.mlp is None:
        return found
    second = found.mlp.frame._replace(inputs=gate_up, output=down)
    return found._replace(mlp=found.mlp._replace(frame=second))


def _run(layer: Any, operands: LayerOperands, hidden: Tensor, call: dict[str, Any]) -> Tensor:
    trained, mixing, mlp, mixture, *_, computed_from = operands
    if computed_from:
        parts, _ = reading.parts_and_ranks(layer, computed_from)
        trained = trained_by([*chain(*parts[:2])], mixing.frame)
        if mlp is not None:
            trained += trained_by([*chain(*parts[2:])], mlp.frame)
    rates = [rate for block in (mixing, mlp) if block for rate in block.frame.dropout_rates]
    first = mixing.frame
    if (seed := seed_for(hidden, *rates)) is not None:
        first = first._replace(seed=seed)
        mlp = mlp and mlp._replace(frame=mlp.frame._replace(seed=seed))
    mask = call.get("attention_mask")
    found = gate = None
    if isinstance(mixing, MixerBlock):
        options = {name: one for name, one in call.items() if name not in NOT_THE_MIXERS}
        count = first.tensors
        before, after = Trained.from_flat(trained[:count], first.projections).split_last()
        hidden, found, gate, mixing = run_mixer(layer, hidden, mask, before, first, options)
        trained = *after.flat(), *trained[count:]
    else:
        mixing = in_call(
            mixing._replace(frame=first), layer.self_attn, hidden, call["position_embeddings"],
            mask, call,
        )  # fmt: skip
    layer_input = call.get("per_layer_input")
    if mlp is None:
        output = DecoderLayer.apply(hidden, found, gate, *trained, (mixing,))
        if mixture is not None:
            return run_mixture(layer, reading.mlp_of(layer), mixture, *output)
        return after_attention(layer, output, layer_input)

    def run(output_needed: bool) -> Tensor:
        blocks = mixing, mlp._replace(output_needed=output_needed)
        return DecoderLayer.apply(hidden, found, gate, *trained, blocks)

    return finished(layer, saving_last(run), layer_input)


def read_operands(layer: Any, running: reading.Running) -> LayerOperands:
    """Return a layer's operands, whose weights are in buffers then."""
    borders = borders_of(layer)
    assert borders is not None
    reads, left, mixture = running
    parts, ranks = reading.parts_and_ranks(layer, reads)
    dtype = reading.dtype_of(layer)
    found: Any = borders.find_or_make(reads, parts, ranks, dtype)
    qkv, o, gate_up, down = found
    form = layer_form(layer)
    multiplier = getattr(layer, form.multiplier) if form.multiplier else 1.0
    before, after, before_mlp, after_mlp = reading.names_of_norms(form)
    trained, first = with_reads([*chain(*parts[:2])], Frame(
        _norm(layer, before), qkv, o, borders, _norm(layer, after), multiplier,
        norm_next=None if mixture is None else _norm(layer, before_mlp),
        # the layer before has a down like this one
        columns_before=0 if down is None else down.grad_columns,
    ))  # fmt: skip
    mlp = None
    if down is not None:
        its, second = with_reads([*chain(*parts[2:])], Frame(
            _norm(layer, before_mlp), gate_up, down, borders, _norm(layer, after_mlp), multiplier,
            masks_before=sum(map(len, parts[:2])),
        ))  # fmt: skip
        trained += its
        mlp = MLPBlock(second, activation_of(reading.mlp_of(layer)))
    is_split = sum(map(len, parts)) > sum(map(len, reads))
    is_computed = is_split or any(read.lora_bias is not None for one in reads for read in one)
    return LayerOperands(
        trained,
        MixerBlock(first) if has_mixer(layer) else attention_block(layer.self_attn, first),
        mlp, mixture, left, dtype, running.weights_dtype(dtype),
        tuple(map(tuple, reads)) if is_computed else (),
    )  # fmt: skip


def _norm(layer: Any, name: str) -> Norm | None:
    if not name:
        return None
    norm = active_norm(layer._modules[name])
    form = known_form(norm, "RMSNorm")
    return Norm(norm.weight, getattr(norm, form.eps), form.zero_centered)


# --- when `fuse` is called ------------------------------------------------------------------------


def give_borders(layers: Sequence[tuple[str, Any]]) -> None:
    """Connect the borders of a model's fused layers, given in the order of a forward. Move the
    weights of those that can run as one now into buffers."""
    handover, scratches = Handover(), Scratches()
    # weights are gathered while the layer before runs, whose own lie in other memory
    gathering, ahead = Gathering(), (Scratches(), Scratches())
    gathered = 0
    first_with: dict[int, str] = {}
    for name, layer in layers:
        borders = borders_of(layer)
        assert borders is not None
        weights = [base.weight for base in reading.base_layers(layer)]
        replica_of = next(filter(None, (first_with.get(id(weight)) for weight in weights)), None)
        first_with.update((id(weight), name) for weight in weights if replica_of is None)
        borders.scratches, borders.ahead = scratches, ahead[gathered % 2]
        borders.handover, borders.index = handover, gathered
        gathered += any(isinstance(weight, SourcedWeight) for weight in weights)
        borders.gathering, borders.replica_of = gathering, replica_of
        running, reason = attempt(reading.read_running, layer)
        if not reason and not _waits(running.groups[0][0].weight, borders.kind):
            parts = reading.parts_and_ranks(layer, running.groups)
            borders.find_or_make(running.groups, *parts, reading.dtype_of(layer))
        for base in reading.base_layers(layer):
            borders.kind.take_in(base)


def _waits(weight: Tensor, kind: type[Border]) -> bool:
    """Return True if a layer's weights stay where they are until its first forward: where it cannot
    run before the model is moved, or where fully_shard may take them."""
    if weight.device.type == "meta" or is_dtensor(weight) or (kind.may_wait and may_shard_later()):
        return True
    return weight.device.type == "cpu" and KERNELS_WANT_A_GPU

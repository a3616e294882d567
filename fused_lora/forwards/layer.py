"""The switch `layer`: the forward of a whole decoder layer, on buffers of weights.

`fuse` sets a `BorderedForward` on each layer, which holds the layer's borders (`borders.py`). A
layer that cannot run as one runs its other fused parts one by one, and warns once.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fused_mlp.launching import DTYPES
from fused_mlp.utils import compute_dtype

from ..foreign.forwards import fused_parts_of
from ..foreign.parallel import FLATTENED, is_dtensor, is_flattened, is_in_fsdp, may_shard_later
from ..foreign.versions import by_name, class_forward
from ..kernels.rows import Handover
from ..layer.buffer import WeightGroup
from ..layer.decoder_layer import DecoderLayer
from ..layer.operands import FrozenLayer, Others
from ..layer.residual import Norm
from ..layer.scratch import Scratches
from ..layer.shards import Gathering
from ..reading.aside import say_once
from ..reading.known import inner_norm, known_form, layer_form
from ..reading.projection import Projection, bias_of, seed_for, trains_bias
from ..reading.refusal import Refusal, attempt, refuse
from ..reading.site import KERNELS_WANT_A_GPU, FusedForward
from ..rerun import once, saving_last
from ..weights.borders import Border, LayerBorders
from ..weights.default_border import DefaultBorder
from ..weights.sharded_weight import ShardedWeight
from .attend import mask_for_attention, q_scale_of, rotates, window_beside
from .attention import head_norms_of, why_not_inputs
from .layer_reading import (
    base_layers,
    mlp_of,
    names_of_norms,
    norms_of,
    parts_and_ranks,
    read_groups,
    why_not_weights,
)
from .mixer_layer import has_mixer, run_mixer_layer, why_not_mask, why_slow
from .mlp import activation_of
from .rms_norm import finished, normed_layer_forward


class BorderedForward(FusedForward):
    """A FusedForward that holds its layer's borders. kind: their class; None keeps them as they
    are."""

    def __init__(
        self,
        function: Callable,
        module: nn.Module,
        parts: frozenset[str],
        borders: LayerBorders | None,
        kind: type[Border] | None = None,
    ):
        super().__init__(function, module, parts)
        if borders is None or kind not in (None, borders.kind):
            borders = LayerBorders(kind or DefaultBorder)
        self.borders = borders


def borders_of(module: nn.Module) -> LayerBorders | None:
    """Return the borders that a module's forward runs on, if any."""
    forward = vars(module).get("forward")
    owner = forward.__self__ if isinstance(forward, MethodType) else None  # see fused_parts_of
    return owner.borders if isinstance(owner, BorderedForward) else None


def give_borders(layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Connect the borders of a model's fused layers, given in the order of a forward. Move the
    weights of those that can run as one now into buffers."""
    handover, scratches = Handover(), Scratches()
    # sharded weights are gathered while the layer before them runs, which has other matrices
    gathering, alternating = Gathering(), (Scratches(), Scratches())
    first_with: dict[int, str] = {}
    for index, (name, layer) in enumerate(layers):
        owner: Any = vars(layer)["forward"].__self__
        weights = [base.weight for base in base_layers(layer)]
        replica_of = next(filter(None, (first_with.get(id(one)) for one in weights)), None)
        first_with.update((id(one), name) for one in weights if replica_of is None)
        is_sharded = any(isinstance(one, ShardedWeight) for one in weights)
        owner.borders.scratches = alternating[index % 2] if is_sharded else scratches
        owner.borders.handover, owner.borders.index = handover, index
        owner.borders.gathering = gathering
        owner.borders.replica_of = replica_of
        reads, reason = attempt(_read, layer)
        if not reason and not _waits(reads[0][0].weight, owner.borders.kind):
            owner.borders.find_or_make(reads, *parts_and_ranks(layer, reads), _dtype_of(layer))
        for base in base_layers(layer):
            owner.borders.kind.take_in(base)


def _waits(weight: Tensor, kind: type[Border]) -> bool:
    """Return True if a layer's weights stay where they are until its first forward: where it cannot
    run before the model is moved, or where fully_shard may take them."""
    if weight.device.type == "meta" or is_dtensor(weight) or (kind.may_wait and may_shard_later()):
        return True
    return weight.device.type == "cpu" and KERNELS_WANT_A_GPU


# --- reading --------------------------------------------------------------------------------------


def read_layer(layer: Any, kind: type[Border] | None = None) -> dict[str, str]:
    """Raise a Refusal if a layer cannot run as one now, on borders of the kind asked for. Return
    what of it is a library's, and slow."""
    _read(layer, kind)
    refuse(FLATTENED if _is_flattened(layer) else None)
    return why_slow(layer)


def _is_flattened(layer: Any) -> bool:
    return is_in_fsdp(layer) and any(map(is_flattened, base_layers(layer)))


def _operands(layer: Any, reads: list[list[Projection]]) -> tuple:
    borders = borders_of(layer)
    assert borders is not None
    parts, ranks = parts_and_ranks(layer, reads)
    qkv, o, gate_up, down = borders.find_or_make(reads, parts, ranks, _dtype_of(layer))
    form = layer_form(layer)
    multiplier = getattr(layer, form.multiplier) if form.multiplier else 1.0
    norms = norms_of(layer)
    (norm_form,) = {known_form(norm, "RMSNorm") for norm in norms.values()}
    its_norms = [
        Norm(norms[name].weight, getattr(norms[name], norm_form.eps), norm_form.zero_centered)
        if name
        else None
        for name in names_of_norms(form)
    ]
    before_attention, after_attention, before_mlp, after_mlp = its_norms
    every = [part for group in parts for part in group]
    adapters = (tensor for read in every for tensor in (read.A, read.B))
    others = _others(every, *its_norms)
    return *adapters, *others, FrozenLayer(
        norm_before_attention=before_attention, norm_after_attention=after_attention,
        norm_before_mlp=before_mlp, norm_after_mlp=after_mlp, qkv=qkv, o=o, gate_up=gate_up,
        down=down, filling=borders, multiplier=multiplier, activation=activation_of(mlp_of(layer)),
        dropout_rates=tuple(read.dropout for read in every),
        **_attention_options(layer, qkv),
    )  # fmt: skip


def _attention_options(layer: Any, qkv: WeightGroup) -> dict[str, Any]:
    """Return the fields of FrozenLayer that concern attention alone."""
    if has_mixer(layer):
        return {}
    attention = layer.self_attn
    form = known_form(attention, "Attention")
    heads, kv_heads, _ = (out // attention.head_dim for out in qkv.out_features)
    return {
        "heads": heads // 2 if form.has_gate else heads,
        "kv_heads": kv_heads,
        "attention_scaling": attention.scaling,
        "head_norms": head_norms_of(attention),
        "has_gate": form.has_gate,
        "interleaved": form.interleaved,
    }


def _others(reads: Sequence[Projection], *norms: Norm | None) -> Others | tuple[()]:
    """Return the biases and norms that are trained beside the adapters, if any."""
    trained = [norm.weight if norm and norm.weight.requires_grad else None for norm in norms]
    has_biases = any(map(trains_bias, reads))
    if not has_biases and all(norm is None for norm in trained):
        return ()
    return Others(*(bias_of(read) if has_biases else None for read in reads), *trained)


def _dtype_of(layer: Any) -> torch.dtype:
    return inner_norm(layer).weight.dtype


def _read(layer: Any, asked: type[Border] | None = None) -> list[list[Projection]]:
    """Return the projections of a layer by buffer. Raises a Refusal if it cannot run as one now.

    asked: the kind of borders that it will have, if it does not have them yet.
    """
    borders = borders_of(layer)
    if borders is not None and borders.replica_of is not None:
        raise Refusal(
            f"layer_replication gives it the base weights of {borders.replica_of}: only the first "
            "runs whole"
        )
    kind = DefaultBorder if borders is None else borders.kind
    refuse(why_not_weights(layer, kind))
    return read_groups(layer, asked or kind)


def _read_call(layer: Any, *call: Any) -> list[list[Projection]]:
    """Run `_read` for a call with these arguments."""
    refuse(_why_not_inputs(layer, *call[1:]))
    reads = _read(layer)
    refuse(_why_not_dtypes(layer, call[0], reads[0][0].weight.dtype))
    return reads


def _why_not_inputs(
    layer: Any, mask, past_key_values, position_embeddings, options: dict
) -> str | None:
    """Return the reason if the arguments of this call keep the layer from running fused."""
    if (reason := why_not_inputs(mask, past_key_values, options)) is not None:
        return reason
    if has_mixer(layer):
        return why_not_mask(mask)
    if position_embeddings is None:
        return "it was given no position_embeddings"
    return None


def _why_not_dtypes(layer: Any, hidden: Tensor, stored: torch.dtype) -> str | None:
    """Return the reason if the input of this call does not fit the layer's norms, or the dtype that
    it is computed in its weights. stored: the dtype of these."""
    dtype, computed = _dtype_of(layer), compute_dtype(hidden)
    weights = stored if stored in DTYPES else dtype  # codes are not computed with
    if hidden.dtype != dtype or computed != weights:
        return (
            f"its weights are {weights}, input {hidden.dtype}, computation {computed}: "
            "give all one dtype"
        )
    return None


# --- the forward ----------------------------------------------------------------------------------


def layer_forward(layer: Any, parts: frozenset[str], hidden_states: Tensor, *inputs, **options):
    """Run a layer as one, or else in parts."""
    return _forward(layer, parts, hidden_states, **by_name(layer, inputs), **options)


def _forward(
    layer: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values=None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    per_layer_input: Tensor | None = None,
    **options,
):
    """Run `layer_forward` on its inputs by name."""
    if _is_flattened(layer):
        raise RuntimeError(f"a fused {type(layer).__name__} cannot run: {FLATTENED}")
    call = hidden_states, attention_mask, past_key_values, position_embeddings, options
    # a recompute computes what the forward did: nothing is read again
    reads, reason = once(lambda: attempt(_read_call, layer, *call), is_small=True)
    if reason:
        # inference may be called in any way, with a cache for example
        if torch.is_grad_enabled():
            say_once(layer, reason)
        # a mixer takes a mask [batch, positions]; the class's forward takes no documents
        if not has_mixer(layer) and not fused_parts_of(layer.self_attn):
            attention_mask = mask_for_attention(
                layer.self_attn, attention_mask, hidden_states.dtype
            )
        own = normed_layer_forward if "rms_norm" in parts else _class_forward
        if per_layer_input is not None:
            options["per_layer_input"] = per_layer_input
        return own(
            layer, parts, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache,
            position_embeddings=position_embeddings, **options,
        )  # fmt: skip
    if has_mixer(layer):
        return _run_around(layer, reads, hidden_states, attention_mask, options)
    assert position_embeddings is not None
    scale = q_scale_of(layer.self_attn, {"position_ids": position_ids})
    total = _run(layer, reads, hidden_states, position_embeddings, attention_mask, scale)
    return finished(layer, total, per_layer_input)


def _run(
    layer: Any,
    reads: list[list[Projection]],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    mask: Tensor | None,
    q_scale: Tensor | None,
) -> Tensor:
    *trained, frozen = _operands_now(layer, reads)
    angles = position_embeddings if rotates(layer.self_attn) else (None, None)
    seed = seed_for(hidden_states, *frozen.dropout_rates)
    window = window_beside(layer.self_attn, mask)

    def run(output_needed: bool) -> Tensor:
        now = frozen._replace(
            output_needed=output_needed, seed=seed, q_scale=q_scale, window=window
        )
        return DecoderLayer.apply(hidden_states, *angles, mask, *trained, now)

    return saving_last(run)


def _run_around(
    layer: Any, reads: list[list[Projection]], hidden: Tensor, mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    *trained, frozen = _operands_now(layer, reads)
    frozen = frozen._replace(seed=seed_for(hidden, *frozen.dropout_rates))
    return run_mixer_layer(layer, hidden, mask, trained, frozen, options)


def _operands_now(layer: Any, reads: list[list[Projection]]) -> tuple:
    if any(read.lora_bias is not None for group in reads for read in group):
        return _operands(layer, reads)  # autograd has to see it scaled in the recompute as well
    return once(lambda: _operands(layer, reads), is_small=True)


def _class_forward(layer: Any, parts: frozenset[str], *inputs, **options):
    return class_forward(layer, *inputs, **options)

"""Reading a decoder layer for the switch `layer`: its projections by buffer and its norms, as they
are now, or why it cannot run as one."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_mlp.launching import DTYPES
from fused_mlp.utils import compute_dtype

from ..foreign.ownership import fused_parts_of
from ..foreign.parallel import FLATTENED, is_flattened, is_in_fsdp
from ..foreign.versions import CACHE
from ..reading.aside import why_unloaded
from ..reading.forms import LayerForm
from ..reading.four_bit import why_not_alike
from ..reading.known import inner_norm, known_form, layer_form, why_not_class, why_not_whole
from ..reading.projection import Projection, read_projection, trains_bias, why_call
from ..reading.refusal import Refusal, attempt, refuse
from ..weights.borders import Border, borders_of
from ..weights.default_border import DefaultBorder
from .attention import head_norms_of, split_qkv, why_not_head_norms, why_not_inputs, why_not_sdpa
from .mixer_layer import has_mixer, mixer_of, noun_of, why_not_mixer, why_slow
from .mlp import split_gate_up, why_not_activation
from .rms_norm import active_norm, why_mixed, why_not_within


def read_layer(layer: Any, kind: type[Border] | None = None) -> dict[str, str]:
    """Raise a Refusal if a layer cannot run as one now, on borders of the kind asked for. Return
    what of it is a library's, and slow."""
    read_whole(layer, kind)
    refuse(FLATTENED if is_flattened_in(layer) else None)
    return why_slow(layer)


def is_flattened_in(layer: Any) -> bool:
    """Return True if FSDP1 holds a weight of this layer."""
    return is_in_fsdp(layer) and any(map(is_flattened, base_layers(layer)))


def why_not_call(layer: Any, call: dict[str, Any]) -> str | None:
    """Return the reason if a layer cannot run as one in a call with these arguments."""
    mask = call.get("attention_mask")
    if (reason := why_not_inputs(mask, call.get(CACHE), call)) is not None:
        return reason
    if has_mixer(layer):
        if mask is not None and mask.ndim != 2:
            return f"its attention_mask is {list(mask.shape)}, should be [batch, positions]"
    elif call.get("position_embeddings") is None:
        return "it was given no position_embeddings"
    return None


def why_not_hidden(hidden: Tensor, norms: torch.dtype, weights: torch.dtype) -> str | None:
    """Return the reason if a layer whose norms and weights have these dtypes cannot run as one on
    this input."""
    computed = compute_dtype(hidden)
    if weights not in DTYPES:  # codes are not computed with
        weights = norms
    if hidden.dtype == norms and computed == weights:
        return None
    return (
        f"its weights are {weights}, input {hidden.dtype}, computation {computed}: "
        "give all one dtype"
    )


def read_whole(layer: Any, asked: type[Border] | None = None) -> list[list[Projection]]:
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
    refuse(kind.why_not(layer_weights(layer)))
    return read_groups(layer, asked or kind)


def dtype_of(layer: Any) -> torch.dtype:
    """Return the dtype of a layer's norms, which its weights may not show."""
    return inner_norm(layer).weight.dtype


def read_groups(layer: Any, kind: type[Border]) -> list[list[Projection]]:
    """Return the projections of a layer by buffer. Raises a Refusal if it cannot run as one now, on
    such borders."""
    refuse(_why_not_parts(layer))
    if has_mixer(layer) and kind.precision:
        raise Refusal(f"it has {noun_of(layer)}, which does not run{kind.precision}")
    norms = [norm.weight for norm in norms_of(layer).values()]
    dtype, device = norms[0].dtype, norms[0].device
    groups = []
    for owner, names in grouped_projections(layer):
        group = []
        for name in names:
            read, reason = attempt(_read_one, owner, name, kind)
            if reason:
                raise Refusal(f"{name}: {reason}")
            for adapter in (read.A, read.B):
                if adapter.dtype not in DTYPES:
                    raise Refusal(
                        f"an adapter is {adapter.dtype}, should be bfloat16, float16 or float32"
                    )
            _check_alike(name, read, dtype, device)
            group.append(read)
        groups.append(group)
    head_norms = None if has_mixer(layer) else head_norms_of(layer.self_attn)
    for weight in (*norms, *(head_norms or ())[:2]):
        if (weight.dtype, weight.device) != (dtype, device):
            raise Refusal(
                f"its norms are {weight.dtype} on {weight.device} and {dtype} on {device}: make "
                "them alike"
            )
    every = [read for group in groups for read in group]
    if len(found := {read.weight.dtype for read in every if read.weight.dtype in DTYPES}) > 1:
        raise Refusal(f"its projections compute in {' and '.join(sorted(map(str, found)))}")
    if has_mixer(layer) and any(map(trains_bias, every)):
        raise Refusal(
            "an adapter has a bias, or a bias is trained: neither runs in a layer with "
            f"{noun_of(layer)}"
        )
    refuse(why_unloaded(layer, every))
    return groups


def takes_attention(layer: Any, kind: type[Border]) -> bool:
    """Return True if such borders can take the projections of a layer's attention."""
    qkv, o = grouped_projections(layer)[:2]
    found = (attempt(_read_one, owner, name, kind) for owner, names in (qkv, o) for name in names)
    return not any(reason for _, reason in found)


def _read_one(owner: Any, name: str, kind: type[Border]) -> Projection:
    projection = owner._modules[name]
    # attention's o may have a fused forward, for when the layer steps aside
    own_forward = not fused_parts_of(projection)
    return read_projection(projection, own_forward, kind.why_not_base)


def _check_alike(name: str, read: Projection, dtype: torch.dtype, device: torch.device) -> None:
    """Raise a Refusal unless a projection's weight and bias have the dtype and device of norms."""
    stored = read.weight.dtype
    weight_dtype = dtype if stored in DTYPES else stored  # codes, already checked by `kind`
    bias_dtype = dtype
    if read.is_packed and stored != dtype:
        if dtype != torch.float32:
            raise Refusal(f"{name}: {why_not_alike(read.base, dtype)}")
        # norms and the residual in fp32, as prepare_model_for_kbit_training leaves them
        weight_dtype = stored
        bias_dtype = dtype if read.bias is None else read.bias.dtype  # bitsandbytes casts it
    for tensor, wanted in ((read.weight, weight_dtype), (read.bias, bias_dtype)):
        if tensor is not None and (tensor.dtype, tensor.device) != (wanted, device):
            raise Refusal(
                f"{name} is {tensor.dtype} on {tensor.device}, norms {dtype} on {device}: "
                "make them alike"
            )


def layer_weights(layer: Any) -> Iterator[Tensor]:
    """Yield the weights under a layer's projections, then that of a norm."""
    yield from (base.weight for base in base_layers(layer))
    yield inner_norm(layer).weight


def base_layers(layer: Any) -> Iterator[Any]:
    """Yield the linear layers under the layer's projections."""
    for owner, names in grouped_projections(layer):
        for name in names:
            projection = owner._modules[name]
            base = getattr(projection, "base_layer", projection)
            if isinstance(base, nn.Linear):
                yield base


def grouped_projections(layer: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Return, for each of a layer's four buffers, the module that has its projections, and their
    names."""
    mlp = mlp_of(layer)
    if has_mixer(layer):
        mixer = mixer_of(layer)
        form = known_form(mixer, layer_form(layer).mixer_kind)
    else:
        mixer = layer.self_attn
        form = known_form(mixer, "Attention")
    return [
        (owner, names)
        for owner, form in ((mixer, form), (mlp, known_form(mlp, "MLP")))
        for names in (form.projections, (form.output,))
    ]


def mlp_of(layer: Any) -> Any:
    return layer._modules[layer_form(layer).mlp]


def parts_and_ranks(
    layer: Any, reads: Sequence[Sequence[Projection]]
) -> tuple[list[list[Projection]], list[list[int]]]:
    """Return the projections by buffer, and the largest rank of each one's adapters."""
    qkv, o, gate_up, down = map(list, reads)
    parts = [
        qkv if has_mixer(layer) else split_qkv(layer.self_attn, qkv),
        o,
        split_gate_up(gate_up),
        down,
    ]
    ranks = []
    for group_parts, (owner, names) in zip(parts, grouped_projections(layer), strict=True):
        adapters = (getattr(owner._modules[name], "lora_A", {}).values() for name in names)
        largest = [max((A.out_features for A in its), default=0) for its in adapters]
        ranks.append(largest * (len(group_parts) // len(names)))
    return parts, ranks


def names_of_norms(form: LayerForm) -> tuple[str, str, str, str]:
    """Return the names of a layer's norms, "" for those it does not have."""
    if form.has_dropout:
        return form.before_attention, "", form.before_mlp, ""
    return form.before_attention, form.after_attention, form.before_mlp, form.after_mlp


def norms_of(layer: Any) -> dict[str, Any]:
    """Return a layer's norms by name, as PEFT runs them."""
    names = filter(None, names_of_norms(layer_form(layer)))
    return {name: active_norm(layer._modules[name]) for name in names}


def _why_not_parts(layer: Any) -> str | None:
    """Return the reason if a part of the layer other than its projections computes something we do
    not fuse."""
    if reason := why_not_class(layer, "Layer") or why_not_whole(layer) or why_mixed(layer):
        return reason
    form = layer_form(layer)
    kinds = {form.mlp: "MLP"} if has_mixer(layer) else {"self_attn": "Attention", form.mlp: "MLP"}
    for name, kind in kinds.items():
        part = layer._modules[name]
        if (reason := why_not_class(part, kind) or why_call(part, own_forward=False)) is not None:
            return f"{name}: {reason}"
    norms = norms_of(layer)
    for name, norm in norms.items():
        if (reason := why_not_within(norm)) is not None:
            return f"{name}: {reason}"
    if len({known_form(norm, "RMSNorm") for norm in norms.values()}) > 1:
        return "its norms are of different forms"
    for name in (form.after_attention, form.after_mlp) if form.has_dropout else ():
        dropout = layer._modules[name]
        if type(dropout) is not nn.Dropout:
            return f"{name}: it is {type(dropout).__name__}, not torch.nn.Dropout"
        if dropout.training and dropout.p:
            return f"{name}: resid_pdrop is {dropout.p}: load the model with resid_pdrop=0.0"
        if (reason := why_call(dropout)) is not None:
            return f"{name}: {reason}"
    if has_mixer(layer):
        if (reason := why_not_mixer(layer)) is not None:
            return reason
    elif reason := why_not_sdpa(layer.self_attn) or why_not_head_norms(layer.self_attn):
        return f"self_attn: {reason}"
    if (reason := why_not_activation(mlp_of(layer))) is not None:
        return f"{form.mlp}: {reason}"
    return None

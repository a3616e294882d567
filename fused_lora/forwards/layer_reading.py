"""Reading a decoder layer for the switch `layer`: its projections by buffer and its norms, as they
are now, or why it cannot run as one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
from .attend import (
    head_norms_of,
    why_not_head_norms,
    why_not_inputs,
    why_not_sdpa,
    why_not_sinks,
)
from .attention import split_qkv
from .linear import bases_under, largest_ranks
from .mixer_layer import has_mixer, mixer_of, noun_of, why_not_mixer, why_slow
from .mixture import Mixture, read_mixture
from .mlp import split_gate_up, why_not_activation
from .rms_norm import active_norm, why_mixed, why_not_frozen, why_not_within


def read_layer(layer: Any, kind: type[Border] | None = None) -> dict[str, str]:
    """Raise a Refusal if no block of a layer can run now, on borders of the kind asked for. Return
    what of it is a library's, and slow, or not in that precision, and under "" why it does not run
    whole."""
    running, borders = read_running(layer, kind), borders_of(layer)
    refuse(FLATTENED if is_flattened_in(layer) else None)
    left = why_slow(layer) | ({"": running.left} if running.left else {})
    precision = (kind or (DefaultBorder if borders is None else borders.kind)).precision
    if precision and running.mixture is not None:
        experts = f"{layer_form(layer).mlp}.{running.mixture.form.experts}"
        left[experts] = f"they do not run{precision}, but in 16 bits"
    return left


def children_in_blocks(layer: Any, left: dict[str, str]) -> list[str]:
    """Return the names of a layer's modules that run in its blocks, given what `read_layer` did."""
    if "" not in left:
        return [*layer._modules]
    mixing, _ = block_forms(layer)
    return [mixing.name, *filter(None, mixing.norms)]


def is_flattened_in(layer: Any) -> bool:
    """Return True if FSDP1 holds a weight of this layer."""
    return is_in_fsdp(layer) and any(map(is_flattened, base_layers(layer)))


def why_not_call(layer: Any, hidden: Tensor, call: dict[str, Any]) -> str | None:
    """Return the reason if no block of a layer can run in a call with these arguments."""
    mask = call.get("attention_mask")
    if (reason := why_not_inputs(mask, call.get(CACHE), call)) is not None:
        return reason
    if has_mixer(layer):
        if mask is not None and mask.ndim != 2:
            return f"its attention_mask is {list(mask.shape)}, should be [batch, positions]"
    elif call.get("position_embeddings") is None:
        return "it was given no position_embeddings"
    else:
        return _within("self_attn", why_not_sinks(layer.self_attn, hidden, mask))
    return None


def why_not_hidden(hidden: Tensor, norms: torch.dtype, weights: torch.dtype) -> str | None:
    """Return the reason if a layer whose norms and weights have these dtypes cannot run as one on
    this input."""
    computed = compute_dtype(hidden)
    if hidden.dtype == norms and computed == weights:
        return None
    return (
        f"its weights are {weights}, input {hidden.dtype}, computation {computed}: "
        "give all one dtype"
    )


class Running(NamedTuple):
    """A layer as it runs now: its projections by buffer, and its mixture of experts if it has one.
    With neither for its MLP, its class's forward runs that, for the reason in `left`."""

    groups: list[list[Projection]]
    left: str = ""
    mixture: Mixture | None = None

    def weights_dtype(self, norms: torch.dtype) -> torch.dtype:
        """Return the dtype that it computes in, given its norms'. Codes are not computed with."""
        experts = [] if self.mixture is None else [self.mixture.experts.dtype]
        found = [read.weight.dtype for group in self.groups for read in group] + experts
        return next((dtype for dtype in found if dtype in DTYPES), norms)


def read_running(layer: Any, asked: type[Border] | None = None) -> Running:
    """Return a layer as it runs now. Raises a Refusal if not even its first block can.

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
    first, *_ = norms_of(layer).values()
    return first.weight.dtype


class BlockRead(NamedTuple):
    """A block of a layer as it is now: its projections by buffer, or why it cannot run as one."""

    reads: list[list[Projection]]
    reason: str = ""
    mixture: Mixture | None = None  # in place of projections


def read_groups(layer: Any, kind: type[Border]) -> Running:
    """Return a layer as it would run now, on such borders. Raises a Refusal if its attention, or
    the mixer in its place, cannot."""
    mixing, mlp = read_blocks(layer, kind)
    refuse(mixing.reason or None)
    groups = [*mixing.reads, *(mlp.reads or ([], []))]
    every = [read for reads in groups for read in reads]
    refuse(_why_not_one_dtype(every))
    if (mixture := mlp.mixture) is not None:
        its = [*mixture.experts[:2], *mixture.shared]
        if reason := _within(layer_form(layer).mlp, _why_not_one_dtype(every + its)):
            mlp = BlockRead([], reason)
    if has_mixer(layer) and any(map(trains_bias, every)):
        raise Refusal(
            "an adapter has a bias, or a bias is trained: neither runs in a layer with "
            f"{noun_of(layer)}"
        )
    if any(map(trains_bias, every)) and any(read.magnitude is not None for read in every):
        raise Refusal("it uses DoRA, and a bias is trained: take bias='none'")
    refuse(why_unloaded(layer, every))
    return Running(groups, mlp.reason, mlp.mixture)


def read_blocks(layer: Any, kind: type[Border]) -> tuple[BlockRead, BlockRead]:
    """Return a layer's attention, or the mixer in its place, and its MLP, each with the norms
    around it: one may run as a block while the other cannot. Raises a Refusal if neither can."""
    refuse(_why_not_layer(layer, kind))
    mixing, mlp = (_read_block(layer, block, kind) for block in block_forms(layer))
    return mixing, mlp


def _why_not_layer(layer: Any, kind: type[Border]) -> str | None:
    """Return the reason if no block of a layer can run."""
    if (reason := why_not_class(layer, "Layer")) is not None:
        return reason
    if has_mixer(layer) and kind.precision:
        return f"it has {noun_of(layer)}, which does not run{kind.precision}"
    return why_mixed(layer) or why_not_whole(layer) or None


class BlockForm(NamedTuple):
    """A block of a layer: the module that it is about, and what must be around that."""

    name: str  # of the module
    why_not: Callable[[Any], str | None]  # the reason if a layer's module cannot be in a block
    norms: tuple[str, ...]
    projections: Callable[[Any], list[tuple[Any, tuple[str, ...]]]]  # by buffer
    dropout: str = ""  # what must drop nothing; "": nothing


def block_forms(layer: Any) -> tuple[BlockForm, BlockForm]:
    """Return what a layer's two blocks consist of, by its form."""
    form = layer_form(layer)
    before_attention, after_attention, before_mlp, after_mlp = names_of_norms(form)
    mixing = (form.mixer, why_not_mixer) if has_mixer(layer) else ("self_attn", _why_not_attention)
    dropouts = (form.after_attention, form.after_mlp) if form.has_dropout else ("", "")
    return (
        BlockForm(
            *mixing, (before_attention, after_attention), _projections_of_mixing, dropouts[0]
        ),
        BlockForm(
            form.mlp, _why_not_mlp, (before_mlp, after_mlp), _projections_of_mlp, dropouts[1]
        ),
    )


def _read_block(layer: Any, block: BlockForm, kind: type[Border]) -> BlockRead:
    found, reason = attempt(_read_parts, layer, block, kind)
    return BlockRead([], reason) if found is None else found


def _read_parts(layer: Any, block: BlockForm, kind: type[Border]) -> BlockRead:
    """Read each module of a block once. Raises a Refusal if one cannot run in it."""
    refuse(block.why_not(layer))
    has_mixture = block.name == layer_form(layer).mlp and known_form(mlp_of(layer), "Mixture")
    first, *_ = norms_of(layer).values()
    norms = [active_norm(layer._modules[name]) for name in block.norms if name]
    for name, norm in zip(filter(None, block.norms), norms, strict=True):
        refuse(_within(name, (why_not_frozen if has_mixture else why_not_within)(norm)))
    if any(known_form(norm, "RMSNorm") != known_form(first, "RMSNorm") for norm in norms):
        raise Refusal("its norms are of different forms")
    if block.dropout:
        refuse(_within(block.dropout, _why_not_dropout(layer._modules[block.dropout])))
    dtype, device = first.weight.dtype, first.weight.device
    groups = [
        [_read_alike(owner, name, kind, dtype, device) for name in names]
        for owner, names in block.projections(layer)
    ]
    head_norms = head_norms_of(layer.self_attn) if block.name == "self_attn" else None
    for weight in (*(norm.weight for norm in norms), *(head_norms or ())[:2]):
        if (weight.dtype, weight.device) != (dtype, device):
            raise Refusal(
                f"its norms are {weight.dtype} on {weight.device} and {dtype} on {device}: make "
                "them alike"
            )
    refuse(_why_not_one_dtype([read for group in groups for read in group]))
    if not has_mixture:
        return BlockRead(groups)
    mixture, reason = attempt(read_mixture, mlp_of(layer))
    refuse(_within(block.name, reason or None))
    return BlockRead([], mixture=mixture)


def _within(name: str, reason: str | None) -> str | None:
    """Return a reason with the name of the module that it is about."""
    return None if reason is None else f"{name}: {reason}"


def _why_not_attention(layer: Any) -> str | None:
    attention = layer.self_attn
    return _within("self_attn", (
        why_not_class(attention, "Attention") or why_call(attention, own_forward=False)
        or why_not_sdpa(attention) or why_not_head_norms(attention)
    ))  # fmt: skip


def _why_not_mlp(layer: Any) -> str | None:
    mlp = mlp_of(layer)
    if known_form(mlp, "Mixture") is not None:
        return None  # `read_mixture` asks
    return _within(layer_form(layer).mlp, (
        why_not_class(mlp, "MLP") or why_call(mlp, own_forward=False) or why_not_activation(mlp)
    ))  # fmt: skip


def _why_not_dropout(dropout: Any) -> str | None:
    """Return the reason if this module may drop something of what a block adds."""
    if type(dropout) is not nn.Dropout:
        return f"it is {type(dropout).__name__}, not torch.nn.Dropout"
    if dropout.training and dropout.p:
        return f"resid_pdrop is {dropout.p}: load the model with resid_pdrop=0.0"
    return why_call(dropout)


def _read_alike(
    owner: Any, name: str, kind: type[Border], dtype: torch.dtype, device: torch.device
) -> Projection:
    """Return a projection beside norms of this dtype, on this device."""
    read, reason = attempt(_read_one, owner, name, kind)
    refuse(_within(name, reason or None))
    for adapter in (read.A, read.B, read.magnitude):
        if adapter is not None and adapter.dtype not in DTYPES:
            raise Refusal(f"an adapter is {adapter.dtype}, should be bfloat16, float16 or float32")
    _check_alike(name, read, dtype, device)
    return read


def _why_not_one_dtype(reads: Sequence[Any]) -> str | None:
    found = {read.weight.dtype for read in reads if read.weight.dtype in DTYPES}
    return (
        f"its projections compute in {' and '.join(sorted(map(str, found)))}"
        if len(found) > 1
        else None
    )


def takes_attention(layer: Any, kind: type[Border]) -> bool:
    """Return True if such borders can take the projections of a layer's attention."""
    groups = _projections_of_mixing(layer)
    found = (attempt(_read_one, owner, name, kind) for owner, names in groups for name in names)
    return not any(reason for _, reason in found)


def _read_one(owner: Any, name: str, kind: type[Border]) -> Projection:
    projection = owner._modules[name]
    # attention's o may have a fused forward, for when the layer steps aside
    own_forward = not fused_parts_of(projection)
    return read_projection(projection, own_forward, kind.why_not_base, may_scale=True)


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
        yield from bases_under(owner, names)


def grouped_projections(layer: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Return, for each of a layer's buffers, the module that has its projections, and their names:
    four, or two if we do not know its MLP."""
    return _projections_of_mixing(layer) + _projections_of_mlp(layer)


def _projections_of_mixing(layer: Any) -> list[tuple[Any, tuple[str, ...]]]:
    if has_mixer(layer):
        mixer = mixer_of(layer)
        form = known_form(mixer, layer_form(layer).mixer_kind)
    else:
        mixer = layer.self_attn
        form = known_form(mixer, "Attention")
    return [(mixer, form.projections), (mixer, (form.output,))]


def _projections_of_mlp(layer: Any) -> list[tuple[Any, tuple[str, ...]]]:
    mlp = mlp_of(layer)
    form = known_form(mlp, "MLP")
    return [] if form is None else [(mlp, form.projections), (mlp, (form.output,))]


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
        split_gate_up(gate_up) if gate_up else [],
        down,
    ]
    ranks: list[list[int]] = [[] for _ in parts]
    for i, (owner, names) in enumerate(grouped_projections(layer)):
        if parts[i]:
            ranks[i] = largest_ranks(owner, names, parts[i])
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

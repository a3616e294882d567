"""The forwards that stand in for a whole decoder layer, or its projections alone, on the buffers of
their model's weights.

`fuse` borders the model and sets `BorderedForward`s, which hold the buffers. A layer whose weights
lie there no longer (moved, cast, loaded by assignment, copied with the model) steps aside, as one
that has hooks does, until `fuse` is called again.
"""

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fused_mlp.launching import DTYPES
from fused_mlp.utils import compute_dtype

from ..bordered import Bordered, BorderedLinear
from ..decoder_layer import DecoderLayer, FrozenLayer
from ..kernels.gate_up_swiglu import SwiGLU
from ..step.recompute import is_recomputing
from . import parts as layer_sites
from .borders import Borders
from .projection import read_projection, why_call
from .site import FusedForward, parts_of, reason_in, why_not_class


class BorderedForward(FusedForward):
    """A FusedForward on a model's buffers."""

    def __init__(
        self, function: Callable, module: nn.Module, parts: frozenset[str], borders: Borders
    ):
        super().__init__(function, module, parts)
        self.borders = borders


def borders_of(module: nn.Module) -> Borders | None:
    """The buffers that a module's forward runs on, if it does on any."""
    forward = vars(module).get("forward")
    owner = forward.__self__ if isinstance(forward, MethodType) else None  # see parts_of
    return owner.borders if isinstance(owner, BorderedForward) else None


# --- reading --------------------------------------------------------------------------------------


def _read_group(
    borders: Borders | None,
    projections: tuple[nn.Module, ...],
    own_forward: bool,
    names: tuple[str, ...],
) -> tuple | str:
    """What BorderedLinear takes after x to stand in for these projections as they are now, or why
    it may not. An empty tuple where the model is not bordered yet, but may be."""
    group = None if borders is None else borders.group_of(projections[0])
    if borders is not None and group is not None and group.projections == projections:
        return borders.read(group, own_forward)
    for name, projection in zip(names, projections, strict=True):
        if isinstance(read := read_projection(projection, own_forward), str):
            return f"{name}: {read}"
    if borders is None:
        return ()
    return "its projections are not in the model's buffers as they were: call fuse again"


def _read_named(owner: nn.Module, names: tuple[str, ...]) -> tuple | str:
    projections = tuple(owner._modules[name] for name in names)
    return _read_group(borders_of(owner), projections, True, names)  # type: ignore[arg-type]


def _why_not_activation(mlp: Any) -> str | None:
    activation = mlp.act_fn
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
        return f"its activation is {type(activation).__name__}, not SiLU"
    if (reason := why_call(activation)) is not None:
        return f"act_fn: {reason}"
    return None


# --- projections alone ----------------------------------------------------------------------------


def why_not_qkv(attention: Any) -> str | None:
    return reason_in(_read_qkv(attention))


def why_not_mlp(mlp: Any) -> str | None:
    return reason_in(_read_mlp(mlp))


def why_not_output(projection: Any) -> str | None:
    return reason_in(_read_output(projection))


def _read_qkv(attention: Any) -> tuple | str:
    """What BorderedLinear takes after x to stand in for q, k and v, or why it may not."""
    if (reason := why_not_class(attention, "Attention")) is not None:
        return reason
    return _read_named(attention, ("q_proj", "k_proj", "v_proj"))


def _read_output(projection: Any) -> tuple | str:
    if "forward" in vars(projection) and not parts_of(projection):
        return "its forward has been replaced by something else"
    read = _read_group(borders_of(projection), (projection,), False, ("o_proj",))
    return read.removeprefix("o_proj: ") if isinstance(read, str) else read


def _read_mlp(mlp: Any) -> tuple | str:
    """What BorderedLinear takes after x for gate and up, and what for down, or why not."""
    if (reason := why_not_class(mlp, "MLP") or _why_not_activation(mlp)) is not None:
        return reason
    gate_up, down = _read_named(mlp, ("gate_proj", "up_proj")), _read_named(mlp, ("down_proj",))
    if (reason := reason_in(gate_up) or reason_in(down)) is not None:
        return reason
    return gate_up, down


def mlp_forward(mlp: Any, parts: frozenset[str], x: Tensor) -> Tensor:
    read = _read_mlp(mlp)
    if isinstance(read, str):
        return type(mlp).forward(mlp, x)
    gate_up, down = read
    return BorderedLinear.apply(SwiGLU.apply(BorderedLinear.apply(x, *gate_up)), *down)


def output_forward(projection: Any, parts: frozenset[str], x: Tensor, *rest, **options):
    read = _read_output(projection)
    if isinstance(read, str) or rest or options:
        return type(projection).forward(projection, x, *rest, **options)
    return BorderedLinear.apply(x, *read)


def attention_forward(
    attention: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values=None,
    **options,
):
    """layer_sites' own, with q, k and v from one product."""
    read = _read_qkv(attention)
    if isinstance(read, str):
        return layer_sites.attention_forward(
            attention, parts, hidden_states, position_embeddings, attention_mask, past_key_values,
            **options,
        )  # fmt: skip
    by_head = (*hidden_states.shape[:-1], -1, attention.head_dim)
    qkv = BorderedLinear.apply(hidden_states, *read)
    q, k, v = (one.view(by_head) for one in qkv.split(read[-1].out_features, dim=-1))
    return layer_sites.attend(
        attention, parts, q, k, v, position_embeddings, attention_mask, past_key_values, **options
    )


# --- a whole layer --------------------------------------------------------------------------------


def why_not_layer(layer: Any) -> str | None:
    return reason_in(read_layer(layer))


def read_layer(layer: Any) -> tuple | str:
    """What DecoderLayer takes after its mask to stand in for this layer as it is now, or why it may
    not; an empty tuple before the model is bordered."""
    if (reason := _why_not_parts(layer)) is not None:
        return reason
    attention, mlp = layer.self_attn, layer.mlp
    borders = borders_of(layer)
    adapters: list[Tensor] = []
    buffers: list[Bordered] = []
    for owner, names in (
        (attention, ("q_proj", "k_proj", "v_proj")), (attention, ("o_proj",)),
        (mlp, ("gate_proj", "up_proj")), (mlp, ("down_proj",)),
    ):  # fmt: skip
        # o_proj may have been fused by itself, for when the layer is not
        own_forward = names != ("o_proj",) or not parts_of(attention.o_proj)
        projections = tuple(owner._modules[name] for name in names)
        read = _read_group(borders, projections, own_forward, names)
        if isinstance(read, str):
            return read
        adapters += read[:-1]
        buffers += read[-1:]
    if borders is None:
        return ()
    for adapter in adapters:
        if adapter.dtype not in DTYPES:
            return f"an adapter is {adapter.dtype}, should be bfloat16, float16 or float32"
    qkv, o, gate_up, down = buffers
    input_norm, post_norm = layer.input_layernorm, layer.post_attention_layernorm
    heads, kv_heads, _ = (out // attention.head_dim for out in qkv.out_features)
    return *adapters, FrozenLayer(
        input_norm.weight, post_norm.weight, qkv, o, gate_up, down,
        input_norm.variance_epsilon, post_norm.variance_epsilon,
        heads, kv_heads, attention.scaling, borders.handover,
    )  # fmt: skip


def _why_not_parts(layer: Any) -> str | None:
    """Why a part of the layer, besides its projections, computes something else."""
    if (reason := why_not_class(layer, "DecoderLayer")) is not None:
        return reason
    attention, mlp = layer.self_attn, layer.mlp
    for name, kind in (
        ("self_attn", "Attention"), ("mlp", "MLP"),
        ("input_layernorm", "RMSNorm"), ("post_attention_layernorm", "RMSNorm"),
    ):  # fmt: skip
        part = layer._modules[name]
        if (reason := why_not_class(part, kind) or why_call(part, own_forward=False)) is not None:
            return f"{name}: {reason}"
        if kind == "RMSNorm":
            if type(part.weight) is not nn.Parameter:
                return f"{name}: its weight is wrapped ({type(part.weight).__name__})"
            if part.weight.requires_grad:
                return f"{name}: its weight is trainable"
    if (reason := layer_sites.why_not_sdpa(attention)) is not None:
        return f"self_attn: {reason}"
    if (reason := _why_not_activation(mlp)) is not None:
        return f"mlp: {reason}"
    return None


def layer_forward(
    layer: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values=None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    labelled: tuple[nn.Module, Tensor] | None = None,
    **options,
):
    """labelled: a layer whose output is wanted of some tokens alone, and of which (`loss_site.py`).
    Where it does not run fused, it computes all."""
    reason = _why_not_inputs(
        layer, hidden_states, attention_mask, past_key_values, position_embeddings, options
    )
    if reason is not None and torch.is_grad_enabled():
        warnings.warn(f"a fused decoder layer ran as its class has it: {reason}", stacklevel=2)
    operands = reason or read_layer(layer)
    if isinstance(operands, str):
        own = layer_sites.layer_forward if "rms_norm" in parts else _class_forward
        return own(
            layer, parts, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache,
            position_embeddings=position_embeddings, **options,
        )  # fmt: skip
    assert position_embeddings is not None
    *adapters, frozen = operands
    # a compiled layer is one graph, whether it runs for the first time or again
    output_needed = torch.compiler.is_compiling() or not is_recomputing()
    rows = labelled[1] if labelled is not None and labelled[0] is layer else None
    return DecoderLayer.apply(
        hidden_states, *position_embeddings, attention_mask, *adapters,
        frozen._replace(output_needed=output_needed, rows=rows),
    )  # fmt: skip


def _class_forward(layer: Any, parts: frozenset[str], *inputs, **options):
    return type(layer).forward(layer, *inputs, **options)


def _why_not_inputs(
    layer: Any, hidden: Tensor, mask, past_key_values, position_embeddings, options: dict
) -> str | None:
    """Why what a layer is called with keeps it from running fused."""
    if (reason := layer_sites.why_not_inputs(mask, past_key_values, options)) is not None:
        return reason
    if position_embeddings is None:
        return "it was given no position_embeddings"
    dtype = layer.input_layernorm.weight.dtype
    if hidden.dtype != dtype or compute_dtype(hidden) != dtype:
        return (
            f"its input is {hidden.dtype}, its weights are {dtype} and {compute_dtype(hidden)} is "
            "what it should compute in"
        )
    return None

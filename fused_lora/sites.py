"""The places in a transformers model that run fused: how each is found, read and run.

A site stands in for the forward of one kind of module, of the classes that are known to compute
what it computes and nothing else (CLASSES). Its `why_not` is asked at every forward, so that
disabled, merged or switched adapters, hooks and the like behave as they do without it: the module
then runs its class's own forward. With projection.py, this file alone knows PEFT's and
transformers' classes.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fused_mlp import FrozenMLP, LoRA_MLP

from .attention import FrozenLinear, FrozenQKV, LoRA_QKV, LoRA_W
from .checkpoint import is_recomputing
from .cross_entropy import linear_cross_entropy
from .projection import read_projection, why_call
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
CLASSES = {
    kind: {
        f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}{kind}"
        for family in FAMILIES
    }
    for kind in ("MLP", "Attention", "RMSNorm", "DecoderLayer", "ForCausalLM")
}
KNOWN_TO = {
    "MLP": "an MLP class that is known to compute SwiGLU",
    "Attention": "an attention class whose forward is known",
    "RMSNorm": "a norm class that is known to compute weight * (x / rms(x))",
    "DecoderLayer": "a layer class whose forward is known",
    "ForCausalLM": "a class that is known to compute its loss from lm_head alone",
}


class Site(NamedTuple):
    """One kind of module that a part runs fused.

    candidates: the modules of a model that the part may concern, with their names.
    why_not: the reason for leaving one to its class's own forward, as it is now, or None.
    forward: what is set on it; called with the module and the set of parts that it runs.
    is_listed: whether the report lists it; not where its modules are listed by another site.
    """

    candidates: Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]
    why_not: Callable[[nn.Module], str | None]
    forward: Callable[..., Any]
    is_listed: bool = True


def parts_of(module: nn.Module) -> frozenset[str]:
    """The parts that a module runs fused, told by the forward on its instance."""
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and forward.func in FORWARDS:
        return forward.args[1]
    return frozenset()


def _is(module: nn.Module, kind: str) -> bool:
    cls = type(module)
    return f"{cls.__module__}.{cls.__qualname__}" in CLASSES[kind]


def _why_not_class(module: nn.Module, kind: str) -> str | None:
    if "forward" in vars(module) and not parts_of(module):
        return "its forward has been replaced by something else"
    if not _is(module, kind):
        return f"{type(module).__name__} is not {KNOWN_TO[kind]}"
    return None


def _having(*names: str) -> Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]:
    """Modules that have submodules of these names, of their own: PEFT's wrappers pass on those of
    what they wrap."""

    def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, module in model.named_modules():
            if all(part in module._modules for part in names):
                yield name, module

    return candidates


def _reason(operands: Any) -> str | None:
    return operands if isinstance(operands, str) else None


# --- the MLP --------------------------------------------------------------------------------------


def _read_mlp(mlp: nn.Module) -> tuple | str:
    """What LoRA_MLP takes after x to stand in for this MLP as it is now, or why it may not."""
    if (reason := _why_not_class(mlp, "MLP")) is not None:
        return reason
    activation: Any = mlp.act_fn
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
        return f"its activation is {type(activation).__name__}, not SiLU"
    if (reason := why_call(activation)) is not None:
        return f"act_fn: {reason}"
    projections = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        projection = read_projection(getattr(mlp, name))
        if isinstance(projection, str):
            return f"{name}: {projection}"
        if projection.bias is not None:
            return f"{name}: its base layer has a bias"
        projections.append(projection)
    gate, up, down = projections
    frozen = FrozenMLP(gate.weight, up.weight, down.weight, gate.scaling, up.scaling, down.scaling)
    return gate.A, gate.B, up.A, up.B, down.A, down.B, frozen


def _mlp_forward(mlp: nn.Module, parts: frozenset[str], x: Tensor) -> Tensor:
    operands = _read_mlp(mlp)
    if isinstance(operands, str):
        return type(mlp).forward(mlp, x)
    *adapters, frozen = operands
    return LoRA_MLP.apply(x, *adapters, frozen._replace(output_needed=not is_recomputing()))


# --- attention and rotary embedding ---------------------------------------------------------------


def _read_qkv(attention: nn.Module) -> tuple | str:
    """What LoRA_QKV takes after x to stand in for q, k and v as they are now, or why it may not."""
    if (reason := _why_not_class(attention, "Attention")) is not None:
        return reason
    projections = []
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = read_projection(getattr(attention, name))
        if isinstance(projection, str):
            return f"{name}: {projection}"
        projections.append(projection)
    adapters = (tensor for one in projections for tensor in (one.A, one.B))
    weights, biases, scalings = zip(
        *((one.weight, one.bias, one.scaling) for one in projections), strict=True
    )
    return *adapters, FrozenQKV(*weights, *biases, *scalings)


def _output_projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, attention in _having("q_proj", "o_proj")(model):
        yield f"{name}.o_proj", attention.get_submodule("o_proj")


def _read_output(projection: nn.Module):
    if "forward" in vars(projection) and not parts_of(projection):
        return "its forward has been replaced by something else"
    return read_projection(projection, own_forward=False)


def _output_forward(projection: nn.Module, parts: frozenset[str], x: Tensor, *rest, **options):
    read = _read_output(projection)
    if isinstance(read, str) or rest or options:
        return type(projection).forward(projection, x, *rest, **options)
    return LoRA_W.apply(x, read.A, read.B, FrozenLinear(read.weight, read.bias, read.scaling))


def _attention_forward(
    attention: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values=None,
    **options,
):
    """The four families' own forward, with its q, k and v and its rotary embedding fused or not."""
    operands = _read_qkv(attention) if "attention" in parts else "not asked for"
    if isinstance(operands, str):
        q, k, v = (
            getattr(attention, name)(hidden_states) for name in ("q_proj", "k_proj", "v_proj")
        )
    else:
        q, k, v = LoRA_QKV.apply(hidden_states, *operands)
    by_head = (*hidden_states.shape[:-1], -1, attention.head_dim)
    q, k, v = q.view(by_head), k.view(by_head), v.view(by_head).transpose(1, 2)
    if hasattr(attention, "q_norm"):  # Qwen3
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = position_embeddings
    if "rope" in parts:
        q, k = rope(q, k, cos, sin)
    else:
        q, k = (x * cos.unsqueeze(1) + _rotate_half(x) * sin.unsqueeze(1) for x in (q, k))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    config = attention.config
    if not _is_llama(attention):
        default = getattr(config, "sliding_window", None)
        options["sliding_window"] = getattr(attention, "sliding_window", default)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        config._attn_implementation, _eager_attention_of(attention)
    )
    attended, weights = attend(
        attention,
        q,
        k,
        v,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        **options,
    )
    attended = attended.reshape(*hidden_states.shape[:-1], -1).contiguous()
    return attention.o_proj(attended), weights


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _is_llama(attention: nn.Module) -> bool:
    return type(attention).__name__ == "LlamaAttention"


def _eager_attention_of(attention: nn.Module) -> Callable:
    """The eager attention of the class's own module."""
    return sys.modules[type(attention).__module__].eager_attention_forward


# --- norms ----------------------------------------------------------------------------------------


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield name, module


def _why_not_norm(norm: Any) -> str | None:
    if (reason := _why_not_class(norm, "RMSNorm")) is not None:
        return reason
    if type(norm.weight) is not nn.Parameter:
        return f"its weight is wrapped ({type(norm.weight).__name__})"
    return None


def _norm_forward(norm: Any, parts: frozenset[str], x: Tensor) -> Tensor:
    if _why_not_norm(norm) is not None or x.dtype != norm.weight.dtype:
        return type(norm).forward(norm, x)  # which promotes to the wider dtype
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def _why_not_layer(layer: Any) -> str | None:
    if (reason := _why_not_class(layer, "DecoderLayer")) is not None:
        return reason
    norm = layer.post_attention_layernorm
    return _why_not_norm(norm) or why_call(norm, own_forward=False)


def _layer_forward(layer: Any, parts: frozenset[str], hidden_states: Tensor, **options):
    """The four families' own forward; the residual's addition goes into the norm after it."""
    norm = layer.post_attention_layernorm
    if _why_not_layer(layer) is not None or hidden_states.dtype != norm.weight.dtype:
        return type(layer).forward(layer, hidden_states, **options)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    normalised, residual = add_rms_norm(hidden_states, attended, norm.weight, norm.variance_epsilon)
    return residual + layer.mlp(normalised)


# --- the loss -------------------------------------------------------------------------------------


def _why_not_loss(model: Any) -> str | None:
    if (reason := _why_not_class(model, "ForCausalLM")) is not None:
        return reason
    head = model.lm_head
    if type(head) is not nn.Linear:
        return f"its lm_head is {type(head).__module__}.{type(head).__qualname__}, not nn.Linear"
    if (reason := why_call(head)) is not None:
        return f"lm_head: {reason}"
    if model.loss_function is not ForCausalLMLoss:
        return "its loss_function is not transformers' own"
    return None


# What PEFT and the Trainer pass on in a training step.
KNOWN_OPTIONS = {
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}


def _causal_lm_forward(
    model: Any,
    parts: frozenset[str],
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values=None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **options,
):
    """In training with labels: the loss without logits. Else, and wherever something is asked for
    that the fused loss does not know, the class's own forward, logits and all."""
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
    }
    known = options.keys() <= KNOWN_OPTIONS and options.get("return_dict") is not False
    if (
        labels is None
        or not model.training
        or not known
        or not (isinstance(logits_to_keep, int) and logits_to_keep == 0)
        or _why_not_loss(model) is not None
    ):
        forward = type(model).forward
        return forward(model, labels=labels, logits_to_keep=logits_to_keep, **inputs, **options)
    num_items = options.pop("num_items_in_batch", None)
    options.pop("return_dict", None)  # an output object either way
    outputs = model.model(**inputs, **options)
    # tokens before n predict n
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    loss = linear_cross_entropy(
        outputs.last_hidden_state,
        model.lm_head.weight,
        shifted.to(outputs.last_hidden_state.device),
        bias=model.lm_head.bias,
        num_items_in_batch=num_items,
    )
    return CausalLMOutputWithPast(
        loss=loss,
        logits=None,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


class Part(NamedTuple):
    """What one switch of Fusion concerns; `none_found`: why a model may have nothing for it."""

    sites: tuple[Site, ...]
    none_found: str


PARTS = {
    "mlp": Part(
        (
            Site(
                _having("gate_proj", "up_proj", "down_proj"),
                lambda module: _reason(_read_mlp(module)),
                _mlp_forward,
            ),
        ),
        "it has no MLP with gate_proj, up_proj and down_proj",
    ),
    "attention": Part(
        (
            Site(
                _having("q_proj", "k_proj", "v_proj"),
                lambda module: _reason(_read_qkv(module)),
                _attention_forward,
            ),
            Site(
                _output_projections,
                lambda module: _reason(_read_output(module)),
                _output_forward,
            ),
        ),
        "it has no attention with q_proj, k_proj and v_proj",
    ),
    "rope": Part(
        (
            Site(
                _having("q_proj", "k_proj", "v_proj"),
                lambda module: _why_not_class(module, "Attention"),
                _attention_forward,
            ),
        ),
        "it has no attention with q_proj, k_proj and v_proj",
    ),
    "rms_norm": Part(
        (
            Site(_norms, _why_not_norm, _norm_forward),
            Site(
                _having("self_attn", "post_attention_layernorm", "mlp"),
                _why_not_layer,
                _layer_forward,
                is_listed=False,
            ),
        ),
        "it has no RMSNorm",
    ),
    "cross_entropy": Part(
        (Site(_having("lm_head", "model"), _why_not_loss, _causal_lm_forward),),
        "it has no lm_head",
    ),
}
FORWARDS = {site.forward for part in PARTS.values() for site in part.sites}

"""The switch `layer` for a layer with a gated delta net, which runs as two functions around the
recurrence."""

from operator import attrgetter
from typing import Any

from torch import Tensor

from ..layer.delta_layer import AfterRecurrence, BeforeRecurrence, DeltaNet
from ..layer.operands import FrozenLayer
from ..rerun import saving_last
from .aside import say_left
from .delta_net import qkv_sizes, run_rule, why_not_conv
from .foreign.delta_rule import delta_rule
from .known import known_form, why_not_class
from .projection import why_call
from .refusal import attempt
from .rms_norm import read_gated_norm

NET, RULE = "linear_attn", "linear_attn.recurrence"
DOCUMENTS = (
    "its rows hold documents, which only the libraries' convolution and recurrence keep apart"
)
ADAPTERS_BEFORE = 8  # A and B of the in-projections
# the tensors of a layer, beside its projections', that its functions do not train
FROZEN = (
    "input_layernorm.weight", "post_attention_layernorm.weight", f"{NET}.norm.weight",
    f"{NET}.conv1d.weight", f"{NET}.conv1d.bias", f"{NET}.A_log", f"{NET}.dt_bias",
)  # fmt: skip


def has_delta_net(layer: Any) -> bool:
    return NET in layer._modules


def why_not_net(layer: Any) -> str | None:
    """Return the reason if a layer's gated delta net cannot be part of its functions."""
    net = layer.linear_attn
    if reason := why_not_class(net, "GatedDeltaNet") or why_call(net, own_forward=False):
        return f"{NET}: {reason}"
    if reason := why_call(net.conv1d) or why_not_conv(net):
        return f"{NET}.conv1d: {reason}"
    _, reason = attempt(read_gated_norm, net.norm)
    if reason := reason or why_call(net.norm, own_forward=False):
        return f"{NET}.norm: {reason}"
    for name in FROZEN:
        tensor = attrgetter(name)(layer)
        if tensor is not None and tensor.requires_grad:
            return f"{name} is trained: freeze it, requires_grad_(False)"
    return None


def why_not_delta_inputs(mask: Tensor | None, options: dict) -> str | None:
    """Return the reason if these arguments of a call keep the layer from running fused."""
    if mask is not None and mask.ndim != 2:
        return f"its attention_mask is {list(mask.shape)}, should be [batch, positions]"
    if any(options.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx")):
        return DOCUMENTS
    return None


def why_slow(layer: Any) -> dict[str, str]:
    """Return the reason why the recurrence is not a fast library's, by its name in the layer."""
    _, reason = delta_rule(layer.linear_attn)
    return {RULE: reason} if reason else {}


def run_delta_layer(
    layer: Any, hidden: Tensor, mask: Tensor | None, trained: list, frozen: FrozenLayer,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Run the two functions, and the recurrence between them."""
    net = layer.linear_attn
    say_left(layer, why_slow(layer))
    rule, _ = delta_rule(net)
    eps = getattr(net.norm, known_form(net.norm, "RMSNormGated").eps)
    frozen_net = DeltaNet(
        net.conv1d.weight.squeeze(1), net.conv1d.bias, net.A_log, net.dt_bias, net.norm.weight,
        eps, qkv_sizes(net),
    )  # fmt: skip
    first, rest = trained[:ADAPTERS_BEFORE], trained[ADAPTERS_BEFORE:]
    *qkv, z, beta, decay, residual = BeforeRecurrence.apply(
        hidden, mask, *first, frozen_net, frozen
    )
    found = run_rule(net, rule, tuple(qkv), decay, beta, cu_seqlens=None, **options).to(z.dtype)

    def run(output_needed: bool) -> Tensor:
        now = frozen._replace(output_needed=output_needed)
        return AfterRecurrence.apply(found, z, residual, *rest, frozen_net, now)

    return saving_last(run)

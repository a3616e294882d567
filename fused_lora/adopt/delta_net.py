"""A gated delta net: the forward that the switch `attention` sets, and what a layer that runs whole
needs of it. The recurrence stays that of the library that transformers has chosen."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..causal_conv import MAX_TAPS, causal_conv
from ..layer.mixer_ends import DeltaNetEnds, decay_of
from ..lora_group import FrozenGroup, LoRA_Group
from .aside import say_left, step_aside
from .attention import NO_CACHE_IN_TRAINING
from .foreign.delta_rule import NAME, delta_rule
from .foreign.originals import why_replaced
from .foreign.versions import CACHE, CONVOLUTION, RULE_REPEATS_HEADS, STATES, class_forward
from .forms import DeltaNetForm
from .four_bit.parts import why_not_input, written
from .known import known_form, why_not_class
from .linear import (
    Reads,
    frozen_linear,
    read_projections,
    run_alone,
    tensors_of,
    traced_if_possible,
)
from .projection import Projection, seed_for, why_call
from .refusal import attempt, refuse
from .rms_norm import read_gated_norm
from .site import having

DOCUMENTS = (
    "its rows hold documents, which only the libraries' convolution and recurrence keep apart"
)
# the tensors beside its projections' that the functions of a layer do not train
UNTRAINED = "norm.weight", "conv1d.weight", "conv1d.bias", "A_log", "dt_bias"
IN_PROJECTIONS = DeltaNetForm().projections
delta_nets = having(*IN_PROJECTIONS, "conv1d", "norm", "out_proj")


class DeltaNetRead(NamedTuple):
    """A gated delta net as it is now: its in-projections, the function for its recurrence, why that
    is not a fast library's, and why its convolution does not run fused."""

    reads: Reads
    rule: Callable
    why_slow: str
    why_not_conv: str

    @property
    def left(self) -> dict[str, str]:
        """Return the units that run neither fused nor on a library's kernels, and why."""
        others = {"recurrence": self.why_slow, "conv1d": self.why_not_conv}
        return self.reads.left | {name: reason for name, reason in others.items() if reason}


def read_delta_net(net: Any) -> DeltaNetRead:
    """Return the parts of a gated delta net as they are now."""
    refuse(why_not_class(net, "GatedDeltaNet"))
    if (reason := why_call(net.conv1d)) is not None:
        refuse(f"conv1d: {reason}")
    reads = read_projections(net, known_form(net, "GatedDeltaNet").projections)
    return DeltaNetRead(reads, *delta_rule(net), why_not_conv(net) or "")


def why_not_conv(net: Any) -> str | None:
    """Return the reason if the convolution does not run fused."""
    if net.activation != "silu":
        return f"its activation is {net.activation}, not silu"
    if (taps := net.conv1d.weight.shape[-1]) > MAX_TAPS:
        return f"its kernel size is {taps}, should be {MAX_TAPS} at most"
    return why_replaced(type(net).__module__, CONVOLUTION)


def delta_net_forward(
    net: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    **options,
):
    """Run the class's forward with fused in-projections; its norm and out_proj may have forwards of
    ours. A call with a cache, which it fills, runs unfused."""
    given = {"attention_mask": attention_mask, **options}
    states = [options.pop(name, None) for name in {CACHE, STATES}]
    has_states = any(one is not None for one in states)
    if has_states and not torch.is_grad_enabled():  # inference may use anything
        return class_forward(net, hidden_states, **given)
    read, reason = attempt(read_delta_net, net)
    if reason := (
        (NO_CACHE_IN_TRAINING if has_states else "")
        or reason
        or why_not_input(hidden_states, read.reads.fit)
    ):
        return step_aside(net, reason, hidden_states, **given)
    say_left(net, read.left)
    named = vars(sys.modules[type(net).__module__])
    x = named["apply_mask_to_padding_states"](hidden_states, attention_mask)
    mixed, z, b, a = _run_in(net, read.reads, x)
    # of rows that hold documents: only the libraries' functions keep them apart, or say they cannot
    documents = options.pop("cu_seq_lens_q", None)
    if read.why_not_conv or documents is not None or options.get("seq_idx") is not None:
        mixed = named[CONVOLUTION](
            mixed.transpose(1, 2), net.conv1d.weight.squeeze(1), net.conv1d.bias,
            activation=net.activation, **options,
        ).transpose(1, 2)  # fmt: skip
        q, k, v = mixed.split(qkv_sizes(net), -1)
    else:
        q, k, v = _convolve(net, mixed)
    decay = decay_of(net.A_log, a, net.dt_bias)
    rule = read.rule if documents is None else named[NAME]
    found = run_rule(net, rule, (q, k, v), decay, b.sigmoid(), cu_seqlens=documents, **options)
    rows = found.reshape(-1, net.head_v_dim), z.reshape(-1, net.head_v_dim)
    return net.out_proj(net.norm(*rows).reshape(z.shape))


def run_rule(
    net: Any, rule: Callable, qkv: tuple[Tensor, ...], decay: Tensor, beta: Tensor, **options
) -> Tensor:
    """Run the recurrence on q, k and v [batch, positions, features]. Return what it found, [batch,
    positions, heads, head_dim]."""
    sizes = net.head_k_dim, net.head_k_dim, net.head_v_dim
    q, k, v = (one.unflatten(-1, (-1, size)) for one, size in zip(qkv, sizes, strict=True))
    if RULE_REPEATS_HEADS and (times := net.num_v_heads // net.num_k_heads) > 1:
        q, k = (one.repeat_interleave(times, dim=2) for one in (q, k))
    found, _ = rule(
        q, k, v, g=decay, beta=beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=True, **options,
    )  # fmt: skip
    return found


@torch.compiler.disable
def _convolve(net: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return causal_conv(mixed, net.conv1d.weight.squeeze(1), net.conv1d.bias, qkv_sizes(net))


def qkv_sizes(net: Any) -> tuple[int, int, int]:
    return net.key_dim, net.key_dim, net.value_dim


def _run_in(net: Any, reads: Reads, x: Tensor) -> tuple[Tensor, ...]:
    """Run the in-projections: as one function, or each by itself if some cannot be fused."""
    if reads.left:
        names = known_form(net, "GatedDeltaNet").projections
        return tuple(run_alone(net, getattr(net, name), x) for name in names)
    return _run_together(net, reads.fit, x)


@traced_if_possible
def _run_together(net: nn.Module, reads: list[Projection], x: Tensor) -> tuple[Tensor, ...]:
    found, write_again = written(net, reads)
    layers = tuple(map(frozen_linear, found))
    frozen = FrozenGroup(layers, seed_for(x, *(one.dropout for one in found)), write_again)
    return LoRA_Group.apply(x, *tensors_of(found), frozen)


# --- in a layer that runs whole -------------------------------------------------------------------


def why_not_net(net: Any) -> str | None:
    """Return the reason if a gated delta net cannot be between the functions of a layer."""
    if reason := why_call(net.conv1d) or why_not_conv(net):
        return f"conv1d: {reason}"
    _, reason = attempt(read_gated_norm, net.norm)
    if reason := reason or why_call(net.norm, own_forward=False):
        return f"norm: {reason}"
    return None


def why_not_documents(options: dict) -> str | None:
    """Return the reason if a call's options give the documents of its rows."""
    given = (options.get(name) for name in ("cu_seq_lens_q", "seq_idx"))
    return DOCUMENTS if any(one is not None for one in given) else None


def why_slow_rule(net: Any) -> str:
    return delta_rule(net)[1]


def net_ends(net: Any) -> DeltaNetEnds:
    eps = getattr(net.norm, known_form(net.norm, "RMSNormGated").eps)
    return DeltaNetEnds(
        net.conv1d.weight.squeeze(1), net.conv1d.bias, net.A_log, net.dt_bias, net.norm.weight,
        eps, qkv_sizes(net),
    )  # fmt: skip


def run_net(
    net: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, **options
) -> Tensor:
    rule, _ = delta_rule(net)
    return run_rule(net, rule, (q, k, v), decay, beta, cu_seqlens=None, **options)

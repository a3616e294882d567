"""A gated delta net: the forward that the switch `attention` sets, and what a layer that runs whole
needs of it. The recurrence stays that of the library that transformers has chosen.

Rows that hold documents need nothing of that library: the convolution takes their bounds, and the
recurrence forgets everything at a document's first token (`layer/mixer_ends.py`)."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..foreign.delta_rule import delta_rule
from ..foreign.versions import CACHE, RULE_REPEATS_HEADS, STATES, class_forward
from ..functions.causal_conv import Conv, causal_conv
from ..layer.mixer_ends import DeltaNetEnds, decay_of
from ..reading.aside import say_left, say_once, step_aside
from ..reading.families import FORMS
from ..reading.forms import MixerForm
from ..reading.known import known_form, why_not_class
from ..reading.projection import why_call
from ..reading.refusal import attempt, refuse, refuse_documents
from ..reading.site import having
from ..weights.four_bit_parts import why_not_input
from .attend import NO_CACHE_IN_TRAINING
from .linear import Reads, read_projections, run_alone, run_together
from .rms_norm import read_gated_norm
from .short_conv import why_not_conv

# what else a collator says about documents, for a library's kernels
BOUNDS = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
# the tensors beside its projections' that the functions of a layer do not train
UNTRAINED = "norm.weight", "conv1d.weight", "conv1d.bias", "A_log", "dt_bias"


def delta_nets(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for form in set(FORMS["GatedDeltaNet"].values()):
        yield from having(model, *form.projections, "conv1d", "norm", form.output)


def in_projections(net: nn.Module) -> tuple[str, ...]:
    """Return the names of a gated delta net's in-projections; of an unknown class, Qwen3.5's."""
    return (known_form(net, "GatedDeltaNet") or MixerForm()).projections


class DeltaNetRead(NamedTuple):
    """A gated delta net as it is now: its in-projections, and why its recurrence is not a fast
    library's."""

    reads: Reads
    why_slow: str

    @property
    def left(self) -> dict[str, str]:
        """Return the units that run neither fused nor on a library's kernels, and why."""
        return self.reads.left | ({"recurrence": self.why_slow} if self.why_slow else {})


def read_delta_net(net: Any) -> DeltaNetRead:
    """Return the parts of a gated delta net as they are now."""
    refuse(why_net_mixes(net))
    return DeltaNetRead(read_projections(net, in_projections(net)), why_slow_rule(net))


def why_net_mixes(net: Any) -> str | None:
    """Return the reason if our convolution, which keeps documents apart, is not the net's."""
    return why_not_class(net, "GatedDeltaNet") or _why_not_its_conv(net)


def _why_not_its_conv(net: Any) -> str | None:
    reason = why_call(net.conv1d)
    if not reason and net.activation != "silu":
        reason = f"its activation is {net.activation}, not silu"
    reason = reason or why_not_conv(net.conv1d, type(net))
    return f"conv1d: {reason}" if reason else None


def delta_net_forward(
    net: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **options,
):
    """Run the class's forward with fused in-projections and our convolution; its norm and out_proj
    may have forwards of ours. A call with a cache, which it fills, runs unfused.

    seq_idx: each token's document, [batch, positions]. parts: without "attention", rows that hold
    documents are all that does not run as the class does.
    """
    given = {"attention_mask": attention_mask, "seq_idx": seq_idx, **options}
    states = [options.pop(name, None) for name in {CACHE, STATES}]
    has_states = any(state is not None for state in states)
    if has_states and not torch.is_grad_enabled():  # inference may use anything
        return class_forward(net, hidden_states, **given)
    read, reason = None, ""
    if "attention" in parts:
        read, reason = attempt(read_delta_net, net)
        if reason := (
            (NO_CACHE_IN_TRAINING if has_states else "")
            or reason
            or why_not_input(hidden_states, read.reads.fit)
        ):
            read = None
    if read is None and (has_states or seq_idx is None):
        if not reason:  # not asked for
            return class_forward(net, hidden_states, **given)
        return step_aside(net, reason, hidden_states, **given)
    say_left(net, {} if read is None else read.left)
    if reason:
        say_once(net, reason)
    if seq_idx is not None:
        refuse_documents(net, why_net_mixes(net))
    named = vars(sys.modules[type(net).__module__])
    x = named["apply_mask_to_padding_states"](hidden_states, attention_mask)
    mixed, z, b, a = _run_in(net, None if read is None else read.reads, x)
    conv = Conv(qkv_sizes(net), seq_idx=seq_idx)
    q, k, v = causal_conv(mixed, net.conv1d.weight.squeeze(1), net.conv1d.bias, conv)
    decay = decay_of(net.A_log, a, net.dt_bias, seq_idx)
    found = run_rule(net, q, k, v, b.sigmoid(), decay, **options)
    rows = found.reshape(-1, net.head_v_dim), z.reshape(-1, net.head_v_dim)
    return net.out_proj(net.norm(*rows).reshape(*hidden_states.shape[:-1], -1))


def run_rule(
    net: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, *,
    seq_idx: Tensor | None = None, **options,
) -> Tensor:  # fmt: skip
    """Run the recurrence on q, k and v [batch, positions, features]; its decay knows the documents.
    Return what it found, [batch, positions, heads, head_dim]."""
    rule, _ = delta_rule(net)
    q, k = (one.unflatten(-1, (-1, net.head_k_dim)) for one in (q, k))
    v = v.unflatten(-1, (-1, net.head_v_dim))
    options = {name: one for name, one in options.items() if name not in BOUNDS}
    if RULE_REPEATS_HEADS and (times := net.num_v_heads // net.num_k_heads) > 1:
        q, k = (one.repeat_interleave(times, dim=2) for one in (q, k))
    found, _ = rule(
        q, k, v, g=decay, beta=beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=True, **options,
    )  # fmt: skip
    return found


def qkv_sizes(net: Any) -> tuple[int, int, int]:
    return net.key_dim, net.key_dim, net.value_dim


def _run_in(net: Any, reads: Reads | None, x: Tensor) -> tuple[Tensor, ...]:
    """Return [q | k | v], z, b and a. Run the in-projections as one function, or each by itself if
    some cannot be fused, or none is read."""
    projections = [getattr(net, name) for name in in_projections(net)]
    if reads is None:
        found = tuple(projection(x) for projection in projections)
    elif reads.left:
        found = tuple(run_alone(net, projection, x) for projection in projections)
    else:
        found = run_together(net, reads.fit, x)
    if len(found) == 4:
        return found
    q, k, v, z, b, a = net.fix_query_key_value_ordering(*found)
    return torch.cat([one.flatten(2) for one in (q, k, v)], -1), z.flatten(2), b, a


# --- in a layer that runs whole -------------------------------------------------------------------


def why_not_net(net: Any) -> str | None:
    """Return the reason if a gated delta net cannot be between the functions of a layer."""
    _, reason = attempt(read_gated_norm, net.norm)
    norm = reason or why_call(net.norm, own_forward=False)
    return _why_not_its_conv(net) or (f"norm: {norm}" if norm else None)


def why_slow_rule(net: Any) -> str:
    return delta_rule(net)[1]


def net_ends(net: Any, seq_idx: Tensor | None) -> DeltaNetEnds:
    eps = getattr(net.norm, known_form(net.norm, "RMSNormGated").eps)
    return DeltaNetEnds(
        net.conv1d.weight.squeeze(1), net.conv1d.bias, net.A_log, net.dt_bias, net.norm.weight,
        eps, qkv_sizes(net), seq_idx,
    )  # fmt: skip

"""The switch `layer` for a mixture of experts in an MLP's place: what follows the first block.

That block gives the residual and its norm. The router stays the class's module, called as such: a
loss on its logits, its bias and its adapter work as ever. Experts run as one function, which adds
the residual, and shared experts as an MLP beside them.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..reading.forms import MixtureForm
from ..reading.known import known_form, why_not_class
from ..reading.projection import Projection, why_call
from ..reading.refusal import Refusal, attempt, refuse
from .experts import ReadExperts, read_experts, run_experts
from .mlp import read_mlp, run_mlp


class Mixture(NamedTuple):
    """A mixture of experts as it is now."""

    form: MixtureForm
    experts: ReadExperts
    shared: tuple[Projection, ...]  # of its shared experts, none where it has none


def read_mixture(module: Any) -> Mixture:
    """Return a mixture as it is now. Raises a Refusal if its class has to run it."""
    refuse(why_not_class(module, "Mixture") or why_call(module, own_forward=False))
    form = known_form(module, "Mixture")
    if form.jitter and module.training and getattr(module, form.jitter):
        raise Refusal(
            f"its router_jitter_noise is {getattr(module, form.jitter)}: load the model with "
            "router_jitter_noise=0.0"
        )
    experts, reason = attempt(read_experts, getattr(module, form.experts))
    refuse(f"{form.experts}: {reason}" if reason else None)
    shared, reason = attempt(_read_shared, getattr(module, form.shared) if form.shared else None)
    refuse(f"{form.shared}: {reason}" if reason else None)
    return Mixture(form, experts, shared)


def _read_shared(mlp: Any) -> tuple[Projection, ...]:
    if mlp is None:
        return ()
    refuse(why_call(mlp, own_forward=False))
    reads = read_mlp(mlp)
    if reads.left:
        raise Refusal(": ".join(next(iter(reads.left.items()))))
    return tuple(reads.fit)


def run_mixture(layer: Any, module: Any, read: Mixture, total: Tensor, normed: Tensor) -> Tensor:
    """Return the output of a layer with this mixture, from the residual and its norm."""
    form = read.form
    residual, x = total.flatten(0, 1), normed.flatten(0, 1)
    if read.shared:
        shared = run_mlp(layer, getattr(module, form.shared), read.shared, x)
        if form.shared_gate:
            shared = getattr(module, form.shared_gate)(x).sigmoid() * shared
        residual = residual + shared
    bias = (getattr(module, form.bias, None),) if form.bias else ()
    _, weights, chosen = getattr(module, form.router)(x, *bias)
    return run_experts(layer, read.experts, x, weights, chosen, residual).view_as(total)

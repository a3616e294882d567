"""Gradient checkpointing, layer by layer: what a layer keeps for its backward, and where.

    none        keep all that a layer saves, even where the model was told to checkpoint
    full        keep each layer's input, run the layer again in backward
    offload     the same with the inputs in pinned host memory (`offload.py`): copied out while the
                layer runs, and back while the layer after it runs backward. There is room there:
                a whole layer's attention and what comes of o go the same way, and are not
                computed again
    selective   keep all that the first layers need, as many as a memory budget holds, and
                checkpoint the others; what a layer needs is measured when it first runs again, so
                until then, in the first step of every shape, all are checkpointed

A layer kept whole costs about 1 GiB at 32 x 512 tokens of Qwen2.5-3B and saves its second forward.
What is dear to compute again is about as dear by the byte in all of a layer, by the times of its
products on an H200: gate and up, 2.1 ms for 688 MiB; q, k, v, attention and o, 0.5 ms for about
230. So whole layers are the unit, and the budget their number.

With a fused loss the last layer keeps what it saves under every policy: its backward comes next,
and would compute all of it for the memory that the loss has just given back.

A layer that runs again (`recompute.py`) does so for what its functions save, not for its output.
It is stopped at the last tensor that is missing. In most layers LoRA_MLP is the last to save any:
`saving_last` tells it so, and its down projection, 29% of the layer's products, does not run again.

A layer calls a `LayerPolicy` in the place of its forward. `adopt/foreign/checkpointing.py` sets it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fused_mlp.launching import is_capturing

from ..rerun import Keep
from .hooks import Bystander, removed_after
from .module_ref import ModuleRef
from .offload import Offload
from .recompute import recomputed

POLICIES = ("none", "full", "offload", "selective")


class Checkpoint:
    """One policy for the layers of one model.

    Args:
        policy: one of POLICIES.
        memory_gib: for "selective", what the layers that are kept whole may hold together.

    Raises:
        ValueError: the policy is unknown, or memory_gib is missing, negative, no finite number, or
            not asked for.
    """

    def __init__(self, policy: str, memory_gib: float | None = None):
        if policy not in POLICIES:
            raise ValueError(
                f"checkpoint: {policy!r} is unknown; give one of {', '.join(POLICIES)}"
            )
        if policy == "selective" and not (
            isinstance(memory_gib, int | float) and 0 <= memory_gib < float("inf")
        ):
            raise ValueError(
                "checkpoint: selective needs checkpoint_gib, the memory for the layers it keeps, "
                f"as a number of GiB; got {memory_gib!r}"
            )
        if policy != "selective" and memory_gib is not None:
            raise ValueError(f"checkpoint: checkpoint_gib is for selective, not for {policy}")
        self.policy = policy
        self.budget_bytes = int((memory_gib or 0.0) * 2**30)
        self.layer_bytes: dict[tuple, int] = {}  # by input's shape and index, as first measured
        self.kept_bytes = 0  # what the layers that this forward has kept so far hold
        self.offload = Offload()

    def run(self, on: "LayerPolicy", forward: Callable, *inputs):
        """Run a layer's forward under this policy."""
        if self.policy == "none" or on.keeps_all:
            return forward(*inputs)
        if self.policy == "selective":
            return self._selective(on.layer(), on.index, forward, *inputs)
        if self.policy == "offload":
            if on.index == 0:
                self.offload.start()
            if not on.is_last:  # its backward comes first, when its input would not be out yet
                keep = Keep(self.offload.out, self.offload.back)
                with self.offload.hooks():
                    return _checkpointed(on.layer(), forward, *inputs, keep=keep)
        return _checkpointed(on.layer(), forward, *inputs)

    # --- selective --------------------------------------------------------------------------------

    def _selective(self, layer: nn.Module, index: int, forward: Callable, *inputs):
        if index == 0:
            self.kept_bytes = 0
        place = inputs[0].shape, index
        if place not in self.layer_bytes:
            see = partial(self._measure, layer, place)
            return _checkpointed(layer, forward, *inputs, see=see)
        if self.kept_bytes + self.layer_bytes[place] > self.budget_bytes:
            return _checkpointed(layer, forward, *inputs)
        self.kept_bytes += self.layer_bytes[place]
        return forward(*inputs)

    def _measure(self, layer: nn.Module, place: tuple, saved: list[Tensor]) -> None:
        known = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        storages = [tensor.untyped_storage() for tensor in saved]
        found = {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in known}
        self.layer_bytes[place] = sum(found.values())


@dataclass(eq=False)
class LayerPolicy:
    """A policy on one layer of a model, which calls this in the place of its forward.

    index: the layer's, in the order of a forward. keeps_all: nothing of it is checkpointed.
    """

    policy: Checkpoint
    layer: ModuleRef
    index: int
    is_last: bool
    keeps_all: bool

    def __call__(self, forward: Callable, *inputs):
        return self.policy.run(self, forward, *inputs)


def policies_in(model: nn.Module) -> set[Checkpoint]:
    """Return the policies that the layers of a model run under."""
    values = (value for module in model.modules() for value in vars(module).values())
    return {one.policy for one in values if isinstance(one, LayerPolicy)}


class _NoDropout(Bystander):
    """A hook that refuses dropout within a layer that is captured and runs again: the state of the
    random numbers cannot be read there. Not dropout of which a fused function makes masks from a
    seed that is kept (`once`), and so calls no module."""

    def __call__(self, module: nn.Module, *_) -> None:
        raise ValueError(
            "checkpoint: in a CUDA graph a layer that does not run fused cannot repeat its "
            "dropout when it is recomputed; set dropout to 0, or do not checkpoint"
        )


def _refusing_dropout(layer: nn.Module) -> Iterator[Any]:
    """Hook the dropouts in a layer, one after the other: their handles."""
    refuse = _NoDropout()
    for module in layer.modules():
        if module.training and getattr(module, "attention_dropout", False):
            refuse(module)
        if isinstance(module, nn.Dropout) and module.training and module.p:
            if layer._compiled_call_impl is not None:  # it would not see a new hook
                refuse(module)
            yield module.register_forward_pre_hook(refuse)


def _checkpointed(layer: nn.Module, forward: Callable, *inputs, **options):
    """`recomputed`, which has these options."""
    if not is_capturing(inputs[0]):
        return recomputed(forward, *inputs, **options)
    with removed_after(_refusing_dropout(layer)):
        return recomputed(forward, *inputs, keep_random_state=False, **options)

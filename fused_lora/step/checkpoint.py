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

A policy is set on the layers of one model (`Checkpoint.install`), through the attributes that
transformers' own checkpointing uses, and taken away again. Who switches the model's checkpointing
on meanwhile, as the Trainer does, switches the policy on (`hold`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fused_mlp.launching import is_capturing

from ..adopt.hooks import Bystander
from ..adopt.owners import ModuleRef
from .offload import Offload
from .recompute import Keep, recomputed

POLICIES = ("none", "full", "offload", "selective")

# What transformers' layers read: whether to checkpoint, and the function that does it.
ATTRIBUTES = ("gradient_checkpointing", "_gradient_checkpointing_func")
# The method of a model that sets them, on all of its layers.
SWITCH = "_set_gradient_checkpointing"


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
                f"checkpoint: selective wants checkpoint_gib, what the layers that are kept may "
                f"hold, a number of GiB; got {memory_gib!r}"
            )
        if policy != "selective" and memory_gib is not None:
            raise ValueError(f"checkpoint: checkpoint_gib is for selective, not for {policy}")
        self.policy = policy
        self.budget_bytes = int((memory_gib or 0.0) * 2**30)
        self.layer_bytes: dict[tuple, int] = {}  # by input's shape and index, as first measured
        self.kept_bytes = 0  # what the layers that this forward has kept so far hold
        self.offload = Offload()

    def install(self, layers: list[nn.Module], last_runs_once: bool = False) -> None:
        """Run these layers, in the order of a forward, under this policy.

        last_runs_once: all of the last one is kept. For a model whose loss takes little memory.
        """
        for index, layer in enumerate(layers):
            if policy_of(layer):
                remove(layer)
            before = {name: vars(layer)[name] for name in ATTRIBUTES if name in vars(layer)}
            layer.gradient_checkpointing = self.policy != "none"  # type: ignore[assignment]
            layer._gradient_checkpointing_func = partial(  # type: ignore[assignment]
                self.run, ModuleRef(layer), index, is_last=index == len(layers) - 1,
                last_runs_once=last_runs_once, before=before,
            )  # fmt: skip

    def run(
        self, layer_ref: ModuleRef, index: int, forward: Callable, *inputs, is_last: bool,
        last_runs_once: bool, before=None,
    ):  # fmt: skip
        """Run a layer's forward, which the layer calls this in place of; `before` is for `remove`
        alone."""
        if self.policy == "none" or (is_last and last_runs_once):
            return forward(*inputs)
        if self.policy == "selective":
            return self._selective(layer_ref(), index, forward, *inputs)
        if self.policy == "offload":
            if index == 0:
                self.offload.start()
            if not is_last:  # its backward comes first, when its input would not be out yet
                keep = Keep(self.offload.out, self.offload.back)
                with self.offload.hooks():
                    return _checkpointed(layer_ref(), forward, *inputs, keep=keep)
        return _checkpointed(layer_ref(), forward, *inputs)

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


class _Refusal(Bystander):
    """A hook that refuses dropout within a layer that is captured and runs again: the state of the
    random numbers cannot be read there. Not dropout of which a fused function makes masks from a
    seed that is kept (`once`), and so calls no module."""

    def __call__(self, module: nn.Module, *_) -> None:
        raise ValueError(
            "checkpoint: a layer with dropout that does not run fused cannot be captured in a CUDA "
            "graph, where it would drop other elements when it runs again; set dropout to 0, or do "
            "not checkpoint"
        )


@contextmanager
def _refusing_dropout(layer: nn.Module) -> Iterator[None]:
    refusal, handles = _Refusal(), []
    try:
        for module in layer.modules():
            if module.training and getattr(module, "attention_dropout", False):
                refusal(module)
            if isinstance(module, nn.Dropout) and module.training and module.p:
                if layer._compiled_call_impl is not None:  # it would not see a new hook
                    refusal(module)
                handles.append(module.register_forward_pre_hook(refusal))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checkpointed(layer: nn.Module, forward: Callable, *inputs, **options):
    """`recomputed`, which has these options."""
    if not is_capturing(inputs[0]):
        return recomputed(forward, *inputs, **options)
    with _refusing_dropout(layer):
        return recomputed(forward, *inputs, keep_random_state=False, **options)


def policy_of(layer: nn.Module) -> Checkpoint | None:
    """The policy that was installed on this layer, if any."""
    function = vars(layer).get("_gradient_checkpointing_func")
    owner = getattr(getattr(function, "func", None), "__self__", None)
    return owner if isinstance(owner, Checkpoint) else None


def hold(model: nn.Module) -> None:
    """Let the policies of a model's layers stay when its checkpointing is switched on or off,
    whatever options come with that."""
    for module in model.modules():
        if hasattr(type(module), SWITCH):
            # a method of the module would be looked for in its class when the model is unpickled
            setattr(module, SWITCH, partial(_switch, ModuleRef(module)))
    _agree(model)


def let_go(model: nn.Module) -> None:
    """The opposite of `hold`, once the policies are removed."""
    for module in model.modules():
        if SWITCH in vars(module):
            delattr(module, SWITCH)
    _agree(model)


def _agree(model: nn.Module) -> None:
    """Let the modules that hold layers say of themselves what these do: in training transformers
    makes no cache where they say that they are checkpointed."""
    for module in model.modules():
        if ATTRIBUTES[0] in vars(module) and not isinstance(module, GradientCheckpointingLayer):
            layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
            module.gradient_checkpointing = any(one.gradient_checkpointing for one in layers)  # type: ignore[assignment]


def _switch(model_ref: ModuleRef, enable: bool = True, **options) -> None:
    """Stand in on a model for its class's own `_set_gradient_checkpointing`."""
    model = model_ref()
    held = {layer: policy for layer in model.modules() if (policy := policy_of(layer))}
    functions = [vars(layer)["_gradient_checkpointing_func"] for layer in held]
    getattr(type(model), SWITCH)(model, enable=enable, **options)
    for (layer, policy), function in zip(held.items(), functions, strict=True):
        # what was asked for meanwhile, which `remove` gives back
        before = {name: vars(layer)[name] for name in ATTRIBUTES}
        layer.gradient_checkpointing = enable and policy.policy != "none"
        layer._gradient_checkpointing_func = partial(function, before=before)
    _agree(model)


def remove(layer: nn.Module) -> None:
    """Give the layer the checkpointing back that it had before a policy was installed."""
    assert policy_of(layer) is not None
    before = vars(layer)["_gradient_checkpointing_func"].keywords["before"]
    for name in ATTRIBUTES:
        delattr(layer, name)
        if name in before:
            setattr(layer, name, before[name])

"""A module's forward and backward as two CUDA graphs, inside a loop that somebody else wrote.

A `GraphedStep` captures a whole step, so everything in it has to run without the host. A trainer's
step does not: it reads metrics, counts tokens, chooses a loss. Most of its kernels belong to the
decoder, though, and these we capture: one graph from the decoder's inputs to its hidden states, and
one from their gradient to the gradients of its parameters. The head, the loss, the metrics and the
update stay outside, as the trainer has them.

Autograd sees one function (`replays.py`). Activations stay in the graphs' memory until its
backward, so a second forward before that runs eagerly.

https://docs.pytorch.org/docs/stable/notes/cuda.html#partial-network-capture
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..rerun import in_tiles
from ..telling import warn
from .capture import Cuda, copy_into, empty_buffers
from .checkpoint import TILE_ROWS_IN_GRAPHS, policies_in
from .graph import EAGER_CALLS
from .graph_checks import addresses_of, form_of, which_train
from .masks import MASK, LayersWithoutMask, PaddingSeen
from .replays import CapturedModule, Replays
from .settings import ModuleSettings

HIDDEN = "last_hidden_state"
CACHES = ("past_key_values", "cache")  # as transformers up to 5.23 names it, and from 5.24 on
# what to do about what a decoder returned beside hidden states
INSTEAD = {
    CACHES: "set model.config.use_cache = False",
    ("router_logits",): "set router_aux_loss_coef=0.0 in TRL's config, or "
    "model.config.output_router_logits = False",
}
ADDED_AT_ONCE = 64  # gradients: few launches, and those of a few layers in memory


class GraphedModule:
    """A module's forward that replays CUDA graphs, one pair for each form of its inputs.

    Within `in_place` it is the module's forward. Each form (shapes, dtypes, constants, autocast,
    which parameters train, `ModuleSettings`) runs eagerly twice and is captured at its third call.
    Once packed rows of one length are captured, those of other lengths are as well, at their next
    call: an eager one would need its activations beside those of the graphs. Forms with masks have
    to run eagerly first (`masks.py`).
    A form that cannot be captured keeps running eagerly, and each reason is given once, as a
    warning.

    Args:
        module: on one CUDA device. It takes tensors and constants, and returns a dataclass with
            `last_hidden_state` [batch, positions, hidden] as its only tensor.
        forget: called before a backward is captured, and after a replay that may come between an
            eager forward and its backward. Whatever a forward leaves in memory that other forwards
            write as well, that backward must write again.
        max_graphs: how many forms with gradients may be captured, and how many without.
    """

    _backend: type[Cuda] = Cuda  # the tests' own runs without a GPU

    def __init__(self, module: nn.Module, forget: Callable[[], None], max_graphs: int) -> None:
        self.module, self.forget, self.max_graphs = module, forget, max_graphs
        self.told: set[str] = set()
        self._replays = Replays()
        self._names = [*inspect.signature(type(module).forward).parameters][1:]
        self.reset()

    def reset(self) -> None:
        """Drop all graphs and their memory. Every form starts over with eager calls."""
        self._settings = ModuleSettings(self.module)
        device = next(self.module.parameters()).device
        # a reference pass is replayed between a forward and its backward, whose activations it must
        # not overwrite: it gets its own pool
        self._cuda = {True: self._backend(device), False: self._backend(device)}
        self._forms: dict[Hashable, _Form] = {}
        self._replays.reset()
        self._padding = PaddingSeen()
        self._has_left = False  # an eager forward, what its backward may take from memory

    @property
    def captured(self) -> int:
        """Count the forms that have been captured."""
        return sum(form.captured is not None for form in self._forms.values())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which this is the module's forward."""
        before = vars(self.module).get("forward")
        self._own = self.module.forward
        self.module.forward = self
        try:
            yield
        finally:
            del self.module.forward
            if before is not None:
                self.module.forward = before

    def _eager(self, **inputs: Any) -> Any:
        """Call the module's own forward. A reference pass keeps nothing for a backward, so whole
        MLPs would be most of its memory."""
        self._has_left |= torch.is_grad_enabled()
        with nullcontext() if torch.is_grad_enabled() else in_tiles(TILE_ROWS_IN_GRAPHS):
            return self._own(**inputs)

    # --- one call ---------------------------------------------------------------------------------

    def __call__(self, *positional: Any, **inputs: Any) -> Any:
        inputs |= dict(zip(self._names, positional, strict=False))
        if any(inputs.get(name) is not None for name in CACHES):  # it generates
            return self._eager(**inputs)
        mask = inputs.get(MASK)
        if isinstance(mask, Tensor) and mask.ndim == 2 and inputs.get("position_ids") is None:
            inputs[MASK] = None if bool(mask.all()) else mask  # transformers looks as well
        if not self._settings.is_current:
            self.reset()
        parameters = self._settings.parameters()
        form = self._form_of(inputs, parameters)
        if form is None:
            return self._eager(**inputs)
        if form.captured is None and not self._is_warm(form):
            form.eager_calls += 1
            with form.without_mask.noted():
                # on the trainer's stream, so that its loss uses the same memory
                return self._eager(**inputs)
        if form.with_gradients and self._replays.is_waiting:
            self._say("a second forward before the backward of the first runs eagerly")
            return self._eager(**inputs)
        if form.captured is None:
            try:
                form.captured = self._capture(form, inputs, parameters)
            except Exception as error:
                if form.eager_calls < EAGER_CALLS:  # something may not have been loaded yet
                    form.kind = None
                    return self(**inputs)
                form.refused = True
                reason = (str(error).splitlines() or [""])[0]
                self._say(f"a forward cannot be captured: {type(error).__name__}: {reason}")
                return self._eager(**inputs)
        hidden = self._replays.run(form.captured, inputs)
        if self._has_left:
            self.forget()
            self._has_left = False
        return form.captured.output_class(**{HIDDEN: hidden})

    def _form_of(self, inputs: dict[str, Any], parameters: list[nn.Parameter]) -> "_Form | None":
        """Return the form of a call, None if it has to run eagerly."""
        try:
            shapes = form_of(inputs)
        except ValueError as error:
            self._say(f"a forward runs eagerly: {str(error).removeprefix('GraphedStep ')}")
            return None
        if any(isinstance(one, Tensor) and one.requires_grad for one in inputs.values()):
            self._say("a forward whose inputs require gradients runs eagerly")
            return None
        autocast = _autocast_on(parameters[0].device.type)
        trains = which_train(parameters)
        with_gradients = torch.is_grad_enabled() and any(trains)
        settings = self._settings.modes(), self._settings.adapters()
        key = (with_gradients and trains, autocast, settings, shapes)
        form = self._forms.get(key)
        captured = None if form is None else form.captured
        if captured is not None and captured.addresses != addresses_of(parameters):
            self.reset()  # weights were moved or replaced: start over
            form = None
        if form is None:
            alike = sum(one.with_gradients is with_gradients for one in self._forms.values())
            if alike >= self.max_graphs:
                self._say(
                    f"batches have more than max_graphs={self.max_graphs} shapes (or "
                    "settings of adapters and dropout), and others run eagerly: use FilledRows, or "
                    "pad to few lengths"
                )
                return None
            without_mask = LayersWithoutMask(self.module, inputs, self._padding)
            looks_at_mask = isinstance(inputs.get(MASK), Tensor)
            kind = None if looks_at_mask else (*key[:3], tuple(part[::2] for part in shapes))
            form = self._forms[key] = _Form(kind, with_gradients, without_mask)
        return None if form.refused else form

    def _is_warm(self, form: "_Form") -> bool:
        """Return True if all that this form needs has been compiled, tuned and seen."""
        return form.eager_calls >= EAGER_CALLS or any(
            other.captured is not None and other.kind == form.kind is not None
            and not other.without_mask.met_masks
            for other in self._forms.values()
        )  # fmt: skip

    def _say(self, reason: str) -> None:
        if reason not in self.told:
            self.told.add(reason)
            warn(f"graph_steps: {reason}")

    # --- capture ----------------------------------------------------------------------------------

    def _capture(
        self, form: "_Form", inputs: dict[str, Any], parameters: list[nn.Parameter]
    ) -> CapturedModule:
        cuda = self._cuda[form.with_gradients]
        trained = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        trained = trained if form.with_gradients else []
        buffers = empty_buffers(inputs, parameters[0].device)
        copy_into(buffers, inputs)
        if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in trained):
            raise ValueError("a parameter has hooks, which a graph would not call: remove them")
        tensors = [one for one in buffers.values() if isinstance(one, Tensor)]
        rows = max((one.shape[:2].numel() for one in tensors), default=0)
        for policy in policies_in(self.module) if trained else ():
            policy.offload.prepare(rows)
        gradients = [one.grad for one in trained]
        for one in trained:
            self._replays.sums.setdefault(one, torch.zeros_like(one))
            one.grad = None
        try:
            # backward may recompute layers
            with form.without_mask.kept(), new_leaves(self.module, trained) as leaves:
                replay_forward, (output, crossing) = cuda.capture(lambda: self._forward(buffers))
                check_output(output)
                output_class = type(output)
                replay_backward: Callable[[], None] | None = None
                received: list[Tensor] = []
                if trained:
                    self.forget()
                    edge = get_gradient_edge(getattr(output, HIDDEN))
                    del output  # its memory is free for the backward
                    replay_backward, received = cuda.capture(
                        lambda: self._backward(edge, crossing, trained, leaves)
                    )
        finally:  # a capture does nothing yet
            for one, held in zip(trained, gradients, strict=True):
                one.grad = held
        return CapturedModule(
            buffers, output_class, crossing, received, replay_forward, replay_backward,
            addresses_of(parameters), policies_in(self.module),
        )  # fmt: skip

    def _forward(self, buffers: dict[str, Any]) -> tuple[Any, Any]:
        """Return the output, and the memory into which its hidden states, if any, are copied."""
        device_type = self._settings.parameters()[0].device.type
        dtype = _autocast_on(device_type)
        # the autocast that is on, without the casts that it may have made outside a graph
        with torch.autocast(device_type, dtype, dtype is not None, cache_enabled=False):
            output = self._eager(**buffers)
        for policy in policies_in(self.module):
            policy.offload.finish()
        hidden = getattr(output, HIDDEN, None)
        if not isinstance(hidden, Tensor):
            return output, None
        return output, self._replays.crossing.like(hidden).copy_(hidden.detach())

    def _backward(
        self, hidden: GradientEdge, gradient: Tensor, trained: Sequence[Tensor],
        leaves: list[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Add this backward's gradients to the sums, some at a time: all of them together are as
        large as the sums. Return the parameters that get one. leaves: those that stand in for
        `trained`."""
        tensor_of = dict(zip(leaves, trained, strict=True))
        received: dict[Tensor, None] = {}  # in order, once each
        waiting: list[Tensor] = []

        def add() -> None:
            gradients = [leaf.grad for leaf in waiting if leaf.grad is not None]
            if gradients:
                sums = [self._replays.sums[tensor_of[leaf]] for leaf in waiting]
                torch._foreach_add_(sums, gradients)
            for leaf in waiting:
                leaf.grad = None
            waiting.clear()

        def receive(leaf: Tensor) -> None:
            received[tensor_of[leaf]] = None
            waiting.append(leaf)
            if len(waiting) == ADDED_AT_ONCE:
                add()

        with ExitStack() as hooks, torch.autocast(gradient.device.type, enabled=False):
            # without autocast, as outside the forward
            for leaf in leaves:
                hooks.callback(leaf.register_post_accumulate_grad_hook(receive).remove)
            torch.autograd.backward([hidden], [gradient])
        add()
        if any(one.grad is not None for one in trained):
            raise ValueError("a parameter is used by something else than the module that has it")
        return [*received]


@dataclass(eq=False)
class _Form:
    """Inputs of the same shapes, dtypes and constants."""

    kind: Hashable | None  # all but the sizes; None if those of its kind tell nothing about it
    with_gradients: bool
    without_mask: LayersWithoutMask
    eager_calls: int = 0
    refused: bool = False
    captured: CapturedModule | None = None


@contextmanager
def new_leaves(module: nn.Module, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Context in which new parameters on the same memory, in this order, replace those of a module.
    Tied ones stay tied.

    Autograd accumulates a parameter's gradient in a node that remembers the stream it was made on,
    and lives as long as somebody holds it. DistributedDataParallel holds all of them, made on
    CUDA's default stream, and a captured backward may not wait for that one. A new parameter has no
    node yet: it gets one on the capture's stream.
    """
    leaves = {parameter: nn.Parameter(parameter.detach()) for parameter in parameters}
    replaced = [
        (owner._parameters, name, one)
        for owner in module.modules()
        for name, one in owner._parameters.items()
        if one in leaves
    ]
    try:
        for owned, name, one in replaced:
            owned[name] = leaves[one]
        yield [*leaves.values()]
    finally:
        for owned, name, one in replaced:
            owned[name] = one


def check_output(output: Any) -> None:
    """Raise ValueError if a graph's replay would not return all that this forward's output has."""
    others = [
        field.name
        for field in (fields(output) if is_dataclass(output) else ())
        if field.name != HIDDEN and getattr(output, field.name) is not None
    ]
    if others or not isinstance(getattr(output, HIDDEN, None), Tensor):
        to_do = [do for names, do in INSTEAD.items() if not {*names}.isdisjoint(others)]
        given = ", ".join(others) or type(output).__name__
        raise ValueError(": ".join([f"it returns {given} beside hidden states", *to_do]))


def is_graphed(module: nn.Module) -> bool:
    """Return True if a call of this module replays graphs, whose shapes should not change."""
    return isinstance(vars(module).get("forward"), GraphedModule)


def _autocast_on(device_type: str) -> torch.dtype | None:
    is_on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None

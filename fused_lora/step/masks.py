"""Attention without a mask, captured in a CUDA graph (`graph.py`) as it runs eagerly.

If rows have no padding, transformers' models give their layers no mask, and
scaled_dot_product_attention runs its fast kernels. During a capture they cannot wait to see whether
positions are packed, so they build a mask: a step of Llama at 2 x 4096 then takes 1.4x as long.
Without attention_mask and position_ids among a step's inputs, shapes alone decide whether a layer
needs a mask. If it needed none eagerly, it needs none in the graph.

With all attention fused, position_ids do no harm: in the graph its kernels take the bounds of
whatever documents there are (`kernels/document_bounds.py`). With the loss fused as well, an
attention_mask does no harm either, if the eager calls had padding on which no label depends: the
graph treats a row's padding as a separate document. A graph cannot look at a mask, so the model
called in a step finds notes (`padding_seen`): it writes down what it sees in eager calls, and reads
them during a capture.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.document_bounds import is_documents
from ..telling import warn
from .hooks import Bystander

MASK = "attention_mask"
# Inputs whose values, not just their shapes, decide whether there is a mask.
DECIDING = (MASK, "position_ids")


class PaddingSeen:
    """Notes of one step on the padding in its batches."""

    def __init__(self) -> None:
        self.is_there = False
        self.is_apart = True  # no labelled token depends on it

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context in which the model runs or is captured."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[PaddingSeen | None] = ContextVar("padding seen", default=None)


def padding_seen() -> PaddingSeen | None:
    """Return the notes of the step that is calling the model, None outside of one."""
    return _current.get()


class LayersWithoutMask(Bystander):
    """The layers of a model that ran eagerly without a mask, for one set of shapes. A hook on them
    notes that, and removes the masks of those that had none eagerly when they are captured. Where
    it is uncertain that they need none, it just notes them.

    model: its layers are the contents of its nn.ModuleLists. inputs: the arguments of its call.
    padding: notes on padding, shared by all sets of shapes.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Any], padding: PaddingSeen):
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        self.layers = list(dict.fromkeys(layer for one in lists for layer in one))
        self.deciding = [name for name in DECIDING if isinstance(inputs.get(name), Tensor)]
        self.says_none = isinstance(inputs.get(MASK), dict)
        self.had_none: dict[nn.Module, bool] = {}
        self.is_captured = self.found_masks = False
        self.met_masks = False  # in the capture, other than bounds of documents
        self.padding = padding

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context in which the model runs eagerly."""
        with self._hooked(), self.padding.noted():
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context in which the model is captured. Warns if a layer gets a mask only here."""
        if not self.deciding and not self.says_none and any(map(_is_compiled, self.layers)):
            warn(
                "GraphedStep cannot see the masks of compiled layers, and a mask makes attention "
                'slow: pass attention_mask={"full_attention": None} (Qwen), or do not compile',
            )
        self.is_captured = True
        with self._hooked(), self.padding.noted():
            yield
        if self.found_masks:
            warn(
                "GraphedStep: this step has a mask only in the graph, which makes attention slow: "
                f"leave {' and '.join(self.deciding)} out of batches whose rows have no padding",
            )

    def __call__(
        self, layer: nn.Module, inputs: tuple, options: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        # a layer compiled without its mask would have none outside the graph either
        if MASK not in options or torch.compiler.is_compiling():
            return None
        mask = options[MASK]
        if not self.is_captured:
            self.had_none[layer] = mask is None and self.had_none.get(layer, True)
        elif mask is not None and not is_documents(mask):
            self.met_masks = True
            if self.had_none.get(layer, False):
                if not self.deciding:
                    return inputs, {**options, MASK: None}
                self.found_masks = True
        return None

    def _hooked(self) -> ExitStack:
        """Call this before every call of the layers. It comes ahead of their other hooks, so none
        of those sees a mask that it removes."""
        hooks = ExitStack()
        for layer in self.layers:
            if not _is_compiled(layer):
                handle = layer.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
                hooks.enter_context(handle)
        return hooks


def _is_compiled(layer: nn.Module) -> bool:
    return layer._compiled_call_impl is not None

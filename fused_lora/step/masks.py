"""Attention without a mask, captured in a CUDA graph (`graph.py`) as it runs eagerly.

Where rows have no padding, transformers' models give their layers no mask, so that
scaled_dot_product_attention runs its fast kernels. While a graph is captured they may not wait to
look whether positions are packed, so they build one: a step of Llama at 2 x 4096 then takes 1.4
times as long. Without attention_mask and position_ids among a step's inputs, shapes alone decide
whether a layer wants a mask. What it wanted eagerly it therefore wants in the graph, too.

Where all attention is fused, position_ids do no harm: in the graph its kernels take the bounds of
documents (`kernels/documents.py`), whichever there are. Nor does an attention_mask where the loss
is fused, too, and eager calls had padding on which no label depends: a row's padding is a document
of its own there.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.documents import is_documents
from .hooks import Bystander, removed_after
from .padding_seen import PaddingSeen

MASK = "attention_mask"
# Inputs whose values, and not their shapes alone, say whether there is a mask.
DECIDING = (MASK, "position_ids")


class LayersWithoutMask:
    """The layers of a model that were called without a mask eagerly, for one set of shapes.

    model: its layers are what its nn.ModuleLists hold. inputs: what it is called with. padding:
    what all sets of shapes have seen of it.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Any], padding: PaddingSeen):
        lists = (one for one in model.modules() if isinstance(one, nn.ModuleList))
        self.layers = list(dict.fromkeys(layer for one in lists for layer in one))
        self.deciding = [name for name in DECIDING if isinstance(inputs.get(name), Tensor)]
        self.says_none = isinstance(inputs.get(MASK), dict)
        self.had_none: dict[nn.Module, bool] = {}
        self.padding = padding

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within it the model runs eagerly."""
        with _hooked(self.layers, _Noting(self.had_none)), self.padding.noted():
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it the model is captured; warns of a mask that a layer did without eagerly."""
        if not self.deciding and not self.says_none and any(map(_is_compiled, self.layers)):
            warnings.warn(
                "GraphedStep cannot see the masks of compiled layers, and a mask makes attention "
                'slow: pass attention_mask={"full_attention": None} (Qwen), or do not compile',
                stacklevel=2,
            )
        keeping = _Keeping(self.had_none, is_certain=not self.deciding)
        with _hooked(self.layers, keeping), self.padding.noted():
            yield
        if keeping.found_masks:
            warnings.warn(
                "GraphedStep: this step has a mask only in the graph, which makes attention slow: "
                f"leave {' and '.join(self.deciding)} out of batches whose rows have no padding",
                stacklevel=2,
            )


class _Noting(Bystander):
    """Note of every layer whether it was ever called with a mask."""

    def __init__(self, had_none: dict[nn.Module, bool]):
        self.had_none = had_none

    def __call__(self, layer: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
        if MASK in options and not torch.compiler.is_compiling():
            self.had_none[layer] = options[MASK] is None and self.had_none.get(layer, True)


class _Keeping(Bystander):
    """Take away the masks of layers that had none, or, where that is not certain, find them."""

    def __init__(self, had_none: dict[nn.Module, bool], is_certain: bool):
        self.had_none, self.is_certain, self.found_masks = had_none, is_certain, False

    def __call__(
        self, layer: nn.Module, inputs: tuple, options: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        # what is compiled would go without a mask wherever it runs, also out of the graph
        mask = options.get(MASK)
        if torch.compiler.is_compiling() or mask is None or is_documents(mask):
            return None
        if not self.had_none.get(layer, False):
            return None
        if self.is_certain:
            return inputs, {**options, MASK: None}
        self.found_masks = True
        return None


def _is_compiled(layer: nn.Module) -> bool:
    return layer._compiled_call_impl is not None


def _hooked(layers: Sequence[nn.Module], hook: _Noting | _Keeping) -> AbstractContextManager[None]:
    """Call the hook before every call of these layers, the first of their hooks: no other sees what
    it takes away."""
    return removed_after(
        layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        for layer in layers
        if not _is_compiled(layer)
    )

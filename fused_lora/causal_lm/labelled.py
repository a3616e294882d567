"""The decoder of a causal language model, run for a loss on the tokens that have a label."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from fused_mlp.launching import is_capturing

from ..foreign.versions import as_named
from ..loss.cross_entropy import labelled_rows
from ..loss.label_check import IGNORED, checking
from ..step.graphed_module import is_graphed
from .documents import LAYER_INPUTS, unpadded


class DecoderStates(NamedTuple):
    """The decoder's output for a batch, perhaps as one row without its padding."""

    outputs: Any  # transformers'
    hidden: Tensor  # [batch, positions, hidden], or [1, tokens, hidden]
    labels: Tensor  # [batch, positions], or [1, tokens]: each at the token that predicts it
    rows: Tensor | None  # the tokens that have a label; None: all
    drop_ignored: bool
    is_token: Tensor | None  # [batch, positions]: those in the row; None: there is padding, or none

    def in_batch(self, values: Tensor) -> Tensor:
        """Return values [1, tokens] as [batch, positions], 0 at padding."""
        if self.is_token is None:
            return values
        places = self.is_token.flatten().nonzero().squeeze(1)
        in_all = values.new_zeros(self.is_token.numel()).index_copy(0, places, values[0])
        return in_all.view(self.is_token.shape)


def shifted_by_one(labels: Tensor) -> Tensor:
    """Return labels [..., positions] moved to the token before, which predicts them."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def run_decoder(
    model: Any, head: nn.Linear, inputs: dict[str, Any], labels: Tensor, options: dict[str, Any],
    max_labelled_tokens: int | None = None,
) -> DecoderStates:  # fmt: skip
    """Run the decoder on inputs without their padding, where that is exact. labels: each at the
    token that predicts it, on the head's device. options: of the call, which may change."""
    wanted = labels  # the true labels: unpadded may mark some as wrong
    if LAYER_INPUTS in options:
        inputs = inputs | {LAYER_INPUTS: options.pop(LAYER_INPUTS)}
    given = inputs
    if not _shows_states(model, options):
        inputs, labels = unpadded(model.model, inputs, labels)
    is_token = None
    if labels.shape != wanted.shape:
        is_token = given["attention_mask"].bool().to(labels.device)
    # the host would wait for the number of labelled tokens, which no capture allows
    drop_ignored = not is_capturing(labels)
    waits = drop_ignored and max_labelled_tokens is None
    rows, outputs = None, None
    with checking(wanted, len(head.weight), waits=waits):
        if is_graphed(model.model):  # launch it before the host waits
            outputs = model.model(**as_named(inputs), **options)
        if drop_ignored or max_labelled_tokens is not None:
            rows = labelled_rows(labels, max_labelled=max_labelled_tokens)
    if outputs is None:
        outputs = model.model(**as_named(inputs), **options)
    hidden = outputs.last_hidden_state
    return DecoderStates(outputs, hidden, labels.to(hidden.device), rows, drop_ignored, is_token)


def _shows_states(model: Any, options: dict[str, Any]) -> bool:
    names = ("output_hidden_states", "output_attentions")
    return any(options.get(name) or getattr(model.config, name) for name in names)

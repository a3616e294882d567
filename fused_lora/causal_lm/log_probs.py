"""TRL's call of a causal language model, answered by `fused_lora.log_probs`."""

import sys
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..foreign.ownership import trl_head_of
from ..foreign.parallel import call_with
from ..foreign.trl_head import UTILS
from ..loss.label_check import IGNORED, note
from ..loss.log_probs import HeadAdapter, LogProbs, log_probs
from ..reading.aside import step_aside
from ..reading.projection import Projection, bias_of, read_projection
from ..reading.refusal import Refusal, attempt
from .documents import check_not_empty
from .labelled import run_decoder, shifted_by_one


def read_adapted_head(head: BaseTunerLayer) -> Projection:
    """Read an lm_head with an adapter as it is now. Raises a Refusal if `log_probs` cannot multiply
    it. TRL's own head reads the base weight alone: it leaves out adapters that are not merged."""
    read, reason = attempt(read_projection, head)
    if head.merged:
        raise Refusal(reason)
    if len(head.active_adapters) > 1:
        reason = "choose one with set_adapter"
    elif not reason and read.dropout:
        reason = f"lora_dropout is {read.dropout}, set it to 0.0"
    elif not reason and read.is_packed:
        reason = "its weight is in 4 bits, load that in bf16"
    if reason:
        raise Refusal(f"TRL's head would not train lm_head's adapter: {reason}")
    return read


def answer_trl(
    model: Any, head: nn.Linear | None, reason: str | None, inputs: dict[str, Any],
    options: dict[str, Any], *, labels: Tensor | None, shift_labels: Tensor | None,
    num_items_in_batch: int | Tensor | None,
) -> Any:  # fmt: skip
    """Return TRL's output for a call with `fused_lm_head=True`, in training or not.

    Its fields are [batch, positions - 1], or [batch, positions] with shift_labels, which are not
    shifted any more. With a reason, TRL's own head runs, and the model warns once.
    """
    settings = trl_head_of(model)
    if settings is None or (labels is None and shift_labels is None):
        raise ValueError(
            "fused_lm_head=True is a call of TRL's trainers: it needs labels, and a trainer made"
        )
    inputs["use_cache"] = False
    if head is None or reason:
        asked = {"labels": labels, "shift_labels": shift_labels}
        return step_aside(
            model, reason or "", fused_lm_head=True, num_items_in_batch=num_items_in_batch,
            **inputs, **asked, **options,
        )  # fmt: skip
    options.pop("return_dict", None)
    check_not_empty(model, inputs)
    at_predicting = shift_labels
    if labels is not None and at_predicting is None:
        note(labels, len(head.weight))
        at_predicting = shifted_by_one(labels)
    at_predicting = at_predicting.to(head.weight.device)  # type: ignore[union-attr]
    states = run_decoder(model, head, inputs, at_predicting, options)
    adapter, adapted = None, None
    if isinstance(model.lm_head, BaseTunerLayer):
        adapted = read_adapted_head(model.lm_head)
        adapter = HeadAdapter(adapted.A, adapted.B, adapted.scaling) if len(adapted.A) else None

    def found_in(hidden: Tensor) -> LogProbs:
        return log_probs(
            hidden.to(head.weight.device),
            head.weight,
            states.labels.to(head.weight.device),
            bias=head.bias if adapted is None else bias_of(adapted),
            adapter=adapter,
            outputs=settings.outputs,
            temperature=settings.temperature,
            softcap=settings.final_logit_softcapping,
            logit_scale=settings.logit_scale,
            in_fp32=settings.cast_lm_head_to_fp32,
            num_items_in_batch=num_items_in_batch,
            drop_ignored=states.drop_ignored,
            rows=states.rows,
            check_labels=False,
        )

    found = call_with([model.lm_head, head], found_in, states.hidden)
    end = None if shift_labels is not None else -1  # the last token predicts none
    fields = {
        name: None if values is None else states.in_batch(values)[:, :end]
        for name, values in found._asdict().items()
        if name != "loss"
    }
    label_mask = at_predicting[:, :end] != IGNORED
    output_class = sys.modules[UTILS].FusedCausalLMOutput
    return output_class(**fields, loss=found.loss, label_mask=label_mask)

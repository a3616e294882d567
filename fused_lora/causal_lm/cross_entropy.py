"""The switch `cross_entropy`: the forward it sets on a causal language model."""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, cast, get_args

import torch
import torch.nn.functional as F
from peft.tuners.cpt import CPTEmbedding
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.loss import loss_utils

from ..foreign.no_logits import without_logits
from ..foreign.originals import why_replaced
from ..foreign.ownership import trl_head_of
from ..foreign.parallel import between_forwards, call_with, is_fsdp, own_class
from ..foreign.versions import class_forward
from ..loss.cross_entropy import linear_cross_entropy
from ..loss.label_check import note
from ..reading.aside import say_not_checkpointed, say_once
from ..reading.known import known_form, why_not_class
from ..reading.projection import why_call, why_not_plain
from ..reading.refusal import Refusal, attempt, refuse
from ..reading.site import having
from ..telling import warn
from ..weights.fp8_weight import why_not_in_fp8
from .documents import check_not_empty, fills_cache
from .labelled import run_decoder, shifted_by_one
from .log_probs import answer_trl, read_adapted_head


def causal_lms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield models with an lm_head, except inside PEFT's CPT, which needs logits for its loss."""
    if not any(isinstance(module, CPTEmbedding) for module in model.modules()):
        yield from having(model, "lm_head", "model")


def read_answered_head(model: Any) -> nn.Linear:
    """Read the head as the calls need it that a model gets: those of TRL's head, if it has one, or
    those for a loss."""
    return read_head(model) if trl_head_of(model) else read_loss_head(model)


def read_loss_head(model: Any) -> nn.Linear:
    """Return the head. Raises a Refusal if the fused loss cannot replace it and the model's own."""
    head = read_head(model, is_called=True)
    if model.loss_function is not loss_utils.ForCausalLMLoss:
        raise Refusal("its loss_function is not transformers' own: do not set model.loss_function")
    refuse(
        why_replaced(loss_utils.__name__, "ForCausalLMLoss", "fixed_cross_entropy")
        or why_replaced(F.__name__, "cross_entropy")
    )
    return head


def read_fp8_head(model: Any) -> nn.Linear:
    """Return the head. Raises a Refusal if the fused loss cannot multiply it in FP8."""
    if trl_head_of(model):
        raise Refusal("TRL's trainers get log-probabilities, never in FP8: leave fp8_lm_head out")
    head = read_loss_head(model)
    if softcap_of(model) is not None:
        raise Refusal("its logits are soft-capped, never in FP8")
    refuse(_why_not_fp8(head))
    return head


def _why_not_fp8(head: nn.Linear) -> str | None:
    if any(parameter.requires_grad for parameter in head.parameters()):
        return "its lm_head is trained, which is done in its own precision: leave fp8_lm_head out"
    return why_not_in_fp8(head.weight)


def read_head(model: Any, is_called: bool = False) -> nn.Linear:
    """Return the linear layer that computes a model's logits, as it is now. Raises a Refusal if a
    fused function cannot replace it. is_called: by the model itself; TRL only reads its weight."""
    refuse(why_not_class(model, "ForCausalLM"))
    if known_form(model, "ForCausalLM").has_router and model.config.output_router_logits:
        raise Refusal("it adds its routers' loss: set model.config.output_router_logits = False")
    head = model.lm_head
    if isinstance(head, BaseTunerLayer) and not is_called:
        return cast(nn.Linear, read_adapted_head(head).base)
    modules = [head]
    if own_class(head) is ModulesToSaveWrapper:
        # choose as its forward does: each adapter that trains it has a copy
        active = [] if head.disable_adapters else head.active_adapters
        head = head.modules_to_save[active[0]] if active else head.original_module
        modules.append(head)
    if own_class(head) is not nn.Linear:
        if isinstance(head, LoraLayer):
            raise Refusal(
                "its lm_head has an adapter: name it in modules_to_save, not in target_modules"
            )
        kind = own_class(head)
        raise Refusal(f"its lm_head is {kind.__module__}.{kind.__qualname__}, not nn.Linear")
    for module in modules:
        is_own = is_called or is_fsdp(type(module))
        if (reason := why_call(module, is_own, may_be_apart=True)) is not None:
            raise Refusal(f"lm_head: {reason}")
    is_apart = any(is_fsdp(type(module)) for module in modules)
    with between_forwards() if is_apart else nullcontext():  # `call_with` gathers it
        reason = why_not_plain(head, head.weight)
    if reason is not None:
        raise Refusal(f"lm_head: its weight {reason}")
    return head


# Options of a call that the fused loss does not compute: those that transformers' loss reads, those
# that its attention reads, and losses by these names, which transformers (5.17 to 5.24) accepts and
# ignores.
OTHER_LOSSES = frozenset({"label_smoothing", "z_loss"})
NOT_KNOWN = OTHER_LOSSES | {"is_causal", "position_bias"} | frozenset(
    name
    for function in (loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy)
    for name in inspect.signature(function).parameters
) - {"labels", "num_items_in_batch", "kwargs"}  # fmt: skip
# Values of these options that change nothing.
NOTHING_ASKED = {"ignore_index": -100, "is_causal": True}


def why_not_options(
    model: Any, logits_to_keep: int | Tensor, options: dict[str, Any]
) -> str | None:
    """Return the reason if a call asks for more than the fused loss does. Other options, such as
    seq_idx or token_type_ids, go to the decoder, which treats them as it does without fusion."""
    if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
        return "it was given logits_to_keep: leave that out to run it fused"
    if options.get("return_dict", model.config.return_dict) is False:
        return "it was given return_dict=False, for a tuple with logits: leave that out"
    has_router = known_form(model, "ForCausalLM").has_router
    for name, value in options.items():
        if name not in NOT_KNOWN and not (has_router and name == "output_router_logits"):
            continue
        if value is None or (value is False and name != "is_causal"):
            continue
        nothing = 0 if name in OTHER_LOSSES else NOTHING_ASKED.get(name)
        if isinstance(value, int | float) and value == nothing:
            continue
        return f"it was given {name}, which the fused loss does not know: leave that out"
    return None


NO_CACHE = (
    "a fused loss fills no cache in training: set model.config.use_cache to False, or call the "
    "model with use_cache=True"
)


def causal_lm_forward(
    model: Any,
    parts: frozenset[str],
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values=None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    max_labelled_tokens: int | None = None,
    **options,
):
    """Compute the loss without logits (`no_logits.py`) of a call with labels, in training mode or
    with gradients: from_pretrained leaves a model in eval mode, and it trains all the same.

    A cache that only the model's config asks for is not filled: with one, no layer would run whole.
    In evaluation or without labels the class's own forward runs, logits and all. It also runs, with
    a warning, if a call asks for something that the fused loss does not know (label_smoothing,
    z_loss). Its loss_function decides what happens to that; transformers' reads neither.

    max_labelled_tokens is ours. It skips the matmuls of ignored tokens in a CUDA graph, where the
    host cannot wait to count the labelled ones (see `linear_cross_entropy`).
    """
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
    }
    if labels is None and past_key_values is not None and not options.get("fused_lm_head"):
        given = {name: one for name, one in inputs.items() if one is not None}
        return class_forward(model, logits_to_keep=logits_to_keep, **given, **options)
    own, output_class = _signature_of(model.__class__)
    inputs = {name: one for name, one in inputs.items() if name in own or one is not None}
    if options.pop("fused_lm_head", False):
        head, reason = attempt(read_head, model)
        asked = {name: options.pop(name, None) for name in ("shift_labels", "num_items_in_batch")}
        reason = reason or why_not_options(model, logits_to_keep, options) or ""
        return answer_trl(model, head, reason, inputs, options, labels=labels, **asked)
    head, reason = attempt(read_loss_head, model)
    may_train = model.training or torch.is_grad_enabled()
    if labels is not None and may_train and not reason:
        reason = why_not_options(model, logits_to_keep, options) or ""
    if reason:
        say_once(model, reason)
    if labels is None or not may_train or reason:
        return class_forward(
            model, labels=labels, logits_to_keep=logits_to_keep, **inputs, **options
        )
    if not model.training:
        say_not_checkpointed(model)
    num_items = options.pop("num_items_in_batch", None)
    for name in ("return_dict", "output_router_logits"):  # neither is asked for
        options.pop(name, None)
    check_not_empty(model, inputs)
    is_named = use_cache is None and "use_cache" in own
    if is_named and inputs.get("past_key_values") is None and fills_cache(model.model, None):
        warn(NO_CACHE)
        inputs["use_cache"] = False
    shifted = shifted_by_one(labels).to(head.weight.device)
    note(labels, len(head.weight))
    states = run_decoder(model, head, inputs, shifted, options, max_labelled_tokens)
    hidden, form = states.hidden, known_form(model, "ForCausalLM")
    text = model.config.get_text_config()
    if form.divided_by:  # dividing this divides the logits
        hidden = hidden / getattr(text, form.divided_by)
    if form.multiplied_by:
        hidden = hidden * getattr(text, form.multiplied_by)

    fp8 = "fp8_lm_head" in parts
    if fp8 and (why_not := _why_not_fp8(head)):
        say_once(model, why_not)
        fp8 = False

    def loss_of(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden,
            head.weight,
            states.labels,
            bias=head.bias,
            num_items_in_batch=num_items,
            drop_ignored=states.drop_ignored,
            max_labelled=max_labelled_tokens,
            rows=states.rows,
            check_labels=False,
            fp8=fp8,
            softcap=softcap_of(model),
        )

    loss = call_with([model.lm_head, head], loss_of, hidden)
    outputs = {
        field.name: getattr(states.outputs, field.name, None) for field in fields(output_class)
    }
    return without_logits(output_class)(**outputs | {"loss": loss, "logits": None})


def softcap_of(model: Any) -> float | None:
    """Return the bound that a model's logits approach, None if there is none."""
    name = known_form(model, "ForCausalLM").capped_by
    return getattr(model.config.get_text_config(), name) if name else None


def _signature_of(cls: Any) -> tuple[frozenset[str], type]:
    """Return the names of the arguments that a model's class passes to its decoder, and its output
    class."""
    signature = inspect.signature(cls.forward)
    returned = signature.return_annotation  # that class, or a tuple or that class
    names = frozenset(signature.parameters) - {"labels", "logits_to_keep", "output_router_logits"}
    return names, (get_args(returned) or (returned,))[-1]

"""Correct before timed: a variant's loss and every adapter gradient, held against fp32.

The truth is plain PEFT in fp32 on a small fixed batch. The budget is vanilla PEFT's own error in
bf16 on the same batch: a variant may be as wrong as bf16 makes plain PEFT, times LIMIT, for the
loss and for each adapter matrix by itself. A variant that is further off is not timed.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from batches import Batch
from models import Built

# On an H200 bf16 puts the median gradient of Qwen2.5-3B 6% from fp32, and the worst ratio of any
# variant is 1.1. A missing term or a wrong sign is far outside; a slip of a few percent is not.
LIMIT = 2.0
# The loss is a mean over tokens whose errors cancel, so vanilla's own may be next to nothing by
# chance: a share of an eighth of bf16's resolution (2^-8) is always allowed.
LOSS_FLOOR = 2.0**-11

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """The truth on the parity batch, and how far bf16 puts plain PEFT from it.

    loss: in fp32. gradients: fp32, by parameter name. *_error: relative, of vanilla PEFT in bf16.
    """

    loss: float
    gradients: Gradients
    loss_error: float
    gradient_errors: dict[str, float]

    def save(self, path: Path) -> None:
        torch.save(asdict(self), path)

    @staticmethod
    def load(path: Path) -> "Reference":
        return Reference(**torch.load(path, weights_only=True))


@dataclass(frozen=True)
class Parity:
    """Outcome of the gate; `worst_ratio` is the largest gradient error over vanilla's own."""

    passed: bool
    loss: float
    reference_loss: float
    loss_error: float
    vanilla_loss_error: float
    median_gradient_error: float
    vanilla_median_gradient_error: float
    worst_ratio: float
    worst_gradient: str
    limit: float = LIMIT


def gradients_of(built: Built, batch: Batch) -> tuple[float, Gradients]:
    """Loss and adapter gradients of one forward and backward; leaves no gradient behind."""
    with built.autocast():
        loss = built.model(
            input_ids=batch.input_ids, labels=batch.labels, attention_mask=batch.attention_mask
        ).loss
    loss.backward()
    gradients = {}
    for name, parameter in built.model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            gradients[name] = (
                torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
            )
            parameter.grad = None
    return loss.item(), gradients


def make_reference(vanilla: Built, batch: Batch) -> Reference:
    """Run vanilla PEFT on `batch` in bf16 and then in fp32, to which its model is converted."""
    bf16_loss, bf16_gradients = gradients_of(vanilla, batch)
    vanilla.model.float()
    in_fp32 = Built(vanilla.model, autocast_dtype=None, settings={})
    loss, gradients = gradients_of(in_fp32, batch)
    return Reference(
        loss=loss,
        gradients={name: gradient.cpu() for name, gradient in gradients.items()},
        loss_error=abs(bf16_loss - loss) / abs(loss),
        gradient_errors=_errors(bf16_gradients, gradients),
    )


def check(built: Built, batch: Batch, reference: Reference) -> Parity:
    """Hold `built` against the reference on the batch that the reference was made on."""
    loss, gradients = gradients_of(built, batch)
    return judge(loss, gradients, reference)


def judge(loss: float, gradients: Gradients, reference: Reference) -> Parity:
    """Whether a loss and gradients are within LIMIT times vanilla's own error."""
    loss_error = abs(loss - reference.loss) / abs(reference.loss)
    errors = _errors(gradients, reference.gradients)
    ratios = {
        name: errors.get(name, float("inf")) / vanilla_error
        for name, vanilla_error in reference.gradient_errors.items()
    }
    worst = max(ratios, key=ratios.__getitem__)
    # written so that NaN fails
    passed = (
        loss_error <= LIMIT * max(reference.loss_error, LOSS_FLOOR)
        and ratios[worst] <= LIMIT
        and errors.keys() == reference.gradients.keys()
    )
    return Parity(
        passed=passed,
        loss=loss,
        reference_loss=reference.loss,
        loss_error=loss_error,
        vanilla_loss_error=reference.loss_error,
        median_gradient_error=_median(errors),
        vanilla_median_gradient_error=_median(reference.gradient_errors),
        worst_ratio=ratios[worst],
        worst_gradient=worst,
    )


def _errors(gradients: Gradients, truth: Gradients) -> dict[str, float]:
    """||gradient - truth|| / ||truth|| of every gradient, infinite where it is not finite."""
    errors = {}
    for name, gradient in gradients.items():
        expected = truth[name].to(gradient.device, torch.float32)
        difference = torch.linalg.vector_norm(gradient.float() - expected)
        error = (difference / torch.linalg.vector_norm(expected)).item()
        errors[name] = error if error < float("inf") else float("inf")
    return errors


def _median(errors: dict[str, float]) -> float:
    return torch.tensor(list(errors.values()), dtype=torch.float64).median().item()

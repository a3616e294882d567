"""Correct before timed: a variant's loss and every adapter gradient, held against fp32.

The truth is vanilla PEFT in fp32 on two small fixed batches. The budget is vanilla PEFT's own error
in bf16 on the same batches: a variant may be as wrong as bf16 makes vanilla PEFT, times LIMIT, for
the loss of both and for each adapter matrix's gradient on the second by itself. Two batches,
because a result that is left over from the first is right only there. A variant that is further
off is not timed.

Dropout is off in it: its masks are each library's own. Variants in FP8 have a reference of their
own: vanilla PEFT with its products in FP8 (`fp8_products.py`) in the place of vanilla in bf16.

bf16's error points anywhere, so a gradient that is a tenth too long hides in it. Its component
along the truth does not: that is measured by itself, as the gradient's scale.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from batches import Batch
from bench.fp8_products import fp8_products
from bench.records import Parity
from models import Built
from variants import Settings

# On an H200 bf16 puts the median gradient of Qwen2.5-3B 7% from fp32, and the worst ratio of any
# variant is 1.14. Kernels that truncate where they should round come to 2.0.
LIMIT = 1.5
# The loss is a mean over tokens whose errors cancel, so vanilla's own may be next to nothing by
# chance: a share of an eighth of bf16's resolution (2^-8) is always allowed.
LOSS_FLOOR = 2.0**-11
# How far a gradient's scale, <gradient, truth> / <truth, truth>, may be from 1 beside vanilla's.
SCALE_LIMIT = 0.03
# FP8 is another precision: the budget is vanilla PEFT's own error with such products. It is nine to
# ten times that of bf16 (0.60 of a gradient in the median where bf16's is 0.07, Qwen2.5-3B on an
# H100; 0.22 and 0.02, 28 layers of Qwen3-0.6B: docs/runs/cpu/fp8_distance.txt), and so is what a
# loss may be off by chance. There, two runs that differ in what else they round had the scale of
# one of 392 gradients 0.08 apart.
SCALE_LIMIT_OF_FP8 = 0.15
LOSS_FLOOR_OF_FP8 = 8 * LOSS_FLOOR

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """The truth on the parity batches, and how far bf16 puts vanilla PEFT from it.

    losses: in fp32, of both batches. gradients: of the second, fp32, by parameter name.
    loss_errors, gradient_errors: relative, of vanilla PEFT in bf16. gradient_scales: its scales.
    """

    losses: list[float]
    gradients: Gradients
    loss_errors: list[float]
    gradient_errors: dict[str, float]
    gradient_scales: dict[str, float]
    scale_limit: float = SCALE_LIMIT
    loss_floor: float = LOSS_FLOOR

    def save(self, path: Path) -> None:
        torch.save(asdict(self), path)

    @staticmethod
    def load(path: Path) -> "Reference":
        return Reference(**torch.load(path, weights_only=True))


def gradients_of(built: Built, batch: Batch) -> tuple[float, Gradients]:
    """Loss and adapter gradients of one forward and backward; leaves no gradient behind."""
    with built.autocast():
        loss = built.model(**batch.inputs(built.lengths_as)).loss
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


def make_reference(vanilla: Built, batches: tuple[Batch, Batch], fp8: bool = False) -> Reference:
    """Run vanilla PEFT on `batches` in bf16, or with its base layers' products in FP8, and then in
    fp32, to which its model is converted."""
    with fp8_products(vanilla.model) if fp8 else nullcontext():
        bf16_losses, bf16_gradients = _run(vanilla, batches)
    vanilla.model.float()
    in_fp32 = Built(vanilla.model, autocast_dtype=None, settings=Settings())
    losses, gradients = _run(in_fp32, batches)
    return Reference(
        losses=losses,
        gradients={name: gradient.cpu() for name, gradient in gradients.items()},
        loss_errors=_relative(bf16_losses, losses),
        gradient_errors=_errors(bf16_gradients, gradients),
        gradient_scales=_scales(bf16_gradients, gradients),
        scale_limit=SCALE_LIMIT_OF_FP8 if fp8 else SCALE_LIMIT,
        loss_floor=LOSS_FLOOR_OF_FP8 if fp8 else LOSS_FLOOR,
    )


def check_parity(built: Built, batches: tuple[Batch, Batch], reference: Reference) -> Parity:
    """Hold `built` against the reference on the batches that the reference was made on."""
    return judge(*_run(built, batches), reference)


def judge(losses: list[float], gradients: Gradients, reference: Reference) -> Parity:
    """Compare losses and gradients with the reference: both must be within their limits of
    vanilla's own error."""
    loss_errors = _relative(losses, reference.losses)
    errors = _errors(gradients, reference.gradients)
    scales = _scales(gradients, reference.gradients)
    ratios = {
        name: errors.get(name, float("inf")) / max(vanilla_error, 1e-12)
        for name, vanilla_error in reference.gradient_errors.items()
    }
    distances = {
        name: abs(scales.get(name, float("inf")) - vanilla_scale)
        for name, vanilla_scale in reference.gradient_scales.items()
    }
    worst = max(ratios, key=ratios.__getitem__)
    furthest = max(distances, key=distances.__getitem__)

    problem = None  # comparisons are written so that NaN fails
    budgets = [LIMIT * max(error, reference.loss_floor) for error in reference.loss_errors]
    if not all(error <= allowed for error, allowed in zip(loss_errors, budgets, strict=True)):
        problem = f"losses {_words(losses)}, in fp32 {_words(reference.losses)}"
    elif gradients.keys() != reference.gradients.keys():
        others = sorted(gradients.keys() ^ reference.gradients.keys())
        problem = f"it trains other parameters than vanilla PEFT: {others[0]}, {len(others)} in all"
    elif not ratios[worst] <= LIMIT:
        problem = f"{worst} is {ratios[worst]:.2f} times as far from fp32 as vanilla PEFT's"
    elif not distances[furthest] <= reference.scale_limit:
        problem = (
            f"{furthest} is {scales[furthest]:.3f} times as long as in fp32, "
            f"vanilla PEFT's {reference.gradient_scales[furthest]:.3f} times"
        )
    return Parity(
        passed=problem is None,
        problem=problem,
        losses=losses,
        reference_losses=reference.losses,
        loss_errors=loss_errors,
        vanilla_loss_errors=reference.loss_errors,
        median_gradient_error=_median(errors),
        vanilla_median_gradient_error=_median(reference.gradient_errors),
        worst_ratio=ratios[worst],
        worst_gradient=worst,
        worst_scale=scales.get(furthest, float("inf")),
        worst_scale_gradient=furthest,
        limit=LIMIT,
        scale_limit=reference.scale_limit,
    )


def _run(built: Built, batches: tuple[Batch, Batch]) -> tuple[list[float], Gradients]:
    """The losses of both batches, one after the other, and the gradients of the second."""
    with without_dropout(built.model):
        first, _ = gradients_of(built, batches[0])
        second, gradients = gradients_of(built, batches[1])
    return [first, second], gradients


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model trains, and its dropout does nothing."""
    active = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.training]
    for module in active:
        module.training = False
    try:
        yield
    finally:
        for module in active:
            module.training = True


def _relative(losses: list[float], truth: list[float]) -> list[float]:
    return [abs(loss - true) / abs(true) for loss, true in zip(losses, truth, strict=True)]


def _errors(gradients: Gradients, truth: Gradients) -> dict[str, float]:
    """||gradient - truth|| / ||truth|| of every gradient, infinite where it is not finite."""
    return _finite(
        gradients, truth, lambda got, true: torch.dist(got, true) / torch.linalg.vector_norm(true)
    )


def _scales(gradients: Gradients, truth: Gradients) -> dict[str, float]:
    """<gradient, truth> / <truth, truth> of every gradient, infinite where it is not finite."""
    return _finite(gradients, truth, lambda got, true: (got * true).sum() / (true * true).sum())


def _finite(gradients: Gradients, truth: Gradients, measure) -> dict[str, float]:
    """`measure` of every gradient that has a truth. One wait for the GPU, not one each."""
    both = gradients.keys() & truth.keys()
    names = [name for name in gradients if name in both]
    values = [
        measure(gradients[name].float(), truth[name].to(gradients[name].device, torch.float32))
        for name in names
    ]
    found = torch.stack(values).tolist() if values else []
    return {
        name: value if abs(value) < float("inf") else float("inf")
        for name, value in zip(names, found, strict=True)
    }


def _words(losses: list[float]) -> str:
    return " and ".join(f"{loss:.4f}" for loss in losses)


def _median(errors: dict[str, float]) -> float:
    return torch.tensor(list(errors.values()), dtype=torch.float64).median().item()

"""The parity gate: a variant's losses and adapter gradients must be correct before we time it.

The truth is vanilla PEFT in fp32 on two small fixed batches. The budget is vanilla PEFT's own error
in bf16 there, times LIMIT. It holds for the loss of both batches and for each adapter matrix's
gradient on the second. We use two batches because a result left over from the first is right only
there. A variant over budget is not timed.

On a base in 4 bits the truth multiplies with the dequantised weights, rounded to bf16 as all
variants have them. So parity judges arithmetic, and not what quantisation costs.

Dropout is off, since each library draws different masks. FP8 variants have their own reference:
vanilla PEFT with FP8 matmuls (`fp8_products.py`) replaces vanilla in bf16.

bf16's error points in any direction, so a gradient that is a tenth too long hides in it. Its
component along the truth cannot hide. We measure it separately, as the gradient's scale.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path

import torch

from batches import Batch
from bench.fp8_products import fp8_products
from bench.records import Parity
from models import Built
from variants import Settings

# On an H200 bf16 puts the median gradient of Qwen2.5-3B 7% from fp32, and the worst ratio of any
# variant is 1.14. Kernels that truncate instead of rounding reach 2.0.
LIMIT = 1.5
# Token errors cancel in the mean loss, so vanilla's own error may be tiny by chance. An eighth of
# bf16's resolution (2^-8) is always allowed.
LOSS_FLOOR = 2.0**-11
# The scale is <gradient, truth> / <truth, truth>. It may be this far from vanilla's.
SCALE_LIMIT = 0.03
# With FP8 matmuls vanilla PEFT's own error is nine to ten times that of bf16: for the median
# gradient 0.60 instead of 0.07 (Qwen2.5-3B, H100), and 0.22 instead of 0.02 in 28 layers of
# Qwen3-0.6B (docs/runs/cpu/fp8_distance.txt). Chance errors of the loss grow alike. There two runs
# that round differently elsewhere had the scale of one of 392 gradients 0.08 apart.
FP8_SCALE_LIMIT = 0.15
FP8_LOSS_FLOOR = 8 * LOSS_FLOOR

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """The truth on the parity batches, and vanilla PEFT's distance from it in bf16.

    losses: fp32, of both batches. gradients: fp32, of the second batch, by parameter name.
    loss_errors, gradient_errors: relative errors of vanilla PEFT. gradient_scales: its scales.
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
    """Run one forward and backward, and return loss and adapter gradients. Leaves none behind."""
    with built.autocast():
        loss = built.model(**batch.inputs(built.lengths_as)).loss
    loss.backward()
    gradients = {}
    for name, parameter in built.model.named_parameters():
        if parameter.requires_grad:
            found = parameter.grad
            gradients[name] = torch.zeros_like(parameter) if found is None else found.clone()
            parameter.grad = None
    return loss.item(), gradients


def make_reference(vanilla: Built, batches: tuple[Batch, Batch], fp8: bool = False) -> Reference:
    """Run vanilla PEFT in bf16, or with FP8 matmuls in its base layers, and then in fp32.

    Converts its model to fp32, weights in 4 bits too.
    """
    with fp8_products(vanilla.model) if fp8 else nullcontext():
        bf16_losses, bf16_gradients = _run(vanilla, batches)
    dequantise(vanilla.model)
    vanilla.model.float()
    in_fp32 = Built(vanilla.model, autocast_dtype=None, settings=Settings())
    losses, gradients = _run(in_fp32, batches)
    return Reference(
        losses=losses,
        gradients={name: gradient.cpu() for name, gradient in gradients.items()},
        loss_errors=_relative(bf16_losses, losses),
        gradient_errors=_errors(bf16_gradients, gradients),
        gradient_scales=_scales(bf16_gradients, gradients),
        scale_limit=FP8_SCALE_LIMIT if fp8 else SCALE_LIMIT,
        loss_floor=FP8_LOSS_FLOOR if fp8 else LOSS_FLOOR,
    )


def dequantise(model: torch.nn.Module) -> None:
    """Replace bitsandbytes' 4-bit layers by nn.Linear with the same values, in their compute dtype.

    Models without such layers are left alone, and need no bitsandbytes.
    """
    for name, module in list(model.named_modules()):
        packed = module._parameters.get("weight")  # PEFT's layers have a property of this name
        if (state := getattr(packed, "quant_state", None)) is not None:
            from bitsandbytes.functional import dequantize_4bit

            weight = dequantize_4bit(packed.data, state)
            plain = torch.nn.Linear(module.in_features, module.out_features, device="meta")
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(name, plain)


def check_parity(built: Built, batches: tuple[Batch, Batch], reference: Reference) -> Parity:
    """Compare `built` with the reference on the reference's own batches."""
    return judge(*_run(built, batches), reference)


def judge(losses: list[float], gradients: Gradients, reference: Reference) -> Parity:
    """Compare losses and gradients with the reference: are they within the limits?"""
    loss_errors = _relative(losses, reference.losses)
    errors = _errors(gradients, reference.gradients)
    scales = _scales(gradients, reference.gradients)
    ratios = {
        name: errors.get(name, inf) / max(vanilla_error, 1e-12)
        for name, vanilla_error in reference.gradient_errors.items()
    }
    distances = {
        name: abs(scales.get(name, inf) - vanilla_scale)
        for name, vanilla_scale in reference.gradient_scales.items()
    }
    worst = max(ratios, key=ratios.__getitem__)
    furthest = max(distances, key=distances.__getitem__)

    problem = None  # NaN fails every comparison below
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
        worst_scale=scales.get(furthest, inf),
        worst_scale_gradient=furthest,
        limit=LIMIT,
        scale_limit=reference.scale_limit,
    )


def _run(built: Built, batches: tuple[Batch, Batch]) -> tuple[list[float], Gradients]:
    """Return the losses of both batches and the gradients of the second."""
    with without_dropout(built.model):
        first, _ = gradients_of(built, batches[0])
        second, gradients = gradients_of(built, batches[1])
    return [first, second], gradients


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Switch the model's dropout off while it trains."""
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
    """Return ||gradient - truth|| / ||truth|| of every gradient."""
    return _measured(
        gradients, truth, lambda got, true: torch.dist(got, true) / torch.linalg.vector_norm(true)
    )


def _scales(gradients: Gradients, truth: Gradients) -> dict[str, float]:
    """Return <gradient, truth> / <truth, truth> of every gradient."""
    return _measured(gradients, truth, lambda got, true: (got * true).sum() / (true * true).sum())


def _measured(gradients: Gradients, truth: Gradients, measure) -> dict[str, float]:
    """Return `measure` of every gradient with a truth, infinite if it is not finite. Waits for the
    GPU once."""
    names = [name for name in gradients if name in truth]
    values = [
        measure(gradients[name].float(), truth[name].to(gradients[name].device, torch.float32))
        for name in names
    ]
    found = torch.stack(values).tolist() if values else []
    return {name: v if isfinite(v) else inf for name, v in zip(names, found, strict=True)}


def _words(losses: list[float]) -> str:
    return " and ".join(f"{loss:.4f}" for loss in losses)


def _median(errors: dict[str, float]) -> float:
    return torch.tensor(list(errors.values()), dtype=torch.float64).median().item()

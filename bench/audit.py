"""Checks after the steps are timed: did they do the work that their times are shown for?

Each check answers with one line that says what is wrong, or None. The gate in parity.py tells a
wrong model before it is timed; these tell a right model whose timed steps cannot be believed.
"""

from math import isfinite
from statistics import median

from bench.profiler import Profile
from trainer import Timings
from variants import Lora, Recipe

# Host time may pass a step's GPU time by what synchronising and reading the loss take, no more.
WALL_SHARE = 1.05
WALL_MS = 1.0

# Variants train on the same batches from the same start. On an H200 their losses stay within 0.05%
# of vanilla's through 25 steps, in which they fall by about 1% a step. Later ones are not judged:
# training carries what rounding made different on (`loss_curve.py` shows how far).
LOSS_SHARE = 0.0025
LOSS_STEPS = 25
HEAD_NORMS = ("q_norm: rms_norm", "k_norm: rms_norm")  # as `fuse` reports them
EVERYWHERE = Lora()
FIRST_TARGETS = {"q_proj", "k_proj", "v_proj"}  # what an adapter may be on first in a layer


def hidden_time(timings: Timings) -> str | None:
    """Time that passed in the steps but not between their marks: slept outside of them, or spent
    by work that another stream went on with. In fewer than half of them a busy host may lose some,
    so each step is held against its own marks, and the median is judged."""
    hidden = [
        wall_ms - (WALL_SHARE * step_ms + WALL_MS)
        for wall_ms, step_ms in zip(timings.wall_ms, timings.step_ms, strict=True)
    ]
    if median(hidden) <= 0:
        return None
    wall_ms, step_ms = median(timings.wall_ms), median(timings.step_ms)
    return (
        f"a step took {wall_ms:.1f} ms by the wall and {step_ms:.1f} ms between its marks: "
        "the rest was spent where the marks do not see it"
    )


def skipped_updates(timings: Timings) -> str | None:
    """Optimizer steps that were not taken, or adapters that they did not change."""
    steps = len(timings.step_ms)
    if timings.optimizer_steps != steps:
        return f"the optimizer took {timings.optimizer_steps} of {steps} timed steps"
    if timings.unmoved_adapters:
        return f"{timings.unmoved_adapters} adapter matrices are what they were before training"
    return None


def changed_batches(timings: Timings) -> str | None:
    """Inputs that a step has written to, so that what follows trains on something else."""
    if timings.changed_batches:
        return f"{timings.changed_batches} batches were changed by the steps that trained on them"
    return None


def not_run(
    recipe: Recipe,
    fused_modules: list[str],
    profile: Profile,
    on_gpu: bool,
    micro_batches: int = 1,
    lora: Lora = EVERYWHERE,
) -> str | None:
    """A part that was asked for and did not run, as often as it should in so many micro-batches.

    A compiled layer runs as one function of torch.compile's own, so that of the parts in it only
    the kernels are seen. A replayed graph runs no function at all; its kernels are counted, for
    one of them may stand for one module of many. Where neither q, k nor v has an adapter, modules
    of the first layer may have no backward: nothing before the first adapter is trained. With both
    "attention" and "rope", the norms of q's and k's heads run in the attention's function.
    """
    is_trained_from_the_start = bool(FIRST_TARGETS & set(lora.targets))
    if on_gpu and recipe.compiled and not any("triton_" in name for name in profile.kernels_seen):
        return "no kernel of torch.compile's ran: the layers ran uncompiled"
    has_functions = not (recipe.compiled or recipe.graph)
    if {"attention", "rope"} <= set(recipe.fused):
        fused_modules = [name for name in fused_modules if not name.endswith(HEAD_NORMS)]
    for part, evidence in recipe.evidence.items():
        modules = [name for name in fused_modules if name.endswith(f": {part}")]
        ran = sum(
            times * profile.functions_seen.get(name, 0)
            for name, times in evidence.functions.items()
        )
        spared = evidence.without_backward
        if not is_trained_from_the_start:
            spared = max(spared, sum(".layers.0." in f".{name}" for name in modules))
        expected = micro_batches * max(1, len(modules) - spared)
        if evidence.functions and has_functions and ran < expected:
            names = " and ".join(evidence.functions)
            return f"{names} ran {ran} times in a step, for {len(modules)} modules"
        kernels = evidence.kernels + (evidence.of_lora_mlp if lora.is_plain_in_mlp else ())
        seen = {
            kernel: sum(count for name, count in profile.kernels_seen.items() if kernel in name)
            for kernel in kernels
        }
        missing = [kernel for kernel, count in seen.items() if not count]
        if on_gpu and missing:
            return f"{', '.join(missing)} did not run: {part} was not what was timed"
        for kernel, count in seen.items():
            if on_gpu and recipe.graph and count < expected:
                return f"{kernel} ran {count} times in a step, for {len(modules)} modules"
    return None


def diverged(timings: Timings) -> str | None:
    """A loss that is no number: nothing was trained from there on."""
    for step, loss in enumerate(timings.losses, start=1):
        if not isfinite(loss):
            return f"the loss of step {step} is {loss}"
    return None


def loss_gap(losses: list[float | None], baseline: list[float | None]) -> float:
    """The largest relative distance of a loss to the baseline's in the same step, of the first
    LOSS_STEPS. What is no number (None, as results.json has it) is infinitely far.

    Raises:
        ValueError: the runs have different numbers of steps.
    """
    gaps = [
        abs(a - b) / abs(b) if a is not None and b is not None else float("inf")
        for a, b in zip(losses, baseline, strict=True)
    ][:LOSS_STEPS]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)


def ran_out_of_memory(allocator_failures: int, error: str) -> str | None:
    """Check a claim of "out of memory": the allocator counts its failures itself."""
    if allocator_failures:
        return None
    return f"it said that memory ran out, but the allocator never failed: {error}"

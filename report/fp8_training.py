"""fp8_training.png and its table, from trainings alone (`bench/fp8_training.py`): do adapters learn
as much in FP8 as in bf16? The same seed means the same start and batches, so runs are compared in
pairs, and their difference is held against what seeds alone do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance
from textwrap import fill
from typing import NamedTuple

from matplotlib import style
from matplotlib.figure import Figure

from bench.training_records import Fp8Training, Trained
from report.benchmark_results import write_png
from report.looks import REHEARSAL_NOTICE, STYLE, markdown_table
from report.statistics import interval95
from variants import LOOKS, recipe_of, variant_of

OWN, OTHERS = LOOKS["peft"].colour, (LOOKS["fused"].colour, LOOKS["layers"].colour)

PACKAGES = ("torch", "triton", "transformers", "peft")
NAN = float("nan")
BASES = {"trained": "trained base weights", "outliers": "with outlier channels"}
HEADER = [
    "base weights", "precision", "variant", "seeds", "held-out loss before", "after", "its σ",
    "against the first, same seed", "95% interval",
]  # fmt: skip


class Ends(NamedTuple):
    """The last held-out losses of a base and variant, and less the first variant's of each seed."""

    runs: list[Trained]
    losses: list[float]
    apart: list[float]

    @property
    def spread(self) -> float:
        return variance(self.losses) ** 0.5 if len(self.losses) > 1 else NAN


def ends(training: Fp8Training) -> dict[str, dict[str, Ends]]:
    """Return them by base and variant, the first being what the others are held against."""
    found: dict[str, dict[str, Ends]] = {}
    for run in training.runs:
        of_base = found.setdefault(run.base, {})
        one = of_base.setdefault(run.variant, Ends([], [], []))
        one.runs.append(run)
        one.losses.append(curve(run)[-1])
        first = next(iter(of_base.values()))
        pairs = zip(first.runs, first.losses, strict=True)
        one.apart.extend(one.losses[-1] - loss for other, loss in pairs if other.seed == run.seed)
    return found


def curve(run: Trained) -> list[float]:
    return [NAN if loss is None else loss for loss in run.held_out.values()]


def precision(variant: str) -> str:
    return "FP8" if recipe_of(variant).fp8 else "bf16"


def fp8_training_section(trainings: Sequence[Fp8Training]) -> str:
    """Write a table of each file, and where the picture is, which shows the first."""
    if not trainings:
        return "Not measured yet."
    picture = "![Held-out losses of bf16 and FP8 by step](figures/fp8_training.png)"
    tables = [f"{_table(one)}\n\n{training_caption(one)}" for one in trainings]
    return "\n\n".join([*tables, picture])


def _table(training: Fp8Training) -> str:
    lines = []
    for base, of_base in ends(training).items():
        for number, (variant, one) in enumerate(of_base.items()):
            low, high = (number and interval95(one.apart)) or (NAN, NAN)
            lines.append([
                BASES[base], precision(variant), variant_of(variant).plain_title,
                str(len(one.runs)), f"{fmean(curve(run)[0] for run in one.runs):.4f}",
                f"{fmean(one.losses):.4f}", f"{one.spread:.4f}" if len(one.losses) > 1 else "",
                f"{fmean(one.apart):+.4f}" if number and one.apart else "",
                f"{low:+.4f} to {high:+.4f}" if low == low else "",
            ])  # fmt: skip
    return markdown_table(HEADER, lines)


def training_caption(training: Fp8Training) -> str:
    settings, environment = training.settings, training.environment
    packages = [f"{name} {environment.packages[name]}" for name in PACKAGES
                if environment.packages.get(name)]  # fmt: skip
    trained = f", all of it trained for {settings.base_steps} steps" if settings.base_steps else ""
    facts = [
        environment.device, *packages, f"{settings.model} ({settings.weights}{trained})",
        f"LoRA rank {settings.lora.rank}",
        f"{settings.steps} steps of {settings.batch_size} x {settings.seq_len} tokens",
        "a seed is the adapters' start and the order of batches", "σ: standard deviation of seeds",
    ]  # fmt: skip
    return " · ".join(facts) + "."


def draw_fp8_training(trainings: Sequence[Fp8Training], path: str | Path) -> bool:
    """Write the picture as a PNG, whole or not at all; False where there are no pairs."""
    if not trainings or not fp8_training_finding(trainings[0]):
        return False
    write_png(fp8_training_figure(trainings[0]), path)
    return True


def fp8_training_figure(training: Fp8Training) -> Figure:
    """A column a base: above held-out losses, means over seeds, below every seed's distance to the
    mean of the first variant, over the band of its own seeds."""
    found = ends(training)
    with style.context(["default", STYLE]):
        picture = Figure(figsize=(12, 7.5), dpi=150)
        panels = picture.subplots(2, len(found), sharex=True, sharey="row", squeeze=False)
        picture.subplots_adjust(0.095, 0.2, 0.975, 0.83, hspace=0.14, wspace=0.07)
        for (base, of_base), (above, below) in zip(found.items(), panels.T, strict=True):
            above.set_title(BASES[base])
            below.set_xlabel("training step")
            reference: list[float] = []
            for (variant, one), colour in zip(of_base.items(), (OWN, *OTHERS), strict=False):
                steps = list(one.runs[0].held_out)
                by_step = list(zip(*map(curve, one.runs), strict=True))
                means = [fmean(losses) for losses in by_step]
                of_first = not reference
                reference = reference or means
                label, wide = precision(variant), 5 if of_first else 1.6
                if len(of_base) > 2 and not of_first:  # each in FP8, and of another name
                    label = variant_of(variant).plain_title
                above.plot(steps, means, color=colour, linewidth=wide, label=label)
                apart = [[loss - mean for loss in losses]
                         for losses, mean in zip(by_step, reference, strict=True)]  # fmt: skip
                if of_first:
                    lows, highs = map(min, apart), map(max, apart)
                    below.fill_between(
                        steps, [*lows], [*highs], color=colour, alpha=0.25, linewidth=0
                    )
                else:
                    below.plot(steps, apart, color=colour, linewidth=0.8, alpha=0.7)
                below.plot(steps, [fmean(one) for one in apart], color=colour, linewidth=wide)
        panels[0, 0].set_ylabel("held-out loss")
        panels[1, 0].set_ylabel(f"from {precision(training.runs[0].variant)}'s mean")
        panels[0, 0].legend()
        title = fp8_training_finding(training)
        longest = max(map(len, title.split("\n")))
        picture.text(0.025, 0.92, title, size=min(21, 1250 / longest), weight="bold")
        first = precision(training.runs[0].variant)
        lines = f"Below, thick: means, thin: each seed, grey: all seeds of {first}."
        words = fill(f"{training_caption(training)} {lines}", 140)
        picture.text(0.025, 0.03, words, size=10.5, color="#444444", linespacing=1.5)
    return picture


def fp8_training_finding(training: Fp8Training) -> str:
    """The title: how far from the first variant each of the others ends, in the mean over pairs,
    and whether that is within the first's own seeds. Empty where there are no pairs."""
    if training.environment.gpu is None:
        return REHEARSAL_NOTICE
    said: dict[str, list[str]] = {}
    inside: dict[str, list[bool]] = {}
    for base, of_base in ends(training).items():
        first, *others = of_base
        spread = of_base[first].spread
        for variant in others:
            if apart := of_base[variant].apart:
                mean = fmean(apart)
                inside.setdefault(variant, []).append(abs(mean) <= spread)
                where = "with outliers " * (base != "trained")
                said.setdefault(variant, []).append(f"{where}{mean:+.4f} (σ {spread:.4f})")
    verdicts = {
        variant: "inside" if all(of_bases) else "partly outside" if any(of_bases) else "outside"
        for variant, of_bases in inside.items()
    }
    if len(verdicts) == 1:
        ((variant, verdict),) = verdicts.items()
        return f"FP8 ends {verdict} bf16's seeds: held-out loss {', '.join(said[variant])}"
    return "\n".join(
        f"{variant_of(variant).plain_title}: {verdict} bf16's seeds, {', '.join(said[variant])}"
        for variant, verdict in verdicts.items()
    )

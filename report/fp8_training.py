"""fp8_training.png and its table, from trainings alone: do adapters learn
as much in FP8 as in bf16? The same seed means the same start and batches, so runs are compared in
pairs, and their difference is held against what seeds alone do."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from statistics import fmean, variance
from textwrap import fill
from typing import NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.training_records import Fp8Training, Trained
from report.benchmark_results import write_png
from report.lines import apart_by
from report.looks import REHEARSAL_NOTICE, STYLE, markdown_table
from report.statistics import interval95
from variants import LOOKS, recipe_of, variant_of

# bf16's in grey, for it is what the others are held against
OWN, OTHERS = LOOKS["peft"].colour, (LOOKS["fp8"].colour, LOOKS["fused"].colour)

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
        picture.subplots_adjust(0.095, 0.225, 0.975, 0.84, hspace=0.14, wspace=0.07)
        named: list[tuple[Axes, int, list[tuple[float, str, str]]]] = []
        for (base, of_base), (above, below) in zip(found.items(), panels.T, strict=True):
            above.set_title(BASES[base])
            below.set_xlabel("training step")
            reference: list[float] = []
            names = []  # where a line ends, its words and colour
            for (variant, one), colour in zip(of_base.items(), (OWN, *OTHERS), strict=False):
                steps = list(one.runs[0].held_out)
                by_step = list(zip(*map(curve, one.runs), strict=True))
                means = [fmean(losses) for losses in by_step]
                of_first = not reference
                reference = reference or means
                label, wide = in_short(variant), 5 if of_first else 1.6
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
                middles = [fmean(one) for one in apart]
                below.plot(steps, middles, color=colour, linewidth=wide)
                names.append((middles[-1], label, colour))
            named.append((below, steps[-1], names))
        for below, last_step, names in named:  # where they end is known once all are drawn
            _name_ends(below, last_step, names)
        panels[0, 0].set_ylabel("held-out loss")
        panels[1, 0].set_ylabel(f"loss less {precision(training.runs[0].variant)}'s mean")
        panels[0, 0].legend()
        title = fp8_training_finding(training)
        longest = max(map(len, title.split("\n")))
        picture.text(0.025, 0.92, title, size=min(21, 1250 / longest), weight="bold")
        first = precision(training.runs[0].variant)
        lines = f"Below, thick: means, thin: each seed, grey: all seeds of {first}."
        words = fill(f"{training_caption(training)} {lines} {_ends_in_words(found)}", 140)
        picture.text(0.025, 0.03, words, size=10.5, color="#444444", linespacing=1.5)
    return picture


def _name_ends(axes: Axes, step: int, names: list[tuple[float, str, str]]) -> None:
    """Write the lines' names right of where they end, one above another."""
    axes.set_xlim(-0.04 * step, 1.42 * step)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= step])
    names = sorted(name for name in names if not isnan(name[0]))
    to_panel = axes.transScale + axes.transLimits
    ends = [to_panel.transform((0, end))[1] for end, _, _ in names]
    for (_, words, colour), height in zip(names, apart_by(0.1, ends, 1.0), strict=True):
        axes.text(1.03 * step, height, words, color=colour, weight="bold", size=11, va="center",
                  transform=axes.get_xaxis_transform())  # fmt: skip


def in_short(variant: str) -> str:
    """Return a variant's name beside bf16's, which is one."""
    if not recipe_of(variant).fp8:
        return "bf16"
    return variant_of(variant).plain_title.removesuffix(", graph")


def _ends_in_words(found: dict[str, dict[str, Ends]]) -> str:
    """Say where the others end, of every base, and the spread of the first's seeds."""
    said = []
    for base, of_base in found.items():
        first, *others = of_base
        apart = [f"{in_short(id)} {fmean(own):+.4f}" for id in others if (own := of_base[id].apart)]
        spread = f"σ of {in_short(first)} {of_base[first].spread:.4f}"
        said.append(f"{BASES[base]}: {', '.join((*apart, spread))}")
    return f"At the end, {'; '.join(said)}."


def fp8_training_finding(training: Fp8Training) -> str:
    """The title: how far from the first variant each of the others ends, in the mean over pairs of
    the first base, and whether all bases' are within the σ of the first's own seeds. Empty where
    there are no pairs."""
    if training.environment.gpu is None:
        return REHEARSAL_NOTICE
    apart: dict[str, list[float]] = {}
    inside: dict[str, list[bool]] = {}
    for of_base in ends(training).values():
        first, *others = of_base
        for variant in others:
            if own := of_base[variant].apart:
                apart.setdefault(variant, []).append(fmean(own))
                within = abs(fmean(own)) <= of_base[first].spread
                inside.setdefault(variant, []).append(within)
    said: list[str] = []
    for variant, (loss, *_) in apart.items():
        of_bases = inside[variant]
        where = "within" if all(of_bases) else "partly outside" if any(of_bases) else "outside"
        what = f"{abs(loss):.3f} {'below' if loss < 0 else 'above'}"
        if not said:
            what = f"held-out loss ends {what} bf16's"
        spread = "it" if said else "its seeds' spread"
        said.append(f"{in_short(variant)}: {what}, {where} {spread}")
    return ";\n".join(said)

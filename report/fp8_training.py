"""fp8_training.png and its table, from one file: do adapters learn as much in FP8 as in bf16?

The same seed means the same start and batches. So we compare runs in pairs, and compare their
difference with the spread over seeds.
"""

from __future__ import annotations

from math import isnan
from statistics import fmean, variance
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.training_records import Fp8Training, TrainingRun
from report.lines import apart_by
from report.picture import framed, write_caption, write_title
from report.statistics import interval95
from report.table import Column, table
from report.wording import is_in_fp8, packages_in
from variants import LOOKS, variant_of

# bf16, the reference, in grey
COLOURS = (LOOKS["peft"].colour, LOOKS["fp8"].colour, LOOKS["fused"].colour)
PACKAGES = ("torch", "triton", "transformers", "peft")
BASES = {"trained": "trained base weights", "outliers": "with outlier channels"}
LEGEND = "Thick: means over seeds; thin: each seed; grey band: the spread of bf16's seeds, one σ."


class Ends(NamedTuple):
    """The runs of a variant on one base: their last held-out losses, and how far each is above the
    first variant's with the same seed."""

    base: str
    variant: str
    runs: list[TrainingRun]
    losses: list[float]
    apart: list[float]

    @property
    def spread(self) -> float:
        return variance(self.losses) ** 0.5 if len(self.losses) > 1 else float("nan")

    @property
    def above_first(self) -> float:
        return fmean(self.apart) if self.apart else float("nan")

    @property
    def name(self) -> str:
        """The variant's name beside bf16's, which is one."""
        title = variant_of(self.variant).plain_title.removesuffix(", graph")
        return title if is_in_fp8(variant_of(self.variant)) else "bf16"


def curve(run: TrainingRun) -> list[float]:
    return [float("nan") if loss is None else loss for loss in run.held_out.values()]


def ends(training: Fp8Training) -> dict[str, list[Ends]]:
    """Return the ends by base, starting with the variant that the others are compared with."""
    found: dict[str, dict[str, Ends]] = {}
    for run in training.runs:
        variants = found.setdefault(run.base, {})
        one = variants.setdefault(run.variant, Ends(run.base, run.variant, [], [], []))
        one.runs.append(run)
        one.losses.append(curve(run)[-1])
        first = next(iter(variants.values()))
        if one is not first:
            pairs = zip(first.runs, first.losses, strict=True)
            one.apart.extend(
                one.losses[-1] - loss for other, loss in pairs if other.seed == run.seed
            )
    return {base: list(variants.values()) for base, variants in found.items()}


COLUMNS = (
    Column[Ends]("base weights", lambda one: BASES[one.base]),
    Column[Ends]("precision", lambda one: "FP8" if is_in_fp8(variant_of(one.variant)) else "bf16"),
    Column[Ends]("variant", lambda one: variant_of(one.variant).plain_title),
    Column[Ends]("seeds", lambda one: str(len(one.runs))),
    Column[Ends]("held-out loss before", lambda one: f"{fmean(curve(r)[0] for r in one.runs):.4f}"),
    Column[Ends]("after", lambda one: f"{fmean(one.losses):.4f}"),
    Column[Ends]("its σ", lambda one: f"{one.spread:.4f}"),
    Column[Ends]("against the first, same seed",
                 lambda one: f"{one.above_first:+.4f}" if one.apart else ""),
    Column[Ends]("95% interval", lambda one: " to ".join(
        f"{end:+.4f}" for end in interval95(one.apart) or () if not isnan(end))),
)  # fmt: skip


def fp8_training_section(training: Fp8Training) -> str:
    rows = [one for variants in ends(training).values() for one in variants]
    picture = "![Held-out losses of FP8 less those of bf16, by step](figures/fp8_training.png)"
    return f"{table(COLUMNS, rows)}\n\n{training_caption(training)}\n\n{picture}"


def training_caption(training: Fp8Training) -> str:
    settings, environment = training.settings, training.environment
    trained = f", all of it trained for {settings.base_steps} steps" if settings.base_steps else ""
    facts = [
        environment.device, *packages_in(environment, PACKAGES),
        f"{settings.model} ({settings.weights}{trained})", f"LoRA rank {settings.lora.rank}",
        f"{settings.steps} steps of {settings.batch_size} x {settings.seq_len} tokens",
        "a seed is the adapters' start and the order of batches", "σ: standard deviation of seeds",
    ]  # fmt: skip
    return " · ".join(facts) + "."


def fp8_training_figure(training: Fp8Training) -> Figure:
    """Draw a panel for each base: each seed's distance to the first variant's mean, over the spread
    of that variant's own seeds."""
    found = ends(training)
    with framed(12, 6) as picture:
        panels = picture.subplots(1, len(found), sharey=True, squeeze=False)[0]
        picture.subplots_adjust(0.085, 0.265, 0.975, 0.79, wspace=0.07)
        drawn = [_draw_base(axes, variants)
                 for axes, variants in zip(panels, found.values(), strict=True)]  # fmt: skip
        for axes, names in zip(panels, drawn, strict=True):  # now we know where they end
            _name_ends(axes, training.settings.steps, names)
        panels[0].set_ylabel("held-out loss above bf16's mean")
        write_title(picture, fp8_training_finding(training), 0.97, 20, 1290, va="top",
                    linespacing=1.3)  # fmt: skip
        write_caption(picture, f"{LEGEND} {training_caption(training)}", 0.03, 140)
    return picture


def _draw_base(axes: Axes, variants: list[Ends]) -> list[tuple[float, str, str]]:
    """Draw the variants of a base. Return where each line ends, its name and its colour."""
    axes.set_title(BASES[variants[0].base])
    axes.set_xlabel("training step")
    names: list[tuple[float, str, str]] = []
    reference = [fmean(losses) for losses in zip(*map(curve, variants[0].runs), strict=True)]
    for one, colour in zip(variants, COLOURS, strict=False):
        steps = list(one.runs[0].held_out)
        by_step = zip(*map(curve, one.runs), reference, strict=True)
        apart = [[loss - mean for loss in losses] for *losses, mean in by_step]
        middles = [fmean(losses) for losses in apart]
        if names:
            axes.plot(steps, apart, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(steps, middles, color=colour, linewidth=2.5)
        else:
            spread = [variance(losses) ** 0.5 if len(losses) > 1 else 0.0 for losses in apart]
            below = [-width for width in spread]
            axes.fill_between(steps, below, spread, color=colour, alpha=0.25, linewidth=0)
            axes.plot(steps, middles, color=colour, linewidth=5)
        names.append((middles[-1], one.name, colour))
    return names


def _name_ends(axes: Axes, step: int, names: list[tuple[float, str, str]]) -> None:
    """Write the lines' names right of where they end, one above another."""
    axes.set_xlim(-0.04 * step, 1.42 * step)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= step])
    names = sorted(name for name in names if not isnan(name[0]))
    to_panel = axes.transScale + axes.transLimits
    heights = [to_panel.transform((0, end))[1] for end, _, _ in names]
    for (_, words, colour), height in zip(names, apart_by(0.07, heights, 1.0), strict=True):
        axes.text(1.03 * step, height, words, color=colour, weight="bold", size=11, va="center",
                  transform=axes.get_xaxis_transform())  # fmt: skip


def fp8_training_finding(training: Fp8Training) -> str:
    """Say how far from the first variant each other one ends, averaged over the pairs of the first
    base. Also say whether that is within the first's own σ over seeds on every base."""
    found = list(ends(training).values())
    said: list[str] = []
    for one in found[0][1:]:
        inside = [abs(each.above_first) <= base[0].spread for base in found
                  for each in base if each.variant == one.variant]  # fmt: skip
        where = "within" if all(inside) else "partly outside" if any(inside) else "outside"
        ended = f"{abs(one.above_first):.3f} {'below' if one.above_first < 0 else 'above'}"
        if said:
            said.append(f"{one.name}: {ended}, {where} it")
        else:
            said.append(f"{one.name}: held-out loss ends {ended} bf16's, {where} its seeds' spread")
    return ";\n".join(said)

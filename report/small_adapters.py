"""small_adapters.png and its tables: how much of a small adapter shows in each variant's forward
(`bench/small_adapters.py`). Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.small_adapter_records import Seen, SmallAdapters, TrainedAdapter
from report.lines import apart_by, line_of
from report.picture import framed
from report.statistics import interval95
from report.table import markdown_table
from report.wording import REHEARSAL_NOTICE, commit_in, packages_in
from variants import IN_FP32, variant_of

ALIKE = 0.15  # lines that are everywhere closer than this share one name
PACKAGES = ("torch", "triton", "transformers", "peft", "unsloth")
FINDING = "Small updates vanish from bf16 forwards; whole layers show them"
TOP = 1.35  # we draw a larger share at this height, with its number


def shares(found: SmallAdapters, variant: str, adapter: TrainedAdapter) -> list[float]:
    """Return the outputs' change in each batch, projected on fp32's and divided by it."""
    along, exact = (_seen(found, id, adapter).along for id in (variant, IN_FP32))
    return [a / b for a, b in zip(along, exact, strict=True)]


def loss_shares(found: SmallAdapters, variant: str, adapter: TrainedAdapter) -> list[float]:
    """Return the loss's change in each batch, divided by fp32's mean change."""
    exact = fmean(_seen(found, IN_FP32, adapter).losses)
    return [change / exact for change in _seen(found, variant, adapter).losses]


def _seen(found: SmallAdapters, variant: str, adapter: TrainedAdapter) -> Seen:
    return next(one for one in found.seen if (one.variant, one.adapter) == (variant, adapter))


def _variants(found: SmallAdapters) -> list[str]:
    return [id for id in dict.fromkeys(one.variant for one in found.seen) if id != IN_FP32]


def small_adapters_section(every: Sequence[SmallAdapters]) -> str:
    """Write the tables of each file, and a link to the picture, which shows the first file."""
    picture = f"![{FINDING}](figures/small_adapters.png)"
    return "\n\n".join([picture, *map(_tables, every)]) if every else "Not measured yet."


def _tables(found: SmallAdapters) -> str:
    variants = _variants(found)
    titles = [variant_of(variant).plain_title for variant in variants]
    parts = [small_adapters_caption(found)]
    for changed, share in (("outputs", shares), ("the loss", loss_shares)):
        lines = [
            [_rate(one), str(one.steps), *(_mean(share(found, id, one)) for id in variants)]
            for one in found.adapters if not one.is_dpo
        ]  # fmt: skip
        table = markdown_table(["learning rate", "updates", *titles], lines)
        parts += [f"Share of the change of {changed}:", table]
    rewards = [
        [str(one.steps), *(_reward(_seen(found, id, one)) for id in (IN_FP32, *variants))]
        for one in found.adapters if one.is_dpo
    ]  # fmt: skip
    if rewards:
        said = "DPO at a learning rate of 5e-6: mean reward of chosen / rejected answers, by"
        parts += [f"{said} updates:", markdown_table(["updates", "fp32", *titles], rewards)]
    return "\n\n".join(parts)


def _reward(seen: Seen) -> str:
    return f"{fmean(seen.chosen):+.2f} / {fmean(seen.rejected):+.2f}"


def _mean(values: list[float]) -> str:
    low, high = interval95(values) or (float("nan"), float("nan"))
    half = (high - low) / 2
    mean = round(fmean(values), 2) + 0.0  # which is no -0.0
    return f"{mean:.2f}" + (f" ± {half:.2f}" if not half < 0.005 else "")


def _rate(adapter: TrainedAdapter) -> str:
    return f"{adapter.rate:.0e}".replace("e-0", "e-")


def small_adapters_caption(found: SmallAdapters) -> str:
    failed = [variant_of(name).plain_title for name in found.failed]
    facts = [
        found.environment.device, *packages_in(found.environment, PACKAGES),
        f"{found.model} ({found.weights})", f"LoRA rank {found.lora.rank}",
        f"{found.batches} batches of {found.tokens:,} tokens",
        *([f"{found.pairs} pairs"] if any(one.is_dpo for one in found.adapters) else []),
        "±: half of the 95% interval over batches, from 0.005 on",
        *([f"could not run: {', '.join(failed)}"] if failed else []),
    ]  # fmt: skip
    return " · ".join(facts) + f". {commit_in(found.environment)}"


def small_adapters_figure(found: SmallAdapters) -> Figure | None:
    """Draw a point for each adapter, and a line for each variant and learning rate. None if no
    variant has seen an adapter."""
    if not _variants(found):
        return None
    trained = [one for one in found.adapters if not one.is_dpo]
    rates = {rate: [i for i, one in enumerate(trained) if _rate(one) == rate]
             for rate in dict.fromkeys(map(_rate, trained))}  # fmt: skip
    with framed(10, 5.2, dpi=100) as picture:
        picture.set_layout_engine("constrained")
        axes = picture.add_subplot()
        axes.set_title(FINDING if found.environment.gpu else REHEARSAL_NOTICE, loc="left")
        axes.hlines(1.0, -0.7, len(trained) - 1, color="black", linewidth=1)
        axes.text(-0.62, 1.0, "fp32", ha="left", va="bottom", size=12)
        _lines(axes, found, trained, list(rates.values()))
        axes.set_xticks(range(len(trained)), [f"{one.steps}" for one in trained])
        text: dict[str, Any] = {
            "transform": axes.get_xaxis_transform(),
            "ha": "center",
            "va": "top",
        }
        for rate, places in rates.items():
            axes.text(fmean(places), -0.1, f"learning rate {rate}", **text)
        axes.set_xlabel("updates", labelpad=24)
        axes.set_ylabel("share of the change that is seen")
        axes.set_ylim(-0.15, TOP + 0.1)
        axes.set_xlim(-0.7, len(trained) + 1.4)
    return picture


def _lines(
    axes: Axes, found: SmallAdapters, trained: Sequence[TrainedAdapter], rates: list[list[int]]
) -> None:
    """Draw lines with intervals. Names stand right of the last adapter; indistinguishable lines
    share a label."""
    groups: list[tuple[list[str], list[float]]] = []
    for variant in _variants(found):
        look = variant_of(variant).look
        each = [shares(found, variant, one) for one in trained]
        means = [fmean(values) for values in each]
        for places in rates:
            axes.add_line(line_of(look, "", places, [min(means[i], TOP) for i in places]))
        for place, (values, mean) in enumerate(zip(each, means, strict=True)):
            if mean > TOP:
                axes.text(place, TOP + 0.04, f"{mean:.2g}×", color=look.colour, ha="center")
            elif ends := interval95(values):
                axes.plot([place, place], ends, color=look.colour, marker="_", linewidth=1.5)
        alike = [names for names, line in groups
                 if all(abs(a - b) < ALIKE for a, b in zip(line, means, strict=True))]  # fmt: skip
        if alike:
            alike[0].append(variant)
        else:
            groups.append(([variant], means))
    # by the value at the first adapter, where lines differ: at the last, all see everything
    groups.sort(key=lambda group: group[1][0])
    heights = apart_by(0.14, [fmean(min(share, TOP) for share in line) for _, line in groups], 1.2)
    for (names, _), height in zip(groups, heights, strict=True):
        words = ",\n".join(variant_of(name).plain_title for name in names)
        colour = variant_of(names[0]).look.colour
        axes.text(len(trained) - 0.7, height, words, color=colour, va="center", weight="bold")

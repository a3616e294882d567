"""small_adapters.png and its tables: how much of a small adapter each variant's forward shows
(`bench/small_adapters.py`). No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.small_adapter_records import Adapter, Seen, SmallAdapters
from report.benchmark_results import write_png
from report.lines import apart_by, line_of
from report.looks import REHEARSAL_NOTICE, STYLE, markdown_table
from report.statistics import interval95
from report.tables import commit_of
from variants import IN_FP32, variant_of

ALIKE = 0.15  # lines that lie closer than this everywhere have one name together
PACKAGES = ("torch", "triton", "transformers", "peft", "unsloth")
FINDING = "Added in bf16, small updates mostly vanish from the forward"


def shares(found: SmallAdapters, variant: str, adapter: Adapter) -> list[float]:
    """By batch: the outputs' change, projected on fp32's, over fp32's."""
    return [a / b for a, b in zip(_of(found, variant, adapter).along,
                                  _of(found, IN_FP32, adapter).along, strict=True)]  # fmt: skip


def loss_shares(found: SmallAdapters, variant: str, adapter: Adapter) -> list[float]:
    """By batch: the loss's change, over fp32's mean change."""
    exact = fmean(_of(found, IN_FP32, adapter).losses)
    return [change / exact for change in _of(found, variant, adapter).losses]


def small_adapters_section(every: Sequence[SmallAdapters]) -> str:
    """Write the tables of each file, and where the picture is, which shows the first."""
    if not every:
        return "Not measured yet."
    picture = f"![{FINDING}](figures/small_adapters.png)"
    return "\n\n".join([picture, *map(_tables, every)])


def _tables(found: SmallAdapters) -> str:
    variants = _variants(found)
    titles = [variant_of(variant).plain_title for variant in variants]
    header = ["learning rate", "updates", *titles]
    trained = [one for one in found.adapters if not one.is_dpo]

    def table(of: Callable[[SmallAdapters, str, Adapter], list[float]]) -> str:
        return markdown_table(header, [
            [_rate(one), str(one.steps), *(_mean(of(found, v, one)) for v in variants)]
            for one in trained
        ])  # fmt: skip

    parts = [
        small_adapters_caption(found), "Share of the change of outputs:", table(shares),
        "Share of the change of the loss:", table(loss_shares),
    ]  # fmt: skip
    preferred = [one for one in found.adapters if one.is_dpo]
    if not preferred:
        return "\n\n".join(parts)
    rewards = [
        [
            str(one.steps),
            *(f"{fmean(seen.chosen):+.2f} / {fmean(seen.rejected):+.2f}" for seen in
              (_of(found, variant, one) for variant in (IN_FP32, *variants))),
        ]
        for one in preferred
    ]  # fmt: skip
    said = "DPO at a learning rate of 5e-6: mean reward of chosen / rejected answers, by updates:"
    table_of_rewards = markdown_table(["updates", "fp32", *titles], rewards)
    return "\n\n".join([*parts, said, table_of_rewards])


def _mean(values: list[float]) -> str:
    low, high = interval95(values) or (float("nan"), float("nan"))
    half = (high - low) / 2
    mean = round(fmean(values), 2) + 0.0  # which is no -0.0
    return f"{mean:.2f}" + (f" ± {half:.2f}" if not half < 0.005 else "")


def _rate(adapter: Adapter) -> str:
    return f"{adapter.rate:.0e}".replace("e-0", "e-")


def small_adapters_caption(found: SmallAdapters) -> str:
    environment = found.environment
    packages = [f"{name} {environment.packages[name]}" for name in PACKAGES
                if environment.packages.get(name)]  # fmt: skip
    failed = [variant_of(name).plain_title for name in found.failed]
    facts = [
        environment.device, *packages, f"{found.model} ({found.weights})",
        f"LoRA rank {found.lora.rank}", f"{found.batches} batches of {found.tokens:,} tokens",
        *([f"{found.pairs} pairs"] if any(one.is_dpo for one in found.adapters) else []),
        "±: half of the 95% interval over batches, from 0.005 on",
        *([f"could not run: {', '.join(failed)}"] if failed else []),
    ]  # fmt: skip
    return " · ".join(facts) + f". {commit_of(found)}"


def draw_small_adapters(every: Sequence[SmallAdapters], path: str | Path) -> bool:
    """Write the picture of the first as a PNG, whole or not at all; False where there is none."""
    if not every or not _variants(every[0]):
        return False
    write_png(small_adapters_figure(every[0]), path)
    return True


def small_adapters_figure(found: SmallAdapters) -> Figure:
    """A point for each adapter, and a line for each variant and learning rate."""
    trained = [one for one in found.adapters if not one.is_dpo]
    with style.context(STYLE):
        figure = Figure(figsize=(10, 5.2), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(FINDING if found.environment.gpu else REHEARSAL_NOTICE, loc="left")
        axes.axhline(1.0, color="black", linewidth=1)
        axes.text(0, 1.0, "fp32", ha="left", va="bottom", size=12)
        _lines(axes, found, trained)
        axes.set_xticks(range(len(trained)), [f"{one.steps}" for one in trained])
        for rate in dict.fromkeys(map(_rate, trained)):
            places = [i for i, one in enumerate(trained) if _rate(one) == rate]
            axes.text(fmean(places), -0.1, f"learning rate {rate}", ha="center", va="top",
                      transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set_xlabel("updates", labelpad=24)
        axes.set_ylabel("share of the change that is seen")
        axes.set_ylim(-0.15, 1.25)
        axes.set_xlim(-0.3, len(trained) + 1.4)
    return figure


def _lines(axes: Axes, found: SmallAdapters, trained: Sequence[Adapter]) -> None:
    """Lines with intervals; their names stand right of the last adapter, those of lines that cannot
    be told apart together."""
    groups: list[tuple[list[str], list[float]]] = []
    for variant in _variants(found):
        look = variant_of(variant).look
        each = [shares(found, variant, one) for one in trained]
        means = [fmean(values) for values in each]
        for rate in dict.fromkeys(map(_rate, trained)):
            places = [i for i, one in enumerate(trained) if _rate(one) == rate]
            axes.add_line(line_of(look, "", places, [means[i] for i in places]))
        for place, values in enumerate(each):
            if ends := interval95(values):
                axes.plot([place, place], ends, color=look.colour, marker="_", linewidth=1.5)
        alike = [names for names, line in groups
                 if all(abs(a - b) < ALIKE for a, b in zip(line, means, strict=True))]  # fmt: skip
        if alike:
            alike[0].append(variant)
        else:
            groups.append(([variant], means))
    # by the first adapter's value, which tells them apart: by the last all see everything
    groups.sort(key=lambda group: group[1][0])
    heights = apart_by(0.14, [sum(line) / len(line) for _, line in groups], 1.2)
    for (names, _), height in zip(groups, heights, strict=True):
        words = ",\n".join(variant_of(name).plain_title for name in names)
        colour = variant_of(names[0]).look.colour
        axes.text(len(trained) - 0.7, height, words, color=colour, va="center", weight="bold")


def _variants(found: SmallAdapters) -> list[str]:
    names = dict.fromkeys(one.variant for one in found.seen)
    return [name for name in names if name != IN_FP32]


def _of(found: SmallAdapters, variant: str, adapter: Adapter) -> Seen:
    return next(one for one in found.seen if (one.variant, one.adapter) == (variant, adapter))

"""dpo_rewards.png, from a file of dev/measure/small_adapters.py: what each variant shows of DPO's
first updates."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from report.benchmark_results import apart_by
from report.picture import DPI, LETTERS, SMALL, WIDTH, framed, write_caption, write_title
from variants import IN_FP32, WITHOUT, variant_of

NAMES = {
    IN_FP32: "fp32", "fused_layer" + WITHOUT: "whole layers",
    "compiled_peft" + WITHOUT: "compiled PEFT", "full_unsloth" + WITHOUT: "Unsloth",
    "vanilla_peft" + WITHOUT: "vanilla PEFT",
}  # fmt: skip
FINDING = "In bf16, vanilla PEFT and Unsloth hide\nDPO's first updates. Whole layers do not"
HEIGHT = 4.7  # inches


def margins(found: dict[str, Any]) -> dict[str, list[float]]:
    """Return each variant's mean reward of chosen less that of rejected answers, by updates from 0
    on. found: the file."""
    values = {variant: [0.0] for variant in NAMES}
    for seen in found["seen"]:
        if seen["variant"] in values and seen["adapter"]["is_dpo"]:
            values[seen["variant"]].append(fmean(seen["chosen"]) - fmean(seen["rejected"]))
    return values


def rewards_figure(found: dict[str, Any]) -> Figure:
    """Draw a line for each variant, with its name and last value at its end."""
    shown = sorted(margins(found).items(), key=lambda one: one[1][-1])
    with framed(WIDTH, HEIGHT, dpi=DPI, font_size=LETTERS) as picture:
        axes = picture.add_axes((0.095, 0.29, 0.515, 0.51))
        axes.set_title("reward margin, chosen − rejected", size=LETTERS, weight="normal", x=-0.12)
        axes.set_xlabel("updates at a learning rate of 5e-6")
        for variant, values in shown:
            look = variant_of(variant).look
            own: dict[str, Any] = {"color": look.colour, "marker": look.marker}
            if variant == IN_FP32:
                own = {"color": "black", "linestyle": "--"}
            axes.plot(values, **own)
        axes.set_ylim(-0.1)
        ends = [axes.transLimits.transform((0, values[-1]))[1] for _, values in shown]
        for line, (variant, values), end in zip(
            axes.lines, shown, apart_by(0.1, ends, 1), strict=True
        ):
            axes.text(1.01, end, f"{NAMES[variant]} {values[-1]:.2f}", color=line.get_color(),
                      weight="bold", va="center", transform=axes.transAxes)  # fmt: skip
        write_title(picture, FINDING)
        environment = found["environment"]
        words = (
            f"The same adapters in each, mean of {found['pairs']} pairs. "
            f"{environment['gpu']['name']}, {found['model']} ({found['weights']}), Unsloth "
            f"{environment['packages']['unsloth']}."
        )
        write_caption(picture, words, 0.15 / HEIGHT, 60, x=0.03, size=SMALL)
    return picture

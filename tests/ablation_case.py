"""Plausible results of the parts and the peers, for ablation.py and frontier.py: made up."""

from __future__ import annotations

import example_results as example
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from bench.records import Cell, Floor, Run
from variants import SUITES, VARIANTS, variant_of

GAIN_MS = {  # what a part takes off vanilla's step, and off all the others' together, at 512 tokens
    "mlp": (187, 171), "attention": (121, 109), "rope": (34, 29), "rms_norm": (62, 48),
    "cross_entropy": (88, 92), "checkpoint": (-4, -2),
}  # fmt: skip
VANILLA_MS = {64: 212, 128: 298, 256: 558, 512: 1091}
VANILLA_GIB = {64: 10.3, 128: 14.0, 256: 21.6, 512: 36.7}
ALL_GIB = {64: 7.0, 128: 7.4, 256: 8.3, 512: 9.6}
PEERS = {  # share of vanilla's step; of its memory at 512 tokens
    "full_unsloth": (0.616, 0.26), "unsloth_plain_checkpointing": (0.6, 0.31),
    "liger_peft": (0.72, 0.3), "compiled_peft": (0.66, 0.98),
    "compiled_peft_bf16_adapters": (0.61, 0.9), "fused_all": (0.535, 0.26),
    "fused_all_offload": (0.55, 0.25),
    "fused_all_selective_10_gib": (0.5, 0.5), "fused_all_selective_20_gib": (0.47, 0.8),
    "fused_all_graph": (0.53, 0.26),
    "fused_layer": (0.505, 0.27), "fused_layer_graph": (0.5, 0.27),
    "fused_layer_graph_offload": (0.51, 0.25), "fused_layer_graph_selective_10_gib": (0.46, 0.5),
    "vanilla_peft_bf16_adapters": (0.93, 0.92), "vanilla_peft_again": (1.001, 1.0),
    "vanilla_peft": (1, 1),
}  # fmt: skip
ROUNDS = 4
SPARE = 10  # pixels to the edge: another machine's letters may be a little wider


def step_ms(variant: str, seq_len: int) -> float:
    """A variant's middle: at short lengths the host takes a share that no kernel shortens."""
    plain = variant_of(variant).plain_id
    vanilla = VANILLA_MS[seq_len]
    if plain in PEERS:
        gain = (1 - PEERS[plain][0]) * VANILLA_MS[512]
    elif plain.startswith("fused_all_but_"):
        lost = GAIN_MS[plain.removeprefix("fused_all_but_")][1]
        gain = (1 - PEERS["fused_all"][0]) * VANILLA_MS[512] - lost
    else:
        gain = GAIN_MS[plain.removeprefix("fused_")][0]
    ms = vanilla - gain * vanilla / VANILLA_MS[512] * (0.6 if seq_len == 64 else 1)
    return 0.76 * ms if plain != variant else ms


def peak_gib(variant: str, seq_len: int) -> float:
    plain = variant_of(variant).plain_id
    vanilla = VANILLA_GIB[seq_len]
    if plain == "fused_all":
        gib = ALL_GIB[seq_len]
    elif plain in PEERS:
        gib = 6 + (vanilla - 6) * max(0.1, (PEERS[plain][1] * VANILLA_GIB[512] - 6) / 30.7)
    else:
        has_loss = plain == "fused_cross_entropy" or plain.startswith("fused_all_but_")
        gib = ALL_GIB[seq_len] + 0.3 if has_loss else vanilla
        gib = vanilla - 0.4 if plain == "fused_all_but_cross_entropy" else gib
        gib -= 0.8 if plain == "fused_checkpoint" else 0
    lean = 0.55 if "fused" in plain or "unsloth" in plain else 1.0
    kept = 0.165 * seq_len * lean if plain != variant else 0.0
    return gib + kept + 0.01 * (len(variant) % 7)


def run(
    variants=tuple(SUITES["all"]), seq_lens=example.SEQ_LENS, status=None, rounds=ROUNDS, **changed
) -> Run:
    """A whole run of the suite "all"; `status` as in example_results.run."""
    document = example.empty(
        variants=list(variants), seq_lens=list(seq_lens), rounds=rounds, steps=8 * rounds, **changed
    )
    for seq_len in seq_lens:
        if not document.rehearsal:
            document.floor[seq_len] = Floor(example.FLOOR_MS[seq_len], [])
        for order, variant in enumerate(variants):
            for round in range(1, rounds + 1):
                state = (status or {}).get((variant, seq_len), "ok")
                document.cells.append(_cell(variant, seq_len, round, order, state))
    return document


def _cell(variant: str, seq_len: int, round: int, order: int, state: str) -> Cell:
    if state != "ok":
        return Cell(variant, seq_len, round, state, error="made up for a test")
    # The rounds drift together, and each variant has small noise of its own; more at 64 tokens.
    noise = (0.012 if seq_len == 64 else 0.001) * ((order * 7 + round * 11 + 3) % 5 - 2)
    middle = step_ms(variant, seq_len) * (1 + 0.004 * (round - 2) + noise)
    reserved = peak_gib(variant, seq_len) * 1.04 + 0.002 * round
    return example.timed_cell(
        variant, seq_len, round, [middle * (1 + 0.001 * (step - 3.5)) for step in range(8)],
        **(example.OF_A_GRAPH if VARIANTS[variant].recipe.graph else {}),
        peak_allocated_bytes=int(peak_gib(variant, seq_len) * 2**30),
        peak_reserved_bytes=int(reserved * 2**30),
    )  # fmt: skip


def assert_readable(picture: Figure) -> None:
    """Places every text of a picture: none is cut off, and none covers another."""
    picture.draw_without_rendering()
    texts = {t for t in picture.findobj(Text) if t.get_text().strip() and t.get_visible()}
    texts = [*(texts - _beyond_the_axes(picture))]
    # padded by -1: letters do not touch where boxes do
    boxes = [text.get_window_extent().padded(-1) for text in texts]
    low, high = (np.array([getattr(box, end) for box in boxes]) for end in ("min", "max"))
    outside = (low < SPARE).any(1) | (high > picture.bbox.max - SPARE).any(1)
    assert not [texts[i].get_text() for i in np.flatnonzero(outside)], "cut off"
    covers = ((low[:, None] < high) & (high[:, None] > low)).all(2)
    pairs = [(texts[i], texts[j]) for i, j in np.argwhere(np.triu(covers, 1))]
    solid = [pair for pair in pairs if not any(text.get_alpha() for text in pair)]
    assert not [(one.get_text(), other.get_text()) for one, other in solid], "one on another"


def _beyond_the_axes(picture: Figure) -> set[Text]:
    """The labels of ticks that matplotlib keeps for values that a panel does not reach."""
    found = set()
    for axis in (axis for axes in picture.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = axis.get_major_ticks()
        found |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    return found


def assert_no_label_on(places, axes: Axes) -> None:
    """No label of a panel stands on one of these places; `places` are in its own units."""
    on_screen = axes.transData.transform(list(places))
    for text in axes.texts:
        if text.get_text() and not text.get_rotation():
            box = text.get_window_extent()
            assert not [place for place in on_screen if box.contains(*place)], text.get_text()

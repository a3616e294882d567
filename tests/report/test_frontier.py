import os
from itertools import pairwise

import ablation_case as case
import example_results as example
import pytest
from matplotlib.colors import to_hex
from msgspec.structs import replace

from bench import results
from report import commands, fits, frontier, looks
from variants import LOOKS, VARIANTS, WITHOUT, variant_of

GIB = 2**30
TWINS = {"vanilla_peft_again", "vanilla_peft_again" + WITHOUT}
NO_MEMORY = {(id, 512): "oom" for id, variant in VARIANTS.items() if not variant.checkpoints}
RUNS = {
    "all": case.run(),
    "with checkpointing": case.run(seq_lens=(512,), status=NO_MEMORY),
    "experiment": case.run(("vanilla_peft", "fused_mlp", "full_unsloth", "vanilla_peft_again")),
    "unknown variants": case.run(("vanilla_peft", "fused_mlp")),
    "as published": results.load(commands.SUITE),
}
for _cell in RUNS["unknown variants"].cells:
    _cell.variant = _cell.variant.replace("fused_mlp", "bordered_step")
RUNS["unknown variants"].experiment.variants[1] = "bordered_step"


@pytest.fixture(scope="module")
def pictures():
    return {name: frontier.frontier_figure(run) for name, run in RUNS.items()}


def hand_made(**points):
    """At 64 tokens: variant = (ms and GiB of a round, ...)."""
    run = example.empty(variants=list(points), seq_lens=[64])
    for variant, rounds in points.items():
        for n, measured in enumerate(rounds, start=1):
            if measured:
                ms, gib = measured
                cell = example.timed_cell(variant, 64, n, [float(ms)])
                cell.peak_reserved_bytes = int(gib * GIB)
                run.add(cell)
    return run


THREE = {
    "vanilla_peft": ((200, 20.0), (220, 21.5)),
    "fused_mlp": ((100, 23.0), (110, 23.4)),
    "fused_all": ((80, 23.0), (88, 23.5)),
}


# --- what fits ------------------------------------------------------------------------------------


def test_points_by_hand():
    vanilla, mlp, fused = reversed(fits.points_of(hand_made(**THREE), 64))
    assert vanilla == ("vanilla_peft", 64, 210, 21.5, 1)
    assert mlp == ("fused_mlp", 64, 105, pytest.approx(23.4), 2)
    assert fused == ("fused_all", 64, 84, 23.5, 2.5)


def test_what_fits_leaves_room_for_the_context():
    (fit,) = fits.fitting_points(hand_made(**THREE), 24)  # 23.4 for torch
    assert [point.variant for point in fit.points] == ["fused_mlp", "vanilla_peft"]
    (fit,) = fits.fitting_points(hand_made(**THREE), 24.2)
    assert [point.variant for point in fit.points] == ["fused_all", "fused_mlp", "vanilla_peft"]
    (fit,) = fits.fitting_points(hand_made(**THREE), 16)
    assert fit.points == [] and fit.least.variant == "vanilla_peft"


def test_every_speedup_is_over_vanilla_peft_by_way_of_the_blocks_own_baseline():
    name = "fused_mlp" + WITHOUT
    points = {"vanilla_peft": ((900, 9),), "vanilla_peft" + WITHOUT: ((300, 9),), name: ((100, 9),)}
    assert fits.points_of(hand_made(**points), 64)[0] == (name, 64, 100, 9, 9)
    del points["vanilla_peft"]
    assert fits.points_of(hand_made(**points), 64)[0] == (name, 64, 100, 9, 3)
    del points["vanilla_peft" + WITHOUT]
    assert fits.points_of(hand_made(**points), 64)[0].speedup is None


def test_what_fits_is_ranked_by_pairs_and_not_by_milliseconds_of_two_visits():
    """In the second run everything took twice as long."""
    merged = hand_made(
        vanilla_peft=((200, 9), (400, 9)),
        fused_mlp=((100, 9), None),
        fused_all=(None, (160, 9)),
        liger_peft=(None, None, (90, 9)),  # of a visit without a baseline
    )
    (fit,) = fits.fitting_points(merged, 24)
    ranked = [(point.variant, point.speedup) for point in fit.points]
    assert ranked == [
        ("fused_all", 2.5), ("fused_mlp", 2), ("vanilla_peft", 1), ("liger_peft", None)
    ]  # fmt: skip
    assert "Ranked by the speedup over vanilla PEFT, " in fits.fits_table(merged, 24)


def test_what_is_left_out():
    found = {point.variant for point in fits.points_of(RUNS["all"], 512)}
    assert found == set(VARIANTS) - TWINS
    found = fits.points_of(RUNS["with checkpointing"], 512)
    assert not [point for point in found if point.variant.endswith(WITHOUT)]


def test_memory_that_was_not_reserved_is_what_was_allocated():
    run = hand_made(**THREE)
    for cell in run.cells:
        cell.peak_allocated_bytes = 5 * GIB
    run.cells[3].peak_reserved_bytes = None
    peaks = {point.variant: point.peak_gib for point in fits.points_of(run, 64)}
    assert (peaks["vanilla_peft"], peaks["fused_mlp"]) == (21.5, 23.0)
    run.cells[2].peak_reserved_bytes = None
    peaks = {point.variant: point.peak_gib for point in fits.points_of(run, 64)}
    assert peaks["fused_mlp"] == 5.0
    run.cells[2].peak_allocated_bytes = run.cells[3].peak_allocated_bytes = None
    assert "fused_mlp" not in [point.variant for point in fits.points_of(run, 64)]


def test_the_table_by_hand():
    lines = fits.fits_table(hand_made(**THREE), 24).split("\n")
    assert lines[:-2] == [
        "| tokens | fits | speedup | step, ms | reserved, GiB |",
        "| --- | --- | --- | --- | --- |",
        "| 64 | fused MLP | 2.00 | 105.0 | 23.4 |",
        "| 64 | vanilla PEFT | 1.00 | 210.0 | 21.5 |",
    ]
    nothing = fits.fits_table(hand_made(**THREE), 8).split("\n")[2:-2]
    assert nothing == ["| 64 | nothing: vanilla PEFT takes the least |  |  | 21.5 |"]
    assert fits.fits_table(example.empty(seq_lens=[64]), 8).split("\n")[2:-2] == [
        "| 64 | nothing measured |  |  |  |"
    ]


def test_of_many_that_fit_the_fastest_are_listed_and_the_rest_counted():
    sizes = {f"fused_all_but_{n}": ((100 + n, 9),) for n in range(11)}
    lines = fits.fits_table(hand_made(**sizes), 24).split("\n")[2:-2]
    times = [line.split(" | ")[3] for line in lines[:-1]]
    assert times == [f"{100 + n}.0" for n in range(8)]
    assert lines[-1] == "| 64 | and 3 slower |  |  |  |"
    eight = dict(list(sizes.items())[:8])
    assert len(fits.fits_table(hand_made(**eight), 24).split("\n")) == 2 + 8 + 2


def test_each_length_has_its_own_fits():
    found = {fit.seq_len: fit for fit in fits.fitting_points(RUNS["all"], 24)}
    assert list(found) == [64, 128, 256, 512]
    sizes = [len(fit.points) for fit in found.values()]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1] > 0
    for fit in found.values():
        speedups = [point.speedup for point in fit.points]
        assert speedups == sorted(speedups, reverse=True)
        assert all(p.peak_gib <= 24 - 0.6 and p.seq_len == fit.seq_len for p in fit.points)


# --- the frontier ---------------------------------------------------------------------------------


def test_the_frontier_by_hand():
    def point(step_ms, peak_gib):
        return frontier.Point("fused_mlp", 64, step_ms, peak_gib, None)

    smallest, middle, fastest = point(300, 5), point(200, 9), point(100, 40)
    beaten = [point(310, 5), point(200, 10), point(250, 9), point(300, 6), point(100, 41)]
    assert frontier.pareto([fastest, *beaten, smallest, middle]) == [smallest, middle, fastest]
    assert frontier.pareto([middle, point(190, 8)]) == [point(190, 8)]
    assert frontier.pareto([]) == []


def test_nothing_is_faster_in_less_memory_than_the_frontier():
    points = fits.points_of(RUNS["all"], 512)
    best = frontier.pareto(points)
    for point in points:
        inside = [p.step_ms for p in best if p.peak_gib <= point.peak_gib]
        assert min(inside) <= point.step_ms
    for one, other in pairwise(best):
        assert one.peak_gib < other.peak_gib and one.step_ms > other.step_ms


# --- the picture ----------------------------------------------------------------------------------


def lines(axes):
    return [list(zip(*line.get_data(), strict=True)) for line in axes.lines]


def test_every_variant_is_a_point_at_the_longest_length(pictures):
    axes = pictures["all"].axes[0]
    marks = {
        (round(float(x), 6), round(float(y), 6)): line
        for line in axes.lines
        for x, y in line.get_xydata()
        if line.get_marker() not in ("None", "")
    }
    points = fits.points_of(RUNS["all"], 512)
    assert len(points) == len(VARIANTS) - len(TWINS)
    for point in points:
        mark = marks[round(point.peak_gib, 6), round(point.step_ms, 6)]
        hollow = to_hex(mark.get_markerfacecolor()) == "#ffffff"
        assert hollow is not VARIANTS[point.variant].checkpoints
        families = {"fused": "fused", "unsloth": "unsloth", "vanilla": "peft"}
        wanted = [LOOKS[look].colour for part, look in families.items() if part in point.variant]
        assert not wanted or mark.get_color() == wanted[0]


def test_frontier_floor_and_cards_are_lines(pictures):
    axes = pictures["all"].axes[0]
    best = frontier.pareto(fits.points_of(RUNS["all"], 512))
    steps = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    corners = [(p.peak_gib, p.step_ms) for p in best]
    assert [tuple(xy) for xy in steps.get_xydata()][:-1] == corners
    assert tuple(steps.get_xydata()[-1]) == (axes.get_xlim()[1], best[-1].step_ms)
    floor = example.FLOOR_MS[512]
    assert [(0, floor), (1, floor)] in lines(axes)
    upright = sorted(
        x for (x, _), *rest in lines(axes) if rest and rest[0][0] == x and rest[0][1] == 1
    )
    assert upright == [gib - 0.6 for gib in (12, 16, 24, 40, 48, 80)]  # 8 GiB is out of range
    said = [text.get_text() for text in axes.texts]
    assert "24 GiB\ncard" in said and "8 GiB\ncard" not in said
    no_floor = replace(RUNS["experiment"], floor={})
    assert not [
        t for t in frontier.frontier_figure(no_floor).axes[0].texts if "floor" in t.get_text()
    ]


def test_every_point_is_named_or_numbered(pictures):
    picture = pictures["all"]
    said = [text.get_text() for text in picture.axes[0].texts if text.get_text()]
    listed = [text.get_text() for text in picture.texts]
    rows = [listed[n : n + 4] for n, words in enumerate(listed) if words.isdigit()]
    rows = {row[0]: row[1:] for row in rows if row[1][:1].isalpha()}
    assert sorted(words for words in said if words.isdigit()) == sorted(rows)
    points, named = fits.points_of(RUNS["all"], 512), []
    for point in points:
        name = variant_of(point.variant).plain_title
        if f"{name}\n{point.step_ms:.0f} ms" in said:
            named.append(point)
        else:
            assert [name, f"{point.step_ms:.0f}", f"{point.peak_gib:.1f}"] in rows.values()
    assert len(named) + len(rows) == len(points)
    assert {*frontier.pareto(points)} <= {*named}
    assert {*frontier.NAMED} <= {point.variant for point in named}
    headings = [
        words for words in listed if words in ("with checkpointing", "without checkpointing")
    ]
    assert headings == ["with checkpointing", "without checkpointing"]


@pytest.mark.parametrize("name", RUNS)
def test_every_text_can_be_read(name, pictures):
    picture = pictures[name]
    case.assert_readable(picture)
    axes = picture.axes[0]
    places = [
        axes.transData.transform((point.peak_gib, point.step_ms))
        for point in fits.points_of(RUNS[name], 512)
    ]
    for text in axes.texts:
        if text.get_text():
            box = text.get_window_extent()
            assert not [place for place in places if box.contains(*place)], text.get_text()


def test_the_title_states_both_ends():
    best = frontier.pareto(fits.points_of(RUNS["all"], 512))
    said = frontier.frontier_finding(RUNS["all"])
    assert said.startswith(
        "At 512 tokens, fastest: fused layers, CUDA graph without checkpointing (41"
    )
    ends_with = f"{best[0].step_ms:.0f} ms, {best[0].peak_gib:.1f} GiB"
    smallest = f"smallest: all fused, inputs offloaded ({ends_with})"
    assert said.endswith(smallest)
    one = frontier.frontier_finding(RUNS["experiment"])
    assert one.startswith("Fastest and smallest at 512 tokens: full Unsloth (673 ms, ")
    assert frontier.frontier_finding(hand_made(**THREE)).startswith(
        "At 64 tokens, fastest: all fused (84 ms"
    )
    assert frontier.frontier_finding(replace(RUNS["all"], rehearsal=True)) == looks.REHEARSAL_NOTICE


def test_the_longest_length_with_two_points_is_drawn():
    run = case.run(("vanilla_peft", "fused_mlp"), (64, 512), status={("vanilla_peft", 512): "oom"})
    assert " at 64 tokens: " in frontier.frontier_finding(run)


def test_there_is_no_picture_of_less_than_two_points(tmp_path):
    path = tmp_path / "frontier.png"
    without_memory = hand_made(**THREE)
    for cell in without_memory.cells:
        cell.peak_reserved_bytes = None
    for run in (
        example.empty(),
        case.run(("vanilla_peft", "vanilla_peft_again"), (64,)),
        without_memory,
    ):
        assert frontier.draw_frontier(run, path) is False
    assert list(tmp_path.iterdir()) == []


def test_the_same_results_give_the_same_bytes(tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    assert frontier.draw_frontier(RUNS["experiment"], one) is frontier.draw_frontier(
        RUNS["experiment"], two
    )
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes().startswith(b"\x89PNG") and b"tEXt" not in one.read_bytes()


def test_a_failed_draw_leaves_the_earlier_picture(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "picture.png"
    path.write_bytes(b"earlier")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        frontier.draw_frontier(RUNS["experiment"], path)
    assert path.read_bytes() == b"earlier" and list(tmp_path.iterdir()) == [path]

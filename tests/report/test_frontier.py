"""The variants that fit in a given memory, by hand, and frontier.png on made-up results."""

from functools import cache

import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.table_case import rows_in
from matplotlib.colors import to_hex
from msgspec.structs import replace

from bench import results
from report import committed, fits, frontier, wording
from variants import SUITES, VARIANTS, WITHOUT, variant_of

GIB = 2**30
TWINS = {"vanilla_peft_again", "vanilla_peft_again" + WITHOUT}
NO_MEMORY = {(id, 512): "oom" for id, variant in VARIANTS.items() if not variant.checkpoints}


def hand_made(**points):
    """Make a run at 64 tokens: variant = (ms and GiB of a round, ...)."""
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
RUNS = {
    "all": example.run(example.ALL),
    "with checkpointing": example.run(example.ALL, seq_lens=(512,), status=NO_MEMORY),
    "experiment": example.run(("vanilla_peft", "fused_mlp", "full_unsloth", "vanilla_peft_again")),
    "unknown variants": hand_made(vanilla_peft=[(200, 20)], bordered_step=[(100, 12)]),
    "as published": results.load(committed.suite_path()),
}


@cache
def picture_of(name):
    return frontier.frontier_figure(RUNS[name])


# --- what fits ------------------------------------------------------------------------------------


def test_every_speedup_is_over_vanilla_peft_by_way_of_the_blocks_own_baseline():
    name = "fused_mlp" + WITHOUT
    points = {"vanilla_peft": ((900, 9),), "vanilla_peft" + WITHOUT: ((300, 9),), name: ((100, 9),)}
    assert fits.points_of(hand_made(**points), 64)[0] == (name, 64, 100, 9, 9)
    del points["vanilla_peft"]
    assert fits.points_of(hand_made(**points), 64)[0] == (name, 64, 100, 9, 3)
    del points["vanilla_peft" + WITHOUT]
    assert fits.points_of(hand_made(**points), 64)[0].speedup is None


def test_what_fits_is_ranked_by_pairs_and_not_by_milliseconds_of_two_visits():
    """Double every time in the second run."""
    merged = hand_made(
        vanilla_peft=((200, 9), (400, 9)),
        fused_mlp=((100, 9), None),
        fused_all=(None, (160, 9)),
        liger_peft=(None, None, (90, 9)),  # of a visit without a baseline
    )
    points = fits.fitting_points(fits.points_of(merged, 64), 24)
    ranked = [("fused_all", 2.5), ("fused_mlp", 2), ("vanilla_peft", 1), ("liger_peft", None)]
    assert [(point.variant, point.speedup) for point in points] == ranked
    assert "; speedup over vanilla PEFT:" in fits.fits_table(merged, 24)


def test_memory_that_was_not_reserved_is_what_was_allocated():
    run = hand_made(**THREE)
    _, _, *mlp_cells = run.cells[:4]

    def peaks():
        return {point.variant: point.peak_gib for point in fits.points_of(run, 64)}

    for cell in run.cells:
        cell.peak_allocated_bytes = 5 * GIB
    mlp_cells[1].peak_reserved_bytes = None
    assert (peaks()["vanilla_peft"], peaks()["fused_mlp"]) == (21.5, 23.0)
    mlp_cells[0].peak_reserved_bytes = None
    assert peaks()["fused_mlp"] == 5.0
    for cell in mlp_cells:
        cell.peak_allocated_bytes = None
    assert "fused_mlp" not in peaks()


def fitting(run, gib):
    """Return the variants that fit, with their speedup, time and memory."""
    names = ("fits", "speedup", "step, ms", "reserved, GiB")
    return [tuple(row[name] for name in names) for row in rows_in(fits.fits_table(run, gib))]


def test_the_table_by_hand_leaves_room_for_the_context():
    run = hand_made(**THREE)
    two = [("fused MLP", "2.00", "105.0", "23.4"), ("vanilla PEFT", "1.00", "210.0", "21.5")]
    assert fitting(run, 24) == two  # 23.4 for torch
    assert fitting(run, 24.2) == [("all parts", "2.50", "84.0", "23.5"), *two]
    assert fitting(run, 16) == [("nothing: vanilla PEFT takes the least", "", "", "21.5")]
    assert fitting(example.empty(seq_lens=[64]), 8) == [("nothing measured", "", "", "")]


def test_of_many_that_fit_the_fastest_are_listed_and_the_rest_counted():
    sizes = {f"fused_all_but_{n}": ((100 + n, 9),) for n in range(11)}
    *rows, last = fitting(hand_made(**sizes), 24)
    assert [step_ms for _, _, step_ms, _ in rows] == [f"{100 + n}.0" for n in range(8)]
    assert last[0] == "and 3 slower"
    assert len(fitting(hand_made(**dict(list(sizes.items())[:8])), 24)) == 8


def test_the_frontier_by_hand():
    def point(step_ms, peak_gib):
        return frontier.Point("fused_mlp", 64, step_ms, peak_gib, None)

    smallest, middle, fastest = point(300, 5), point(200, 9), point(100, 40)
    beaten = [point(310, 5), point(200, 10), point(250, 9), point(300, 6), point(100, 41)]
    assert frontier.pareto([fastest, *beaten, smallest, middle]) == [smallest, middle, fastest]
    assert frontier.pareto([middle, point(190, 8)]) == [point(190, 8)]
    assert frontier.pareto([]) == []


# --- the picture ----------------------------------------------------------------------------------


def words_of(picture):
    return [text.get_text() for text in picture.texts if text.get_text()]


def test_every_variant_is_a_point_at_the_longest_length():
    drawn = [line for line in picture_of("all").axes[0].lines if line.get_marker() != "None"]
    marks = {tuple(xy): line for line in drawn for xy in line.get_xydata()}
    points = fits.points_of(RUNS["all"], 512)
    assert len(points) == len(SUITES["all"]) - len(TWINS)
    for point in points:
        mark = marks[point.peak_gib, point.step_ms]
        hollow = to_hex(mark.get_markerfacecolor()) == "#ffffff"
        assert hollow is not VARIANTS[point.variant].checkpoints
        assert mark.get_color() == VARIANTS[point.variant].look.colour


def test_frontier_floor_and_cards_are_lines():
    axes, best = picture_of("all").axes[0], frontier.pareto(fits.points_of(RUNS["all"], 512))
    (steps,) = (line for line in axes.lines if line.get_drawstyle() == "steps-post")
    *corners, end = map(tuple, steps.get_xydata())
    assert corners == [(point.peak_gib, point.step_ms) for point in best]
    assert end == (axes.get_xlim()[1], best[-1].step_ms)
    drawn = [[tuple(xy) for xy in zip(*line.get_data(), strict=True)] for line in axes.lines]
    floor = example.FLOOR_MS[512]
    assert [(0, floor), (1, floor)] in drawn
    for gib in (6, 8, 12, 16, 24, 40, 48, 80):
        is_in_range = gib > 6
        assert ([(gib - 0.6, 0), (gib - 0.6, 1)] in drawn) is is_in_range
        assert (f"{gib} GiB\ncard" in words_of(axes)) is is_in_range
    no_floor = frontier.frontier_figure(replace(RUNS["experiment"], floor={})).axes[0]
    assert "floor" in str(words_of(axes)) and "floor" not in str(words_of(no_floor))


@pytest.mark.parametrize("name", ["all", "as published"])
def test_eight_points_are_named_the_fastest_among_them_and_the_others_counted(name):
    points, picture = fits.points_of(RUNS[name], 512), picture_of(name)
    titles = {p: f"{variant_of(p.variant).title} {p.step_ms:.0f} ms" for p in points}
    words = [text.replace("\n", " ") for text in words_of(picture.axes[0])]
    named = {point for point in points if titles[point] in words}
    wanted = {point for point in points if point.variant in frontier.NAMED}
    assert named == wanted | {frontier.pareto(points)[-1]}
    assert name != "as published" or len(named) == 8
    counted = picture.legends[0].get_texts()[-1].get_text()
    assert counted == f"small: {len(points) - len(named)} other variants"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, ""),
        ({"liger_peft": "oom"}, "out of memory: Liger."),
        ({"liger_peft": "oom", "liger_peft" + WITHOUT: "oom", "fused_mlp" + WITHOUT: "oom"},
         "out of memory: Liger; fused MLP without checkpointing; Liger without checkpointing."),
        ({"fused_mlp": "parity_failed", "liger_peft": "oom"},
         "failed parity: fused MLP. out of memory: Liger."),
    ],
)  # fmt: skip
def test_the_caption_says_what_has_no_point(status, said):
    variants = "vanilla_peft", "fused_mlp", "liger_peft"
    status = {(variant, 512): why for variant, why in status.items()}
    run = example.run((*variants, *(id + WITHOUT for id in variants[1:])), (512,), status=status)
    caption = " ".join(frontier.frontier_figure(run).texts[-1].get_text().split())
    assert caption.endswith(f"Without a point, {said}" if said else "lm_head alone.")


@pytest.mark.parametrize("name", RUNS)
def test_every_text_can_be_read(name):
    picture, longest = picture_of(name), RUNS[name].experiment.seq_lens[-1]
    case.assert_readable(picture)
    points = fits.points_of(RUNS[name], longest)
    places = [(point.peak_gib, point.step_ms) for point in points]
    case.assert_no_label_on(places, picture.axes[0])


def test_the_title_states_the_fastest_on_a_small_card_and_of_all():
    def in_numbers(point):
        return f"({point.step_ms:.0f} ms, {point.peak_gib:.1f} GiB reserved)"

    best = frontier.pareto(fits.points_of(RUNS["as published"], 512))
    *_, on_12_gib = (point for point in best if point.peak_gib < 12 - 0.6)
    assert frontier.frontier_finding(RUNS["as published"]) == (
        f"At 512 tokens everything fused {in_numbers(on_12_gib)} is the fastest that fits 12 GiB;\n"
        f"the fastest of all: fused layers, CUDA graph without checkpointing {in_numbers(best[-1])}"
    )
    one = frontier.frontier_finding(RUNS["experiment"])
    assert (
        one
        == "At 512 tokens full Unsloth (673 ms, 10.0 GiB reserved) is the fastest, and fits 12 GiB"
    )
    large = frontier.frontier_finding(hand_made(vanilla_peft=[(20, 90)], fused_mlp=[(10, 95)]))
    assert large == "At 64 tokens fused MLP (10 ms, 95.0 GiB reserved) is the fastest"
    assert (
        frontier.frontier_finding(replace(RUNS["all"], rehearsal=True)) == wording.REHEARSAL_NOTICE
    )


def test_the_longest_length_with_two_points_is_drawn():
    run = example.run(
        ("vanilla_peft", "fused_mlp"), (64, 512), status={("vanilla_peft", 512): "oom"}
    )
    assert frontier.frontier_finding(run).startswith("At 64 tokens ")


def test_there_is_no_picture_of_less_than_two_points():
    without_memory = hand_made(vanilla_peft=((200, 0),), fused_mlp=((100, 0),))
    one_and_its_twin = example.run(("vanilla_peft", "vanilla_peft_again"), (64,))
    for run in (example.empty(), one_and_its_twin, without_memory):
        assert frontier.frontier_figure(run) is None

"""The variants that fit in a given memory, worked out by hand."""

from cases import example_results as example
from cases.table_case import rows_in

from report import fits
from variants import WITHOUT

GIB = 2**30


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


def test_every_speedup_is_over_vanilla_peft_by_way_of_the_blocks_own_baseline():
    name = "fused_mlp" + WITHOUT
    points = {"vanilla_peft": ((900, 9), (600, 9)), "vanilla_peft" + WITHOUT: ((300, 9),),
              name: ((100, 9),)}  # fmt: skip
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

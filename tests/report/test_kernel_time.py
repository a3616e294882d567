"""kernel_time.png: its numbers by hand, and that the picture says them."""

import example_results as example
import pytest
from matplotlib.text import Text

from bench.records import Floor
from report import kernel_time


def profiled(*cells):
    """A document at 64 tokens: (variant, round, step_ms, kernel_ms, gpu_busy_ms) a cell."""
    variants = list(dict.fromkeys(cell[0] for cell in cells))
    document = example.empty(variants=variants, seq_lens=[64])
    document.floor[64] = Floor(40.0, [40.0])
    for variant, round_number, step_ms, kernel_ms, busy_ms in cells:
        cell = example.timed_cell(
            variant, 64, round_number, step_ms, kernel_ms=kernel_ms, gpu_busy_ms=busy_ms
        )
        document.add(cell)
    return document


def words(picture):
    return [text.get_text() for text in picture.findobj(Text)]


def test_bars_are_medians_over_rounds_and_idle_is_what_kernels_leave_of_a_step():
    document = profiled(
        ("vanilla_peft", 1, [100.0, 110.0, 300.0], {"matmul": 60.0, "copy": 10.0}, 70.0),
        ("vanilla_peft", 2, [120.0, 120.0, 120.0], {"matmul": 62.0, "copy": 12.0}, 74.0),
        ("vanilla_peft", 3, [100.0, 100.0, 100.0], {"matmul": 61.0, "copy": 14.0}, 75.0),
    )
    (bar,) = kernel_time.bars(document, 64)
    assert bar.kernel_ms == {"matmul": 61.0, "copy": 12.0}
    assert bar.step_ms == 110.0  # of 110, 120, 100
    assert bar.idle_ms == 40.0  # of 110 - 70, 120 - 74, 100 - 75


def test_copies_that_run_beside_other_kernels_are_not_counted_twice():
    document = profiled(("full_unsloth", 1, [100.0], {"matmul": 80.0, "copy": 30.0}, 90.0))
    (bar,) = kernel_time.bars(document, 64)
    assert bar.kernel_ms == {"matmul": 80.0, "copy": 10.0}
    assert sum(bar.kernel_ms.values()) + bar.idle_ms == 100.0


def test_a_profile_that_ran_longer_than_the_steps_leaves_no_idle_time():
    document = profiled(("vanilla_peft", 1, [100.0], {"matmul": 105.0}, 105.0))
    assert kernel_time.bars(document, 64)[0].idle_ms == 0.0


def test_the_twin_and_what_has_no_profile_have_no_bar():
    document = profiled(
        ("vanilla_peft", 1, [100.0], {"matmul": 60.0}, 60.0),
        ("vanilla_peft_again", 1, [100.0], {"matmul": 60.0}, 60.0),
        ("fused_mlp", 1, [90.0], {}, None),
    )
    assert [bar.variant for bar in kernel_time.bars(document, 64)] == ["vanilla_peft"]


def test_every_kind_of_kernel_has_a_look():
    from bench.profiler import KINDS

    assert kernel_time.KIND_LOOKS.keys() == set(KINDS)


def test_the_picture_says_the_steps_the_kinds_and_the_floor():
    document = profiled(
        ("vanilla_peft", 1, [200.0], {"matmul": 120.0, "norm": 30.0}, 150.0),
        ("fused_mlp", 1, [160.0], {"matmul": 118.0, "norm": 12.0}, 130.0),
    )
    said = words(kernel_time.kernel_time_figure(document, [64]))
    for expected in ("200 ms", "160 ms", "120", "30", "floor", "RMSNorm", kernel_time.IDLE,
                     "vanilla PEFT", "fused MLP", "64 tokens"):  # fmt: skip
        assert expected in said, expected


def test_it_is_written_the_same_each_time_and_not_at_all_without_a_profile(tmp_path):
    document = profiled(("vanilla_peft", 1, [200.0], {"matmul": 120.0}, 120.0))
    assert kernel_time.draw_kernel_time(document, tmp_path / "one.png")
    assert kernel_time.draw_kernel_time(document, tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    without = profiled(("vanilla_peft", 1, [200.0], {}, None))
    assert kernel_time.draw_kernel_time(without, tmp_path / "none.png") is False
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("kind", ["matmul", "copy"])
def test_a_bar_that_is_too_narrow_for_its_number_has_none(kind):
    document = profiled(("vanilla_peft", 1, [200.0], {"norm": 150.0, kind: 3.0}, 153.0))
    assert "3" not in words(kernel_time.kernel_time_figure(document, [64]))

"""kernel_time.png: its numbers by hand, and that the picture shows them."""

from itertools import accumulate
from pathlib import Path
from statistics import median

import pytest
from cases import example_results as example
from cases import picture_case as case
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text
from msgspec.structs import replace

from bench import results
from bench.profiler import KIND_BY_MODULE, KIND_BY_NAME
from bench.records import Floor
from fused_lora.adopt.switches import SWITCHES
from report import kernel_time
from report.tables import kinds_section
from variants import EXPERIMENT_ON_NF4, SUITES, variant_of


def profiled(*cells):
    """Make a run at 64 tokens with (variant, step_ms, kernel_ms, gpu_busy_ms) for each cell."""
    document = example.empty(variants=list(dict.fromkeys(cell[0] for cell in cells)), seq_lens=[64])
    document.floor[64] = Floor(40.0, [40.0])
    for variant, step_ms, kernel_ms, busy_ms in cells:
        number = len(document.cells_of(variant)) + 1
        own = {"kernel_ms": kernel_ms, "gpu_busy_ms": busy_ms}
        document.add(example.timed_cell(variant, 64, number, step_ms, **own))
    return document


def words(picture):
    return [text.get_text() for text in picture.findobj(Text)]


@pytest.mark.parametrize(
    ("cells", "kernel_ms", "step_ms", "idle_ms"),
    [
        (  # medians over rounds; idle is step minus kernels: 110 - 70, 120 - 74, 100 - 75
            [
                ([100.0, 110.0, 300.0], {"matmul": 60.0, "copy": 10.0}, 70.0),
                ([120.0, 120.0, 120.0], {"matmul": 62.0, "copy": 12.0}, 74.0),
                ([100.0, 100.0, 100.0], {"matmul": 61.0, "copy": 14.0}, 75.0),
            ],
            *({"matmul": 61.0, "copy": 12.0}, 110.0, 40.0),
        ),
        # copies that run beside other kernels are not counted twice
        (
            [([100.0], {"matmul": 80.0, "copy": 30.0}, 90.0)],
            {"matmul": 80.0, "copy": 10.0},
            100,
            10,
        ),
        # a profile that ran longer than the steps leaves no idle time
        ([([100.0], {"matmul": 105.0}, 105.0)], {"matmul": 105.0, "copy": 0}, 100, 0),
    ],
)
def test_a_bar_by_hand(cells, kernel_ms, step_ms, idle_ms):
    (bar,) = kernel_time.bars(profiled(*(("vanilla_peft", *cell) for cell in cells)), 64)
    assert bar == ("vanilla_peft", kernel_ms, idle_ms, step_ms)


def test_the_twin_and_what_has_no_profile_have_no_bar():
    document = profiled(
        ("vanilla_peft", [100.0], {"matmul": 60.0}, 60.0),
        ("vanilla_peft_again", [100.0], {"matmul": 60.0}, 60.0),
        ("fused_mlp", [90.0], {}, None),
    )
    assert [bar.variant for bar in kernel_time.bars(document, 64)] == ["vanilla_peft"]
    without = profiled(("vanilla_peft", [200.0], {}, None))
    assert kernel_time.kernel_time_figure(without) is None


def test_every_kind_of_kernel_has_a_look():
    kinds = {kind for kind, _ in (*KIND_BY_NAME, *KIND_BY_MODULE)}
    assert kinds.union(*(part.kinds for part in SWITCHES.values())) == kernel_time.KINDS.keys()
    assert kernel_time.COLOURS.keys() <= kernel_time.NAMES.keys()
    assert len({*kernel_time.COLOURS.values()}) == len(kernel_time.COLOURS)
    taken = {variant_of(variant).look.colour for variant in SUITES["experiment"]}
    assert not taken & {*kernel_time.COLOURS.values()}


def test_the_small_kinds_are_one_segment():
    kernel_ms = {"matmul": 60.0, "rope": 3.0, "loss": 4.0, "other": 5.0}
    (bar,) = kernel_time.bars(profiled(("vanilla_peft", [100.0], kernel_ms, 72.0)), 64)
    drawn = {kind: ms for kind, ms in kernel_time.drawn_ms(bar).items() if ms}
    assert drawn == {"matmul": 60.0, "rest": 12.0}


def test_the_picture_says_the_steps_the_kinds_and_the_floor():
    document = profiled(
        ("vanilla_peft", [200.0], {"matmul": 120.0, "norm": 30.0}, 150.0),
        ("fused_mlp", [160.0], {"matmul": 118.0, "norm": 12.0}, 130.0),
    )
    said = words(kernel_time.kernel_time_figure(document))
    for expected in ("200 ms", "160 ms", "120", "30", "floor 40", "RMSNorm", kernel_time.IDLE,
                     "vanilla PEFT", "fused MLP",
                     "64 tokens", "ms a step, medians over rounds"):  # fmt: skip
        assert expected in said, expected


def test_a_bar_stacks_the_kinds_then_the_wait_and_the_floor_is_a_line():
    run = example.run(("vanilla_peft", "vanilla_peft_again", "fused_mlp"))
    picture = kernel_time.kernel_time_figure(run)
    axes = picture.axes[0]
    bar = next(bar for bar in kernel_time.bars(run, 512) if bar.variant == "fused_mlp")
    drawn = [each for each in axes.patches if each.get_y() == pytest.approx(1 - 0.78 / 2)]
    begins = [0, *accumulate(each.get_width() for each in drawn)]  # one after another
    assert [each.get_x() for each in drawn] == pytest.approx(begins[:-1])
    idle_ms = [median(cell.step_ms) - cell.gpu_busy_ms for cell in run.cells_of("fused_mlp", 512)]
    assert drawn.pop().get_width() == pytest.approx(median(idle_ms))
    drawn = [(each.get_width(), to_hex(each.get_facecolor())) for each in drawn]
    for kind, ms in kernel_time.drawn_ms(bar).items():
        assert (pytest.approx(ms), kernel_time.COLOURS[kind]) in drawn
    (kinds,) = picture.legends
    said = [text.get_text() for text in kinds.get_texts()]
    assert (said[2], said[-1]) == ("casts and copies", kernel_time.IDLE)
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    floors = {float(segment[0][0]) for c in lines for segment in c.get_segments()}
    assert floors == {example.FLOOR_MS[512]} and axes.get_title(loc="left") == "512 tokens"


def test_the_picture_hides_no_variant():
    absent = {("vanilla_peft", 512): "oom", ("full_unsloth", 512): "unavailable"}
    run = example.run(seq_lens=(64, 512), status=absent)
    for cell in run.cells_of("vanilla_peft"):
        cell.gpu_busy_ms = None
    shown = words(kernel_time.kernel_time_figure(run))
    found = [shown.count(one) for one in ("out of memory", "unavailable", "no profile")]
    assert found == [1, 1, 1]


def test_the_title_says_what_surrounds_the_products():
    vanilla = ("vanilla_peft", [200.0], {"matmul": 120.0, "copy": 30.0, "adapter": 20.0}, 170.0)
    fused = ("fused_mlp", [160.0], {"matmul": 118.0, "norm": 12.0}, 130.0)
    said = "Casts, copies, LoRA scaling and norms: 50 ms (25%) of vanilla PEFT's step at 64 tokens"
    finding = kernel_time.kernel_time_finding(profiled(vanilla, fused), [64])
    assert finding == f"{said}, 12 in fused MLP"
    longer = profiled(vanilla, fused)  # of whose shorter step the GPU waits 30 of 200 ms
    longer.experiment.seq_lens = [64, 128]
    for cell in [*longer.cells]:
        longer.add(replace(cell, seq_len=128))
    finding = kernel_time.kernel_time_finding(longer, [64, 128])
    assert finding.endswith("12 in fused MLP; at 64 tokens the GPU waits for 15% of vanilla's step")
    others = ("full_unsloth", "liger_peft", "compiled_peft", "fused_all")
    many = profiled(vanilla, fused, *((v, [90.0], {"copy": 40.0}, 80.0) for v in others))
    assert kernel_time.kernel_time_finding(many, [64]) == f"{said}, 12 in fused MLP"
    assert "vanilla" not in kernel_time.kernel_time_finding(profiled(fused), [64])


# an axis that ends beside a tick, and bars of very different lengths
@pytest.mark.parametrize("name", ["h100/experiment_2026-11-26", "h100/published-qwen3-0.6b"])
def test_every_text_can_be_read(name):
    run = results.load(Path(__file__).parents[2] / "docs" / "runs" / f"{name}.json.gz")
    case.assert_readable(kernel_time.kernel_time_figure(run))


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_dequantising_is_a_kind_of_its_own_on_a_base_in_4_bits_alone(base):
    run = example.run(EXPERIMENT_ON_NF4, (64,), base=base)
    for cell in run.cells:
        cell.kernel_ms |= {"dequantising": 7.0} if base == "nf4" else {}
    picture = kernel_time.kernel_time_figure(run)
    case.assert_readable(picture)
    assert ("Floor: dequantising, " in " ".join(" ".join(words(picture)).split())) is (
        base == "nf4"
    )
    assert ("dequantising" in words(picture)) is (base == "nf4")
    assert ("| dequantising | 7.0 |" in kinds_section(run)) is (base == "nf4")


@pytest.mark.parametrize("kind", ["matmul", "copy"])
def test_a_bar_that_is_too_narrow_for_its_number_has_none(kind):
    document = profiled(("vanilla_peft", [200.0], {"norm": 150.0, kind: 3.0}, 153.0))
    assert "3" not in words(kernel_time.kernel_time_figure(document))

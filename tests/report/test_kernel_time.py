"""kernel_time.png: its numbers by hand, and that the picture shows them."""

from pathlib import Path

import pytest
from cases import example_results as example
from cases import picture_case as case
from matplotlib.colors import to_hex
from matplotlib.text import Text

from bench import results
from bench.profiler import KIND_BY_MODULE, KIND_BY_NAME
from bench.records import Floor
from fused_lora.adopt.switches import SWITCHES
from report import kernel_time
from report.picture import WIDTH
from report.tables import kinds_section
from variants import EXPERIMENT_ON_NF4, SUITES, variant_of

PHONE = 390  # pixels


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


def test_every_kind_of_kernel_has_a_segment_in_a_colour_of_its_own():
    kinds = {kind for kind, _ in (*KIND_BY_NAME, *KIND_BY_MODULE)}
    assert kinds.union(*(part.kinds for part in SWITCHES.values())) == kernel_time.KINDS.keys()
    assert kernel_time.SEGMENT_OF.keys() <= kernel_time.KINDS.keys()
    taken = {variant_of(variant).look.colour for variant in SUITES["experiment"]}
    colours = {*kernel_time.COLOURS.values()}
    assert len(colours) == len(kernel_time.COLOURS) and not taken & colours


def test_a_bar_stacks_its_segments_with_the_numbers_that_fit():
    kernel_ms = {"matmul": 60.0, "copy": 20.0, "adapter": 9.5, "rope": 0.3, "loss": 0.2}
    document = profiled(("vanilla_peft", [200.0], kernel_ms, 90.0))
    picture = kernel_time.kernel_time_figure(document)
    ms = {kernel_time.MATMULS: 60.0, kernel_time.ADAPTERS: 29.5, kernel_time.OTHERS: 0.5}
    patches = picture.axes[0].patches
    assert [each.get_x() for each in patches] == pytest.approx([0.0, 60.0, 89.5])
    drawn = [(each.get_width(), to_hex(each.get_facecolor())) for each in patches]
    assert drawn == [(pytest.approx(ms[name]), kernel_time.COLOURS[name]) for name in ms]
    said = words(picture)
    assert {"vanilla PEFT", "90 ms", "60", "30", *ms} < set(said) and "0" not in said
    assert [text.get_text() for text in picture.legends[0].get_texts()] == [*ms]


def test_the_picture_is_of_the_longest_length_and_hides_no_variant():
    run = example.run(seq_lens=(64, 512), status={("full_unsloth", 512): "unavailable"})
    for cell in run.cells_of("vanilla_peft", 512):
        cell.gpu_busy_ms = None
    picture = kernel_time.kernel_time_figure(run)
    said = words(picture)
    assert [said.count(one) for one in ("unavailable", "no profile")] == [1, 1]
    assert picture.texts[-1].get_text().startswith("GPU time of a step at 512 tokens per row. ")


def test_the_title_says_how_much_is_not_matmuls_and_whether_fusing_removes_it():
    vanilla = ("vanilla_peft", [200.0], {"matmul": 120.0, "copy": 30.0, "norm": 10.0}, 160.0)
    fused = ("fused_mlp", [160.0], {"matmul": 122.0, "norm": 19.0}, 141.0)
    slower = ("fused_mlp", [160.0], {"matmul": 118.0, "norm": 21.0}, 139.0)
    said = "25% of vanilla PEFT's GPU time is not matmuls"
    finding = kernel_time.kernel_time_finding
    assert finding(profiled(vanilla, fused), 64) == f"{said}. Fusing removes most of that"
    assert finding(profiled(vanilla, slower), 64) == said
    assert "vanilla" not in finding(profiled(fused), 64)


@pytest.mark.parametrize("name", ["h100/experiment_2026-11-26", "h100/published-qwen3-0.6b"])
def test_every_text_can_be_read(name):
    run = results.load(Path(__file__).parents[2] / "docs" / "runs" / f"{name}.json.gz")
    picture = kernel_time.kernel_time_figure(run)
    case.assert_readable(picture)
    sizes = [text.get_fontsize() for text in picture.findobj(Text) if text.get_text()]
    assert min(sizes) / 72 * PHONE / WIDTH >= 11


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_dequantising_is_a_kind_of_its_own_on_a_base_in_4_bits_alone(base):
    run = example.run(EXPERIMENT_ON_NF4, (64,), base=base)
    for cell in run.cells:
        cell.kernel_ms |= {"dequantising": 7.0} if base == "nf4" else {}
    picture = kernel_time.kernel_time_figure(run)
    case.assert_readable(picture)
    assert ("dequantising" in words(picture)) is (base == "nf4")
    assert ("| dequantising | 7.0 |" in kinds_section(run)) is (base == "nf4")

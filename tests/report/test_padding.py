"""Padded rows beside whole chats in one row: groups, tables and documents.png, on made-up runs."""

import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.table_case import rows_in
from matplotlib.text import Text
from msgspec.structs import replace

from bench.experiment_records import Tokens
from bench.records import Cell
from report import padding, padding_picture
from report.wording import Footnote

VARLEN, ALL, EVERYTHING = "vanilla_peft_varlen", "fused_all", "fused_layer_graph_offload"
FULL = 32 * 512


def made(kind, gpu="NVIDIA H200", share=0.5, status=(), data="0" * 64, rehearsal=False, **ms):
    """Make a round at 512 tokens. Padded rows have this share of padding, documents have none."""
    document = example.empty(
        rehearsal=rehearsal, variants=[*ms, *status], seq_lens=[512], rounds=1,
        padded=kind == "padded", documents=kind == "documents", data_sha256=data,
        tokens={512: Tokens(share if kind == "padded" else 0.0, 0.4)},
    )  # fmt: skip
    document.environment.gpu = replace(document.environment.gpu, name=gpu)
    for variant, step_ms in ms.items():
        peak = 9 * 2**30
        cell = example.timed_cell(variant, 512, 1, [step_ms] * 4, peak_allocated_bytes=peak)
        document.add(cell)
    for variant in status:
        document.add(Cell(variant, 512, 1, status[variant], "made up for a test"))
    return document


def groups(padded, documents, footnotes=()):
    """Return the groups of (data set, run)."""
    files = (
        {f"{n}/{kind}-{name}.json.gz": run for n, (name, run) in enumerate(runs)}
        for kind, runs in (("padded", padded), ("documents", documents))
    )
    return padding.groups(*files, footnotes)


PADDED = made("padded", vanilla_peft=1000.0, full_unsloth=600.0, fused_all=400.0)
H200 = made("documents", vanilla_peft_varlen=1000.0, full_unsloth=800.0, fused_all=500.0,
            status={EVERYTHING: "parity_failed"})  # fmt: skip
H100 = made("documents", "NVIDIA H100 80GB HBM3", vanilla_peft_varlen=1200.0, full_unsloth=900.0,
            fused_layer_graph_offload=400.0)  # fmt: skip
TWO = groups([("dolly", PADDED)], [("dolly", H200), ("dolly", H100)])
LONG = "an_unusually_long_name_of_a_data_set"


def data_groups(*names):
    """Return groups of data sets with more and more padding, each padded and as documents."""
    by_kind = ([], [])
    for place, name in enumerate(names):
        for runs, kind in zip(by_kind, ("padded", "documents"), strict=True):
            ms = {"full_unsloth": 600.0, ALL: 400.0, EVERYTHING: 300.0}
            first = "vanilla_peft" if kind == "padded" else VARLEN
            runs.append((name, made(kind, share=0.3 + 0.1 * place, data=name, **ms | {first: 1e3})))
    return groups(*by_kind)


def test_the_padding_of_a_data_set_is_that_of_its_padded_rows_on_any_gpu():
    assert [(group.gpu, group.padding) for group in TWO] == [("H100", 0.5), ("H200", 0.5)]
    assert not TWO[0].padded and TWO[1].padded["fused_all"].tokens_per_s == FULL / 2 / 0.4


def test_other_chats_under_the_same_name_are_a_group_of_their_own():
    others = made("documents", data="1" * 64, fused_all=500.0)
    found = groups([("dolly", PADDED)], [("dolly", others)])
    assert [(group.padding, [*group.padded], [*group.documents]) for group in found] == [
        (0.5, ["vanilla_peft", "full_unsloth", "fused_all"], []),
        (None, [], ["fused_all"]),
    ]
    assert found[1].padding_in_words == "padding not measured"


def test_a_rehearsal_is_no_result():
    assert groups([], [("dolly", made("documents", rehearsal=True, fused_all=5.0))]) == []
    assert padding.padding_section([]) == "Not measured yet."


def test_groups_stand_from_the_least_padding_to_the_most_whatever_their_names():
    found = data_groups("sharegpt", "sft_train", LONG)
    words = ["ShareGPT's lengths", "data/sft_train.jsonl", LONG]
    assert [group.data_in_words for group in found] == words
    assert [group.data for group in groups(
        [("a", made("padded", share=0.6, data="a", fused_all=1.0)),
         ("b", made("padded", share=0.4, data="b", fused_all=1.0))], [],
    )] == ["b", "a"]  # fmt: skip


def test_the_table_by_hand():
    said = padding.padding_section(TWO)
    title = "Dolly's lengths, 32 × 512 tokens a step, NVIDIA H200: 50% of padded rows is padding."
    table = said.split(f"**{title}**")[1]
    times = {row["variant"]: (row["padded: step, ms"], row["as documents: step, ms"])
             for row in rows_in(table)}  # fmt: skip
    assert times == {
        "vanilla PEFT": ("1000.0", ""), "PEFT, FlashAttention": ("", "1000.0"),
        "full Unsloth 2026.10.9": ("600.0", "800.0"), "all parts": ("400.0", "500.0"),
        "everything fused": ("", "failed parity"),
    }  # fmt: skip
    assert "| all parts | 400.0 | 388.0 | 20,480 | 9.0 | 500.0 | 485.0 | 32,768 | 9.0 |" in table
    assert "| as documents: step, ms | GPU, ms | tokens/s | peak allocated, GiB |\n" in said
    # both of the H200's in one
    assert said.count("whole chats in one row ·") == 1 and said.count("padded ·") == 0
    assert said.count("NVIDIA H200 · torch") == 1


def test_a_footnote_marks_the_padded_time_of_its_variants():
    padded = made("padded", vanilla_peft=1000.0, fused_all=400.0, fused_layer_graph_offload=800.0)
    note = Footnote("0/padded-dolly.json.gz", [EVERYTHING], "¹", "before padding was left out.")
    said = padding.padding_section(groups([("dolly", padded)], [], [note]))
    assert said.count("| 800.0¹ |") == 1 and said.count("¹") == 2
    assert "\n\n¹: before padding was left out.\n\n" in said
    picture = padding_picture.documents_figure(groups([("dolly", padded)], [], [note]))
    drawn = [text.get_text() for text in picture.findobj(Text)]
    assert "10,240¹" in drawn and "20,480" in drawn
    assert any(words.startswith("¹: before padding was left out. ") for words in drawn)


def test_a_step_that_was_profiled_and_took_longer_than_most_is_no_variants_time():
    document = made("documents", vanilla_peft_varlen=1000.0, full_unsloth=800.0,
                    fused_layer_graph_offload=400.0)  # fmt: skip
    (cell,) = document.cells_of("full_unsloth")
    cell.gpu_busy_ms = 970.0
    found = groups([], [("dolly", document)])
    said = padding_picture.over_unsloth(found)
    assert f"{800 / 388:.2f} times as fast as Unsloth 2026.10.9." in said


def test_a_data_set_has_one_panel_with_the_most_of_its_times():
    assert padding.fullest(TWO) == [TWO[1]]  # the H100's has documents alone
    newer = TWO[1]._replace(runs=(replace(TWO[1].runs[0], started_utc="2099-01-01"),))
    assert padding.fullest([newer, *TWO]) == padding.fullest([*TWO, newer]) == [newer]
    sharegpt = data_groups("sharegpt")
    assert padding.fullest([TWO[0], *sharegpt]) == [TWO[0], *sharegpt]


# --- the picture ----------------------------------------------------------------------------------


def test_the_title_can_be_read_off_the_bars():
    # vanilla PEFT takes 1000 ms in both, where 0.3 and 0.4 of the padded rows count for nothing;
    # everything fused takes 300 ms
    said = padding_picture.documents_finding(data_groups("alpaca", "dolly"))
    assert said == (
        "Packing alone makes vanilla PEFT 1.4 to 1.7× faster;\n"
        "everything fused and packed is 4.8 to 5.6× faster than padded rows"
    )
    # of the H200 alone: the H100 has no padded rows
    said = padding_picture.documents_finding(TWO)
    assert said == "Packing alone makes vanilla PEFT 2.0× faster than padded rows"
    runs = {"padded": {"vanilla_peft": 1000.0}, "documents": {EVERYTHING: 400.0}}
    fused = groups(*([("dolly", made(kind, **ms))] for kind, ms in runs.items()))
    said = padding_picture.documents_finding(fused)
    assert said == "Everything fused and packed is 5.0× faster than padded rows"
    alone = groups([], [("dolly", made("documents", vanilla_peft_varlen=1.0))])
    assert padding_picture.documents_finding(alone).startswith("Tokens a second")


def test_the_caption_holds_the_fastest_of_ours_in_bf16_against_unsloth_by_the_gpus_time():
    # 800 / 500 and 900 / 400, the first on a GPU that has no panel
    said = padding_picture.over_unsloth(TWO)
    assert "is 1.60 to 2.25 times as fast as Unsloth 2026.10.9, counting those on other" in said
    fp8 = made("documents", full_unsloth=800.0, fused_all=500.0, fp8_layer=100.0)
    said = padding_picture.over_unsloth(groups([], [("dolly", fp8)]))
    assert said.endswith("ours is 1.60 times as fast as Unsloth 2026.10.9.")
    assert padding_picture.over_unsloth([]) == ""


def test_each_cell_with_a_time_is_a_bar_and_each_other_says_why():
    axes, other = (padding_picture.documents_figure([one]).axes[0] for one in TWO)
    lengths = [sorted(bar.get_width() for bar in one.patches) for one in (axes, other)]
    assert [[round(one) for one in panel] for panel in lengths] == [
        [13653, 18204, 40960],
        [8192, 13653, 16384, 20480, 20480, 32768],
    ]
    first, second = ([text.get_text() for text in one.texts] for one in (axes, other))
    assert first.count("not measured") == 5
    assert second.count("not measured") == 1 and second.count("failed parity") == 1
    hatched = {bool(bar.get_hatch()) for bar in other.patches}
    assert hatched == {True, False}


@pytest.mark.slow("three")
@pytest.mark.parametrize(
    "found",
    [
        TWO, TWO[:1], data_groups("sft_train", "sharegpt", "dolly"),
        data_groups("sft_train", "sharegpt", "oasst1", "dolly"),
        data_groups("sft_train", "sharegpt", "oasst1", "dolly", "alpaca"),
    ],
    ids=["two", "one", "three", "four", "five"],
)  # fmt: skip
def test_however_many_groups_the_picture_can_be_read(found):
    picture = padding_picture.documents_figure(found)
    case.assert_readable(picture)
    words = " ".join(text.get_text() for text in picture.findobj(Text))
    assert all(group.data_in_words in words for group in found)


def test_there_is_no_picture_without_a_time():
    failed = groups([], [("dolly", made("documents", status={ALL: "oom"}))])
    assert padding_picture.documents_figure(failed) is padding_picture.documents_figure([]) is None

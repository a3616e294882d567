"""The caption under every picture and table, on made-up runs."""

import pytest
from cases import example_results as example

from report import wording
from report.headline import measured_section
from variants import Lora


def test_the_caption_says_what_was_measured():
    """Leave out liger_kernel, which is not installed."""
    assert wording.caption(example.run((*example.THREE, "vanilla_peft_again"))) == (
        "NVIDIA H200 · torch 2.11.0+cu130 · triton 3.6.0 · transformers 5.17.0 · peft 0.21.0 · "
        "unsloth 2026.10.9 · Qwen2.5-3B · bfloat16 · batch 32 · LoRA rank 32 · "
        "gradient checkpointing on · 24 timed steps each · rounds: 3."
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"accumulate": 4}, "batch 32 · 4 micro-batches a step"),
        ({"lora": Lora(targets=("q_proj", "v_proj"))}, "LoRA rank 32 on q_proj, v_proj ·"),
        ({"lora": Lora(rank=8, dropout=0.05)}, "LoRA rank 8, dropout 0.05"),
        ({"variants": ["vanilla_peft_no_checkpointing"]}, "gradient checkpointing off ·"),
        ({"variants": ["vanilla_peft", "vanilla_peft_no_checkpointing"]}, "on and off ·"),
        ({"base": "nf4"}, "Qwen2.5-3B on NF4 · bfloat16 ·"),
        ({"padded": True}, "batch 32, padded"),
        ({"documents": True}, "batch 32, whole chats in one row"),
        ({"gpu": False}, "no GPU (Intel Xeon)"),
    ],
)
def test_the_caption_tells_what_is_special(changed, said):
    assert said in wording.caption(example.empty(**changed))
    assert said not in wording.caption(example.empty())


@pytest.mark.parametrize(
    ("variant", "releases", "said"),
    [
        ("full_unsloth", ["2026.10.7"], "full Unsloth 2026.10.7"),
        ("unsloth_plain_checkpointing", ["2026.10.9"], "Unsloth 2026.10.9, plain checkpointing"),
        ("full_unsloth", ["2026.10.7", "2026.10.9"], "full Unsloth 2026.10.7 / 2026.10.9"),
        ("full_unsloth", [None], "full Unsloth"),
        ("liger_peft_no_checkpointing", ["0.8.5"], "Liger 0.8.5 without checkpointing"),
        ("fused_mlp", ["2026.10.7"], "fused MLP"),
    ],
)
def test_a_peers_row_names_the_release_that_its_runs_recorded(variant, releases, said):
    runs = [example.empty() for _ in releases]
    for run, release in zip(runs, releases, strict=True):
        package = "liger_kernel" if "liger" in variant else "unsloth"
        run.environment.packages[package] = release
    assert wording.title_in(variant, *runs) == said


def test_a_run_that_went_on_on_another_card_says_so():
    run = example.run(seq_lens=(64,))
    for cell in run.cells:
        cell.card = "0123abcd"
    assert "card" not in wording.caption(run) + measured_section({"": run})
    for cell in run.cells_of(round=2):
        cell.card = "4567cdef"
    assert "NVIDIA H200 (2 cards, one after the other) ·" in wording.caption(run)
    assert "24 steps, 2 cards, Unsloth 2026.10.9:" in measured_section({"": run})


@pytest.mark.parametrize(
    ("seq_lens", "said"), [((64, 512), "each, interleaved 2 at a time ·"), ((64,), "time at 64 ·")]
)
def test_the_caption_tells_where_variants_were_interleaved(seq_lens, said):
    run = example.run(("vanilla_peft", "fused_mlp"), seq_lens=(64, 512))
    run.experiment.interleave = 2
    assert "interleaved" not in wording.caption(run)
    for cell in run.cells:
        cell.turn_steps = 2 if cell.seq_len in seq_lens else None
    assert said in wording.caption(run)

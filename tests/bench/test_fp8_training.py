"""Trainings in bf16 and FP8: seeds that do not go on from each other, outliers that change no
result, and a command that goes on where it stopped."""

import gzip
import json

import pytest
import torch
from cases.graph_case import RecordedStep
from cases.rehearsal_case import ROOT, WITHOUT_GPU
from transformers import Qwen3Config, Qwen3ForCausalLM

import models
from bench import bases, fp8_training, seeds
from bench.training_records import load_training
from bench.weights import materialize
from report import fp8_training as reported
from report.looks import REHEARSAL_NOTICE
from variants import Recipe

pytestmark = WITHOUT_GPU
# vanilla PEFT for bf16
VARIANTS = ["vanilla_peft_no_checkpointing", "fp8_layer_no_checkpointing"]


@pytest.fixture
def command(tmp_path, monkeypatch):
    adamw = torch.optim.AdamW  # of which only the fused one is capturable there
    monkeypatch.setattr(torch.optim, "AdamW", lambda *p, **o: adamw(*p, **{**o, "fused": True}))
    monkeypatch.setattr(fp8_training, "HELD_OUT_BATCHES", 1)
    monkeypatch.setattr(fp8_training, "HELD_OUT_WIDTH", 1)
    chats = tmp_path / "chats.jsonl"
    with (ROOT / "data" / "sft_train.jsonl").open() as published:
        chats.write_text("".join(published.readline() for _ in range(60)))
    smallest = json.loads((ROOT / "configs" / "tiny.json").read_text())
    smallest |= {"num_hidden_layers": 1, "intermediate_size": 64}
    model = tmp_path / "smallest.json"
    model.write_text(json.dumps(smallest))
    folders = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    asked = ["--model", str(model), "--base-steps", "2", "--steps", "2", "--batch-size", "1"]
    return ["--data", str(chats), *folders, *asked]


def trained(command, variant, numbers):
    """The losses and held-out losses of these seeds, one after the other."""
    asked = fp8_training.parse_training(command)
    source, data = fp8_training.checked(asked)
    materialize(source, 0, "cpu")
    settings = fp8_training.begun(asked, source, data).settings
    batches = fp8_training.batches_of(source, data, settings, "cpu")
    runs = seeds.train_seeds(
        "trained", source.folder, variant, numbers, settings, batches.trained_on,
        batches.held_out, lambda _: None,
    )  # fmt: skip
    return [(run.losses, run.held_out) for run in runs]


@pytest.mark.slow
def test_a_seed_gives_the_same_losses_bit_for_bit_whatever_was_trained_before(command):
    first, other, again = trained(command, VARIANTS[1], [0, 1, 0])
    assert first == again
    assert first[1][0] == other[1][0]  # B = 0: the base's own loss
    assert first[1][2] != other[1][2] and first[0] != other[0]


@pytest.mark.slow
def test_held_out_losses_are_those_of_plain_peft_with_the_adapters(command):
    """Before the first step of either, of the base weights alone, which in FP8 have another."""
    ((_, of_plain),), ((_, of_fp8),) = (trained(command, variant, [0]) for variant in VARIANTS)
    assert of_plain[0] == of_fp8[0] and of_plain[2] != of_fp8[2]


def test_so_it_does_in_a_graph_that_is_captured_once(command, monkeypatch):
    """Looks at the held-out part lie between its replays. On the CPU it is the list of operations
    of vanilla PEFT's step."""
    steps = 8
    command = [*command, "--steps", str(steps)]
    (eager,) = trained(command, VARIANTS[0], [1])
    captures, capture = [], RecordedStep._capture
    monkeypatch.setattr(
        RecordedStep, "_capture", lambda *given: captures.append(1) or capture(*given)
    )
    monkeypatch.setattr("fused_lora.step.graph.GraphedStep", RecordedStep)
    monkeypatch.setattr(models, "recipe_of", lambda _: Recipe(checkpointing="none", graph=True))
    first, second, again = trained(command, VARIANTS[0], [0, 1, 0])
    assert first == again != second
    assert second[0] == pytest.approx(eager[0], rel=1e-4)  # the learning rate is rounded to fp32
    assert len(captures) == 1 and len(second[0]) == steps and len(second[1]) == steps + 1


def test_adapters_that_are_left_from_another_seed_stop_it(command, monkeypatch, capsys):
    monkeypatch.setattr(seeds, "_set_B_to_zero", lambda model: None)  # random ones, then
    arguments = [*command, "--variants", VARIANTS[0], "--seeds", "2"]
    assert fp8_training.main(arguments) == 1
    assert "seed 1: it began with a held-out loss of" in capsys.readouterr().err


def rows_and_logits(model, ids):
    """By projection, how many times a row's mean its largest is in the median; and the logits."""
    found = {}

    def noting(name):
        def note(module, given):
            x = given[0].float().abs()
            found[name] = (x.amax(-1) / x.mean(-1)).median().item()

        return note

    hooks = [
        module.register_forward_pre_hook(noting(name.rpartition(".")[2]))
        for name, module in model.model.layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    for hook in hooks:
        hook.remove()
    return found, logits


def test_outliers_are_a_hundred_times_the_mean_and_change_no_result():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).bfloat16()
    ids = torch.randint(64, (2, 48))
    before, wanted = rows_and_logits(model, ids)
    bases.plant_outliers(model)
    after, logits = rows_and_logits(model, ids)
    assert torch.equal(logits, wanted)
    assert max(before.values()) < 20 and before.keys() == after.keys() and len(after) == 7
    assert after.pop("o_proj") < 20
    assert min(after.values()) > 80


def test_a_family_without_outliers_is_refused_at_once(tmp_path, command, capsys):
    model = tmp_path / "gemma.json"  # whose norms multiply by 1 + weight
    smallest = json.loads((tmp_path / "smallest.json").read_text())
    model.write_text(json.dumps(smallest | {"model_type": "gemma", "head_dim": 16}))
    assert fp8_training.main([*command, "--model", str(model)]) == 2
    assert capsys.readouterr().err.endswith("llama, mistral, qwen2, qwen3, not in gemma\n")
    assert not (tmp_path / "cache" / "models").exists()


def test_the_command_goes_on_where_it_stopped(tmp_path, command, monkeypatch, capsys):
    """And what it writes can be drawn. Both variants are vanilla PEFT, which takes a moment."""
    variants = [VARIANTS[0], "vanilla_peft_again_no_checkpointing"]
    arguments, path = [*command, "--variants", *variants], tmp_path / "out" / "fp8_training.json"
    original, trained = seeds.train_seeds, []

    def stopped_after_three(*asked):
        for run in original(*asked):
            yield run
            trained.append((run.base, run.variant, run.seed))
            if len(trained) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(seeds, "train_seeds", stopped_after_three)
    assert fp8_training.main(arguments) == 130
    assert len(load_training(path).runs) == 3
    assert fp8_training.main(arguments) == 0
    wanted = {(b, v, s) for b in ("trained", "outliers") for v in variants for s in (0, 1)}
    assert set(trained) == wanted and len(trained) == len(wanted)
    training = load_training(path)
    assert [(r.base, r.variant, r.seed) for r in training.runs] == trained
    assert all(len(r.losses) == 2 and list(r.held_out) == [0, 1, 2] for r in training.runs)
    capsys.readouterr()

    assert fp8_training.main([*arguments, "--steps", "3"]) == 2
    line = capsys.readouterr().err
    assert "other settings or another GPU: give another --out" in line and line.count("\n") == 1
    training.bases["trained"] = "0"
    fp8_training.save_training(path, training)
    assert fp8_training.main([*arguments, "--seeds", "3"]) == 1
    assert "other base weights" in capsys.readouterr().err

    packed = tmp_path / "fp8_training.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert reported.draw_fp8_training([load_training(packed)], tmp_path / "picture.png")
    assert reported.fp8_training_finding(training) == REHEARSAL_NOTICE


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--steps", "0"], "--steps 0: give 1 or more"),
        (["--variants", "fused_layr"], "unknown; did you mean"),
        (["--model", "configs/none.json"], "no such file"),
        (["--data", "none.jsonl"], "no file to read"),
    ],
)
def test_what_is_asked_for_wrongly_is_told_in_one_line(asked, said, command, capsys):
    assert fp8_training.main([*command, *asked]) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_a_file_that_is_none_of_ours_is_told(tmp_path):
    path = tmp_path / "fp8_training.json"
    path.write_text('{"runs": []}')
    with pytest.raises(ValueError, match="restore it, or delete it"):
        load_training(path)

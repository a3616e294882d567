"""A rehearsal of bench.families."""

import json

import pytest
from cases.rehearsal_case import WITHOUT_GPU, InThread
from cases.table_case import rows_in
from transformers import AutoConfig

from bench import families, processes

pytestmark = WITHOUT_GPU
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIZES = ("--tokens", "4", "--batch-size", "1", *(f"--set={k}={v}" for k, v in SMALL.items()))


@pytest.mark.slow
def test_each_run_of_a_family_has_a_row(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_Process", InThread)
    monkeypatch.setattr(families, "WARM_UP", 2)
    monkeypatch.setattr(families, "PROFILED", 1)
    asked = ["olmo3", "--layers", "2", "--cache", str(tmp_path), *SIZES]
    assert families.main(asked) == 1
    printed = capsys.readouterr().out
    assert "layer: 2 of 2 layers fused" in printed
    rows = rows_in(printed[printed.rindex("| family") :])
    assert [row["run"] for row in rows] == [*families.RUNS]
    plain, unsloth, fused = rows
    assert "No module named 'unsloth'" in unsloth["GPU ms"]
    assert float(fused["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-4)
    assert fused["adapters, M"] == plain["adapters, M"]


@pytest.mark.parametrize(
    ("family", "experts", "names"),
    [
        ("qwen3_moe", False, ["down_proj", "gate_up_proj"]),
        ("qwen3_moe", True, ["down_proj", "gate_up_proj"]),
        ("gpt_oss", False, []),
        ("gpt_oss", True, ["down_proj", "gate_up_proj"]),
        ("olmo3", False, []),
    ],
)
def test_unsloth_adapts_the_experts_that_peft_adapts(family, experts, names, tmp_path):
    changed = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "pad_token_id": 0}
    folder = families.write_config(family, 1, changed, tmp_path).config.parent
    (folder / "config.json").write_text(next(folder.glob("*-*.json")).read_text())
    assert families.adapted_experts(folder, experts) == names


def test_two_files_of_one_name_are_two_models(tmp_path):
    sources = []
    for hidden in (32, 64):
        path = tmp_path / str(hidden) / "config.json"
        path.parent.mkdir()
        values = SMALL | {"model_type": "olmo3", "num_hidden_layers": 1, "hidden_size": hidden}
        path.write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
        sources.append(families.write_config(str(path), None, {}, tmp_path))
    written = [json.loads(source.config.read_text()) for source in sources]
    assert [one["hidden_size"] for one in written] == [32, 64]
    assert sources[0].folder != sources[1].folder
    assert not any("quantization_config" in one for one in written)


def test_values_for_each_layer_are_cut_with_the_layers_and_may_be_set(tmp_path):
    config = AutoConfig.for_model("gemma4_text")
    cut = families.first_layers(config, 12)
    assert cut["num_hidden_layers"] == len(cut["layer_types"]) == 12
    assert cut["layer_types"] == config.layer_types[:12]
    assert AutoConfig.for_model(**cut).to_dict() == cut
    types = ["sliding_attention", "full_attention"]
    pairs = [f"layer_types={json.dumps(types)}", "head_dim=128"]
    source = families.write_config("gemma4_text", 2, families.parse_changes(pairs), tmp_path)
    written = json.loads(source.config.read_text())
    assert (written["layer_types"], written["head_dim"]) == (types, 128)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["nobody"], "nobody: transformers has no such causal language model"),
        (["t5"], "t5: transformers has no such causal language model"),
        (["nowhere.json"], "no such file"),
        (["qwen3_5", "--layers", "2"], "--layers needs a text model; give qwen3_5_text"),
        (["olmo3", "--layers", "0"], "--layers is 0: give 1 or more"),
        (["olmo3", "--layers", "100"], "--layers is 100: olmo3 has 32"),
        (["olmo3", "--set", "hidden_size"], "--set hidden_size: give NAME=VALUE"),
        (["olmo3", "--layers", "1", "--experts"], "olmo3: it has no experts.gate_up_proj; leave"),
        (["olmo3", "--set", "hidden=5"], "--set hidden: the configuration of olmo3 has no such"),
        (["olmo3", "--set", "hidden_size=0"], "olmo3: transformers does not take these sizes ("),
    ],
)
def test_a_family_that_makes_no_sense_is_refused_in_one_line(asked, words, capsys, tmp_path):
    assert families.main([*asked, "--cache", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err

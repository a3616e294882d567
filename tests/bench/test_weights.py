import shutil
from pathlib import Path

import pytest
import torch
from cases.one_line import refused
from transformers import AutoModelForCausalLM

from bench import weights
from bench.weights import materialize, resolve
from variants import TARGETS

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny.json"


def make(cache, seed=0):
    source = resolve(str(TINY), cache, seed)
    materialize(source, seed, "cpu")
    return source


def tensors(source):
    return AutoModelForCausalLM.from_pretrained(source.folder).state_dict()


def test_random_weights_depend_on_the_seed_alone(tmp_path):
    first, again, other = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "a", seed=1)
    assert first.folder != other.folder
    one, two, three = tensors(first), tensors(again), tensors(other)
    assert all(torch.equal(one[name], two[name]) for name in one)
    gate = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(one[gate], three[gate]) and one[gate].dtype == torch.bfloat16
    # no bias and no norm is what a forgetful kernel would assume
    bias, norm = one["model.layers.0.self_attn.q_proj.bias"], one["model.norm.weight"]
    assert bias.abs().min() > 0 and min(len(bias.unique()), len(norm.unique())) > 9


def test_what_is_there_is_not_made_again_and_is_a_model_of_its_own(tmp_path):
    made = make(tmp_path)
    written = (made.folder / "model.safetensors").stat().st_mtime_ns
    make(tmp_path)
    assert (made.folder / "model.safetensors").stat().st_mtime_ns == written
    source = resolve(str(made.folder), tmp_path, 0)
    assert (source.folder, source.weights) == (made.folder, "checkpoint")
    assert source.tokenizer == made.folder / "tokenizer.json"


def test_an_interrupted_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path)
    assert not any(tmp_path.rglob("*.safetensors"))


def test_random_weights_are_deleted_and_a_checkpoint_is_not(tmp_path):
    source = make(tmp_path)
    made = tmp_path / "checkpoint"
    shutil.copytree(source.folder, made)
    theirs = resolve(str(made), tmp_path, 0)
    assert weights.discard(theirs) == "" and theirs.size_bytes()
    said = weights.discard(source)
    assert said.startswith("Deleted the random weights of tiny (") and not source.is_there()
    assert weights.discard(source) == ""  # they are drawn again by the same command


@pytest.mark.parametrize(
    ("name", "parameters"),  # as their authors count them
    [
        ("qwen2.5-7b", 7_615_616_512),
        ("llama3-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-0.6b", 596_049_920),
        ("llama3.2-1b", 1_235_814_400),
    ],
)
def test_our_architectures_are_what_they_are_called(name, parameters, tmp_path):
    source = resolve(str(TINY.with_name(f"{name}.json")), tmp_path, 0)
    assert weights.projections(source) == list(TARGETS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(weights._architecture(source))
    assert model.num_parameters() == parameters


@pytest.mark.parametrize("part", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_part_says_which(tmp_path, part):
    folder = tmp_path / "copy"
    shutil.copytree(make(tmp_path / "cache").folder, folder)
    (folder / part).unlink()
    wanted = part.replace("model.safetensors", r"\*\.safetensors")
    with pytest.raises(ValueError, match=f"has no {wanted}"):
        resolve(str(folder), tmp_path, 0)


@pytest.mark.parametrize("kept", [0, 1000, -1], ids=["empty", "half a header", "a byte short"])
def test_weights_that_were_cut_off_are_named(tmp_path, kept):
    file = make(tmp_path).folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    said = refused(resolve, str(file.parent), tmp_path, 0)
    assert said.startswith(f"--model {file}: not a whole safetensors file (")


def test_a_hub_name_that_cannot_be_had_says_what_to_do():
    with pytest.raises(ValueError, match=r"could not be downloaded .* give a local folder"):
        resolve("nobody/nothing", Path("unused"), 0)

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import weights
from bench.weights import materialize, read_config, resolve

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
    name = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(one[name], three[name])


def test_biases_and_norms_are_not_what_a_forgetful_kernel_would_assume(tmp_path):
    state = tensors(make(tmp_path))
    assert state["model.layers.0.self_attn.q_proj.bias"].abs().min() > 0
    assert (state["model.norm.weight"] - 1).abs().max() > 0
    assert state["model.layers.0.mlp.gate_proj.weight"].dtype == torch.bfloat16


def test_what_is_there_is_not_made_again(tmp_path):
    source = make(tmp_path)
    made = (source.folder / "model.safetensors").stat().st_mtime_ns
    make(tmp_path)
    assert (source.folder / "model.safetensors").stat().st_mtime_ns == made


def test_an_interrupted_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(weights.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path)
    assert not any(tmp_path.rglob("*.safetensors"))


def test_a_saved_checkpoint_is_a_model_too(tmp_path):
    made = make(tmp_path)
    source = resolve(str(made.folder), tmp_path, 0)
    assert source.folder == made.folder
    assert source.weights == "checkpoint"
    assert source.tokenizer == made.folder / "tokenizer.json"


@pytest.mark.parametrize("part", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_part_says_which(tmp_path, part):
    folder = tmp_path / "copy"
    shutil.copytree(make(tmp_path / "cache").folder, folder)
    (folder / part).unlink()
    wanted = part.replace("model.safetensors", r"\*\.safetensors")
    with pytest.raises(ValueError, match=f"has no {wanted}"):
        resolve(str(folder), tmp_path, 0)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"configs/nothing.json: no such file; there are: "):
        resolve("configs/nothing.json", tmp_path, 0)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(ValueError, match="not a model's configuration"):
        read_config(resolve(str(broken), tmp_path, 0))
    with pytest.raises(ValueError, match="no such folder"):
        resolve("./nowhere", tmp_path, 0)


def test_a_hub_name_that_cannot_be_had_says_what_to_do():
    with pytest.raises(ValueError, match=r"could not be downloaded .* give a local folder"):
        resolve("nobody/nothing", Path("unused"), 0)

"""A rehearsal of bench.sharded."""

import os
import time

import pytest
import torch
from cases.four_bit_case import dequantised, quantised
from cases.ranks import on_ranks
from cases.reference import relative_error
from peft import PeftModel
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from bench.options import HERE
from bench.sharded import main, parsed, train_each
from bench.sharded_model import DTYPE, built_model, save_adapters

TINY = str(HERE / "configs" / "tiny.json")
TOKENS = torch.arange(8)[None]


def asked_of(rank, *more):
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun does
    sizes = ["--tokens", "4", "--warm-up", "0", "--steps", "1", "--lora-rank", "2"]
    return parsed(["--model", TINY, *sizes, *more])


def rehearse(rank, device, base, wrapper):
    return train_each(asked_of(rank, "--base", base, "--wrapper", wrapper), torch.device(device))


TRIED = [
    ("bf16", "shard_base"), ("bf16", "sharded"), ("nf4", "sharded"), ("nf4", "replicated"),
    ("nf4", "alone"),
]  # fmt: skip


@pytest.mark.slow("nf4-sharded")
@pytest.mark.parametrize(("base", "wrapper"), TRIED)
def test_a_model_trains_fused_as_it_does_plain(base, wrapper, monkeypatch):
    monkeypatch.setattr("bench.sharded_model.DTYPE", torch.bfloat16)  # as on a GPU
    for losses in on_ranks(2, rehearse, base, wrapper):
        assert losses["fused"] == pytest.approx(losses["plain"], rel=1e-2)


# --- a checkpoint ---------------------------------------------------------------------------------


def peak_bytes(run):
    """Return what a function returns, and the most bytes of PyTorch's that were held at once."""
    with MemTracker() as tracker:
        found = run()
    by_device = tracker.get_tracker_snapshot("peak")
    return found, sum(one["Total"] for device, one in by_device.items() if device.type != "meta")


def loaded_each(rank, device, folder, out):
    return [loaded(rank, device, folder, *how, out / "-".join(how)) for how in AT_MOST]


def loaded(rank, device, folder, base, wrapper, out):
    """Load a checkpoint by shares, set the adapters, compute logits and save. Return the logits,
    and the most bytes that the base took."""
    asked = asked_of(rank, "--model", str(folder), "--base", base, "--wrapper", wrapper)
    model, peak = peak_bytes(lambda: built_model(asked, torch.device(device)))
    torch.manual_seed(rank if wrapper == "sharded" else 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = parameter.to_local() if wrapper == "sharded" else parameter
            if "lora_" in name:
                peak -= own.nbytes
            if "lora_B" in name:
                own.normal_(0.0, 5.0)
    logits = logits_of(model.eval())
    save_adapters(model, out)
    return logits, peak


def logits_of(model):
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # as in `quantised`
            module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        return model(input_ids=TOKENS.to(model.device)).logits.float().cpu()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint in shards: 8 layers, and few tokens."""
    folder = tmp_path_factory.mktemp("checkpoint")
    layers = {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}
    config = AutoConfig.from_pretrained(TINY, vocab_size=64, **layers)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="500KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


# half of the whole; that, a layer and the embedding; half of its 4 bits, and of one layer half, and
# a whole matrix to be quantised
AT_MOST = {
    ("bf16", "sharded"): 0.6,
    ("bf16", "shard_base"): 0.7,
    ("nf4", "sharded"): 0.5 * 0.5 / DTYPE.itemsize + 0.15,
}


@pytest.mark.slow
def test_ranks_load_a_checkpoint_by_shares_and_one_merges_what_they_save(saved, tmp_path):
    ranks = on_ranks(2, loaded_each, saved, tmp_path, fresh=True)  # MemTracker crashes in a fork
    for how, (first, first_peak), (second, second_peak) in zip(AT_MOST, *ranks, strict=True):
        assert torch.equal(first, second)
        plain = AutoModelForCausalLM.from_pretrained(saved, dtype=DTYPE)
        whole = sum(p.nbytes for p in plain.parameters())
        assert max(first_peak, second_peak) < AT_MOST[how] * whole
        unadapted = logits_of(plain)
        if "nf4" in how:
            plain = dequantised(quantised(plain))
        merged = PeftModel.from_pretrained(plain, tmp_path / "-".join(how)).merge_and_unload()
        at_most = 1e-4 if DTYPE.itemsize == 4 else 0.05
        assert relative_error(logits_of(merged), first) < at_most
        assert relative_error(unadapted, first) > 0.4


# a model, what else is asked for -> the words that refuse it
REFUSED = {
    "nowhere": ("nowhere", (), "no such file"),
    "a folder without a config": ("unconfigured", (), "no config.json"),
    "a folder without weights": ("weightless", (), "no *.safetensors"),
    "a model of another kind": ("gpt2.json", (), "cannot be trained here"),
    "selective without its memory": (TINY, ("--checkpoint", "selective"), "needs checkpoint_gib"),
    "no steps": (TINY, ("--steps", "0"), "--steps is 0: give 1 or more"),
    "a graph beside FSDP2": (TINY, ("--runs", "graph"), "give --wrapper ddp or shard_base"),
    "4 bits, which stay whole": (
        TINY,
        ("--base", "nf4", "--wrapper", "shard_base"),
        "stay whole; give sharded",
    ),
    "an unknown base": (TINY, ("--base", "int8"), "invalid choice: 'int8'"),
    "without torchrun": (TINY, (), "with torchrun"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_start_says_so(why, monkeypatch, tmp_path, capsys):
    model, more, words = REFUSED[why]
    for name in (
        "unconfigured/model.safetensors",
        "weightless/config.json",
        "weightless/model.bin",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "gpt2.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(["--model", model, *more]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


def test_other_ranks_leave_an_error_to_rank_0(monkeypatch, capsys):
    def ended(seconds):
        assert seconds > 1.0
        raise KeyboardInterrupt  # as torchrun ends them

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", ended)
    with pytest.raises(KeyboardInterrupt):
        main(["--model", "nowhere"])
    assert not capsys.readouterr().err

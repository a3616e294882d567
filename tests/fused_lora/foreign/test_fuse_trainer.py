"""A fused model in transformers' Trainer and TRL's SFTTrainer, which look at more of the model than
your own loop does."""

import copy
import inspect
import os
import pickle
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from cases import layer_case
from cases.fused_case import ALL
from cases.peft_models import base_model, peft_model
from cases.reference import BUDGET, assert_at_most, assert_within_budget, relative_error, seeded
from cases.trl_case import tokenizer
from peft import LoraConfig, inject_adapter_in_model
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.foreign.checkpointing import policy_of
from fused_lora.kernels.causal_attention import fits_heads
from fused_lora.kernels.documents import is_documents
from fused_lora.loss.log_probs import LinearLogProbs

WHOLE = Fusion(layer=True, rms_norm=True, cross_entropy=True, checkpoint="full")
ONE_LAYER = {"num_hidden_layers": 1}
TRAINERS = ("Trainer", "SFTTrainer")
SETTINGS = {
    "resumed, evaluated, accumulated, checkpointed": {
        "save_strategy": "steps", "save_steps": 2, "from_checkpoint": "checkpoint-2",
        "eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
    # documents in a row: flattened by transformers' collator, or as TRL has it
    "flattened": {"data_collator": DataCollatorWithFlattening()},
    "packing": {"packing": True, "max_length": 10, "pad_to_multiple_of": None},
    "padding_free": {"padding_free": True, "max_length": None, "pad_to_multiple_of": None},
    # switches TF32 on for the whole process unless told otherwise
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager", "tf32": False},
}  # fmt: skip
PACKED = {"flattened", "packing", "padding_free"}
NOT_OF = {"Trainer": {"packing", "padding_free"}, "SFTTrainer": {"flattened"}}
TRIED = [
    # torch.compile takes as long as all the others
    pytest.param(kind, setting, marks=pytest.mark.exhaustive if "compile" in setting else ())
    for kind in TRAINERS
    for setting in SETTINGS
    if setting not in NOT_OF[kind]
]
# What a trainer logs that no layer computes: times, settings and plain arithmetic.
NOT_COMPUTED = ("runtime", "per_second", "learning_rate", "epoch", "step", "total_flos")


class Trained(NamedTuple):
    logged: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def rows(model):
    """Return rows of five tokens. The model itself wrote the end of every second row, which makes
    some predictions right. No forward has seen their last column."""
    device = next(model.parameters()).device
    tokens = torch.randint(96, (12, 5), generator=seeded(3)).to(device)
    with torch.no_grad():
        for position in (2, 3, 4):
            tokens[::2, position] = model(tokens[::2, :position]).logits[:, -1].argmax(-1)
    return [
        {"input_ids": row, "labels": [-100, -100, *row[2:]], "source": "book"}
        for row in tokens.tolist()
    ]


def trainer_of(kind, model, data, folder, **options):
    """Return a trainer that takes three steps of two rows unless told otherwise."""
    settings = {
        "output_dir": str(folder), "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "use_cpu": next(model.parameters()).device.type == "cpu", "bf16": False,
        "gradient_checkpointing": False, "save_strategy": "no",
    } | options  # fmt: skip
    if kind == "Trainer":
        collator = settings.pop("data_collator", None)
        return Trainer(
            model, TrainingArguments(**settings), collator, train_dataset=data,
            eval_dataset=data[:4],
        )  # fmt: skip
    trl = pytest.importorskip("trl", reason="wants trl, of dev/requirements/dev.txt")
    from datasets import Dataset

    settings.setdefault("pad_to_multiple_of", 5)
    shorter = [
        {name: one[name][: 5 - index % 2] for name in ("input_ids", "labels")}
        for index, one in enumerate(data)
    ]
    return trl.SFTTrainer(
        model, trl.SFTConfig(**settings), processing_class=tokenizer(),
        train_dataset=Dataset.from_list(shorter), eval_dataset=Dataset.from_list(shorter[:4]),
    )  # fmt: skip


def train(kind, model, data, folder, from_checkpoint=None, **options):
    """Train, and return what was logged and the adapters. from_checkpoint: the checkpoint to resume
    from afterwards, which has to restore the adapters."""
    with patch.dict(os.environ):  # torch_compile leaves variables behind
        trainer_of(kind, model, data, folder, **options).train() if from_checkpoint else None
        trainer = trainer_of(kind, model, data, folder, **options)
        if from_checkpoint:
            for parameter in adapters_of(model).values():
                parameter.data.zero_()
        trainer.train(from_checkpoint and str(folder / from_checkpoint))
    logged = [computed(entry) for entry in trainer.state.log_history]
    return Trained(logged, {n: p.detach().clone() for n, p in adapters_of(model).items()})


def computed(entry):
    return {name: one for name, one in entry.items() if not name.endswith(NOT_COMPUTED)}


def adapters_of(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def assert_trained_alike(got, want):
    assert [entry.keys() for entry in got.logged] == [entry.keys() for entry in want.logged]
    for entry, wanted in zip(got.logged, want.logged, strict=True):
        assert entry == pytest.approx(wanted, rel=1e-5, abs=1e-4)
    assert got.weights.keys() == want.weights.keys()
    for name, parameter in want.weights.items():
        # an update moves each number by about the learning rate; rounding may turn a tiny one
        off = (got.weights[name] - parameter).abs() > 1e-5
        assert off.float().mean() < 0.01, name


# A layer that steps aside would warn.
@pytest.mark.slow("Trainer-flattened")
@pytest.mark.filterwarnings("error:a fused ")
@pytest.mark.parametrize(("kind", "setting"), TRIED)
def test_a_trainer_trains_a_fused_model_as_plain_peft(kind, setting, tmp_path, device, monkeypatch):
    sizes = ONE_LAYER | ({"head_dim": 32} if setting in PACKED else {})
    plain = layer_case.peft_model(device, config=sizes)
    fused, start, data = (copy.deepcopy(plain), copy.deepcopy(plain), rows(plain))
    fuse(fused)
    ran = layer_case.operands_of_calls(monkeypatch)
    options = dict(SETTINGS[setting])
    got = train(kind, fused, data, tmp_path / "fused", **options)
    assert ran and "layer" in report(fused).fused
    attended_to_documents = any(
        mask is not None and is_documents(mask) for _, _, _, mask, *_ in ran
    )
    # in fp32 only interpreted kernels attend to documents; on a GPU documents become a mask
    assert attended_to_documents is (setting in PACKED and fits_heads(torch.float32, 32))
    if setting == "torch_compile":
        options = {}  # the same, in a tenth of the time
    want = train(kind, plain, data, tmp_path / "plain", **options)
    assert_trained_alike(got, want)
    for name, parameter in adapters_of(start).items():
        assert not torch.equal(want.weights[name], parameter), name


@pytest.mark.slow
@pytest.mark.filterwarnings("error:a fused ")
@pytest.mark.parametrize(
    "kind", ["Trainer", pytest.param("SFTTrainer", marks=pytest.mark.exhaustive)]
)
def test_bf16_is_as_near_to_the_truth_as_plain_peft(kind, tmp_path, device, monkeypatch):
    """Base weights in bf16, adapters in fp32, and the autocast that accelerate puts around both."""
    plain = layer_case.peft_model(device, dtype=torch.bfloat16, config=ONE_LAYER)
    data, fused, truth = rows(plain), copy.deepcopy(plain), copy.deepcopy(plain).float()
    start = torch.cat([p.detach().flatten() for p in adapters_of(truth).values()])
    fuse(fused)
    ran = layer_case.operands_of_calls(monkeypatch)
    losses, moved = [], []
    for model in (fused, plain, truth):
        done = train(kind, model, data, tmp_path, bf16=model is not truth)
        losses.append(torch.tensor([one["loss"] for one in done.logged if "loss" in one]))
        moved.append(torch.cat([p.flatten() for p in done.weights.values()]) - start)
    assert ran and len(losses[0]) == 3
    assert_within_budget("what the adapters moved", *moved)
    got, eager = (relative_error(one, losses[-1]) for one in losses[:2])
    assert_at_most(got, BUDGET * max(eager, torch.finfo(torch.bfloat16).eps / 5), "losses")


def test_what_a_trainer_switches_on_is_what_fuse_was_told(tmp_path, device):
    """The trainer switches checkpointing on, and the policy given to `fuse` carries it out."""
    fused, plain, _ = layer_case.pair(device, WHOLE, config=ONE_LAYER)
    options = {"gradient_checkpointing": True, "max_steps": 1}
    got, want = (
        train("Trainer", model, rows(plain), tmp_path, **options) for model in (fused, plain)
    )
    assert policy_of(layer_case.layer_of(fused))
    assert_trained_alike(got, want)


def test_a_fused_forward_has_the_signature_of_the_class(device):
    """The Trainer keeps the columns that it names, and generate() looks for attention_mask."""
    plain = peft_model(device)
    fused = copy.deepcopy(plain)
    fuse(fused, Fusion(**ALL))
    seen = set()
    for one in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        for name, module in one.named_modules():
            if "forward" in vars(module):
                wanted = inspect.signature(plain.get_submodule(name).forward)
                assert inspect.signature(module.forward) == wanted, name
                seen.add(type(module).__name__)
    assert seen >= {"Qwen2ForCausalLM", "Qwen2DecoderLayer", "Qwen2Attention", "Qwen2MLP"}
    assert "input_ids" in inspect.signature(fused.get_base_model().forward).parameters


def test_data_parallel_which_the_trainer_uses_on_several_gpus_is_refused_in_words(device):
    fused, plain, _ = layer_case.pair(device, Fusion(checkpoint="full"))
    for model in (fused, copy.deepcopy(fused)):
        with pytest.raises(RuntimeError, match="start one process per GPU with torchrun"):
            # as torch.nn.parallel.replicate does, which needs GPUs
            [module._replicate_for_data_parallel() for module in model.modules()]
    unfuse(fused)
    assert [vars(module).keys() for module in fused.modules()] == [
        vars(module).keys() for module in plain.modules()
    ]
    assert type(fused._replicate_for_data_parallel()) is type(plain)


def test_a_forward_that_accelerate_wrapped_itself_says_what_to_do(tmp_path, device):
    """accelerate takes a method's function and binds it to the model. If get_peft_model made the
    model, that is PEFT's forward. If PEFT has not wrapped the model, it is the fused loss."""
    model = base_model(device, dtype=torch.bfloat16)
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)
    other = copy.deepcopy(model)
    fuse(other, Fusion(rms_norm=True))
    assert train("Trainer", other, rows(model), tmp_path, bf16=True).logged
    fuse(model, Fusion(cross_entropy=True))
    with pytest.raises(RuntimeError, match=r"give the trainer what peft\.get_peft_model returns"):
        train("Trainer", model, rows(model), tmp_path, bf16=True)


@pytest.mark.filterwarnings("error:a fused ")
@pytest.mark.parametrize("fuse_first", [True, False])
def test_a_fused_model_answers_for_trls_head_in_either_order(fuse_first, tmp_path, device):
    plain = layer_case.peft_model(device, config=ONE_LAYER)
    fused, data, ran = copy.deepcopy(plain), rows(plain), []
    want = train("SFTTrainer", plain, data, tmp_path / "plain")
    if fuse_first:
        fuse(fused, WHOLE)
    trainer = trainer_of("SFTTrainer", fused, data, tmp_path / "fused")
    if not fuse_first:
        fuse(fused, WHOLE)
    assert report(fused).counts["cross_entropy"] == "1 of 1 losses"
    with patch.object(LinearLogProbs, "backward", counted(LinearLogProbs.backward, ran)):
        trainer.train()
    assert len(ran) == 3  # steps
    logged = [computed(entry) for entry in trainer.state.log_history]
    weights = {name: p.detach() for name, p in adapters_of(fused).items()}
    assert_trained_alike(Trained(logged, weights), want)


def counted(function, calls):
    return staticmethod(lambda *given: calls.append(given) or function(*given))

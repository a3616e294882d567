"""A fused model in transformers' Trainer and TRL's SFTTrainer, which look at more of the model than
your own loop does. (`test_recipes.py` has the scripts that people train with.)"""

import copy
import inspect
import os
import pickle
from functools import partial
from unittest.mock import patch

import pytest
import torch
from cases import layer_case, trl_case
from cases.fused_case import ALL, beside
from cases.peft_models import base_model, peft_model
from cases.reference import seeded
from peft import LoraConfig, inject_adapter_in_model
from test_recipes import assert_alike, train
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.foreign.checkpointing import policy_of
from fused_lora.kernels.causal_attention import fits_heads
from fused_lora.kernels.document_bounds import is_documents

WHOLE = Fusion(layer=True, rms_norm=True, cross_entropy=True, checkpoint="full")
ONE_LAYER = {"num_hidden_layers": 1}
SETTINGS = {
    "resumed, evaluated, accumulated, checkpointed": {
        "save_strategy": "steps", "save_steps": 2, "from_checkpoint": "checkpoint-2",
        "eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
    # documents in a row: flattened by transformers' collator, or as TRL has it
    "flattened": {"data_collator": DataCollatorWithFlattening()},
    "padding_free": {"padding_free": True, "max_length": None, "pad_to_multiple_of": None},
    # switches TF32 on for the whole process unless told otherwise
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager", "tf32": False},
}  # fmt: skip
PACKED = ("flattened", "padding_free")
TRIED = [
    # torch.compile takes as long as all the others
    pytest.param(one, marks=pytest.mark.exhaustive if one == "torch_compile" else ())
    for one in SETTINGS
]


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


def trainer_of(model, data, folder, **options):
    """Return a trainer that takes three steps of two rows unless told otherwise."""
    if "padding_free" in options:
        return trl_case.trainer_of("SFT", model, folder, max_steps=3, **options)
    settings = {
        "output_dir": str(folder), "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.1, "optim": "sgd",
        "use_cpu": next(model.parameters()).device.type == "cpu", "bf16": False,
        "gradient_checkpointing": False, "save_strategy": "no",
    } | options  # fmt: skip
    collator = settings.pop("data_collator", None)
    return Trainer(
        model, TrainingArguments(**settings), collator, train_dataset=data, eval_dataset=data[:4]
    )


def train_on(data, model, folder, from_checkpoint=None, **options):
    """Train. from_checkpoint: the checkpoint to resume from afterwards, which has to restore the
    adapters."""
    with patch.dict(os.environ):  # torch_compile leaves variables behind
        if from_checkpoint:
            trainer_of(model, data, folder, **options).train()
        trainer = trainer_of(model, data, folder, **options)
        if from_checkpoint:
            for parameter in filter(lambda one: one.requires_grad, model.parameters()):
                parameter.data.zero_()
            trainer.train = partial(trainer.train, str(folder / from_checkpoint))
        return train(trainer)


# A layer that steps aside would warn.
@pytest.mark.slow("flattened")
@pytest.mark.filterwarnings("error:a fused ")
@pytest.mark.parametrize("setting", TRIED)
def test_a_trainer_trains_a_fused_model_as_plain_peft(setting, tmp_path, device, monkeypatch):
    sizes = ONE_LAYER | ({"head_dim": 32} if setting in PACKED else {})
    plain = layer_case.peft_model(device, config=sizes)
    fused, data = copy.deepcopy(plain), rows(plain)
    fuse(fused)
    ran = layer_case.operands_of_calls(monkeypatch)
    options = dict(SETTINGS[setting])
    got = train_on(data, fused, tmp_path / "fused", **options)
    assert ran and "layer" in report(fused).fused
    attended_to_documents = any(
        block.mask is not None and is_documents(block.mask) for *_, (block, _) in ran
    )
    # in fp32 only interpreted kernels attend to documents; on a GPU documents become a mask
    assert attended_to_documents is (setting in PACKED and fits_heads(torch.float32, 32))
    if setting == "torch_compile":
        options = {}  # the same, in a tenth of the time
    assert_alike(got, train_on(data, plain, tmp_path / "plain", **options))


def test_what_a_trainer_switches_on_is_what_fuse_was_told(tmp_path, device):
    """The trainer switches checkpointing on, and the policy given to `fuse` carries it out."""
    fused, plain, _ = layer_case.pair(device, WHOLE, config=ONE_LAYER)
    options = {"gradient_checkpointing": True, "max_steps": 1}
    data = rows(plain)
    assert_alike(*(train_on(data, model, tmp_path, **options) for model in (fused, plain)))
    assert policy_of(layer_case.layer_of(fused))


def test_a_fused_forward_has_the_signature_of_the_class(device):
    """The Trainer keeps the columns that it names, and generate() looks for attention_mask."""
    fused, plain, _ = beside(peft_model(device), Fusion(**ALL))
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
    assert train_on(rows(model), other, tmp_path, bf16=True)
    fuse(model, Fusion(cross_entropy=True))
    with pytest.raises(RuntimeError, match=r"give the trainer what peft\.get_peft_model returns"):
        train_on(rows(model), model, tmp_path, bf16=True)

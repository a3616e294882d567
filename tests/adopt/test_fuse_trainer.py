"""A fused model in transformers' Trainer, which looks at more of it than one's own loop does."""

import copy
import inspect
import pickle

import layer_case
import pytest
import torch
from fused_case import ALL
from peft_models import peft_model
from transformers import Trainer, TrainingArguments

from fused_lora import Fusion, fuse, unfuse
from fused_lora.step.checkpoint import policy_of

WHOLE = Fusion(layer=True, rms_norm=True, cross_entropy=True, checkpoint="full")


def train(model, folder, **options):
    """Two updates of two batches each; the losses and what was trained."""
    rows = torch.randint(96, (8, 5), generator=torch.Generator().manual_seed(3)).tolist()
    data = [{"input_ids": row, "labels": [-100, -100, *row[2:]], "source": "book"} for row in rows]
    arguments = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=next(model.parameters()).device.type == "cpu", **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return losses, trained


@pytest.mark.parametrize(
    "fusion", [Fusion(**ALL), WHOLE], ids=["all", "whole layers, checkpointed"]
)  # fmt: skip
def test_the_trainer_trains_a_fused_model_as_it_does_any_other(fusion, tmp_path, device):
    """With a column that no forward knows, which it drops, and checkpointing switched on by it."""
    fused, plain, _ = layer_case.pair(device, fusion)
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}
    losses, trained = train(fused, tmp_path, gradient_checkpointing=True)
    wanted_losses, wanted = train(plain, tmp_path, gradient_checkpointing=True)
    assert len(losses) == 2
    assert bool(policy_of(layer_case.layer_of(fused))) == bool(fusion.checkpoint)
    assert losses == pytest.approx(wanted_losses, abs=1e-4)
    assert trained.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert not torch.equal(parameter, start[name]), name
        # an update moves each number by about the learning rate; rounding may turn a tiny one
        off = (trained[name] - parameter).abs() > 1e-5
        assert off.float().mean() < 0.01, name


def test_a_fused_forward_has_the_signature_of_the_class(device):
    """The Trainer keeps the columns that are in it; generate() looks for attention_mask there."""
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
        with pytest.raises(RuntimeError, match="start one process a GPU with torchrun"):
            # as torch.nn.parallel.replicate does, which wants GPUs for it
            [module._replicate_for_data_parallel() for module in model.modules()]
    unfuse(fused)
    assert [vars(module).keys() for module in fused.modules()] == [
        vars(module).keys() for module in plain.modules()
    ]
    assert type(fused._replicate_for_data_parallel()) is type(plain)

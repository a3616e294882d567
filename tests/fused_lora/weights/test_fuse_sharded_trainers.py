"""FSDP2 as accelerate and the Trainer set it up, on two ranks. Their groups cut off the last norm
with the head, and the embedding; losses and adapters are those without fusion."""

import warnings

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from cases.fused_case import ALL, SHORT
from cases.layer_case import peft_model
from cases.peft_models import ids
from cases.ranks import on_ranks
from cases.reference import relative_error
from transformers import Trainer, TrainingArguments

from fused_lora import Fusion, fuse, report

EVERYTHING = Fusion(**ALL, layer=True)
ROWS = [row for seed in range(4) for row in ids("cpu", seed)[:, :SHORT]]


def shards(accelerator, plugin):
    """Have an accelerator shard, which it does not do on the CPU by itself."""
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def with_accelerate(model, device, folder):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
    )
    accelerator = Accelerator(cpu=device == "cpu", fsdp_plugin=plugin)
    shards(accelerator, plugin)
    trained = [p for p in model.parameters() if p.requires_grad]
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1), loader)
    losses = []
    for tokens in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator.get_state_dict(model)


def with_trainer(model, device, folder):
    args = TrainingArguments(
        output_dir=str(folder), fsdp=True, max_steps=2, per_device_train_batch_size=2,
        gradient_checkpointing=True, logging_steps=1, report_to=[], use_cpu=device == "cpu",
        save_strategy="no", optim="sgd", learning_rate=0.1,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = Trainer(model, args, train_dataset=rows)
    shards(trainer.accelerator, FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    trainer.is_fsdp_enabled = True
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.accelerator.get_state_dict(trainer.model)


WAYS = {"accelerate": with_accelerate, "Trainer": with_trainer}


def compared(rank, device, way, folder):
    done = []
    for is_fused in (True, False):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = peft_model(device, config={"num_hidden_layers": 1})
        start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            if is_fused:
                fuse(model, EVERYTHING)
            losses, state = WAYS[way](model, device, folder / str(is_fused))
        assert not report(model).left
        moved = {name: state[name].to(device) - start[name] for name in start} if state else {}
        done.append((losses, moved))
    (losses, moved), (wanted, wanted_moved) = done
    errors = {name: relative_error(moved[name], wanted_moved[name]) for name in moved}
    return losses, wanted, errors


@pytest.mark.slow("accelerate")
@pytest.mark.parametrize("way", WAYS)
def test_a_fused_model_is_sharded_by_its_trainer(way, tmp_path):
    first, second = on_ranks(2, compared, way, tmp_path)
    assert max(first[2].values()) < 1e-3
    for losses, wanted, _ in (first, second):
        assert len(losses) == 2 and losses == pytest.approx(wanted, rel=1e-4)

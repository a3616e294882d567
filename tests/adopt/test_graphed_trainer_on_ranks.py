"""`graph_steps` on several ranks: losses and weights of the trainer's DistributedDataParallel."""

import copy

import pytest
import test_graphed_trainer as alone
import torch
from accelerate.state import AcceleratorState
from cases import layer_case
from cases.graph_case import Recorded
from cases.ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

from fused_lora import graph_steps
from fused_lora.step.graphed_module import GraphedModule

OPTIONS = {
    "a smaller last batch": {"per_device_train_batch_size": 4},
    "accumulation, evaluation": alone.KEPT["accumulation, evaluation"],
    "bf16, checkpointing": alone.SETTINGS["Trainer"]["bf16, checkpointing"],
}


def record(device):
    if device == "cpu":
        GraphedModule._backend = Recorded


def both(rank, device, setting, folder):
    """Train with graphs and without."""
    record(device)
    plain = layer_case.peft_model(device, config={"num_hidden_layers": 1})
    done = []
    for is_graphed in (True, False):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(rank)
        model = copy.deepcopy(plain)
        steps, *found = alone.train("Trainer", model, folder, is_graphed, **OPTIONS[setting])
        assert not is_graphed or (steps.decoder.captured and not steps.decoder.told)
        done.append((None, *found))
    return done


@pytest.mark.slow("accumulation, evaluation")
@pytest.mark.parametrize("setting", OPTIONS)
def test_graphed_steps_are_those_of_distributed_data_parallel(setting, tmp_path):
    has_gpus = torch.cuda.device_count() > 1
    first, second = on_ranks(2, both, setting, tmp_path)
    for graphed, eager in (first, second):
        alone.assert_alike(graphed, eager, 2e-3 if has_gpus else 0.0)
    for weights in zip(first[0][2], second[0][2], strict=True):
        assert torch.equal(*weights)


def refused(rank, device, folder):
    record(device)
    model = layer_case.peft_model(device, config={"num_hidden_layers": 1})
    model.unused = torch.nn.Linear(2, 2, device=device)
    with pytest.raises(ValueError, match=r"graph_steps: 2 of \d+ trained parameters get no grad"):
        alone.train("Trainer", model, folder, is_graphed=True)
    del model.unused
    trainer = alone.trainer_of("Trainer", model, folder)
    steps = graph_steps(trainer)
    wrapped = DistributedDataParallel(model, static_graph=True)
    with pytest.raises(ValueError, match="got DistributedDataParallel with static_graph=True"):
        steps.training_step(wrapped, {})


def test_what_graphed_steps_cannot_average_is_a_value_error(tmp_path):
    on_ranks(2, refused, tmp_path)

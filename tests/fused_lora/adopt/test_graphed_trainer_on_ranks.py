"""`graph_steps` on several ranks: losses and weights of the trainer's DistributedDataParallel."""

import copy

import pytest
import test_graphed_trainer as alone
import torch
from accelerate.state import AcceleratorState
from cases import layer_case
from cases.graph_case import Recorded, held_nodes
from cases.ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

from fused_lora import graph_steps
from fused_lora.step.graphed_module import GraphedModule

ONE_LAYER = {"num_hidden_layers": 1}
OPTIONS = {
    "a smaller last batch": {"per_device_train_batch_size": 4},
    "accumulation, evaluation": alone.KEPT["accumulation, evaluation"],
    "bf16, checkpointing": alone.SETTINGS["Trainer"]["bf16, checkpointing"],
}


def record(device):
    if device == "cpu":
        GraphedModule._backend = Recorded


def compared(rank, device, setting, folder):
    """Train with graphs and without, and return the weights."""
    record(device)
    plain = layer_case.peft_model(device, config=ONE_LAYER)
    done = []
    for is_graphed in (True, False):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = copy.deepcopy(plain)
        nodes = held_nodes(model) if is_graphed else []  # so DistributedDataParallel has these
        done.append(alone.train("Trainer", model, folder, is_graphed, **OPTIONS[setting]))
        assert bool(nodes) is is_graphed
    decoder = done[0][0].decoder
    assert decoder.captured and not decoder.told
    alone.assert_alike(*done, plain, 0.0 if device == "cpu" else 2e-3)
    return done[0][2]


@pytest.mark.slow("accumulation, evaluation")
@pytest.mark.parametrize("setting", OPTIONS)
def test_graphed_steps_are_those_of_distributed_data_parallel(setting, tmp_path):
    for weights in zip(*on_ranks(2, compared, setting, tmp_path), strict=True):
        assert torch.equal(*weights)


def refused(rank, device, folder):
    record(device)
    model = layer_case.peft_model(device, config=ONE_LAYER)
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

"""Vanilla PEFT that drops what a fused model drops: its nn.Dropout replaced by the fused masks."""

import torch
from cases.layer_case import LAYERS
from cases.peft_models import ATTENTION, MLP
from cases.reference import masked
from torch import nn

from fused_lora.adopt import projection

SEED = torch.tensor([2**62 + 12_345])
# The number of each projection among those of its function, which is its stream of random numbers.
# With Phi's, whose q, k and v are one projection with one mask, as are gate and up.
OF_LAYER = {name: i for i, name in enumerate((*ATTENTION, *MLP))}
OF_LAYER |= {"qkv_proj": OF_LAYER["q_proj"], "gate_up_proj": OF_LAYER["gate_proj"]}
OF_PARTS = {name: i for names in (ATTENTION, MLP) for i, name in enumerate(names)}
OF_JOINED_PARTS = OF_PARTS | {"qkv_proj": 0, "gate_up_proj": 0}


class Masked(nn.Module):
    """In the place of PEFT's nn.Dropout. rows: of the tokens, those that are computed at all."""

    def __init__(self, p, stream):
        super().__init__()
        self.p, self.stream = p, stream
        self.rows = None

    def forward(self, x):
        if not self.training:
            return x
        rows = x.flatten(0, -2)
        index = torch.arange(len(rows), device=x.device) if self.rows is None else self.rows
        kept = masked(rows[index], self.p, SEED.to(x.device), self.stream)
        return torch.zeros_like(rows).index_copy(0, index, kept).view(x.shape)


def draw_one_seed(monkeypatch):
    """Let every fused function draw SEED. Returns the device of each draw."""
    drawn = []
    monkeypatch.setattr(
        projection, "draw_seed", lambda device: drawn.append(device) or SEED.to(device)
    )
    return drawn


def follow(plain, streams):
    """Let a plain model drop what a fused one does whose functions number their projections so."""
    for layer in plain.get_submodule(LAYERS):
        for name, module in layer.named_modules():
            if (stream := streams.get(name.rpartition(".")[2])) is not None:
                dropouts = getattr(module, "lora_dropout", {})
                for adapter, dropout in list(dropouts.items()):
                    if isinstance(dropout, nn.Dropout):
                        dropouts[adapter] = Masked(dropout.p, stream)
    return plain.train()

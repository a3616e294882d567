"""A model bordered and not, and whether its borders hold what they should."""

import copy

import torch
from peft_models import peft_model

from fused_lora.adopt.borders import border

PARTS = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def pair(device, **options):
    """The same model bordered and not, and the buffers of the first."""
    plain = peft_model(device, **options)
    bordered = copy.deepcopy(plain)
    return bordered, plain, border(bordered)


def assert_border_follows(borders):
    """Every border holds its active adapter now, and nothing else."""
    for group in borders.groups:
        *adapters, bordered = borders.read(group)
        A = torch.zeros_like(bordered.matrix[bordered.out :, : bordered.in_features])
        B = torch.zeros_like(bordered.matrix[: bordered.out, bordered.in_features :])
        row = column = 0
        for i, out in enumerate(bordered.out_features):
            rank = adapters[2 * i].shape[0]
            A[column : column + rank] = adapters[2 * i].detach()
            scaling = group.projections[i].scaling[group.projections[i].active_adapters[0]]
            B[row : row + out, column : column + rank] = adapters[2 * i + 1].detach() * scaling
            row, column = row + out, column + bordered.blocks[i]
        assert A.any() and B.any()
        assert torch.equal(bordered.matrix[bordered.out :, : bordered.in_features], A)
        assert torch.equal(bordered.matrix[: bordered.out, bordered.in_features :], B)
        assert not bordered.matrix[bordered.out :, bordered.in_features :].any()


def masters(model):
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def in_place(model):
    with torch.no_grad():
        for parameter in masters(model).values():
            parameter.add_(0.25)


def scale(model):
    for name, projection in model.named_modules():
        if name.endswith("_proj"):
            projection.set_scale("default", 3.0)

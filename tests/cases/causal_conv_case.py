"""The causal convolution of a mixer, as transformers has it in PyTorch, of each document alone."""

import torch
import torch.nn.functional as F


def eager(x, weight, bias, conv):
    if conv.seq_idx is not None:
        return each_document_alone(x, weight, bias, conv)
    leading, positions = x.shape[:-2], x.shape[-2]
    padding = weight.shape[1] - 1
    channels_first = x.reshape(-1, *x.shape[-2:]).transpose(1, 2)
    y = F.conv1d(channels_first, weight[:, None], bias, padding=padding, groups=len(weight))
    y = y[:, :, :positions]
    y = (F.silu(y) if conv.has_silu else y).transpose(1, 2)
    y = y.reshape(*leading, *y.shape[1:])
    return tuple(one.clone() for one in y.split(conv.sizes, -1))


def each_document_alone(x, weight, bias, conv):
    if not x.numel():
        return eager(x, weight, bias, conv._replace(seq_idx=None))
    rows = []
    for row, its in zip(x, conv.seq_idx, strict=True):
        _, lengths = its.unique_consecutive(return_counts=True)
        parts = row.split(lengths.tolist())
        found = [eager(part, weight, bias, conv._replace(seq_idx=None)) for part in parts]
        rows.append([torch.cat(each) for each in zip(*found, strict=True)])
    return tuple(map(torch.stack, zip(*rows, strict=True)))

"""Models whose projections a checkpoint has in FP8, in its own codes and scales."""

import copy
from typing import NamedTuple

import pytest
import torch
from cases.fp8_case import CONFIG, OracleBuffer, assert_layer_is
from cases.layer_case import layer_of
from cases.peft_models import adapt, base_model
from torch import nn
from transformers.integrations import compressed_tensors, finegrained_fp8

from fused_lora.kernels.fp8_rows import E4M3

pytestmark = pytest.mark.usefixtures("fp8_in_fp32")


class Format(NamedTuple):
    """block: of what a scale is, None for all. power_of_two: whether scales are (ue8m0)."""

    made: type
    block: tuple[int, int] | None
    power_of_two: bool = False


ROWS = Format(compressed_tensors.CompressedTensorsFP8Linear, (1, 10**6))
BLOCKS = Format(finegrained_fp8.FP8Linear, (16, 16))
FORMATS = {
    "a scale for each row": ROWS,
    "one for all": Format(finegrained_fp8.FP8Linear, None),
    "blocks": BLOCKS,
    "blocks that do not divide it": Format(finegrained_fp8.FP8Linear, (32, 32)),
    "blocks, powers of two": Format(finegrained_fp8.FP8Linear, (16, 16), power_of_two=True),
}
TWO = pytest.mark.parametrize("of", [ROWS, BLOCKS], ids=["rows", "blocks"])
EACH = pytest.mark.parametrize("of", FORMATS.values(), ids=FORMATS)


def over(scales, of, shape):
    """The scale of every number of a weight."""
    rows, columns = map(min, of.block or shape, shape)  # a block may be larger
    grid = scales.float().reshape(-(-shape[0] // rows), -(-shape[1] // columns))
    return grid.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def scales_of(linear):
    return linear.weight_scale if type(linear) is ROWS.made else linear.weight_scale_inv


def numbers(linear, of):
    """What the codes of a checkpoint's layer stand for."""
    return linear.weight.float() * over(scales_of(linear), of, linear.weight.shape)


def bits(tensor):
    """There is no comparing of codes, or of scales in ue8m0."""
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor


def in_fp8(linear, of):
    """A layer of transformers' class with the codes of a linear one."""
    (rows, columns), bias = linear.weight.shape, linear.bias
    if of is ROWS:
        made = of.made(columns, rows, has_bias=bias is not None)
    else:
        scale_fmt = "ue8m0" if of.power_of_two else "float"
        made = of.made(columns, rows, of.block, scale_fmt=scale_fmt, has_bias=bias is not None)
    high, wide = of.block or (rows, columns)
    weight = linear.weight.detach()
    blocks = [band.split(min(wide, columns), 1) for band in weight.split(high)]
    largest = torch.stack([torch.stack([one.abs().max() for one in band]) for band in blocks])
    scales = (largest / 448).log2().ceil().exp2() if of.power_of_two else largest / 448
    made.to(linear.weight.device).requires_grad_(False)
    scales_of(made).data.copy_(scales.reshape(scales_of(made).shape))
    made.weight.data.copy_((weight / over(scales_of(made), of, weight.shape)).to(E4M3))
    if bias is not None:
        made.bias.data.copy_(bias)
    return made


def models(device, of, family="Qwen2", only="_proj", config=(), **lora):
    """A PEFT model on layers in FP8, and one on what their codes stand for."""
    options = {"attn_implementation": "sdpa", "pad_token_id": 0}
    plain = base_model(device, family, **(CONFIG | options | dict(config)))
    plain.config.use_cache = False
    coded = copy.deepcopy(plain)
    for name, linear in plain.named_modules():
        if isinstance(linear, nn.Linear) and only in name:
            linear.weight.data.mul_(0.25 if "q_proj" in name else 1)  # as layer_case
            made = in_fp8(linear, of)
            coded.set_submodule(name, made)
            linear.weight.data.copy_(numbers(made, of))
    coded, plain = (adapt(model, device, **lora).train() for model in (coded, plain))
    adapters = {name: t for name, t in plain.state_dict().items() if ".lora_" in name}
    coded.load_state_dict(adapters, strict=False)
    return coded, plain


def projections(model):
    layer = layer_of(model)
    return [m for n, m in layer.named_modules() if n.endswith("_proj")]


def assert_same_state(got, want):
    assert got.keys() == want.keys()
    for name in want:
        one, other = got[name], want[name]
        assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape), name
        assert torch.equal(bits(one), bits(other)), name


def assert_is_what_its_codes_make_it(model, of, device):
    bases = iter([projection.base_layer for projection in projections(model)])

    def oracle(group):
        mine = [next(bases) for _ in group.out_features]
        weights = [numbers(base, of) for base in mine]
        made = OracleBuffer(torch.cat(weights), group.buffer.bias, group)
        if of.block is None or of.block[1] >= group.in_features:  # the checkpoint's, bit for bit
            codes, scales = group.buffer.weight, group.buffer.scales
            assert torch.equal(bits(codes), torch.cat([bits(base.weight) for base in mine]))
            each = [over(scales_of(base), of, base.weight.shape)[:, 0] for base in mine]
            assert torch.equal(scales, torch.cat(each))
            made.codes, made.scales = codes.double(), scales.clone()
            assert (codes.data_ptr() == mine[0].weight.data_ptr()) == (of is ROWS)  # no second time
        return made

    assert_layer_is(model, oracle, device)

"""The record that DecoderLayer's backward reads: split for autograd and put together again."""

from typing import NamedTuple

import pytest
import torch
from cases.layer_case import operands

from fused_lora.layer.decoder_layer import DecoderLayer
from fused_lora.layer.saved import Saved
from fused_lora.rerun import TENSOR, join, restore, split, store


class Inner(NamedTuple):
    tensor: torch.Tensor | None
    number: float


class Outer(NamedTuple):
    first: torch.Tensor
    inner: Inner
    nothing: torch.Tensor | None
    several: tuple
    shape: torch.Size


@pytest.fixture
def record():
    a, b, c = torch.arange(3.0).unbind()
    return Outer(a, Inner(b, 2.0), None, (Inner(None, 3.0), c, "text"), torch.Size([4]))


def test_tensors_come_out_of_records_and_go_back_by_field(record):
    tensors, rest = split(record)
    assert tensors == [record.first, record.inner.tensor, record.several[1]]
    assert rest.first is rest.inner.tensor is rest.several[1] is TENSOR
    others = [tensor + 10 for tensor in tensors]
    joined = join(rest, others)
    assert joined == Outer(
        others[0], Inner(others[1], 2.0), None, (Inner(None, 3.0), others[2], "text"), record.shape
    )
    assert type(joined.inner) is Inner and type(joined.shape) is torch.Size


@pytest.mark.parametrize("change", [lambda t: t[1:], lambda t: [*t, t[0]]], ids=("fewer", "more"))
def test_other_numbers_of_tensors_are_no_record(change, record):
    tensors, rest = split(record)
    with pytest.raises((StopIteration, AssertionError)):
        join(rest, change(tensors))


def test_only_tensors_go_through_autograd(record):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            store(ctx, record)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            assert len(ctx.saved_tensors) == 3 and restore(ctx) == record
            return grad

    Function.apply(torch.ones(1, requires_grad=True)).backward()


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Olmo2"])
def test_a_layer_holds_no_tensor_that_autograd_does_not_know(family, device):
    _, inputs, _ = operands(device, (1, 4), family=family, config={"pad_token_id": 0})
    output = DecoderLayer.apply(*inputs)
    rest = output.grad_fn.without_tensors
    assert isinstance(rest, Saved) and split(rest)[0] == []
    saved = join(rest, output.grad_fn.saved_tensors)
    assert saved.hidden is inputs[0] and saved.adapters.down.B is inputs[-2]

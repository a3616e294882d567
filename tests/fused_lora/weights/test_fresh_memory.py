"""New memory may hold anything, even NaN: no part may let it into a result.

A matmul may read past the end of a row, as PyTorch 2.13's bf16 matmuls do on a CPU. It multiplies
what lies between rows, or in columns written later, by zero, and NaN times zero is still NaN.
"""

from contextlib import nullcontext

import pytest
import torch
from cases.fused_case import SHORT, assert_close, step
from cases.layer_case import peft_model
from cases.reference import use_poisoned_memory
from torch.utils._python_dispatch import TorchDispatchMode

from fused_lora import Fusion, fuse

MODELS = {
    "fp32 adapters": {},
    "narrow": {"config": {"intermediate_size": 40}},
    "bf16 adapters, odd": {"autocast_adapter_dtype": False, "r": 3},
    "biases": {"family": "Llama", "config": {"attention_bias": True, "mlp_bias": True}},
    "normed heads": {"family": "Qwen3"},
    "multiplied": {"family": "Granite", "config": {"residual_multiplier": 0.5}},
}
WITHOUT_PRODUCTS = Fusion(rope=True, rms_norm=True)
LOSS = Fusion(cross_entropy=True)
ONE = Fusion(attention=True, rope=True)
LAYER = Fusion(layer=True)
ALL = Fusion(layer=True, cross_entropy=True, checkpoint="full")
CASES = {  # and the models in which matmuls may read on, on other hosts
    "rope and rms_norm": (WITHOUT_PRODUCTS, ["fp32 adapters"]),
    "cross_entropy": (LOSS, ["fp32 adapters", "bf16 adapters, odd"]),
    "mlp": (Fusion(mlp=True), ["fp32 adapters", "narrow", "bf16 adapters, odd"]),
    "attention": (Fusion(attention=True), ["fp32 adapters", "bf16 adapters, odd", "biases"]),
    "attention and rope": (ONE, [one for one in MODELS if one not in ("narrow", "multiplied")]),
    "layer": (LAYER, [*MODELS]),
    "layer, checkpointed, loss of some": (ALL, ["narrow", "bf16 adapters, odd"]),
}


class ReadsOn(TorchDispatchMode):
    """A dispatch mode that reads past the end of operands' rows, as matmuls do on such a host."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.products += 1
            for operand in args[-2:]:
                rows = operand if operand.stride(1) == 1 else operand.t()
                self.look_past(rows)
        return func(*args, **(kwargs or {}))

    def look_past(self, rows):
        (count, columns), stride = rows.shape, rows.stride(0)
        between = stride - columns
        if count > 1 and between > 0:
            start = rows.storage_offset() + columns
            gap = rows.as_strided((count - 1, between), (stride, 1), start)
            assert not gap.isnan().any(), f"{list(rows.shape)}, rows {stride} apart"


@pytest.mark.slow(
    "mlp, narrow",
    "attention and rope, bf16 adapters, odd",
    "cross_entropy, bf16 adapters, odd",
    "layer, checkpointed, loss of some, narrow",
)
@pytest.mark.parametrize(
    ("fusion", "model"),
    [
        pytest.param(fusion, model, id=f"{name}, {model}")
        for name, (fusion, models) in CASES.items()
        for model in models
    ],
)
def test_no_part_lets_what_lies_in_new_memory_into_a_result(fusion, model, device, monkeypatch):
    autocast = model != "bf16 adapters, odd"
    options = {"dtype": torch.bfloat16} | MODELS[model]
    if not fusion.checkpoint:  # checkpointing recomputes only the layers before the last
        options["config"] = {"num_hidden_layers": 1} | options.get("config", {})
    fused, again = (peft_model(device, **options) for _ in range(2))
    fuse(fused, fusion)
    want = step(fused, autocast, length=SHORT)
    use_poisoned_memory(monkeypatch)
    fuse(again, fusion)
    with ReadsOn() if device == "cpu" else nullcontext() as looks:
        got = step(again, autocast, length=SHORT)
    assert looks is None or looks.products
    assert_close(got, want, 0.0)

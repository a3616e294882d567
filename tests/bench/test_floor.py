"""The floor: it counts the operations it claims to, and its median is a median."""

from itertools import count

import torch
from test_trainer import FakeClock
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

from bench.floor import STEPS, WARMUP_STEPS, FrozenOperations, Shape, time_floor

CONFIG = Qwen2Config(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


class MatmulFlops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            a, b = args
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return function(*args, **(kwargs or {}))


def matmul_flops(step):
    with MatmulFlops() as counted:
        step()
    return counted.flops


def test_every_frozen_product_is_done_once_forward_and_once_backward():
    """Check the recomputation too: each layer's forward without its down projection."""
    tokens, labelled = 2 * 8, 5
    shape = Shape.of(CONFIG)
    assert (shape.layers, shape.head_dim, shape.qkv) == (3, 8, (4 + 2 * 2) * 8)
    operations = FrozenOperations(shape, "cpu")
    recomputed, down = 2 * tokens * 3 * (64 * 32 + 32 * 32 + 2 * 48 * 32), 2 * tokens * 3 * 32 * 48
    lm_head = 2 * labelled * 64 * 32
    forward_and_backward = 2 * (recomputed + down + lm_head)
    assert matmul_flops(operations.chain(2, 8, labelled)) == forward_and_backward
    assert matmul_flops(operations.recomputation(2, 8)) == recomputed


def test_the_median_leaves_the_warm_up_out():
    result = time_floor(FrozenOperations(Shape.of(CONFIG), "cpu"), 1, 4, 3, FakeClock(count(1)))
    samples = [float(n) for n in range(WARMUP_STEPS + 1, WARMUP_STEPS + STEPS + 1)]
    assert result.samples_ms == samples
    assert result.floor_ms == (samples[STEPS // 2 - 1] + samples[STEPS // 2]) / 2
    later = [n + WARMUP_STEPS + STEPS for n in samples]
    assert result.recomputation_samples_ms == later
    assert result.recomputation_ms == (later[STEPS // 2 - 1] + later[STEPS // 2]) / 2
    assert result.labelled_tokens == 3


def test_a_step_of_four_micro_batches_has_four_times_the_floor_of_one():
    one, four = (
        time_floor(FrozenOperations(Shape.of(CONFIG), "cpu"), 1, 4, 3, FakeClock(count(1)), times)
        for times in (1, 4)
    )
    assert four.floor_ms == 4 * one.floor_ms and four.samples_ms[0] == 4 * one.samples_ms[0]
    assert four.recomputation_ms == 4 * one.recomputation_ms
    assert four.labelled_tokens == 12

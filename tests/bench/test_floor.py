"""The floor: it counts the operations it claims to, and its median is a median."""

from itertools import count

import torch
from pytest import approx
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


class Work(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.flops = self.copied_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            a, b = args
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if function is torch.ops.aten.copy_.default:
            self.copied_bytes += args[0].nbytes + args[1].nbytes
        return function(*args, **(kwargs or {}))


def work(step):
    """Return the FLOPs of a step's matmuls, and the bytes that its copies read and write."""
    with Work() as counted:
        step()
    return counted.flops, counted.copied_bytes


def test_every_frozen_product_is_done_once_forward_and_once_backward():
    """Check the recomputation too: each layer's forward without its down projection."""
    tokens, labelled = 2 * 8, 5
    shape = Shape.of(CONFIG)
    assert (shape.layers, shape.head_dim, shape.qkv) == (3, 8, (4 + 2 * 2) * 8)
    operations = FrozenOperations(shape, "cpu")
    recomputed, down = 2 * tokens * 3 * (64 * 32 + 32 * 32 + 2 * 48 * 32), 2 * tokens * 3 * 32 * 48
    lm_head = 2 * labelled * 64 * 32
    forward_and_backward = 2 * (recomputed + down + lm_head)
    assert work(operations.chain(2, 8, labelled)) == (forward_and_backward, 0)
    assert work(operations.recomputation(2, 8)) == (recomputed, 0)
    # in NF4, 4 bits and a byte for 64 of them are read, two are written; twice in a step
    values, moved = 64 * 32 + 32 * 32 + 3 * 48 * 32, 0.5 + 1 / 64 + 4 / 64 / 256 + 2
    on_nf4 = FrozenOperations(shape, "cpu", "nf4")
    flops, copied_bytes = work(on_nf4.chain(2, 8, labelled))
    assert (flops, copied_bytes) == (forward_and_backward, approx(2 * 3 * values * moved, rel=1e-3))
    assert work(on_nf4.recomputation(2, 8)) == (recomputed, 0)
    assert len({id(weight) for layer in on_nf4.layers for weight in layer}) == 4


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

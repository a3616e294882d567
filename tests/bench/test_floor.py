"""The floor: it counts the operations it claims to, and its median is a median."""

from dataclasses import replace
from itertools import count
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from cases import example_results as example
from cases.rehearsal_case import plan_of
from pytest import approx
from test_trainer import FakeClock
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

from bench import floor, preparing
from bench.experiment import missing_floors_of
from bench.floor import STEPS, WARMUP_STEPS, FrozenOperations, Shape, is_possible, time_floor
from bench.records import Floor
from trainer import CudaClock

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
        self.dtypes, self.attention = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default):
            a, b, *_ = args
            self.dtypes.append(a.dtype)
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if "flash_attention_for_cpu" in str(function) and any(arg is True for arg in args):
            self.attention.append("causal backward" if "backward" in str(function) else "causal")
        if function is torch.ops.aten.copy_.default:
            self.copied_bytes += args[0].nbytes + args[1].nbytes
        return function(*args, **(kwargs or {}))


def work(step):
    """Return the FLOPs of a step's matmuls, and the bytes that its copies read and write."""
    with Work() as counted:
        step()
    return counted.flops, counted.copied_bytes


def test_every_frozen_product_is_done_once_forward_and_once_backward(monkeypatch):
    """Check the recomputation too: each layer's forward without its down projection. After its
    attention the last layer runs for the labelled tokens alone."""
    monkeypatch.setattr(FrozenOperations, "LM_HEAD_CHUNK", 2)  # three of them, the last of one row
    tokens, labelled = 2 * 8, 5
    shape = Shape.of(CONFIG)
    assert (shape.layers, shape.head_dim, shape.qkv) == (3, 8, (4 + 2 * 2) * 8)
    operations = FrozenOperations(shape, "cpu")
    qkv, others = 64 * 32, 32 * 32 + 2 * 48 * 32
    recomputed, down, lm_head = 2 * tokens * 3 * (qkv + others), 32 * 48, 64 * 32
    products = tokens * (3 * qkv + 2 * (others + down)) + labelled * (others + down + lm_head)
    forward_and_backward = 2 * 2 * products
    assert work(operations.chain(2, 8, labelled)) == (forward_and_backward, 0)
    assert work(operations.recomputation(2, 8)) == (recomputed, 0)
    # in NF4, 4 bits and a byte for 64 of them are read, two are written; twice in a step
    values, moved = 64 * 32 + 32 * 32 + 3 * 48 * 32, 0.5 + 1 / 64 + 4 / 64 / 256 + 2
    on_nf4 = FrozenOperations(shape, "cpu", "nf4")
    flops, copied_bytes = work(on_nf4.chain(2, 8, labelled))
    assert (flops, copied_bytes) == (forward_and_backward, approx(2 * 3 * values * moved, rel=1e-3))
    assert work(on_nf4.recomputation(2, 8)) == (recomputed, 0)
    assert len({id(weight) for layer in on_nf4.layers for weight in layer}) == 4


@pytest.mark.parametrize(
    ("precision", "in_layers", "in_head"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("nf4", torch.bfloat16, torch.bfloat16),
        ("fp32", torch.float32, torch.float32),
        ("fp8", torch.float8_e4m3fn, torch.bfloat16),
        ("fp8_lm_head", torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_the_floor_of_a_precision_multiplies_in_it(precision, in_layers, in_head):
    operations = FrozenOperations(Shape.of(CONFIG), "cpu", precision)
    with Work() as counted:
        operations.chain(2, 8, 5)()
    forward = [in_layers] * 4 * 3
    assert counted.dtypes == [*forward, in_head, in_head, *forward]
    assert counted.attention == ["causal"] * 3 + ["causal backward"] * 3
    assert counted.flops == work(FrozenOperations(Shape.of(CONFIG), "cpu").chain(2, 8, 5))[0]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [((), (8, 256)), (("--padded",), (8, 247)), (("--documents",), (7, 281))],
)
def test_padding_is_not_in_the_floor(rows, wanted, tmp_path, monkeypatch):
    plan = plan_of(tmp_path, "--seq-lens", "256", "--batch-size", "8", "--steps", "8",
                   "--accumulate", "2", *rows)  # fmt: skip
    timed = []
    monkeypatch.setattr(floor, "time_floor", lambda operations, *sizes: timed.append(sizes))
    preparing.prepare_run(lambda message: None, plan)
    preparing.measure_floor(lambda message: None, plan, "bf16", (256,))
    ((*found, labelled, _, accumulate),) = timed
    assert (*found, accumulate) == (*wanted, 2)
    assert labelled == round(fmean(batch.labelled for batch in plan.timed_batches(256)))


def test_kernels_are_timed_at_the_models_own_shapes(tmp_path, monkeypatch):
    plan, sent = plan_of(tmp_path, "--seq-lens", "16", "32", "--batch-size", "2"), []
    monkeypatch.setattr("bench.kernels.time_kernels", lambda *sizes: sizes)
    preparing.prepare_run(lambda message: None, plan)
    preparing.measure_kernels(sent.append, plan)
    assert sent == [{"kernels": (64, 192, [2 * 16, 2 * 32])}]


def test_the_median_leaves_the_warm_up_out():
    result = time_floor(FrozenOperations(Shape.of(CONFIG), "cpu"), 1, 4, 3, FakeClock(count(1)))
    samples = [float(n) for n in range(WARMUP_STEPS + 1, WARMUP_STEPS + STEPS + 1)]
    assert result.samples_ms == samples
    assert result.floor_ms == (samples[STEPS // 2 - 1] + samples[STEPS // 2]) / 2
    later = [n + WARMUP_STEPS + STEPS for n in samples]
    assert result.recomputation_samples_ms == later
    assert result.recomputation_ms == (later[STEPS // 2 - 1] + later[STEPS // 2]) / 2
    assert result.labelled_tokens == 3


@pytest.mark.parametrize("variants", [("vanilla_peft", "fp8_layer"), ("fp8_layer",)])
def test_the_floors_that_are_missing_are_those_of_the_base_and_of_each_variant(variants):
    run = example.empty(seq_lens=[64, 128])
    run.floor = {64: Floor(1.0, [])}
    run.other_floors = {"fp8": {128: Floor(1.0, [])}}
    plan = SimpleNamespace(variants=variants, device="cuda", base="bf16", seq_lens=(64, 128))
    assert missing_floors_of(plan, run) == {"bf16": (128,), "fp8": (64,)}


@pytest.mark.gpu
@pytest.mark.alone
def test_the_floor_in_fp8_is_below_that_in_bf16_and_that_in_fp32_above():
    shape = replace(Shape.of(CONFIG), hidden=2048, intermediate=8192, vocabulary=32768)
    precisions = [one for one in ("fp8_lm_head", "fp8", "bf16", "fp32")
                  if is_possible(one, shape, "cuda")]  # fmt: skip
    floors_ms = [
        time_floor(FrozenOperations(shape, "cuda", precision), 8, 512, 4000, CudaClock()).floor_ms
        for precision in precisions
    ]
    assert floors_ms == sorted(floors_ms)


def test_a_step_of_four_micro_batches_has_four_times_the_floor_of_one():
    one, four = (
        time_floor(FrozenOperations(Shape.of(CONFIG), "cpu"), 1, 4, 3, FakeClock(count(1)), times)
        for times in (1, 4)
    )
    assert four.floor_ms == 4 * one.floor_ms and four.samples_ms[0] == 4 * one.samples_ms[0]
    assert four.recomputation_ms == 4 * one.recomputation_ms
    assert (four.labelled_tokens, four.tokens) == (12, 16)

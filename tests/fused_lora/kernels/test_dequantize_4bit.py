"""Dequantize4bit against PyTorch and against bitsandbytes: the same roundings, so the same bits."""

import copy
from itertools import count, cycle, product

import pytest
import torch
import triton.language as tl
from cases.four_bit_case import values_times_scales
from cases.operands import BF16, DTYPES, FP16, FP32
from cases.reference import random, seeded
from cases.refusal import apart, assert_refused, on_meta
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fused_lora.kernels import dequantize_4bit as module
from fused_lora.kernels.dequantize_4bit import MAX_TABLES, Dequantize4bit, dequantize_4bit
from fused_lora.kernels.packed_4bit import Nested, Packed4bit, dequantized
from fused_lora.weights.mxfp4 import packed_in_mxfp4

FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
VALUES = {"nf4": [i / 7.5 - 1 + i / 100 for i in range(16)], "fp4": FP4 + [-x for x in FP4]}

# (shape, blocksize) of the weights of one launch, by how many values share a row and an absmax
WEIGHTS = {
    64: [((9, 128), 64), ((300, 64), 4096), ((0, 64), 64), ((1, 192), 128), ((4, 0), 64)],
    32: [((7, 128), 32), ((3, 2048), 256)],
    16: [((11, 80), 64), ((40, 48), 512)],
    2: [((5, 130), 64), ((64, 64), 64)],
    1: [((5, 33), 64), ((1, 7), 32), ((131, 65), 64), ((0, 5), 64), ((2, 128), 64)],
}


def packed(shape, blocksize, is_nested, kind="nf4", storage=torch.uint8, seed=0, device="cpu"):
    """Return a weight of random codes, a few of them more than it has values."""
    size = shape[0] * shape[1]
    blocks = -(-size // blocksize)
    generator = seeded(seed)
    codes = torch.randint(256, (-(-size // 8) * 4,), dtype=torch.uint8, generator=generator)
    absmax, nested = random(blocks, seed=seed).abs(), None
    if is_nested:
        absmax = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
        outer, offset = random(-(-blocks // 256), seed=seed).abs(), torch.tensor(0.7)
        nested = Nested(random(256, seed=seed), outer, offset, 256)
        nested = Nested(*(t.to(device) for t in nested[:-1]), 256)
    values = torch.tensor(VALUES[kind]).to(device)
    codes = codes.view(storage).to(device)
    return Packed4bit(codes, shape, values, absmax.to(device), blocksize, nested)


def rows_for(weights, dtype, device, before=2, behind=3):
    """Return rows within wider matrices of sevens."""
    return [
        torch.full((out + 1, before + into + behind), 7.0, dtype=dtype, device=device)[
            :out, before : before + into
        ]
        for out, into in (weight.shape for weight in weights)
    ]


def eager(weight, dtype):
    """Dequantise by PyTorch."""
    return values_times_scales(
        weight.codes, weight.values, weight.absmax, weight.blocksize, weight.shape, weight.nested
    ).to(dtype)


def assert_dequantized(weights, rows, want):
    """Check the rows, and that nothing around them is written."""
    around = [t._base.clone() for t in rows]
    dequantize_4bit(weights, rows)
    for whole, t, exact in zip(around, rows, want, strict=True):
        assert torch.equal(t, exact)
        whole.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(exact)
        assert torch.equal(t._base, whole)


NESTED = pytest.mark.parametrize("is_nested", [False, True], ids=["single", "double"])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@NESTED
@EACH_DTYPE
@pytest.mark.parametrize("run", WEIGHTS)
def test_bits_are_those_of_pytorch_and_nothing_else_is_written(run, dtype, is_nested, device):
    kinds = zip(cycle(VALUES), cycle([torch.uint8, BF16, FP16, FP32]), count(), strict=False)
    weights = [
        packed(*given, is_nested, *kind, device)
        for given, kind in zip(WEIGHTS[run], kinds, strict=False)
    ]
    rows = rows_for(weights, dtype, device)
    assert module._prepare(weights, rows).run == run
    assert_dequantized(weights, rows, [eager(weight, dtype) for weight in weights])


def test_some_of_the_weights_are_double_quantised(device):
    weights = [packed((8, 128), 64, i == 1, device=device, seed=i) for i in range(3)]
    rows = rows_for(weights, BF16, device)
    assert_dequantized(weights, rows, [eager(weight, BF16) for weight in weights])


@NESTED
@EACH_DTYPE
@pytest.mark.parametrize("kind", VALUES)
def test_bits_are_those_of_bitsandbytes(kind, dtype, is_nested, device):
    """Some blocks straddle rows."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weights, want = [], []
    storages = cycle([torch.uint8, BF16, FP32])
    shapes = product([(3, 4096), (8, 100), (1, 72)], [32, 64, 4096])
    for i, (storage, (shape, blocksize)) in enumerate(zip(storages, shapes, strict=False)):
        codes, state = functional.quantize_4bit(
            random(*shape, dtype=dtype, device=device, seed=i),
            blocksize=blocksize, compress_statistics=is_nested, quant_type=kind,
            quant_storage=storage,
        )  # fmt: skip
        outer, nested = state.state2, None
        if is_nested:
            nested = Nested(outer.code, outer.absmax, state.offset, outer.blocksize)
        weights.append(Packed4bit(codes, shape, state.code, state.absmax, blocksize, nested))
        want.append(functional.dequantize_4bit(codes, state).view(shape))
        assert torch.equal(want[-1], eager(weights[-1], dtype)), "a fault of bitsandbytes"
    assert_dequantized(weights, rows_for(weights, dtype, device), want)


@EACH_DTYPE
def test_bits_of_mxfp4_are_those_of_transformers(dtype, device):
    """Beside a weight of bitsandbytes."""
    generator = seeded(0)
    blocks = torch.randint(256, (3, 10, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 134, (3, 10, 5), dtype=torch.uint8, generator=generator)
    weight = packed_in_mxfp4(blocks.to(device), scales.to(device))
    want = convert_moe_packed_tensors(blocks, scales, dtype=FP32).mT.reshape(30, 160)
    want = want.to(device, dtype)
    assert torch.equal(dequantized(weight, dtype).view(torch.uint8), want.view(torch.uint8))
    weights = [packed((8, 128), 64, True, device=device), weight]
    rows = rows_for(weights, dtype, device)
    assert_dequantized(weights, rows, [eager(weights[0], dtype), want])


@NESTED
def test_rows_of_experts_without_tokens_are_left(is_nested, device):
    """Only tiles of 64 rows that experts 1 and 4 of six have a part of are written."""
    weights = [packed(shape, 64, is_nested, device=device) for shape in ((480, 64), (192, 64))]
    rows = [torch.full(one.shape, 7.0, dtype=BF16, device=device) for one in weights]
    ends = torch.tensor([0, 2, 2, 2, 3, 3], dtype=torch.int32, device=device)
    dequantize_4bit(weights, rows, ends)
    tiles = ((64, 192), (320, 448)), ((0, 64), (128, 192))
    for one, weight, spans in zip(rows, weights, tiles, strict=True):
        want = torch.full_like(one, 7.0)
        for first, last in spans:
            want[first:last] = eager(weight, BF16)[first:last]
        assert torch.equal(one, want)


@pytest.mark.parametrize(
    ("dtype", "before", "behind", "first_code", "read", "write"),
    [
        (BF16, 8, 8, 0, 4, 16),
        (FP16, 4, 12, 0, 2, 8),
        (BF16, 8, 9, 0, 1, 2),
        (BF16, 1, 7, 0, 1, 2),
        (BF16, 8, 8, 2, 2, 16),
        (FP32, 8, 8, 0, 2, 16),
        (FP32, 1, 7, 0, 1, 4),
    ],
)
def test_as_many_bytes_go_at_once_as_addresses_allow(
    dtype, before, behind, first_code, read, write, device
):
    weights = [packed((9, 128), 64, False, device=device, seed=i) for i in range(3)]
    codes = weights[1].codes
    codes = torch.cat([codes[:first_code], codes])[first_code:]
    weights[1] = weights[1]._replace(codes=codes)
    rows = rows_for(weights, dtype, device, before, behind)
    prepared = module._prepare(weights, rows)
    assert (prepared.read, prepared.write) == (read, write)
    assert_dequantized(weights, rows, [eager(weight, dtype) for weight in weights])


def test_a_key_that_is_known_is_not_looked_up_again_and_the_latest_few_are(device):
    looked, dequantize = [], Dequantize4bit()
    weights = [packed((4, 64), 64, True, device=device, seed=i) for i in range(MAX_TABLES + 1)]
    (rows,) = rows_for(weights[:1], BF16, device)

    def write(index):
        dequantize.write(index, lambda: looked.append(index) or ([weights[index]], [rows]))
        assert torch.equal(rows, eager(weights[index], BF16))

    for index in (0, 1, 0, *range(2, len(weights)), 1, 0):
        write(index)
    assert looked == [*range(len(weights)), 0]  # that of 0 had made room
    assert not copy.deepcopy(dequantize)._prepared


def test_what_a_graph_holds_stays_and_an_unknown_key_is_an_error(device, monkeypatch):
    dequantize, capturing = Dequantize4bit(), [False]
    monkeypatch.setattr(module, "is_capturing", lambda _: capturing[0])
    weights = [packed((4, 64), 64, False, device=device)]
    rows = rows_for(weights, BF16, device)
    dequantize.write(0, lambda: (weights, rows))
    held, capturing[0] = dequantize._prepared[0], True
    dequantize.write(0, lambda: (weights, rows))
    with pytest.raises(RuntimeError, match="run one step before you capture"):
        dequantize.write(1, lambda: (weights, rows))
    capturing[0] = False
    for key in range(1, MAX_TABLES + 2):
        dequantize.write(key, lambda: (weights, rows))
    assert 0 not in dequantize._prepared and [*dequantize._captured.values()] == [held]


def test_int64_counts_give_the_same(device):
    weights = [packed((11, 80), 64, True, device=device)]
    rows = rows_for(weights, FP32, device)
    module._launch(module._prepare(weights, rows)._replace(index=tl.int64))
    assert torch.equal(rows[0], eager(weights[0], FP32))


def each(change):
    """Apply a change to the second of two."""
    return lambda given: [given[0], change(given[1])]


def with_(**fields):
    return each(lambda weight: weight._replace(**{n: f(weight) for n, f in fields.items()}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": lambda rows: rows[1:]}, "2 weights and rows for 1 given"),
        ({"rows": each(lambda t: t[1:])}, r"weight 1 has shape \[8, 128\] and rows \[7, 128\]"),
        ({"rows": each(apart)}, r"weight 1 has rows with strides \(1, 8\)"),
        ({"rows": each(lambda t: t[:1].expand(8, -1))}, r"strides \(0, 1\)"),
        ({"rows": each(lambda t: t.half())}, "rows in torch.float16, should have torch.bfloat16"),
        ({"rows": each(lambda t: t.double())}, "bfloat16, float16 or float32, got torch.float64"),
        ({"weights": with_(blocksize=lambda w: 48)}, "blocksize 48"),
        ({"weights": with_(blocksize=lambda w: 128)}, r"absmax \[16\] in torch.uint8"),
        ({"weights": with_(codes=lambda w: w.codes[1:])}, "511 bytes of codes, contiguous"),
        ({"weights": with_(codes=lambda w: w.codes.repeat(2)[::2])}, "not contiguous"),
        ({"weights": with_(codes=lambda w: on_meta(w.codes))}, "a tensor on meta"),
        ({"weights": with_(values=lambda w: w.values.half())}, r"values \[16\] in torch.float16"),
        ({"weights": with_(absmax=lambda w: w.absmax.float())}, r"absmax \[16\] in torch.float32"),
        ({"weights": with_(nested=lambda w: None)}, r"absmax \[16\] in torch.uint8"),
        (
            {"weights": with_(nested=lambda w: w.nested._replace(absmax=w.nested.absmax[:0]))},
            r"nested.absmax \[0\] in torch.float32, should have 1 contiguous",
        ),
        ({"weights": with_(nested=lambda w: w.nested._replace(blocksize=3))}, "nested.blocksize 3"),
    ],
)
def test_what_does_not_fit_is_a_value_error_and_writes_nothing(changes, message, device):
    weights = [packed((8, 128), 64, True, device=device, seed=i) for i in range(2)]
    rows = [torch.full((8, 128), 7.0, dtype=BF16, device=device) for _ in weights]
    given = {"weights": weights, "rows": rows}
    assert_refused(dequantize_4bit, given, changes, message)
    assert all((t == 7).all() for t in rows)
    dequantize_4bit([], [])  # nothing to do


@pytest.mark.gpu
def test_a_graph_dequantizes_what_the_codes_are_at_its_replay(device):
    dequantize, weights = Dequantize4bit(), [packed((40, 128), 64, True, device=device)]
    rows, graph = rows_for(weights, BF16, device), torch.cuda.CUDAGraph()
    dequantize.write(0, lambda: (weights, rows))
    with torch.cuda.graph(graph):
        dequantize.write(0, lambda: (weights, rows))
    weights[0].codes.add_(1)
    graph.replay()
    assert torch.equal(rows[0], eager(weights[0], BF16))


@pytest.mark.gpu
def test_a_graph_leaves_the_experts_that_get_no_tokens_at_its_replay(device):
    dequantize, weights = Dequantize4bit(), [packed((128, 64), 64, True, device=device)]
    rows, graph = rows_for(weights, BF16, device, 0, 0), torch.cuda.CUDAGraph()
    ends = torch.tensor([1, 2], dtype=torch.int32, device=device)
    dequantize.write(0, lambda: (weights, rows), ends)
    with torch.cuda.graph(graph):
        dequantize.write(0, lambda: (weights, rows), ends)
    rows[0].fill_(7.0)
    ends.copy_(torch.tensor([0, 2]))
    graph.replay()
    assert (rows[0][:64] == 7.0).all()
    assert torch.equal(rows[0][64:], eager(weights[0], BF16)[64:])


@pytest.mark.gpu
@pytest.mark.alone
def test_more_than_2_to_the_32_values(device):
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GB of free GPU memory")
    part, times = packed((2**9, 2**16), 64, True, device=device), 129
    weight = part._replace(
        codes=part.codes.repeat(times), shape=(times * 2**9, 2**16),
        absmax=part.absmax.repeat(times),
        nested=part.nested._replace(absmax=part.nested.absmax.repeat(times)),
    )  # fmt: skip
    rows = torch.full(weight.shape, 7.0, dtype=BF16, device=device)
    dequantize_4bit([weight], [rows])
    want = eager(part, BF16)
    assert all(torch.equal(piece, want) for piece in rows.chunk(times))

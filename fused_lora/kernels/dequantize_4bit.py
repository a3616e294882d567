"""4-bit weights (`packed_4bit.py`), dequantised into the rows of wider matrices, many at once.

A table in GPU memory says where each weight and its rows lie. A single launch walks through the
whole table, a decoder layer's seven weights for instance. The table stays valid as long as no
address changes, so a CUDA graph may hold the launch.

The bits are those of `bitsandbytes.functional.dequantize_4bit`: every operation rounds to fp32, and
the result once more to the rows' dtype. The constants inside its kernels equal `values`, with two
differences. FP4's code 8 is -0 in its kernels, except for those with AVX-512, and 0 in `values`.
And its GPU kernels flush results below 2^-126 to 0.

Traffic: every code and absmax read once, every row written once. The 77 M values of a layer of
Qwen2.5-3B are 193 MB in bf16, of which 154 are written.
"""

from collections.abc import Callable, Hashable, Sequence
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import (
    cdiv,
    check_runnable,
    is_capturing,
    launch,
    next_power_of_2,
)

from .packed_4bit import Packed4bit, misfits
from .tables import uploaded

# Values of a program, and its warps.
TILE, NUM_WARPS = 4096, 4

# Values that share a row and an absmax, where all blocks and rows consist of such runs.
MAX_RUN = 64

# Bytes that a thread writes at once, where addresses allow it. It also reads their codes at once.
# Then threads need not exchange anything.
MAX_WRITE = 16

# Tables to keep.
MAX_TABLES = 8

# First program of an entry that fills up the table.
NEVER = 2**31 - 1


@triton.jit
def _dequantize_4bit_kernel(
    table_ptr,  # [columns of the table, WEIGHTS] int64
    rows_like_ptr,  # any pointer of the rows' dtype
    ends_ptr,  # [EXPERTS] int32: the end of each expert's tokens
    WEIGHTS: tl.constexpr,  # a power of two
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    READ: tl.constexpr,  # bytes
    WRITE: tl.constexpr,  # bytes
    NESTED: tl.constexpr,
    LOW_FIRST: tl.constexpr,
    INDEX: tl.constexpr,  # the dtype that counts a weight's runs
    EXPERTS: tl.constexpr,  # 0: weights of no experts
):
    program = tl.program_id(0)
    first_programs = tl.load(table_ptr + tl.arange(0, WEIGHTS))
    weight = tl.sum((first_programs <= program).to(tl.int32)) - 1
    table_ptr += weight
    first_program = tl.load(table_ptr).to(tl.int32)
    runs = tl.load(table_ptr + WEIGHTS).to(INDEX)
    runs_of_row = tl.load(table_ptr + 2 * WEIGHTS).to(INDEX)
    runs_of_block_log2 = tl.load(table_ptr + 3 * WEIGHTS).to(INDEX)
    row_stride = tl.load(table_ptr + 4 * WEIGHTS)
    rows_ptr = tl.load(table_ptr + 5 * WEIGHTS).to(rows_like_ptr.dtype)
    codes_ptr = tl.load(table_ptr + 6 * WEIGHTS).to(tl.pointer_type(tl.uint8))
    values_ptr = tl.load(table_ptr + 7 * WEIGHTS).to(tl.pointer_type(tl.float32))
    itemsize: tl.constexpr = rows_like_ptr.dtype.element_ty.primitive_bitwidth // 8
    row_stride = tl.multiple_of(row_stride, WRITE // itemsize)
    rows_ptr = tl.multiple_of(rows_ptr, WRITE)
    codes_ptr = tl.multiple_of(codes_ptr, READ)

    tile = program - first_program
    first_run = tile.to(INDEX) * (TILE // RUN)
    if EXPERTS:
        runs_of_expert = runs // EXPERTS
        first_expert = first_run // runs_of_expert
        last_expert = (tl.minimum(first_run + TILE // RUN, runs) - 1) // runs_of_expert
        start = tl.load(ends_ptr + first_expert - 1, mask=first_expert > 0, other=0)
        if tl.load(ends_ptr + last_expert) == start:
            return
    runs = tl.minimum(runs - first_run, TILE // RUN).to(tl.int32)  # of this program
    # In one dimension a thread looks up the codes that it has read. In two, Triton gives them to
    # other threads first.
    byte = tl.arange(0, TILE // 2)
    codes_ptr += tile.to(tl.int64) * (TILE // 2)
    bytes_ = runs * (RUN // 2) if RUN > 1 else (runs + 1) // 2
    pair = tl.load(codes_ptr + byte, mask=byte < bytes_, other=0)
    high = tl.load(values_ptr + (pair >> 4).to(tl.int32))
    low = tl.load(values_ptr + (pair & 15).to(tl.int32))
    if LOW_FIRST:
        high, low = low, high

    run = tl.arange(0, TILE // RUN)
    mask = run < runs
    run += first_run
    absmax = _absmax(table_ptr + 8 * WEIGHTS, run >> runs_of_block_log2, mask, WEIGHTS, NESTED)
    w = tl.interleave(high, low).reshape(TILE // RUN, RUN) * absmax[:, None]
    # int64: rows may lie further apart than they are long
    row = (run // runs_of_row).to(tl.int64)
    column = (run % runs_of_row)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    target = rows_ptr + row[:, None] * row_stride + column
    tl.store(target, w.to(rows_like_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _absmax(table_ptr, block, mask, WEIGHTS: tl.constexpr, NESTED: tl.constexpr):
    """Return the absmax of blocks in fp32."""
    absmax_ptr = tl.load(table_ptr)
    if not NESTED:
        return tl.load(absmax_ptr.to(tl.pointer_type(tl.float32)) + block, mask=mask, other=0.0)
    code = tl.load(absmax_ptr.to(tl.pointer_type(tl.uint8)) + block, mask=mask, other=0)
    values_ptr = tl.load(table_ptr + WEIGHTS).to(tl.pointer_type(tl.float32))
    outer_ptr = tl.load(table_ptr + 2 * WEIGHTS).to(tl.pointer_type(tl.float32))
    offset_ptr = tl.load(table_ptr + 3 * WEIGHTS).to(tl.pointer_type(tl.float32))
    blocks_log2 = tl.load(table_ptr + 4 * WEIGHTS).to(block.dtype)
    outer = tl.load(outer_ptr + (block >> blocks_log2), mask=mask, other=0.0)
    return tl.load(values_ptr + code.to(tl.int32)) * outer + tl.load(offset_ptr)


# The weights, and the rows [out, in] that each is written into.
Matrices = tuple[Sequence[Packed4bit], Sequence[Tensor]]


class _Prepared(NamedTuple):
    """The grid of a launch, and the kernel's arguments."""

    programs: int
    table: Tensor
    rows_like: Tensor
    weights: int
    tile: int
    run: int
    read: int
    write: int
    is_nested: bool
    is_low_first: bool
    index: tl.dtype


class Dequantize4bit:
    """``Dequantize4bit().write(key, matrices, ends)``, where ``matrices()`` is (weights, rows).

    Equivalent PyTorch::

        for weight, into in zip(*matrices()):
            codes = weight.codes.view(torch.uint8).flatten()
            halves = [codes >> 4, codes & 15]
            codes = torch.stack(halves[:: -1 if weight.is_low_first else 1], 1).flatten()
            absmax = weight.absmax
            if weight.nested is not None:
                values, outer, offset, blocksize = weight.nested
                outer = outer.repeat_interleave(blocksize)[: len(absmax)]
                absmax = values[absmax.int()] * outer + offset
            absmax = absmax.repeat_interleave(weight.blocksize)[: into.numel()]
            into.copy_((weight.values[codes[: into.numel()].int()] * absmax).view(into.shape))

    rows: [out, in] each, all in bf16, fp16 or fp32, of any row stride. They do not overlap. One
    launch writes them all; where only some weights are double-quantised, it takes two, and those in
    MXFP4 take another.

    key: identifies the weights and the rows, and where they lie. `matrices` is not called for a
    known key. The first call with a key copies a table to the GPU. The tables that a CUDA graph
    uses live as long as this object.

    ends: [experts] int32, or None. Each weight holds all experts, [experts out, in], and `ends`
    says where each expert's tokens end. Rows of experts without tokens are left as they are, unless
    they share a tile of 4,096 values with others.

    Autograd does not see the rows change.

    Raises:
        ValueError: weights and rows do not fit together, or the kernel cannot run on them.
        RuntimeError: the first call with a key is captured in a CUDA graph, which cannot hold the
            copy of its table.
    """

    def __reduce__(self):
        return Dequantize4bit, ()  # a copy of it knows nothing: its matrices lie elsewhere

    def __init__(self) -> None:
        self._prepared: dict[Hashable, list[_Prepared]] = {}
        self._captured: dict[int, list[_Prepared]] = {}  # by id

    def write(
        self, key: Hashable, matrices: Callable[[], Matrices], ends: Tensor | None = None
    ) -> None:
        known = self._prepared.get(key)
        if known is None:
            weights, rows = matrices()
            _check(weights, rows)
            if not rows:
                return
            known = self._prepared[key] = _prepare_each_kind(weights, rows)
            if len(self._prepared) > MAX_TABLES:
                del self._prepared[next(iter(self._prepared))]
        if is_capturing(known[0].table):
            self._captured[id(known)] = known
        for prepared in known:
            _launch(prepared, ends)


def dequantize_4bit(
    weights: Sequence[Packed4bit], rows: Sequence[Tensor], ends: Tensor | None = None
) -> None:
    """Write the weights into the rows, as `Dequantize4bit` does, and forget the table."""
    Dequantize4bit().write(None, lambda: (weights, rows), ends)


def _launch(prepared: _Prepared, ends: Tensor | None = None) -> None:
    programs, table, rows_like, *rest = prepared
    if programs:  # an empty grid cannot be launched
        launch(
            _dequantize_4bit_kernel, (programs,), table, rows_like,
            rows_like if ends is None else ends, *rest, 0 if ends is None else len(ends),
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _prepare_each_kind(weights: Sequence[Packed4bit], rows: Sequence[Tensor]) -> list[_Prepared]:
    """Prepare a launch for the weights of each kind: double-quantised or not, and MXFP4."""
    if is_capturing(rows[0]):
        raise RuntimeError(
            "dequantize_4bit: a CUDA graph cannot hold the first launch for weights: run one step "
            "before you capture"
        )
    kinds: dict[tuple[bool, bool], list[tuple[Packed4bit, Tensor]]] = {}
    for weight, into in zip(weights, rows, strict=True):
        kind = weight.nested is None, weight.is_low_first
        kinds.setdefault(kind, []).append((weight, into))
    return [
        _prepare([weight for weight, _ in pairs], [into for _, into in pairs])
        for pairs in kinds.values()
    ]


def _prepare(weights: Sequence[Packed4bit], rows: Sequence[Tensor]) -> _Prepared:
    device, dtype, itemsize = rows[0].device, rows[0].dtype, rows[0].element_size()
    run = gcd(MAX_RUN, *(gcd(weight.shape[1], weight.blocksize) for weight in weights))
    write = gcd(MAX_WRITE, *(t.data_ptr() for t in rows), *(t.stride(0) * itemsize for t in rows))
    read = gcd(max(write // itemsize // 2, 1), *(weight.codes.data_ptr() for weight in weights))
    entries, programs, most_runs = [], 0, 0
    for weight, into in zip(weights, rows, strict=True):
        runs, runs_of_block = into.numel() // run, weight.blocksize // run
        entry = [programs, runs, into.shape[1] // run, _log2(runs_of_block), into.stride(0)]
        tensors, nested = [into, weight.codes, weight.values, weight.absmax], weight.nested
        if nested is not None:
            tensors += nested.values, nested.absmax, nested.offset
        entry += (tensor.data_ptr() for tensor in tensors)
        entry += () if nested is None else (_log2(nested.blocksize),)
        entries.append(entry)
        programs += cdiv(runs, TILE // run)
        most_runs = max(most_runs, runs)
    count = next_power_of_2(len(entries))
    entries += [[NEVER, *entries[0][1:]]] * (count - len(entries))
    table = uploaded([*zip(*entries, strict=True)], torch.int64, device)
    rows_like = torch.empty(1, dtype=dtype, device=device)
    first = weights[0]
    kind = first.nested is not None, first.is_low_first
    index = tl.int32 if most_runs + TILE < 2**31 else tl.int64
    return _Prepared(programs, table, rows_like, count, TILE, run, read, write, *kind, index)


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _check(weights: Sequence[Packed4bit], rows: Sequence[Tensor]) -> None:
    """Raise ValueError where weights and rows do not fit together."""
    if len(weights) != len(rows):
        raise ValueError(
            f"dequantize_4bit: {len(weights)} weights and rows for {len(rows)} given, should be "
            "as many of both"
        )
    for i, (weight, into) in enumerate(zip(weights, rows, strict=True)):
        check_runnable("dequantize_4bit", _dequantize_4bit_kernel, into)
        for given, wanted in misfits(weight, into, rows[0]):
            raise ValueError(f"dequantize_4bit: weight {i} has {given}, should have {wanted}")

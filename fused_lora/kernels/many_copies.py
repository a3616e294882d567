"""Many small matrices copied, scaled and cast at once.

    target_i = scaling_i source_i       [rows_i, columns_i], i = 1 ... n

PyTorch's `_foreach_copy_` is one kernel only where every target is dense, and the adapters' places
in a border are not: of 36 layers' 504 matrices it makes 504 launches. Here a table in the GPU's
memory says where each lies, and one launch walks through all of it. The table stays as long as no
address changes, so a CUDA graph may hold the launch. What is not on one GPU, or too large, or in
dtypes without a kernel, PyTorch copies.

Traffic: every source read once, every target written once: at rank 32, from fp32 to bf16, 60 M
elements of Qwen2.5-3B are 360 MB. Arithmetic is fp32 and rounds once, at the store.
"""

from collections.abc import Sequence
from math import gcd
from operator import is_
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import DTYPES, cdiv, launch

# Elements of a program. The adapters of Qwen2.5-3B have 65,536 to 352,256: 16 to 86 programs each.
BLOCK = 4096

# A matrix has less: an element's index is int32. A GPU divides int64 by so many instructions that
# they would take longer than the traffic.
MAX_ELEMENTS = 2**31

# Elements that one division is for, and one instruction copies, where rows and addresses allow it.
MAX_RUN = 8


@triton.jit
def _copy_kernel(
    table_ptr,  # [n, 6] int64
    scalings_ptr,  # [n] fp32
    entries_ptr,  # [programs] int32, whose entry a program copies a part of
    starts_ptr,  # [programs] int32, from which element on
    source_like_ptr,  # any pointer of the sources' dtype
    target_like_ptr,  # any pointer of the targets' dtype
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,  # all columns, strides and addresses are multiples of so many elements
):
    program = tl.program_id(0)
    entry = tl.load(entries_ptr + program).to(tl.int64)
    scaling = tl.load(scalings_ptr + entry)
    table_ptr += entry * 6
    source_ptr = tl.load(table_ptr).to(source_like_ptr.dtype)
    target_ptr = tl.load(table_ptr + 1).to(target_like_ptr.dtype)
    source_bytes: tl.constexpr = source_ptr.dtype.element_ty.primitive_bitwidth // 8
    target_bytes: tl.constexpr = target_ptr.dtype.element_ty.primitive_bitwidth // 8
    source_ptr = tl.multiple_of(source_ptr, RUN * source_bytes)
    target_ptr = tl.multiple_of(target_ptr, RUN * target_bytes)
    runs_of_row = tl.load(table_ptr + 2).to(tl.int32) // RUN
    runs = tl.load(table_ptr + 3).to(tl.int32) // RUN
    source_row_stride = tl.multiple_of(tl.load(table_ptr + 4), RUN)
    target_row_stride = tl.multiple_of(tl.load(table_ptr + 5), RUN)
    run = tl.load(starts_ptr + program) // RUN + tl.arange(0, BLOCK // RUN)[:, None]
    mask = run < runs
    # int64: rows may lie further apart than they are long
    row = (run // runs_of_row).to(tl.int64)
    column = run % runs_of_row * RUN + tl.arange(0, RUN)[None, :]
    value = tl.load(source_ptr + row * source_row_stride + column, mask=mask).to(tl.float32)
    value = (value * scaling).to(target_ptr.dtype.element_ty)
    tl.store(target_ptr + row * target_row_stride + column, value, mask=mask)


class _Table(NamedTuple):
    given: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[float]]
    key: tuple
    table: Tensor
    scalings: Tensor
    entries: Tensor
    starts: Tensor
    run: int


class ManyCopies:
    """``ManyCopies().copy(targets, sources, scalings)``, the same object for the same matrices.

    Equivalent PyTorch::

        for target, source, scaling in zip(targets, sources, scalings):
            target.copy_(source * scaling)

    targets, sources: [rows, columns] each, of any strides, dtypes and devices. Targets do not
    overlap. On a GPU the first call for a set of addresses copies a table there, which no capture
    of a CUDA graph allows; the next ones do not. Tensors of the very same sequences are taken to
    lie where they did. Autograd sees the targets change.

    Raises:
        ValueError: there are not as many targets as sources and scalings, or shapes differ.
    """

    def __init__(self) -> None:
        self._table: _Table | None = None

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], scalings: Sequence[float]
    ) -> None:
        if not targets:
            return
        given = targets, sources, scalings
        if self._table is not None and all(map(is_, self._table.given, given)):
            self._launch(self._table, targets, sources)
            return
        if not _has_kernel(targets, sources):
            _check(targets, sources, scalings)
            wide = [s.to(torch.promote_types(s.dtype, torch.float32)) for s in sources]
            torch._foreach_copy_(list(targets), torch._foreach_mul(wide, list(scalings)))
            return
        places = [(t.data_ptr(), *t.shape, t.stride(0)) for t in (*targets, *sources)]
        key = *places, *scalings, targets[0].dtype, sources[0].dtype, targets[0].device
        if self._table is None or self._table.key != key:
            _check(targets, sources, scalings)
            self._table = _table_of(key, *given)
        self._table = self._table._replace(given=given)
        self._launch(self._table, targets, sources)

    @staticmethod
    def _launch(table: _Table, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        _, _, *arrays, run = table
        programs = len(table.entries)
        if programs:  # an empty grid cannot be launched
            launch(_copy_kernel, (programs,), *arrays, sources[0], targets[0], BLOCK, run)
        torch.autograd.graph.increment_version(targets)


def _table_of(
    key: tuple, targets: Sequence[Tensor], sources: Sequence[Tensor], scalings: Sequence[float]
) -> _Table:
    rows, entries, starts, run = [], [], [], MAX_RUN
    for entry, (target, source) in enumerate(zip(targets, sources, strict=True)):
        size = target.numel()
        strides = source.stride(0), target.stride(0)
        rows.append((source.data_ptr(), target.data_ptr(), max(target.shape[1], 1), size, *strides))
        if size:
            addresses = (t.data_ptr() // t.element_size() for t in (source, target))
            run = gcd(run, target.shape[1], *strides, *addresses)
        for block in range(cdiv(size, BLOCK)):
            entries.append(entry)
            starts.append(block * BLOCK)
    device = targets[0].device
    return _Table(
        (targets, sources, scalings),
        key,
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(scalings, dtype=torch.float32, device=device),
        torch.tensor(entries, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        run,
    )


def _check(targets: Sequence[Tensor], sources: Sequence[Tensor], scalings: Sequence[float]) -> None:
    """Raise ValueError where the matrices do not fit together."""
    if not len(targets) == len(sources) == len(scalings):
        raise ValueError(
            f"ManyCopies: {len(targets)} targets, {len(sources)} sources and {len(scalings)} "
            "scalings given, should be one of each for every matrix"
        )
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if target.ndim != 2 or source.shape != target.shape:
            raise ValueError(
                f"ManyCopies: target {i} is {list(target.shape)} and source {i} "
                f"{list(source.shape)}, should both be [rows, columns]"
            )


def _has_kernel(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """Whether all are on one GPU, targets and sources of one dtype each, rows in one piece, and
    none too large."""
    device, to, of = targets[0].device, targets[0].dtype, sources[0].dtype
    return (
        device.type == "cuda"
        and to in DTYPES
        and of in DTYPES
        and all(t.dtype == to and t.device == device and t.stride(-1) == 1 for t in targets)
        and all(t.numel() < MAX_ELEMENTS for t in targets)
        and all(s.dtype == of and s.device == device and s.stride(-1) == 1 for s in sources)
    )

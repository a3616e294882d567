"""Many small matrices copied, scaled and cast at once.

    target_i = scaling_i source_i       [rows_i, columns_i], i = 1 ... n

PyTorch's `_foreach_copy_` is one kernel only where every target is dense, and the adapters' places
in a border are not: for a layer's 14 matrices it makes 14 launches. Here a table in GPU memory says
where each matrix lies, and a single launch walks through the whole table. The table stays valid as
long as no address changes, so a CUDA graph may hold the launch. PyTorch copies matrices that are
too large, not all on one GPU, or in dtypes without a kernel.

Traffic: every source read once, every target written once: at rank 32, from fp32 to bf16, the 60 M
elements of Qwen2.5-3B are 360 MB. Arithmetic is fp32 and rounds once, at the store.
"""

from collections.abc import Callable, Hashable, Sequence
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import DTYPES, cdiv, is_capturing, launch

from .tables import uploaded

# Elements of a program. The adapters of Qwen2.5-3B have 65,536 to 352,256: 16 to 86 programs each.
BLOCK_COPIED = 4096

# A matrix has fewer elements than this, because their indices are int32. Dividing int64 takes a GPU
# many instructions, which would outlast the traffic.
MAX_ELEMENTS = 2**31

# Tables to keep: one for each adapter that takes turns.
MAX_TABLES = 8

# Elements per division and per copy instruction, where rows and addresses allow it.
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
    RUN: tl.constexpr,  # elements; it divides all columns, strides and addresses
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
    readable = tl.where(tl.load(table_ptr) == 0, 0, runs)  # of no source, nothing
    source_row_stride = tl.multiple_of(tl.load(table_ptr + 4), RUN)
    target_row_stride = tl.multiple_of(tl.load(table_ptr + 5), RUN)
    run = tl.load(starts_ptr + program) // RUN + tl.arange(0, BLOCK // RUN)[:, None]
    mask = run < runs
    # int64: rows may lie further apart than they are long
    row = (run // runs_of_row).to(tl.int64)
    column = run % runs_of_row * RUN + tl.arange(0, RUN)[None, :]
    value = tl.load(
        source_ptr + row * source_row_stride + column, mask=run < readable, other=0.0
    ).to(tl.float32)
    value = (value * scaling).to(target_ptr.dtype.element_ty)
    tl.store(target_ptr + row * target_row_stride + column, value, mask=mask)


# Where to, from where (None: zeros) and times what.
Matrices = tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[float]]


class _Table(NamedTuple):
    table: Tensor
    scalings: Tensor
    entries: Tensor
    starts: Tensor
    source_like: Tensor
    target_like: Tensor
    run: int


class ManyCopies:
    """``ManyCopies().copy(key, matrices)``, where ``matrices()`` is (targets, sources, scalings).

    Equivalent PyTorch::

        for target, source, scaling in zip(*matrices()):
            target.copy_(0.0 if source is None else source * scaling)

    targets, sources: [rows, columns] each, of any strides, dtypes and devices. Targets do not
    overlap. key: identifies the matrices, where they lie, and their scalings. On a GPU `matrices`
    is not called for a known key. The first call with a key copies a table to the GPU. A CUDA graph
    cannot capture that copy, so a first call during capture lets PyTorch copy the matrices. The
    tables that a graph uses live as long as this object.

    Autograd does not see the targets change where the kernel writes them.

    Raises:
        ValueError: there are not as many targets as sources and scalings, or shapes differ.
    """

    def __reduce__(self):
        return ManyCopies, ()  # a copy of it knows nothing: its matrices lie elsewhere

    def __init__(self) -> None:
        # whether a CUDA graph may replay some of the copies without our noticing
        self.is_captured = False
        self._tables: dict[Hashable, _Table] = {}
        self._captured: list[_Table] = []

    def copy(self, key: Hashable, matrices: Callable[[], Matrices]) -> None:
        table = self._tables.get(key)
        if table is None:
            given = matrices()
            _check(*given)
            targets, sources, scalings = given
            if not targets:
                return
            self.is_captured |= is_capturing(targets[0])
            if not _has_kernel(targets, sources) or is_capturing(targets[0]):
                _copy_by_pytorch(targets, sources, scalings)
                return
            table = self._tables[key] = _table_of(*given)
            if len(self._tables) > MAX_TABLES:
                del self._tables[next(iter(self._tables))]
        if is_capturing(table.table) and not any(one is table for one in self._captured):
            self.is_captured = True
            self._captured.append(table)
        programs = table.entries.shape[0]
        if programs:  # an empty grid cannot be launched
            launch(_copy_kernel, (programs,), *table[:-1], BLOCK_COPIED, table.run)


def _copy_by_pytorch(
    targets: Sequence[Tensor], sources: Sequence[Tensor | None], scalings: Sequence[float]
) -> None:
    zeros = [t for t, source in zip(targets, sources, strict=True) if source is None]
    copied = [t for t, source in zip(targets, sources, strict=True) if source is not None]
    if zeros:
        torch._foreach_zero_(zeros)
    if copied:
        wide = [s.to(torch.promote_types(s.dtype, torch.float32)) for s in sources if s is not None]
        factors = [f for f, source in zip(scalings, sources, strict=True) if source is not None]
        torch._foreach_copy_(copied, torch._foreach_mul(wide, factors))


def _table_of(
    targets: Sequence[Tensor], sources: Sequence[Tensor | None], scalings: Sequence[float]
) -> _Table:
    rows, entries, starts, run = [], [], [], MAX_RUN
    for entry, (target, source) in enumerate(zip(targets, sources, strict=True)):
        size = target.numel()
        address, stride = (0, 0) if source is None else (source.data_ptr(), source.stride(0))
        columns = max(target.shape[1], 1)
        rows.append((address, target.data_ptr(), columns, size, stride, target.stride(0)))
        if size:
            run = gcd(run, target.shape[1], stride, target.stride(0))
            run = gcd(run, target.data_ptr() // target.element_size())
            if source is not None:
                run = gcd(run, address // source.element_size())
        for block in range(cdiv(size, BLOCK_COPIED)):
            entries.append(entry)
            starts.append(block * BLOCK_COPIED)
    device = targets[0].device
    source_dtype = next((s.dtype for s in sources if s is not None), targets[0].dtype)

    return _Table(
        uploaded(rows, torch.int64, device),
        uploaded(scalings, torch.float32, device),
        uploaded(entries, torch.int32, device),
        uploaded(starts, torch.int32, device),
        torch.empty(1, dtype=source_dtype, device=device),
        torch.empty(1, dtype=targets[0].dtype, device=device),
        run,
    )


def _check(
    targets: Sequence[Tensor], sources: Sequence[Tensor | None], scalings: Sequence[float]
) -> None:
    """Raise ValueError where the matrices do not fit together."""
    if not len(targets) == len(sources) == len(scalings):
        raise ValueError(
            f"ManyCopies: {len(targets)} targets, {len(sources)} sources and {len(scalings)} "
            "scalings given, should be one of each for every matrix"
        )
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        shape = target.shape if source is None else source.shape
        if target.ndim != 2 or shape != target.shape:
            raise ValueError(
                f"ManyCopies: target {i} is {list(target.shape)} and source {i} "
                f"{list(shape)}, should both be [rows, columns]"
            )


def _has_kernel(targets: Sequence[Tensor], sources: Sequence[Tensor | None]) -> bool:
    """Return True if all are on one GPU, targets and sources of one dtype each, rows in one piece,
    and none too large."""
    device, to = targets[0].device, targets[0].dtype
    there = [source for source in sources if source is not None]
    of = there[0].dtype if there else to
    return (
        device.type == "cuda"
        and to in DTYPES
        and of in DTYPES
        and all(t.dtype == to and t.device == device and t.stride(-1) == 1 for t in targets)
        and all(t.numel() < MAX_ELEMENTS for t in targets)
        and all(s.dtype == of and s.device == device and s.stride(-1) == 1 for s in there)
    )

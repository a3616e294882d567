"""Pinned host memory in slabs, from which tensors are cut without gaps.

Pinning is slow and CUDA forbids it in a capture, so we keep slabs and reuse them. A tensor takes
the first bytes that are free, in several pieces if need be. So none are lost between tensors,
whatever lengths follow each other: it grows to the most bytes ever in use, rounded up to a slab.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Copying a slab takes 1.3 ms over PCIe 5. A power of two: torch 2.11 rounds pinned memory up to one
SLAB_BYTES = 64 * 2**20
# Pieces start at multiples of this.
ALIGNMENT = 512
# What we take if nobody sets a limit. Pinned memory cannot be swapped, and data loaders, page cache
# and saving need some as well.
DEFAULT_SHARE = 0.5


class Taken(NamedTuple):
    """Host memory of one tensor: bytes in a row of pieces. Call `give_back` once."""

    pieces: list[Tensor]
    give_back: Callable[[], None]


Ranges = list[tuple[int, int]]  # first byte and end, counted through all slabs


class HostMemory:
    """Pinned memory of up to `limit_bytes`, in whole slabs.

    A replay overwrites the memory that its graph was captured with, no matter who is using it.
    Graphs can share that, because each is done with it before the next one runs. Eager calls must
    not, so what a capture takes is for captures from then on.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._slabs: list[Tensor] = []
        self._free: dict[bool, Ranges] = {False: [], True: []}  # by whether graphs hold it
        self._returned: deque[tuple[bool, Ranges]] = deque()

    @property
    def pinned_bytes(self) -> int:
        return len(self._slabs) * SLAB_BYTES

    def room(self, in_capture: bool) -> int:
        """Return how many bytes a call can take now. A capture takes what is pinned already."""
        return self._free_bytes(in_capture) + (0 if in_capture else self._unpinned_bytes())

    def reserve(self, wanted: int, least: int) -> None:
        """Pin until a capture finds `wanted` bytes or, if the limit is below that, `least`."""
        room = self.room(in_capture=True) + self._unpinned_bytes()
        size = wanted if wanted <= room else least
        while self.room(in_capture=True) < size and self._unpinned_bytes():
            self._pin()

    def take(self, size: int, in_capture: bool) -> Taken | None:
        """Return memory for `size` bytes, or None if there is no room."""
        left = -(-size // ALIGNMENT) * ALIGNMENT
        while self._free_bytes(in_capture) < left <= self.room(in_capture):
            self._pin()
        if self._free_bytes(in_capture) < left:
            return None
        ranges: Ranges = []
        for free in self._usable(in_capture):
            while free and left:
                first, end = free.pop(0)
                taken = min(left, end - first)
                ranges.append((first, first + taken))
                left -= taken
                if first + taken < end:
                    free.insert(0, (first + taken, end))
        pieces = []
        for piece in self._slices(ranges):
            pieces.append(piece[:size])
            size -= len(pieces[-1])
        # a tensor may be dropped at any time, in any thread: only note it
        return Taken(pieces, partial(self._returned.append, (in_capture, ranges)))

    def _usable(self, in_capture: bool) -> list[Ranges]:
        return [self._free[True], self._free[False]] if in_capture else [self._free[False]]

    def _free_bytes(self, in_capture: bool) -> int:
        self._collect()
        return sum(end - first for ranges in self._usable(in_capture) for first, end in ranges)

    def _unpinned_bytes(self) -> int:
        return max(self.limit_bytes - self.pinned_bytes, 0) // SLAB_BYTES * SLAB_BYTES

    def _collect(self) -> None:
        """Merge what was given back into what is free."""
        while self._returned:
            in_capture, ranges = self._returned.popleft()
            free = self._free[in_capture]
            ranges = sorted([*free, *ranges])
            free.clear()
            for first, end in ranges:
                if free and free[-1][1] == first:
                    first, _ = free.pop()
                free.append((first, end))

    def _pin(self) -> None:
        first = self.pinned_bytes
        try:
            self._slabs.append(_pinned(SLAB_BYTES))
        except RuntimeError:  # the system has no more
            self.limit_bytes = first
        else:
            self._returned.append((False, [(first, self.pinned_bytes)]))

    def _slices(self, ranges: Ranges) -> Iterator[Tensor]:
        for first, end in ranges:
            while first < end:
                slab, start = divmod(first, SLAB_BYTES)
                piece = self._slabs[slab][start : start + end - first]
                yield piece
                first += len(piece)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


# --- how much there is ----------------------------------------------------------------------------


def default_limit() -> int:
    """Return DEFAULT_SHARE of what is `available_to_rank` now."""
    return int(available_to_rank() * DEFAULT_SHARE)


def available_to_rank() -> int:
    """Return this process's part of the host memory that is available now, which the ranks on a
    host share."""
    return available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much host memory this process can still take, within the limits of its cgroups.
    Linux alone says; elsewhere there is no limit."""
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return 2**63 - 1
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup around this process leaves. In a container the path that /proc has may
    not exist, but its own limit lies in the mounted folder. Page cache that was not used lately can
    go, and counts as free."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controller, path = line.split(":", 2)
        if controller not in ("", "memory"):  # "": version 2
            continue
        mount = root / "sys/fs/cgroup" / controller
        limit, usage, cache = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controller
            else ("memory.max", "memory.current", "inactive_file")
        )
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == mount.parent:
                break
            try:
                most, used, stat = (
                    (folder / name).read_text() for name in (limit, usage, "memory.stat")
                )
            except OSError:
                continue
            if most.strip() != "max":
                fields = dict(line.split() for line in stat.splitlines())
                yield max(int(most) - int(used) + int(fields.get(cache, 0)), 0)


def bytes_to_read(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes of these need host memory once they are read there: those on a GPU, and
    those in mapped files, where transformers leaves a checkpoint's weights."""
    maps = Path("/proc/self/maps")
    lines = [line.split() for line in maps.read_text().splitlines()] if maps.exists() else []
    ranges = [
        [int(address, 16) for address in addresses.split("-")]
        for addresses, _, _, _, inode, *_ in lines
        if inode != "0"
    ]
    return sum(
        one.nbytes
        for one in tensors
        if one.is_cuda or any(first <= one.data_ptr() < end for first, end in ranges)
    )

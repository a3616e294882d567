"""Frozen weights in host memory, copied to the GPU before their layer runs (`layer/gathering.py`).

    host memory  [out, in + gap]  ->  GPU  [out, in + width], a `Scratch` of all layers

Rows lie as far apart as in the bordered matrix, so a weight is one run of bytes on both sides. In
4 bits we copy bitsandbytes' codes. Copies run on a side stream, from pinned memory, whose addresses
stay the same, so CUDA graphs hold them. The memory is cut from slabs (`step/host_memory.py`). A
weight moves there when its layer is first put into buffers, one at a time: until then it lies where
the model was loaded, which may be a file mapped into memory.
"""

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..layer.gathering import WeightSource
from ..step.host_memory import HostMemory


class _Held:
    """Bytes in host memory, in a row of pieces. Pinned ones go back to their slabs in the end."""

    def __init__(self, pieces: Sequence[Tensor], give_back: Callable[[], None] | None = None):
        self.pieces, self._give_back = pieces, give_back

    @property
    def is_pinned(self) -> bool:
        return self._give_back is not None

    def __del__(self) -> None:
        if self._give_back is not None:
            self._give_back()


class HostRows(WeightSource):
    """A weight [out, in] in host memory.

    rows: where it lies now. device: where it is used. memory: the slabs that it is pinned in, one
    set for all weights of a model.
    """

    where, call = "in host memory", "host_base"

    def __init__(self, rows: Tensor, device: torch.device, memory: HostMemory):
        super().__init__(rows.shape, rows.dtype, device)
        self._memory, self._stride = memory, rows.shape[1]
        self._held = _Held([_bytes_of(rows.cpu().contiguous())])

    @property
    def way(self) -> torch.device:
        return self.device

    @property
    def address(self) -> int:
        return self._held.pieces[0].data_ptr()

    def space(self, stride: int) -> None:
        """Move the rows this far apart, with zeros between them, into pinned memory."""
        is_on_gpu = self.device.type == "cuda"
        if self._stride == stride and self._held.is_pinned == is_on_gpu:
            return
        rows = self._on_host()
        if self._stride != stride:
            # on the GPU: new host memory costs more than the way there and back
            spaced = rows.new_zeros(len(rows), stride, device=self.device)
            spaced[:, : self.shape[1]].copy_(rows)
            rows = spaced
        held = self._pinned(_bytes_of(rows)) if is_on_gpu else _Held([_bytes_of(rows)])
        self._held, self._stride = held, stride

    def _pinned(self, flat: Tensor) -> _Held:
        taken = self._memory.take(len(flat), in_capture=False)
        if taken is None:
            raise RuntimeError(
                f"host_base: the system pins no more than {self._memory.pinned_bytes / 2**30:.1f} "
                "GiB of host memory: raise layers_on_gpu, or load the model in 4 bits"
            )
        # copies may still read memory that was given back
        torch.cuda.synchronize(self.device)
        for piece, part in zip(taken.pieces, _split(flat, taken.pieces), strict=True):
            piece.copy_(part)
        return _Held(*taken)

    def _on_host(self) -> Tensor:
        """Return the weight [out, in], whose rows may have gaps."""
        pieces = [*self._held.pieces]
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return flat.view(self.dtype).view(-1, self._stride)[:, : self.shape[1]]

    def whole(self) -> Tensor:
        rows = torch.empty(self.shape[0], self._stride, dtype=self.dtype, device=self.device)
        self._copy_to(rows)
        return rows[:, : self.shape[1]].contiguous()

    def copied(self) -> "HostRows":
        return HostRows(self._on_host().clone(), self.device, self._memory)

    def moved(self, device: torch.device, dtype: torch.dtype) -> "HostRows":
        if dtype != self.dtype:
            return HostRows(self._on_host().to(dtype), device, self._memory)
        moved = copy.copy(self)  # the same memory, used elsewhere
        moved.device = device
        return moved

    def _copy_to(self, rows: Tensor) -> None:
        """Copy rows and gaps to a matrix [out, stride]."""
        parts = _split(_bytes_of(rows), self._held.pieces)
        for piece, part in zip(self._held.pieces, parts, strict=True):
            part.copy_(piece, non_blocking=True)

    @staticmethod
    def start(pairs: Sequence[tuple["HostRows", Tensor]]) -> Callable[[], None]:
        device = pairs[0][0].device
        if device.type != "cuda":
            for source, rows in pairs:
                source._copy_to(rows)
            return lambda: None
        copies = _stream_on(device)
        copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies):
            for source, rows in pairs:
                source._copy_to(rows)
            copied = copies.record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(copied)


@lru_cache
def _stream_on(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)


def _split(flat: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    return flat.split([*map(len, pieces)])

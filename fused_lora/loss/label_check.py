"""Labels outside the vocabulary: an error that names one, and never makes the host wait.

A label must be from 0 to the vocabulary's size - 1, or -100 to be ignored. PyTorch's loss raises
for any other on the CPU. On a GPU it stops in an assert that names neither the label nor the
vocabulary, and leaves CUDA unusable. The fused loss makes such a row NaN and raises this error.

One kernel finds the first wrong label and writes it into 16 bytes on the GPU, which are copied into
pinned host memory. That is two launches, and the host waits for neither. It reads that memory

- at once, before the head runs, if it waits anyway to count the labelled tokens (`labelled_rows`);
- in the next call of a loss or of the `GraphedStep`, in a CUDA graph or with max_labelled_tokens.
  The GPU keeps the first wrong label, however many steps the host is ahead.

A `GraphedStep` checks labels on the CPU there, and raises before the step. Only labels that are
already on the GPU cost the one update that they make NaN.

We decided against two alternatives. A check within `_cross_entropy_kernel` costs no launch, but
comes after the model has run. `torch._assert_async` names nothing and leaves CUDA unusable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import is_capturing, launch

IGNORED = -100
BLOCK_LABELS = 4096
TO_DO = ": resize the embeddings, or mask it"
ITS_UPDATE = ". Its update was NaN: go on from a checkpoint"
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["labels_ptr"])
def _wrong_label_kernel(
    labels_ptr,  # [tokens]
    found_ptr,  # [2]: a wrong label, and its vocabulary's size or 0; written if it is 0
    tokens,
    vocabulary,
    ignore_index,
    BLOCK: tl.constexpr,
):
    first = tl.full([BLOCK], NOWHERE, tl.int32)
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        labels = tl.load(labels_ptr + at, mask=at < tokens, other=0)
        is_wrong = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
        first = tl.minimum(first, tl.where(is_wrong & (at < tokens), at, NOWHERE))
    place = tl.min(first, axis=0)
    is_new = (place != NOWHERE) & (tl.load(found_ptr + 1) == 0)
    label = tl.load(labels_ptr + place, mask=is_new, other=0).to(tl.int64)
    tl.store(found_ptr, label, mask=is_new)
    tl.store(found_ptr + 1, label * 0 + vocabulary, mask=is_new)


def find_wrong_label(labels: Tensor, found: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Write the first wrong label and the vocabulary's size into `found`, unless it has one.

    Equivalent PyTorch::

        wrong = labels[((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)]
        if len(wrong) and not found[1]:
            found.copy_(torch.stack([wrong[0], vocabulary]))

    labels: [...], integers. found: [2], int64, both on one device.
    """
    launch(
        _wrong_label_kernel, (1,),
        labels.reshape(-1).contiguous(), found, labels.numel(), vocabulary, ignore_index,
        BLOCK_LABELS, num_warps=8,
    )  # fmt: skip


class _Found:
    """The first wrong label on a device, and its vocabulary: on the device and on the host."""

    @torch.inference_mode(False)  # tensors made there could not be written to later
    def __init__(self, device: torch.device):
        self.on_device = torch.zeros(2, dtype=torch.int64, device=device)
        self.on_host = self.on_device
        if device.type != "cpu":
            self.on_host = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)

    def take(self) -> tuple[int, int] | None:
        """Return the wrong label and the vocabulary, if the host sees one, and clear both."""
        if not self.on_host.tolist()[1]:
            return None
        if self.on_device.is_cuda:
            torch.cuda.synchronize(self.on_device.device)  # copies may be in flight
        label, vocabulary = self.on_host.tolist()
        self.on_device.zero_()
        self.on_host.zero_()
        return label, vocabulary


_found: dict[torch.device, _Found] = {}  # never freed: graphs hold the addresses


@contextmanager
def checking(
    labels: Tensor, vocabulary: int, ignore_index: int = IGNORED, waits: bool = True
) -> Iterator[None]:
    """Raise a ValueError that names a wrong label: at the end of this context, or in a later call
    without `waits`. waits: the host waits for the GPU inside it anyway."""
    if labels.is_floating_point():  # refused elsewhere
        yield
        return
    device, captures = labels.device, is_capturing(labels)
    if device not in _found:
        if captures:  # cannot pin memory now; a GraphedStep has run eagerly before
            yield
            return
        _found[device] = _Found(device)
    if not captures:
        raise_earlier(device)
    found = _found[device]
    find_wrong_label(labels, found.on_device, vocabulary, ignore_index)
    if found.on_host is not found.on_device:
        found.on_host.copy_(found.on_device, non_blocking=True)
    yield
    if (waits or found.on_host is found.on_device) and (wrong := found.take()) is not None:
        raise ValueError(_said("a label is", *wrong, ignore_index))


def raise_earlier(device: torch.device) -> None:
    """Raise the error of an earlier call, if the host sees one by now."""
    found = _found.get(device)
    if found is not None and (wrong := found.take()) is not None:
        raise ValueError(_said("a label of an earlier batch is", *wrong, IGNORED, ITS_UPDATE))


def _said(what: str, label: int, vocabulary: int, ignore_index: int, to_do: str = TO_DO) -> str:
    return (
        f"{what} {label}, outside the vocabulary of {vocabulary:,} words (0 to {vocabulary - 1}, "
        f"or {ignore_index} to ignore it){to_do}"
    )


# --- labels that a GraphedStep is given on the CPU ------------------------------------------------


class LabelsSeen:
    """Notes of a step's eager calls: the inputs that a fused loss took as labels, and its
    vocabulary."""

    def __init__(self) -> None:
        self.vocabularies: dict[int, int] = {}  # by the address of the step's copy

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context in which the model runs eagerly."""
        token = _seen.set(self)
        try:
            yield
        finally:
            _seen.reset(token)

    def check(self, inputs: dict[str, Any], copies: dict[str, Any]) -> None:
        """Raise ValueError for a wrong label in these inputs, if they are on the CPU."""
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                vocabulary = self.vocabularies.get(copies[name].data_ptr())
                if vocabulary is not None:
                    _check_on_cpu(value[..., 1:], vocabulary)


_seen: ContextVar[LabelsSeen | None] = ContextVar("labels seen", default=None)


def note(labels: Tensor, vocabulary: int) -> None:
    """Note the labels of a call of a model with a fused loss. It predicts all but a row's first."""
    if (seen := _seen.get()) is not None:
        seen.vocabularies[labels.data_ptr()] = vocabulary


def _check_on_cpu(labels: Tensor, vocabulary: int) -> None:
    if not labels.numel():
        return
    kept = labels.masked_fill(labels == IGNORED, 0)
    least, most = (one.item() for one in kept.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = kept[(kept < 0) | (kept >= vocabulary)]
        raise ValueError(_said("a label is", int(wrong[0]), vocabulary, IGNORED))

"""Gradients in one flat buffer per dtype, which all ranks average in one reduction per update.

The mean is DistributedDataParallel's: every rank divides its gradients by the number of ranks, and
they are summed. The reduction stands between the two graphs of a step (`graph.py`), so ranks may
have batches of different shapes and capture them at different calls. They only have to update
equally often. A rank that has fewer batches ends in PyTorch's own `Join`.

https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook


class FlatGradients:
    """The gradients of parameters. After `hold` or `show` each `.grad` is a view of a flat buffer.

    trained: parameters on one device. group: the ranks that train them, None for the default group.
    ranks: how many there are, 1 without torch.distributed.
    """

    def __init__(self, trained: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        self.trained, self.group = trained, group
        is_distributed = dist.is_available() and dist.is_initialized()
        self.ranks = dist.get_world_size(group) if is_distributed else 1
        self._buffers: list[Tensor] = []
        self._views: list[Tensor] = []  # in the order of trained
        self._addresses: list[int] = []

    def hold(self) -> None:
        """Make every `.grad` its view of a buffer, keeping its value; None becomes zeros."""
        self.gather()
        self.show()

    def gather(self) -> None:
        """Copy every `.grad` into its view of a buffer, unless it is that; for None, zeros."""
        if not self._views:
            self._allocate()
        empty = []
        views = zip(self.trained, self._views, self._addresses, strict=True)
        for parameter, view, address in views:
            if parameter.grad is None:
                empty.append(view)
            elif parameter.grad.data_ptr() != address:
                view.copy_(parameter.grad)
        if len(empty) == len(self._views):
            torch._foreach_zero_(self._buffers)
        elif empty:
            torch._foreach_zero_(empty)

    def clear(self) -> None:
        """Make every `.grad` None, before a capture; its view of a buffer if hooks see the sum."""
        self.gather()  # makes the buffers, outside the graph
        for parameter, view in zip(self.trained, self._views, strict=True):
            parameter.grad = view if _has_hooks(parameter) else None

    def add(self) -> None:
        """Add every new `.grad` to its view of a buffer, and make it that view. This takes a few
        launches, where autograd takes one for each."""
        pairs = zip(self.trained, self._views, strict=True)
        new = {one: view for one, view in pairs if not _has_hooks(one)}  # one given twice has one
        if new:
            torch._foreach_add_([*new.values()], [one.grad for one in new if one.grad is not None])
        for parameter, view in new.items():
            parameter.grad = view
        self.hold()

    def show(self) -> None:
        """Make every `.grad` its view of a buffer, a new one: users may set its `.data`."""
        for parameter, view in zip(self.trained, self._views, strict=True):
            parameter.grad = view.detach()

    def average(self) -> None:
        """Replace what `hold` holds by its mean over all ranks. With NCCL the host does not wait.

        Raises RuntimeError if another rank has ended.
        """
        try:
            for buffer in self._buffers:
                # NCCL divides as it sums
                if buffer.is_cuda and "nccl" in dist.get_backend(self.group):
                    dist.all_reduce(buffer, dist.ReduceOp.AVG, group=self.group)
                else:
                    dist.all_reduce(buffer.div_(self.ranks), group=self.group)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0]
            raise RuntimeError(
                "gradients cannot be averaged over all ranks; see which one failed first: "
                f"{reason[:60]}"
            ) from error

    def start_alike(self) -> None:
        """Give all ranks the parameters of the first. Raises ValueError, on every rank, if they do
        not train the same ones."""
        form = [(str(one.dtype), list(one.shape)) for one in self.trained]
        forms = [form] * self.ranks
        with torch.cuda.device_of(self.trained[0]):  # gathering takes the current device
            dist.all_gather_object(forms, form, group=self.group)
        for rank, other in enumerate(forms):
            if other != forms[0]:
                raise ValueError(
                    f"rank {rank} trains {len(other)} parameters unlike the {len(forms[0])} of "
                    "rank 0: build the same model and the same optimizer on every rank"
                )
        self.share(self.trained, 0)

    @torch.no_grad()
    def share(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Copy tensors from one rank of the group to all."""
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        for _, group in groupby(sorted(tensors, key=_kind), key=_kind):
            alike = [*group]
            flat = torch.cat([one.flatten() for one in alike])
            dist.broadcast(flat, ranks[rank], group=self.group)
            for one, shared in zip(alike, flat.split([*map(Tensor.numel, alike)]), strict=True):
                one.copy_(shared.view_as(one))

    def _allocate(self) -> None:
        places: dict[Tensor, Tensor] = {}
        for _, group in groupby(sorted(self.trained, key=_kind), key=_kind):
            alike = [*group]
            sizes = [*map(Tensor.numel, alike)]
            buffer = torch.empty(sum(sizes), dtype=alike[0].dtype, device=alike[0].device)
            self._buffers.append(buffer)
            for one, part in zip(alike, buffer.split(sizes), strict=True):
                strides = torch.empty_like(one, device="meta").stride()  # those of its gradient
                places[one] = part.as_strided(one.shape, strides, part.storage_offset())
        self._views = [places[one] for one in self.trained]
        self._addresses = [*map(Tensor.data_ptr, self._views)]


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._post_accumulate_grad_hooks)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"


@dataclass
class Shadow(JoinHook):
    """A rank that has no batches left, while others still update. It adds what it has accumulated
    to the next reduction, then zeros, and ends with the parameters and the optimizer's state of the
    rank that updated last."""

    gradients: FlatGradients
    optimizer: torch.optim.Optimizer
    after_update: Sequence[Callable[[], Any]]

    def main_hook(self) -> None:
        self.gradients.hold()
        self.gradients.average()
        self.optimizer.zero_grad()

    def post_hook(self, is_last_joiner: bool) -> None:
        gradients = self.gradients
        if not (is_last_joiner or self.optimizer.state):  # without a batch: an update makes it
            gradients.hold()
            self.optimizer.step()
            self.optimizer.zero_grad()
        rank = dist.get_rank(gradients.group) if is_last_joiner else -1
        last = torch.tensor(rank, device=gradients.trained[0].device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=gradients.group)
        states = self.optimizer.state.values()
        state = [one for each in states for one in each.values() if isinstance(one, Tensor)]
        gradients.share([*gradients.trained, *state], int(last))
        if not is_last_joiner:
            for refresh in self.after_update:
                refresh()

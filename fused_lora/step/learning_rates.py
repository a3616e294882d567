"""Learning rates where a captured update (`graph.py`) reads them: in tensors on the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class LearningRates:
    """Learning rates of an optimizer's groups. `group["lr"]` stays the user's.

    `copy` copies each, a float or a tensor, to where the graphs read it in fp32. Within
    `as_tensors` the optimizer finds those tensors in its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device):
        self.optimizer = optimizer  # not its groups: load_state_dict replaces them
        count = len(optimizer.param_groups)
        self.held = torch.zeros(count, device=device, dtype=torch.float32).unbind()
        self.values: list[float | None] = [None] * count

    def copy(self) -> None:
        groups = self.optimizer.param_groups
        for index, (group, held) in enumerate(zip(groups, self.held, strict=True)):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device == held.device:
                held.copy_(lr.squeeze())  # the host would have to wait to compare it
                self.values[index] = None
            elif float(lr) != self.values[index]:
                held.fill_(float(lr))
                self.values[index] = float(lr)

    @contextmanager
    def as_tensors(self) -> Iterator[None]:
        groups = self.optimizer.param_groups
        given = [group["lr"] for group in groups]
        for group, held in zip(groups, self.held, strict=True):
            group["lr"] = held
        try:
            yield
        finally:
            for group, lr in zip(groups, given, strict=True):
                group["lr"] = lr

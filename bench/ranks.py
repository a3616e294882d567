"""The processes of a cell on several GPUs, one for each, as torch.distributed has them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bench import machine
from bench.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of all GPUs. together: the group of all. alone: that of itself."""

    together: Any
    alone: Any

    @classmethod
    def joined(cls, plan: Plan, store: str) -> Ranks:
        """Give this process its GPU and wait for the others. store: a new file that all share.

        It sees that GPU alone, so whatever it imports takes the right one.
        """
        backend = "gloo"
        if plan.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = machine.visible_gpus()[plan.gpu]
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this host
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=plan.gpu, world_size=plan.gpus
        )
        alone = [dist.new_group([gpu]) for gpu in range(plan.gpus)][plan.gpu]
        return cls(dist.group.WORLD, alone)

    def meet(self) -> int:
        """Wait for the others while the GPU is idle. Return how many of ours compute on each: one.
        `joined` shows a process one GPU alone."""
        dist.all_reduce(torch.zeros(1))
        return 1

    def gather(self, own: T) -> list[T]:
        """Return what every process gives, the first GPU's first."""
        found: list[Any] = [None] * self.together.size()
        dist.all_gather_object(found, own)
        return found

"""The kernel table: Triton kernels at the model's own shapes, against a copy of the same bytes.

A kernel that reads and writes each tensor once is at best as fast as a device-to-device copy that
moves as many bytes. Its share of that copy's rate says how close it comes.
"""

import torch
from triton.testing import do_bench

from bench.records import KernelRow, Kernels
from fused_mlp import swiglu_backward, swiglu_forward


def time_kernels(intermediate: int, token_counts: list[int]) -> Kernels:
    """Time the kernels on [tokens, intermediate] in bf16."""
    rows = [row for tokens in token_counts for row in _swiglu_rows(tokens, intermediate)]
    return Kernels(max(row.copy_gb_per_s for row in rows), rows)


def _swiglu_rows(tokens: int, intermediate: int) -> list[KernelRow]:
    grad_hidden, gate, up = (
        torch.randn(tokens, intermediate, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    tensor_bytes = gate.numel() * gate.element_size()
    return [
        _row("swiglu_forward", gate, 3 * tensor_bytes, lambda: swiglu_forward(gate, up)),
        _row("swiglu_backward", gate, 6 * tensor_bytes,
             lambda: swiglu_backward(grad_hidden, gate, up)),
    ]  # fmt: skip


def _row(kernel: str, like: torch.Tensor, moved_bytes: int, function) -> KernelRow:
    source = torch.empty(moved_bytes // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_gb_per_s = _gb_per_s(moved_bytes, _median_us(lambda: target.copy_(source)))
    median_us = _median_us(function)
    gb_per_s = _gb_per_s(moved_bytes, median_us)
    return KernelRow(
        kernel=kernel,
        shape=list(like.shape),
        dtype=str(like.dtype).removeprefix("torch."),
        median_us=median_us,
        bytes=moved_bytes,
        gb_per_s=gb_per_s,
        copy_gb_per_s=copy_gb_per_s,
        share_of_copy=gb_per_s / copy_gb_per_s,
    )


def _median_us(function) -> float:
    return do_bench(function, warmup=25, rep=100, return_mode="median") * 1e3


def _gb_per_s(moved_bytes: int, median_us: float) -> float:
    return moved_bytes / median_us / 1e3

"""The kernel table: Triton kernels at the model's own shapes, against a copy of the same bytes.

A kernel that reads and writes each tensor once is at best as fast as a device-to-device copy that
moves as many bytes. Its share of that copy's rate says how close it comes.
"""

import torch
from triton.testing import do_bench

from bench.records import KernelRow, Kernels
from fused_lora.kernels.dequantize_4bit import Dequantize4bit
from fused_lora.kernels.packed_4bit import Nested, Packed4bit
from fused_mlp import swiglu_backward, swiglu_forward
from fused_mlp.launching import cdiv


def time_kernels(hidden: int, intermediate: int, token_counts: list[int]) -> Kernels:
    """Time the kernels on [tokens, intermediate], and on a weight [intermediate, hidden], in
    bf16."""
    rows = [row for tokens in token_counts for row in _swiglu_rows(tokens, intermediate)]
    rows.append(_dequantize_row(intermediate, hidden))
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


def _dequantize_row(out_features: int, in_features: int) -> KernelRow:
    """Time the dequantisation of a weight as bitsandbytes makes it: in blocks of 64, twice."""
    values = out_features * in_features
    codes, absmax = (
        torch.randint(256, (cdiv(values, share),), device="cuda", dtype=torch.uint8)
        for share in (2, 64)
    )
    code, nested_code, nested_absmax, offset = (
        torch.rand(shape, device="cuda") for shape in (16, 256, cdiv(len(absmax), 256), ())
    )
    nested = Nested(nested_code, nested_absmax, offset, 256)
    weight = Packed4bit(codes, (out_features, in_features), code, absmax, 64, nested)
    rows = torch.empty(out_features, in_features, device="cuda", dtype=torch.bfloat16)
    dequantize = Dequantize4bit()
    return _row("dequantize_4bit", rows, codes.nbytes + absmax.nbytes + rows.nbytes,
                lambda: dequantize.write(None, lambda: ([weight], [rows])))  # fmt: skip


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

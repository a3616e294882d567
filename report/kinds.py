"""The GPU's time in a step by kind of work: the numbers of kernel_time.png. No torch."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from bench.records import Run
from report.wording import shown_variants

KINDS = {  # of kernels, in words
    "matmul": "matrix products",
    "attention": "attention",
    "adapter": "LoRA scale and add",
    "copy": "casts and copies",
    "activation": "SwiGLU",
    "norm": "RMSNorm",
    "rope": "rotary embedding",
    "loss": "cross entropy",
    "optimizer": "AdamW",
    "other": "other",
}


class Bar(NamedTuple):
    """One variant at one length, medians over rounds, in ms. Copies that run while other kernels
    do, as those of an offloading checkpoint, are left out of kernel_ms."""

    variant: str
    kernel_ms: dict[str, float]
    idle_ms: float
    step_ms: float


def bars(run: Run, seq_len: int) -> list[Bar]:
    """The variants with a time and a profile at this length, in the order of the experiment."""
    found = []
    for variant in shown_variants(run):
        cells = run.cells_of(variant, seq_len, "ok")
        profiled = [(cell, cell.gpu_busy_ms) for cell in cells if cell.gpu_busy_ms]
        if not profiled:
            continue
        kinds = {kind for cell, _ in profiled for kind in cell.kernel_ms}
        kernel_ms = {k: median(cell.kernel_ms.get(k, 0.0) for cell, _ in profiled) for k in kinds}
        hidden = median(sum(cell.kernel_ms.values()) - busy_ms for cell, busy_ms in profiled)
        kernel_ms["copy"] = max(0.0, kernel_ms.get("copy", 0.0) - max(0.0, hidden))
        step_ms = median(run.round_ms(variant, seq_len).values())
        idle_ms = median(max(0.0, median(cell.step_ms) - busy_ms) for cell, busy_ms in profiled)
        found.append(Bar(variant, kernel_ms, idle_ms, step_ms))
    return found

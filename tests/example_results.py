"""Plausible results for the tests of what writes and reads results.json: made up, not measured."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from bench import results as results_file
from bench.records import (
    Cell,
    Environment,
    Experiment,
    Floor,
    Git,
    Gpu,
    Optimizer,
    Run,
    Tokens,
)
from report import statistics as summary
from variants import Lora, Settings

PACKAGES = {
    "torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", "peft": "0.21.0",
    "unsloth": "2026.10.9", "liger_kernel": None,
}  # fmt: skip
MEASURED = {  # ms at 64, 128, 256 and 512 tokens, and GiB at 512
    "vanilla_peft": (201, 292, 553, 1084, 36.7),
    "vanilla_peft_again": (202, 291, 553, 1085, 36.7),
    "fused_mlp": (185, 262, 492, 960, 30.0),
    "full_unsloth": (150, 183, 344, 675, 9.5),
    "liger": (198, 205, 360, 690, 11.6),
    "compiled_layers": (104, 176, 336, 657, 36.3),
    "fused_all": (98, 160, 300, 590, 12.9),
    "bordered_step": (74, 138, 274, 550, 12.2),
    "fused_layer_graph": (71, 137, 273, 548, 12.4),
}
KIND_SHARES = {"matmul": 0.6, "attention": 0.1, "norm": 0.06, "activation": 0.08, "copy": 0.1}
FLOOR_MS = {64: 40.4, 128: 80.0, 256: 160.7, 512: 326.0}
SEQ_LENS = (64, 128, 256, 512)
OF_THE_GPU: dict = {  # what a rehearsal does not know
    "kernel_ms": {}, "gpu_busy_ms": None, "sm_clock_mhz": None, "memory_clock_mhz": None,
    "temperature_c": None, "power_w": None, "clock_reasons": [], "throttled": None,
    "other_gpu_processes": None, "host_launch_us": None,
}  # fmt: skip
OF_A_GRAPH: dict = {"forward_ms": [], "backward_ms": [], "optimizer_ms": []}
THREE = ("vanilla_peft", "fused_mlp", "full_unsloth")
SETTINGS = Settings("on", "float32", "bfloat16", "sdpa", False)


def experiment(**changed) -> Experiment:
    return Experiment(**{
        "model": "Qwen2.5-3B",
        "weights": "random, seed 0",
        "dtype": "bfloat16",
        "batch_size": 32,
        "seq_lens": list(SEQ_LENS),
        "variants": list(THREE),
        "rounds": 3,
        "steps": 24,
        "checkpointing": "on",
        "padded": False,
        "lora": Lora(),
        "optimizer": Optimizer("AdamW", 2e-4, True),
        "seed": 0,
        "data_sha256": "0" * 64,
        "tokens": {n: Tokens(0.0, 0.75) for n in (*SEQ_LENS, *changed.get("seq_lens", ()))},
        **changed,
    })  # fmt: skip


def environment(gpu: bool = True) -> Environment:
    h200 = Gpu("NVIDIA H200", memory_bytes=150_121_545_728, driver="580.95", power_limit_w=700.0,
               max_sm_clock_mhz=1980, max_memory_clock_mhz=3201, ecc=True,
               uncorrected_ecc_errors=0, persistence=True)  # fmt: skip
    return Environment(
        gpu=h200 if gpu else None,
        cpu="Intel Xeon",
        platform="Linux-6.8-x86_64",
        python="3.12.3",
        packages=dict(PACKAGES),
        cuda="13.0" if gpu else None,
        git=Git("abc1234", False),
    )


def empty(rehearsal: bool = False, gpu: bool = True, **changed) -> Run:
    where = environment(gpu)
    return results_file.new_run(["lora_bench.py"], where, experiment(**changed), rehearsal)


def timed_cell(variant: str, seq_len: int, round: int, step_ms: list[float], **measured) -> Cell:
    """A cell of a GPU that was busy for 97% of each step and had the machine to itself."""
    busy_ms = 0.97 * min(step_ms)
    return Cell(variant, seq_len, round, "ok", **{
        "step_ms": step_ms,
        "forward_ms": [0.38 * ms for ms in step_ms],
        "backward_ms": [0.61 * ms for ms in step_ms],
        "optimizer_ms": [0.01 * ms for ms in step_ms],
        "wall_ms": [ms + 0.2 for ms in step_ms],
        "losses": [2.5 for _ in step_ms],
        "loss_gap": 0.0,
        "kernel_ms": {kind: share * busy_ms for kind, share in KIND_SHARES.items()},
        "gpu_busy_ms": busy_ms,
        "optimizer_steps": len(step_ms), "unmoved_adapters": 0, "changed_batches": 0,
        "sm_clock_mhz": 1755, "memory_clock_mhz": 3201, "temperature_c": 52, "power_w": 690.0,
        "clock_reasons": ["power cap"], "throttled": False, "other_gpu_processes": 0,
        "host_launch_us": 4.0,
        **measured,
    })  # fmt: skip


def cells(*rows, seq_len=64) -> Run:
    """A run with one length: (variant, round, step_ms) or (variant, round, status) a cell."""
    document = empty(seq_lens=[seq_len], variants=list(dict.fromkeys(row[0] for row in rows)))
    for variant, round, outcome in rows:
        if isinstance(outcome, str):
            document.add(Cell(variant, seq_len, round, outcome))
        else:
            document.add(timed_cell(variant, seq_len, round, outcome))
    return document


def rounds(seq_len=64, **step_ms) -> Run:
    """One timed step a round: rounds(vanilla_peft=[200, 210], fused_mlp=[100, "oom"])."""
    rows = [(v, n, ms) for v, times in step_ms.items() for n, ms in enumerate(times, start=1)]
    outcomes = ((v, n, ms if isinstance(ms, str) else [float(ms)]) for v, n, ms in rows)
    return cells(*outcomes, seq_len=seq_len)


def run(variants=THREE, seq_lens=SEQ_LENS, status=None, rounds=3, visit=0, **changed) -> Run:
    """A whole run; `status` gives {(variant, seq_len): status} for the cells that have no time.
    No two visits measure the same time."""
    whole = empty(variants=list(variants), seq_lens=list(seq_lens), rounds=rounds, **changed)
    for seq_len in seq_lens:
        if not whole.rehearsal:
            whole.floor[seq_len] = Floor(FLOOR_MS[seq_len], [])
        for round in range(1, rounds + 1):
            for order, variant in enumerate(variants):
                state = (status or {}).get((variant, seq_len), "ok")
                if state != "ok":
                    error = f"{state}: made up for a test"
                    whole.add(Cell(variant, seq_len, round, state, error))
                    continue
                middle: float = MEASURED[variant][SEQ_LENS.index(seq_len)]
                # Rounds drift by half a percent, and each variant has its own small noise.
                middle *= 1 + 0.005 * (round - 2) + 0.004 * ((order * 7 + round * 3 + 2) % 5 - 2)
                middle *= 1 + 0.0001 * visit
                times = [middle * (1 + 0.001 * (step - 3.5)) for step in range(8)]
                gib = 6 + (MEASURED[variant][-1] - 6) * seq_len / 512
                peak = {"peak_allocated_bytes": int(gib * 2**30)}
                fused, graph = range(36) if "fused" in variant else (), "graph" in variant
                whole.add(timed_cell(
                    variant, seq_len, round, times,
                    **(OF_THE_GPU if whole.rehearsal else peak),
                    **(OF_A_GRAPH if graph else {}),
                    fused_modules=[f"layers.{n}.mlp: mlp" for n in fused],
                    settings=replace(SETTINGS, graph=graph),
                ))  # fmt: skip
    whole.summary = summary.summarize(whole)
    return whole


def as_json(run: Run) -> dict:
    """A run as its file has it."""
    return msgspec.json.decode(msgspec.json.encode(run))

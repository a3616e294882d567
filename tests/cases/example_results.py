"""Plausible but made-up results, to test the code that writes and reads results.json."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from bench import results as results_file
from bench.experiment_records import Environment, Experiment, Git, Gpu, Optimizer, Tokens
from bench.records import Cell, Floor, KernelRow, Kernels, Run
from variants import FUSED_PARTS, SUITES, Lora, Settings, variant_of

PACKAGES = {
    "torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", "peft": "0.21.0",
    "unsloth": "2026.10.9", "liger_kernel": None,
}  # fmt: skip
# The ms that a part saves of vanilla's step at 512 tokens (others: 11). The share that others take.
GAIN_MS = {"mlp": 187, "attention": 121, "rope": 34, "rms_norm": 62, "cross_entropy": 88,
           "checkpoint": -4}  # fmt: skip
SHARES = {"vanilla_peft": 1, "vanilla_peft_again": 1.001, "full_unsloth": 0.616, "fused_all": 0.535,
          "fused_layer": 0.505, "compiled_peft": 0.66, "liger_peft": 0.72}  # fmt: skip
VANILLA_MS = {64: 212, 128: 298, 256: 558, 512: 1091}
KIND_SHARES = {"matmul": 0.6, "attention": 0.1, "norm": 0.06, "activation": 0.08, "copy": 0.1}
FLOOR_MS = {64: 40.4, 128: 80.0, 256: 160.7, 512: 326.0}
SEQ_LENS = (64, 128, 256, 512)
OF_THE_GPU: dict = {  # what a rehearsal does not know
    "kernel_ms": {}, "gpu_busy_ms": None, "sm_clock_mhz": None, "memory_clock_mhz": None,
    "temperature_c": None, "power_w": None, "clock_reasons": [], "throttled": None,
    "other_gpu_processes": None, "host_launch_us": None,
}  # fmt: skip
OF_A_GRAPH: dict = {"forward_ms": [], "backward_ms": [], "optimizer_ms": []}
ALL = tuple(SUITES["all"])
THREE = ("vanilla_peft", "fused_mlp", "full_unsloth")
SETTINGS = Settings("on", "float32", "bfloat16", "sdpa", False)
KERNELS = Kernels(4302.6, [
    KernelRow("swiglu_forward", [16384, 11008], "bfloat16", median_us=281.24, bytes=1,
              gb_per_s=3847.1, copy_gb_per_s=4302.6, share_of_copy=0.894),
])  # fmt: skip
KERNEL_IN_WORDS = ["swiglu_forward", "16384 × 11008", "bfloat16", "281.2", "3,847", "89%"]


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


def step_ms(variant: str, seq_len: int) -> float:
    """Return a variant's median: at short lengths no kernel shortens the host's share."""
    plain = variant_of(variant).plain_id
    gain = (1 - SHARES.get(plain, 0.4 + 0.005 * len(plain))) * VANILLA_MS[512]
    for part in FUSED_PARTS:
        part_ms = GAIN_MS.get(part, 11)
        if plain == f"fused_{part}":
            gain = part_ms
        elif plain == f"fused_all_but_{part}":
            gain = (1 - SHARES["fused_all"]) * VANILLA_MS[512] - 0.9 * part_ms
    ms = VANILLA_MS[seq_len] * (1 - gain / VANILLA_MS[512] * (0.6 if seq_len == 64 else 1))
    return 0.76 * ms if plain != variant else ms


def peak_gib(variant: str, seq_len: int) -> float:
    """Return a peak that grows with the length, faster where nothing is recomputed."""
    is_lean = any(word in variant for word in ("all", "layer", "unsloth", "cross_entropy"))
    kept = 0.0 if variant_of(variant).checkpoints else 0.1
    return 6 + ((0.01 if is_lean else 0.06) + kept) * seq_len


def run(variants=THREE, seq_lens=SEQ_LENS, status=None, rounds=3, **changed) -> Run:
    """Return a whole run. `status` gives {(variant, seq_len): status} for cells without a time."""
    asked = {"variants": list(variants), "seq_lens": list(seq_lens), "rounds": rounds}
    whole = empty(**{**asked, "steps": 8 * rounds, **changed})
    for seq_len in seq_lens:
        if not whole.rehearsal:
            whole.floor[seq_len] = Floor(FLOOR_MS[seq_len], [])
        for order, variant in enumerate(variants):
            for round in range(1, rounds + 1):
                state = (status or {}).get((variant, seq_len), "ok")
                if state != "ok":
                    error = f"{state}: made up for a test"
                    whole.add(Cell(variant, seq_len, round, state, error))
                    continue
                # Rounds drift together, and each variant has small noise; more at 64 tokens.
                noise = (0.012 if seq_len == 64 else 0.001) * ((order * 7 + round * 11 + 3) % 5 - 2)
                middle = step_ms(variant, seq_len) * (1 + 0.005 * (round - 2) + noise)
                gib, graph = peak_gib(variant, seq_len), "graph" in variant
                peaks = {
                    "peak_allocated_bytes": int(gib * 2**30),
                    "peak_reserved_bytes": int((gib * 1.04 + 0.002 * round) * 2**30),
                }
                whole.add(timed_cell(
                    variant, seq_len, round, [middle * (1 + 0.001 * (n - 3.5)) for n in range(8)],
                    **(OF_THE_GPU if whole.rehearsal else peaks),
                    **(OF_A_GRAPH if graph else {}),
                    fused_modules=[f"layers.{n}.mlp: mlp" for n in range(36) if "fused" in variant],
                    settings=replace(SETTINGS, graph=graph),
                ))  # fmt: skip
    return whole


def as_json(run: Run) -> dict:
    """Return a run as its file stores it."""
    return msgspec.json.decode(msgspec.json.encode(run))

"""Plausible results for the tests of results.py and plots.py: made up, nothing was measured."""

from __future__ import annotations

import results as results_file

PACKAGES = {
    "torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", "peft": "0.21.0",
    "unsloth": "2026.10.9", "liger_kernel": None,
}  # fmt: skip
STEP_MS = {  # at 64, 128, 256 and 512 tokens
    "vanilla_peft": (201, 292, 553, 1084),
    "vanilla_peft_again": (202, 291, 553, 1085),
    "fused_mlp": (185, 262, 492, 960),
    "full_unsloth": (150, 183, 344, 675),
    "liger": (198, 205, 360, 690),
    "compiled_layers": (104, 176, 336, 657),
    "fused_all": (98, 160, 300, 590),
    "bordered_step": (74, 138, 274, 550),
}
PEAK_GIB = {  # at 512 tokens
    "vanilla_peft": 36.7, "vanilla_peft_again": 36.7, "fused_mlp": 30.0, "full_unsloth": 9.5,
    "liger": 11.6, "compiled_layers": 36.3, "fused_all": 12.9, "bordered_step": 12.2,
}  # fmt: skip
FLOOR_MS = {64: 40.4, 128: 80.0, 256: 160.7, 512: 326.0}
SEQ_LENS = (64, 128, 256, 512)
THREE = ("vanilla_peft", "fused_mlp", "full_unsloth")


def experiment(**changed) -> dict:
    return {
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
        "lora": {"rank": 32, "alpha": 64, "dropout": 0.0, "bias": "none", "targets": ["q_proj"]},
        "optimizer": {"name": "AdamW", "lr": 2e-4, "fused": True},
        "seed": 0,
        "data_sha256": "0" * 64,
        "tokens": {str(n): {"padding": 0, "labelled": 32 * n} for n in SEQ_LENS},
        **changed,
    }


def environment(**changed) -> dict:
    h200 = {"name": "NVIDIA H200", "memory_bytes": 150_121_545_728, "driver": "580.95",
            "power_limit_w": 700, "max_sm_clock_mhz": 1980}  # fmt: skip
    return {
        "gpu": h200,
        "cpu": "Intel Xeon",
        "platform": "Linux-6.8-x86_64",
        "python": "3.12.3",
        "packages": dict(PACKAGES),
        "cuda": "13.0",
        "git": {"commit": "abc1234", "dirty": False},
        **changed,
    }


def empty(rehearsal: bool = False, gpu: bool = True, **changed) -> dict:
    where = environment() if gpu else environment(gpu=None, cuda=None)
    return results_file.new_results(["lora_bench.py"], where, experiment(**changed), rehearsal)


def timed_cell(variant: str, seq_len: int, round: int, step_ms: list[float], **measured) -> dict:
    return results_file.new_cell(
        variant, seq_len, round, "ok",
        step_ms=step_ms,
        forward_ms=[0.38 * ms for ms in step_ms],
        backward_ms=[0.61 * ms for ms in step_ms],
        optimizer_ms=[0.01 * ms for ms in step_ms],
        losses=[2.5 for _ in step_ms],
        **measured,
    )  # fmt: skip


def run(variants=THREE, seq_lens=SEQ_LENS, status=None, rounds=3, **changed) -> dict:
    """A whole run; `status` gives {(variant, seq_len): status} for the cells that have no time."""
    results = empty(variants=list(variants), seq_lens=list(seq_lens), rounds=rounds, **changed)
    for seq_len in seq_lens:
        if not results["rehearsal"]:
            results["floor"][str(seq_len)] = {"floor_ms": FLOOR_MS[seq_len], "samples_ms": []}
        for round in range(rounds):
            for order, variant in enumerate(variants):
                state = (status or {}).get((variant, seq_len), "ok")
                if state == "ok":
                    middle: float = STEP_MS[variant][SEQ_LENS.index(seq_len)]
                    # Rounds drift by half a percent, and each variant has its own small noise.
                    middle *= 1 + 0.005 * (round - 1) + 0.004 * (((order * 7 + round * 3) % 5) - 2)
                    times = [middle * (1 + 0.001 * (step - 3.5)) for step in range(8)]
                    gib = 6 + (PEAK_GIB[variant] - 6) * seq_len / 512
                    cell = timed_cell(
                        variant, seq_len, round, times,
                        peak_allocated_bytes=int(gib * 2**30) if not results["rehearsal"] else None,
                        fused_modules=[f"layers.{n}.mlp" for n in range(36)] * ("fused" in variant),
                        settings={"checkpointing": "on", "adapter_dtype": "float32",
                                  "autocast": "bfloat16", "attention": "sdpa", "compile": None},
                    )  # fmt: skip
                else:
                    cell = results_file.new_cell(
                        variant, seq_len, round, state, error=f"{state}: made up for a test"
                    )
                results_file.add_cell(results, cell)
    results["summary"] = results_file.summarize(results)
    return results

"""Times of one layer's MLP on an H200, at the size of lora.excalidraw, from committed runs.

Steps of PEFT and LoRA_MLP differ only in the MLP. So the difference of their kernel times, by kind
and by layer, is what PEFT spends on casts and on passes that LoRA_MLP does not need.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

RUNS = Path(__file__).resolve().parent / "runs" / "h200"
SUITE, KERNELS = "suite.json.gz", "experiment_2026-11-20.json.gz"
PEFT, LORA_MLP, UNSLOTH = (
    f"{variant}_no_checkpointing" for variant in ("vanilla_peft", "fused_mlp", "full_unsloth")
)
SEQ_LEN, LAYERS = 512, 36  # 32 rows of 512 are the drawing's 16,384 tokens
CARD = "an H200"
SOURCE = f"""Times: per layer, on {CARD}, 32 rows of {SEQ_LEN} tokens without checkpointing, from
docs/runs/h200/{SUITE}. Of a Triton kernel alone: docs/runs/h200/{KERNELS}."""


def load_run(name: str) -> dict:
    with gzip.open(RUNS / name, "rt") as file:
        return json.load(file)


def cells() -> dict[str, dict[int, dict]]:
    """Return the suite's measured cells of 512 tokens, by variant and round."""
    found: dict[str, dict[int, dict]] = defaultdict(dict)
    for cell in load_run(SUITE)["cells"]:
        if cell["seq_len"] == SEQ_LEN and cell["status"] == "ok":
            found[cell["variant"]][cell["round"]] = cell
    return found


def layer_times(tokens: int) -> dict[str, str]:
    """Return milliseconds by name, as the drawing's texts insert them."""
    by_variant = cells()
    peft, lora_mlp, unsloth = (by_variant[variant] for variant in (PEFT, LORA_MLP, UNSLOTH))
    pairs = [(peft[n], lora_mlp[n]) for n in sorted(peft.keys() & lora_mlp.keys())]

    def less(read) -> float:
        return fmean(read(a) - read(b) for a, b in pairs) / LAYERS

    def mean_of(variant: int, read) -> float:
        return fmean(read(pair[variant]) for pair in pairs)

    def activation(cell) -> float:
        return cell["kernel_ms"]["activation"] / LAYERS

    times = {
        "casts_ms": f"{less(lambda cell: cell['kernel_ms']['copy']):.1f}",
        "scale_ms": f"{less(lambda cell: cell['kernel_ms']['adapter']):.1f}",
        "silu_ms": f"{less(lambda cell: cell['kernel_ms']['activation']):.1f}",
        "gemms_ms": f"{-less(lambda cell: cell['kernel_ms']['matmul']):.1f}",
        "less_ms": f"{less(lambda cell: cell['gpu_busy_ms']):.1f}",
        "forward_ms": f"{less(lambda cell: median(cell['forward_ms'])):.1f}",
        "backward_ms": f"{less(lambda cell: median(cell['backward_ms'])):.1f}",
        "peft_silu_ms": f"{mean_of(0, activation):.2f}",
        "lora_silu_ms": f"{mean_of(1, activation):.2f}",
        "unsloth_silu_ms": f"{fmean(map(activation, unsloth.values())):.2f}",
        "peft_step_ms": f"{mean_of(0, lambda cell: cell['gpu_busy_ms']):.0f}",
        "lora_step_ms": f"{mean_of(1, lambda cell: cell['gpu_busy_ms']):.0f}",
    }
    for row in load_run(KERNELS)["kernels"]["rows"]:
        if row["shape"][0] == tokens:
            times[f"{row['kernel']}_ms"] = f"{row['median_us'] / 1e3:.2f}"
    return times

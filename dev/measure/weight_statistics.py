"""Time a step on random weights and on weights with a trained model's statistics.

    python -m dev.measure.weight_statistics runs/weight_statistics.json    # six minutes

The benchmark draws weights from a normal distribution. A card at its power limit may run faster or
slower on other numbers, because flipping bits takes power. Trained weights have heavy tails, and a
few channels of their activations are far larger than the rest. So we build the benchmark's model,
and in every round train it on both kinds of weights, each of the same standard deviation:

    random     as published
    trained    Student's t with 5 degrees of freedom, times a log-normal factor for each row and
               column; the norms before q, k and v and before gate and up make 6 channels 20 to 100
               times larger

Beside that we time a square matmul and that of gate and up alone, on zeros and on both kinds.
Besides the benchmark's packages for training this needs msgspec and nvidia-ml-py.
"""

import argparse
import gc
import json
import os
import sys
import time
from math import log10
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import models
from batches import Batch, load_tokenizer, make_batches, read_chats, tokenize
from bench import machine
from bench.cells import make_ready
from bench.floor import Shape
from bench.options import EXPERIMENT, HERE, why_unavailable
from bench.plan import LEARNING_RATE
from bench.weights import materialize, resolve
from report.statistics import interval95_of_ratios
from trainer import MIN_WARMUP_STEPS, Clock, CudaClock, Trainer, WallClock
from variants import Lora

RANDOM, TRAINED, ZEROS = "random", "trained", "zeros"
VARIANTS = ("vanilla_peft", "fused_mlp", "fused_layer_graph_offload")
NOT_COUNTED = 2  # of a run's timed steps: with its AGAIN_WARMUP_STEPS these make four
FREEDOM, SPREAD = 5.0, 0.3  # of Student's t; of the logarithm of rows and columns
LARGE_CHANNELS, LEAST, MOST = 6, 20.0, 100.0
MATMULS_FLOPS = 8e14  # about a second: NVML averages power over one
SEED = 0
BEGAN = time.perf_counter()


def heavy_tailed(like: Tensor) -> Tensor:
    """Return a matrix [rows, columns] with a trained one's statistics and `like`'s deviation."""
    rows, columns = like.shape
    zero, one = torch.zeros(2, device=like.device).unbind()
    value = torch.distributions.StudentT(FREEDOM, zero, one + 1).sample((rows, columns))
    value *= (SPREAD * torch.randn(rows, 1, device=like.device)).exp()
    value *= (SPREAD * torch.randn(1, columns, device=like.device)).exp()
    return (value * (like.float().std() / value.std())).to(like.dtype)


def large_channels(gamma: Tensor) -> Tensor:
    """Return a norm's weights with LARGE_CHANNELS of them 20 to 100 times larger, the same ones in
    every layer."""
    generator = torch.Generator().manual_seed(SEED)
    which = torch.randperm(len(gamma), generator=generator)[:LARGE_CHANNELS].to(gamma.device)
    larger = gamma.clone()
    larger[which] *= torch.logspace(
        log10(LEAST), log10(MOST), LARGE_CHANNELS, device=gamma.device, dtype=gamma.dtype
    )
    return larger


def with_trained_statistics(name: str, weight: Tensor) -> Tensor:
    if weight.ndim == 2:
        return heavy_tailed(weight)
    return large_channels(weight) if "layernorm" in name else weight.clone()


def both_kinds(model: torch.nn.Module) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return (parameter, value) of each frozen parameter for both kinds of weights."""
    torch.manual_seed(SEED)
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return {
        RANDOM: [(p, p.clone()) for _, p in frozen],
        TRAINED: [(p, with_trained_statistics(name, p)) for name, p in frozen],
    }


@torch.no_grad()
def write(values: list[tuple[Tensor, Tensor]]) -> None:
    """Write the parameters where they lie, which graphs and fused layers hold to."""
    for parameter, value in values:
        parameter.copy_(value)


def measured_steps(
    variant: str, folder: Path, batches: list[Batch], asked: argparse.Namespace, device: str
) -> list[dict[str, Any]]:
    """Return a row for each round and kind of weights. Rounds alternate which comes first."""
    make_ready(variant, device)
    seq_len = batches[0].input_ids.shape[1]
    built = models.build(variant, folder, Lora(), seq_len, True, device, SEED)
    kinds = both_kinds(built.model)
    clock = clock_of(device)
    trainer = Trainer(
        built.model, built.autocast, clock, LEARNING_RATE, MIN_WARMUP_STEPS, built.graph
    )
    on_device, rows = [batch.to(device) for batch in batches], []
    for number in range(asked.rounds):
        for kind in (RANDOM, TRAINED)[:: 1 if number % 2 == 0 else -1]:
            write(kinds[kind])
            models.set_adapters(built.model, SEED)
            rows.append({"kind": kind, **timed_run(trainer, on_device, asked.steps)})
            first_loss = f"loss {rows[-1]['losses'][0]:.3f}"
            say(f"{variant}, round {number + 1}, {kind}", rows[-1], first_loss)
    return rows


def timed_run(trainer: Trainer, batches: list[Batch], steps: int) -> dict[str, Any]:
    """Return a run's steps, their median, its losses and the state of the card between steps."""
    samples = []
    timings = trainer.run(
        batches, NOT_COUNTED + steps, on_step=lambda done: samples.append(machine.sample())
    )
    step_ms = timings.step_ms[NOT_COUNTED:]
    return {"ms": median(step_ms), "step_ms": step_ms, "losses": timings.losses,
            **state(samples[NOT_COUNTED:])}  # fmt: skip


def clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else WallClock()


def operand(kind: str, rows: int, columns: int, device: str, is_input: bool) -> Tensor:
    """Return an input or a weight of a matmul. Channels of an input are its columns."""
    value = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    if kind == ZEROS:
        return torch.zeros_like(value)
    if kind == RANDOM:
        return value
    value = heavy_tailed(value)
    return value * large_channels(torch.ones_like(value[0])) if is_input else value


def measured_matmuls(
    size: tuple[int, int, int], rounds: int, device: str, title: str
) -> list[dict[str, Any]]:
    """Return a row for each round and kind of operands: ms of one matmul of `rows, k, out`."""
    rows_of_x, k, out = size
    operands = {
        kind: (operand(kind, rows_of_x, k, device, True), operand(kind, out, k, device, False))
        for kind in (RANDOM, TRAINED, ZEROS)
    }
    flops = 2 * rows_of_x * k * out
    repeats = min(800, round(MATMULS_FLOPS / flops))  # with a quarter before: 1,024 are in flight
    clock, rows = clock_of(device), []
    x, weight = operands[RANDOM]
    for _ in range(repeats):  # the first second of a cool card is no round
        x @ weight.t()
    clock.synchronize()
    for number in range(rounds):
        for kind, (x, weight) in list(operands.items())[:: 1 if number % 2 == 0 else -1]:
            for _ in range(repeats // 4):
                x @ weight.t()
            start = clock.mark()
            for _ in range(repeats):
                x @ weight.t()
            end = clock.mark()
            if device == "cuda":
                time.sleep(0.7)
            sample = machine.sample()
            clock.synchronize()
            ms = clock.elapsed_ms(start, end) / repeats
            rows.append({"kind": kind, "ms": ms, **state([sample])})
            say(f"{title}, round {number + 1}, {kind}", rows[-1], f"{flops / ms / 1e9:.0f} TFLOP/s")
    return rows


def state(samples: list[machine.Sample]) -> dict[str, Any]:
    """Return the medians of clock and power, None where they cannot be read."""
    found = machine.conditions_of(samples)
    return {"sm_clock_mhz": found.sm_clock_mhz, "power_w": found.power_w,
            "temperature_c": found.temperature_c}  # fmt: skip


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each kind's time over that on random numbers: the median over rounds, and the 95%
    interval."""
    ms = {kind: [row["ms"] for row in rows if row["kind"] == kind] for kind in kinds_of(rows)}
    ratios = {
        kind: [own / base for own, base in zip(ms[kind], ms[RANDOM], strict=True)]
        for kind in ms
        if kind != RANDOM
    }
    return {
        kind: {"over_random": median(values), "interval95": interval95_of_ratios(values)}
        for kind, values in ratios.items()
    }


def kinds_of(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in rows))


def say(what: str, row: dict[str, Any], more: str) -> None:
    power = "" if row["power_w"] is None else f", {row['sm_clock_mhz']} MHz, {row['power_w']:.0f} W"
    print(
        f"{time.perf_counter() - BEGAN:4.0f} s  {what}: {row['ms']:.3f} ms, {more}{power}",
        flush=True,
    )


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write, in JSON")
    parser.add_argument("--model", default=str(EXPERIMENT["model"]), help="an architecture file")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", help="folder for weights")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=EXPERIMENT["batch_size"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    asked = parsed(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from transformers import AutoConfig

    source = resolve(asked.model, asked.cache, SEED)
    materialize(source, SEED, device)
    tokenized = tokenize(
        read_chats(HERE / "data" / "sft_train.jsonl"), load_tokenizer(source.tokenizer)
    )
    count = NOT_COUNTED + asked.steps
    batches = make_batches(tokenized, asked.seq_len, asked.batch_size, count, seed=SEED)
    shape = Shape.of(AutoConfig.from_pretrained(source.folder, local_files_only=True))
    square = 8192 if device == "cuda" else 64
    matmuls = {
        f"{square} x {square} x {square}": (square, square, square),
        "gate and up": (asked.seq_len * asked.batch_size, shape.hidden, 2 * shape.intermediate),
    }
    record: dict[str, Any] = {
        "model": source.label,
        "tokens": f"{asked.batch_size} x {asked.seq_len}",
        "gpu": machine.gpu_name() if machine.has_gpu() else None,
        "card": machine.card(),
        "torch": torch.__version__,
        "compared": {},
        "measured": {},
    }

    def keep(title: str, rows: list[dict[str, Any]]) -> None:
        record["measured"][title], record["compared"][title] = rows, compared(rows)
        asked.out.write_text(json.dumps(record, indent=1) + "\n")

    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for title, size in matmuls.items():
        keep(title, measured_matmuls(size, asked.rounds, device, title))
    for variant in asked.variants:
        if reason := why_unavailable(variant, device):
            print(f"{variant}: {reason}")
            continue
        keep(variant, measured_steps(variant, source.folder, batches, asked, device))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    for title, kinds in record["compared"].items():
        for kind, ratio in kinds.items():
            interval = " to ".join(f"{x:.3f}" for x in ratio["interval95"] or ()) or "one round"
            print(f"{title}: on {kind} {ratio['over_random']:.3f} times as long ({interval})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line: what is asked for, checked before anything is run or written, as a plan."""

import argparse
import json
from pathlib import Path
from typing import Any, NoReturn

from batches import load_tokenizer, sha256_of, token_shares
from bench import chats, machine
from bench import results as store
from bench.cells import LEARNING_RATE, Plan
from bench.weights import Source, resolve
from models import Lora
from variants import SUITES, VARIANTS, missing_package

HERE = Path(__file__).resolve().parent.parent  # the checkout

# What the command does when nothing is asked for: with a GPU, and without one.
EXPERIMENT = {
    "model": HERE / "configs" / "qwen2.5-3b.json",
    "seq_lens": [64, 128, 256, 512],
    "batch_size": 32,
    "steps": 100,
    "rounds": 4,
}
REHEARSAL = {
    "model": HERE / "configs" / "tiny.json",
    "seq_lens": [16, 32],
    "batch_size": 4,
    "steps": 4,
    "rounds": 1,
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    parser = Parser(
        prog="lora_bench.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(flag: str, help: str, **options) -> None:
        name = flag[2:].replace("-", "_")
        if name in EXPERIMENT:
            show = {k: " ".join(map(str, v)) if isinstance(v, list) else v
                    for k, v in (("gpu", EXPERIMENT[name]), ("cpu", REHEARSAL[name]))}  # fmt: skip
            show = {k: Path(v).name if isinstance(v, Path) else v for k, v in show.items()}
            help += f" (default: {show['gpu']}; without a GPU {show['cpu']})"
        parser.add_argument(flag, help=help, **options)

    add("--suite", "variants to compare: the experiment's four, every fused part alone and left "
        "out, the strongest peers, the fastest of each, or all (default: experiment)",
        choices=SUITES, default="experiment")  # fmt: skip
    add("--variants", "variants to compare instead, by name; a name that there is not lists them",
        nargs="+", metavar="NAME")  # fmt: skip
    add("--seq-lens", "tokens in a sequence", nargs="+", type=int, metavar="N")
    add("--batch-size", "sequences in a step", type=int, metavar="N")
    add("--rank", "LoRA rank; alpha is twice it (default: 32)", type=int, default=32, metavar="N")
    add("--steps", "timed steps of each variant and length, over all rounds", type=int, metavar="N")
    add("--rounds", "times that all variants are gone through, in alternating order",
        type=int, metavar="N")  # fmt: skip
    add("--turns", "run the variants of a round side by side, each so many timed steps at a time, "
        "in turns: for hosts whose speed changes; all have to fit on the GPU together",
        type=int, metavar="STEPS")  # fmt: skip
    add("--model", "architecture file, checkpoint folder or hub name", metavar="MODEL")
    add("--checkpointing", "gradient checkpointing: each variant's own, or none (default: on)",
        choices=("on", "off"), default="on")  # fmt: skip
    add("--padded", "pad one example a row instead of packing rows full", action="store_true")
    add("--data", "chats: a file of JSON lines, or a data set of the hub as ORGANISATION/NAME or "
        "ORGANISATION/NAME:SPLIT (default: data/sft_train.jsonl)",
        default=str(HERE / "data" / "sft_train.jsonl"), metavar="DATA")  # fmt: skip
    add("--seed", "of weights, adapters and batches (default: 0)", type=int, default=0, metavar="N")
    add("--device", "where to run (default: the GPU if there is one)", choices=("cuda", "cpu"))
    add("--out", "folder for results.json and benchmark_results.png "
        "(default: runs/GPU-NAME; without a GPU rehearsal; with --plot-only this repository)",
        type=Path, metavar="FOLDER")  # fmt: skip
    add("--cache", "folder for base weights and chats (default: .cache)", type=Path,
        default=HERE / ".cache", metavar="FOLDER")  # fmt: skip
    add("--kernels", "time the Triton kernels alone, into the same results", action="store_true")
    add("--cell-timeout", "give a cell up when nothing was heard of it for so long (default: 600)",
        type=float, default=600.0, metavar="SECONDS")  # fmt: skip
    add("--allow-shared-gpu", "measure although other processes compute on the GPU",
        action="store_true")  # fmt: skip
    add("--plot-only", "draw from the results that are there; measure nothing", action="store_true")
    add("--merge", "make one run of several: measured on the GPUs of a node, say, with "
        "CUDA_VISIBLE_DEVICES and --out each its own; wants --out",
        nargs="+", type=Path, metavar="FILE")  # fmt: skip
    add("--fits", "list what trains fastest in so much GPU memory, from the results that are there",
        type=float, metavar="GIB")  # fmt: skip
    add("--compare", "hold one results.json against an earlier one; measure nothing; exit code 1 "
        "when something is slower beyond noise", nargs=2, type=Path,
        metavar=("OLD", "NEW"))  # fmt: skip
    return parser.parse_args(argv)


def fill_in(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments with defaults filled in: the experiment's with a GPU, else the rehearsal's."""
    device = arguments.device or ("cuda" if machine.has_gpu() else "cpu")
    if device == "cuda" and not machine.has_gpu():
        raise ValueError("--device cuda: no NVIDIA GPU is visible; leave it out for a rehearsal")
    defaults = EXPERIMENT if device == "cuda" else REHEARSAL
    filled = {**vars(arguments), "device": device}
    return {**filled, **{k: v for k, v in defaults.items() if filled[k] is None}}


def set_up(arguments: argparse.Namespace, argv: list[str]) -> tuple[Plan, dict[str, Any], Path]:
    """Check everything that can be checked before anything is run or written.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """
    asked = fill_in(arguments)
    for name in ("batch_size", "rank", "steps", "rounds"):
        at_least(1, f"--{name.replace('_', '-')}", asked[name])
    for seq_len in asked["seq_lens"]:
        at_least(2, "--seq-lens", seq_len)  # a token and the one that it predicts
    if asked["steps"] % asked["rounds"]:
        raise ValueError(
            f"--steps {asked['steps']} does not spread evenly over --rounds {asked['rounds']}: "
            f"give a multiple of {asked['rounds']}"
        )
    if asked["turns"] is not None:
        at_least(1, "--turns", asked["turns"])
    if not asked["cell_timeout"] > 0:
        raise ValueError(f"--cell-timeout {asked['cell_timeout']:g}: give more than 0 seconds")
    device = asked["device"]
    if others := others_on_gpu(device, arguments.allow_shared_gpu):
        raise ValueError(others)
    if arguments.kernels and device == "cpu":
        raise ValueError(
            "--kernels: no NVIDIA GPU to time the kernels on; run it where there is one"
        )
    variants = check_variants(arguments, device)
    source = resolve(str(asked["model"]), arguments.cache.resolve(), arguments.seed)
    check_vocabulary(source, load_tokenizer(source.tokenizer).get_vocab_size())
    data = chats.gather(arguments.data, arguments.cache)
    plan = Plan(
        source=source,
        data=data,
        cache=arguments.cache.resolve(),
        lora=Lora(rank=arguments.rank, alpha=2 * arguments.rank),
        seq_lens=tuple(sorted(set(asked["seq_lens"]))),
        batch_size=asked["batch_size"],
        steps=asked["steps"] // asked["rounds"],
        checkpointing=arguments.checkpointing == "on",
        padded=arguments.padded,
        seed=arguments.seed,
        device=device,
        turn_steps=asked["turns"],
    )
    environment = machine.environment()
    experiment = describe(plan, variants, asked["rounds"])
    path = out_folder(arguments.out, environment, device) / "results.json"
    fresh = store.new_results(recorded(argv), environment, experiment, rehearsal=device == "cpu")
    results = store.continue_from(path, fresh)
    check_writable(path.parent)
    return plan, results, path


def recorded(argv: list[str]) -> list[str]:
    """The command line as results.json keeps it: without the folders it wrote to, which are its
    user's own and say nothing of the numbers."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("--out", "--cache"):
            next(words, None)
        elif not word.startswith(("--out=", "--cache=")):
            kept.append(Path(word).name if not kept else word)
    return kept


def others_on_gpu(device: str, allow_shared: bool) -> str | None:
    """Why the GPU is not ours alone, in words. Between cells no process of ours holds it, so who
    does is somebody else."""
    others = machine.other_processes(own=0) if device == "cuda" and not allow_shared else None
    if not others:
        return None
    return (
        f"{others} other processes compute on the GPU and would disturb every time; stop them "
        "(nvidia-smi lists them), or give --allow-shared-gpu"
    )


def at_least(least: int, flag: str, value: int) -> None:
    if value < least:
        raise ValueError(f"{flag} {value}: give {least} or more")


def check_vocabulary(source: Source, tokens: int) -> None:
    """A token beyond the embedding's last row would stop the GPU, not raise."""
    config = json.loads((source.config or source.folder / "config.json").read_text())
    rows = config.get("vocab_size", tokens)
    if rows < tokens:
        raise ValueError(
            f"--model {source.name}: its vocab_size is {rows}, its tokenizer has {tokens} tokens; "
            "give a model with one row for each"
        )


def check_variants(arguments: argparse.Namespace, device: str) -> list[str]:
    """The variants to run. One that cannot run is an error only when it was asked for by name."""
    for name in arguments.variants or ():
        if name not in VARIANTS:
            raise ValueError(f"--variants {name}: unknown; there are {', '.join(VARIANTS)}")
        if reason := why_unavailable(name, device):
            raise ValueError(f"--variants {name}: {reason}")
    return list(dict.fromkeys(arguments.variants or SUITES[arguments.suite]))


def why_unavailable(variant: str, device: str) -> str | None:
    recipe = VARIANTS[variant]
    name = recipe.library.capitalize()
    if recipe.library in ("unsloth", "liger") and device == "cpu":
        return f"{name} needs an NVIDIA GPU; leave it out, or run where there is one"
    if missing_package(variant):
        return f"{name} is not installed; pip install -r requirements-peers.txt"
    if recipe.compiled and device == "cpu":
        return "compiled layers want an NVIDIA GPU; leave them out, or run where there is one"
    if recipe.graph and device == "cpu":
        return "a CUDA graph wants an NVIDIA GPU; leave it out, or run where there is one"
    return None


def describe(plan: Plan, variants: list[str], rounds: int) -> dict[str, Any]:
    """The "experiment" part of results.json."""
    tokens = {}
    for seq_len in plan.seq_lens:
        shares = token_shares(plan.batches(seq_len, plan.batch_size, plan.steps))
        tokens[str(seq_len)] = {"padding": shares.padding, "labelled": shares.labelled}
    return {
        "model": plan.source.name,
        "weights": plan.source.weights,
        "dtype": "bfloat16",
        "batch_size": plan.batch_size,
        "seq_lens": list(plan.seq_lens),
        "variants": variants,
        "rounds": rounds,
        "steps": plan.steps * rounds,
        "turn_steps": plan.turn_steps,
        "checkpointing": "on" if plan.checkpointing else "off",
        "padded": plan.padded,
        "lora": {
            "rank": plan.lora.rank,
            "alpha": plan.lora.alpha,
            "dropout": plan.lora.dropout,
            "bias": plan.lora.bias,
            "targets": list(plan.lora.targets),
        },
        "optimizer": {"name": "AdamW", "lr": LEARNING_RATE, "fused": plan.device == "cuda"},
        "seed": plan.seed,
        "data_sha256": sha256_of(plan.data),
        "tokens": tokens,
    }


def out_folder(out: Path | None, environment: dict[str, Any], device: str) -> Path:
    if out is not None:
        return out
    if device == "cpu":
        return HERE / "rehearsal"
    return HERE / "runs" / environment["gpu"]["name"].lower().replace(" ", "-")


def check_writable(folder: Path) -> None:
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be written ({error.strerror})") from None

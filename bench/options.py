"""The command line: options and defaults. Imports nothing slow: errors come at once."""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from bench import published
from variants import (
    AGAIN,
    BASES,
    BF16,
    EXPERIMENT_ON_NF4,
    EXPERIMENT_WITH_DORA,
    NF4,
    ON_SEVERAL_GPUS,
    SUITES,
    TARGETS,
    VARIANTS,
    WITHOUT,
    Base,
    missing_package,
    recipe_of,
    unadapted_projections,
)

HERE = Path(__file__).resolve().parent.parent  # the checkout

# The defaults with a GPU, and without one.
EXPERIMENT = {
    "model": HERE / "configs" / "qwen2.5-3b.json",
    "seq_lens": [64, 128, 256, 512],
    "batch_size": 32,
    "accumulate": 1,
    "rank": 32,
    "steps": 100,
    "rounds": 4,
    "interleave": 2,
}
REHEARSAL = EXPERIMENT | {
    "model": HERE / "configs" / "tiny.json",
    "seq_lens": [16, 32],
    "batch_size": 4,
    "steps": 4,
    "rounds": 1,
    "interleave": 0,
}
# What --quick changes: both ends of the experiment, without the A/A twin.
QUICK = {"seq_lens": [64, 512], "steps": 24, "rounds": 3}
QUICK_REHEARSAL = {"seq_lens": [16, 32], "steps": 6, "rounds": 3}
# What --gpus changes: both ends again, and no turns, because a variant takes all GPUs.
SEVERAL_GPUS = {"seq_lens": [64, 512], "steps": 24, "rounds": 2, "interleave": 0}
SEVERAL_GPUS_REHEARSAL = {"seq_lens": [16], "steps": 2}
MOST_GPUS = 64
QUICK_MINUTES = 6  # expected on an H100 once the weights are there
PUBLISHED_MINUTES = "five to ten"
SHORT = 128  # up to this many tokens the host slows steps, and --quick interleaves

# The options that each command reads, by the option that asks for it. All others are refused. The
# kernels' table becomes part of a run's results, so it reads what tells runs apart.
WORK = ("batch_size", "accumulate", "rank", "targets", "lora_dropout", "dora", "model", "base",
        "padded", "documents", "data")  # fmt: skip
RUN_IS = (*WORK, "seq_lens", "steps", "rounds", "interleave", "seed", "device",
          "out", "cache", "allow_shared_gpu")  # fmt: skip
READS = {
    "": (*RUN_IS, "suite", "variants", "cell_timeout"),
    "quick": (*WORK, "seed", "device", "out", "cache", "allow_shared_gpu", "cell_timeout"),
    "gpus": (*(name for name in RUN_IS if name != "interleave"), "variants", "cell_timeout"),
    "kernels": RUN_IS,
    "plot_only": ("out",),
    "fits": ("out",),
    "compare": (),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """Parse the command line, with the defaults that need no look at the GPU.

    Exits with one line and code 2 if an option is unknown, malformed or would be ignored.
    """
    parser = Parser(
        prog="lora_bench.py",
        description=description,
        epilog=list_of_variants(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # parse only what was given
        allow_abbrev=False,
    )
    defaults: dict[str, Any] = {}

    def add(flag: str, help: str, default: Any = None, *, to: Any, **options) -> None:
        name = flag[2:].replace("-", "_")
        defaults[name] = default
        if name in EXPERIMENT:
            on_gpu, on_cpu = _shown(EXPERIMENT[name]), _shown(REHEARSAL[name])
            other = f"; without a GPU {on_cpu}" if on_cpu != on_gpu else ""
            help += f" (default: {on_gpu}{other})"
        to.add_argument(flag, help=help, **options)

    group = parser.add_argument_group
    commands = group("instead of the experiment").add_mutually_exclusive_group()
    add("--quick",
        "a first answer: 64 and 512 tokens, 24 steps in 3 rounds, without the A/A twin, one "
        "process per variant for the whole run", False,
        action="store_true", to=commands)  # fmt: skip
    add("--gpus",
        "train on this many GPUs together, each on its own rows of --batch-size; beside that, time "
        "the same steps on all of them without averaging gradients, and on one alone: about 12 "
        "minutes on H100s; without a GPU, processes (default: one GPU)",
        1, type=int, metavar="N", to=commands)  # fmt: skip
    add("--kernels", "time the Triton kernels alone, into the same results", False, to=commands,
        action="store_true")  # fmt: skip
    add("--plot-only", "draw from existing results; measure nothing", False, to=commands,
        action="store_true")  # fmt: skip
    add("--fits", "list what trains fastest in this much GPU memory, from existing results",
        type=float, metavar="GIB", to=commands)  # fmt: skip
    add("--compare",
        "compare a results.json with an earlier one; measure nothing; exit code 1 if something is "
        "slower beyond noise", nargs=2, type=Path, to=commands,
        metavar=("OLD", "NEW"))  # fmt: skip
    compared = group("what to compare").add_mutually_exclusive_group()
    add("--suite",
        "variants to compare: the experiment's four, every fused part alone and left out, the "
        "strongest peers, the fastest of each, or all (default: experiment); published: --model "
        "in a setting that others publish a speed for, with vanilla PEFT and Unsloth",
        choices=SUITES, default="experiment", to=compared)  # fmt: skip
    add("--variants", "variants to compare instead, by name; the list is below", to=compared,
        nargs="+", metavar="NAME")  # fmt: skip
    trained = group("the model and its adapters")
    add("--model", "architecture file, checkpoint folder or hub name", metavar="MODEL", to=trained)
    add("--base",
        "base weights: bf16, or nf4 for QLoRA, by default with PEFT, torch.compile, Unsloth and "
        "whole layers (default: bf16)",
        choices=BASES, default=BF16, to=trained)  # fmt: skip
    add("--rank", "LoRA rank; alpha is twice it", type=int, metavar="N", to=trained)
    add("--targets", "projections to adapt (default: all seven of a layer)", nargs="+",
        default=list(TARGETS), metavar="NAME", to=trained)  # fmt: skip
    add("--lora-dropout", "share of an adapter's inputs to drop (default: 0)", type=float,
        default=0.0, metavar="P", to=trained)  # fmt: skip
    add("--dora", "train DoRA, which only whole layers run fused", False, action="store_true",
        to=trained)  # fmt: skip
    data = group("the data and the batches")
    add("--data",
        "chats: a file of JSON lines, or a data set of the hub as "
        "ORGANISATION/NAME or ORGANISATION/NAME:SPLIT; each row with messages, prompt "
        "and completion, or ShareGPT's conversations (default: data/sft_train.jsonl)",
        default=str(HERE / "data" / "sft_train.jsonl"), metavar="DATA", to=data)  # fmt: skip
    add("--seq-lens", "tokens per sequence", nargs="+", type=int, metavar="N", to=data)
    add("--batch-size", "sequences per step", type=int, metavar="N", to=data)
    add("--accumulate", "micro-batches of --batch-size per step", type=int, metavar="N", to=data)
    rows = data.add_mutually_exclusive_group()
    add("--padded", "pad one example a row instead of packing rows full", False,
        action="store_true", to=rows)  # fmt: skip
    add("--documents", "put whole chats into one row of batch size x tokens, each attending to "
        "itself alone, instead of packing rows full", False,
        action="store_true", to=rows)  # fmt: skip
    measured = group("how to measure")
    add("--steps", "timed steps per variant and length, over all rounds", type=int, metavar="N",
        to=measured)  # fmt: skip
    add("--rounds", "passes over all variants, in alternating order",
        type=int, metavar="N", to=measured)  # fmt: skip
    add("--interleave",
        "run the variants of a round side by side, this many timed steps of each at a time, at "
        "every length where they fit on the GPU together; 0: one after the other",
        type=int, metavar="STEPS", to=measured)  # fmt: skip
    add("--seed", "seed of weights, adapters and batches (default: 0)", type=int, default=0,
        metavar="N", to=measured)  # fmt: skip
    add("--cell-timeout", "give up on a cell after this long without a word from it (default: 600)",
        type=float, default=600.0, metavar="SECONDS", to=measured)  # fmt: skip
    where = group("where")
    add("--device", "where to run (default: the GPU if there is one)", choices=("cuda", "cpu"),
        to=where)  # fmt: skip
    add("--allow-shared-gpu", "measure even if other processes compute on the GPU", False,
        action="store_true", to=where)  # fmt: skip
    add("--out",
        "folder for results.json and benchmark_results.png (default: runs/GPU-NAME, or rehearsal "
        "without a GPU, followed by the options that are not defaults; with --plot-only, this "
        "repository)",
        type=Path, metavar="FOLDER", to=where)  # fmt: skip
    add("--cache", "folder for base weights and chats (default: .cache)", type=Path,
        default=HERE / ".cache", metavar="FOLDER", to=where)  # fmt: skip

    given = vars(parser.parse_args(argv))
    command = next((name for name in READS if name in given), "")
    if ignored := [flag(name) for name in given if name not in (command, *READS[command])]:
        parser.error(f"{flag(command)} does not read {', '.join(ignored)}: leave that out")
    if not 2 <= given.get("gpus", 2) <= MOST_GPUS:
        asked = f"--gpus {given['gpus']}: give 2 to {MOST_GPUS}"
        parser.error(f"{asked}; it times one GPU alone beside them")
    return argparse.Namespace(**{**defaults, **given})


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(value: Any) -> str:
    """Return an option's value as it is given, a path by its name."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value.name if isinstance(value, Path) else str(value)


def list_of_variants() -> str:
    """Return every variant's name and title for the end of --help."""
    listed = [f"{id:35}{variant.title}" for id, variant in VARIANTS.items() if variant.checkpoints]
    said = f"add {WITHOUT} to most of them to run without gradient checkpointing"
    return "\n  ".join(["variants:", *listed, said])


def fill_in(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults of this machine, and somebody else's setting for --suite published.

    Raises:
        ValueError: there is no GPU or no such setting, or an option departs from the setting.
    """
    from bench import machine

    device = arguments.device or ("cuda" if machine.has_gpu() else "cpu")
    if device == "cuda" and not machine.has_gpu():
        raise ValueError("--device cuda: no NVIDIA GPU is visible; leave it out for a rehearsal")
    setting = None
    if arguments.suite == "published" and not arguments.variants:
        setting = published.setting_of(arguments.model, device, arguments.base)
    filled = with_defaults(arguments, device, setting)
    if setting:
        check_setting(setting, vars(filled))
    return filled


def with_defaults(
    arguments: argparse.Namespace, device: str, setting: published.PublishedSetting | None
) -> argparse.Namespace:
    """Fill in the defaults of a command on a device."""
    defaults = EXPERIMENT if device == "cuda" else REHEARSAL
    if arguments.quick:
        defaults = defaults | (QUICK if device == "cuda" else QUICK_REHEARSAL)
    if arguments.gpus > 1:
        defaults = defaults | (SEVERAL_GPUS if device == "cuda" else SEVERAL_GPUS_REHEARSAL)
    if setting:
        defaults = defaults | setting.is_that() | published.MEASURED_IN
    filled = {**vars(arguments), "device": device, "published": setting}
    filled |= {name: value for name, value in defaults.items() if filled[name] is None}
    return argparse.Namespace(**filled)


def check_setting(setting: published.PublishedSetting, filled: dict[str, Any]) -> None:
    """Raise ValueError if an option departs from somebody else's setting."""
    for name, value in setting.is_that().items():
        if filled[name] != value:
            raise ValueError(
                f"{flag(name)}: {setting.page.name} has {_shown(value)} for {setting.model}; "
                "leave it out, or leave out --suite published"
            )


def variants_of(asked: argparse.Namespace) -> tuple[str, ...]:
    """Return the ids asked for, each once. A quick run has no A/A twin, which would show the noise
    between processes: all its rounds share one."""
    on_nf4 = (asked.base, asked.suite) == (NF4, "experiment")
    suite = EXPERIMENT_ON_NF4 if on_nf4 else SUITES[asked.suite]
    suite = EXPERIMENT_WITH_DORA if asked.dora and asked.suite == "experiment" else suite
    suite = ON_SEVERAL_GPUS if asked.gpus > 1 else suite
    ids = dict.fromkeys(asked.variants or suite)
    return tuple(id for id in ids if not (asked.quick and id == AGAIN))


def why_unavailable(
    variant: str, device: str, base: Base = BF16, targets: Collection[str] = TARGETS
) -> str | None:
    """Return the reason a variant cannot run on a device and a base, or with adapters on `targets`,
    or None."""
    recipe = recipe_of(variant)
    if wanted := unadapted_projections(variant, targets):
        said = f"its projections would have no adapter under --targets {' '.join(targets)}"
        return f"{said}; leave it out, or add one of {' '.join(wanted)}"
    if base == NF4 and (recipe.fp8 or recipe.base_dtype == "float32"):
        return "its base has another precision; leave it out, or leave out --base nf4"
    name = recipe.library.capitalize()
    if recipe.library in ("unsloth", "liger") and device == "cpu":
        return f"{name} needs an NVIDIA GPU; leave it out, or run where there is one"
    if missing_package(variant):
        return f"{name} is not installed; pip install -r dev/requirements/peers.txt"
    if recipe.compiled and device == "cpu":
        return "compiled layers need an NVIDIA GPU; leave them out, or run where there is one"
    if recipe.graph and device == "cpu":
        return "a CUDA graph needs an NVIDIA GPU; leave it out, or run where there is one"
    return None


def others_on_gpu(device: str, allow_shared: bool, gpus: int = 1) -> str | None:
    """Return a message if other processes compute on the GPUs. Ask when none of ours holds one."""
    from bench import machine

    if device != "cuda" or allow_shared:
        return None
    others = machine.other_processes(own=0, gpus=gpus)
    if not others:
        return None
    return (
        f"{others} other processes compute on the GPU and would disturb every time; stop them "
        "(nvidia-smi lists them), or give --allow-shared-gpu"
    )

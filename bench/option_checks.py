"""Checks of the options. A wrong one is a ValueError of one line, before anything is done."""

import argparse
from collections.abc import Collection
from difflib import get_close_matches
from importlib.util import find_spec

from bench.options import flag, why_unavailable
from variants import BF16, NF4, TARGETS, VARIANTS, Base, title_of

LIMITS = {  # (smallest, largest)
    "seq_lens": (3, None),  # a token, one that attends to it, and the one that follows
    "batch_size": (1, None),
    "accumulate": (1, None),
    "rank": (1, None),
    "steps": (1, None),
    "rounds": (1, 1000),
    "interleave": (0, None),
    "seed": (0, 2**32 - 1),  # NumPy's limit
}
MAX_TOKENS = 2**27  # a round's at one length, which are made and held before it begins
MAX_TIMEOUT_S = 1_000_000


def check_options(asked: argparse.Namespace) -> None:
    """Raise ValueError, in one line, if a filled-in option cannot be right."""
    from bench import machine

    for name, (least, most) in LIMITS.items():
        given = getattr(asked, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None:
                _within(flag(name), value, least, most)
    steps, rounds, timeout_s = asked.steps, asked.rounds, asked.cell_timeout
    if steps % rounds:
        raise ValueError(
            f"--steps {steps} does not spread evenly over --rounds {rounds}: "
            f"give a multiple of {rounds}"
        )
    longest = max(asked.seq_lens)
    if not 0 <= asked.lora_dropout < 1:
        raise ValueError(f"--lora-dropout {asked.lora_dropout:g}: give 0 or more, and less than 1")
    rows = asked.batch_size * asked.accumulate * asked.gpus
    if (tokens := steps // rounds * rows * longest) > MAX_TOKENS:
        raise ValueError(
            f"--steps {steps} of {rows} rows (--batch-size) are {tokens:,} tokens a round at "
            f"{longest}, all made before it begins: ask for {MAX_TOKENS:,} or fewer"
        )
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"--cell-timeout {timeout_s:g}: give more than 0 seconds, {MAX_TIMEOUT_S:,} at most"
        )
    if asked.device == "cuda" and asked.gpus > (visible := len(machine.visible_gpus()) or 1):
        raise ValueError(f"--gpus {asked.gpus}: {visible} visible here; give that or fewer")
    if asked.device == "cpu":
        if asked.kernels:
            raise ValueError(
                "--kernels: no NVIDIA GPU to time the kernels on; run it where there is one"
            )
        if asked.allow_shared_gpu:
            raise ValueError("--allow-shared-gpu: a rehearsal uses no GPU; leave it out")
    for name in asked.variants or ():
        check_variant(name, asked.device, asked.base, asked.targets)
    if asked.base == NF4 and find_spec("bitsandbytes") is None:
        raise ValueError('--base nf4: bitsandbytes is not installed; pip install -e ".[qlora]"')


def _within(flag: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        wanted = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{flag} {value}: give {wanted}")


def check_variant(
    name: str, device: str, base: Base = BF16, targets: Collection[str] = TARGETS
) -> None:
    """Raise ValueError if a variant given by name cannot run."""
    if name not in VARIANTS:
        spelled = {_as_id(title_of(id)): id for id in VARIANTS} | {id: id for id in VARIANTS}
        near = get_close_matches(_as_id(name), spelled, n=3, cutoff=0.45)
        found = " or ".join(dict.fromkeys(spelled[one] for one in near))
        hint = f"did you mean {found}? " if near else ""
        raise ValueError(f"--variants {name}: unknown; {hint}--help lists all {len(VARIANTS)}")
    if reason := why_unavailable(name, device, base, targets):
        raise ValueError(f"--variants {name}: {reason}")


def _as_id(name: str) -> str:
    """Return a name as people may write it in the spelling of an id."""
    return "_".join(name.lower().replace(",", "").replace("-", " ").split())

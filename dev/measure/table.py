"""A table that grows run by run, for programs that give each run its own process."""

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from bench import processes
from bench.weights import Source, materialize

# Unsloth must be the first import of its process: nothing here imports transformers
ON_GPU = torch.cuda.is_available()
T = TypeVar("T")


def add_sizes(parser: argparse.ArgumentParser, sizes: dict[str, int]) -> None:
    for flag, usual in sizes.items():
        parser.add_argument(flag, type=int, default=usual, metavar="N",
                            help=f"(default: {usual})")  # fmt: skip


def draw_weights(sources: Iterable[Source]) -> None:
    """Write the models' weights that are not there, and say if nothing will be a result."""
    if not ON_GPU:
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        print("No GPU: a rehearsal in Triton's interpreter, not a result.")
    for source in sources:
        if not source.is_there():
            print(f"Drawing the weights of {source.name}.", flush=True)
            materialize(source, 0, "cuda" if ON_GPU else "cpu")
    torch.cuda.empty_cache()  # the runs need it


def result_of(kind: type[T], function: Callable[..., None], *arguments: Any) -> T | str:
    """Run ``function(send, *arguments)`` in a fresh process, and print the lines that it sends.

    Returns the value of type `kind` that it sends, or one line with the reason if there is none.
    """
    said: list[Any] = []
    ended = processes.run(function, *arguments, on_message=said.append)
    for line in (one for one in said if isinstance(one, str)):
        print(line)
    found = next((one for one in said if isinstance(one, kind)), None)
    if found is None:
        last_line = (ended.output_tail.splitlines() or [""])[-1]
        return f"{ended.error}: {last_line}"
    return found


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """Print each row when it is there, and the whole table at the end or at Ctrl-C. Return the exit
    code. A failed run's row ends early, with its error."""
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    failed = False
    try:
        for row in rows:
            failed |= len(row) < len(columns)
            cells = [*row, *["-"] * (len(columns) - len(row))]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        return int(failed)
    except KeyboardInterrupt:
        print("\nStopped. What was measured:")
        return 130
    finally:
        print(*lines, sep="\n")

"""The progress bar and the lines a run prints while it measures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.records import Cell
from variants import title_of

console = Console(highlight=False)


@contextmanager
def progress_bar(total: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """Show a bar over `total` timed tokens. Gives (advance by tokens, say what is going on)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
               TextColumn("left:"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, speed_estimate_period=600) as progress:
        task = progress.add_task("starting", total=total)
        yield partial(progress.advance, task), lambda text: progress.update(task, description=text)


def show(cell: Cell) -> None:
    """Print a cell in one line."""
    said = f"round {cell.round}  {title_of(cell.variant):14} {cell.seq_len:5} tokens  "
    if cell.status != "ok":
        said += f"{cell.status}: {cell.error}"
    else:
        said += f"{median(cell.step_ms):9.1f} ms"
        if cell.parity is not None and cell.parity.worst_ratio is not None:
            said += f"  parity {cell.parity.worst_ratio:.2f} x vanilla's own error"
        if cell.efficiency is not None:
            said += (
                f"  efficiency {cell.efficiency:.1%}, over one GPU {cell.efficiency_over_one:.1%}"
            )
    console.print(escape(said), soft_wrap=True)

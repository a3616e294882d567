"""The progress bar and the lines that a run prints while it measures."""

from collections.abc import Callable
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.records import Cell
from variants import title_of

console = Console(highlight=False)


class progress_bar:
    """A bar over `total` timed tokens; gives (advance by tokens, say what is going on)."""

    def __init__(self, total: int):
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=600,
        )
        self.task = self.progress.add_task("starting", total=total)

    def __enter__(self) -> tuple[Callable[[int], None], Callable[[str], None]]:
        self.progress.start()
        return (
            lambda tokens: self.progress.advance(self.task, tokens),
            lambda text: self.progress.update(self.task, description=text),
        )

    def __exit__(self, *_) -> None:
        self.progress.stop()


def show(cell: Cell) -> None:
    """Print a cell in a line."""
    said = f"round {cell.round}  {title_of(cell.variant):14} {cell.seq_len:5} tokens  "
    if cell.status != "ok":
        said += f"{cell.status}: {cell.error}"
    else:
        said += f"{median(cell.step_ms):9.1f} ms"
        if cell.parity is not None and cell.parity.worst_ratio is not None:
            said += f"  parity {cell.parity.worst_ratio:.2f} x vanilla's own error"
    console.print(escape(said), soft_wrap=True)

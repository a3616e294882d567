"""The frame of every picture: its style, its title, its caption and its file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from bench.results import write_atomically

STYLE = {
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#e4e4e4"},
    **{"axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left"},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"font.size": 12, "legend.fontsize": 10.5, "lines.linewidth": 2, "lines.markersize": 9},
}
GREY = "#444444"
# A picture for phones is as many inches wide. Where one shows it 390 pixels wide, the smallest
# letters are 11 pixels high.
WIDTH, DPI = 6.5, 180
TITLE, LETTERS, SMALL = 16, 14, 13.5
TITLE_LINE = 0.29  # inches
LINE_LETTERS = 40  # of the title


@contextmanager
def framed(width: float, height: float, dpi: int = 150, **changed: Any) -> Iterator[Figure]:
    """Give an empty picture of this size in inches, and draw in our style inside the context.
    changed: matplotlib settings for this picture, with _ for the dot."""
    own = {name.replace("_", "."): value for name, value in changed.items()}
    with style.context(["default", STYLE, own]):
        yield Figure(figsize=(width, height), dpi=dpi)


def write_title(picture: Figure, words: str) -> None:
    """Write the finding above the panels of a picture for phones."""
    top = 1 - 0.09 / picture.get_figheight()
    picture.text(0.03, top, words, size=TITLE, weight="bold", va="top", linespacing=1.25)


def write_caption(
    picture: Figure, words: str, y: float, letters: int, x: float = 0.025, size: float = 10.5
) -> None:
    """Write the caption below the panels, wrapped at `letters` per line."""
    picture.text(x, y, fill(words, letters), size=size, color=GREY, linespacing=1.5)


def stamp(picture: Figure, words: str, size: float) -> None:
    """Write a warning across the whole picture, which nobody can crop away."""
    picture.text(0.5, 0.48, words.replace(": ", "\n"), size=size, color="#d1242f", alpha=0.22,
                 weight="bold", ha="center", va="center", rotation=30, zorder=9)  # fmt: skip


def annotate(
    axes: Axes, words: str, place: tuple[float, float], points: tuple[float, float],
    across: Any = "data", **text: Any,
) -> Any:  # fmt: skip
    """Write words `points` right of and above a place, which is in the units `across`."""
    return axes.annotate(words, place, points, across, "offset points", **text)


def fitting_legend(picture: Figure, columns: int, room: float, **look: Any) -> Legend:
    """Draw a legend in at most this many columns, fewer if this machine's fonts need more than
    `room`, a share of the picture's width."""
    legend = picture.legend(ncols=columns, **look)
    if columns == 1 or legend.get_window_extent().width <= room * picture.bbox.width:
        return legend
    legend.remove()
    return fitting_legend(picture, columns - 1, room, **look)


def write_png(picture: Figure | None, path: Path) -> bool:
    """Write a picture whole or not at all. The same picture gives the same bytes. Return False if
    there is none."""
    if picture is None:
        return False
    png = io.BytesIO()
    with style.context(["default", STYLE]):
        picture.savefig(png, format="png", metadata={"Software": None})
    write_atomically(path, png.getvalue())
    return True

"""Tables in Markdown, from column specs or line by line, and the numbers in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from bench.records import Interval

Row = TypeVar("Row")


class Column(NamedTuple, Generic[Row]):
    """A heading, and the text below it for each row."""

    heading: str
    words: Callable[[Row], str]


def table(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> str:
    lines = [[column.words(row) for column in columns] for row in rows]
    return markdown_table([column.heading for column in columns], lines)


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruled = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def number(value: float | None, digits: int, unit: str = "") -> str:
    """Return a number in words; empty for None."""
    return "" if value is None else f"{value:.{digits}f}{unit}"


def thousands(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def spread(bounds: Interval | None, digits: int) -> str:
    """Return an interval to append to its number; empty for None."""
    return f" ({bounds[0]:.{digits}f} to {bounds[1]:.{digits}f})" if bounds else ""

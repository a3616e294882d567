"""What is made of results that are there: pictures, tables, comparisons; nothing is measured.

Each `*_only` is one of the command's options, and returns its exit code. What draws is imported
where it draws: matplotlib takes longer than saying that there is nothing to draw.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import results as store
from bench.folders import locked
from bench.options import HERE
from report import tables
from report.comparison import compare
from report.fits import fits_table
from report.names import name_of
from report.statistics import NO_CHECKPOINTING

Results = dict[str, Any]

# Vanilla and fused MLP once more, on another visit: how far to trust the published run.
SECOND_RUN = HERE / "docs" / "second_run.json"
SUITE = HERE / "docs" / "suite.json"  # every part and peer, a run of its own
BESIDE_UNSLOTH = HERE / "docs" / "beside_unsloth"  # all parts and Unsloth again, in more steps
LOSSES = HERE / "docs" / "loss_curve.json"  # many steps of two variants, likewise

console = Console(highlight=False)
PLAIN: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False}  # fits 80 columns


def plot_only(folder: Path) -> int:
    path = folder / "results.json"
    if not path.is_file():
        raise ValueError(f"--plot-only: there is no {path}; run the benchmark first, or give --out")
    results = store.load(path)
    from report import loss_curve

    drawn = []
    if folder.resolve() == HERE:
        suite = store.load(SUITE) if SUITE.is_file() else None
        beside_unsloth = [store.load(path) for path in sorted(BESIDE_UNSLOTH.glob("*.json"))]
        second_run = store.load(SECOND_RUN)
        tables.update_readme(HERE / "README.md", results, second_run, suite, beside_unsloth)
        drawn.append(HERE / "README.md")
        if suite is not None:
            drawn += draw_suite(suite, folder)
        picture = folder / "loss_curve.png"
        if LOSSES.is_file() and loss_curve.draw(store.load(LOSSES), picture):
            drawn.append(picture)
    drawn += draw(results, folder)
    console.print("\n".join(map(str, drawn)), soft_wrap=True)
    return 0


def draw(results: Results, folder: Path) -> list[Path]:
    """Every picture that the results have something for; where they were written."""
    from report import benchmark_results as plots
    from report import kernel_time

    pictures: dict[Path, Callable] = {
        folder / "benchmark_results.png": plots.draw,
        folder / "kernel_time.png": kernel_time.draw,
    }
    drawn = [path for path, draw_it in pictures.items() if draw_it(results, path) is not False]
    return drawn + draw_suite(results, folder)


def draw_suite(results: Results, folder: Path) -> list[Path]:
    """What a suite has pictures of, and the experiment alone has not."""
    if not {"fused_all", "fused_all" + NO_CHECKPOINTING} & {*results["experiment"]["variants"]}:
        return []
    from report import ablation_picture as ablation_plot
    from report import frontier

    pictures: dict[Path, Callable] = {
        folder / "ablation.png": ablation_plot.draw,
        folder / "frontier.png": frontier.draw,
    }
    return [path for path, draw_it in pictures.items() if draw_it(results, path) is not False]


def compare_only(old_path: Path, new_path: Path) -> int:
    """Print how the runs in two files differ; 1 where the new one is slower beyond noise."""
    try:
        compared = compare(store.load(old_path), store.load(new_path))
    except OSError as error:
        reason = f"{error.filename} cannot be read ({error.strerror})"
        raise ValueError(f"--compare: {reason}") from None
    console.print(tables.comparison_table(compared), soft_wrap=True, markup=False)
    for difference in compared.differences:
        console.print(f"  {escape(difference)}", soft_wrap=True)
    if compared.is_slower:
        console.print("Slower beyond noise.")
    return 1 if compared.is_slower else 0


def merge_only(paths: list[Path], folder: Path | None) -> int:
    """Write the rounds of several runs into one results.json, and draw it."""
    if folder is None:
        raise ValueError("--merge: give --out FOLDER, where the one run is written")
    path = folder / "results.json"
    if path.exists():
        raise ValueError(f"--merge: {path} is there; give another --out")
    try:
        merged = store.merge([store.load(file) for file in paths])
    except OSError as error:
        reason = f"{error.filename} cannot be read ({error.strerror})"
        raise ValueError(f"--merge: {reason}") from None
    with locked(folder):
        store.save(path, merged)
        console.print(summary_table(merged))
        pictures = draw(merged, folder)
    console.print("\n".join(map(str, (path, *pictures))), soft_wrap=True)
    return 0


def fits_only(gib: float, folder: Path) -> int:
    """Print what trains fastest in `gib` GiB of GPU memory, from the results in a folder."""
    if not gib > 0:
        raise ValueError(f"--fits {gib:g}: give more than 0 GiB")
    path = folder / "results.json"
    if folder.resolve() == HERE and SUITE.is_file():
        path = SUITE  # has more to choose from
    if not path.is_file():
        raise ValueError(f"--fits: there is no {path}; run the benchmark first, or give --out")
    console.print(fits_table(store.load(path), gib), soft_wrap=True, markup=False)
    return 0


def summary_table(results: Results) -> Table:
    title = "Rehearsal: not a performance result" if results["rehearsal"] else None
    columns = ("tokens", "variant", "ms a step", "tokens/s", "speedup", "x floor", "GiB")
    table = Table(*columns, title=title, **PLAIN)
    for row in results["summary"]:
        if row["median_step_ms"] is None:
            table.add_row(str(row["seq_len"]), name_of(row["variant"]), row["status"])
            continue

        def number(name: str, digits: int, row=row) -> str:
            return "" if row[name] is None else f"{row[name]:.{digits}f}"

        noise = " (noise)" if row["verdict"] == "not distinguishable" else ""
        table.add_row(
            str(row["seq_len"]),
            name_of(row["variant"]),
            f"{row['median_step_ms']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            number("speedup", 2) + noise,
            number("ratio_to_floor", 2),
            number("peak_gib", 1),
        )
    return table

"""The commands that work on existing results: pictures, tables, comparisons; nothing is measured.

Each `*_only` is one of the command's options, and returns its exit code. What draws is imported
where it draws: matplotlib takes longer than saying that there is nothing to draw.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bench import results as store
from bench.folders import locked
from bench.options import HERE
from bench.records import Kernels, Run
from bench.terminal import console
from report import tables
from report.comparison import compare
from report.fits import fits_table
from report.statistics import NOISE, summarize
from variants import title_of, variant_of

PLAIN: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False}  # fits 80 columns


def save_with_summary(path: Path, run: Run) -> None:
    """Write a run with its summary brought up to date."""
    run.summary = summarize(run)
    store.save(path, run)


def plot_only(folder: Path) -> int:
    path = folder / "results.json"
    if not path.is_file():
        raise ValueError(f"--plot-only: there is no {path}; run the benchmark first, or give --out")
    run = store.load(path)
    from report import committed, documents, fp8_training, loss_curve
    from report.padding_picture import draw_documents
    from report.small_adapters import draw_small_adapters

    drawn: list[Path] = []
    if folder.resolve() == HERE:
        suite = store.load(committed.SUITE)
        drawn += documents.update(HERE, committed.generated_parts(run, suite))
        figures = HERE / "docs" / "figures"
        drawn += draw_suite(suite, figures)
        losses = committed.loaded(committed.LOSSES)
        if loss_curve.draw_loss_curve(losses, picture := figures / "loss_curve.png"):
            drawn.append(picture)
        lengths = committed.groups_of_lengths()
        if draw_documents(lengths, picture := figures / "documents.png"):
            drawn.append(picture)
        trainings = committed.loaded_trainings()
        if fp8_training.draw_fp8_training(trainings, picture := figures / "fp8_training.png"):
            drawn.append(picture)
        measured = committed.loaded_small_adapters()
        if draw_small_adapters(measured, picture := figures / "small_adapters.png"):
            drawn.append(picture)
        drawn += draw_pictures(run, folder, figures)
    else:
        drawn += draw_pictures(run, folder, folder)
    console.print("\n".join(map(str, drawn)), soft_wrap=True)
    return 0


def draw_pictures(run: Run, folder: Path, others: Path) -> list[Path]:
    """Draw every picture that the run has data for, all but the first into the folder `others`;
    returns their paths."""
    from report.benchmark_results import draw_benchmark_results
    from report.kernel_time import draw_kernel_time
    from report.kind_bars import longest_profiled

    longest = longest_profiled(run)
    pictures: dict[Path, Callable] = {
        folder / "benchmark_results.png": draw_benchmark_results,
        others / "kernel_time.png": draw_kernel_time,
        others / f"kernel_time_{longest}.png": partial(draw_kernel_time, lengths=[longest]),
    }
    drawn = [path for path, draw_it in pictures.items() if draw_it(run, path) is not False]
    return drawn + draw_suite(run, others)


def draw_suite(run: Run, folder: Path) -> list[Path]:
    """Draw the pictures that a suite has and the experiment alone has not; returns their paths."""
    if "fused_all" not in {variant_of(id).plain_id for id in run.experiment.variants}:
        return []
    from report import frontier
    from report.ablation_picture import draw_ablation

    pictures: dict[Path, Callable] = {
        folder / "ablation.png": draw_ablation,
        folder / "ablation_all_lengths.png": partial(draw_ablation, all_lengths=True),
        folder / "frontier.png": frontier.draw_frontier,
    }
    return [path for path, draw_it in pictures.items() if draw_it(run, path) is not False]


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
        save_with_summary(path, merged)
        console.print(summary_table(merged))
        pictures = draw_pictures(merged, folder, folder)
    console.print("\n".join(map(str, (path, *pictures))), soft_wrap=True)
    return 0


def fits_only(gib: float, folder: Path) -> int:
    """Print what trains fastest in `gib` GiB of GPU memory, from the results in a folder."""
    if not gib > 0:
        raise ValueError(f"--fits {gib:g}: give more than 0 GiB")
    path = folder / "results.json"
    from report.committed import SUITE

    if folder.resolve() == HERE and SUITE.is_file():
        path = SUITE  # has more to choose from
    if not path.is_file():
        raise ValueError(f"--fits: there is no {path}; run the benchmark first, or give --out")
    console.print(fits_table(store.load(path), gib), soft_wrap=True, markup=False)
    return 0


def summary_table(run: Run) -> Table:
    title = "Rehearsal: not a performance result" if run.rehearsal else None
    columns = ("tokens", "variant", "ms a step", "speedup", "x floor", "GiB", "GPU ms")
    table = Table(*columns, title=title, **PLAIN)
    for row in summarize(run):
        cells = [str(row.seq_len), title_of(row.variant)]
        if row.median_step_ms is None:
            table.add_row(*cells, row.status)
            continue
        speedup = tables.number_or_blank(row.speedup, 2)
        speedup += " (noise)" if row.verdict == NOISE else ""
        cells += [
            tables.number_or_blank(row.median_step_ms, 1),
            "" if run.rehearsal else speedup,
            tables.number_or_blank(row.ratio_to_floor, 2),
            tables.number_or_blank(row.peak_gib, 1),
            tables.number_or_blank(row.gpu_ms, 1),
        ]
        table.add_row(*cells)
    return table


def to_contribute(run: Run, path: Path) -> str:
    """The rows that anyone may quote, and how the run gets into docs/gpus.md."""
    from report.gpus import measured_section

    rows = measured_section({"": run})
    return f"\n{rows}\n\n{_to_add(run, path, 'quick.json.gz', 'docs/gpus.md')}"


def _to_add(run: Run, path: Path, file: str, page: str) -> str:
    folder = Path("docs") / "runs" / run.environment.device.lower().replace(" ", "-")
    return (
        f"To add it to {page}: mkdir -p {folder} && gzip -c "
        f"{path} > {folder / file} && python lora_bench.py --plot-only"
    )


def held_against_others(run: Run, path: Path) -> str:
    """The rows beside what others publish, and how the run gets into docs/results.md."""
    from report.beside_published import published_rows

    file = f"published-{run.experiment.model}.json.gz"
    return f"\n{published_rows([run])}\n\n{_to_add(run, path, file, 'docs/results.md')}"


def kernels_table(kernels: Kernels) -> Table:
    table = Table("kernel", "shape", "us", "GB/s", "of copy")
    for row in kernels.rows:
        table.add_row(
            row.kernel,
            " x ".join(map(str, row.shape)),
            f"{row.median_us:.1f}",
            f"{row.gb_per_s:.0f}",
            f"{row.share_of_copy:.0%}",
        )
    return table

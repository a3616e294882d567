"""Commands that work on existing results and measure nothing: pictures, tables, comparisons.

Each `*_only` is one of the command's options and returns its exit code. We import matplotlib only
to draw: that takes longer than saying we have nothing to draw.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bench import results as store
from bench.options import HERE
from bench.published import setting_name
from bench.records import Kernels, Run, SummaryRow
from bench.terminal import console
from report.comparison import compare, comparison_table
from report.fits import RANKING, fits_table
from report.several_gpus import COLUMNS as SEVERAL_GPUS_COLUMNS
from report.several_gpus import scaled
from report.statistics import NOISE, summarize
from report.table import Column, Row, number, thousands
from report.wording import on_base
from variants import title_of, variant_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_with_summary(path: Path, run: Run) -> None:
    """Write a run with an up-to-date summary."""
    run.summary = summarize(run)
    store.save(path, run)


def plot_only(folder: Path) -> int:
    run, others, drawn = _loaded_from(folder, "--plot-only"), folder, []
    if folder.resolve() == HERE:
        from report import committed

        others = HERE / "docs" / "figures"
        drawn = committed.update_pages(HERE, committed.generated_parts(run))
        drawn += _draw_suite(store.load(committed.suite_path()), others)
        from report.dpo_rewards import rewards_figure

        drawn += _written({others / "dpo_rewards.png": rewards_figure(committed.small_adapters())})
    drawn += draw_pictures(run, folder, others)
    console.print("\n".join(map(str, drawn)), soft_wrap=True)
    return 0


def draw_pictures(run: Run, folder: Path, others: Path) -> list[Path]:
    """Draw every picture that the run has data for. All but the first go into the folder `others`.
    Return their paths. A run on several GPUs has a table alone."""
    if run.experiment.gpus > 1:
        return []
    from report.benchmark_results import benchmark_figure
    from report.kernel_time import kernel_time_figure

    drawn = _written({
        folder / "benchmark_results.png": benchmark_figure(run),
        others / "kernel_time.png": kernel_time_figure(run),
    })  # fmt: skip
    return drawn + _draw_suite(run, others)


def _draw_suite(run: Run, folder: Path) -> list[Path]:
    """Draw the picture that needs a suite instead of the experiment. Return its path."""
    if "fused_all" not in {variant_of(id).plain_id for id in run.experiment.variants}:
        return []
    from report.ablation_picture import ablation_figure

    return _written({folder / "ablation.png": ablation_figure(run)})


def _written(pictures: dict[Path, "Figure | None"]) -> list[Path]:
    from report.picture import write_png

    return [path for path, picture in pictures.items() if write_png(picture, path)]


def _loaded_from(folder: Path, option: str) -> Run:
    path = folder / "results.json"
    if not path.is_file():
        raise ValueError(f"{option}: there is no {path}; run the benchmark first, or give --out")
    return store.load(path)


def compare_only(old_path: Path, new_path: Path) -> int:
    """Print how the runs in two files differ. Return 1 if the new one is slower beyond noise."""
    try:
        compared = compare(store.load(old_path), store.load(new_path))
    except OSError as error:
        reason = f"{error.filename} cannot be read ({error.strerror})"
        raise ValueError(f"--compare: {reason}") from None
    console.print(comparison_table(compared), soft_wrap=True, markup=False)
    for difference in compared.differences:
        console.print(f"  {escape(difference)}", soft_wrap=True)
    if compared.is_slower:
        console.print("Slower beyond noise.")
    return 1 if compared.is_slower else 0


def fits_only(gib: float, folder: Path) -> int:
    """Print the variants that train fastest in `gib` GiB of GPU memory, from the results in a
    folder. Of the published results we take the suite, which has more variants, and then each
    model's newest run on a base in 4 bits."""
    if not gib > 0:
        raise ValueError(f"--fits {gib:g}: give more than 0 GiB")
    if folder.resolve() == HERE:
        from report.committed import loaded, suite_path

        in_4_bits = sorted(loaded("*/nf4*").values(), key=lambda run: run.started_utc)
        newest = {run.experiment.model: run for run in in_4_bits}
        runs = [store.load(suite_path()), *newest.values()]
    else:
        runs = [_loaded_from(folder, "--fits")]
    tables = [fits_table(run, gib) for run in runs]
    console.print("\n\n".join([*tables, RANKING]), soft_wrap=True, markup=False)
    return 0


def summary_table(run: Run) -> Table:
    def speedup(row: SummaryRow) -> str:
        return number(row.speedup, 2) + (" (noise)" if row.verdict == NOISE else "")

    columns = [
        Column[SummaryRow]("tokens", lambda row: str(row.seq_len)),
        Column[SummaryRow](f"variant{on_base(run)}", lambda row: title_of(row.variant)),
        Column[SummaryRow]("ms a step", lambda row: number(row.median_step_ms, 1) or row.status),
    ]
    measured = [
        Column[SummaryRow]("speedup", speedup),
        Column[SummaryRow]("x floor", lambda row: number(row.ratio_to_floor, 2)),
        Column[SummaryRow]("GiB", lambda row: number(row.peak_gib, 1)),
        Column[SummaryRow]("GPU ms", lambda row: number(row.gpu_ms, 1)),
    ]
    if run.experiment.padded or run.experiment.documents:  # steps have unlike numbers of tokens
        measured.append(Column("tokens/s", lambda row: thousands(row.tokens_per_s)))
    title = "Rehearsal: not a performance result" if run.rehearsal else None
    plain: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False}  # fits 80 columns
    if run.experiment.gpus > 1:
        return _terminal_table(SEVERAL_GPUS_COLUMNS, scaled(run), title=title, **plain)
    if not run.rehearsal:
        columns += measured
        plain["caption"] = (
            "x floor: over frozen matmuls, attention and lm_head alone\n"
            "GiB: peak memory that torch allocated"
        )
    return _terminal_table(columns, summarize(run), title=title, **plain)


def kernels_table(kernels: Kernels) -> Table:
    from report.tables import KERNEL_COLUMNS

    return _terminal_table(KERNEL_COLUMNS, kernels.rows)


def _terminal_table(columns: Sequence[Column[Row]], rows: Iterable[Row], **look: Any) -> Table:
    """Return a table of the columns that have anything below them."""
    rows = list(rows)
    columns = [column for column in columns if any(map(column.words, rows))]
    table = Table(*(column.heading for column in columns), **look)
    for row in rows:
        table.add_row(*(column.words(row) for column in columns))
    return table


def to_contribute(run: Run, path: Path) -> str:
    """Write the rows that anyone may quote, and how the run gets into docs/gpus.md."""
    from report.headline import measured_section

    rows = measured_section({"": run})
    return f"\n{rows}\n\n{_to_add(run, path, 'quick.json.gz', 'docs/gpus.md')}"


def to_contribute_several_gpus(run: Run, path: Path) -> str:
    """Write how a run on several GPUs gets into docs/gpus.md."""
    return _to_add(run, path, f"gpus-{run.experiment.gpus}.json.gz", "docs/gpus.md")


def held_against_others(run: Run, path: Path) -> str:
    """Write the speeds and what others publish, and how the run gets into docs/published.md."""
    from report.published import published_section

    name = setting_name(run.experiment.model, run.experiment.base)
    file = f"published-{name}.json.gz"
    return f"\n{published_section([run])}\n\n{_to_add(run, path, file, 'docs/published.md')}"


def _to_add(run: Run, path: Path, file: str, page: str) -> str:
    folder = Path("docs") / "runs" / run.environment.device.lower().replace(" ", "-")
    return (
        f"To add it to {page}: mkdir -p {folder} && gzip -c "
        f"{path} > {folder / file} && python lora_bench.py --plot-only"
    )

"""Times a LoRA training step of Qwen2.5-3B: vanilla PEFT, fused MLP, full Unsloth.

    python lora_bench.py                     the experiment; without a GPU, a small rehearsal of it
    python lora_bench.py --seq-lens 512 --batch-size 8
    python lora_bench.py --suite all         every fused part and the strongest peers
    python lora_bench.py --kernels           the Triton kernels alone, against a device copy
    python lora_bench.py --plot-only         draw the published pictures and README tables again
    python lora_bench.py --fits 24           what trains fastest in 24 GiB of GPU memory
    python lora_bench.py --compare OLD NEW   is a second results.json slower, beyond noise?

Every variant and round runs in a process of its own, every cell is saved when it ends, and the same
command goes on where an earlier one stopped.
"""

import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import processes as isolated
from bench import results as store
from bench.cells import Plan, measure_kernels, prepare
from bench.experiment import must, run_experiment
from bench.plan import HERE, fill_in, parse, set_up
from report.commands import (
    Results,
    compare_only,
    console,
    draw,
    fits_only,
    merge_only,
    plot_only,
    summary_table,
)
from report.statistics import why_no_verdicts


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv, __doc__)
    try:
        if arguments.plot_only:
            return plot_only(arguments.out or HERE)
        if arguments.compare:
            return compare_only(*arguments.compare)
        if arguments.merge:
            return merge_only(arguments.merge, arguments.out)
        if arguments.fits is not None:
            return fits_only(arguments.fits, arguments.out or HERE)
        plan, results, path = set_up(arguments, sys.argv if argv is None else argv)
    except ValueError as error:  # what was asked for; one from the run below would be our own
        print(f"lora_bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    try:
        if arguments.kernels:
            run_kernels(plan, results, path)
        else:
            run_and_draw(plan, results, path, fill_in(arguments))
            if any(cell["status"] == "error" for cell in results["cells"]):
                return 1
    except KeyboardInterrupt:
        kept = f"{path} holds what was measured, the same command goes on"
        console.print(f"\nStopped; {kept}.", soft_wrap=True)
        return 130
    except (RuntimeError, OSError) as error:
        print(f"lora_bench.py: {error}", file=sys.stderr)
        return 1
    return 0


def run_and_draw(plan: Plan, results: Results, path: Path, asked: dict[str, Any]) -> None:
    run_experiment(plan, results, path, asked)
    pictures = draw(results, path.parent)
    console.print(summary_table(results))
    if lacking := why_no_verdicts(results):
        console.print(f"{lacking[0].upper()}{lacking[1:]}.")
    console.print("\n".join(map(str, (path, *pictures))), soft_wrap=True)


def run_kernels(plan: Plan, results: Results, path: Path) -> None:
    must(isolated.run(prepare, plan, on_message=lambda message: None))
    must(isolated.run(measure_kernels, plan, on_message=results.update))
    store.save(path, results)
    table = Table("kernel", "shape", "us", "GB/s", "of copy")
    for row in results["kernels"]["rows"]:
        table.add_row(
            row["kernel"],
            " x ".join(map(str, row["shape"])),
            f"{row['median_us']:.1f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['share_of_copy']:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

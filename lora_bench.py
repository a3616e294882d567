"""Times a LoRA training step of Qwen2.5-3B: vanilla PEFT, fused MLP, full Unsloth.

    python lora_bench.py                     the experiment; without a GPU, a small rehearsal of it
    python lora_bench.py --quick             a first answer, in minutes
    python lora_bench.py --seq-lens 512 --batch-size 8
    python lora_bench.py --suite all         every fused part and the strongest peers
    python lora_bench.py --suite published --model configs/qwen2.5-7b.json   beside others' numbers
    python lora_bench.py --kernels           the Triton kernels alone, against a device copy
    python lora_bench.py --plot-only         draw the published pictures and README tables again
    python lora_bench.py --fits 24           what trains fastest in 24 GiB of GPU memory
    python lora_bench.py --compare OLD NEW   is a second results.json slower, beyond noise?

Every variant and round runs in a process of its own, every cell is saved when it ends, and the same
command goes on where an earlier one stopped.
"""

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.options import HERE, parse

if TYPE_CHECKING:
    from bench.plan import Plan
    from bench.records import Run

# What takes seconds to import (torch, matplotlib) is imported where it is used: help and an error
# come at once, and so does every process that measures, which imports this file anew.


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv, __doc__)
    with ExitStack() as until_the_end:
        try:
            if (code := report_only(arguments)) is not None:
                return code
            from bench.planning import planned

            asked_as = sys.argv if argv is None else ["lora_bench.py", *argv]
            plan, run, path = until_the_end.enter_context(planned(arguments, asked_as))
        except ValueError as error:  # what was asked for; one from the run below would be our own
            print(f"lora_bench.py: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"lora_bench.py: {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nStopped.")
            return 130
        try:
            if arguments.kernels:
                return run_kernels(plan, run, path)
            return run_and_draw(plan, run, path)
        except KeyboardInterrupt:
            print(f"\nStopped; {path} holds what was measured, the same command goes on.")
            return 130
        except (RuntimeError, OSError) as error:
            print(f"lora_bench.py: {error}", file=sys.stderr)
            return 1


def report_only(arguments: argparse.Namespace) -> int | None:
    """Do what measures nothing, if that is asked for; its exit code."""
    out = arguments.out
    if arguments.plot_only:
        from report.commands import plot_only

        return plot_only(out or HERE)
    if arguments.compare:
        from report.commands import compare_only

        return compare_only(*arguments.compare)
    if arguments.merge:
        from report.commands import merge_only

        return merge_only(arguments.merge, out)
    if arguments.fits is not None:
        from report.commands import fits_only

        return fits_only(arguments.fits, out or HERE)
    return None


def run_and_draw(plan: "Plan", run: "Run", path: Path) -> int:
    from bench.experiment import expected_time, run_experiment
    from bench.stages import stages_line
    from bench.terminal import console
    from bench.weights import discard
    from report.commands import (
        draw_pictures,
        held_against_others,
        save_with_summary,
        summary_table,
        to_contribute,
    )
    from report.statistics import twins_too_far_apart, why_no_verdicts

    if plan.published or (plan.quick and not run.rehearsal):
        console.print(expected_time(plan), soft_wrap=True)
    run_experiment(plan, run, partial(save_with_summary, path, run))
    pictures = draw_pictures(run, path.parent, path.parent)
    console.print(summary_table(run))
    too_far = [] if run.rehearsal else twins_too_far_apart(run)
    for said in (why_no_verdicts(run), *too_far):
        if said:
            console.print(f"{said[0].upper()}{said[1:]}.", soft_wrap=True)
    if plan.quick and not run.rehearsal:
        console.print(to_contribute(run, path), soft_wrap=True, markup=False)
    if plan.published:
        console.print(held_against_others(run, path), soft_wrap=True, markup=False)
        console.print(discard(plan.source), soft_wrap=True, markup=False)
    console.print(stages_line(run), soft_wrap=True)
    console.print("\n".join(map(str, (path, *pictures))), soft_wrap=True)
    statuses = {cell.status for cell in run.cells}
    if "ok" not in statuses:
        print("lora_bench.py: no cell has a time, see what each says above", file=sys.stderr)
    return 1 if "error" in statuses or "ok" not in statuses else 0


def run_kernels(plan: "Plan", run: "Run", path: Path) -> int:
    from bench.experiment import measure_kernel_table
    from bench.terminal import console
    from report.commands import kernels_table, save_with_summary

    run.kernels = measure_kernel_table(plan)
    save_with_summary(path, run)
    console.print(kernels_table(run.kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())

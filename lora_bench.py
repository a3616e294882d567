"""Times a LoRA training step of Qwen2.5-3B: vanilla PEFT, fused MLP, full Unsloth.

    python lora_bench.py                     the experiment; without a GPU, a small rehearsal of it
    python lora_bench.py --quick             a first answer, in minutes
    python lora_bench.py --seq-lens 512 --batch-size 8
    python lora_bench.py --base nf4          the same for QLoRA, on a base in 4 bits
    python lora_bench.py --suite all         every fused part and the strongest peers
    python lora_bench.py --suite published --model configs/qwen2.5-7b.json   beside others' numbers
    python lora_bench.py --gpus 4            the same steps on several GPUs, together and apart
    python lora_bench.py --kernels           the Triton kernels alone, against a device copy
    python lora_bench.py --plot-only         draw the published pictures and README tables again
    python lora_bench.py --fits 24           what trains fastest in 24 GiB of GPU memory
    python lora_bench.py --compare OLD NEW   is a second results.json slower, beyond noise?

Each variant and round runs in its own process. We save each cell when it ends, and the same command
continues where an earlier one stopped.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
PIP_NAMES = {"pynvml": "nvidia-ml-py", "PIL": "pillow", "dateutil": "python-dateutil"}


def not_installed(*packages: str) -> str:
    """Say in one line which packages are missing, by pip's names."""
    are = "are" if len(packages) > 1 else "is"
    names = ", ".join(packages)
    return f"lora_bench.py: {names} {are} not installed; pip install -r requirements.txt"


def missing_from(error: ModuleNotFoundError) -> str:
    module = (error.name or str(error)).partition(".")[0]
    return not_installed(PIP_NAMES.get(module, module.replace("_", "-")))


try:
    from bench.options import parse
except ModuleNotFoundError as error:
    print(missing_from(error), file=sys.stderr)
    sys.exit(2)

if TYPE_CHECKING:
    from bench.plan import Plan
    from bench.records import Run

# torch and matplotlib take seconds, so we import them where we use them. Help and errors come at
# once, and so do the processes that measure: each imports this file anew.


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv, __doc__)
    with ExitStack() as until_the_end:
        path = None
        try:
            if (code := report_only(arguments)) is not None:
                return code
            if missing := missing_packages():
                print(not_installed(*missing), file=sys.stderr)
                return 2
            from bench.planning import planned

            until_the_end.enter_context(stopped_by_signals())
            asked_as = sys.argv if argv is None else ["lora_bench.py", *argv]
            plan, run, path = until_the_end.enter_context(planned(arguments, asked_as))
        except ModuleNotFoundError as error:
            print(missing_from(error), file=sys.stderr)
            return 2
        except ValueError as error:  # the user's; one from the run below would be our own
            print(f"lora_bench.py: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"lora_bench.py: {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as stop:
            print("\nStopped.")
            return exit_code_of(stop)
        try:
            if arguments.kernels:
                return run_kernels(plan, run, path)
            return run_and_draw(plan, run, path)
        except KeyboardInterrupt as stop:
            held = f"{path} holds what was measured, the same command continues"
            print(f"\nStopped; {held if path.is_file() else 'nothing was measured yet'}.")
            return exit_code_of(stop)
        except OSError as error:
            said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            print(
                f"lora_bench.py: {said}; fix that, and the same command continues", file=sys.stderr
            )
            return 1
        except RuntimeError as error:
            print(f"lora_bench.py: {error}", file=sys.stderr)
            return 1


def missing_packages() -> list[str]:
    """Return the packages of requirements.txt that are not installed. Child processes import some
    of them only after minutes."""
    missing = []
    for line in (HERE / "requirements.txt").read_text().splitlines():
        name, _, rest = line.partition("==")
        if rest and ("Linux" not in rest or sys.platform == "linux"):
            try:
                version(name)
            except PackageNotFoundError:
                missing.append(name)
    return missing


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Stop and clean up as on Ctrl-C, on SIGTERM or when the terminal closes."""

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # while it cleans up
        raise KeyboardInterrupt(number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code_of(stop: KeyboardInterrupt) -> int:
    return 128 + int(stop.args[0] if stop.args else signal.SIGINT)


def report_only(arguments: argparse.Namespace) -> int | None:
    """Run a command that measures nothing and return its exit code. None: it was another."""
    out = arguments.out
    if arguments.plot_only:
        from report.commands import plot_only

        return plot_only(out or HERE)
    if arguments.compare:
        from report.commands import compare_only

        return compare_only(*arguments.compare)
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
        to_contribute_several_gpus,
    )
    from report.statistics import twins_too_far_apart, why_no_verdicts
    from variants import BF16

    if plan.published or (plan.quick and not run.rehearsal):
        console.print(expected_time(plan), soft_wrap=True)
    run_experiment(plan, run, partial(save_with_summary, path, run))
    pictures = draw_pictures(run, path.parent, path.parent)
    console.print(summary_table(run))
    too_far = [] if run.rehearsal else twins_too_far_apart(run)
    for said in (why_no_verdicts(run), *too_far):
        if said:
            console.print(f"{said[0].upper()}{said[1:]}.", soft_wrap=True)
    if plan.quick and not run.rehearsal and plan.base == BF16:  # the table of GPUs has that alone
        console.print(to_contribute(run, path), soft_wrap=True, markup=False)
    if plan.gpus > 1 and not run.rehearsal:
        console.print(to_contribute_several_gpus(run, path), soft_wrap=True, markup=False)
    if plan.published:
        console.print(held_against_others(run, path), soft_wrap=True, markup=False)
        console.print(discard(plan.source), soft_wrap=True, markup=False)
    console.print(stages_line(run), soft_wrap=True)
    console.print("\n".join(map(str, (path, *pictures))), soft_wrap=True)
    statuses = {cell.status for cell in run.cells}
    if "ok" not in statuses:
        print("lora_bench.py: no cell has a time; its error is above", file=sys.stderr)
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

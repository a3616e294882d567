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

import os
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import audit
import isolated
import results as store
from cells import Plan, measure_cells, measure_floor, measure_kernels, prepare
from names import name_of
from options import (
    HERE,
    fill_in,
    others_on_gpu,
    parse,
    set_up,
    why_unavailable,
)
from reports import (
    Results,
    compare_only,
    console,
    draw,
    fits_only,
    merge_only,
    plot_only,
    summary_table,
)
from summary import baseline_of, why_no_verdicts
from variants import SUITES


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
            run_experiment(plan, results, path, fill_in(arguments))
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


# --- running --------------------------------------------------------------------------------------


def run_experiment(plan: Plan, results: Results, path: Path, asked: dict[str, Any]) -> None:
    """Measure every cell that is asked for and still to do, saving each as it ends, then draw."""
    variants = list(dict.fromkeys(asked["variants"] or SUITES[asked["suite"]]))
    todo = cells_to_do(plan, results, variants, asked["rounds"])
    if plan.device == "cpu":
        # for the processes, which read them when they import triton and torch
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        console.print("No GPU: a rehearsal in Triton's interpreter, not a performance result.")
    with progress_bar(sum(plan.steps * seq_len for _, _, seq_len in todo)) as (advance, say):
        missing_floor = tuple(n for n in plan.seq_lens if str(n) not in results["floor"])
        if todo or missing_floor:
            must(isolated.run(prepare, plan, on_message=lambda message: say(message["doing"])))
        if missing_floor:
            say("floor")

            def keep_floor(message):
                results["floor"].update(message["floor"])
                store.save(path, results)

            must(isolated.run(measure_floor, plan, missing_floor, on_message=keep_floor))
        while todo:
            if others := others_on_gpu(plan.device, asked["allow_shared_gpu"]):
                raise RuntimeError(others)
            run_some = run_side_by_side if plan.turn_steps else run_next
            todo = run_some(plan, results, path, todo, asked, advance, say)
    results["finished_utc"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    store.save(path, results)
    pictures = draw(results, path.parent)
    console.print(summary_table(results))
    if lacking := why_no_verdicts(results):
        console.print(f"{lacking[0].upper()}{lacking[1:]}.")
    console.print("\n".join(map(str, (path, *pictures))), soft_wrap=True)


Cells = list[tuple[int, str, int]]


def cells_to_do(plan: Plan, results: Results, variants: list[str], rounds: int) -> Cells:
    """(round, variant, length) of every cell that the results lack, in the order to run them in.

    In turns, a length of a round of which one is lacking is run again with all of its variants:
    times that are held against each other were taken side by side.
    """
    todo = []
    for round_number in range(1, rounds + 1):
        # rounds alternate, so that no variant always runs on the warmer card
        order = variants if round_number % 2 else variants[::-1]
        cells = [(round_number, variant, seq_len) for variant in order for seq_len in plan.seq_lens]
        missing = [(r, v, n) for r, v, n in cells if not store.done(results, v, n, r)]
        again = {n for _, _, n in missing}
        todo += [cell for cell in cells if cell[2] in again] if plan.turn_steps else missing
    return todo


def run_next(
    plan: Plan,
    results: Results,
    path: Path,
    todo: Cells,
    asked: dict[str, Any],
    advance: Callable,
    say: Callable,
) -> Cells:
    """Run the first variant and round of `todo` in a process of its own; returns what is left.

    A process that ends early leaves the lengths after its last cell to the next one.
    """
    round_number, variant, _ = todo[0]
    seq_lens = tuple(n for r, v, n in todo if (r, v) == (round_number, variant))
    say(f"round {round_number}: {name_of(variant)}")
    finished: list[int] = []

    def keep(cell: dict[str, Any]) -> None:
        keep_cell(results, path, asked, cell)
        finished.append(cell["seq_len"])

    def on_message(message: dict[str, Any]) -> None:
        if "cell" in message:
            keep(message["cell"])
        else:
            advance(seq_lens[len(finished)])

    if reason := why_unavailable(variant, plan.device):
        for seq_len in seq_lens:
            keep(store.new_cell(variant, seq_len, round_number, "unavailable", error=reason))
            advance(plan.steps * seq_len)
    else:
        ended = isolated.run(
            measure_cells,
            plan,
            variant,
            round_number,
            seq_lens,
            on_message=on_message,
            silence_limit_s=asked["cell_timeout"],
        )
        if ended.error and len(finished) < len(seq_lens):
            error = f"{ended.error}\n{ended.output_tail}"
            seq_len = seq_lens[len(finished)]
            keep(store.new_cell(variant, seq_len, round_number, "error", error=error))
    gone = {(round_number, variant, seq_len) for seq_len in finished}
    return [cell for cell in todo if cell not in gone]


def run_side_by_side(
    plan: Plan,
    results: Results,
    path: Path,
    todo: Cells,
    asked: dict[str, Any],
    advance: Callable,
    say: Callable,
) -> Cells:
    """Run all variants of the first round and length of `todo`, each in a process of its own, their
    timed steps in turns; returns what is left.
    """
    round_number, _, seq_len = todo[0]
    together = [v for r, v, n in todo if (r, n) == (round_number, seq_len)]
    reasons = {variant: why_unavailable(variant, plan.device) for variant in together}
    running = [variant for variant in together if not reasons[variant]]
    say(f"round {round_number}, {seq_len} tokens: {len(running)} variants in turns")
    finished: list[str] = []

    def keep(cell: dict[str, Any]) -> None:
        keep_cell(results, path, asked, cell)
        finished.append(cell["variant"])

    def on_message(_: int, message: dict[str, Any]) -> None:
        if "cell" in message:
            keep(message["cell"])
        else:
            advance(seq_len)

    for variant, reason in reasons.items():
        if reason:
            keep(store.new_cell(variant, seq_len, round_number, "unavailable", error=reason))
            advance(plan.steps * seq_len)
    all_ended = isolated.run_in_turns(
        measure_cells,
        [(plan, variant, round_number, (seq_len,)) for variant in running],
        on_message=on_message,
        silence_limit_s=asked["cell_timeout"],
    )
    for variant, ended in zip(running, all_ended, strict=True):
        if variant not in finished:
            error = f"{ended.error}\n{ended.output_tail}"
            keep(store.new_cell(variant, seq_len, round_number, "error", error=error))
    return [(r, v, n) for r, v, n in todo if (r, n) != (round_number, seq_len)]


def keep_cell(results: Results, path: Path, asked: dict[str, Any], cell: dict[str, Any]) -> None:
    if cell["other_gpu_processes"] and not asked["allow_shared_gpu"]:
        raise RuntimeError(
            f"another process computed on the GPU while {cell['variant']} at {cell['seq_len']} "
            "tokens was measured, which is not kept; stop it, or give --allow-shared-gpu; the same "
            "command goes on"
        )
    check_losses(results, cell)
    store.add_cell(results, cell)
    store.save(path, results)
    console.print(cell_line(cell), soft_wrap=True)


def check_losses(results: Results, cell: dict[str, Any]) -> None:
    """Hold the losses of a new cell against its baseline's, or those of others against it."""
    if cell["variant"] == baseline_of(cell["variant"]):
        held = [c for c in results["cells"] if c["loss_gap"] is None] + [cell]
        baselines = [*results["cells"], cell]
    else:
        held, baselines = [cell], results["cells"]
    for other in held:
        wanted = (baseline_of(other["variant"]), other["seq_len"], "ok")
        for baseline in baselines:
            key = (baseline["variant"], baseline["seq_len"], baseline["status"])
            if key == wanted and baseline is not other and other["status"] == "ok":
                judge_losses(other, baseline)
                break


def judge_losses(cell: dict[str, Any], baseline: dict[str, Any]) -> None:
    """A variant whose losses leave vanilla's on the same batches did other work than vanilla."""
    gap = cell["loss_gap"] = audit.loss_gap(cell["losses"], baseline["losses"])
    if not gap <= audit.LOSS_SHARE:
        cell["status"] = "parity_failed"
        cell["error"] = f"its losses leave vanilla PEFT's by {gap:.2%} in the timed steps"


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


def must(ended: isolated.Ended) -> None:
    """Nothing can be measured without what this process was to make: say why, and stop."""
    if ended.error:
        raise RuntimeError(f"{ended.error}\n{ended.output_tail}")


# --- what is shown --------------------------------------------------------------------------------


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


def cell_line(cell: dict[str, Any]) -> str:
    start = f"round {cell['round']}  {name_of(cell['variant']):14} {cell['seq_len']:5} tokens"
    if cell["status"] != "ok":
        return escape(f"{start}  {cell['status']}: {cell['error']}")
    step_ms = sorted(cell["step_ms"])[len(cell["step_ms"]) // 2]
    ratio = cell["parity"]["worst_ratio"]
    return f"{start}  {step_ms:9.1f} ms  parity {ratio:.2f} x vanilla's own error"


if __name__ == "__main__":
    sys.exit(main())

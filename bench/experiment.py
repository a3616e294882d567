"""The plan, cell by cell: what is still to do, in which processes, and what is kept of it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import audit
from bench import processes as isolated
from bench import results as store
from bench.cells import Plan, measure_cells, measure_floor, prepare
from bench.options import others_on_gpu, variants_of, why_unavailable
from report.commands import Results, console
from report.names import name_of
from report.statistics import baseline_of, key_of

Cells = list[tuple[int, str, int]]  # (round, variant, length) of each


def run_experiment(plan: Plan, results: Results, path: Path, asked: dict[str, Any]) -> None:
    """Measure every cell that is asked for and still to do, saving each as it ends."""
    todo = cells_to_do(plan, results, variants_of(asked), asked["rounds"])
    if plan.device == "cpu":
        # for the processes, which read them when they import triton and torch
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        console.print("No GPU: a rehearsal in Triton's interpreter, not a performance result.")
    with progress_bar(sum(plan.steps * seq_len for _, _, seq_len in todo)) as (advance, say):
        missing_floor = tuple(n for n in plan.seq_lens if str(n) not in results["floor"])
        if (todo or missing_floor) and not plan.is_prepared():
            must(isolated.run(prepare, plan, on_message=lambda message: say(message["doing"])))
        if missing_floor:
            say("floor")

            def keep_floor(message):
                results["floor"].update(message["floor"])
                store.save(path, results)

            must(isolated.run(measure_floor, plan, missing_floor, on_message=keep_floor))
        run = Run(plan, results, path, asked, advance, say)
        while todo:
            if others := others_on_gpu(plan.device, asked["allow_shared_gpu"]):
                raise RuntimeError(others)
            todo = run.side_by_side(todo) if plan.turn_steps else run.alone(todo)
    results["finished_utc"] = datetime.now(UTC).isoformat(timespec="seconds")
    store.save(path, results)


def cells_to_do(plan: Plan, results: Results, variants: list[str], rounds: int) -> Cells:
    """Every cell that the results lack, in the order to run them in.

    In turns, a length of a round of which one is lacking is run again with all of its variants,
    and with those that the results have there: times that are held against each other were taken
    side by side.
    """
    todo: Cells = []
    for round_number in range(1, rounds + 1):
        # rounds alternate, so that no variant always runs on the warmer card
        order = variants if round_number % 2 else variants[::-1]
        cells = [(round_number, variant, seq_len) for variant in order for seq_len in plan.seq_lens]
        missing = [(r, v, n) for r, v, n in cells if not store.done(results, v, n, r)]
        if not plan.turn_steps:
            todo += missing
            continue
        for again in dict.fromkeys(n for _, _, n in missing):
            there = [
                v for v, n, r in map(key_of, results["cells"]) if (r, n) == (round_number, again)
            ]
            todo += [(round_number, variant, again) for variant in dict.fromkeys([*order, *there])]
    return todo


@dataclass(frozen=True)
class Run:
    """Runs cells of a plan, the first of a list first, and keeps what they measured.

    advance: called with the tokens of each timed step. say: called with what is going on.
    """

    plan: Plan
    results: Results
    path: Path
    asked: dict[str, Any]
    advance: Callable[[int], None]
    say: Callable[[str], None]

    def alone(self, todo: Cells) -> Cells:
        """Run the first variant and round of `todo` in a process of its own; returns what is left.

        A process that ends early leaves the lengths after its last cell to the next one.
        """
        round_number, variant, _ = todo[0]
        seq_lens = tuple(n for r, v, n in todo if (r, v) == (round_number, variant))
        self.say(f"round {round_number}: {name_of(variant)}")
        finished: list[int] = []

        def on_message(message: dict[str, Any]) -> None:
            if "cell" in message:
                self.keep(message["cell"])
                finished.append(message["cell"]["seq_len"])
            else:
                self.advance(seq_lens[len(finished)])

        if reason := why_unavailable(variant, self.plan.device):
            for seq_len in seq_lens:
                self.keep_unavailable(variant, seq_len, round_number, reason)
            finished += seq_lens
        else:
            ended = isolated.run(
                measure_cells,
                self.plan,
                variant,
                round_number,
                seq_lens,
                on_message=on_message,
                silence_limit_s=self.asked["cell_timeout"],
            )
            if ended.error and len(finished) < len(seq_lens):
                seq_len = seq_lens[len(finished)]
                self.keep_error(variant, seq_len, round_number, ended)
                finished.append(seq_len)
        gone = {(round_number, variant, seq_len) for seq_len in finished}
        return [cell for cell in todo if cell not in gone]

    def side_by_side(self, todo: Cells) -> Cells:
        """Run all variants of the first round and length of `todo`, each in a process of its own,
        their timed steps in turns; returns what is left."""
        round_number, _, seq_len = todo[0]
        together = [v for r, v, n in todo if (r, n) == (round_number, seq_len)]
        self.results["cells"] = [  # none of an earlier go is held against one of this
            c for c in self.results["cells"] if key_of(c)[1:] != (seq_len, round_number)
        ]
        running = []
        for variant in together:
            if reason := why_unavailable(variant, self.plan.device):
                self.keep_unavailable(variant, seq_len, round_number, reason)
            else:
                running.append(variant)
        self.say(f"round {round_number}, {seq_len} tokens: {len(running)} variants in turns")
        finished: set[str] = set()

        def on_message(_: int, message: dict[str, Any]) -> None:
            if "cell" in message:
                self.keep(message["cell"])
                finished.add(message["cell"]["variant"])
            else:
                self.advance(seq_len)

        all_ended = isolated.run_in_turns(
            measure_cells,
            [(self.plan, variant, round_number, (seq_len,)) for variant in running],
            on_message=on_message,
            silence_limit_s=self.asked["cell_timeout"],
        )
        for variant, ended in zip(running, all_ended, strict=True):
            if variant not in finished:
                self.keep_error(variant, seq_len, round_number, ended)
        return [(r, v, n) for r, v, n in todo if (r, n) != (round_number, seq_len)]

    def keep(self, cell: dict[str, Any]) -> None:
        if cell["other_gpu_processes"] and not self.asked["allow_shared_gpu"]:
            raise RuntimeError(
                f"another process computed on the GPU while {cell['variant']} at {cell['seq_len']} "
                "tokens was measured, which is not kept; stop it, or give --allow-shared-gpu; the "
                "same command goes on"
            )
        check_losses(self.results, cell)
        store.add_cell(self.results, cell)
        store.save(self.path, self.results)
        console.print(cell_line(cell), soft_wrap=True)

    def keep_unavailable(self, variant: str, seq_len: int, round_number: int, reason: str) -> None:
        self.keep(store.new_cell(variant, seq_len, round_number, "unavailable", error=reason))
        self.advance(self.plan.steps * seq_len)

    def keep_error(
        self, variant: str, seq_len: int, round_number: int, ended: isolated.Ended
    ) -> None:
        error = f"{ended.error}\n{ended.output_tail}"
        self.keep(store.new_cell(variant, seq_len, round_number, "error", error=error))


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

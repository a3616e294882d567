"""The run of a plan, cell by cell, in processes of their own; every finished cell is kept."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bench import audit
from bench import processes as isolated
from bench.cells import Plan, measure_cells, measure_floor, measure_kernels, prepare_run
from bench.options import others_on_gpu, why_unavailable
from bench.records import Cell, Kernels, Run
from bench.terminal import console, progress_bar, show
from variants import title_of, variant_of

Cells = list[tuple[int, str, int]]  # (round, variant, length) of each


def run_experiment(plan: Plan, run: Run, save: Callable[[], None]) -> None:
    """Measure every cell that is asked for and still to do; `save` the run as each ends."""
    todo = cells_to_do(plan, run)
    if plan.device == "cpu":
        # for the processes, which read them when they import triton and torch
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        console.print("No GPU: a rehearsal in Triton's interpreter, not a performance result.")
    with progress_bar(sum(plan.steps * seq_len for _, _, seq_len in todo)) as (advance, say):
        missing_floor = tuple(n for n in plan.seq_lens if n not in run.floor)
        if (todo or missing_floor) and not plan.is_prepared():
            must(isolated.run(prepare_run, plan, on_message=lambda message: say(message["doing"])))
        if missing_floor:
            say("floor")

            def keep_floor(message):
                run.floor.update(message["floor"])
                save()

            must(isolated.run(measure_floor, plan, missing_floor, on_message=keep_floor))
        runner = Runner(plan, run, save, advance, say)
        while todo:
            if others := others_on_gpu(plan.device, plan.allow_shared_gpu):
                raise RuntimeError(others)
            todo = runner.side_by_side(todo) if plan.turn_steps else runner.alone(todo)
    run.finished_utc = datetime.now(UTC).isoformat(timespec="seconds")
    save()


def measure_kernel_table(plan: Plan) -> Kernels:
    """Time the Triton kernels alone, at the model's own shapes."""
    found: list[Kernels] = []
    must(isolated.run(prepare_run, plan, on_message=lambda message: None))
    must(isolated.run(measure_kernels, plan, on_message=lambda m: found.append(m["kernels"])))
    return found[0]


def cells_to_do(plan: Plan, run: Run) -> Cells:
    """Every cell of the plan that the run lacks, in the order to run them in.

    If variants are interleaved and a length of a round lacks one of them, all variants of that
    length and round are run again, with those that the run already has there: only times that were
    taken side by side are compared.
    """
    todo: Cells = []
    for round_number in range(1, plan.rounds + 1):
        # rounds alternate, so that no variant always runs on the warmer card
        order = plan.variants if round_number % 2 else plan.variants[::-1]
        cells = [(round_number, variant, seq_len) for variant in order for seq_len in plan.seq_lens]
        missing = [(r, v, n) for r, v, n in cells if not run.is_done(v, n, r)]
        if not plan.turn_steps:
            todo += missing
            continue
        for again in dict.fromkeys(n for _, _, n in missing):
            there = [cell.variant for cell in run.cells_of(seq_len=again, round=round_number)]
            todo += [(round_number, variant, again) for variant in dict.fromkeys([*order, *there])]
    return todo


@dataclass(frozen=True)
class Runner:
    """Runs cells of a plan, the first of a list first, and keeps what they measured.

    save: writes the run. advance: called with the tokens of each timed step. say: called with what
    is going on.
    """

    plan: Plan
    run: Run
    save: Callable[[], None]
    advance: Callable[[int], None]
    say: Callable[[str], None]

    def alone(self, todo: Cells) -> Cells:
        """Run the first variant and round of `todo` in a process of its own; returns what is left.

        A process that ends early leaves the lengths after its last cell to the next one.
        """
        round_number, variant, _ = todo[0]
        seq_lens = tuple(n for r, v, n in todo if (r, v) == (round_number, variant))
        self.say(f"round {round_number}: {title_of(variant)}")
        finished: list[int] = []

        def on_message(message: dict[str, Any]) -> None:
            if "cell" in message:
                self.keep(message["cell"])
                finished.append(message["cell"].seq_len)
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
                silence_limit_s=self.plan.cell_timeout_s,
            )
            if ended.error and len(finished) < len(seq_lens):
                seq_len = seq_lens[len(finished)]
                self.keep_error(variant, seq_len, round_number, ended)
                finished.append(seq_len)
        gone = {(round_number, variant, seq_len) for seq_len in finished}
        return [cell for cell in todo if cell not in gone]

    def side_by_side(self, todo: Cells) -> Cells:
        """Run all variants of the first round and length of `todo`, each in a process of its own,
        their timed steps interleaved; returns what is left."""
        round_number, _, seq_len = todo[0]
        together = [v for r, v, n in todo if (r, n) == (round_number, seq_len)]
        earlier = self.run.cells_of(seq_len=seq_len, round=round_number)
        for cell in earlier:  # none of an earlier go is held against one of this
            self.run.cells.remove(cell)
        running = []
        for variant in together:
            if reason := why_unavailable(variant, self.plan.device):
                self.keep_unavailable(variant, seq_len, round_number, reason)
            else:
                running.append(variant)
        self.say(f"round {round_number}, {seq_len} tokens: {len(running)} variants interleaved")
        finished: set[str] = set()

        def on_message(_: int, message: dict[str, Any]) -> None:
            if "cell" in message:
                self.keep(message["cell"])
                finished.add(message["cell"].variant)
            else:
                self.advance(seq_len)

        all_ended = isolated.run_in_turns(
            measure_cells,
            [(self.plan, variant, round_number, (seq_len,)) for variant in running],
            on_message=on_message,
            silence_limit_s=self.plan.cell_timeout_s,
        )
        for variant, ended in zip(running, all_ended, strict=True):
            if variant not in finished:
                self.keep_error(variant, seq_len, round_number, ended)
        return [(r, v, n) for r, v, n in todo if (r, n) != (round_number, seq_len)]

    def keep(self, cell: Cell) -> None:
        if cell.other_gpu_processes and not self.plan.allow_shared_gpu:
            raise RuntimeError(
                f"another process computed on the GPU while {cell.variant} at {cell.seq_len} "
                "tokens was measured, which is not kept; stop it, or give --allow-shared-gpu; the "
                "same command goes on"
            )
        check_losses(self.run, cell)
        self.run.add(cell)
        self.save()
        show(cell)

    def keep_unavailable(self, variant: str, seq_len: int, round_number: int, reason: str) -> None:
        self.keep(Cell(variant, seq_len, round_number, "unavailable", error=reason))
        self.advance(self.plan.steps * seq_len)

    def keep_error(
        self, variant: str, seq_len: int, round_number: int, ended: isolated.Ended
    ) -> None:
        error = f"{ended.error}\n{ended.output_tail}"
        self.keep(Cell(variant, seq_len, round_number, "error", error=error))


def check_losses(run: Run, cell: Cell) -> None:
    """Hold the losses of a new cell against its baseline's, or those of others against it."""
    if cell.variant == variant_of(cell.variant).baseline.id:
        held = [other for other in run.cells if other.loss_gap is None] + [cell]
        baselines = [*run.cells, cell]
    else:
        held, baselines = [cell], run.cells
    for other in held:
        wanted = (variant_of(other.variant).baseline.id, other.seq_len, "ok")
        for baseline in baselines:
            key = (baseline.variant, baseline.seq_len, baseline.status)
            if key == wanted and baseline is not other and other.status == "ok":
                judge_losses(other, baseline)
                break


def judge_losses(cell: Cell, baseline: Cell) -> None:
    """Fail a cell whose losses leave vanilla's on the same batches: it did other work than
    vanilla."""
    gap = cell.loss_gap = audit.loss_gap(cell.losses, baseline.losses)
    if not gap <= audit.LOSS_SHARE:
        cell.status = "parity_failed"
        cell.error = f"its losses leave vanilla PEFT's by {gap:.2%} in the timed steps"


def must(ended: isolated.Ended) -> None:
    """Raise RuntimeError if a process that everything else needs failed."""
    if ended.error:
        raise RuntimeError(f"{ended.error}\n{ended.output_tail}")

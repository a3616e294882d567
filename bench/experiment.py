"""The run of a plan, cell by cell, in processes of their own; every finished cell is kept."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from errno import ENOSPC
from math import inf
from typing import Any

from rich.markup import escape

from bench import audit
from bench import processes as isolated
from bench.cells import Stage, measure_cells, measure_floor, measure_kernels, prepare_run
from bench.options import QUICK_MINUTES, SHORT, others_on_gpu, why_unavailable
from bench.plan import Plan
from bench.records import Cell, Kernels, Run
from bench.stages import Stopwatch, stage_of
from bench.terminal import console, progress_bar, show
from variants import counterpart, title_of, variant_of

Cells = list[tuple[int, str, int]]  # (round, variant, length) of each


def run_experiment(plan: Plan, run: Run, save: Callable[[], None]) -> None:
    """Measure every cell that is asked for and still to do; `save` the run as each ends."""
    watch = Stopwatch(run)
    todo = cells_to_do(plan, run)
    if todo:
        run.finished_utc = None
    say_unavailable(plan, todo)

    def save_as_far_as_it_is() -> None:
        if run.finished_utc is None and not cells_to_do(plan, run):
            run.finished_utc = now()
        save()

    if plan.device == "cpu":
        # for the processes, which read them when they import triton and torch
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        console.print("No GPU: a rehearsal in Triton's interpreter, not a performance result.")
    with progress_bar(sum(plan.steps * seq_len for _, _, seq_len in todo)) as (advance, say):
        # of a published setting it would take as long as two variants' steps
        lengths = () if plan.published else plan.seq_lens
        missing_floor = tuple(n for n in lengths if n not in run.floor)
        if (todo or missing_floor) and not plan.is_prepared():
            prepare(plan, say)
            watch.book("weights")
        if missing_floor:
            say("floor")

            def keep_floor(message):
                run.floor.update(message["floor"])
                save()

            must(isolated.run(measure_floor, plan, missing_floor, on_message=keep_floor))
            watch.book("floor")
        runner = Runner(plan, run, save_as_far_as_it_is, advance, say, watch)
        while todo:
            if others := others_on_gpu(plan.device, plan.allow_shared_gpu):
                raise RuntimeError(others)
            todo = runner.go_on(todo)
            watch.book("other")
    run.finished_utc = run.finished_utc or now()
    save()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def prepare(plan: Plan, say: Callable[[str], None]) -> None:
    """Make what every cell needs, in a process.

    Raises:
        RuntimeError: it failed; a full disk in one line.
    """

    def on_message(message: dict[str, Any]) -> None:
        if "full" in message:
            raise OSError(ENOSPC, os.strerror(ENOSPC), message["full"])
        say(message["doing"])

    must(isolated.run(prepare_run, plan, on_message=on_message))


def say_unavailable(plan: Plan, todo: Cells) -> None:
    """Say once what cannot run here, and why."""
    titles: dict[str, list[str]] = {}
    for variant in dict.fromkeys(variant for _, variant, _ in todo):
        if reason := why_unavailable(variant, plan.device):
            titles.setdefault(reason, []).append(title_of(variant))
    for reason, those in titles.items():
        console.print(escape(f"{', '.join(those)}: {reason}."), soft_wrap=True)


def expected_time(plan: Plan) -> str:
    """Say how long a quick run takes, or one of a published setting."""
    lengths = " and ".join(map(str, plan.seq_lens))
    if plan.published:
        return (
            f"{plan.source.name} in the setting of {plan.published.page.name}: {plan.batch_size} x "
            f"{lengths} tokens, {plan.accumulate} times a step; {len(plan.variants)} variants, "
            f"{plan.steps} steps each: about {plan.published.minutes:.0f} minutes on an "
            f"{plan.published.gpu}."
        )
    return (
        f"{len(plan.variants)} variants at {lengths} tokens, {plan.rounds} rounds: about "
        f"{QUICK_MINUTES} minutes on an H100, and two more where the weights are not there yet."
    )


def measure_kernel_table(plan: Plan) -> Kernels:
    """Time the Triton kernels alone, at the model's own shapes."""
    found: list[Kernels] = []
    prepare(plan, lambda doing: None)
    must(isolated.run(measure_kernels, plan, on_message=lambda m: found.append(m["kernels"])))
    return found[0]


def cells_to_do(plan: Plan, run: Run) -> Cells:
    """Every cell of the plan that the run lacks, in the order to run them in.

    If a round lacks one of the variants at a length where they run side by side, all of that length
    and round are run again, with those that the run already has there: only times that were taken
    side by side are compared.
    """
    todo: Cells = []
    for round_number in range(1, plan.rounds + 1):
        # rounds alternate, so that no variant always runs on the warmer card
        order = plan.variants if round_number % 2 else plan.variants[::-1]
        cells = [(round_number, variant, seq_len) for variant in order for seq_len in plan.seq_lens]
        missing = [(r, v, n) for r, v, n in cells if not run.is_done(v, n, r)]
        together = {n for _, _, n in missing} if side_by_side(plan, run) else set()
        todo += [(r, v, n) for r, v, n in missing if n not in together]
        for again in sorted(together):
            there = [cell.variant for cell in run.cells_of(seq_len=again, round=round_number)]
            todo += [(round_number, variant, again) for variant in dict.fromkeys([*order, *there])]
    return todo


def side_by_side(plan: Plan, run: Run) -> bool:
    """Return True if a round's variants have their processes at the same time: where they are to be
    interleaved, and the GPU holds the weights of all."""
    gpu = run.environment.gpu
    fits = gpu is None or len(plan.variants) * plan.source.size_bytes() < gpu.memory_bytes
    return bool(plan.interleave) and fits


def interleaves(plan: Plan, run: Run, seq_len: int) -> bool:
    """Return True if variants side by side are to be interleaved at this length, not to take turns
    of a whole cell: unless their steps did not fit together, here or at a shorter length."""
    if plan.quick:
        return seq_len <= SHORT
    whole = (cell for cell in run.cells if cell.status == "ok" and not cell.turn_steps)
    return all(seq_len < cell.seq_len for cell in whole)


class DoesNotFit(Exception):
    """Variants side by side did not fit on the GPU, at the length that it is given."""


@dataclass
class Runner:
    """Runs cells of a plan, the first of a list first, and keeps what they measured.

    save: writes the run. advance: called with the tokens of each timed step. say: called with what
    is going on. watch: books the time of each stage. longest_interleaved, longest_together: the
    longest length at which the GPU may hold a step of every variant, and one beside the others'
    weights.
    """

    plan: Plan
    run: Run
    save: Callable[[], None]
    advance: Callable[[int], None]
    say: Callable[[str], None]
    watch: Stopwatch
    longest_interleaved: float = inf
    longest_together: float = inf

    def go_on(self, todo: Cells) -> Cells:
        """Run what comes next; returns what is left."""
        stages = sorted({(r, n) for r, _, n in todo if n <= self.longest_together}, key=_by_length)
        if not self.plan.quick:  # whose processes have all rounds
            stages = [(r, n) for r, n in stages if r == todo[0][0]]
        if stages and side_by_side(self.plan, self.run):
            return self.together(todo, stages)
        return self.alone(todo)

    def alone(self, todo: Cells) -> Cells:
        """Run the first variant and round of `todo` in a process of its own; returns what is left.

        A process that ends early leaves the lengths after its last cell to the next one.
        """
        round_number, variant, _ = todo[0]
        seq_lens = [n for r, v, n in todo if (r, v) == (round_number, variant)]
        self.say(f"round {round_number}: {title_of(variant)}")
        finished: list[int] = []

        def on_message(message: dict[str, Any]) -> None:
            self.watch.book(stage_of(message))
            if "cell" in message:
                self.keep(message["cell"])
                finished.append(message["cell"].seq_len)
            elif "step" in message:
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
                [(round_number, seq_len) for seq_len in seq_lens],
                on_message=on_message,
                silence_limit_s=self.plan.cell_timeout_s,
            )
            if ended.error and len(finished) < len(seq_lens):
                seq_len = seq_lens[len(finished)]
                self.keep_error(variant, seq_len, round_number, ended)
                finished.append(seq_len)
        gone = {(round_number, variant, seq_len) for seq_len in finished}
        return [cell for cell in todo if cell not in gone]

    def together(self, todo: Cells, stages: list[Stage]) -> Cells:
        """Run all variants of `todo` at these rounds and lengths side by side, each in a process of
        its own, one stage after the other; returns what is left."""
        variants = list(dict.fromkeys(v for r, v, n in todo if (r, n) in stages))
        for stage in stages:
            self.drop(*stage)  # none of an earlier go is held against one of this
        running = []
        for variant in variants:
            if reason := why_unavailable(variant, self.plan.device):
                for round_number, seq_len in stages:
                    self.keep_unavailable(variant, seq_len, round_number, reason)
            else:
                running.append(variant)
        lengths = list(dict.fromkeys(seq_len for _, seq_len in stages))
        rounds = ", ".join(str(r) for r in dict.fromkeys(r for r, _ in stages))
        self.say(f"round {rounds}: {len(running)} variants side by side")
        done: dict[str, list[Stage]] = {variant: [] for variant in running}

        def on_message(index: int, message: dict[str, Any]) -> None:
            self.watch.book(stage_of(message))
            mine = done[running[index]]
            if seq_len := message.get("does_not_fit"):
                raise DoesNotFit(seq_len)
            if "cell" in message:
                self.keep(message["cell"])
                mine.append((message["cell"].round, message["cell"].seq_len))
            elif "step" in message:
                self.advance(stages[len(mine)][1])

        interleaved = tuple(
            n
            for n in lengths
            if n <= self.longest_interleaved and interleaves(self.plan, self.run, n)
        )
        try:
            all_ended = isolated.run_in_turns(
                measure_cells,
                [(self.plan, variant, stages, interleaved) for variant in running],
                on_message=on_message,
                silence_limit_s=self.plan.cell_timeout_s,
            )
        except DoesNotFit as reason:
            (too_long,) = reason.args
            if too_long in interleaved:
                self.longest_interleaved = too_long - 1
            else:
                self.longest_together = too_long - 1
            self.say(f"{too_long} tokens do not fit on the GPU side by side")
            for round_number, seq_len in stages:
                if seq_len >= too_long:
                    self.drop(round_number, seq_len)
            stages = [(r, n) for r, n in stages if n < too_long]
        else:
            for variant, ended in zip(running, all_ended, strict=True):
                self.keep_the_rest(variant, stages[len(done[variant]) :], ended)
        return [(r, v, n) for r, v, n in todo if (r, n) not in stages]

    def drop(self, round_number: int, seq_len: int) -> None:
        """Forget the cells of a round at a length, which are measured again."""
        for cell in self.run.cells_of(seq_len=seq_len, round=round_number):
            self.run.cells.remove(cell)

    def keep_the_rest(self, variant: str, stages: list[Stage], ended: isolated.Ended) -> None:
        """Keep why a process that has ended left these out: its death, or its last cell's error."""
        ran = self.run.cells_of(variant)
        for round_number, seq_len in stages:
            if ended.error or not ran:
                self.keep_error(variant, seq_len, round_number, ended)
            else:
                last = ran[-1]
                self.keep(Cell(variant, seq_len, round_number, last.status, error=last.error))

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
        self.run.add(Cell(variant, seq_len, round_number, "unavailable", error=reason))
        self.save()  # without a line for each: `say_unavailable`
        self.advance(self.plan.steps * seq_len)

    def keep_error(
        self, variant: str, seq_len: int, round_number: int, ended: isolated.Ended
    ) -> None:
        error = f"{ended.error}\n{ended.output_tail}"
        self.keep(Cell(variant, seq_len, round_number, "error", error=error))


def check_losses(run: Run, cell: Cell) -> None:
    """Hold the losses of a new cell against its baseline's, or those of others against it; where
    that has no time, against those of vanilla PEFT with or without checkpointing, which changes no
    loss. With dropout they are not held: each library has masks of its own."""
    if run.experiment.lora.dropout:
        return
    if cell.variant == variant_of(cell.variant).baseline.id:
        held = [other for other in run.cells if other.loss_gap is None] + [cell]
        baselines = [*run.cells, cell]
    else:
        held, baselines = [cell], run.cells
    for other in held:
        own = variant_of(other.variant).baseline
        for vanilla in (own, counterpart(own.id, not own.checkpoints)):
            wanted = (vanilla.id, other.seq_len, "ok")
            found = [
                baseline
                for baseline in baselines
                if (baseline.variant, baseline.seq_len, baseline.status) == wanted
                and baseline is not other
            ]
            if found and other.status == "ok":
                judge_losses(other, found[0])
                break


def judge_losses(cell: Cell, baseline: Cell) -> None:
    """Fail a cell whose losses leave vanilla's on the same batches: it did other work than
    vanilla."""
    gap = cell.loss_gap = audit.loss_gap(cell.losses, baseline.losses)
    if not gap <= audit.LOSS_SHARE:
        cell.status = "parity_failed"
        cell.error = f"its losses leave vanilla PEFT's by {gap:.2%} in the timed steps"


def _by_length(stage: Stage) -> tuple[int, int]:
    return stage[::-1]


def must(ended: isolated.Ended) -> None:
    """Raise RuntimeError if a process that everything else needs failed."""
    if ended.error:
        raise RuntimeError(f"{ended.error}\n{ended.output_tail}")

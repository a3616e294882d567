"""The runner of a plan's cells: a process for each variant, and every finished cell is kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import audit
from bench import processes as isolated
from bench.cells import ENDS_PROCESS, Block, measure_cells, measure_cells_on_gpu
from bench.options import SHORT, why_unavailable
from bench.plan import Plan
from bench.records import Cell, Run
from bench.stages import Stopwatch, stage_of
from bench.terminal import show
from variants import title_of

Cells = list[tuple[int, str, int]]  # (round, variant, length) of each


def side_by_side(plan: Plan, run: Run) -> bool:
    """Return True if a round's variants run their processes at the same time: they are to be
    interleaved, and the GPU holds all their weights."""
    gpu = run.environment.gpu
    fits = gpu is None or len(plan.variants) * plan.source.size_bytes() < gpu.memory_bytes
    return bool(plan.interleave) and fits


def interleaves(plan: Plan, run: Run, seq_len: int) -> bool:
    """Return True if variants side by side alternate within a cell at this length.

    Otherwise each takes turns of whole cells. That also happens once their steps did not fit
    together at this length or a shorter one.
    """
    if plan.quick:
        return seq_len <= SHORT
    whole = (cell for cell in run.cells if cell.status == "ok" and not cell.turn_steps)
    return all(seq_len < cell.seq_len for cell in whole)


class DoesNotFit(Exception):
    """Variants side by side did not fit on the GPU at the length that is its argument."""


@dataclass
class Runner:
    """Runs the cells of a plan in order and keeps what they measure.

    save: writes the run. advance: called with the tokens of each timed step. say: shows what is
    going on. watch: books the time of each stage. longest_interleaved: the longest length at which
    the GPU may hold a step of every variant. longest_together: the same for one step beside the
    others' weights.
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
        """Run the next part and return what is left."""
        blocks = sorted(
            {Block(r, n) for r, _, n in todo if n <= self.longest_together},
            key=lambda block: (block.seq_len, block.round),
        )
        if not self.plan.quick:  # only a quick run's processes have all rounds
            blocks = [block for block in blocks if block.round == todo[0][0]]
        if blocks and side_by_side(self.plan, self.run):
            return self.together(todo, blocks)
        return self.alone(todo)

    def alone(self, todo: Cells) -> Cells:
        """Run the first variant and round of `todo` in a process and return what is left. On
        several GPUs it has all rounds: what matters is compared within a cell.

        A process that ends early leaves the lengths after its last cell to the next one.
        """
        first_round, variant, _ = todo[0]
        blocks = [
            Block(r, n)
            for r, v, n in todo
            if v == variant and (r == first_round or self.plan.gpus > 1)
        ]
        if self.plan.gpus > 1:  # some models are built for one length
            blocks.sort(key=lambda block: (block.seq_len, block.round))
        self.say(f"round {first_round}: {title_of(variant)}")
        done: list[Block] = []
        if self.is_unavailable(variant, blocks):
            done += blocks
        else:
            if self.plan.gpus > 1:
                ended = self.on_all_gpus(variant, blocks, done)
            else:
                ended = isolated.run(
                    measure_cells, self.plan, variant, blocks,
                    on_message=lambda message: self.hear(message, blocks, done),
                    silence_limit_s=self.plan.cell_timeout_s,
                )  # fmt: skip
            if ended.error and len(done) < len(blocks):
                self.keep_error(variant, blocks[len(done)], ended)
                done.append(blocks[len(done)])
        return [(r, v, n) for r, v, n in todo if v != variant or (r, n) not in done]

    def on_all_gpus(self, variant: str, blocks: list[Block], done: list[Block]) -> isolated.Ended:
        """Run a variant in a process for each GPU, all at once. The first sends what we keep; a
        cell that fails on any of them is the last."""

        def hear(gpu: int, message: dict[str, Any]) -> bool:
            has_failed = "cell" in message and message["cell"].status in ENDS_PROCESS
            if gpu == 0 or has_failed:
                self.hear(message, blocks, done)
            return has_failed

        with TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            return isolated.run_at_once(
                measure_cells_on_gpu,
                [
                    (replace(self.plan, gpu=gpu), variant, blocks, store)
                    for gpu in range(self.plan.gpus)
                ],
                on_message=hear,
                silence_limit_s=self.plan.cell_timeout_s,
            )

    def together(self, todo: Cells, blocks: list[Block]) -> Cells:
        """Run all variants of `todo` at these rounds and lengths side by side, a process each and
        one block after the other. Return what is left."""
        for block in blocks:
            self.drop(block)  # do not compare cells of an earlier attempt with those of this one
        variants = dict.fromkeys(v for r, v, n in todo if (r, n) in blocks)
        running = [variant for variant in variants if not self.is_unavailable(variant, blocks)]
        rounds = ", ".join(str(r) for r in dict.fromkeys(block.round for block in blocks))
        self.say(f"round {rounds}: {len(running)} variants side by side")
        done: dict[str, list[Block]] = {variant: [] for variant in running}
        interleaved = tuple(
            n
            for n in dict.fromkeys(block.seq_len for block in blocks)
            if n <= self.longest_interleaved and interleaves(self.plan, self.run, n)
        )
        try:
            all_ended = isolated.run_in_turns(
                measure_cells,
                [(self.plan, variant, blocks, interleaved) for variant in running],
                on_message=lambda index, message: self.hear(message, blocks, done[running[index]]),
                silence_limit_s=self.plan.cell_timeout_s,
            )
        except DoesNotFit as reason:
            (too_long,) = reason.args
            if too_long in interleaved:
                self.longest_interleaved = too_long - 1
            else:
                self.longest_together = too_long - 1
            self.say(f"{too_long} tokens do not fit on the GPU side by side")
            for block in blocks:
                if block.seq_len >= too_long:
                    self.drop(block)
            blocks = [block for block in blocks if block.seq_len < too_long]
        else:
            for variant, ended in zip(running, all_ended, strict=True):
                self.keep_the_rest(variant, blocks[len(done[variant]) :], ended)
        return [(r, v, n) for r, v, n in todo if (r, n) not in blocks]

    def hear(self, message: dict[str, Any], blocks: list[Block], done: list[Block]) -> None:
        """Take in the messages of a process that works through `blocks`, and note those it has
        done.

        Raises DoesNotFit if it found no memory beside the others.
        """
        self.watch.book(stage_of(message))
        if seq_len := message.get("does_not_fit"):
            raise DoesNotFit(seq_len)
        if "cell" in message:
            cell = message["cell"]
            self.keep(cell)
            done.append(Block(cell.round, cell.seq_len))
        elif "step" in message:
            self.advance(blocks[len(done)].seq_len)

    def drop(self, block: Block) -> None:
        """Forget the cells of a round at a length: we will measure them again."""
        for cell in self.run.cells_of(seq_len=block.seq_len, round=block.round):
            self.run.cells.remove(cell)

    def keep(self, cell: Cell) -> None:
        if cell.other_gpu_processes and not self.plan.allow_shared_gpu:
            raise RuntimeError(
                f"another process computed on the GPU while {cell.variant} at {cell.seq_len} "
                "tokens was measured, which is not kept; stop it, or give --allow-shared-gpu; the "
                "same command continues"
            )
        audit.check_floor(self.run, cell)
        audit.check_losses(self.run, cell)
        self.run.add(cell)
        self.save()
        show(cell)

    def keep_the_rest(self, variant: str, blocks: list[Block], ended: isolated.Ended) -> None:
        """Keep why a process left these blocks out: its death, or its last cell's error."""
        ran = self.run.cells_of(variant)
        for block in blocks:
            if ended.error or not ran:
                self.keep_error(variant, block, ended)
            else:
                last = ran[-1]
                self.keep(Cell(variant, block.seq_len, block.round, last.status, error=last.error))

    def keep_error(self, variant: str, block: Block, ended: isolated.Ended) -> None:
        error = f"{ended.error}\n{ended.output_tail}"
        self.keep(Cell(variant, block.seq_len, block.round, "error", error=error))

    def is_unavailable(self, variant: str, blocks: list[Block]) -> bool:
        """Return True if a variant cannot run here, and keep why. `say_unavailable` has said so."""
        plan = self.plan
        reason = why_unavailable(variant, plan.device, plan.base, plan.lora.targets)
        if reason is None:
            return False
        for round_number, seq_len in blocks:
            self.run.add(Cell(variant, seq_len, round_number, "unavailable", error=reason))
            self.save()
            self.advance(self.plan.steps * seq_len)
        return True

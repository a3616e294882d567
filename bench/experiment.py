"""The run of a plan from its first cell to its last."""

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from rich.markup import escape

from bench import processes as isolated
from bench.options import (
    PUBLISHED_MINUTES,
    QUICK_MINUTES,
    others_on_gpu,
    why_unavailable,
)
from bench.plan import Plan
from bench.preparing import measure_floor, measure_kernels, prepare_run
from bench.records import Kernels, Run
from bench.runner import Cells, Runner, side_by_side
from bench.stages import Stopwatch
from bench.terminal import console, progress_bar
from variants import recipe_of, title_of


def run_experiment(plan: Plan, run: Run, save: Callable[[], None]) -> None:
    """Measure every cell that is still to do and `save` the run after each."""
    watch = Stopwatch(run)
    todo = cells_to_do(plan, run)
    if todo:
        run.finished_utc = None
    say_unavailable(plan, todo)
    if todo and sys.dont_write_bytecode:
        console.print("PYTHONDONTWRITEBYTECODE is set: if processes start slowly, unset it.")

    def save_and_finish() -> None:
        if run.finished_utc is None and not cells_to_do(plan, run):
            run.finished_utc = now()
        save()

    if plan.device == "cpu":
        # our processes read these when they import triton and torch
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        console.print("No GPU: a rehearsal in Triton's interpreter, not a performance result.")
    with progress_bar(sum(plan.steps * seq_len for _, _, seq_len in todo)) as (advance, say):
        missing_floors = missing_floors_of(plan, run)
        if (todo or missing_floors) and not plan.is_prepared():
            prepare(plan, say)
            watch.book("weights")
        for precision, lengths in missing_floors.items():
            say(f"floor in {precision}")

            def keep_floor(message, precision=precision):
                run.keep_floors(precision, message["floor"])
                save()

            must(isolated.run(measure_floor, plan, precision, lengths, on_message=keep_floor))
            watch.book("floor")
        runner = Runner(plan, run, save_and_finish, advance, say, watch)
        while todo:
            if others := others_on_gpu(plan.device, plan.allow_shared_gpu, plan.gpus):
                raise RuntimeError(others)
            todo = runner.go_on(todo)
            watch.book("other")
    run.finished_utc = run.finished_utc or now()
    save()


def missing_floors_of(plan: Plan, run: Run) -> dict[str, tuple[int, ...]]:
    """Return the lengths without a floor, by precision: the base's, which the tables show, and
    those of the plan's variants that can run here."""
    recipes = [
        recipe_of(variant)
        for variant in plan.variants
        if why_unavailable(variant, plan.device, plan.base) is None
    ]
    precisions = dict.fromkeys([plan.base, *(recipe.precision(plan.base) for recipe in recipes)])
    missing = {
        precision: tuple(n for n in plan.seq_lens if n not in run.floors_in(precision))
        for precision in precisions
    }
    return {precision: lengths for precision, lengths in missing.items() if lengths}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def prepare(plan: Plan, say: Callable[[str], None]) -> None:
    """Make what every cell needs, in a process. Raises RuntimeError if it failed."""
    must(isolated.run(prepare_run, plan, on_message=lambda message: say(message["doing"])))


def must(ended: isolated.Ended) -> None:
    """Raise RuntimeError if a process failed that everything else needs."""
    if ended.error:
        raise RuntimeError(f"{ended.error}\n{ended.output_tail}")


def say_unavailable(plan: Plan, todo: Cells) -> None:
    """Say once what cannot run here, and why."""
    titles: dict[str, list[str]] = {}
    for variant in dict.fromkeys(variant for _, variant, _ in todo):
        if reason := why_unavailable(variant, plan.device, plan.base, plan.lora.targets):
            titles.setdefault(reason, []).append(title_of(variant))
    for reason, those in titles.items():
        console.print(escape(f"{', '.join(those)}: {reason}."), soft_wrap=True)


def expected_time(plan: Plan) -> str:
    """Say how long a quick run takes, or a run of a published setting."""
    if setting := plan.published:
        return (
            f"{plan.source.name} in the setting of {setting.page.name}: {plan.batch_size} x "
            f"{setting.seq_len} tokens, {plan.accumulate} times a step; {len(plan.variants)} "
            f"variants, {plan.steps} steps each: {PUBLISHED_MINUTES} minutes on an {setting.gpu}."
        )
    return (
        f"{len(plan.variants)} variants at {' and '.join(map(str, plan.seq_lens))} tokens, "
        f"{plan.rounds} rounds: about {QUICK_MINUTES} minutes on an H100, and two more where the "
        "weights are not there yet."
    )


def measure_kernel_table(plan: Plan) -> Kernels:
    """Time the Triton kernels alone, at the model's own shapes."""
    found: list[Kernels] = []
    prepare(plan, lambda doing: None)
    must(isolated.run(measure_kernels, plan, on_message=lambda m: found.append(m["kernels"])))
    return found[0]


def cells_to_do(plan: Plan, run: Run) -> Cells:
    """Return every cell of the plan that the run lacks, in the order to run them in.

    We only compare times taken side by side. So if a round lacks one variant at an interleaved
    length, we repeat all of that round's variants there, even those the run already has.
    """
    todo: Cells = []
    for round_number in range(1, plan.rounds + 1):
        # rounds alternate: no variant always runs on the warmer card
        order = plan.variants if round_number % 2 else plan.variants[::-1]
        cells = [(round_number, variant, seq_len) for variant in order for seq_len in plan.seq_lens]
        missing = [(r, v, n) for r, v, n in cells if not run.is_done(v, n, r)]
        together = {n for _, _, n in missing} if side_by_side(plan, run) else set()
        todo += [(r, v, n) for r, v, n in missing if n not in together]
        for again in sorted(together):
            there = [cell.variant for cell in run.cells_of(seq_len=again, round=round_number)]
            todo += [(round_number, variant, again) for variant in dict.fromkeys([*order, *there])]
    return todo

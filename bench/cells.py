"""Functions that run in child processes and measure cells.

Each takes `send` first, and sends its findings to the parent with it.
"""

import dataclasses
import gc
import os
import signal
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

import models
from batches import Batch
from bench import audit, machine
from bench.evidence import functions_of, kinds_of_kernels, not_run
from bench.plan import LEARNING_RATE, Plan
from bench.profiler import Profile, profile_step
from bench.ranks import Ranks
from bench.records import Cell, GpuTimes, Parity
from models import Built
from trainer import (
    KINDS_OF_MICRO_BATCHES,
    MAX_WARMUP_STEPS,
    MIN_WARMUP_STEPS,
    Trainer,
)
from variants import recipe_of

Send = Callable[[dict[str, Any]], None]
ENDS_PROCESS = ("oom", "error")  # the status of a cell that its process does not outlive


class Block(NamedTuple):
    """The cells of all variants in one round at one length."""

    round: int
    seq_len: int


def make_ready(variant: str, device: str) -> None:
    """Set up this process for a variant, before anything imports transformers or peft."""
    if device == "cpu":
        from fused_lora.kernels.interpreter import prepare_interpreter

        prepare_interpreter()
    if recipe_of(variant).library == "unsloth":
        # it writes generated code there and imports it
        os.environ["UNSLOTH_COMPILE_LOCATION"] = f"unsloth_compiled_cache/{variant}"
        import unsloth  # noqa: F401  (it patches transformers and peft)
    if recipe_of(variant).fp8:  # spares a memory set before each matmul: fused_lora/docs/fp8.md
        os.environ.setdefault(models.CUBLASLT_WORKSPACE, "0")


def measure_cells(
    send: Send,
    plan: Plan,
    variant: str,
    todo: Sequence[Block],
    interleaved: Collection[int] = (),
    wait_for_turn: Callable[[int], int] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Send a {"cell": ...} for each round and length of `todo`.

    Also sends {"step": n} after each timed step, and {"did": stage} once a model is built and
    checked and once it is warm. Stops after a cell that failed or ran out of memory: the next one
    needs a fresh process.

    With other variants beside it, each item of `todo` is a separate phase. At an `interleaved`
    length it waits for its turn before the warm-up, before every `plan.interleave` timed steps, and
    before the work after them. At any other length its turn is the whole cell. The others may hold
    the memory it needs. Then it sends {"does_not_fit": length} and stops.

    With `ranks` it trains together with the processes of other GPUs, which do the same.

    Consecutive rounds of one length share a trainer. Later ones find the step captured and warm and
    are not profiled again.
    """
    make_ready(variant, plan.device)
    built, parity, built_for, trainer = None, None, None, None
    for phase, (round_number, seq_len) in enumerate(todo):
        cell = Cell(variant, seq_len, round_number, "error")
        if seq_len in interleaved:
            cell.turn_steps = plan.interleave
        try:
            if built is None or (built_for != seq_len and _is_made_for_one_length(variant)):
                built = None  # free the old model before building the next
                built, parity = _build_and_check(plan, variant, seq_len)
                if ranks:
                    parity = next((p for p in ranks.gather(parity) if not p.passed), parity)
                built_for = seq_len
                send({"did": "start"})
            else:
                models.set_adapters(built.model, plan.seed)
            cell.settings, cell.fused_modules = built.settings, built.fused_modules
            cell.parity = parity
            if parity is not None and not parity.passed:
                cell = replace(cell, status="parity_failed", error=parity.problem)
            elif ranks:
                cell = _measure_on_all(plan, cell, built, send, ranks)
            else:
                trainer = trainer or _trainer_of(plan, built)
                my_turn = partial(wait_for_turn, phase) if wait_for_turn else lambda: 1
                cell = _measure(plan, cell, trainer, send, my_turn)
        except Exception as error:
            if wait_for_turn and _says_no_memory(error):
                send({"does_not_fit": seq_len})
                return
            cell = _failed(cell, error)
            if ranks:
                cell.error = f"GPU {plan.gpu}: {cell.error}"
        send({"cell": cell})
        if cell.status in ENDS_PROCESS:
            return
        if seq_len not in [length for _, length in todo[phase + 1 : phase + 2]]:
            trainer = None  # and with it the memory of its graphs
        _free(plan)


def measure_cells_on_gpu(
    send: Send, plan: Plan, variant: str, todo: Sequence[Block], store: str
) -> None:
    """Do as `measure_cells`, in the process of `plan.gpu`, together with those of all `plan.gpus`.

    A cell that fails on one of them stops them all, unless it is parity, which then fails on all.
    This process then waits to be ended: the others would fail of its end, and say so first.
    """

    def send_and_wait(message: dict[str, Any]) -> None:
        send(message)
        if "cell" in message and message["cell"].status in ENDS_PROCESS:
            signal.pause()

    measure_cells(send_and_wait, plan, variant, todo, ranks=Ranks.joined(plan, store))
    dist.destroy_process_group()


def _free(plan: Plan) -> None:
    """Give back the memory of what is no longer used."""
    gc.collect()
    if plan.device == "cuda":
        torch.cuda.empty_cache()


def _says_no_memory(error: Exception) -> bool:
    """Return True if torch, or a library that allocates by itself, found no GPU memory."""
    words = str(error).lower()
    no_memory = "out of memory" in words or "alloc_failed" in words
    return isinstance(error, torch.OutOfMemoryError) or no_memory


def _failed(cell: Cell, error: Exception) -> Cell:
    """Return the cell with the reason why it has no time."""
    if not isinstance(error, torch.OutOfMemoryError):
        return replace(cell, error=f"{type(error).__name__}: {_first_line(error)}")
    said = _first_line(error)
    lie = audit.ran_out_of_memory(_allocator_failures(), said)
    return replace(cell, error=lie or said, status="error" if lie else "oom")


def _is_made_for_one_length(variant: str) -> bool:
    """Return True for Unsloth, which picks its checkpointing by the length, and for compiled
    models: torch keeps only a few shapes of each."""
    recipe = recipe_of(variant)
    return recipe.library == "unsloth" or recipe.compiled


def _build_and_check(plan: Plan, variant: str, seq_len: int) -> tuple[Built, Parity]:
    """Build the variant and check it against the reference."""
    from bench.parity import Reference, check_parity

    built = plan.build(variant, seq_len)
    reference = Reference.load(plan.reference_file(recipe_of(variant).fp8))
    return built, check_parity(built, plan.parity_batches(), reference)


def _trainer_of(plan: Plan, built: Built, group: Any = None) -> Trainer:
    warmup = MIN_WARMUP_STEPS if group else MAX_WARMUP_STEPS  # all GPUs take as many
    warmup = warmup if plan.device == "cuda" else 1  # a rehearsal's times mean nothing
    return Trainer(
        built.model, built.autocast, plan.clock(), LEARNING_RATE, warmup, built.graph,
        plan.accumulate, built.lengths_as, group,
    )  # fmt: skip


def _measure_on_all(plan: Plan, cell: Cell, built: Built, send: Send, ranks: Ranks) -> Cell:
    """Time a variant on all GPUs together and apart, each from the first weights. Return the cell
    with the times of all, or with what failed on one of them. Odd rounds begin apart, even ones
    together, because a card is faster while it is cool."""

    def together() -> Cell:
        models.set_adapters(built.model, plan.seed)
        trainer = _trainer_of(plan, built, ranks.together)
        return _measure(plan, cell, trainer, send, ranks.meet)

    def apart() -> tuple[list[float], list[float]]:
        """Time all GPUs at once without averaging, then the first alone."""
        batches = [batch.to(plan.device) for batch in plan.timed_batches(cell.seq_len)]
        trainer = _trainer_of(plan, built, ranks.alone)

        def is_alive(done: int) -> None:
            send({"did": "steps"})

        def step_ms(before_step: Callable[[int], Any]) -> list[float]:
            models.set_adapters(built.model, plan.seed)
            return trainer.run(batches, plan.steps, is_alive, before_step).step_ms

        at_once = step_ms(lambda done: ranks.meet())
        ranks.meet()
        alone = step_ms(lambda done: None) if plan.gpu == 0 else []
        ranks.meet()
        return at_once, alone

    if cell.round % 2:
        times = apart()
        _free(plan)
        cell = together()
    else:
        cell = together()
        _free(plan)
        times = apart()
    every = ranks.gather((cell, *times))
    for gpu, (one, *_) in enumerate(every):
        if one.status != "ok":
            return replace(cell, status=one.status, error=f"GPU {gpu}: {one.error}")
    gpus = [GpuTimes(one.card, one.step_ms, *times) for one, *times in every]
    others = max((one.other_gpu_processes or 0 for one, *_ in every), default=0)
    return replace(cell, gpus=gpus, other_gpu_processes=others or cell.other_gpu_processes)


def _measure(
    plan: Plan, cell: Cell, trainer: Trainer, send: Send, wait_for_turn: Callable[[], int]
) -> Cell:
    """Time a variant and return its cell with what ran.

    Waits for its turn first, and again after every `cell.turn_steps` steps if these are a turn. On
    several GPUs that is to wait for the others, which begin each step together.
    """
    turn_steps = cell.turn_steps if plan.gpus == 1 else 1
    batches = [batch.to(plan.device) for batch in plan.timed_batches(cell.seq_len)]
    was_profiled = trainer.is_warm
    samples = []

    def on_step(done: int) -> None:
        samples.append(machine.sample())  # between two steps
        send({"step": done})

    def before_step(done: int) -> None:
        if done == 0:
            send({"did": "warm_up"})
        if turn_steps and done % turn_steps == 0:
            wait_for_turn()

    on_gpu = plan.device == "cuda"
    ours = wait_for_turn()
    timings = trainer.run(batches, plan.steps, on_step, before_step)
    after_the_steps = audit.step_again(trainer, batches, timings)
    if turn_steps:
        ours = wait_for_turn()  # first the others take their last steps

    profile = problem = None
    if not was_profiled:
        profile, problem = _profiled(plan, cell, trainer, batches)
    others = machine.other_processes(own=ours) if on_gpu else None
    launch_us = machine.host_launch_us() if on_gpu else None
    problems = (
        problem,
        audit.replaced_timekeeper(),
        audit.hidden_time(timings, on_gpu),
        audit.skipped_updates(timings),
        audit.changed_batches(timings),
        audit.diverged(timings),
        after_the_steps,
    )
    problem = next(filter(None, problems), None)
    return replace(
        cell,
        status="error" if problem else "ok",
        error=problem,
        card=machine.card() if on_gpu else None,
        other_gpu_processes=others,
        host_launch_us=launch_us,
        **dataclasses.asdict(timings),
        **(dataclasses.asdict(profile) if profile else {}),
        **(dataclasses.asdict(machine.conditions_of(samples)) if on_gpu else {}),
    )


def _profiled(
    plan: Plan, cell: Cell, trainer: Trainer, batches: list[Batch]
) -> tuple[Profile, str | None]:
    """Profile a step. Return what ran, and in words what should have run and did not.

    With accumulation we profile both kinds of micro-batches and scale the times to a whole step.
    """
    recipe = recipe_of(cell.variant)
    compiles = recipe.compiled or recipe.library == "unsloth"  # Unsloth compiles parts itself
    step = batches[: min(plan.accumulate, KINDS_OF_MICRO_BATCHES)]
    functions, kinds = functions_of(recipe), kinds_of_kernels(recipe)
    profile = profile_step(lambda: trainer.step(step), functions, not compiles, kinds)
    on_gpu = plan.device == "cuda"
    problem = not_run(recipe, cell.fused_modules, profile, on_gpu, len(step), plan.lora, plan.base)
    return profile.scaled(plan.accumulate / len(step)), problem


def _allocator_failures() -> int:
    """Count how often CUDA's allocator has found no memory."""
    return torch.cuda.memory_stats().get("num_ooms", 0) if torch.cuda.is_available() else 0


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:300]

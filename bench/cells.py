"""The functions that run in processes of their own: they prepare a run, and measure the floor, the
kernels, or the cells of one variant and round.

Every function takes `send` first, with which it hands what it found to the parent.
"""

import dataclasses
import gc
import os
from collections.abc import Callable, Collection, Sequence
from errno import ENOSPC
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

import models
from batches import Batch
from bench import audit, interpreter, machine
from bench.evidence import EVIDENCE, not_run
from bench.folders import unfinished_beside
from bench.plan import LEARNING_RATE, Plan
from bench.profiler import Profile, profile_step
from bench.records import Cell, Parity
from bench.weights import materialize
from models import Built
from trainer import KINDS_OF_MICRO_BATCHES, MAX_WARMUP_STEPS, Trainer
from variants import recipe_of

Send = Callable[[dict[str, Any]], None]


class Stage(NamedTuple):
    round: int
    seq_len: int


def prepare_run(send: Send, plan: Plan) -> None:
    """Make what every cell needs, unless it is there: the base weights and the parity reference.
    Send {"doing": words} for each, and {"full": path} where a disk has no room for it."""
    try:
        _prepare(send, plan)
    except OSError as error:
        if error.errno != ENOSPC:
            raise
        send({"full": error.filename})


def _prepare(send: Send, plan: Plan) -> None:
    from bench.parity import make_reference

    send({"doing": f"base weights of {plan.source.name}"})
    materialize(plan.source, plan.seed, plan.device)
    for fp8 in sorted(plan.precisions()):
        path = plan.reference_file(fp8)
        if path.exists():
            continue
        send({"doing": "parity reference (vanilla PEFT in fp32)"})
        vanilla = plan.build("vanilla_peft", min(plan.seq_lens))
        reference = make_reference(vanilla, plan.parity_batches(), fp8)
        with unfinished_beside(path) as unfinished:  # runs may share a cache
            reference.save(unfinished)
        del vanilla


def measure_floor(send: Send, plan: Plan, seq_lens: tuple[int, ...]) -> None:
    """Send the floor of each length as {"floor": {seq_len: ...}}."""
    from transformers import AutoConfig

    from bench.floor import FrozenOperations, Shape, measure

    config = AutoConfig.from_pretrained(plan.source.folder, local_files_only=True)
    operations = FrozenOperations(Shape.of(config), plan.device)
    for seq_len in seq_lens:
        batches = plan.timed_batches(seq_len)
        labelled = round(sum(batch.labelled for batch in batches) / len(batches))
        result = measure(
            operations, plan.batch_size, seq_len, labelled, plan.clock(), plan.accumulate
        )
        send({"floor": {seq_len: result}})


def measure_kernels(send: Send, plan: Plan) -> None:
    """Send the kernel table at the model's own shapes as {"kernels": ...}."""
    from transformers import AutoConfig

    from bench.kernels import time_kernels

    config = AutoConfig.from_pretrained(plan.source.folder, local_files_only=True)
    tokens = [plan.batch_size * seq_len for seq_len in plan.seq_lens]
    send({"kernels": time_kernels(config.intermediate_size, tokens)})


def measure_cells(
    send: Send,
    plan: Plan,
    variant: str,
    todo: Sequence[Stage],
    interleaved: Collection[int] = (),
    wait_for_turn: Callable[[int], int] | None = None,
) -> None:
    """Send a {"cell": ...} for each round and length of `todo`, {"step": n} for each timed step,
    and {"did": stage} when a model is built and checked, and when it is warm.

    Where others run beside it, each item of `todo` is a stage of its own. At a length that is
    `interleaved` it waits for its turn before it warms up, before every `plan.interleave` timed
    steps, and before what comes after them; at another its turn is the whole cell. Where it finds
    no memory beside them, which may be theirs, it sends {"does_not_fit": length} and stops. Stops
    after a cell that ran out of memory or failed: what follows wants a fresh process.

    Rounds of one length that follow each other have one trainer: those after the first find the
    step captured and warm, and are not profiled again.
    """
    if plan.device == "cpu":
        interpreter.prepare_interpreter()
    if recipe_of(variant).library == "unsloth":
        # it writes generated code there, and imports it
        os.environ["UNSLOTH_COMPILE_LOCATION"] = f"unsloth_compiled_cache/{variant}"
        import unsloth  # noqa: F401  (before transformers and peft, which it patches)
    if recipe_of(variant).fp8:  # for kernels without a memory set before each: docs/api.md
        os.environ.setdefault(models.CUBLASLT_WORKSPACE, "0")
    built, parity, built_for, trainer = None, None, None, None
    for stage, (round_number, seq_len) in enumerate(todo):
        cell = Cell(variant, seq_len, round_number, "error")
        if seq_len in interleaved:
            cell.turn_steps = plan.interleave
        try:
            if built is None or (built_for != seq_len and _is_made_for_one_length(variant)):
                built = None  # frees one before the next is built
                built, parity = _build_and_check(plan, variant, seq_len)
                built_for = seq_len
                send({"did": "start"})
            else:
                models.set_adapters(built.model, plan.seed)
            cell.settings, cell.fused_modules = built.settings, built.fused_modules
            cell.parity = parity
            if parity is not None and not parity.passed:
                cell = replace(cell, status="parity_failed", error=parity.problem)
            else:
                trainer = trainer or _trainer_of(plan, built)
                my_turn = partial(wait_for_turn, stage) if wait_for_turn else lambda: 1
                cell = _measure(plan, cell, trainer, send, my_turn)
        except Exception as error:
            if wait_for_turn and _says_no_memory(error):
                send({"does_not_fit": seq_len})
                return
            cell = _failed(cell, error)
        send({"cell": cell})
        if cell.status in ("oom", "error"):
            return
        if seq_len not in [length for _, length in todo[stage + 1 : stage + 2]]:
            trainer = None  # and with it the memory of its graphs
        gc.collect()
        if plan.device == "cuda":
            torch.cuda.empty_cache()


def _says_no_memory(error: Exception) -> bool:
    """Return True if the GPU had no memory left, for torch or for a library that asks by itself."""
    words = str(error).lower()
    no_memory = "out of memory" in words or "alloc_failed" in words
    return isinstance(error, torch.OutOfMemoryError) or no_memory


def _failed(cell: Cell, error: Exception) -> Cell:
    """The cell with the reason why it has no time."""
    if not isinstance(error, torch.OutOfMemoryError):
        return replace(cell, error=f"{type(error).__name__}: {_first_line(error)}")
    said = _first_line(error)
    lie = audit.ran_out_of_memory(_allocator_failures(), said)
    return replace(cell, error=lie or said, status="error" if lie else "oom")


def _is_made_for_one_length(variant: str) -> bool:
    """Unsloth's model, which is told the length and checkpoints by it, and a compiled one, of which
    torch keeps only so many shapes."""
    recipe = recipe_of(variant)
    return recipe.library == "unsloth" or recipe.compiled


def _build_and_check(plan: Plan, variant: str, seq_len: int) -> tuple[Built, Parity]:
    """The variant, and how far it is from the reference."""
    from bench.parity import Reference, check_parity

    built = plan.build(variant, seq_len)
    reference = Reference.load(plan.reference_file(recipe_of(variant).fp8))
    return built, check_parity(built, plan.parity_batches(), reference)


def _trainer_of(plan: Plan, built: Built) -> Trainer:
    warmup = MAX_WARMUP_STEPS if plan.device == "cuda" else 1  # a rehearsal's times mean nothing
    return Trainer(
        built.model,
        built.autocast,
        plan.clock(),
        LEARNING_RATE,
        warmup,
        built.graph,
        plan.accumulate,
        built.lengths_as,
    )


def _measure(
    plan: Plan, cell: Cell, trainer: Trainer, send: Send, wait_for_turn: Callable[[], int]
) -> Cell:
    """The cell of a variant with its times and what ran.

    It waits for its turn first, and between its steps where `cell.turn_steps` are a turn.
    """
    batches = [batch.to(plan.device) for batch in plan.timed_batches(cell.seq_len)]
    was_profiled = trainer.is_warm
    samples = []

    def on_step(done: int) -> None:
        samples.append(machine.sample())  # the step has ended, and the next has not begun
        send({"step": done})

    def before_step(done: int) -> None:
        if done == 0:
            send({"did": "warm_up"})
        if cell.turn_steps and done % cell.turn_steps == 0:
            wait_for_turn()

    on_gpu = plan.device == "cuda"
    ours = wait_for_turn()
    timings = trainer.run(batches, plan.steps, on_step, before_step)
    if cell.turn_steps:
        ours = wait_for_turn()  # the others' last steps come before what follows

    profile = problem = None
    if not was_profiled:
        profile, problem = _profiled(plan, cell, trainer, batches)
    others = machine.other_processes(own=ours) if on_gpu else None
    launch_us = machine.host_launch_us() if on_gpu else None
    problems = (
        problem,
        audit.hidden_time(timings),
        audit.skipped_updates(timings),
        audit.changed_batches(timings),
        audit.diverged(timings),
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
        **(machine.conditions_of(samples)._asdict() if on_gpu else {}),
    )


def _profiled(
    plan: Plan, cell: Cell, trainer: Trainer, batches: list[Batch]
) -> tuple[Profile, str | None]:
    """Profile a step; returns what ran, and what did not although it was asked for. With
    accumulation it has both kinds of micro-batches, and the times are made those of a whole one."""
    recipe = recipe_of(cell.variant)
    functions = [name for proof in EVIDENCE.values() for name in proof.functions]
    compiles = recipe.compiled or recipe.library == "unsloth"  # which compiles parts of its own
    step = batches[: min(plan.accumulate, KINDS_OF_MICRO_BATCHES)]
    profile = profile_step(lambda: trainer.step(step), functions, not compiles)
    problem = not_run(
        recipe, cell.fused_modules, profile, plan.device == "cuda", len(step), plan.lora
    )
    return profile.of_more(plan.accumulate / len(step)), problem


def _allocator_failures() -> int:
    """Count the times CUDA's allocator has found no memory; 0 where it has not run."""
    return torch.cuda.memory_stats().get("num_ooms", 0) if torch.cuda.is_available() else 0


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:300]

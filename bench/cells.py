"""What runs in a process of its own: the cells of one variant and round, and what they build on.

Every function takes `send` first, with which it hands what it found to the parent.
"""

import dataclasses
import functools
import gc
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import models
from batches import Batch, load_tokenizer, make_batches, read_chats, sha256_of, tokenize
from bench import audit, interpreter, machine
from bench.profiler import profile_step
from bench.results import new_cell
from bench.weights import Source, materialize
from models import Built, Lora
from trainer import MAX_WARMUP_STEPS, Clock, CudaClock, Trainer, WallClock
from variants import EVIDENCE, VARIANTS

Send = Callable[[dict[str, Any]], None]

LEARNING_RATE = 1e-4
PARITY_BATCH_SIZE = 4
PARITY_SEQ_LEN = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is the same for every cell of a run. `steps` are those of one round; `turn_steps` how
    many of them are taken at a time, in turns with the other variants, None for all."""

    source: Source
    data: Path
    cache: Path
    lora: Lora
    seq_lens: tuple[int, ...]
    batch_size: int
    steps: int
    checkpointing: bool
    padded: bool
    seed: int
    device: str
    turn_steps: int | None = None

    def batches(self, seq_len: int, batch_size: int, count: int) -> list[Batch]:
        """The run's batches at one length, on the CPU: the same for every variant and round."""
        tokenized = _tokenized(self.data, self.source.tokenizer)
        return make_batches(
            tokenized, seq_len, batch_size, count, padded=self.padded, seed=self.seed
        )

    @property
    def parity_seq_len(self) -> int:
        return min(PARITY_SEQ_LEN, *self.seq_lens)

    def parity_batches(self) -> tuple[Batch, Batch]:
        first, second = self.batches(self.parity_seq_len, PARITY_BATCH_SIZE, 2)
        return first.to(self.device), second.to(self.device)

    def build(self, variant: str, seq_len: int) -> Built:
        return models.build(
            variant,
            self.source.folder,
            self.lora,
            seq_len,
            self.checkpointing,
            self.device,
            self.seed,
        )

    def clock(self) -> Clock:
        return CudaClock() if self.device == "cuda" else WallClock()

    def reference_file(self) -> Path:
        """Where the parity reference is kept; its name changes with what it rests on."""
        rests_on = (
            str(self.source.folder),
            self.lora,
            self.padded,
            self.seed,
            self.parity_seq_len,
            sha256_of(self.data),
            torch.__version__,
            self.device,
        )
        digest = hashlib.sha256(repr(rests_on).encode()).hexdigest()[:12]
        return self.cache / "parity" / f"{digest}.pt"


@functools.cache
def _tokenized(data: Path, tokenizer: Path):
    return tokenize(read_chats(data), load_tokenizer(tokenizer))


def prepare(send: Send, plan: Plan) -> None:
    """Make what every cell needs, unless it is there: the base weights and the parity reference."""
    from bench.parity import make_reference

    send({"doing": f"base weights of {plan.source.name}"})
    materialize(plan.source, plan.seed, plan.device)
    path = plan.reference_file()
    if path.exists():
        return
    send({"doing": "parity reference (plain PEFT in fp32)"})
    seq_len = min(plan.seq_lens)
    reference = make_reference(plan.build("vanilla_peft", seq_len), plan.parity_batches())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    reference.save(unfinished)
    unfinished.replace(path)


def measure_floor(send: Send, plan: Plan, seq_lens: tuple[int, ...]) -> None:
    """Send the floor of each length as {"floor": {seq_len: ...}}."""
    from transformers import AutoConfig

    from bench.floor import Floor, Shape, measure

    config = AutoConfig.from_pretrained(plan.source.folder, local_files_only=True)
    floor = Floor(Shape.of(config), plan.device)
    for seq_len in seq_lens:
        batches = plan.batches(seq_len, plan.batch_size, plan.steps)
        labelled = sum(batch.labelled for batch in batches)
        result = measure(
            floor, plan.batch_size, seq_len, round(labelled / len(batches)), plan.clock()
        )
        send({"floor": {str(seq_len): result}})


def measure_kernels(send: Send, plan: Plan) -> None:
    """Send the kernel table at the model's own shapes as {"kernels": ...}."""
    from transformers import AutoConfig

    from bench.kernels import table

    config = AutoConfig.from_pretrained(plan.source.folder, local_files_only=True)
    tokens = [plan.batch_size * seq_len for seq_len in plan.seq_lens]
    send({"kernels": table(config.intermediate_size, tokens)})


def measure_cells(
    send: Send,
    plan: Plan,
    variant: str,
    round_number: int,
    seq_lens: tuple[int, ...],
    wait_for_turn: Callable[[], int] = lambda: 1,
) -> None:
    """Send a {"cell": ...} for each length in turn, and {"step": n} for each timed step.

    Waits for its turn before it warms up, before every `plan.turn_steps` timed steps, and before
    what comes after them. Stops after a cell that ran out of memory or failed: what follows wants a
    fresh process.
    """
    if plan.device == "cpu":
        interpreter.round_bf16_as_hardware_does()
    if VARIANTS[variant].library == "unsloth":
        if plan.turn_steps:  # it writes generated code there, and imports it
            os.environ["UNSLOTH_COMPILE_LOCATION"] = f"unsloth_compiled_cache/{variant}"
        import unsloth  # noqa: F401  (before transformers and peft, which it patches)
    model = None
    for seq_len in seq_lens:
        measured: dict[str, Any] = {}  # filled as far as it comes
        try:
            if model is None or _is_made_for_one_length(variant):
                model = None  # frees one before the next is built
                model = _build_and_check(plan, variant, seq_len)
            else:
                models.set_adapters(model[0].model, plan.seed)
            status = _measure(measured, plan, variant, seq_len, *model, send, wait_for_turn)
        except torch.OutOfMemoryError as error:
            status, measured["error"] = "oom", _first_line(error)
            if lie := audit.ran_out_of_memory(_allocator_failures(), measured["error"]):
                status, measured["error"] = "error", lie
            elif plan.turn_steps:  # which says nothing of this variant alone
                status = "error"
                measured["error"] = (
                    f"no GPU memory beside the other variants ({measured['error']}): give fewer "
                    "--variants, or leave --turns out"
                )
        except Exception as error:
            status, measured["error"] = "error", f"{type(error).__name__}: {_first_line(error)}"
        send({"cell": new_cell(variant, seq_len, round_number, status, **measured)})
        if status in ("oom", "error"):
            return
        gc.collect()
        if plan.device == "cuda":
            torch.cuda.empty_cache()


def _is_made_for_one_length(variant: str) -> bool:
    """Unsloth's model, which is told the length and checkpoints by it, and a compiled one, of which
    torch keeps only so many shapes."""
    recipe = VARIANTS[variant]
    return recipe.library == "unsloth" or recipe.compiled


def _build_and_check(plan: Plan, variant: str, seq_len: int) -> tuple[Built, Any]:
    """The variant, and how far it is from the reference: a `Parity`."""
    from bench.parity import Reference, check

    built = plan.build(variant, seq_len)
    reference = Reference.load(plan.reference_file())
    return built, check(built, plan.parity_batches(), reference)


def _measure(
    measured: dict[str, Any],
    plan: Plan,
    variant: str,
    seq_len: int,
    built: Built,
    parity: Any,
    send: Send,
    wait_for_turn: Callable[[], int],
) -> str:
    """Time the variant and see what it ran, if it is right; its status."""
    measured |= {"settings": built.settings, "fused_modules": built.fused_modules}
    measured["parity"] = dataclasses.asdict(parity)
    if not parity.passed:
        measured["error"] = parity.problem
        return "parity_failed"

    batches = [
        batch.to(plan.device) for batch in plan.batches(seq_len, plan.batch_size, plan.steps)
    ]
    samples = []

    def on_step(done: int) -> None:
        samples.append(machine.sample())  # the step has ended, and the next has not begun
        send({"step": done})

    def before_step(done: int) -> None:
        if plan.turn_steps and done % plan.turn_steps == 0:
            wait_for_turn()

    on_gpu = plan.device == "cuda"
    warmup = MAX_WARMUP_STEPS if on_gpu else 1  # a rehearsal's times mean nothing
    trainer = Trainer(built.model, built.autocast, plan.clock(), LEARNING_RATE, warmup, built.graph)
    wait_for_turn()
    timings = trainer.run(batches, plan.steps, on_step, before_step)
    ours = wait_for_turn()  # the others' last steps come before what follows
    measured |= dataclasses.asdict(timings)

    recipe = VARIANTS[variant]
    functions = [name for evidence in EVIDENCE.values() for name in evidence.functions]
    compiles = recipe.compiled or recipe.library == "unsloth"  # which compiles parts of its own
    profile = profile_step(lambda: trainer.step(batches[0]), functions, not compiles)
    measured |= dataclasses.asdict(profile)
    if on_gpu:
        measured |= machine.summary_of(samples)
        measured["other_gpu_processes"] = machine.other_processes(own=ours)
        measured["host_launch_us"] = machine.host_launch_us()

    problems = (  # what ran comes first: a busy host alone can hide time
        audit.not_run(recipe, built.fused_modules, profile, on_gpu),
        audit.hidden_time(timings),
        audit.skipped_updates(timings),
        audit.changed_batches(timings),
        audit.diverged(timings),
    )
    measured["error"] = next((problem for problem in problems if problem), None)
    return "error" if measured["error"] else "ok"


def _allocator_failures() -> int:
    """How often CUDA's allocator has found no memory; none without a GPU, where it does not run."""
    return torch.cuda.memory_stats()["num_ooms"] if torch.cuda.is_available() else 0


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:300]

"""The records in results.json and those that rooms pass to each other: one type each.

Names, defaults and what a value may be come from the types; a file that departs from them is
refused with the place. Times are in ms and sizes in bytes where a name does not say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Annotated, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from variants import Lora, Settings, current_id

COMPARED_PACKAGES = ("torch", "triton", "transformers", "peft", "unsloth", "liger_kernel")
Status = Literal["ok", "parity_failed", "oom", "error", "unavailable"]
STATUSES: tuple[Status, ...] = get_args(Status)  # the most telling first
Verdict = Literal["faster", "slower", "not distinguishable"]

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Milliseconds = Annotated[float, Meta(ge=0)]
Interval = tuple[float, float]


class Record(Struct, forbid_unknown_fields=True):
    """Part of a results file. What it does not name, a file may not hold: it would be lost."""


# --- what a run was asked for, and where it ran ---------------------------------------------------


class Optimizer(Record):
    name: str
    lr: Positive
    fused: bool


class Tokens(Record):
    """Shares of all positions of the batches at one length."""

    padding: float
    labelled: float


class Experiment(Record):
    """The settings of a run. steps: timed ones of each variant and length, over all rounds.

    batch_size: rows of a micro-batch; with documents they are one. accumulate: micro-batches of a
    step. checkpointing: "off" turns it off in every variant. interleave: timed steps that a variant
    takes at a time where variants are interleaved (their cells say where); 0: never.
    """

    model: str
    weights: str
    dtype: str
    batch_size: Count
    seq_lens: Annotated[list[Count], Meta(min_length=1)]
    variants: Annotated[list[str], Meta(min_length=1)]
    rounds: Count
    steps: Count
    checkpointing: Literal["on", "off"]
    padded: bool
    lora: Lora
    optimizer: Optimizer
    seed: int
    data_sha256: str
    tokens: dict[int, Tokens]
    interleave: Annotated[int, Meta(ge=0)] = 0
    accumulate: Count = 1
    documents: bool = False
    # of an earlier version, which interleaved a whole run
    turn_steps: Count | UnsetType | None = UNSET

    def tokens_a_step(self, seq_len: int) -> float:
        """Return the tokens of a step at this length, over all its micro-batches, no padding."""
        return self.accumulate * self.batch_size * seq_len * (1 - self.tokens[seq_len].padding)

    def __post_init__(self) -> None:
        self.variants = [current_id(variant) for variant in self.variants]


class Gpu(Record):
    name: str
    memory_bytes: Count
    driver: str
    power_limit_w: float | None
    max_sm_clock_mhz: int | None
    max_memory_clock_mhz: int | None
    ecc: bool | None
    uncorrected_ecc_errors: int | None
    persistence: bool | None


class Git(Record):
    """Of this repository; "A then B" where cells of two commits share a file."""

    commit: str
    dirty: bool


class Environment(Record):
    gpu: Gpu | None
    cpu: str
    platform: str
    python: str
    packages: dict[str, str | None]
    cuda: str | None
    git: Git | None

    @property
    def device(self) -> str:
        """The GPU's name, or that there is none."""
        return self.gpu.name if self.gpu else f"no GPU ({self.cpu})"


# --- what was measured ----------------------------------------------------------------------------


class Parity(Record):
    """The gate's outcome, with what was the furthest off. A number that is not finite is None.

    problem: what the gate failed on, in words. losses, loss_errors: of both batches. worst_ratio:
    the largest gradient error over vanilla's own. worst_scale: the one furthest from vanilla's.
    """

    passed: bool
    problem: str | None = None
    losses: Sequence[float | None] = []
    reference_losses: list[float] = []
    loss_errors: Sequence[float | None] = []
    vanilla_loss_errors: list[float] = []
    median_gradient_error: float | None = None
    vanilla_median_gradient_error: float | None = None
    worst_ratio: float | None = None
    worst_gradient: str = ""
    worst_scale: float | None = None
    worst_scale_gradient: str = ""
    limit: float | None = None
    scale_limit: float | None = None


class Cell(Record):
    """One variant at one length in one round. What was not measured is None or empty.

    error: why there is no time. turn_steps: the timed steps that it took at a time, interleaved
    with all others of its round; None: all, one variant after the other.
    fused_modules: module name and the function that it runs fused. kernels_seen, functions_seen:
    GPU kernels and backward functions of one profiled step, with how often each ran. kernel_ms:
    kernel time of that step by kind of work; gpu_busy_ms: during which at least one kernel ran.
    With accumulation the profiled step has two micro-batches, and both times are a whole one's.
    What a process has measured at this length in an earlier round is not profiled again.
    loss_gap: largest relative distance of a loss to vanilla's; None with dropout, not held to it.
    step_ms: every timed step, between CUDA events. forward_ms, backward_ms, optimizer_ms: its
    parts, over all micro-batches; empty where the step is one CUDA graph. wall_ms: by the host's
    clock. first_step_s: until a step had run as the timed ones do, compilation or capture included.
    peak_*_bytes: in the timed steps; of a CUDA graph, from its capture on.
    sm_clock_mhz to power_w: medians of samples between the steps. clock_reasons: why clocks were
    below their maximum; throttled: whether one is more than the power cap.
    card: of which GPU, as `machine.card` names it, for a run may go on on another of its kind.
    """

    variant: str
    seq_len: Count
    round: Count
    status: Status
    error: str | None = None
    turn_steps: Count | None = None
    settings: Settings = Settings()
    fused_modules: list[str] = []
    kernels_seen: dict[str, Count] = {}
    functions_seen: dict[str, Annotated[int, Meta(ge=0)]] = {}
    kernel_ms: dict[str, Milliseconds] = {}
    gpu_busy_ms: float | None = None
    parity: Parity | None = None
    loss_gap: float | None = None
    step_ms: list[Positive] = []
    forward_ms: list[Milliseconds] = []
    backward_ms: list[Milliseconds] = []
    optimizer_ms: list[Milliseconds] = []
    wall_ms: list[Milliseconds] = []
    losses: list[float | None] = []
    first_step_s: float | None = None
    optimizer_steps: int | None = None
    unmoved_adapters: int | None = None
    changed_batches: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    clock_reasons: list[str] = []
    throttled: bool | None = None
    card: str | None = None
    other_gpu_processes: int | None = None
    host_launch_us: float | None = None

    def __post_init__(self) -> None:
        self.variant = current_id(self.variant)
        if self.status == "ok" and not self.step_ms:
            raise ValueError("its status is ok, and it has no step_ms")

    @property
    def key(self) -> tuple[str, int, int]:
        return self.variant, self.seq_len, self.round


class Floor(Record, omit_defaults=True):
    """The frozen operations of a step at one length, and what checkpointing runs again.

    of_round: of a merged run, what was measured on the machine of each round.
    """

    floor_ms: Positive
    samples_ms: list[Milliseconds]
    recomputation_ms: Positive | None = None
    recomputation_samples_ms: list[Milliseconds] = []
    labelled_tokens: int | None = None
    of_round: dict[int, Positive] = {}


class Stages(Record):
    """The wall time of a run's stages in s, over all of its commands.

    weights: with the parity reference. start: of processes, with loading and checking a model.
    warm_up: with capture and compilation, and the rounds' batches. steps: the timed ones. profile:
    and the checks after a cell's steps. other: between processes, which end.
    """

    weights: float = 0.0
    floor: float = 0.0
    start: float = 0.0
    warm_up: float = 0.0
    steps: float = 0.0
    profile: float = 0.0
    other: float = 0.0


class KernelRow(Record):
    """One Triton kernel at one shape, beside a device copy of as many bytes."""

    kernel: str
    shape: list[Count]
    dtype: str
    median_us: Positive
    bytes: Count
    gb_per_s: Positive
    copy_gb_per_s: Positive
    share_of_copy: Positive


class Kernels(Record):
    copy_gb_per_s: Positive
    rows: list[KernelRow]


class SummaryRow(Record):
    """One variant at one length: medians over steps, then over rounds."""

    variant: str
    seq_len: Count
    status: Status
    rounds: int
    steps: int
    median_step_ms: float | None
    step_ms_ci95: Interval | None
    tokens_per_s: float | None
    speedup: float | None
    speedup_ci95: Interval | None
    ratio_to_floor: float | None
    forward_ms: float | None
    backward_ms: float | None
    optimizer_ms: float | None
    peak_gib: float | None
    verdict: Verdict | None
    gpu_ms: float | None = None

    def __post_init__(self) -> None:
        self.variant = current_id(self.variant)


class Run(Record):
    """One results file: the raw cells of one machine, and what they were measured for.

    rehearsal: made without a GPU, never a performance result. finished_utc: None until every
    planned cell is in. floor: by length. summary: worked out from the cells at every save.
    stages_s: where the time went; of a run of an earlier version, or a merged one, None.
    """

    schema_version: Literal[2]
    rehearsal: bool
    argv: list[str]
    started_utc: str
    finished_utc: str | None
    environment: Environment
    experiment: Experiment
    floor: dict[int, Floor] = {}
    cells: list[Cell] = []
    kernels: Kernels | None = None
    summary: list[SummaryRow] = []
    stages_s: Stages | None = None

    def __post_init__(self) -> None:
        if self.experiment.turn_steps:
            self.experiment.interleave = self.experiment.turn_steps
            for cell in self.cells:
                cell.turn_steps = self.experiment.turn_steps
        self.experiment.turn_steps = UNSET

    def cells_of(
        self,
        variant: str | None = None,
        seq_len: int | None = None,
        status: Status | None = None,
        round: int | None = None,
    ) -> list[Cell]:
        """The cells of this variant, length, status and round; None: of any."""
        return [
            cell
            for cell in self.cells
            if (variant is None or cell.variant == variant)
            and (seq_len is None or cell.seq_len == seq_len)
            and (status is None or cell.status == status)
            and (round is None or cell.round == round)
        ]

    def measured(self) -> list[tuple[str, int]]:
        """Every (variant, length) that has a cell, in the experiment's order, a length at a
        time."""
        found = {(cell.variant, cell.seq_len) for cell in self.cells}
        lengths, variants = self.experiment.seq_lens, self.experiment.variants
        return [(v, n) for n in lengths for v in variants if (v, n) in found]

    def status_of(self, variant: str, seq_len: int) -> Status | None:
        """The most telling status of its cells; None without a cell."""
        statuses = {cell.status for cell in self.cells_of(variant, seq_len)}
        return min(statuses, key=STATUSES.index, default=None)

    def round_ms(self, variant: str, seq_len: int, part: str = "step_ms") -> dict[int, float]:
        """The median of each round that was timed, by round."""
        cells = self.cells_of(variant, seq_len, "ok")
        return {cell.round: median(times) for cell in cells if (times := getattr(cell, part))}

    def cards(self) -> int:
        """Count the GPUs that timed cells name: 0 in a run from before they did."""
        return len({cell.card for cell in self.cells_of(status="ok") if cell.card})

    def floor_of_round(self, seq_len: int) -> dict[int, float]:
        """The floor that was measured on the machine of each round; empty without one."""
        floor = self.floor.get(seq_len)
        if floor is None:
            return {}
        rounds = range(1, self.experiment.rounds + 1)
        return {number: floor.of_round.get(number, floor.floor_ms) for number in rounds}

    def add(self, cell: Cell) -> None:
        """Put a cell in, in the place of an earlier one of the same variant, length and round."""
        self.cells = [*(other for other in self.cells if other.key != cell.key), cell]

    def is_done(self, variant: str, seq_len: int, round: int) -> bool:
        """Return True if this cell has its answer. Out of memory, a failed parity check and a
        missing package are answers: the same run would give them again. An error is not: it is
        tried again at the next start, so that a crash can be repaired."""
        key = (variant, seq_len, round)
        return any(cell.key == key and cell.status != "error" for cell in self.cells)

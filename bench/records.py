"""The records of results.json, one type each.

The types give names, defaults and allowed values. A file that departs from them is refused with
the place. Times are in ms and sizes in bytes unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Annotated, Literal, get_args

from msgspec import Meta, field

from bench.experiment_records import Count, Environment, Experiment, Positive, Record
from variants import Settings, variant_of

Status = Literal["ok", "parity_failed", "oom", "error", "unavailable"]
STATUSES: tuple[Status, ...] = get_args(Status)  # the most telling first
Verdict = Literal["faster", "slower", "not distinguishable"]

Milliseconds = Annotated[float, Meta(ge=0)]
Interval = tuple[float, float]


class Parity(Record):
    """The gate's outcome and the largest errors. Numbers that are not finite are None.

    problem: why it failed, in words. losses, loss_errors: of both batches. worst_ratio: the largest
    gradient error over vanilla's own. worst_scale: the gradient scale furthest from vanilla's.
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


class GpuTimes(Record):
    """The timed steps of one of several GPUs in a cell.

    step_ms: all GPUs average their gradients. unsynchronised_ms: all take the same steps at once,
    and average nothing. alone_ms: this GPU takes them while the others wait; of the first alone.
    """

    card: str | None
    step_ms: list[Positive]
    unsynchronised_ms: list[Positive]
    alone_ms: list[Positive] = []


class Cell(Record):
    """One variant at one length in one round. A field that was not measured is None or empty.

    error: why there is no time. turn_steps: how many timed steps it took at a time, interleaved
    with the round's other variants; None: all at once. fused_modules: "module name: fused
    function". kernels_seen, functions_seen: how often each GPU kernel and backward function ran in
    one profiled step. kernel_ms: that step's kernel time by kind of work. gpu_busy_ms: how long at
    least one kernel ran in it. A process profiles a length once, so later rounds may have none of
    these. With accumulation we profile two micro-batches and scale both times to a whole step.
    loss_gap: the largest relative distance of a loss from vanilla's; None with dropout. step_ms:
    every timed step, between CUDA events. forward_ms, backward_ms, optimizer_ms: its parts, over
    all micro-batches; empty for a graph. wall_ms: the step by the host's clock. first_step_s: until
    a step had run like the timed ones, with compilation or capture. peak_*_bytes: over the timed
    steps, and for a graph also over its capture. sm_clock_mhz to power_w: medians of samples taken
    between the steps. clock_reasons: why clocks were below their maximum. throttled: for more than
    the power cap. card: which GPU it was (`machine.card`): a run may continue on another. gpus: the
    times of every GPU, the first one's included; all other fields are the first one's.
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
    gpus: list[GpuTimes] = []

    def __post_init__(self) -> None:
        if self.status == "ok" and not self.step_ms:
            raise ValueError("its status is ok, and it has no step_ms")

    @property
    def efficiency(self) -> float | None:
        """The speed of all GPUs over that of the same GPUs at once without averaging gradients."""
        apart = sum(1 / median(gpu.unsynchronised_ms) for gpu in self.gpus)
        return self._steps_a_ms() / apart if self.gpus else None

    @property
    def efficiency_over_one(self) -> float | None:
        """The speed of all GPUs over that of the first alone, times their number."""
        if not self.gpus:
            return None
        return self._steps_a_ms() * median(self.gpus[0].alone_ms) / len(self.gpus)

    def _steps_a_ms(self) -> float:
        return sum(1 / median(gpu.step_ms) for gpu in self.gpus)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.variant, self.seq_len, self.round


class Floor(Record, omit_defaults=True):
    """The frozen operations of a step at one length, and what checkpointing recomputes.

    tokens: of a step, without padding; None in older runs, whose floors have the padding.
    ms_by_round: of each round's machine, in runs that an earlier version merged.
    """

    floor_ms: Positive
    samples_ms: list[Milliseconds]
    recomputation_ms: Positive | None = None
    recomputation_samples_ms: list[Milliseconds] = []
    labelled_tokens: int | None = None
    tokens: int | None = None
    ms_by_round: dict[int, Positive] = field(name="of_round", default_factory=dict)


class Stages(Record):
    """The wall time of a run's stages in s, over all of its commands.

    weights: also the parity reference. start: starting processes, loading and checking a model.
    warm_up: also making batches, capture and compilation. steps: timed steps. profile: also the
    checks after a cell's steps. other: between processes, while they end.
    """

    weights: float = 0.0
    floor: float = 0.0
    start: float = 0.0
    warm_up: float = 0.0
    steps: float = 0.0
    profile: float = 0.0
    other: float = 0.0


class KernelRow(Record):
    """One Triton kernel at one shape, next to a device copy that moves the same bytes."""

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
    """Medians of one variant at one length, over steps and then over rounds."""

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


class Run(Record):
    """One results file: the raw cells of one machine and the experiment behind them.

    rehearsal: made without a GPU, never a performance result. finished_utc: None until all planned
    cells are in. floor: by length, in the base's precision. other_floors: by precision and length,
    of variants that multiply in another one. summary: computed from the cells at every save.
    stages_s: None in runs of earlier versions and in merged runs.
    """

    schema_version: Literal[2]
    rehearsal: bool
    argv: list[str]
    started_utc: str
    finished_utc: str | None
    environment: Environment
    experiment: Experiment
    floor: dict[int, Floor] = {}
    other_floors: dict[str, dict[int, Floor]] = {}
    cells: list[Cell] = []
    kernels: Kernels | None = None
    summary: list[SummaryRow] = []
    stages_s: Stages | None = None

    def cells_of(
        self,
        variant: str | None = None,
        seq_len: int | None = None,
        status: Status | None = None,
        round: int | None = None,
    ) -> list[Cell]:
        """Return the cells with these values. None matches any."""
        return [
            cell
            for cell in self.cells
            if (variant is None or cell.variant == variant)
            and (seq_len is None or cell.seq_len == seq_len)
            and (status is None or cell.status == status)
            and (round is None or cell.round == round)
        ]

    def measured(self) -> list[tuple[str, int]]:
        """Return every (variant, length) with a cell, by length, in the experiment's order."""
        found = {(cell.variant, cell.seq_len) for cell in self.cells}
        lengths, variants = self.experiment.seq_lens, self.experiment.variants
        return [(v, n) for n in lengths for v in variants if (v, n) in found]

    def status_of(self, variant: str, seq_len: int) -> Status | None:
        """Return the most telling status of its cells, or None without a cell."""
        statuses = {cell.status for cell in self.cells_of(variant, seq_len)}
        return min(statuses, key=STATUSES.index, default=None)

    def round_ms(self, variant: str, seq_len: int, part: str = "step_ms") -> dict[int, float]:
        """Return the median of each timed round."""
        cells = self.cells_of(variant, seq_len, "ok")
        return {cell.round: median(times) for cell in cells if (times := getattr(cell, part))}

    def cards(self) -> int:
        """Count the GPUs that timed cells name. Runs of early versions name none."""
        return len({cell.card for cell in self.cells_of(status="ok") if cell.card})

    def floors_in(self, precision: str) -> dict[int, Floor]:
        """Return the floors in a precision, by length."""
        if precision == self.experiment.base:
            return self.floor
        return self.other_floors.get(precision, {})

    def keep_floors(self, precision: str, floors: dict[int, Floor]) -> None:
        """Add floors in a precision, by length."""
        is_base = precision == self.experiment.base
        there = self.floor if is_base else self.other_floors.setdefault(precision, {})
        there.update(floors)

    def floor_of(self, variant: str, seq_len: int) -> Floor | None:
        """Return the floor in a variant's own precision and of the tokens it has to train on."""
        recipe, base = variant_of(variant).recipe, self.experiment.base
        floor = self.floors_in(recipe.precision(base) if recipe else base).get(seq_len)
        has_padding = self.experiment.padded or self.experiment.documents
        return None if floor and has_padding and floor.tokens is None else floor

    def ms_by_round(self, floor: Floor | None) -> dict[int, float]:
        """Return the floor of each round's machine; empty if there is none."""
        if floor is None:
            return {}
        rounds = range(1, self.experiment.rounds + 1)
        return {number: floor.ms_by_round.get(number, floor.floor_ms) for number in rounds}

    def add(self, cell: Cell) -> None:
        """Add a cell in place of an earlier one of the same variant, length and round."""
        self.cells = [*(other for other in self.cells if other.key != cell.key), cell]

    def is_done(self, variant: str, seq_len: int, round: int) -> bool:
        """Return True if this cell has its answer. The next start tries an error again: a crash can
        be repaired. Out of memory, failed parity and a missing package would only repeat."""
        key = (variant, seq_len, round)
        return any(cell.key == key and cell.status != "error" for cell in self.cells)

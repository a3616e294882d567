"""The records of a run's settings and of the machine it ran on."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from variants import Base, Lora

COMPARED_PACKAGES = (
    "torch", "triton", "transformers", "peft", "bitsandbytes", "unsloth", "liger_kernel",
)  # fmt: skip

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class Record(Struct, forbid_unknown_fields=True):
    """Part of a results file. Unknown fields are refused, because saving would lose them."""


class Optimizer(Record):
    name: str
    lr: Positive
    fused: bool


class Tokens(Record):
    """Shares of all positions of the batches at one length."""

    padding: float
    labelled: float


class Experiment(Record):
    """The settings of a run.

    batch_size: rows of a micro-batch; documents are joined into one row. accumulate: micro-batches
    of a step. base: the form of the base weights; dtype is that of the rest, and of the compute.
    steps: timed steps of a variant at each length, over all rounds. checkpointing: "off" if an
    earlier version turned it off in every variant. interleave: how many timed steps an interleaved
    variant takes at a time (cells say where they were interleaved); 0: never. gpus: GPUs that train
    together, each on other rows of batch_size; in a rehearsal, processes on the CPU.
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
    base: Base = "bf16"
    gpus: Count = 1

    def tokens_a_step(self, seq_len: int) -> float:
        """Return the tokens of a step without padding, over all micro-batches of all GPUs."""
        rows = self.gpus * self.accumulate * self.batch_size
        return rows * seq_len * (1 - self.tokens[seq_len].padding)


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
    """This repository's commit; "A then B" if cells of two commits share a file."""

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
        """The name of the GPU or, without one, of the CPU."""
        return self.gpu.name if self.gpu else f"no GPU ({self.cpu})"

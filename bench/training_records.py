"""Records of fp8_training.json. The program that wrote it is removed; the file names its commit."""

from pathlib import Path

from bench.experiment_records import Count, Environment, Optimizer, Record
from bench.results import load_record
from variants import Lora


class TrainingSettings(Record):
    """All that the runs have in common. base_steps: 0 for a checkpoint."""

    model: str
    weights: str
    base_steps: int
    steps: Count
    batch_size: Count
    seq_len: Count
    lora: Lora
    optimizer: Optimizer
    data_sha256: str


class TrainingRun(Record):
    """A run. held_out: losses by the steps that came before. None is no number."""

    base: str
    variant: str
    seed: int
    losses: list[float | None]
    held_out: dict[int, float | None]


class Fp8Training(Record):
    """All runs, and by the name of each base the SHA-256 of its weights."""

    started_utc: str
    environment: Environment
    settings: TrainingSettings
    bases: dict[str, str]
    runs: list[TrainingRun]


def load_training(path: Path) -> Fp8Training:
    """Read a file, which may be compressed, or raise a ValueError of one line."""
    return load_record(path, Fp8Training, "restore it")

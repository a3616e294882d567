"""The records of small_adapters.json, and loading and saving it. Imports no torch."""

from pathlib import Path

import msgspec

from bench.experiment_records import Environment, Record
from bench.results import load_record, write_atomically
from variants import Lora


class TrainedAdapter(Record):
    """An adapter after some steps. is_dpo: trained on pairs instead of chats."""

    rate: float
    steps: int
    is_dpo: bool = False

    @property
    def file(self) -> str:
        return f"{'dpo' if self.is_dpo else 'sft'}-{self.rate:g}-{self.steps}.pt"


class Seen(Record):
    """Changes from B = 0 that one variant shows of an adapter, by batch or by pair.

    along: the outputs' change dotted with fp32's, summed over a batch (for fp32, its square).
    losses: the change of the loss. chosen, rejected: beta times that of a log-probability, for
    DPO's adapters.
    """

    variant: str
    adapter: TrainedAdapter
    along: list[float]
    losses: list[float]
    chosen: list[float]
    rejected: list[float]


class SmallAdapters(Record):
    """The whole file. tokens: in a batch. failed: why variants could not run. data_sha256: of the
    chats, empty in the first files, which do not name them."""

    started_utc: str
    environment: Environment
    model: str
    weights: str
    lora: Lora
    batches: int
    tokens: int
    pairs: int
    adapters: list[TrainedAdapter]
    seen: list[Seen]
    failed: dict[str, str]
    data_sha256: str = ""


def load_small_adapters(path: Path) -> SmallAdapters:
    """Load a file, which may be compressed, or raise ValueError."""
    return load_record(path, SmallAdapters, "restore it, or delete it and run again")


def save_small_adapters(path: Path, found: SmallAdapters) -> None:
    write_atomically(path, msgspec.json.encode(found) + b"\n")

"""The plan of a run. Every process gets it and makes its batches and its model from it."""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

import models
from batches import (
    IGNORED,
    Batch,
    load_tokenizer,
    make_batches,
    read_chats,
    sha256_of,
    tokenize,
)
from bench.published import PublishedSetting
from bench.weights import Source
from models import Built
from trainer import Clock, CudaClock, WallClock
from variants import BF16, Base, Lora, recipe_of

LEARNING_RATE = 1e-4
PARITY_BATCH_SIZE = 4
PARITY_SEQ_LEN = 64
# A row of 4 x 64 tokens would hold one or two documents, with few neighbours to see by mistake.
PARITY_SEQ_LEN_WITH_DOCUMENTS = 512


@dataclass(frozen=True)
class Plan:
    """A run, made from checked arguments.

    batch_size: rows of a micro-batch. accumulate: micro-batches of a step. steps: in one round.
    interleave: how many of them a variant takes at a time if all fit on the GPU together; 0: never
    interleaved. quick: each variant has one process for the whole run. cell_timeout_s: a cell
    silent for longer is given up. base: the form of the base weights. published: somebody else's
    setting, if the run is in one. gpus: GPUs that train together, or processes on the CPU. gpu: the
    number of this process's.
    """

    source: Source
    data: Path
    cache: Path
    lora: Lora
    variants: tuple[str, ...]
    seq_lens: tuple[int, ...]
    batch_size: int
    steps: int
    rounds: int
    padded: bool
    documents: bool
    seed: int
    device: str
    interleave: int
    quick: bool
    cell_timeout_s: float
    allow_shared_gpu: bool
    accumulate: int = 1
    base: Base = BF16
    published: PublishedSetting | None = None
    gpus: int = 1
    gpu: int = 0

    def batches(self, seq_len: int, batch_size: int, count: int) -> list[Batch]:
        """Return the run's batches at one length, on the CPU: the same in every round."""
        tokenized = _tokenized(self.data, self.source.tokenizer)
        return make_batches(
            tokenized, seq_len, batch_size, count, padded=self.padded, seed=self.seed,
            documents=self.documents,
        )  # fmt: skip

    def timed_batches(self, seq_len: int) -> list[Batch]:
        """Return this GPU's micro-batches of a round's timed steps at one length, on the CPU."""
        return self.timed_batches_of_all(seq_len)[self.gpu :: self.gpus]

    def timed_batches_of_all(self, seq_len: int) -> list[Batch]:
        """Return those of all GPUs, which take them in turn."""
        return self.batches(seq_len, self.batch_size, self._count)

    @property
    def _count(self) -> int:
        """The number of micro-batches of a round, those of all GPUs."""
        return self.steps * self.accumulate * self.gpus

    def trains_at(self, seq_len: int) -> bool:
        """Return True if batches of this length give every adapter a gradient.

        If only the second token of each row is predicted, the adapters of q and k get none: the
        first token attends to itself alone.
        """
        try:
            self.batches(seq_len, self.batch_size, 1)
            _, second = self.batches(seq_len, PARITY_BATCH_SIZE, 2)
        except ValueError:
            return False
        return bool((second.labels[:, 2:] != IGNORED).any())

    @property
    def parity_seq_len(self) -> int:
        wanted = PARITY_SEQ_LEN_WITH_DOCUMENTS if self.documents else PARITY_SEQ_LEN
        short = min(wanted, *self.seq_lens)
        return short if self.trains_at(short) else min(self.seq_lens)

    def parity_batches(self) -> tuple[Batch, Batch]:
        first, second = self.batches(self.parity_seq_len, PARITY_BATCH_SIZE, 2)
        return first.to(self.device), second.to(self.device)

    def build(self, variant: str, seq_len: int) -> Built:
        folder, lora = self.source.folder, self.lora
        return models.build(variant, folder, lora, seq_len, self.device, self.seed, self.base)

    def clock(self) -> Clock:
        return CudaClock() if self.device == "cuda" else WallClock()

    def precisions(self) -> set[bool]:
        """Return which of FP8 (True) and bf16 (False) variants use. Each has its own reference."""
        return {recipe_of(variant).fp8 for variant in self.variants}

    def reference_file(self, fp8: bool = False) -> Path:
        """Return the parity reference's path. Its name hashes all that the reference depends on."""
        rests_on = (
            str(self.source.folder),
            replace(self.lora, dropout=0.0),  # parity runs without dropout
            self.padded,
            *(("documents",) if self.documents else ()),
            *(("fp8",) if fp8 else ()),
            *((self.base,) if self.base != BF16 else ()),
            self.seed,
            self.parity_seq_len,
            sha256_of(self.data),
            torch.__version__,
            self.device,
        )
        digest = hashlib.sha256(repr(rests_on).encode()).hexdigest()[:12]
        return self.cache / "parity" / f"{digest}.pt"

    def is_prepared(self) -> bool:
        """Return True if everything that `prepare_run` makes is there."""
        references = [self.reference_file(fp8).exists() for fp8 in self.precisions()]
        return self.source.is_there() and all(references)


@functools.cache
def _tokenized(data: Path, tokenizer: Path):
    return tokenize(read_chats(data), load_tokenizer(tokenizer))

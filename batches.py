"""Chats in a JSONL file -> the token batches that every variant trains on.

    chats = read_chats("data/sft_train.jsonl")
    tokenized = tokenize(chats, load_tokenizer("data/tokenizer.json"))
    batches = make_batches(tokenized, seq_len=512, batch_size=32, count=20)

Chats become ChatML, `<|im_start|>{role}\\n{content}<|im_end|>\\n` for each message. The loss is on
the assistant's contents and the <|im_end|> after each. A tokenizer without ChatML's tokens spells
these markers out as plain text, which makes examples a little longer.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Tokenizer

if TYPE_CHECKING:  # torch takes seconds to import, and a bad file should fail at once
    import torch

T = TypeVar("T")
IGNORED = -100  # the label that torch's cross_entropy skips
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class TokenizedExample:
    """One chat. A label is the token itself, or -100 for no loss."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Batch:
    """The token rows of one step. transformers shifts the labels itself.

    input_ids, labels: int64 [batch_size, seq_len]. attention_mask: the same, 1 on tokens and 0 on
    padding; None for packed rows, which have no padding. For whole documents in one row
    [1, tokens]: position_ids restart at each document, and `lengths` (int32) has the tokens of
    each. The last `filler` tokens are padding and count as one more document.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    filler: int = 0

    def to(self, device: torch.device | str) -> Batch:
        moved: dict[str, Any] = {name: one.to(device) for name, one in self._named().items()}
        return replace(self, **moved)

    def inputs(
        self, lengths_as: Callable[[torch.Tensor], dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return a model's inputs by name. lengths_as: turns documents' lengths into inputs."""
        given: dict[str, Any] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "attention_mask": self.attention_mask,
        }
        if self.position_ids is not None:
            given["position_ids"] = self.position_ids
        if lengths_as is not None and self.lengths is not None:
            given |= lengths_as(self.lengths)
        return given

    @property
    def labelled(self) -> int:
        """The number of tokens in the loss. Nothing predicts the first of a row."""
        return int((self.labels[:, 1:] != -100).sum())

    @property
    def sequences(self) -> int:
        """The number of rows, or of documents without the one of padding."""
        rows = len(self.input_ids) if self.lengths is None else len(self.lengths)
        return rows - bool(self.filler)

    @property
    def padding(self) -> int:
        """The number of padding tokens."""
        mask = self.attention_mask
        return self.filler if mask is None else int((mask == 0).sum())

    def tensors(self) -> list[torch.Tensor]:
        return list(self._named().values())

    def _named(self) -> dict[str, torch.Tensor]:
        rest = {name: one for name, one in vars(self).items() if name != "filler"}
        return {name: one for name, one in rest.items() if one is not None}


@dataclass(frozen=True)
class TokenShares:
    """The shares of positions that are padding, and that are in the loss."""

    padding: float
    labelled: float


def read_chats(path: str | Path) -> list[list[Message]]:
    """Read {"messages": [...]} from each line of a file that `bench.chats.gather` wrote."""
    with Path(path).open(encoding="utf-8") as lines:
        return [[Message(**fields) for fields in json.loads(line)["messages"]] for line in lines]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json and switch off its own truncation and padding.

    Raises ValueError for a file that is missing, unreadable or without a vocabulary.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"no tokenizer at {path}; wanted a tokenizer.json file; make ours with "
            "`python data/make/tokenizer.py`, or give the one in a model's folder"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is not a tokenizer ({reason}); wanted a tokenizer.json of the tokenizers "
            "library; save one with tokenizer.save(path)"
        ) from None
    if not tokenizer.encode("assistant", add_special_tokens=False).ids:
        raise ValueError(
            f"{path} turns text into no tokens; wanted a trained tokenizer; train it before saving"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenize(chats: list[list[Message]], tokenizer: Tokenizer) -> list[TokenizedExample]:
    """Encode each chat, with labels only on the assistants' contents and their <|im_end|>.

    The header, the content with its end, and the newline are encoded apart, as in a prompt: no
    token straddles the border between labelled and unlabelled.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    headers = {role: encode(f"<|im_start|>{role}\n") for role in ROLES}
    newline = encode("\n")
    tokenized = []
    for messages in chats:
        input_ids: list[int] = []
        labels: list[int] = []
        for message in messages:
            header, said = headers[message.role], encode(f"{message.content}<|im_end|>")
            input_ids += header + said + newline
            labels += [IGNORED] * len(header)
            labels += said if message.role == "assistant" else [IGNORED] * len(said)
            labels += [IGNORED] * len(newline)
        tokenized.append(TokenizedExample(input_ids, labels))
    return tokenized


def make_batches(
    tokenized: list[TokenizedExample],
    seq_len: int,
    batch_size: int,
    count: int,
    padded: bool = False,
    seed: int = 0,
    pad_id: int = 0,
    documents: bool = False,
) -> list[Batch]:
    """Return the first `count` batches of an endless stream set by the other arguments.

    Packed (the default): shuffled examples one after the other, cut into rows of seq_len tokens. An
    example may continue in the next row, and tokens attend across examples.
    Padded: one example a row, cut at seq_len or padded on the right with pad_id, label -100 and
    attention_mask 0.
    Documents: whole examples in rows of batch_size * seq_len tokens, one row a batch, in as few
    rows as hold them all. Longer examples are cut. A document of padding fills the row up.
    Every pass over the data shuffles anew.

    A row may have no label (a long question, a short row). A batch without one would have a loss of
    0/0, so we skip it.

    Raises ValueError for lengths and counts that make no batch, and if two passes over the data
    have no batch with a label.
    """
    limits = {"seq_len": (seq_len, 2), "batch_size": (batch_size, 1), "count": (count, 1)}
    for name, (given, least) in limits.items():
        if given < least:
            raise ValueError(f"{name} is {given}; wanted {least} or more; ask for a larger {name}")
    if not any(example.input_ids for example in tokenized):
        raise ValueError("no tokens; wanted at least one chat; read and tokenize some first")
    order = random.Random(seed)
    if padded:
        rows = len(tokenized)
        batches = _padded(_endless(tokenized, order), seq_len, batch_size, pad_id)
    elif documents:
        rows = len(tokenized)
        batches = _documents(tokenized, order, batch_size * seq_len, pad_id)
    else:
        rows = sum(len(example.input_ids) for example in tokenized) // seq_len
        batches = _packed(_endless(tokenized, order), seq_len, batch_size)
    twice_around = 2 * (rows // batch_size + 1)  # a label may come first, then last when reshuffled
    return list(islice(_labelled(batches, twice_around), count))


def _endless(items: list[T], order: random.Random) -> Iterator[T]:
    places = list(range(len(items)))
    while True:
        order.shuffle(places)
        for place in places:
            yield items[place]


def _packed(examples: Iterator[TokenizedExample], seq_len: int, batch_size: int) -> Iterator[Batch]:
    import torch

    size = batch_size * seq_len
    input_ids: list[int] = []
    labels: list[int] = []
    for example in examples:
        input_ids += example.input_ids
        labels += example.labels
        while len(input_ids) >= size:
            yield Batch(
                torch.tensor(input_ids[:size]).view(batch_size, seq_len),
                torch.tensor(labels[:size]).view(batch_size, seq_len),
            )
            input_ids, labels = input_ids[size:], labels[size:]


def _padded(
    examples: Iterator[TokenizedExample], seq_len: int, batch_size: int, pad_id: int
) -> Iterator[Batch]:
    import torch

    def filled(tokens: list[int], filler: int) -> list[int]:
        return tokens[:seq_len] + [filler] * (seq_len - len(tokens))

    while True:
        rows = list(islice(examples, batch_size))
        yield Batch(
            torch.tensor([filled(row.input_ids, pad_id) for row in rows]),
            torch.tensor([filled(row.labels, IGNORED) for row in rows]),
            torch.tensor([filled([1] * len(row.input_ids), 0) for row in rows]),
        )


def _documents(
    tokenized: list[TokenizedExample], order: random.Random, tokens: int, pad_id: int
) -> Iterator[Batch]:
    import torch

    from fused_lora.packing import pack

    cut = [
        TokenizedExample(one.input_ids[:tokens], one.labels[:tokens])
        for one in tokenized
        if one.input_ids
    ]
    for group in _endless(pack([len(one.input_ids) for one in cut], tokens), order):
        examples = [cut[place] for place in group]
        if filler := tokens - sum(len(example.input_ids) for example in examples):
            examples.append(TokenizedExample([pad_id] * filler, [IGNORED] * filler))
        ids = [token for example in examples for token in example.input_ids]
        # nothing predicts a document's first token
        labels = [label for example in examples for label in (IGNORED, *example.labels[1:])]
        lengths = torch.tensor([len(example.input_ids) for example in examples], dtype=torch.int32)
        places = torch.cat([torch.arange(length) for length in lengths])
        yield Batch(
            torch.tensor([ids]), torch.tensor([labels]), position_ids=places[None],
            lengths=lengths, filler=filler,
        )  # fmt: skip


def _labelled(batches: Iterator[Batch], patience: int) -> Iterator[Batch]:
    """Yield the batches with a label. Raise after `patience` in a row without one."""
    passed_over = 0
    for batch in batches:
        if (batch.labels[:, 1:] != IGNORED).any():
            passed_over = 0
            yield batch
        elif (passed_over := passed_over + 1) == patience:
            seq_len = batch.labels.shape[1]
            raise ValueError(
                f"no label in {patience} batches of length {seq_len}, twice around the data; "
                "wanted rows that reach into an assistant's answer; ask for a longer seq_len"
            )


def token_shares(batches: list[Batch]) -> TokenShares:
    """Return the shares of padding and of labels, counted after the shift, in batches."""
    positions = sum(batch.input_ids.numel() for batch in batches)
    if not positions:
        raise ValueError("no batches; wanted at least one to take shares of; make some first")
    padding = sum(batch.padding for batch in batches)
    labelled = sum(batch.labelled for batch in batches)
    return TokenShares(padding / positions, labelled / positions)


def sha256_of(path: str | Path) -> str:
    """Return a file's SHA-256 in hexadecimal, which names the data in results.json."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()

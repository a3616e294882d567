"""The processes of small_adapters: one trains the adapters, one a variant runs them forward."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from batches import Batch, load_tokenizer, make_batches, read_chats, tokenize
from bench.weights import Source, materialize
from variants import IN_FP32, Lora

from .small_adapter_records import Seen, TrainedAdapter

DECODER, HEAD = "base_model.model.model", "base_model.model.lm_head"
TRAINER = "vanilla_peft_no_checkpointing"
BETA, DPO_LR, PAIRS_A_STEP = 0.1, 5e-6, 4
APART = 7  # chats from a pair's question to the other answer


class Asked(msgspec.Struct, frozen=True):
    """Everything a process needs to know."""

    source: Source
    data: Path
    folder: Path  # for adapters and fp32's changes
    device: str
    batches: int
    rows: int
    seq_len: int
    pairs: int
    adapters: list[TrainedAdapter]

    def chats(self) -> tuple[list[Batch], list[Batch]]:
        """Return batches to train on, and others to evaluate."""
        chats = tokenize(read_chats(self.data), load_tokenizer(self.source.tokenizer))
        most = max(adapter.steps for adapter in self.adapters)
        trained = make_batches(chats[1::2], self.seq_len, self.rows, most)
        seen = make_batches(chats[::2], self.seq_len, self.rows, self.batches)
        return [b.to(self.device) for b in trained], [b.to(self.device) for b in seen]

    def pairs_of_rows(self) -> list[Batch]:
        """Return a batch of two rows per pair: a chat, and its question with another chat's answer.
        Only answers have labels. Rows are padded on the right, and attention ignores the padding.
        """
        chats = tokenize(read_chats(self.data), load_tokenizer(self.source.tokenizer))
        length, found = 2 * self.seq_len, []
        for i in range(self.pairs):
            one, other = chats[i], chats[i + APART]
            question = next(n for n, label in enumerate(one.labels) if label != -100)
            answer = next(n for n, label in enumerate(other.labels) if label != -100)
            ids = [one.input_ids, one.input_ids[:question] + other.input_ids[answer:]]
            labels = [one.labels, one.labels[:question] + other.labels[answer:]]
            ids = [(row + [0] * length)[:length] for row in ids]
            labels = [(row + [-100] * length)[:length] for row in labels]
            found.append(Batch(torch.tensor(ids), torch.tensor(labels)).to(self.device))
        return found


def log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """Return [rows]: the sums over labelled tokens, from logits in the model's own precision."""
    hidden = model.get_submodule(DECODER)(input_ids=batch.input_ids)[0]
    logits = F.linear(hidden, model.get_submodule(HEAD).weight)[:, :-1].float()
    labels = batch.labels[:, 1:]
    found = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return -found.sum(1)


def build_at_start(asked: Asked, variant: str) -> Any:
    """Build the variant's model with B = 0."""
    from bench.cells import make_ready

    make_ready(variant, asked.device)
    import models

    length = 2 * asked.seq_len
    built = models.build(variant, asked.source.folder, Lora(), length, asked.device, seed=0)
    put(built.model, None)
    return built


def trained_in(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def put(model: Any, adapter: dict[str, torch.Tensor] | None) -> None:
    """Give the model these adapters, or B = 0 without any."""
    for name, parameter in trained_in(model).items():
        if adapter is not None:
            parameter.copy_(adapter[name])
        elif ".lora_B." in name:
            parameter.zero_()


def train_adapters(send: Callable[[Any], None], asked: Asked) -> None:
    """Train the adapters, all from the same A and B = 0, and write their files."""
    materialize(asked.source, 0, asked.device)
    built = build_at_start(asked, TRAINER)
    chats, pairs = asked.chats()[0], asked.pairs_of_rows()
    start = {name: p.detach().clone() for name, p in trained_in(built.model).items()}
    with built.autocast(), torch.no_grad():
        references = [log_probabilities(built.model, pair) for pair in pairs]

    def dpo_loss(step: int) -> torch.Tensor:
        margins = []
        for n in range(step * PAIRS_A_STEP, (step + 1) * PAIRS_A_STEP):
            chosen, rejected = log_probabilities(built.model, pairs[n]) - references[n]
            margins.append(BETA * (chosen - rejected))
        return -F.logsigmoid(torch.stack(margins)).mean()

    runs = {(adapter.rate, adapter.is_dpo) for adapter in asked.adapters}
    for rate, is_dpo in sorted(runs):
        same_run = [
            adapter
            for adapter in asked.adapters
            if (adapter.rate, adapter.is_dpo) == (rate, is_dpo)
        ]
        wanted = {one.steps: one for one in same_run}
        put(built.model, start)
        parameters = list(trained_in(built.model).values())
        fused = asked.device == "cuda"
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=fused)
        for step in range(max(wanted)):
            with built.autocast():
                loss = dpo_loss(step) if is_dpo else built.model(**chats[step].inputs()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if one := wanted.get(step + 1):
                state = {n: p.detach().cpu() for n, p in trained_in(built.model).items()}
                torch.save(state, asked.folder / one.file)
                send({"doing": f"trained {one.file}, loss {loss.item():.5f}"})


def run_variant(send: Callable[[Any], None], asked: Asked, variant: str) -> None:
    """Send a {"seen": Seen} for each adapter."""
    built = build_at_start(asked, variant)
    batches, pairs = asked.chats()[1], asked.pairs_of_rows()
    kept: list[torch.Tensor] = []
    built.model.get_submodule(DECODER).register_forward_hook(
        lambda _, inputs, output: kept.append(output[0].detach().float())
    )

    def forward() -> Iterator[tuple[torch.Tensor, float]]:
        for batch in batches:
            kept.clear()
            with built.autocast():
                loss = built.model(**batch.inputs()).loss.item()
            yield kept.pop(), loss

    def rewards() -> torch.Tensor:
        with built.autocast(), torch.no_grad():
            return torch.stack([BETA * log_probabilities(built.model, pair) for pair in pairs])

    at_start = [(hidden.cpu(), loss) for hidden, loss in forward()]
    rewards_at_start = rewards()
    for adapter in asked.adapters:
        put(built.model, torch.load(asked.folder / adapter.file, map_location=asked.device))
        exact = asked.folder / f"fp32-{adapter.file}"
        along, losses = [], []
        if variant == IN_FP32:
            changes: list[torch.Tensor] = []
            for (hidden, loss), (before, loss_before) in zip(forward(), at_start, strict=True):
                changes.append(hidden.cpu() - before)
                losses.append(loss - loss_before)
            along = [change.square().sum(dtype=torch.float64).item() for change in changes]
            torch.save(changes, exact)
        else:
            wanted = torch.load(exact, mmap=True)
            for (hidden, loss), (before, loss_before), want in zip(
                forward(), at_start, wanted, strict=True
            ):
                change = hidden - before.to(hidden.device)
                along.append((change.double() * want.to(hidden.device)).sum().item())
                losses.append(loss - loss_before)
        chosen, rejected = (
            (rewards() - rewards_at_start).t().tolist() if adapter.is_dpo else ([], [])
        )
        send({"seen": Seen(variant, adapter, along, losses, chosen, rejected)})

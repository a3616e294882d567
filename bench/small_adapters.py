"""The share of a small adapter that each variant shows: its change of outputs, losses and rewards,
over the change in fp32.

    python -m bench.small_adapters      without a GPU a rehearsal

Vanilla PEFT trains adapters from B = 0 for a few steps at small learning rates, on chats and with
DPO's loss on pairs. Every variant then runs forward in training mode on other chats, with B = 0 and
with each of these adapters. The same command goes on with the variants that are missing.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from batches import Batch, load_tokenizer, make_batches, read_chats, tokenize
from bench import machine, processes
from bench.folders import locked
from bench.option_checks import check_variant
from bench.options import HERE, Parser, why_unavailable
from bench.small_adapter_records import (
    Seen,
    SmallAdapters,
    TrainedAdapter,
    load_small_adapters,
    save_small_adapters,
)
from bench.terminal import console
from bench.weights import Source, materialize, resolve
from variants import IN_FP32, Lora, title_of

DECODER, HEAD = "base_model.model.model", "base_model.model.lm_head"
TRAINER = "vanilla_peft_no_checkpointing"
BETA, DPO_LR = 0.1, 5e-6
ON_GPU: dict[str, Any] = {
    "model": HERE / "configs" / "qwen2.5-3b.json", "batches": 16, "rows": 8, "seq_len": 256,
    "pairs": 24, "rates": (1e-6, 1e-5, 1e-4), "steps": (1, 8, 64), "device": "cuda",
    "variants": (TRAINER, "fused_layer_no_checkpointing", "fp8_layer_no_checkpointing",
                 "fused_mlp_no_checkpointing", "full_unsloth_no_checkpointing",
                 "fused_all_no_checkpointing", "compiled_peft_no_checkpointing"),
}  # fmt: skip
REHEARSED: dict[str, Any] = {
    "model": HERE / "configs" / "tiny.json", "batches": 2, "rows": 2, "seq_len": 32, "pairs": 8,
    "rates": (1e-4,), "steps": (1, 2), "device": "cpu",
    "variants": (TRAINER, "fused_layer_no_checkpointing"),
}  # fmt: skip
PAIRS_A_STEP, DPO_STEPS = 4, 4
SILENCE_LIMIT_S = 600  # a variant silent for longer hangs and is given up


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
        most = max(one.steps for one in self.adapters)
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
            one, other = chats[i], chats[i + 7]
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
    built = models.build(variant, asked.source.folder, Lora(), length, False, asked.device, seed=0)
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
    asked.folder.mkdir(parents=True, exist_ok=True)
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

    runs = {(one.rate, one.is_dpo) for one in asked.adapters}
    for rate, is_dpo in sorted(runs):
        same_run = [one for one in asked.adapters if (one.rate, one.is_dpo) == (rate, is_dpo)]
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


def new_file(asked: Asked) -> SmallAdapters:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return SmallAdapters(
        now, machine.environment(), asked.source.name, asked.source.weights, Lora(), asked.batches,
        asked.rows * asked.seq_len, asked.pairs, asked.adapters, [], {},
    )  # fmt: skip


def looked_at(asked: Asked, variant: str) -> tuple[str | None, list[Seen]]:
    """Run `run_variant` in a fresh process. Return its error, if any, and what it saw."""
    if error := why_unavailable(variant, asked.device):
        return error, []
    seen: list[Seen] = []
    ended = processes.run(
        run_variant, asked, variant, on_message=lambda sent: seen.append(sent["seen"]),
        silence_limit_s=SILENCE_LIMIT_S,
    )  # fmt: skip
    return ended.error and f"{ended.error}: {ended.output_tail}", seen


def go_on_with(path: Path, fresh: SmallAdapters) -> SmallAdapters:
    """Return the file's runs, if they are of the same settings and GPU, or `fresh` without one."""
    if not path.exists():
        return fresh
    earlier = load_small_adapters(path)
    settings, wanted = (
        (one.model, one.adapters, one.batches, one.environment.device) for one in (earlier, fresh)
    )
    if settings != wanted:
        raise ValueError(f"{path} was measured otherwise or elsewhere: give another --out")
    return earlier


def run_missing(asked: Asked, variants: tuple[str, ...], path: Path) -> None:
    """Run the variants that the file lacks, and write it after each."""
    found = go_on_with(path, new_file(asked))
    if any(not (asked.folder / one.file).exists() for one in asked.adapters):
        ended = processes.run(
            train_adapters, asked, on_message=lambda sent: console.print(sent["doing"])
        )
        if ended.error:
            raise RuntimeError(f"training the adapters: {ended.error}\n{ended.output_tail}")
    files = [asked.folder / f"fp32-{one.file}" for one in asked.adapters]
    done = {one.variant for one in found.seen}
    for variant in (IN_FP32, *variants):
        if variant in done and (variant != IN_FP32 or all(file.exists() for file in files)):
            continue
        began = time.monotonic()
        error, seen = looked_at(asked, variant)
        if error and variant == IN_FP32:
            raise RuntimeError(f"{title_of(variant)}: {error}")
        found.seen[:] = [one for one in found.seen if one.variant != variant]
        if error:
            found.failed[variant] = error
        else:
            found.failed.pop(variant, None)
            found.seen += seen
        save_small_adapters(path, found)
        outcome = error.splitlines()[-1] if error else f"{time.monotonic() - began:.0f} s"
        console.print(f"{title_of(variant)}: {outcome}")


def main(argv: list[str] | None = None) -> int:
    defaults = ON_GPU if machine.has_gpu() else REHEARSED
    parser = Parser(
        prog="small_adapters", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", help="architecture file, checkpoint folder or hub name")
    parser.add_argument("--variants", nargs="+", metavar="NAME")
    parser.add_argument("--data", type=Path, default=HERE / "data" / "sft_train.jsonl")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache")
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "small-adapters")
    parser.set_defaults(**{name: defaults[name] for name in ("model", "variants")})
    given = parser.parse_args(argv)
    if defaults is REHEARSED:
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        console.print("No GPU: a rehearsal in Triton's interpreter, not a result.")
    try:
        for variant in given.variants:
            check_variant(variant, defaults["device"])
        source = resolve(str(given.model), given.cache.resolve(), seed=0)
        adapters = [
            TrainedAdapter(rate, n) for rate in defaults["rates"] for n in defaults["steps"]
        ]
        dpo_steps = min(DPO_STEPS, defaults["pairs"] // PAIRS_A_STEP)
        adapters += [TrainedAdapter(DPO_LR, n, is_dpo=True) for n in range(1, dpo_steps + 1)]
        sizes = {name: defaults[name] for name in ("device", "batches", "rows", "seq_len", "pairs")}
        folder = given.cache.resolve() / "small_adapters" / source.folder.name
        asked = Asked(source, given.data, folder, adapters=adapters, **sizes)
        with locked(given.out):
            run_missing(asked, tuple(given.variants), given.out / "small_adapters.json")
    except KeyboardInterrupt:
        print("\nStopped: the same command continues.")
        return 130
    except RuntimeError as error:
        print(f"small_adapters: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"small_adapters: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

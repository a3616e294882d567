"""The records of small_adapters.json, and its tables in Markdown. Imports no torch."""

from collections.abc import Callable
from statistics import fmean

from bench.experiment_records import Environment, Record
from report.statistics import interval95
from report.table import markdown_table
from report.wording import commit_in, packages_in
from variants import IN_FP32, Lora, variant_of

PACKAGES = ("torch", "triton", "transformers", "peft", "unsloth")
REWARDS = "**DPO at a learning rate of 5e-6: mean reward margin, chosen - rejected, by updates:**"


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

    def seen_by(self, variant: str, adapter: TrainedAdapter) -> Seen:
        return next(one for one in self.seen if (one.variant, one.adapter) == (variant, adapter))

    def shares(self, variant: str, adapter: TrainedAdapter) -> list[float]:
        """Return the outputs' change in each batch, projected on fp32's and divided by it."""
        along, exact = (self.seen_by(id, adapter).along for id in (variant, IN_FP32))
        return [a / b for a, b in zip(along, exact, strict=True)]

    def loss_shares(self, variant: str, adapter: TrainedAdapter) -> list[float]:
        """Return the loss's change in each batch, divided by fp32's mean change."""
        exact = fmean(self.seen_by(IN_FP32, adapter).losses)
        return [change / exact for change in self.seen_by(variant, adapter).losses]


# --- tables ---------------------------------------------------------------------------------------


def tables(found: SmallAdapters) -> str:
    """Write all tables, below a caption. Rows are adapters, and columns are variants."""
    variants = [id for id in dict.fromkeys(one.variant for one in found.seen) if id != IN_FP32]
    titles = [variant_of(variant).plain_title for variant in variants]
    trained = [adapter for adapter in found.adapters if not adapter.is_dpo]
    on_pairs = [adapter for adapter in found.adapters if adapter.is_dpo]

    def shares_of(share: Callable[[str, TrainedAdapter], list[float]]) -> str:
        lines = [
            [f"{one.rate:.0e}".replace("e-0", "e-"), str(one.steps),
             *(_mean(share(id, one)) for id in variants)]
            for one in trained
        ]  # fmt: skip
        return markdown_table(["learning rate", "updates", *titles], lines)

    rewards = [
        [str(pair.steps), *(_margin(found.seen_by(id, pair)) for id in (IN_FP32, *variants))]
        for pair in on_pairs
    ]
    return "\n\n".join([
        _caption(found, bool(on_pairs)),
        "**Share of the change of outputs:**", shares_of(found.shares),
        "**Share of the change of the loss:**", shares_of(found.loss_shares),
        *([REWARDS, markdown_table(["updates", "fp32", *titles], rewards)] if on_pairs else []),
    ])  # fmt: skip


def _caption(found: SmallAdapters, has_pairs: bool) -> str:
    failed = [variant_of(name).plain_title for name in found.failed]
    facts = [
        found.environment.device, *packages_in(found.environment, PACKAGES),
        f"{found.model} ({found.weights})", f"LoRA rank {found.lora.rank}",
        f"{found.batches} batches of {found.tokens:,} tokens",
        *([f"{found.pairs} pairs"] if has_pairs else []),
        "±: half of the 95% interval over batches, from 0.005 on",
        *([f"could not run: {', '.join(failed)}"] if failed else []),
    ]  # fmt: skip
    return " · ".join(facts) + f". {commit_in(found.environment)}"


def _margin(seen: Seen) -> str:
    margin = round(fmean(seen.chosen) - fmean(seen.rejected), 2) + 0.0  # which is no -0.0
    return f"{margin:.2f}"


def _mean(values: list[float]) -> str:
    low, high = interval95(values) or (float("nan"), float("nan"))
    half = (high - low) / 2
    mean = round(fmean(values), 2) + 0.0  # which is no -0.0
    return f"{mean:.2f}" + (f" ± {half:.2f}" if not half < 0.005 else "")

"""Settings in which others have published single-GPU LoRA training speeds, with their numbers.

    python lora_bench.py --suite published --model configs/qwen2.5-7b.json

runs one of them. It takes their batch, length, accumulation and adapters, and runs our variants,
vanilla PEFT and Unsloth in the same run. Numbers are tokens/s, as on the pages named here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from variants import BF16, NF4, TARGETS, Base

MODELS = "configs"
# How we measure it by default.
MEASURED_IN = {"steps": 3, "rounds": 1, "interleave": 0}


@dataclass(frozen=True)
class Claim:
    """A published speed. by: the program, its precision, and who measured it if not its authors."""

    by: str
    tokens_per_s: int


@dataclass(frozen=True)
class Page:
    """A page with such numbers and the date of its last change."""

    name: str
    url: str
    date: str


@dataclass(frozen=True)
class PublishedSetting:
    """A model and its training: adapters on all projections, alpha twice the rank.

    model: the name of its file in configs/. batch_size: rows of a micro-batch. accumulate:
    micro-batches of a step. claims: their own best first. differs: how our setting differs. base:
    the form of the base weights.
    """

    model: str
    batch_size: int
    seq_len: int
    accumulate: int
    rank: int
    gpu: str
    page: Page
    claims: tuple[Claim, ...]
    differs: str = ""
    base: Base = BF16

    @property
    def name(self) -> str:
        return setting_name(self.model, self.base)

    def is_that(self) -> dict[str, Any]:
        """Return the options of a run in this setting, by name."""
        return {
            "batch_size": self.batch_size,
            "seq_lens": [self.seq_len],
            "accumulate": self.accumulate,
            "rank": self.rank,
            "targets": list(TARGETS),
            "lora_dropout": 0.0,
            "dora": False,
            "padded": False,
            "documents": False,
            "base": self.base,
        }


def setting_name(model: str | None, base: Base) -> str:
    """Return the name of a model's setting: "qwen3-8b", or "qwen3-8b-nf4" on that base."""
    return f"{model}-{base}" if base != BF16 else str(model)


NEMO = Page(
    "NeMo AutoModel, performance summary",
    "https://github.com/NVIDIA-NeMo/Automodel/blob/2861c4143cd335539213b1b6d0c890cb17682444"
    "/docs/performance-summary.mdx",
    "2026-06-12",
)
SUROGATE = Page(
    "Surogate, speed benchmarks", "https://docs.surogate.ai/reference/benchmarks", "2026-05-15"
)

SETTINGS = {
    setting.name: setting
    for setting in (
        PublishedSetting(
            "qwen2.5-7b", 2, 4096, 16, 16, "H100", NEMO,
            (Claim("NeMo AutoModel (TE + Triton)", 14110),),
        ),
        PublishedSetting(
            "llama3-8b", 2, 4096, 16, 16, "H100", NEMO,
            (Claim("NeMo AutoModel (TE + Triton)", 12473),),
            "their recipe names Llama 3.1 8B, of the same sizes, and has LoRA dropout 0.1",
        ),
        PublishedSetting(
            "qwen3-8b", 2, 2048, 4, 16, "H100", SUROGATE,
            (Claim("Surogate, FP8", 11600), Claim("Surogate, bf16", 10200),
             Claim("Unsloth, bf16, by Surogate", 8900)),
        ),
        PublishedSetting(
            "qwen3-8b", 2, 2048, 4, 16, "H100", SUROGATE,
            (Claim("Surogate, NF4", 9400), Claim("Unsloth, NF4, by Surogate", 8200)), base=NF4,
        ),
        PublishedSetting(
            "qwen3-0.6b", 2, 2048, 4, 16, "H100", SUROGATE,
            (Claim("Surogate, bf16", 53900), Claim("Surogate, FP8", 51200),
             Claim("Unsloth, bf16, by Surogate", 21300)),
        ),
    )
}  # fmt: skip


def setting_of(model: str | Path | None, device: str, base: Base = BF16) -> PublishedSetting:
    """Return the setting that `--suite published` runs for a model on a base.

    Raises:
        ValueError: nobody has published one, or there is no GPU.
    """
    name = setting_name(Path(model).stem if model is not None else None, base)
    if name not in SETTINGS or Path(str(model)).suffix != ".json":
        has = f"no setting of {name} is known" if model is not None else "one model at a time"
        there = ", ".join(f"{MODELS}/{s.model}.json" for s in SETTINGS.values() if s.base == base)
        raise ValueError(f"--suite published: {has}; give --model with one of {there}")
    if device == "cpu":
        raise ValueError(
            f"--suite published: {name} needs an NVIDIA GPU, and there is none; a rehearsal is any "
            "other suite"
        )
    return SETTINGS[name]

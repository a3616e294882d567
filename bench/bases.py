"""Base weights to hold one precision against another on: trained ones, and with outlier channels.

Random weights would leave the question empty. FP8 makes of a random matrix another one, which is no
worse, and adapters on a small random model learn little beyond the frequencies of tokens: of 4
layers of 256 a held-out loss fell from 8.4 to 7.2 in 300 steps, but from 8.4 to 2.9 with all
weights trained. So those are trained first, half a minute on a GPU, in fp32 under bf16 autocast,
and not to the end, so that adapters have something to learn: from 4.10 to 3.92 there, and to 3.96
with outliers.

Of real models a few channels of what the products are given are about 100 times as large as most
(SmoothQuant, arXiv 2211.10438). Here they are planted in what q, k, v, gate, up and down are given,
in the same channels of every layer: the largest is then 150 to 300 times its row's mean, 4 to 17
before (3 layers of Qwen3-0.6B). What reads a channel is as much smaller, so that the model computes
what it did: in bf16 to the last bit, as the factor is a power of two.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batches import Batch
from bench.folders import unfinished_beside
from bench.training_records import TrainingSettings
from bench.weights import Source, read_config

BASE_LEARNING_RATE = 3e-4
OUTLIER = 128.0
CHANNELS_PER_OUTLIER = 256
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose norms multiply by their weight


def make_bases(
    source: Source, settings: TrainingSettings, batches: Sequence[Batch], cache: Path, device: str,
    on_step: Callable[[], None],
) -> dict[str, Path]:  # fmt: skip
    """Return the folders of both bases, made in the cache where they are not there: "trained" on
    these batches, or without any the source's own weights, and the same with "outliers"."""
    rests_on = (source.folder, len(batches), settings, torch.__version__, device)
    place = cache.resolve() / "models" / hashlib.sha256(repr(rests_on).encode()).hexdigest()[:12]
    folders = {name: Path(f"{place}-{name}") for name in ("trained", "outliers")}
    if not batches:
        folders["trained"] = source.folder
    elif not folders["trained"].exists():
        _train(source.folder, folders["trained"], batches, device, on_step)
    if not folders["outliers"].exists():
        model = _load(folders["trained"], torch.bfloat16, device)
        plant_outliers(model)
        with unfinished_beside(folders["outliers"], is_folder=True) as unfinished:
            model.save_pretrained(unfinished)
    return folders


def checksum(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's weights."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _train(
    drawn: Path, folder: Path, batches: Sequence[Batch], device: str, on_step: Callable[[], None]
) -> None:
    """Train all weights of a checkpoint on these batches, and save them in bf16."""
    model = _load(drawn, torch.float32, device)
    optimizer = torch.optim.AdamW(model.parameters(), BASE_LEARNING_RATE, fused=True)
    # In 200 steps another order of sums becomes another base: losses of 3.1 to 3.7 in three.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for batch in batches:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(**batch.inputs(), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            on_step()
    finally:
        torch.use_deterministic_algorithms(False)
    with unfinished_beside(folder, is_folder=True) as unfinished:
        model.bfloat16().save_pretrained(unfinished)


def check_family(source: Source) -> None:
    """Raise ValueError if no outliers can be planted in such a model."""
    family = read_config(source).get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"--model {source.name}: outliers are planted in {', '.join(FAMILIES)}, not in {family}"
        )


@torch.no_grad()
def plant_outliers(model: Any) -> None:
    """Multiply channels of what a layer's products are given, and divide what reads them."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        of_attention = attention.q_proj, attention.k_proj, attention.v_proj
        _plant(layer.input_layernorm.weight, *of_attention)
        _plant(layer.post_attention_layernorm.weight, mlp.gate_proj, mlp.up_proj)
        _plant(mlp.up_proj.weight, mlp.down_proj)


def _plant(writer: Tensor, *readers: nn.Linear) -> None:
    channels = slice(0, None, CHANNELS_PER_OUTLIER)
    writer[channels] *= OUTLIER
    for reader in readers:
        reader.weight[:, channels] /= OUTLIER


def _load(folder: Path, dtype: torch.dtype, device: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # ours is shown
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": device}, local_files_only=True
    )

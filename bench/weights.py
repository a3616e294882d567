"""Base models on disk: what `--model` names, as a folder that every variant loads the same way.

    configs/NAME.json      an architecture; its weights are drawn once from a seed, into a cache
    a folder               a checkpoint saved with save_pretrained, with its tokenizer
    ORGANISATION/NAME      a model on the Hugging Face hub, downloaded to the hub's own cache

The time of a step does not depend on the values of the weights, so random ones measure the same
thing and need no download.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

DATA_TOKENIZER = Path(__file__).resolve().parent.parent / "data" / "tokenizer.json"


@dataclass(frozen=True)
class Source:
    """Where base weights come from.

    name: what the user asked for, as it is shown. weights: "random, seed 0" or "checkpoint".
    folder: the checkpoint's folder (for random weights, made by `materialize`).
    config: the architecture's JSON file, None for a checkpoint. tokenizer: its tokenizer.json.
    """

    name: str
    weights: str
    folder: Path
    config: Path | None
    tokenizer: Path


def resolve(model: str, cache: Path, seed: int) -> Source:
    """Say where `model` comes from, touching nothing but the hub's cache.

    Raises:
        ValueError: there is no such file, folder or hub model, or the folder lacks a part.
    """
    path = Path(model)
    if path.suffix == ".json":
        return _random_source(path, cache, seed)
    if not path.is_dir():
        if path.exists() or model.count("/") != 1 or model.startswith((".", "/", "~")):
            raise ValueError(
                f"--model {model}: no such folder; give a checkpoint's folder, an architecture "
                "such as configs/qwen2.5-3b.json, or a hub name such as Qwen/Qwen2.5-3B-Instruct"
            )
        path = _download(model)
    for part, found in (
        ("config.json", (path / "config.json").is_file()),
        ("tokenizer.json", (path / "tokenizer.json").is_file()),
        ("*.safetensors", any(path.glob("*.safetensors"))),
    ):
        if not found:
            raise ValueError(
                f"--model {model}: the folder has no {part}; save the model and its tokenizer "
                "there with save_pretrained"
            )
    return Source(model, "checkpoint", path.resolve(), None, path.resolve() / "tokenizer.json")


def _random_source(path: Path, cache: Path, seed: int) -> Source:
    try:
        config = json.loads(path.read_text())
        architecture = config["architectures"][0]
    except FileNotFoundError:
        known = ", ".join(sorted(f"configs/{p.name}" for p in path.parent.glob("*.json")))
        raise ValueError(f"--model {path}: no such file; there are: {known or 'none'}") from None
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise ValueError(
            f"--model {path}: not a model's configuration (JSON with 'architectures')"
        ) from None
    assert isinstance(architecture, str)
    tokenizer = DATA_TOKENIZER.read_bytes() if DATA_TOKENIZER.is_file() else b""
    digest = hashlib.sha256(path.read_bytes() + tokenizer).hexdigest()[:12]
    folder = cache / "models" / f"{path.stem}-seed{seed}-{digest}"
    return Source(
        path.stem, f"random, seed {seed}", folder.resolve(), path.resolve(), DATA_TOKENIZER
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except Exception as error:  # offline, unknown, gated: the hub's own first line says which
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--model {name}: could not be downloaded ({reason}); give a local folder, or an "
            "architecture such as configs/qwen2.5-3b.json that needs no download"
        ) from None


def materialize(source: Source, seed: int, device: str) -> None:
    """Draw the random weights of `source` and save them as a checkpoint, unless they are there.

    Matrices come from transformers' own initialisation. Biases and norm weights, which it sets to
    zeros and ones, get a little noise, so that a kernel that forgets one of them is found out.
    """
    if source.config is None or (source.folder / "config.json").is_file():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(**json.loads(source.config.read_text()))
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(source.tokenizer),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    source.folder.parent.mkdir(parents=True, exist_ok=True)
    # made beside its place and moved there whole, so that a half-written checkpoint is never loaded
    unfinished = Path(tempfile.mkdtemp(dir=source.folder.parent, prefix=".unfinished-"))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        os.replace(unfinished, source.folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise

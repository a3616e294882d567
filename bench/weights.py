"""Base models on disk: `--model` as a folder that every variant loads the same way.

    configs/NAME.json      an architecture; we draw its weights once, from a seed, into a cache
    a folder               a checkpoint saved with save_pretrained, with its tokenizer
    ORGANISATION/NAME      a model on the Hugging Face hub, downloaded to the hub's own cache

A step takes as long with random weights as with trained ones, to within 1% on an H200
(docs/runs/h200/weight_statistics.txt), and random ones need no download.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.folders import unfinished_beside

DATA_TOKENIZER = Path(__file__).resolve().parent.parent / "data" / "tokenizer.json"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """The origin of a model's base weights.

    name: its name for people. weights: "random, seed 0" or "checkpoint". folder: the checkpoint's
    folder; `materialize` makes that of random weights. config: the architecture's JSON file, None
    for a checkpoint. tokenizer: its tokenizer.json. digest: tells the user's own architecture files
    of one name apart.
    """

    name: str
    weights: str
    folder: Path
    config: Path | None
    tokenizer: Path
    digest: str = ""

    @property
    def label(self) -> str:
        """The model's name in results."""
        return f"{self.name}-{self.digest}" if self.digest else self.name

    def is_there(self) -> bool:
        """Return True if its weights exist: random ones may not be drawn yet."""
        return self.config is None or (self.folder / "config.json").is_file()

    def size_bytes(self) -> int:
        """Return the size of the weights' files, 0 if they are not drawn yet."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))


def resolve(model: str, cache: Path, seed: int) -> Source:
    """Return where `model` comes from. Writes nothing but the hub's cache.

    Raises ValueError for a missing file, folder or hub model, or a folder that lacks a part or has
    broken weights.
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
    for weights in sorted(path.glob("*.safetensors")):
        _check_whole(weights)
    return Source(model, "checkpoint", path.resolve(), None, path.resolve() / "tokenizer.json")


def _check_whole(weights: Path) -> None:
    """Raise ValueError if a file of weights was cut off or is another kind. Reads its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"--model {weights}: not a whole safetensors file ({error}); save it or download it "
            "again"
        ) from None


def _random_source(path: Path, cache: Path, seed: int) -> Source:
    if not path.is_file():
        known = ", ".join(sorted(f"configs/{p.name}" for p in CONFIGS.glob("*.json")))
        raise ValueError(f"--model {path}: no such file; there are: {known}")
    tokenizer = DATA_TOKENIZER.read_bytes() if DATA_TOKENIZER.is_file() else b""
    digest = hashlib.sha256(path.read_bytes() + tokenizer).hexdigest()[:12]
    folder = cache / "models" / f"{path.stem}-seed{seed}-{digest}"
    ours = CONFIGS / path.name
    is_ours = ours.is_file() and ours.read_bytes() == path.read_bytes()
    return Source(
        path.stem, f"random, seed {seed}", folder.resolve(), ours if is_ours else path.resolve(),
        DATA_TOKENIZER, "" if is_ours else digest[:6],
    )  # fmt: skip


def read_config(source: Source) -> dict[str, Any]:
    """Return the model's config.json, or raise ValueError if it is none or a size is wrong."""
    path = source.config or source.folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise ValueError(f"--model {path}: {reason}; give a model's configuration") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"--model {path}: not a model's configuration (JSON with a 'model_type')")
    for name in SIZES:
        size = config.get(name, 1)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"--model {path}: its {name} is {size!r}; wanted a number from 1 up")
    return config


def check_architecture(source: Source, targets: tuple[str, ...]) -> None:
    """Build the model without its weights, and raise ValueError if variants could not train it.

    transformers must know it as a causal decoder, with attention and `targets` that we can train
    and sizes that fit each other.
    """
    config = read_config(source)
    if config.get("quantization_config"):
        raise _untrainable(source, "its weights are quantised (quantization_config)")
    pad, rows = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(rows, int) and pad >= rows:
        raise _untrainable(source, f"its pad_token_id {pad} is beyond its vocab_size {rows}")
    model = _without_weights(source)
    if model.config.is_encoder_decoder:
        raise _untrainable(source, "it has an encoder")
    there = linear_names(model)
    if not set(there) & set(targets):
        has = f"its layers have {' '.join(there)}" if there else "its layers have no nn.Linear"
        raise _untrainable(source, f"none of {' '.join(targets)}: {has}")
    if problem := _misfit(model.config):
        raise _untrainable(source, problem)


def check_documents(source: Source) -> None:
    """Raise ValueError if vanilla PEFT would mix the documents of a row: in a convolution along the
    row, as all of transformers' recurrences and LFM2 have."""
    from torch.nn import Conv1d

    if any(isinstance(module, Conv1d) for module in _without_weights(source).modules()):
        raise ValueError(
            f"--documents: {source.name} has convolutions along a row, in which vanilla PEFT mixes "
            "its documents, so there is nothing to compare with; give rows without --documents"
        )


def _untrainable(source: Source, reason: str) -> ValueError:
    return ValueError(
        f"--model {source.name}: cannot be trained here ({reason}); give a causal decoder in bf16, "
        "such as configs/qwen2.5-3b.json"
    )


def _misfit(config: Any) -> str | None:
    """Return in words which sizes of a decoder are missing or do not fit each other."""
    from bench.floor import Shape

    try:
        shape = Shape.of(config)
    except AttributeError as error:
        return f"its configuration has no {error.name}"
    if shape.heads % shape.kv_heads:
        return f"{shape.heads} attention heads are no multiple of {shape.kv_heads} heads of k and v"
    if shape.head_dim % 2:
        return f"its heads have {shape.head_dim} channels, which RoPE cannot rotate in pairs"
    return None


def _architecture(source: Source) -> Any:
    """Return transformers' configuration of a model, or raise ValueError for an unknown one."""
    from transformers import AutoConfig  # takes seconds
    from transformers.utils import logging

    said = logging.get_verbosity()
    logging.set_verbosity_error()  # a vocabulary cut below eos_token_id trains
    try:
        return AutoConfig.for_model(**read_config(source))
    except Exception as error:  # of many kinds
        raise _not_taken(source, error) from None
    finally:
        logging.set_verbosity(said)


def _not_taken(source: Source, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200]
    return ValueError(f"--model {source.name}: transformers does not take it ({reason})")


def _without_weights(source: Source) -> Any:
    """Return the model on the meta device with our attention, or raise ValueError."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    config = _architecture(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _untrainable(source, f"{config.model_type} is no causal language model")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except Exception as error:  # of many kinds
        if "scaled_dot_product_attention" in str(error):
            reason = f"{config.model_type} has no scaled_dot_product_attention in transformers"
            raise _untrainable(source, reason) from None
        raise _not_taken(source, error) from None


def projections(source: Source) -> list[str]:
    """Return the names of a layer's linear modules, in the model's order."""
    return linear_names(_without_weights(source))


def linear_names(model: Any) -> list[str]:
    """Return the names of a model's linear modules but its head, each once."""
    import torch

    head = model.get_output_embeddings()
    linear = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    return list(dict.fromkeys(linear))


def discard(source: Source) -> str:
    """Delete random weights, which the same command draws again, and say so. Checkpoints stay."""
    if source.config is None or not source.is_there():
        return ""
    gigabytes = source.size_bytes() / 1e9
    shutil.rmtree(source.folder)
    return f"Deleted the random weights of {source.name} ({gigabytes:.1f} GB, {source.folder})."


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        parts = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=parts))
    except Exception as error:  # offline, unknown, gated: the hub's first line says which
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"--model {name}: could not be downloaded ({reason}); give a local folder, or an "
            "architecture such as configs/qwen2.5-3b.json that needs no download"
        ) from None


def materialize(source: Source, seed: int, device: str) -> None:
    """Draw the random weights of `source` and save them as a checkpoint, unless they exist.

    transformers initialises the matrices. It sets biases to zero and norm weights to one, so we add
    a little noise: otherwise a kernel could forget them unnoticed.
    """
    if source.config is None or source.is_there():
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
    with unfinished_beside(source.folder, is_folder=True) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)

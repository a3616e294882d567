"""TRL's trainers that compare a model with a reference: DPO, KTO and GRPO, on a tiny model."""

import math

import pytest
from cases.peft_models import ATTENTION, MLP, ids
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast

LORA = {"r": 8, "lora_alpha": 12, "target_modules": [*ATTENTION, *MLP]}
# What they log that no layer computes.
NOT_COMPUTED = ("runtime", "per_second", "learning_rate", "epoch", "step", "step_time", "flos")


def _text(tokens):
    return "".join(f" {token}" for token in tokens)


def _tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({str(token): token for token in range(96)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="1", eos_token="2", padding_side="left"
    )


def _pairs():
    """Three times two prompts, each with a chosen and a rejected completion, of several lengths."""
    return [
        {
            "prompt": _text(row[: 3 + i]), "chosen": _text(row[5 : 8 + i]),
            "rejected": _text(row[9 : 13 - i]),
        }
        for i, row in enumerate(ids("cpu").tolist())
    ] * 3  # fmt: skip


def _completions(pairs):
    return [
        {"prompt": one["prompt"], "completion": one[name], "label": name == "chosen"}
        for one in pairs
        for name in ("chosen", "rejected")
    ]


def _reward(completions, **_):
    return [float(sum(map(int, one.split())) % 7) for one in completions]


def trainer_of(kind, model, folder, **options):
    """Return TRL's trainer for a model with adapters, or for a base model, which it gives some."""
    trl = pytest.importorskip("trl", reason="wants trl, of dev/requirements/dev.txt")
    from datasets import Dataset

    settings = {
        "output_dir": str(folder), "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.1, "optim": "sgd",
        "use_cpu": model.device.type == "cpu", "bf16": False, "gradient_checkpointing": False,
        "save_strategy": "no",
    } | options  # fmt: skip
    given = {
        "processing_class": _tokenizer(),
        "peft_config": None if hasattr(model, "peft_config") else LoraConfig(**LORA),
    }
    pairs = _pairs()
    if kind == "DPO":
        args, data = trl.DPOConfig(**settings), Dataset.from_list(pairs)
        return trl.DPOTrainer(model, args=args, train_dataset=data, **given)
    if kind == "KTO":
        args, data = trl.KTOConfig(**settings), Dataset.from_list(_completions(pairs))
        return trl.KTOTrainer(model, args=args, train_dataset=data, **given)
    args = trl.GRPOConfig(num_generations=2, max_completion_length=3, beta=0.1, **settings)
    prompts = Dataset.from_list([{"prompt": one["prompt"]} for one in pairs])
    return trl.GRPOTrainer(model, _reward, args, train_dataset=prompts, **given)


def logged_by(trainer):
    """Train. Return what was logged in each step, as far as layers computed it."""
    trainer.train()
    return [
        {
            name: value
            for name, value in entry.items()
            if not name.endswith(NOT_COMPUTED) and not math.isnan(value)
        }
        for entry in trainer.state.log_history
    ]

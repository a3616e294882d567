"""TRL's trainers on a tiny model, with the data and settings that they need."""

import math

import pytest
from cases.peft_models import ATTENTION, MLP, ids
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast

LORA = {"r": 8, "lora_alpha": 12, "target_modules": [*ATTENTION, *MLP]}
# What they log that no layer computes.
NOT_COMPUTED = (
    "runtime", "per_second", "learning_rate", "epoch", "step", "step_time", "flos", "num_tokens",
)  # fmt: skip
TEMPLATE = (
    "{% for one in messages %}{{ ' ' }}{% if one.role == 'assistant' %}"
    "{% generation %}{{ one.content | trim }} 2{% endgeneration %}"
    "{% else %}{{ one.content | trim }}{% endif %}{% endfor %}"
)


def _text(tokens):
    return "".join(f" {token}" for token in tokens)


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({str(token): token for token in range(96)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="1", eos_token="2", padding_side="left",
        chat_template=TEMPLATE,
    )  # fmt: skip


def pairs():
    """Three times two prompts, each with a chosen and a rejected completion, of several lengths."""
    return [
        {
            "prompt": _text(row[: 3 + i]), "chosen": _text(row[5 : 8 + i]),
            "rejected": _text(row[9 : 13 - i]),
        }
        for i, row in enumerate(ids("cpu").tolist())
    ] * 3  # fmt: skip


def completions():
    """Return the same, one completion a row."""
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs()
        for name in ("chosen", "rejected")
    ]


def chats():
    """Return the same as messages of two turns."""
    turns = [("user", "prompt"), ("assistant", "chosen"), ("user", "prompt")]
    turns.append(("assistant", "rejected"))
    return [
        {"messages": [{"role": role, "content": pair[part]} for role, part in turns]}
        for pair in pairs()
    ]


def _reward(completions, **_):
    return [float(sum(map(int, completion.split())) % 7) for completion in completions]


def _without(rows, *names):
    return [{name: one for name, one in row.items() if name not in names} for row in rows]


SAMPLED = {"num_generations": 2, "max_completion_length": 3, "beta": 0.1}
KINDS = {  # their data, and what their configs and they themselves get
    "SFT": (lambda: _without(completions(), "label"), {}, {}),
    "Reward": (pairs, {}, {}),
    "DPO": (pairs, {}, {}),
    "KTO": (completions, {}, {}),
    "GRPO": (lambda: _without(pairs(), "chosen", "rejected"), SAMPLED, {"reward_funcs": _reward}),
}


def trainer_of(kind, model, folder, data=None, lora=None, **options):
    """Return TRL's trainer for a model with adapters, or for a base model, which it gives some."""
    trl = pytest.importorskip("trl", reason="wants trl, of dev/requirements/dev.txt")
    from datasets import Dataset

    usual, config, given = KINDS[kind]
    settings = {
        "output_dir": str(folder), "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.1, "optim": "sgd",
        "use_cpu": model.device.type == "cpu", "bf16": False, "gradient_checkpointing": False,
        "save_strategy": "no",
    } | config | options  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        model, args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=Dataset.from_list(usual() if data is None else data),
        processing_class=tokenizer(),
        peft_config=None if hasattr(model, "peft_config") else LoraConfig(**(LORA | (lora or {}))),
        **given,
    )  # fmt: skip


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

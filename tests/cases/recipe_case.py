"""Scripts that people train with, on a tiny model, each as a trainer that has not started."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases import layer_case
from cases.peft_models import base_model, set_weights
from cases.trl_case import chats, completions, tokenizer, trainer_of
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    Qwen2ForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from fused_lora import host_base

PACKED = {"packing": True, "max_length": 16, "pad_to_multiple_of": None}
ONE_LAYER = {"num_hidden_layers": 1, "head_dim": 32}  # packed sequences run in heads of 32


class Recipe(NamedTuple):
    """A script, and what we say of it: the page's cells.

    make: returns the trainer, given a device, a folder and how many steps it takes. loss: the
    function of ours that computes it, or the reason why none does. graphs: "yes", or the error of
    `graph_steps`.
    """

    make: Callable[[str, Any, int], Any]
    loss: str
    graphs: str
    notes: str


def _causal_lm(device):
    """A base model, which the trainer gives adapters with B = 0."""
    return base_model(device, attn_implementation="sdpa", **ONE_LAYER)


def _reward_model(device):
    config = _causal_lm(device).config
    config.num_labels, config.pad_token_id = 1, 1
    return set_weights(Qwen2ForSequenceClassification(config), device)


def _trl(kind, device, folder, steps, model=_causal_lm, **options):
    options = {"max_steps": steps, "pad_to_multiple_of": 8} | options
    return trainer_of(kind, model(device), folder, **options)


def _on_host(device, folder, steps):
    trainer = _trl("SFT", device, folder, steps)
    host_base(trainer.model, layers_on_gpu=0)
    return trainer


# --- transformers ---------------------------------------------------------------------------------


def _rows():
    """Return tokenized completions whose prompts have no labels."""
    tokens = tokenizer()
    rows = []
    for completion in completions():
        prompt, answer = (tokens(completion[part]).input_ids for part in ("prompt", "completion"))
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return rows


def _collate(rows):
    return DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=8)(rows)


def _adapted(device):
    model = layer_case.peft_model(device, config=ONE_LAYER)
    model.config.pad_token_id = model.generation_config.pad_token_id = 1
    return model


def _accuracy(predictions):
    guessed, labels = predictions.predictions[:, :-1].argmax(-1), predictions.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean())}


def _written(predictions):
    return {"token": float(predictions.predictions[:, -3:].mean())}


def _transformers(kind, metrics, device, folder, steps, **options):
    config = {Trainer: TrainingArguments, Seq2SeqTrainer: Seq2SeqTrainingArguments}[kind]
    args = config(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, optim="sgd",
        learning_rate=0.1, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
        eval_strategy="steps", eval_steps=2, use_cpu=device == "cpu", **options,
    )  # fmt: skip
    return kind(
        _adapted(device), args, _collate, train_dataset=_rows(), eval_dataset=_rows()[:2],
        compute_metrics=metrics,
    )  # fmt: skip


# --- loops ----------------------------------------------------------------------------------------


class _Loop:
    """A loop with a trainer's attributes."""

    def __init__(self, device, _, steps):
        self.model = _adapted(device)
        self.model.config.use_cache = False
        self.device, self.steps = device, steps
        self.state = SimpleNamespace(log_history=[])
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)
        rows = _rows() * 2
        self.loader = DataLoader(rows[: 2 * steps], batch_size=2, collate_fn=_collate)


class _AccelerateLoop(_Loop):
    def train(self):
        AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer may have left one
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=self.device == "cpu")
        model, optimizer, loader = accelerator.prepare(self.model, self.optimizer, self.loader)
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            self.state.log_history.append({"loss": accelerator.gather(loss.detach()).item()})


class _Lightning(_Loop):
    def train(self):
        wanted = "wants lightning, of dev/requirements/dev.txt"
        lightning = pytest.importorskip("lightning", reason=wanted)
        loop = self

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = loop.model

            def training_step(self, batch, _):
                loss = self.model(**batch).loss
                loop.state.log_history.append({"loss": loss.item()})
                return loss

            def configure_optimizers(self):
                return loop.optimizer

        lightning.Trainer(
            accelerator="cpu" if self.device == "cpu" else "gpu", devices=1, max_steps=self.steps,
            gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(Module(), self.loader)  # fmt: skip


# --- the table ------------------------------------------------------------------------------------

NO_TRAINER = "graph_steps needs a trainer with a model"
RECIPES = {
    "SFT, packed, completion-only loss": Recipe(
        partial(_trl, "SFT", gradient_checkpointing=True, **PACKED), "log_probs", "yes",
        "prompts and completions, TRL's own checkpointing",
    ),
    "SFT, packed, assistant-only loss": Recipe(
        partial(_trl, "SFT", data=chats(), assistant_only_loss=True, **PACKED), "log_probs", "yes",
        "messages",
    ),
    "SFT, NEFTune": Recipe(
        partial(_trl, "SFT", neftune_noise_alpha=5), "log_probs", "yes",
        "under a seed the noise is plain PEFT's",
    ),
    'SFT, `loss_type="dft"`': Recipe(
        partial(_trl, "SFT", loss_type="dft"), "log_probs", "yes", "weights each token's loss",
    ),
    "SFT, base in host memory": Recipe(
        _on_host, "log_probs", "yes", "[`host_base`](base.md) before `fuse`",
    ),
    "DPO": Recipe(
        partial(_trl, "DPO"), "log_probs", "yes", "the reference is the model without adapters",
    ),
    "KTO": Recipe(partial(_trl, "KTO"), "log_probs", "yes", "the same"),
    "GRPO": Recipe(partial(_trl, "GRPO"), "log_probs", "yes", "generates as PEFT does"),
    "reward model (`RewardTrainer`)": Recipe(
        partial(_trl, "Reward", model=_reward_model, lora={"modules_to_save": ["score"]}),
        "it has no lm_head, or PEFT computes its own loss from the logits (CPT)", "yes",
        "PEFT trains `score`; TRL's loss of two scores per pair",
    ),
    "`Trainer` with evaluation": Recipe(
        partial(_transformers, Trainer, _accuracy), "linear_cross_entropy", "yes",
        "evaluates in whole layers, with logits",
    ),
    "`Seq2SeqTrainer`, `predict_with_generate`": Recipe(
        partial(
            _transformers, Seq2SeqTrainer, _written, predict_with_generate=True,
            generation_max_length=20,
        ),
        "linear_cross_entropy", "yes", "generates as PEFT does",
    ),
    "accelerate's loop": Recipe(
        _AccelerateLoop, "linear_cross_entropy", NO_TRAINER,
        "accumulates, clips; [`GraphedStep`](api.md#graphedstep) is for loops",
    ),
    "Lightning": Recipe(_Lightning, "linear_cross_entropy", NO_TRAINER, "clips"),
}  # fmt: skip

"""The Trainer whose forward and backward are a CUDA graph (examples/train_hf_graph.py). It has the
same losses, gradient norms and weights as the plain Trainer."""

import copy

import pytest
import torch
from cases import layer_case
from cases.graph_case import assert_same, captured, graphed
from cases.peft_models import ids
from transformers import Trainer, TrainingArguments

from fused_lora import Fusion, fuse

pytest.importorskip("datasets", reason="wants datasets, which the example reads chats with")

from examples import train_hf_graph

# 13 rows make seven batches per epoch. The last has one row and gets its own update.
USUAL = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "learning_rate": 2**-7}
SETTINGS = {
    "a smaller last batch": {},
    "accumulation": {"gradient_accumulation_steps": 2, "num_train_epochs": 4},
    "accumulation of means, label smoothing": {
        "gradient_accumulation_steps": 2, "accepts_num_items": False, "label_smoothing_factor": 0.1
    },
    "bf16, evaluation": {"bf16": True, "eval_strategy": "steps", "eval_steps": 4},
    "resumed": {"save_strategy": "steps", "save_steps": 5},
}  # fmt: skip


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setattr(train_hf_graph, "GraphedStep", graphed)


def rows():
    """Return rows of one length whose last two tokens are padding."""
    tokens = torch.cat([ids("cpu", seed)[:, :7] for seed in range(7)])[:13]
    labels = tokens.clone()
    labels[:, -2:] = -100
    return [
        {"input_ids": row, "labels": labelled}
        for row, labelled in zip(tokens.tolist(), labels.tolist(), strict=True)
    ]


def train(kind, model, folder, resume=None, accepts_num_items=True, **options):
    """Train, and return the trainer, the numbers it logged and the weights it trained."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    settings = TrainingArguments(
        str(folder), logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=on_cpu,
        logging_nan_inf_filter=False, **({"save_strategy": "no"} | USUAL | options),
    )  # fmt: skip
    data = rows()
    trainer = kind(model, settings, train_dataset=data, eval_dataset=data[:4])
    trainer.model_accepts_loss_kwargs = accepts_num_items
    trainer.train(resume_from_checkpoint=resume)
    logged = [
        torch.tensor([entry[name] for entry in trainer.state.log_history if name in entry])
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss")
    ]
    return trainer, logged, [p.detach() for p in model.parameters() if p.requires_grad]


@pytest.mark.slow("a smaller last batch")
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_graphed_trainer_is_the_trainer(setting, tmp_path, device):
    options = SETTINGS[setting]
    dtype = torch.bfloat16 if options.get("bf16") else torch.float32
    plain = layer_case.peft_model(device, dtype=dtype, config={"num_hidden_layers": 1})
    model = copy.deepcopy(plain)
    trainer, logged, weights = train(train_hf_graph.GraphedTrainer, model, tmp_path, **options)
    # the smaller batch comes twice in two epochs, and is captured on its third call
    assert captured(trainer.step) == options.get("num_train_epochs", 2) // 2
    if setting == "resumed":
        again = copy.deepcopy(plain)
        from_five = {"resume": str(tmp_path / "checkpoint-5"), **options}
        trainer, logged, weights = train(
            train_hf_graph.GraphedTrainer, again, tmp_path, **from_five
        )
        assert captured(trainer.step) == 1
    _, wanted_logged, wanted = train(Trainer, plain, tmp_path / "plain", **options)
    assert len(wanted_logged[0]) > 7 and wanted_logged[1].gt(1.0).any()  # where it is clipped
    if dtype == torch.bfloat16 and device == "cuda":
        torch.testing.assert_close(logged, wanted_logged, rtol=2e-3, atol=0)
        return
    for got, want in zip([*logged, *weights], [*wanted_logged, *wanted], strict=True):
        assert_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", ["", "full", "offload"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_fused_model_in_the_graphed_trainer(bf16, checkpoint, tmp_path, device):
    """Run on a GPU: kernels in the interpreter are no operations that the recorded graph knows. In
    a graph the fused loss drops no ignored tokens, so we allow bf16's own error."""
    plain = layer_case.peft_model(device, dtype=torch.bfloat16 if bf16 else torch.float32)
    fusion = Fusion(layer=True, rms_norm=True, cross_entropy=True, checkpoint=checkpoint)
    fuse(plain, fusion)
    model = copy.deepcopy(plain)
    options = SETTINGS["accumulation"] | {"bf16": bf16, "learning_rate": 2**-12}
    _, (wanted, *_), _ = train(Trainer, plain, tmp_path, **options)
    trainer, (losses, *_), _ = train(train_hf_graph.GraphedTrainer, model, tmp_path, **options)
    assert captured(trainer.step) == 2 and len(losses) > 10
    torch.testing.assert_close(losses, wanted, rtol=2e-3 if bf16 else 1e-5, atol=0)


@pytest.mark.parametrize("settings", [{"fp16": True}])
def test_the_graphed_trainer_refuses_what_it_would_get_wrong(settings, tmp_path, device):
    model = layer_case.peft_model(device, config={"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="needs bf16 or fp32 on one GPU: use Trainer"):
        train(train_hf_graph.GraphedTrainer, model, tmp_path, **settings)

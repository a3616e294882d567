"""`graph_steps`: trainers whose decoder runs as CUDA graphs have the losses, metrics, gradient
norms and weights that they have without."""

import copy
import re
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from cases import layer_case
from cases.four_bit_case import EXPERTS, quantised
from cases.fp8_case import CONFIG as FP8_CONFIG
from cases.graph_case import WAITS, Recorded
from cases.peft_models import ids
from cases.reference import relative_error
from cases.trl_case import tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fused_lora import FilledRows, Fusion, fuse, graph_steps
from fused_lora.foreign.checkpointing import layers_of, policy_of
from fused_lora.step.graphed_module import GraphedModule
from fused_lora.step.replays import Replays

# 13 rows make seven batches an epoch. The last has one row and gets its own update.
USUAL = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "learning_rate": 2**-7}
KEPT = {
    "accumulation, evaluation": {
        "gradient_accumulation_steps": 2, "num_train_epochs": 4, "eval_strategy": "steps",
        "eval_steps": 3, "lr_scheduler_type": "cosine",
    },
    "resumed": {"save_strategy": "steps", "save_steps": 5},
}  # fmt: skip
SETTINGS = {
    "Trainer": KEPT | {
        "a smaller last batch": {},
        "means, label smoothing": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
        "bf16, checkpointing": {"bf16": True, "gradient_checkpointing": True},
        "stopped early": {"stop_after": 4},
    },
    "SFTTrainer": KEPT | {"packing": {"packing": True, "max_length": 16}},
    "DPOTrainer": KEPT | {
        "reference precomputed": {"precompute_ref_log_probs": True},
        "many lengths": {"pad_to_multiple_of": None, "max_length": 512},
    },
}  # fmt: skip
TRIED = [(kind, setting) for kind, settings in SETTINGS.items() for setting in settings]
LONGER = {"packing", "many lengths"}  # the rows of a graphed trainer
PARTS = {"prompt": slice(2), "chosen": slice(2, 5), "rejected": slice(4, None)}
# A resumed trainer divides the loss since then by all steps.
# TRL counts tokens from there, and the padding of rows that are filled up.
NOT_COMPUTED = ("runtime", "per_second", "total_flos", "train_loss", "num_tokens")


@pytest.fixture(autouse=True)
def recorded(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(GraphedModule, "_backend", Recorded)


class Before(TrainerCallback):
    """Change the model before each step."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, model=None, **_):
        self.change(model, state.global_step)


class Stop(TrainerCallback):
    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.after


def rows():
    """Return rows of one length whose first label and last two are ignored."""
    tokens = torch.cat([ids("cpu", seed)[:, :7] for seed in range(7)])[:13]
    labels = tokens.clone()
    labels[:, 0], labels[:, -2:] = -100, -100
    return [
        {"input_ids": row, "labels": labelled}
        for row, labelled in zip(tokens.tolist(), labels.tolist(), strict=True)
    ]


def trainer_of(kind, model, folder, **options):
    stop, change = options.pop("stop_after", None), options.pop("change", None)
    settings = {
        "output_dir": str(folder), "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "use_cpu": next(model.parameters()).device.type == "cpu", "bf16": False,
        "save_strategy": "no", "gradient_checkpointing": False,
    } | USUAL | options  # fmt: skip
    callbacks, data = [Stop(stop)] * bool(stop) + [Before(change)] * bool(change), rows()
    model.config.use_cache = False
    if kind == "Trainer":
        args = TrainingArguments(**settings)
        return Trainer(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
    settings.setdefault("pad_to_multiple_of", 4)  # of 7 to 12: two lengths, not all of them
    trl = pytest.importorskip("trl", reason="wants trl, of dev/requirements/dev.txt")
    from datasets import Dataset

    make, config = getattr(trl, kind), getattr(trl, kind.replace("Trainer", "Config"))
    if kind == "DPOTrainer":
        texts = [[f" {token}" for token in one["input_ids"]] for one in data]
        if settings["pad_to_multiple_of"] is None:
            texts = [one + texts[0] * (index % 4) for index, one in enumerate(texts)]
        data = [{name: "".join(text[part]) for name, part in PARTS.items()} for text in texts]
    data = Dataset.from_list(data)
    return make(
        model, args=config(**settings), processing_class=tokenizer(), callbacks=callbacks,
        train_dataset=data, eval_dataset=data.select(range(4)),
    )  # fmt: skip


def train(kind, model, folder, is_graphed, resume=None, **options):
    """Train, and return the graphed steps, what was logged and the weights that were trained."""
    trainer = trainer_of(kind, model, folder, **options)
    steps = graph_steps(trainer) if is_graphed else None
    trainer.train(resume_from_checkpoint=resume)
    logged = [
        {name: one for name, one in entry.items() if not name.endswith(NOT_COMPUTED)}
        for entry in trainer.state.log_history
    ]
    return steps, logged, [p.detach() for p in model.parameters() if p.requires_grad]


def assert_alike(got, want, start, bound):
    """Bit by bit if bound is 0. A GPU may sum in another order from one run to the next, and turn
    the ranks of equal numbers, which an accuracy counts, and the direction of a tiny update.

    start: the model before it was trained.
    """
    (_, logged, weights), (_, wanted_logged, wanted) = got, want
    assert [one.keys() for one in logged] == [one.keys() for one in wanted_logged]
    for entry, wanted_entry in zip(logged, wanted_logged, strict=True):
        counted = {name: one for name, one in wanted_entry.items() if bound and "accurac" in name}
        assert entry | counted == pytest.approx(wanted_entry, rel=bound, abs=bound)
    before = [parameter.detach() for parameter in start.parameters() if parameter.requires_grad]
    assert len(weights) == len(wanted) == len(before)
    for one, wanted_one, was in zip(weights, wanted, before, strict=True):
        moved, wanted_moved = one - was, wanted_one - was
        assert wanted_moved.any()
        error = relative_error(moved, wanted_moved) if bound else (moved - wanted_moved).abs().max()
        assert error <= 100 * bound


@pytest.mark.slow("Trainer-accumulation, evaluation", "DPOTrainer-accumulation, evaluation")
@pytest.mark.parametrize(("kind", "setting"), TRIED)
def test_graphed_steps_are_the_trainers(kind, setting, tmp_path, device):
    options = dict(SETTINGS[kind][setting])
    dtype = torch.bfloat16 if options.get("bf16") else torch.float32
    plain = layer_case.peft_model(device, dtype=dtype, config={"num_hidden_layers": 1})
    done = []
    for is_graphed in (True, False):
        folder, model = tmp_path / str(is_graphed), copy.deepcopy(plain)
        done.append(train(kind, model, folder, is_graphed, **options))
        if setting == "resumed":
            from_five, again = str(folder / "checkpoint-5"), copy.deepcopy(plain)
            done[-1] = train(kind, again, folder, is_graphed, resume=from_five, **options)
        if is_graphed:
            assert done[-1][0].decoder.captured and not done[-1][0].decoder.told
    if device == "cpu" and setting not in LONGER:
        assert_alike(*done, plain, 0.0)
    else:
        assert_alike(*done, plain, 2e-3 if options.get("bf16") else 1e-4)


def train_in_turns(model, step):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(("lora_A" if step % 2 else "lora_B") in name)


def turn_dropout_off(model, step):
    for module in model.modules():
        if type(module) is torch.nn.Dropout and step == 5:
            module.p = 0.0


def replace_a_dropout(model, step):
    if step == 5:
        layer_case.layer_of(model).mlp.up_proj.lora_dropout["default"] = torch.nn.Dropout(0.2)


def scale(model, step):
    layer_case.layer_of(model).mlp.up_proj.set_scale("default", 1 + (step > 4))


@pytest.mark.parametrize(
    ("change", "captured"),
    [(train_in_turns, 2), (turn_dropout_off, 2), (scale, 2), (replace_a_dropout, 1)],
)
def test_what_a_callback_changes_has_a_graph_of_its_own(change, captured, tmp_path, device):
    plain = layer_case.peft_model(device, config={"num_hidden_layers": 1}, lora_dropout=0.5)
    (steps, logged, _), (_, wanted, _) = (
        train("Trainer", copy.deepcopy(plain), tmp_path, is_graphed, change=change)
        for is_graphed in (True, False)
    )
    assert steps.decoder.captured == captured and not steps.decoder.told
    for entry, wanted_entry in zip(logged, wanted, strict=True):
        assert entry == pytest.approx(wanted_entry, rel=0.0 if device == "cpu" else 1e-4)


def test_a_loss_that_is_no_number_is_logged_as_the_trainer_does(tmp_path, device):
    """It logs the mean of those before it, and so do we, without a wait for each loss."""
    done = []
    for is_graphed in (True, False):
        model = layer_case.peft_model(device, config={"num_hidden_layers": 1})
        losses = iter([0, float("nan"), 0, float("inf"), *[0] * 20])
        trainer = trainer_of("Trainer", model, tmp_path, logging_steps=3)
        trainer.compute_loss_func = lambda outputs, labels, losses=losses, **_: (
            outputs.logits.square().mean() + next(losses)
        )
        given = trainer.args
        steps = graph_steps(trainer) if is_graphed else None
        trainer.train()
        done.append([entry.get("loss") for entry in trainer.state.log_history])
        assert given.logging_nan_inf_filter
        assert not is_graphed or steps.decoder.captured == 1
    assert done[0] == done[1] and len(done[0]) > 4


def test_a_packed_step_launches_its_decoder_before_the_host_waits(tmp_path, device, monkeypatch):
    done, run = [], Replays.run

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if WAITS & {*func.tags}:
                done.append("wait")
            return func(*args, **(kwargs or {}))

    def watched_run(*given):
        done.append("launch")
        return run(*given)

    def watched_step(*given):
        done.clear()
        with Watch():
            return steps.training_step(*given)

    model = layer_case.peft_model(device, config={"num_hidden_layers": 1})
    trainer = trainer_of("SFTTrainer", model, tmp_path, packing=True, max_length=16)
    fuse(model)
    steps = graph_steps(trainer)
    monkeypatch.setattr(Replays, "run", watched_run)
    trainer.training_step = watched_step
    trainer.train()
    assert steps.decoder.captured and done[:2] == ["launch", "wait"]
    assert trainer.get_train_dataloader()._non_blocking  # nor did it wait to copy the batch


def test_remove_leaves_the_trainer_as_it_was(tmp_path, device):
    model = layer_case.peft_model(device, config={"num_hidden_layers": 1})
    options = {"packing": True, "max_length": 1000, "gradient_checkpointing": True}
    trainer = trainer_of("SFTTrainer", model, tmp_path, **options)
    before = dict(vars(trainer)) | {"loading": trainer.accelerator.dataloader_config}
    switches = [dict(vars(layer)) for _, layer in layers_of(model)]
    graph_steps(trainer)
    steps = graph_steps(trainer)  # instead of the first
    assert isinstance(trainer.data_collator, FilledRows)
    assert trainer.data_collator.tokens == 256  # eight lengths up to two rows of 1,000
    assert "no step has run yet" in str(steps)
    assert trainer.args is not before["args"]
    policy = policy_of(layer_case.layer_of(model))
    assert policy is not None and policy.policy == "offload"
    steps.remove()
    assert vars(trainer) | {"loading": trainer.accelerator.dataloader_config} == before
    assert [dict(vars(layer)) for _, layer in layers_of(model)] == switches


@pytest.mark.parametrize("change", ["subclass", "instance", "class"])
def test_a_collator_that_is_not_trls_own_keeps_its_labels(change, tmp_path, device, monkeypatch):
    model = layer_case.peft_model(device, config={"num_hidden_layers": 1})
    trainer = trainer_of("SFTTrainer", model, tmp_path, packing=True, max_length=16)
    cls, collate = type(trainer.data_collator), type(trainer.data_collator).torch_call
    own = cls(pad_token_id=1, padding_free=True)

    def masked(self, examples):
        batch = collate(self, examples)
        batch["labels"][batch["input_ids"] % 2 == 0] = -100
        return batch

    if change == "subclass":
        own = type("OddTokens", (cls,), {"torch_call": masked})(pad_token_id=1, padding_free=True)
    elif change == "instance":
        own.torch_call = lambda examples: masked(own, examples)
    else:
        monkeypatch.setattr(cls, "torch_call", masked)
    trainer.data_collator = own
    graph_steps(trainer)
    assert type(trainer.data_collator) is type(own)
    batch = next(iter(trainer.get_train_dataloader()))
    is_even = batch["input_ids"] % 2 == 0
    assert (batch["labels"][is_even] == -100).all() and (batch["labels"] != -100).any()


def with_args(**args):
    return lambda trainer: vars(trainer.args).update(args)


def without_decoder(trainer):
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=96)
    trainer.model = GPT2LMHeadModel(config).to(trainer.args.device)


NOT_GRAPHED = {  # what a trainer is given, and why it has no graphs
    "another device": (lambda trainer: trainer.model.to("meta"), "the model is on meta, not on"),
    "two devices": (
        lambda trainer: trainer.model.get_base_model().lm_head.to("meta"),
        "the model is on .*, meta, not on one",
    ),
    "two GPUs": (with_args(_n_gpu=2), "it needs one GPU for each process: start them with"),
    # as a trainer sets them if accelerate's plugins are on, which takes ranks
    "FSDP": (lambda trainer: setattr(trainer, "is_fsdp_enabled", True), "FSDP and DeepSpeed move"),
    "DeepSpeed": (
        lambda trainer: setattr(trainer, "is_deepspeed_enabled", True), "FSDP and DeepSpeed move",
    ),
    "torch_compile": (with_args(torch_compile=True), "torch_compile=True captures its own graphs"),
    "activation_offloading": (
        with_args(activation_offloading=True),
        "activation_offloading=True copies within a forward",
    ),
    "no decoder": (without_decoder, "the model has no decoder with embed_tokens, layers and norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_GRAPHED)
def test_a_trainer_that_cannot_have_graphs_is_left_alone(name, tmp_path, device):
    change, reason = NOT_GRAPHED[name]
    model = layer_case.peft_model(device, config={"num_hidden_layers": 1})
    trainer = trainer_of("SFTTrainer", model, tmp_path)
    change(trainer)
    before = dict(vars(trainer))
    with pytest.warns(UserWarning, match=f"all steps run eagerly: {reason}"):
        steps = graph_steps(trainer)
    assert vars(trainer) == before and re.search(reason, str(steps))
    steps.remove()
    assert vars(trainer) == before


@pytest.mark.parametrize(
    ("trainer", "options", "error"),
    [
        (None, {}, "graph_steps needs a trainer with a model, got NoneType"),
        (Mock(model=torch.nn.Linear(1, 1)), {"max_graphs": 0}, "max_graphs of at least 1, got 0"),
    ],
)
def test_graph_steps_says_what_it_needs(trainer, options, error):
    with pytest.raises(ValueError, match=error):
        graph_steps(trainer, **options)


def train_fused(kind, plain, folder, fusion, is_graphed, **options):
    model = copy.deepcopy(plain)
    fuse(model, fusion)
    return train(kind, model, folder, is_graphed, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "bf16", "checkpoint", "weights"),
    [
        *product(SETTINGS, [False, True], ["", "full", "offload"], [""]),
        # a reference pass takes the memory that layers in 4 bits share
        *product(["DPOTrainer"], [True], ["", "full"], ["4 bits", "FP8", "experts", "DoRA"]),
    ],
)
def test_a_fused_model_in_graphed_steps(kind, bf16, checkpoint, weights, tmp_path, device):
    dtype = torch.bfloat16 if bf16 else torch.float32
    change = {
        "4 bits": {"change": quantised}, "FP8": {"config": FP8_CONFIG}, "experts": EXPERTS,
        "DoRA": {"use_dora": True},
    }.get(weights, {})  # fmt: skip
    plain = layer_case.peft_model(device, **{"dtype": dtype} | change)
    options = KEPT["accumulation, evaluation"] | {"bf16": bf16, "learning_rate": 2**-12}
    if weights == "experts":  # a graph does not return what the routers' loss takes
        options["router_aux_loss_coef"] = 0.0
    fusion = Fusion(
        layer=weights != "experts", mlp=weights == "experts", rms_norm=True, checkpoint=checkpoint,
        fp8=weights == "FP8",
    )  # fmt: skip
    done = [
        train_fused(kind, plain, tmp_path, fusion, is_graphed, **options)
        for is_graphed in (True, False)
    ]
    assert done[0][0].decoder.captured and not done[0][0].decoder.told
    # the reference pass of DPO compares log-probabilities that differ by little
    assert_alike(*done, plain, 5e-3 if bf16 else 1e-4)

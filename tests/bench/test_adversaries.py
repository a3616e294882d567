"""Variants that cheat, each planted in the real harness: none may come out "ok"."""

import time
from itertools import count

import example_results as example
import msgspec
import pytest
import torch
from rehearsal_case import WITHOUT_GPU, plan_of

import models
import trainer
from bench import cells, experiment
from fused_lora import unfuse
from fused_mlp import LoRA_MLP
from variants import Lora

pytestmark = WITHOUT_GPU
SEQ_LEN, STEPS = 16, 4


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adversaries")
    plan = plan_of(folder, "--seq-lens", str(SEQ_LEN), "--steps", str(STEPS))
    cells.prepare_run(lambda message: None, plan)
    return plan


@pytest.fixture
def measure(plan, monkeypatch):
    """Measure a variant of which `cheat` has changed the built model; returns its cell."""

    def measured(cheat=lambda built: None, variant="vanilla_peft"):
        build = models.build

        def cheating(*arguments):
            built = build(*arguments)
            cheat(built)
            return built

        sent = []
        with monkeypatch.context() as patch:
            patch.setattr(models, "build", cheating)
            cells.measure_cells(sent.append, plan, variant, [(1, SEQ_LEN)])
        return next(message["cell"] for message in sent if "cell" in message)

    return measured


def mlps(built):
    return [module for name, module in built.model.named_modules() if name.endswith(".mlp")]


def adapters(built, which=".lora_"):
    return [p for name, p in built.model.named_parameters() if which in name]


def assert_caught(cell, status, words):
    assert cell.status == status, cell.error
    assert words in cell.error
    assert status == "error" or not cell.step_ms, "it was timed"


# --- wrong results: the gate, before anything is timed --------------------------------------------


def stale_output_buffer(built):
    """The first call's output is right and comes back from every later one."""
    for mlp in mlps(built):
        kept = []

        def stale(x, forward=mlp.forward, kept=kept):
            output = forward(x)
            kept.append(output.detach())
            return output + (kept[0] - output).detach()

        mlp.forward = stale


def one_gradient_scaled_by_a_tenth(built):
    adapters(built)[0].register_hook(lambda gradient: 1.1 * gradient)


def dA_that_is_never_computed(built):
    for parameter in adapters(built, ".lora_A."):
        parameter.register_hook(torch.zeros_like)


def adapters_that_are_not_trained(built):
    for parameter in adapters(built, ".lora_A."):
        parameter.requires_grad_(False)


@pytest.mark.parametrize(
    ("cheat", "words"),
    [
        (stale_output_buffer, "losses"),
        (one_gradient_scaled_by_a_tenth, ".lora_"),
        (dA_that_is_never_computed, "lora_A"),
        (adapters_that_are_not_trained, "trains other parameters"),
    ],
)
def test_a_wrong_result_is_not_timed(measure, cheat, words):
    assert_caught(measure(cheat), "parity_failed", words)


def test_an_input_that_its_function_has_saved_is_written_in_place(measure, monkeypatch):
    """Behind autograd's back, as a Triton kernel can."""
    forward = LoRA_MLP.forward

    def overwrite(ctx, x, *others):
        output = forward(ctx, x, *others)
        x.data.mul_(0.5)
        return output

    monkeypatch.setattr(LoRA_MLP, "forward", staticmethod(overwrite))
    assert_caught(measure(variant="fused_mlp"), "parity_failed", ".lora_")


# --- steps that did not do the work that their times are shown for --------------------------------


def batches_that_lose_their_labels(built):
    calls = count(1)

    def lighten(module, arguments, inputs):
        if next(calls) > 4:  # the gate's two, the warm-up and a timed step
            inputs["labels"][:, 3:] = -100

    built.model.register_forward_pre_hook(lighten, with_kwargs=True)


def loss_that_is_no_number(built):
    calls = count(1)

    def hook(module, arguments, output):
        if next(calls) > 4:  # the gate's two, the warm-up and a timed step
            output.loss = output.loss * float("nan")
        return output

    built.model.register_forward_hook(hook)


class LazyLoss(torch.Tensor):
    def item(self):
        time.sleep(0.05)
        return super().item()


def sleep_outside_the_marks(built):
    def hook(module, arguments, output):
        output.loss = output.loss.as_subclass(LazyLoss)
        return output

    built.model.register_forward_hook(hook)


def false_out_of_memory(built):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")

    built.model.register_forward_pre_hook(refuse)


def all_mlps_fall_back_to_peft(built):
    for mlp in mlps(built):
        unfuse(mlp)


def all_mlps_but_one_fall_back_to_peft(built):
    unfuse(mlps(built)[1])


@pytest.mark.parametrize(
    ("cheat", "variant", "words"),
    [
        (batches_that_lose_their_labels, "vanilla_peft", "batches were changed"),
        (loss_that_is_no_number, "vanilla_peft", "the loss of step 2 is nan"),
        (sleep_outside_the_marks, "vanilla_peft", "where the marks do not see it"),
        (false_out_of_memory, "vanilla_peft", "the allocator never failed"),
        (all_mlps_fall_back_to_peft, "fused_mlp", "LoRA_MLPBackward ran 0 times"),
        (all_mlps_but_one_fall_back_to_peft, "fused_mlp", "LoRA_MLPBackward ran 1 times"),
    ],
)
def test_other_work_than_was_asked_for_is_an_error(measure, cheat, variant, words):
    assert_caught(measure(cheat, variant), "error", words)


def test_work_that_goes_on_after_the_last_mark(measure, monkeypatch):
    """As another stream's does: only the synchronisation waits for it."""
    monkeypatch.setattr(trainer.WallClock, "synchronize", lambda self: time.sleep(0.05))
    assert_caught(measure(), "error", "where the marks do not see it")


def test_an_optimizer_step_that_is_skipped(measure, monkeypatch):
    class Lazy(torch.optim.AdamW):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            if self.calls % 3:
                super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Lazy)
    assert_caught(measure(), "error", f"of {STEPS} timed steps")


def test_an_optimizer_that_changes_nothing(measure, monkeypatch):
    monkeypatch.setattr(cells, "LEARNING_RATE", 0.0)
    assert_caught(measure(), "error", "are what they were before training")


def test_losses_that_leave_vanillas(measure):
    """A variant that passes the gate and every audit, and then trains on something else."""
    vanilla = measure()  # honest
    assert vanilla.status == "ok" and len(vanilla.step_ms) == STEPS, vanilla.error
    other = msgspec.structs.replace(vanilla, losses=list(vanilla.losses))
    results = example.empty()
    results.add(vanilla)
    experiment.check_losses(results, other)
    assert (other.status, other.loss_gap) == ("ok", 0.0)

    other.losses[2] *= 1.004
    masked = msgspec.structs.replace(other, loss_gap=None)
    results.experiment.lora = Lora(dropout=0.1)  # of which each variant has masks of its own
    experiment.check_losses(results, masked)
    assert (masked.status, masked.loss_gap) == ("ok", None)
    results.experiment.lora = Lora()
    experiment.check_losses(results, other)
    assert other.status == "parity_failed"
    assert "0.40%" in other.error


def test_losses_without_checkpointing_are_held_against_vanilla_with_it_where_there_is_no_other():
    results = example.empty()
    results.add(example.timed_cell("vanilla_peft", 64, 1, [1.0, 1.0]))
    alone = example.timed_cell("fused_all_no_checkpointing", 64, 1, [1.0, 1.0], loss_gap=None)
    alone.losses[1] = 2.6
    experiment.check_losses(results, alone)
    assert alone.status == "parity_failed" and alone.loss_gap == pytest.approx(0.04)
    own = example.timed_cell("vanilla_peft_no_checkpointing", 64, 1, [1.0, 1.0], losses=[2.5, 2.6])
    results.add(own)  # which is nearer
    again = example.timed_cell("fused_all_no_checkpointing", 64, 1, [1.0, 1.0], loss_gap=None)
    again.losses[1] = 2.6
    experiment.check_losses(results, again)
    assert (again.status, again.loss_gap) == ("ok", 0.0)

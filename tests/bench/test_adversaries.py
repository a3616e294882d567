"""Variants that cheat, planted in the real harness: none may come out "ok"."""

import threading
import time
from itertools import count
from types import SimpleNamespace

import msgspec
import pytest
import torch
from cases import example_results as example
from cases.rehearsal_case import WITHOUT_GPU, measured_cells, plan_of

import models
import trainer
from bench import audit, cells, preparing
from fused_lora import unfuse
from fused_mlp import LoRA_MLP
from variants import Lora

pytestmark = WITHOUT_GPU
SEQ_LEN, STEPS = 16, 4


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adversaries")
    plan = plan_of(folder, "--seq-lens", str(SEQ_LEN), "--steps", str(STEPS))
    preparing.prepare_run(lambda message: None, plan)
    return plan


@pytest.fixture
def measure(plan, monkeypatch):
    """Return a function that measures a variant in which `cheat` has changed something."""

    def measured(cheat=lambda built, patch: None, variant="vanilla_peft"):
        build = models.build

        def cheating(*arguments):
            built = build(*arguments)
            cheat(built, monkeypatch)
            return built

        monkeypatch.setattr(models, "build", cheating)
        (cell,) = measured_cells(plan, variant, (1, SEQ_LEN))
        return cell

    return measured


def mlps(built):
    return [module for name, module in built.model.named_modules() if name.endswith(".mlp")]


def adapters(built, which=".lora_"):
    return [p for name, p in built.model.named_parameters() if which in name]


# --- wrong results: the gate, before anything is timed --------------------------------------------


def stale_output_buffer(built, patch):
    """Return the first call's output from every later call."""
    for mlp in mlps(built):
        kept = []

        def stale(x, forward=mlp.forward, kept=kept):
            output = forward(x)
            kept.append(output.detach())
            return output + (kept[0] - output).detach()

        mlp.forward = stale


def one_gradient_scaled_by_a_tenth(built, patch):
    adapters(built)[0].register_hook(lambda gradient: 1.1 * gradient)


def dA_that_is_never_computed(built, patch):
    for parameter in adapters(built, ".lora_A."):
        parameter.register_hook(torch.zeros_like)


def adapters_that_are_not_trained(built, patch):
    for parameter in adapters(built, ".lora_A."):
        parameter.requires_grad_(False)


def saved_input_written_in_place(built, patch):
    """Write behind autograd's back, as a Triton kernel can."""
    forward = LoRA_MLP.forward

    def overwrite(ctx, x, *others):
        output = forward(ctx, x, *others)
        x.data.mul_(0.5)
        return output

    patch.setattr(LoRA_MLP, "forward", staticmethod(overwrite))


WRONG = [
    (stale_output_buffer, "vanilla_peft", "as far from fp32"),
    (one_gradient_scaled_by_a_tenth, "vanilla_peft", ".lora_"),
    (dA_that_is_never_computed, "vanilla_peft", "lora_A"),
    (adapters_that_are_not_trained, "vanilla_peft", "trains other parameters"),
    (saved_input_written_in_place, "fused_mlp", ".lora_"),
]

# --- steps that did other work than their times stand for -----------------------------------------

EARLIER_CALLS = 4  # the gate's two, the warm-up and a timed step


def batches_that_lose_their_labels(built, patch):
    calls = count(1)

    def lighten(module, arguments, inputs):
        if next(calls) > EARLIER_CALLS:
            inputs["labels"][:, 3:] = -100

    built.model.register_forward_pre_hook(lighten, with_kwargs=True)


def loss_that_is_no_number(built, patch):
    calls = count(1)

    def hook(module, arguments, output):
        if next(calls) > EARLIER_CALLS:
            output.loss = output.loss * float("nan")
        return output

    built.model.register_forward_hook(hook)


class LazyLoss(torch.Tensor):
    def item(self):
        time.sleep(0.02)
        return super().item()


def sleep_outside_the_marks(built, patch):
    def hook(module, arguments, output):
        output.loss = output.loss.as_subclass(LazyLoss)
        return output

    built.model.register_forward_hook(hook)


def side_stream_that_nobody_waits_for(built, patch):
    """Keep working as such a stream would: only the synchronisation waits for it."""
    patch.setattr(trainer.WallClock, "synchronize", lambda self: time.sleep(0.02))


def thread_that_works_after_the_last_mark(built, patch):
    """Begin in the update, and work until long after the step."""

    x = torch.ones(256, 256)

    def work(until):
        while time.monotonic() < until:
            x @ x

    class Threaded(torch.optim.AdamW):
        def step(self, closure=None):
            threading.Thread(target=work, args=(time.monotonic() + 0.5,), daemon=True).start()
            super().step(closure)

    patch.setattr(torch.optim, "AdamW", Threaded)


def elapsed_time_that_is_not_torchs(built, patch):
    elapsed_time = torch.cuda.Event.elapsed_time
    patch.setattr(torch.cuda.Event, "elapsed_time", lambda *marks: 0.96 * elapsed_time(*marks))


def cached_result_of_a_repeated_input(built, patch):
    """Take the loss and the gradients of a batch that the warm-up has seen from there."""
    forward, trained, kept = built.model.forward, adapters(built), {}

    def cached(input_ids, **inputs):
        key = tuple(input_ids.flatten().tolist())
        if key not in kept:
            loss = forward(input_ids=input_ids, **inputs).loss
            kept[key] = loss.detach(), torch.autograd.grad(loss, trained)
        loss, gradients = kept[key]
        zeros = ((p - p.detach()) * g for p, g in zip(trained, gradients, strict=True))
        return SimpleNamespace(loss=loss + sum(zero.sum() for zero in zeros))

    built.model.forward = cached


def false_out_of_memory(built, patch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")

    built.model.register_forward_pre_hook(refuse)


def all_mlps_fall_back_to_peft(built, patch):
    for mlp in mlps(built):
        unfuse(mlp)


def all_mlps_but_one_fall_back_to_peft(built, patch):
    unfuse(mlps(built)[1])


def optimizer_step_that_is_skipped(built, patch):
    class Lazy(torch.optim.AdamW):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            if self.calls % 3:
                super().step(closure)

    patch.setattr(torch.optim, "AdamW", Lazy)


def optimizer_that_changes_nothing(built, patch):
    patch.setattr(cells, "LEARNING_RATE", 0.0)


OTHER_WORK = [
    (batches_that_lose_their_labels, "vanilla_peft", "batches were changed"),
    (loss_that_is_no_number, "vanilla_peft", "the loss of step 2 is nan"),
    (sleep_outside_the_marks, "vanilla_peft", "where the marks do not see it"),
    (side_stream_that_nobody_waits_for, "vanilla_peft", "where the marks do not see it"),
    (thread_that_works_after_the_last_mark, "vanilla_peft", "after its last mark"),
    (elapsed_time_that_is_not_torchs, "vanilla_peft", "Event.elapsed_time"),
    (cached_result_of_a_repeated_input, "vanilla_peft", "exactly"),
    (false_out_of_memory, "vanilla_peft", "the allocator never failed"),
    (all_mlps_fall_back_to_peft, "fused_mlp", "LoRA_MLPBackward ran 0 times"),
    (all_mlps_but_one_fall_back_to_peft, "fused_mlp", "LoRA_MLPBackward ran 1 times"),
    (optimizer_step_that_is_skipped, "vanilla_peft", f"of {STEPS} timed steps"),
    (optimizer_that_changes_nothing, "vanilla_peft", "what they were before training"),
]


@pytest.mark.slow(
    "stale_output_buffer-vanilla_peft-as far from fp32", "batches_that_lose_their_labels",
    "thread_that_works_after_the_last_mark", "elapsed_time_that_is_not_torchs",
    "cached_result_of_a_repeated_input",
)  # fmt: skip
@pytest.mark.parametrize(("cheat", "variant", "words"), [*WRONG, *OTHER_WORK])
def test_a_cheat_is_named_and_a_wrong_result_is_not_timed(measure, cheat, variant, words):
    cell = measure(cheat, variant)
    is_wrong = (cheat, variant, words) in WRONG
    assert cell.status == ("parity_failed" if is_wrong else "error") and words in cell.error
    assert not (is_wrong and cell.step_ms)


# --- losses, compared with vanilla's --------------------------------------------------------------


def test_losses_that_leave_vanillas(measure):
    """Pass the gate and every audit, then train on something else."""
    vanilla = measure()  # honest
    assert vanilla.status == "ok" and len(vanilla.step_ms) == STEPS, vanilla.error
    other = msgspec.structs.replace(vanilla, losses=list(vanilla.losses))
    results = example.empty()
    results.add(vanilla)
    audit.check_losses(results, other)
    assert (other.status, other.loss_gap) == ("ok", 0.0)

    other.losses[2] *= 1.004
    masked = msgspec.structs.replace(other, loss_gap=None)
    results.experiment.lora = Lora(dropout=0.1)  # each variant draws its own masks
    audit.check_losses(results, masked)
    assert (masked.status, masked.loss_gap) == ("ok", None)
    results.experiment.lora = Lora()
    audit.check_losses(results, other)
    assert other.status == "parity_failed"
    assert "0.40%" in other.error


def test_losses_without_checkpointing_are_held_against_vanilla_with_it_where_there_is_no_other():
    results = example.empty()

    def timed(variant, loss, number=1):
        losses = {"losses": [2.5, loss], "loss_gap": None}
        return example.timed_cell(variant, 64, number, [1.0, 1.0], **losses)

    results.add(timed("vanilla_peft", 2.5))
    audit.check_losses(results, alone := timed("fused_all_no_checkpointing", 2.6, 2))
    assert alone.status == "parity_failed" and alone.loss_gap == pytest.approx(0.04)
    results.add(timed("vanilla_peft_no_checkpointing", 2.6))  # which is nearer
    audit.check_losses(results, again := timed("fused_all_no_checkpointing", 2.6))
    assert (again.status, again.loss_gap) == ("ok", 0.0)

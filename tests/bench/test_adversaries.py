"""Variants that cheat, each planted in the real harness: none may come out "ok"."""

import time

import example_results as example
import pytest
import torch
from rehearsal_case import WITHOUT_GPU

import models
import trainer
from bench import cells, experiment, options
from bench import plan as planning
from fused_lora import unfuse
from fused_mlp import LoRA_MLP

pytestmark = WITHOUT_GPU
SEQ_LEN, STEPS = 16, 4


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adversaries")
    arguments = options.parse(
        ["--device", "cpu", "--seq-lens", str(SEQ_LEN), "--steps", str(STEPS),
         "--cache", str(folder / "cache"), "--out", str(folder)], ""
    )  # fmt: skip
    with planning.planned(arguments, []) as (plan, *_):
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

        monkeypatch.setattr(models, "build", cheating)
        sent = []
        cells.measure_cells(sent.append, plan, variant, 1, (SEQ_LEN,))
        monkeypatch.setattr(models, "build", build)
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


@pytest.mark.parametrize("variant", ["vanilla_peft", "fused_mlp"])
def test_an_honest_variant_passes(measure, variant):
    cell = measure(variant=variant)
    assert cell.status == "ok", cell.error
    assert len(cell.step_ms) == STEPS


# --- wrong results: the gate, before anything is timed --------------------------------------------


def test_an_mlp_that_returns_zeros(measure):
    def cheat(built):
        for mlp in mlps(built):
            mlp.forward = torch.zeros_like

    assert_caught(measure(cheat), "parity_failed", "losses")


@pytest.mark.parametrize("how_many", [1, None], ids=["one matrix", "all"])
def test_a_gradient_scaled_by_a_tenth(measure, how_many):
    def cheat(built):
        for parameter in adapters(built)[:how_many]:
            parameter.register_hook(lambda gradient: 1.1 * gradient)

    assert_caught(measure(cheat), "parity_failed", ".lora_")


def test_a_dA_that_is_never_computed(measure):
    def cheat(built):
        for parameter in adapters(built, ".lora_A."):
            parameter.register_hook(torch.zeros_like)

    assert_caught(measure(cheat), "parity_failed", "lora_A")


def test_adapters_that_are_not_trained(measure):
    def cheat(built):
        for parameter in adapters(built, ".lora_A."):
            parameter.requires_grad_(False)

    assert_caught(measure(cheat), "parity_failed", "trains other parameters")


def test_a_stale_output_buffer(measure):
    """The first call's output is right and comes back from every later one."""

    def cheat(built):
        for mlp in mlps(built):
            kept = []

            def stale(x, forward=mlp.forward, kept=kept):
                output = forward(x)
                kept.append(output.detach())
                return output + (kept[0] - output).detach()

            mlp.forward = stale

    assert_caught(measure(cheat), "parity_failed", "losses")


def test_an_input_that_its_function_has_saved_is_written_in_place(measure, monkeypatch):
    """Behind autograd's back, as a Triton kernel can."""
    forward = LoRA_MLP.forward

    def overwrite(ctx, x, *others):
        output = forward(ctx, x, *others)
        x.data.mul_(0.5)
        return output

    monkeypatch.setattr(LoRA_MLP, "forward", staticmethod(overwrite))
    assert_caught(measure(variant="fused_mlp"), "parity_failed", ".lora_")


def test_an_input_that_another_module_reads_is_written_in_place(measure):
    def cheat(built):
        for name, norm in built.model.named_modules():
            if name.endswith("input_layernorm"):

                def overwrite(x, forward=norm.forward):
                    output = forward(x)
                    x.data.mul_(0.5)
                    return output

                norm.forward = overwrite

    assert_caught(measure(cheat), "parity_failed", "losses")


# --- steps that did not do the work that their times are shown for --------------------------------


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


def test_a_batch_that_loses_its_labels_on_the_way(measure, plan):
    def cheat(built):
        calls = []

        def lighten(module, arguments, inputs):
            calls.append(None)
            if len(calls) > 4:  # past the gate's two and the first of the warm-up
                inputs["labels"][:, 3:] = -100

        built.model.register_forward_pre_hook(lighten, with_kwargs=True)

    assert_caught(measure(cheat), "error", "batches were changed")


class LazyLoss(torch.Tensor):
    def item(self):
        time.sleep(0.05)
        return super().item()


def test_a_sleep_outside_the_marks(measure):
    def cheat(built):
        def hook(module, arguments, output):
            output.loss = output.loss.as_subclass(LazyLoss)
            return output

        built.model.register_forward_hook(hook)

    assert_caught(measure(cheat), "error", "where the marks do not see it")


def test_work_that_goes_on_after_the_last_mark(measure, monkeypatch):
    """As another stream's does: only the synchronisation waits for it."""
    monkeypatch.setattr(trainer.WallClock, "synchronize", lambda self: time.sleep(0.05))
    assert_caught(measure(), "error", "where the marks do not see it")


def test_a_false_out_of_memory(measure):
    def cheat(built):
        def refuse(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")

        built.model.register_forward_pre_hook(refuse)

    assert_caught(measure(cheat), "error", "the allocator never failed")


@pytest.mark.parametrize("left_fused", [0, 1])
def test_a_variant_that_quietly_falls_back_to_peft(measure, left_fused):
    def cheat(built):
        for mlp in mlps(built)[left_fused:]:
            unfuse(mlp)

    cell = measure(cheat, "fused_mlp")
    assert_caught(cell, "error", f"LoRA_MLPBackward ran {left_fused} times")


def test_losses_that_leave_vanillas(measure):
    """A variant that passes the gate and every audit, and then trains on something else."""
    vanilla, other = measure(), measure()
    results = example.empty()
    results.add(vanilla)
    experiment.check_losses(results, other)
    assert (other.status, other.loss_gap) == ("ok", 0.0)

    other.losses[2] *= 1.004
    experiment.check_losses(results, other)
    assert other.status == "parity_failed"
    assert "0.40%" in other.error

"""The audits after the timed steps, each just inside and just outside its limit."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from cases import example_results as example

from batches import Batch
from bench import audit, evidence
from bench.audit import LOSS_STEPS, loss_gap
from bench.evidence import Library
from bench.profiler import Profile
from bench.records import Floor
from bench.runner import Runner
from bench.stages import Stopwatch
from fused_lora.reading.site import Evidence
from trainer import CudaClock, Timings, Trainer
from variants import Lora, Recipe


def timings(**measured):
    """Return three honest steps of 100 ms, with changes."""
    honest = {"step_ms": [100.0] * 3, "wall_ms": [100.2] * 3, "optimizer_steps": 3}
    return Timings(first_step_s=1.0, **(honest | measured))


# --- hidden time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_ms", "wall_ms", "told"),
    [
        ([100.0] * 3, [100.2] * 3, None),
        # a share and a millisecond are allowed
        ([100.0] * 3, [106.0] * 3, None),
        ([100.0] * 3, [106.01] * 3, "a step took 106.0 ms by the wall and 100.0 ms between its ma"),
        ([0.5] * 3, [1.52] * 3, None),
        ([0.5] * 3, [1.53] * 3, "a step took 1.5 ms"),
        # one slow reading among uneven steps: medians alone would report hidden time
        ([18.0, 24.0, 25.0, 36.0], [29.0, 24.1, 25.1, 36.1], None),
        ([18.0, 24.0, 25.0, 36.0], [18.1, 35.0, 25.1, 36.1], None),
        # in half of the steps or more
        ([100.0] * 4, [100.0, 200.0] * 2, "a step took 150.0 ms"),
        ([100.0] * 3, [500.0, 100.0, 500.0], "a step took 500.0 ms"),
        # in most steps: medians alone would miss it
        ([100.0, 200.0, 300.0], [150.0, 201.0, 350.0], "a step took 201.0 ms"),
    ],
)
def test_each_wall_is_held_against_its_own_marks_and_the_median_counts(step_ms, wall_ms, told):
    found = audit.hidden_time(timings(step_ms=step_ms, wall_ms=wall_ms))
    assert found is None if told is None else found.startswith(told) and "\n" not in found


def test_a_rehearsal_is_told_of_time_that_every_step_hides():
    often, always = [500.0, 500.0, 500.0, 100.2], [500.0, 500.0, 500.0, 106.01]
    for wall_ms, is_told in ((often, False), (always, True)):
        found = audit.hidden_time(timings(step_ms=[100.0] * 4, wall_ms=wall_ms), on_gpu=False)
        assert bool(found) is is_told


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("hides", [None, "on a stream", "in a thread"])
def test_work_left_on_another_stream_or_in_a_thread_is_seen(hides):
    class Hides(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4096, 4096, device="cuda"))
            self.stream = torch.cuda.Stream()

        @torch.no_grad()
        def work(self, after_s=0.0):
            time.sleep(after_s)
            with torch.cuda.stream(self.stream):
                for _ in range(20):
                    self.weight @ self.weight

        def forward(self, input_ids, labels, attention_mask):
            if hides == "on a stream":
                self.work()
            if hides == "in a thread":  # when the step is over
                threading.Thread(target=self.work, args=(0.01,)).start()
            loss = (self.weight[0, 0] * input_ids - labels).float().pow(2).mean()
            return type("Output", (), {"loss": loss})

    batch = Batch(*(torch.ones(1, 1, dtype=torch.long, device="cuda") for _ in range(2)))
    trainer = Trainer(Hides(), nullcontext, CudaClock(), 1e-3, max_warmup_steps=1)
    timings = trainer.run([batch], 5, before_step=lambda done: time.sleep(0.2))
    assert bool(audit.hidden_time(timings)) is (hides == "on a stream")
    time.sleep(0.2)
    assert bool(audit.step_again(trainer, [batch], timings)) is (hides == "in a thread")


@pytest.mark.parametrize(
    ("check", "measured", "told"),
    [
        (audit.skipped_updates, {"optimizer_steps": 2}, "the optimizer took 2 of 3 timed steps"),
        (audit.skipped_updates, {"optimizer_steps": 4}, "the optimizer took 4 of 3 timed steps"),
        (audit.skipped_updates, {"unmoved_adapters": 2}, "2 adapter matrices are what they were"),
        (audit.changed_batches, {"changed_batches": 1}, "1 batches were changed"),
        (audit.diverged, {"losses": [1.0, float("nan")]}, "the loss of step 2 is nan"),
    ],
)
def test_what_the_steps_did_not_do_is_told(check, measured, told):
    assert check(timings(**measured)).startswith(told)


# --- what ran -------------------------------------------------------------------------------------

MODULES = ["layers.0.mlp: mlp", "layers.1.mlp: mlp", "layers.0.self_attn: qkv"]
FUNCTIONS = {"MLPBackward": 2, "QKVBackward": 1}
TWICE = {name: 2 * count for name, count in FUNCTIONS.items()}
KERNELS = {"void _forward_kernel<4>": 2, "_backward_kernel": 2}
COMPILED_KERNELS = {"triton_poi_fused_add_0": 36}
MLP, COMPILED = Recipe(fused=("mlp",)), Recipe(fused=("mlp",), compiled=True)
QKV, GRAPH = Recipe(fused=("qkv",)), Recipe(fused=("mlp",), graph=True)
LIBRARY = Recipe(library="library")
ALL_SEVEN, DOWN, Q_AND_V = Lora(), Lora(targets=("down_proj",)), Lora(targets=("q_proj", "v_proj"))


@pytest.fixture
def made_up(monkeypatch):
    found = {
        "mlp": Evidence({"MLP": 1}, ("_forward_kernel", "_backward_kernel"), ("_unpack_kernel",)),
        "qkv": Evidence({"QKV": 1, "Both": 2}),
    }
    evidence_for = lambda recipe: {part: found[part] for part in recipe.fused}  # noqa: E731
    monkeypatch.setattr(evidence, "evidence_of", evidence_for)
    theirs = Library(("_theirs|_newer_kernel",), lora_mlp_kernels=("_mlp_of_theirs",))
    monkeypatch.setitem(evidence.LIBRARIES, "library", theirs)


def ran(functions, kernels=KERNELS, recipe=MLP, modules=MODULES, **how):
    """Return the arguments of `not_run` for a step in which these functions and kernels ran."""
    return recipe, modules, Profile(kernels, functions), {"on_gpu": True, **how}


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (ran(FUNCTIONS), None),
        (ran(FUNCTIONS, recipe=Recipe(fused=("mlp", "qkv"))), None),
        (ran({"MLPBackward": 1}), "MLPBackward ran 1 times in a step, for 2 modules"),
        (ran({"QKVBackward": 9}), "MLPBackward ran 0 times"),
        # at least once, even where no module says so
        (ran({"MLPBackward": 1}, modules=[]), None),
        (ran({"MLPBackward": 0}, modules=[]), "MLPBackward ran 0 times"),
        # for each module of the part itself, whatever the MLPs need
        (ran({"QKVBackward": 1}, recipe=QKV), None),
        (ran({"QKVBackward": 1}, recipe=QKV, modules=["layers.1.self_attn: qkv"] * 2),
         "QKVBackward and BothBackward ran 1 times"),
        # one function may stand for several modules
        (ran({"BothBackward": 1}, recipe=QKV, modules=["layers.0.self_attn: qkv"] * 2), None),
        (ran({"BothBackward": 1}, recipe=QKV, modules=["layers.0.self_attn: qkv"] * 3), "QKVBack"),
        (ran({}, recipe=Recipe()), None),  # nothing was asked for
        # in every micro-batch
        (ran(TWICE, micro_batches=2), None),
        (ran(FUNCTIONS, micro_batches=2), "MLPBackward ran 2 times"),
        # the first layer may have no backward if nothing before it is trained
        (ran({"MLPBackward": 1}, lora=Q_AND_V), "MLPBackward ran 1 times"),
        (ran({"MLPBackward": 1}, lora=DOWN), None),
        (ran({"MLPBackward": 0}, lora=DOWN), "MLPBackward ran 0 times"),
        # kernels that were not launched
        (ran(FUNCTIONS, {"_forward_kernel": 2}), "_backward_kernel did not run: mlp"),
        (ran(FUNCTIONS, {}, on_gpu=False), None),  # the CPU has none
        # a compiled layer's functions run inside torch.compile's
        (ran({}, KERNELS | COMPILED_KERNELS, COMPILED), None),
        (ran({}, COMPILED_KERNELS, COMPILED), "_forward_kernel, _backward_kernel did not run"),
        # beyond dynamo's limit, silently
        (ran({}, KERNELS, COMPILED), "no kernel of torch.compile's ran: the layers ran uncompiled"),
        (ran(FUNCTIONS, {}, COMPILED, on_gpu=False), None),
        # a replay runs no function; one module of two that fell back shows in its kernels
        (ran({}, recipe=GRAPH), None),
        (ran({}, {"_forward_kernel": 2, "_backward_kernel": 1}, GRAPH), "_backward_kernel ran 1 t"),
        (ran({}, {"_forward_kernel": 2}, GRAPH), "_backward_kernel did not run: mlp was not"),
        # on a base in 4 bits
        (ran(FUNCTIONS, base="nf4"), "_unpack_kernel did not run: mlp was not"),
        (ran({}, KERNELS | {"_unpack_kernel": 1}, GRAPH, base="nf4"), "_unpack_kernel ran 1 times"),
        (ran({}, KERNELS | {"_unpack_kernel": 2}, GRAPH, base="nf4"), None),
        # compiled for several shapes, a kernel has several names
        (ran({}, {"_forward_kernel": 2, "_backward_kernel_a": 1, "_backward_kernel_b": 1}, GRAPH),
         None),
        (ran({}, {"_theirs": 1, "_mlp_of_theirs": 1}, LIBRARY), None),
        (ran({}, {"_newer_kernel": 1, "_mlp_of_theirs": 1}, LIBRARY), None),
        (ran({}, KERNELS, LIBRARY),
         "_theirs or _newer_kernel, _mlp_of_theirs did not run: library was not"),
        # a library that fuses no MLP with such adapters
        (ran({}, {"_theirs": 1}, LIBRARY, lora=ALL_SEVEN), "_mlp_of_theirs did not run"),
        (ran({}, {"_theirs": 1}, LIBRARY, lora=Q_AND_V), None),
        (ran({}, {"_theirs": 1}, LIBRARY, lora=Lora(dropout=0.05)), None),
    ],
)  # fmt: skip
def test_a_part_that_ran_too_seldom_is_told(step, told, made_up):
    recipe, modules, profile, how = step
    found = evidence.not_run(recipe, modules, profile, **how)
    assert found is None if told is None else found.startswith(told)


# --- the floor ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "base", "step_ms", "is_possible"),
    [
        ("fused_mlp", "bf16", 320.1, True),
        ("fused_mlp", "bf16", 319.9, False),
        ("fused_mlp", "nf4", 329.9, False),
        # not bf16's, which is slower than FP8's and faster than that of fp32
        ("fp8_layer", "bf16", 180.1, True),
        ("fp8_layer", "bf16", 179.9, False),
        ("fp8_lm_head_graph", "bf16", 160.1, True),
        ("fp8_lm_head_graph", "bf16", 159.9, False),
        ("vanilla_peft_fp32", "bf16", 1999.9, False),
        ("fused_bordered", "bf16", 319.9, False),  # which no version builds any more
    ],
)
def test_a_step_faster_than_the_floor_of_its_own_precision_is_an_error(
    variant, base, step_ms, is_possible
):
    run = example.empty(base=base, seq_lens=[512])
    for precision, ms in {
        "bf16": 320,
        "nf4": 330,
        "fp8": 180,
        "fp8_lm_head": 160,
        "fp32": 2000,
    }.items():
        run.keep_floors(precision, {512: Floor(ms, [ms])})
    cell = example.timed_cell(variant, 512, 1, [step_ms, step_ms, 9e3])
    Runner(SimpleNamespace(), run, lambda: None, print, print, Stopwatch(run)).keep(cell)
    assert (cell.status == "ok") is is_possible
    assert is_possible or f"{step_ms} ms, less than the {round(step_ms)}.0 ms" in cell.error


def test_losses_that_leave_vanillas_fail_the_cell_that_is_kept():
    run = example.empty()
    run.add(example.timed_cell("vanilla_peft", 64, 1, [1e3] * 2, losses=[2.5, 2.4]))
    cell = example.timed_cell("fused_mlp", 64, 2, [1e3] * 2, losses=[2.5, 2.5], loss_gap=None)
    Runner(SimpleNamespace(), run, lambda: None, print, print, Stopwatch(run)).keep(cell)
    assert (cell.status, run.cells[-1]) == ("parity_failed", cell)


def test_a_floor_of_padding_is_no_floor_and_that_of_another_round_neither():
    run = example.empty(padded=True)
    cell = example.timed_cell("fused_mlp", 64, 2, [30.0])
    for tokens, by_round, status in ((None, {}, "ok"), (900, {2: 20.0}, "ok"), (900, {}, "error")):
        run.floor[64] = Floor(40.0, [40.0], tokens=tokens, ms_by_round=by_round)
        audit.check_floor(run, cell)
        assert cell.status == status


# --- losses and memory ----------------------------------------------------------------------------


def test_the_loss_gap_is_the_largest_relative_distance_of_a_step():
    assert loss_gap([4.0, 2.01, 1.0], [4.0, 2.0, 1.0]) == pytest.approx(0.005)
    assert loss_gap([4.0, 1.99, 1.0], [4.0, 2.0, 1.0]) == pytest.approx(0.005)
    assert loss_gap([2.5, 2.4], [2.5, 2.4]) == loss_gap([], []) == 0.0
    same = [1.0] * (LOSS_STEPS - 1)
    assert loss_gap([*same, 1.1, 1.0], [*same, 1.0, 2.0]) == pytest.approx(0.1)
    assert loss_gap([*same, 1.0, 1.1], [*same, 1.0, 1.0]) == 0.0  # no longer judged
    for wrong in (float("nan"), float("inf"), None):
        assert loss_gap([1.0, wrong, 1.0], [1.0, 1.0, 1.0]) == float("inf")
        assert loss_gap([1.0, 1.0], [1.0, wrong]) == float("inf")
    with pytest.raises(ValueError):  # runs of different lengths
        loss_gap([1.0], [1.0, 1.0])


def test_out_of_memory_is_believed_when_the_allocator_failed():
    assert audit.ran_out_of_memory(1, "CUDA out of memory") is None
    told = audit.ran_out_of_memory(0, "CUDA out of memory, or so it says")
    assert "the allocator never failed" in told and told.endswith("or so it says")

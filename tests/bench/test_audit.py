"""What is found after the timed steps, each just inside and just outside of what is allowed."""

from contextlib import nullcontext

import pytest
import torch

from batches import Batch
from bench import audit, evidence
from bench.audit import LOSS_STEPS, loss_gap
from bench.evidence import Evidence
from bench.profiler import Profile
from trainer import CudaClock, Timings, Trainer
from variants import Lora, Recipe


def timings(**measured):
    """Three steps of 100 ms that did everything they should."""
    honest = {
        "step_ms": [100.0, 100.0, 100.0],
        "wall_ms": [100.2, 100.2, 100.2],
        "optimizer_steps": 3,
    }
    return Timings(first_step_s=1.0, **(honest | measured))


# --- hidden time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_ms", "wall_ms", "hidden"),
    [
        ([100.0] * 3, [100.2] * 3, False),
        # a share and a millisecond are allowed
        ([100.0] * 3, [106.0] * 3, False),
        ([100.0] * 3, [106.01] * 3, True),
        ([0.5] * 3, [1.52] * 3, False),
        ([0.5] * 3, [1.53] * 3, True),
        # one slow reading among uneven steps, where the medians alone would see hidden time
        ([18.0, 24.0, 25.0, 36.0], [29.0, 24.1, 25.1, 36.1], False),
        ([18.0, 24.0, 25.0, 36.0], [18.1, 35.0, 25.1, 36.1], False),
        # in half of the steps or more
        ([100.0] * 4, [100.0, 200.0] * 2, True),
        ([100.0] * 3, [500.0, 100.0, 500.0], True),
        # in most steps, where the medians alone would see nothing
        ([100.0, 200.0, 300.0], [150.0, 201.0, 350.0], True),
    ],
)
def test_each_wall_is_held_against_its_own_marks_and_the_median_counts(step_ms, wall_ms, hidden):
    told = audit.hidden_time(timings(step_ms=step_ms, wall_ms=wall_ms))
    assert (told is not None) is hidden


def test_hidden_time_is_told_in_one_line():
    told = audit.hidden_time(timings(wall_ms=[107.0] * 3))
    assert told.startswith("a step took 107.0 ms by the wall and 100.0 ms between its marks")
    assert "\n" not in told


@pytest.mark.gpu
@pytest.mark.alone
def test_work_left_on_another_stream_is_seen_by_the_wall():
    class OnTheSide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4096, 4096, device="cuda"))
            self.stream = torch.cuda.Stream()
            self.hides = False

        def forward(self, input_ids, labels, attention_mask):
            if self.hides:
                with torch.cuda.stream(self.stream), torch.no_grad():
                    for _ in range(20):
                        self.weight @ self.weight
            loss = (self.weight[0, 0] * input_ids - labels).float().pow(2).mean()
            return type("Output", (), {"loss": loss})

    batch = Batch(*(torch.ones(1, 1, dtype=torch.long, device="cuda") for _ in range(2)))
    model = OnTheSide()
    for model.hides, seen in ((False, False), (True, True)):
        timings = Trainer(model, nullcontext, CudaClock(), 1e-3).run([batch], 5)
        assert bool(audit.hidden_time(timings)) is seen


# --- updates and batches --------------------------------------------------------------------------


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
RAN = Profile(
    functions_seen={"MLPBackward": 2, "QKVBackward": 1},
    kernels_seen={"void _forward_kernel<4>": 2, "_backward_kernel": 2},
)


@pytest.fixture(autouse=True)
def made_up_evidence(monkeypatch):
    made_up = {
        "mlp": Evidence({"MLPBackward": 1}, ("_forward_kernel", "_backward_kernel")),
        "qkv": Evidence({"QKVBackward": 1, "BothBackward": 2}, ()),
        "library": Evidence({}, ("_theirs",), lora_mlp_kernels=("_mlp_of_theirs",)),
    }
    monkeypatch.setattr(evidence, "EVIDENCE", made_up)


MLP, COMPILED = Recipe(fused=("mlp",)), Recipe(fused=("mlp",), compiled=True)
GRAPH, LIBRARY = Recipe(fused=("mlp",), graph=True), Recipe(library="library")


def not_run(recipe=MLP, functions=RAN.functions_seen, kernels=RAN.kernels_seen, modules=MODULES):
    """What is told of a step in which these functions and kernels ran, on a GPU."""
    return evidence.not_run(recipe, modules, Profile(kernels, functions), on_gpu=True)


@pytest.mark.parametrize(
    ("fused", "modules", "seen", "enough"),
    [
        (("mlp", "qkv"), MODULES, RAN.functions_seen, True),
        (("mlp",), MODULES, {"MLPBackward": 1}, False),
        (("mlp",), MODULES, {"QKVBackward": 9}, False),
        # at least once, even where no module says so
        (("mlp",), [], {"MLPBackward": 1}, True),
        (("mlp",), [], {"MLPBackward": 0}, False),
        # for each module of the part itself, whatever the MLPs need
        (("qkv",), MODULES, {"QKVBackward": 1}, True),
        (("qkv",), [*MODULES, "layers.1.self_attn: qkv"], {"QKVBackward": 1}, False),
        # one function may stand for several modules
        (("qkv",), ["layers.0.self_attn: qkv"] * 2, {"BothBackward": 1}, True),
        (("qkv",), ["layers.0.self_attn: qkv"] * 3, {"BothBackward": 1}, False),
        ((), MODULES, {}, True),  # nothing was asked for
    ],
)
def test_a_part_is_counted_by_its_own_modules(fused, modules, seen, enough):
    assert (not_run(Recipe(fused=fused), seen, modules=modules) is None) is enough


def test_a_part_runs_in_every_micro_batch():
    twice = {name: 2 * count for name, count in RAN.functions_seen.items()}
    for functions, ran in ((RAN.functions_seen, False), (twice, True)):
        profile = Profile(RAN.kernels_seen, functions)
        told = evidence.not_run(MLP, MODULES, profile, on_gpu=True, micro_batches=2)
        assert (told is None) is ran


@pytest.mark.parametrize(
    ("targets", "ran", "enough"),
    [
        (("q_proj", "v_proj"), 1, False),  # all of the first layer is trained
        (("down_proj",), 1, True),  # what comes before has no backward there
        (("down_proj",), 0, False),
    ],
)
def test_the_first_layer_may_do_without_a_backward_where_nothing_before_it_is_trained(
    targets, ran, enough
):
    profile = Profile(RAN.kernels_seen, {"MLPBackward": ran})
    told = evidence.not_run(MLP, MODULES, profile, on_gpu=True, lora=Lora(targets=targets))
    assert (told is None) is enough


@pytest.mark.parametrize(
    ("lora", "fuses_its_mlp"),
    [(Lora(), True), (Lora(targets=("q_proj", "v_proj")), False), (Lora(dropout=0.05), False)],
)
def test_a_library_that_fuses_no_mlp_with_such_adapters_is_not_asked_for_its_kernel(
    lora, fuses_its_mlp
):
    profile = Profile({"_theirs": 1}, {})
    told = evidence.not_run(LIBRARY, [], profile, on_gpu=True, lora=lora)
    assert (told is not None and told.startswith("_mlp_of_theirs did not run")) is fuses_its_mlp


@pytest.mark.parametrize(
    ("recipe", "functions", "kernels", "told"),
    [
        (MLP, RAN.functions_seen, RAN.kernels_seen, None),
        (MLP, RAN.functions_seen, {"_forward_kernel": 2}, "_backward_kernel did not run: mlp"),
        # its functions run inside those that torch.compile made of the layer
        (COMPILED, {}, {**RAN.kernels_seen, "triton_poi_fused_add_0": 36}, None),
        (COMPILED, {}, {"triton_poi_fused_add_0": 36}, "_forward_kernel, _backward_kernel did not"),
        # beyond dynamo's limit, without a word
        (COMPILED, {}, RAN.kernels_seen, "no kernel of torch.compile's ran: the layers ran uncomp"),
        # a replay runs no function; a module of two that fell back shows in its kernels
        (GRAPH, {}, RAN.kernels_seen, None),
        (GRAPH, {}, {"_forward_kernel": 2, "_backward_kernel": 1}, "_backward_kernel ran 1 times"),
        (GRAPH, {}, {"_forward_kernel": 2}, "_backward_kernel did not run: mlp was not"),
        # compiled for several shapes, it goes by several names
        (GRAPH, {}, {"_forward_kernel": 2, "_backward_kernel_a": 1, "_backward_kernel_b": 1}, None),
        (LIBRARY, {}, {"_theirs": 1, "_mlp_of_theirs": 1}, None),
        (LIBRARY, {}, RAN.kernels_seen, "_theirs, _mlp_of_theirs did not run: library was not"),
    ],
)
def test_kernels_that_were_not_launched_are_told_on_a_gpu(recipe, functions, kernels, told):
    found = not_run(recipe, functions, kernels)
    assert found is None if told is None else found.startswith(told)


@pytest.mark.parametrize("recipe", [MLP, COMPILED])
def test_without_a_gpu_there_are_no_kernels_to_see(recipe):
    no_kernels = Profile(functions_seen=RAN.functions_seen)
    assert evidence.not_run(recipe, MODULES, no_kernels, on_gpu=False) is None


# --- losses ---------------------------------------------------------------------------------------


def test_the_loss_gap_is_the_largest_relative_distance_of_a_step():
    assert loss_gap([4.0, 2.01, 1.0], [4.0, 2.0, 1.0]) == pytest.approx(0.005)
    assert loss_gap([4.0, 1.99, 1.0], [4.0, 2.0, 1.0]) == pytest.approx(0.005)
    assert loss_gap([2.5, 2.4], [2.5, 2.4]) == 0.0
    assert loss_gap([], []) == 0.0
    same = [1.0] * (LOSS_STEPS - 1)
    assert loss_gap([*same, 1.1, 1.0], [*same, 1.0, 2.0]) == pytest.approx(0.1)
    assert loss_gap([*same, 1.0, 1.1], [*same, 1.0, 1.0]) == 0.0  # not judged any more

    with pytest.raises(ValueError):  # of different length
        loss_gap([1.0], [1.0, 1.0])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), None])
def test_a_loss_that_is_no_number_is_infinitely_far(wrong):
    assert loss_gap([1.0, wrong, 1.0], [1.0, 1.0, 1.0]) == float("inf")
    assert loss_gap([1.0, 1.0], [1.0, wrong]) == float("inf")


# --- memory ---------------------------------------------------------------------------------------


def test_out_of_memory_is_believed_when_the_allocator_failed():
    assert audit.ran_out_of_memory(1, "CUDA out of memory") is None
    told = audit.ran_out_of_memory(0, "CUDA out of memory, or so it says")
    assert "the allocator never failed" in told and told.endswith("or so it says")

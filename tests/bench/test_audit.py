"""What is found after the timed steps, each just inside and just outside of what is allowed."""

from contextlib import nullcontext

import pytest
import torch

import variants
from batches import Batch
from bench import audit
from bench.audit import LOSS_SHARE, LOSS_STEPS, WALL_MS, WALL_SHARE, loss_gap
from bench.profiler import Profile
from trainer import CudaClock, Timings, Trainer
from variants import EVIDENCE, VARIANTS, Evidence, Recipe


def timings(**measured):
    """Three steps of 100 ms that did everything they should."""
    honest = {
        "step_ms": [100.0, 100.0, 100.0],
        "wall_ms": [100.2, 100.2, 100.2],
        "optimizer_steps": 3,
    }
    return Timings(first_step_s=1.0, **(honest | measured))


# --- hidden time ----------------------------------------------------------------------------------


def test_honest_steps_have_nothing_to_hide():
    found = timings()
    assert audit.hidden_time(found) is None
    assert audit.skipped_updates(found) is None
    assert audit.changed_batches(found) is None


@pytest.mark.parametrize("step_ms", [0.5, 20.0, 100.0, 1000.0])
def test_the_wall_may_pass_the_marks_by_a_share_and_a_millisecond(step_ms):
    allowed = WALL_SHARE * step_ms + WALL_MS
    steps = [step_ms] * 3
    assert audit.hidden_time(timings(step_ms=steps, wall_ms=[allowed - 0.01] * 3)) is None
    assert audit.hidden_time(timings(step_ms=steps, wall_ms=[allowed + 0.01] * 3)) is not None


def test_what_is_allowed_in_numbers():
    """100 ms between the marks: 6 ms more by the wall are allowed, 7 are not."""
    assert audit.hidden_time(timings(wall_ms=[106.0] * 3)) is None
    told = audit.hidden_time(timings(wall_ms=[107.0] * 3))
    assert told.startswith("a step took 107.0 ms by the wall and 100.0 ms between its marks")
    assert "\n" not in told


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_reading_among_uneven_steps_is_no_hidden_time(slow):
    """Between the median of the walls and that of the marks there would be some."""
    steps = [18.0, 24.0, 25.0, 36.0]
    walls = [step + (11.0 if i == slow else 0.1) for i, step in enumerate(steps)]
    assert audit.hidden_time(timings(step_ms=steps, wall_ms=walls)) is None


@pytest.mark.parametrize("count", [2, 4, 10])
def test_time_hidden_in_half_of_the_steps_is_told(count):
    walls = [100.0, 200.0] * (count // 2)
    assert audit.hidden_time(timings(step_ms=[100.0] * count, wall_ms=walls)) is not None


def test_time_is_hidden_in_a_step_and_not_between_medians():
    """Each step's wall is held against its own marks: here the medians alone would see nothing."""
    steps = [100.0, 200.0, 300.0]
    assert audit.hidden_time(timings(step_ms=steps, wall_ms=[150.0, 201.0, 350.0])) is not None


def test_one_slow_reading_of_the_wall_is_no_hidden_time_but_most_are():
    assert audit.hidden_time(timings(wall_ms=[100.0, 500.0, 100.0])) is None
    assert audit.hidden_time(timings(wall_ms=[500.0, 100.0, 500.0])) is not None


@pytest.mark.gpu
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


@pytest.mark.parametrize("taken", [0, 2, 4])
def test_every_timed_step_updates_once(taken):
    told = audit.skipped_updates(timings(optimizer_steps=taken))
    assert told == f"the optimizer took {taken} of 3 timed steps"


def test_adapters_that_training_left_alone_are_counted():
    told = audit.skipped_updates(timings(unmoved_adapters=2))
    assert told.startswith("2 adapter matrices are what they were")


def test_batches_that_were_written_to_are_counted():
    told = audit.changed_batches(timings(changed_batches=1))
    assert told.startswith("1 batches were changed")


# --- what ran -------------------------------------------------------------------------------------

MODULES = ["layers.0.mlp: mlp", "layers.1.mlp: mlp", "layers.0.self_attn: qkv"]
RAN = Profile(
    functions_seen={"MLPBackward": 2, "QKVBackward": 1},
    kernels_seen={"void _forward_kernel<4>": 2, "_backward_kernel": 2},
)


@pytest.fixture(autouse=True)
def evidence(monkeypatch):
    made_up = {
        "mlp": Evidence({"MLPBackward": 1}, ("_forward_kernel", "_backward_kernel")),
        "qkv": Evidence({"QKVBackward": 1, "BothBackward": 2}, ()),
        "library": Evidence({}, ("_theirs",)),
    }
    monkeypatch.setattr(variants, "EVIDENCE", made_up)


def not_run(fused=("mlp",), profile=RAN, modules=MODULES, on_gpu=True, library="peft"):
    return audit.not_run(Recipe(library=library, fused=fused), modules, profile, on_gpu)


def test_parts_that_ran_for_each_of_their_modules_pass():
    assert not_run() is None
    assert not_run(("mlp", "qkv")) is None
    assert not_run(()) is None  # nothing was asked for


@pytest.mark.parametrize(
    ("seen", "ran"), [({"MLPBackward": 1}, 1), ({"QKVBackward": 9}, 0), ({}, 0)]
)
def test_a_function_that_ran_for_fewer_modules_than_are_fused_is_told(seen, ran):
    told = not_run(profile=Profile(functions_seen=seen, kernels_seen=RAN.kernels_seen))
    assert told.startswith(f"MLPBackward ran {ran} times in a step, for 2 modules")


def test_a_function_runs_at_least_once_even_where_no_module_says_so():
    for ran in (0, 1):
        profile = Profile(functions_seen={"MLPBackward": ran}, kernels_seen=RAN.kernels_seen)
        assert (not_run(modules=[], profile=profile) is None) is (ran == 1)


def test_a_part_is_counted_by_its_own_modules():
    """One module runs qkv fused: one run is enough for it, whatever the MLPs need."""
    assert not_run(("qkv",)) is None
    assert not_run(("qkv",), modules=[*MODULES, "layers.1.self_attn: qkv"]) is not None


def test_a_function_may_stand_for_several_modules():
    both = Profile(functions_seen={"BothBackward": 1})
    for count, enough in ((2, True), (3, False)):
        modules = [f"layers.{i}.self_attn: qkv" for i in range(count)]
        assert (not_run(("qkv",), both, modules) is None) is enough


def test_a_kernel_that_was_not_launched_is_told_on_a_gpu():
    half = Profile(functions_seen=RAN.functions_seen, kernels_seen={"_forward_kernel": 2})
    assert not_run(profile=half) == "_backward_kernel did not run: mlp was not what was timed"
    assert not_run(profile=half, on_gpu=False) is None  # where there are no kernels to see


def test_of_a_compiled_layer_the_kernels_are_proof_enough():
    """Its functions run inside those that torch.compile made of the layer."""
    compiled, unseen = Recipe(fused=("mlp",), compiled=True), {"CompiledFunctionBackward": 2}
    own = {"triton_poi_fused_add_0": 36}
    ran = Profile(functions_seen=unseen, kernels_seen=RAN.kernels_seen | own)
    assert audit.not_run(compiled, MODULES, ran, on_gpu=True) is None
    fell_back = Profile(functions_seen=unseen, kernels_seen=own)
    told = audit.not_run(compiled, MODULES, fell_back, on_gpu=True)
    assert told is not None and told.endswith("mlp was not what was timed")


def test_layers_that_ran_uncompiled_are_told():
    """As dynamo has it beyond its limit, without a word."""
    compiled, eager = Recipe(compiled=True), Profile(kernels_seen={"at::native::silu_kernel": 36})
    told = audit.not_run(compiled, [], eager, on_gpu=True)
    assert told == "no kernel of torch.compile's ran: the layers ran uncompiled"
    assert audit.not_run(compiled, [], eager, on_gpu=False) is None  # they are C++ there


def test_of_a_graph_the_kernels_are_counted():
    """A replay runs no function; one module of two that fell back shows in its kernels."""
    graph = Recipe(fused=("mlp",), graph=True)
    assert audit.not_run(graph, MODULES, Profile(kernels_seen=RAN.kernels_seen), True) is None
    once = Profile(kernels_seen={"void _forward_kernel<4>": 2, "_backward_kernel": 1})
    told = audit.not_run(graph, MODULES, once, on_gpu=True)
    assert told == "_backward_kernel ran 1 times in a step, for 2 modules"
    none = Profile(kernels_seen={"void _forward_kernel<4>": 2})
    told = audit.not_run(graph, MODULES, none, on_gpu=True)
    assert told == "_backward_kernel did not run: mlp was not what was timed"
    # a kernel that was compiled for several shapes goes by several names
    names = {"void _forward_kernel<4>": 2, "_backward_kernel_a": 1, "_backward_kernel_b": 1}
    assert audit.not_run(graph, MODULES, Profile(kernels_seen=names), True) is None


def test_a_library_is_known_by_its_own_kernels():
    assert not_run((), library="library", profile=Profile(kernels_seen={"_theirs": 1})) is None
    told = not_run((), library="library", profile=RAN)
    assert told == "_theirs did not run: library was not what was timed"


def test_every_part_that_a_variant_fuses_has_its_evidence():
    for recipe in (variant.recipe for variant in VARIANTS.values()):
        assert set(recipe.fused) <= EVIDENCE.keys()
        assert recipe.library == "peft" or recipe.library in EVIDENCE


# --- losses ---------------------------------------------------------------------------------------


def test_the_loss_gap_is_the_largest_relative_distance_of_a_step():
    assert loss_gap([4.0, 2.01, 1.0], [4.0, 2.0, 1.0]) == pytest.approx(0.005)
    assert loss_gap([4.0, 1.99, 1.0], [4.0, 2.0, 1.0]) == pytest.approx(0.005)
    assert loss_gap([2.5, 2.4], [2.5, 2.4]) == 0.0
    assert loss_gap([], []) == 0.0
    same = [1.0] * (LOSS_STEPS - 1)
    assert loss_gap([*same, 1.1, 1.0], [*same, 1.0, 2.0]) == pytest.approx(0.1)
    assert loss_gap([*same, 1.0, 1.1], [*same, 1.0, 1.0]) == 0.0  # not judged any more


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_infinitely_far(wrong):
    assert loss_gap([1.0, wrong, 1.0], [1.0, 1.0, 1.0]) == float("inf")
    assert loss_gap([1.0, 1.0], [1.0, wrong]) == float("inf")


def test_runs_of_different_length_have_no_gap():
    with pytest.raises(ValueError):
        loss_gap([1.0], [1.0, 1.0])


def test_a_left_out_step_is_farther_off_than_kernels_that_round_otherwise():
    """Losses fall by about 1% a step; a fused kernel's are within 0.05% of vanilla's."""
    vanilla = [2.50, 2.475, 2.45]
    rounded = [2.5004, 2.4741, 2.4511]
    one_behind = [2.50, 2.50, 2.475]
    assert loss_gap(rounded, vanilla) < LOSS_SHARE < loss_gap(one_behind, vanilla)


# --- memory ---------------------------------------------------------------------------------------


def test_out_of_memory_is_believed_when_the_allocator_failed():
    assert audit.ran_out_of_memory(1, "CUDA out of memory") is None
    told = audit.ran_out_of_memory(0, "CUDA out of memory, or so it says")
    assert "the allocator never failed" in told and told.endswith("or so it says")

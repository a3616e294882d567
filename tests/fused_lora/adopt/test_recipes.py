"""fused_lora/docs/support.md: the table of scripts that people train with, each run plain and fused.

If a row differs, the failure shows the row that the page should have.
"""

import warnings
from collections import Counter

import pytest
import torch
from cases.graph_case import Recorded
from cases.layer_case import layer_of
from cases.recipe_case import NO_TRAINER, RECIPES
from cases.reference import assert_near
from cases.trl_case import logged_by
from test_support_table import assert_on_page

import fused_lora.causal_lm.cross_entropy as cross_entropy
import fused_lora.causal_lm.log_probs as log_probs
from fused_lora import fuse, graph_steps
from fused_lora.layer.decoder_layer import DecoderLayer
from fused_lora.step.graphed_module import CACHES, GraphedModule

LOSSES = {"log_probs": log_probs, "linear_cross_entropy": cross_entropy}
IN_GRAPHS = [
    # its noise reads a number on the host, which the recorded graph takes for the GPU
    pytest.param(name, marks=pytest.mark.gpu if "NEFTune" in name else ())
    for name, recipe in RECIPES.items()
    if recipe.graphs != NO_TRAINER
]


@pytest.fixture
def ran(monkeypatch):
    """Count the calls of our functions."""
    calls = Counter()

    def count(owner, name, key):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **o: calls.update([key]) or function(*a, **o))

    count(DecoderLayer, "apply", "layers")
    for name, module in LOSSES.items():
        count(module, name, name)
    return calls


def passes_of(model):
    """Return a list that gets an entry from every pass of a layer that fills no cache."""
    passes = []

    def note(_, given, options):
        if all(options.get(name) is None for name in CACHES):
            passes.append(given)

    layer_of(model).register_forward_pre_hook(note, with_kwargs=True)
    return passes


def weights_of(trainer):
    """On the CPU, where Lightning leaves a model that it has trained."""
    trained = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([one.flatten() for one in trained]).cpu()


def train(trainer):
    """Return what was logged, how far the weights moved, and the warnings."""
    start = weights_of(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        logged = logged_by(trainer)
    # an interpreted kernel causes NumPy's deprecation warnings
    told = {str(one.message) for one in caught if one.category is not DeprecationWarning}
    return logged, weights_of(trainer) - start, told


def assert_alike(got, want):
    (logged, moved, _), (wanted, wanted_moved, _) = got, want
    assert [entry.keys() for entry in logged] == [entry.keys() for entry in wanted] and logged
    for entry, one in zip(logged, wanted, strict=True):
        assert entry == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert_near(moved, wanted_moved, 1e-3)


def row_of(name):
    _, loss, graphs, notes = RECIPES[name]
    loss = f"`{loss}`" if loss in LOSSES else f"not fused: {loss}"
    graphs = f"no: {graphs}" if graphs == NO_TRAINER else graphs
    return f"| {name} | {loss} | whole layers | {graphs} | {notes} |"


@pytest.mark.slow(
    "DPO", "reward model (`RewardTrainer`)", "`Seq2SeqTrainer`, `predict_with_generate`"
)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_fused_as_it_does_plain(name, tmp_path, device, ran):
    plain = RECIPES[name].make(device, tmp_path / "plain", 2)
    passes = passes_of(plain.model)
    want = train(plain)
    assert not ran
    fused = RECIPES[name].make(device, tmp_path / "fused", 2)
    found = fuse(fused.model)
    got = train(fused)
    assert_alike(got, want)
    assert got[2] <= want[2]
    assert ran.pop("layers") == len(passes) and found.counts["layer"].startswith("1 of 1")
    assert [*ran, *found.left.values()] == [RECIPES[name].loss]
    if RECIPES[name].graphs == NO_TRAINER:
        with pytest.raises(ValueError, match=NO_TRAINER):
            graph_steps(fused)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_a_recipes_row(name):
    assert_on_page(row_of(name))


@pytest.mark.slow("reward model (`RewardTrainer`)")
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_a_recipe_in_graphs_is_the_trainers_own(name, tmp_path, device, monkeypatch):
    """On a GPU fused as well: kernels in the interpreter are no operations that a recorded graph
    knows."""
    if device == "cpu":
        monkeypatch.setattr(GraphedModule, "_backend", Recorded)
    done = []
    for is_graphed in (True, False):
        trainer = RECIPES[name].make(device, tmp_path / str(is_graphed), 8)
        if device != "cpu":
            fuse(trainer.model)
        steps = graph_steps(trainer) if is_graphed else None
        done.append(train(trainer))
        if is_graphed:
            assert steps.decoder.captured and not steps.decoder.told
    assert_alike(*done)

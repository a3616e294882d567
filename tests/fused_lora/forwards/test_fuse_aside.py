"""Fused modules that step aside after `fuse`: they say so once, and the report says why."""

import warnings

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from cases.fused_case import ALL, SHORT, assert_close, batch, step
from cases.layer_case import EVERYTHING, LAYER, NAMES, operands_of_calls, pair, peft_model
from cases.peft_models import (
    DECODER,
    MLP_NAMES,
    MLP_ON,
    base_model,
    ids,
    layers,
    logits,
)
from cases.reasons import readapt
from cases.reference import assert_near

import fused_lora.reading.site
from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.reading.site import ON_CPU

HOOKED = "accelerate's ModelHook has replaced its forward: remove_hook_from_module"


def said_by(*runs):
    """Return the warnings about stepping aside that these runs give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run in runs:
            run()
    return [str(one.message) for one in caught if "stepped aside" in str(one.message)]


def test_a_reason_that_nobody_asked_for_is_said_once_and_a_wish_never(calls, device):
    fused, plain, _ = pair(device, MLP_ON)

    def run():
        assert torch.allclose(logits(fused), logits(plain), atol=1e-5)

    def merged():
        fused.merge_adapter(), plain.merge_adapter()
        run()
        fused.unmerge_adapter(), plain.unmerge_adapter()

    assert said_by(run, merged) == [] and len(calls) == 2
    handles = [layer.mlp.up_proj.register_forward_hook(lambda *_: None) for layer in layers(fused)]
    (said,) = said_by(run, run)
    assert "a fused Qwen2MLP stepped aside: up_proj: it has hooks" in said
    for handle in handles:
        handle.remove()
    assert said_by(run) == [] and len(calls) == 4


def test_what_the_report_of_fuse_said_is_not_said_again(device):
    model = peft_model(device)
    for name in ("mlp.up_proj", "self_attn.k_proj"):
        readapt(layers(model)[0].get_submodule(name), init_lora_weights="mica")
    assert "it uses a variant of LoRA" in str(fuse(model, Fusion(**ALL)))
    assert said_by(lambda: logits(model)) == []
    # what becomes of another layer it did not say
    readapt(layers(model)[1].mlp.up_proj, init_lora_weights="mica")
    (said,) = said_by(lambda: logits(model))
    assert "up_proj: it uses a variant of LoRA" in said


def test_attention_that_no_longer_runs_as_one_function_says_so_in_training(device):
    """A call that fills a cache still fuses q, k, v and o, each by itself."""
    fused, plain, _ = pair(device, Fusion(attention=True, rope=True))

    def run():
        losses = [model(**batch(model), use_cache=True).loss for model in (fused, plain)]
        torch.testing.assert_close(*losses)

    assert said_by(lambda: step(fused), torch.no_grad()(run)) == []
    (said,) = said_by(run, run)
    assert "Qwen2Attention" in said and "it was given past_key_values" in said


def test_accelerates_hooks_after_fuse_are_reported_and_taken_away(calls, device):
    fused, plain, done = pair(device, MLP_ON)
    mlps = [layer.mlp for layer in layers(fused)]
    for mlp in mlps:
        add_hook_to_module(mlp, ModelHook())
    found = report(fused)
    assert found.fused == {"mlp": []} and list(found.left) == MLP_NAMES
    assert all(reason.startswith(HOOKED) for reason in found.left.values())
    (said,) = said_by(lambda: logits(fused))
    assert HOOKED in said and not calls
    remove_hook_from_module(mlps[0])
    assert report(fused).fused == {"mlp": MLP_NAMES[:1]}
    assert unfuse(fused) == [DECODER, *MLP_NAMES]
    remove_hook_from_module(mlps[1])
    assert torch.equal(logits(fused), logits(plain)) and not calls
    assert fuse(fused, MLP_ON) == done


@pytest.mark.parametrize("fusion", [Fusion(**ALL), LAYER], ids=["parts", "layer"])
def test_a_model_on_the_cpu_says_so_and_runs_fused_once_it_is_moved(fusion, monkeypatch, device):
    monkeypatch.setattr(fused_lora.reading.site, "KERNELS_WANT_A_GPU", True)
    fused, plain, done = pair("cpu", fusion)
    assert not any(done.fused.values()) and set(done.left.values()) == {ON_CPU}
    tokens = ids("cpu")

    def run():
        losses = [model(input_ids=tokens, labels=tokens).loss for model in (fused, plain)]
        assert torch.equal(*losses)
        losses[0].backward()

    (said,) = said_by(run, run)
    assert ON_CPU in said
    monkeypatch.setattr(fused_lora.reading.site, "KERNELS_WANT_A_GPU", False)
    if device == "cpu":  # where the interpreter stands in for the GPU
        assert ON_CPU not in report(fused).left.values()
        assert fuse(fused, fusion).fused


def test_fp32_weights_under_autocast_run_as_the_other_fused_parts_with_a_warning(device):
    fused, plain, _ = pair(device, EVERYTHING)
    fuse(plain, Fusion(**ALL))
    with pytest.warns(
        UserWarning, match="stepped aside: .*weights are torch.float32, .* give all one"
    ):
        got = step(fused, autocast=True, length=SHORT)
    want = step(plain, autocast=True, length=SHORT)
    assert got.functions == want.functions and "LoRA_MLP" in got.functions
    if device == "cpu":  # a GPU may use another GEMM kernel for rows that lie apart
        assert_close(got, want, 0.0)


def test_within_a_transform_of_torch_func_it_runs_as_peft_has_it(device):
    fused, plain, _ = pair(device, EVERYTHING)

    def gradients(model):
        adapters = {n: p.detach() for n, p in model.named_parameters() if ".lora_" in n}
        return torch.func.grad(
            lambda given: torch.func.functional_call(model, given, (), batch(model)).loss
        )(adapters)

    (said,) = said_by(lambda: assert_close(gradients(fused), gradients(plain)))
    assert "within a transform of torch.func" in said


WAYS = {  # to be warned: what is fused, and what is done to the model before it is called
    "a part": (MLP_ON, lambda model: layers(model)[0].mlp.up_proj.register_forward_hook(print)),
    "a layer": (LAYER, lambda model: layers(model)[0].mlp.register_forward_hook(print)),
    "the loss": (
        Fusion(cross_entropy=True), lambda model: setattr(model.config, "use_cache", True)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fusion", "change"), WAYS.values(), ids=WAYS)
def test_a_warning_points_at_the_users_line(fusion, change, device):
    fused, _, _ = pair(device, fusion)
    change(fused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused(**batch(fused, length=SHORT))
        fuse(base_model(device), Fusion(mlp=True, rms_norm=True), strict=False)
    ours = [one for one in caught if str(one.message).startswith(("a fused", "fuse:"))]
    assert len(ours) > 1 and {our.filename for our in ours} == {__file__}


# --- transformers' own hooks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "option, fused_meanwhile", [("output_hidden_states", True), ("output_attentions", False)]
)
def test_outputs_that_were_collected_once_end_nothing(option, fused_meanwhile, monkeypatch, device):
    """transformers leaves its collecting hooks in place."""
    calls = operands_of_calls(monkeypatch)
    fused, plain, _ = pair(device)
    tokens = ids(device)
    got, want = (model(input_ids=tokens, **{option: True}) for model in (fused, plain))
    assert len(calls) == 2 * fused_meanwhile
    for one, other in zip(got.hidden_states or (), want.hidden_states or (), strict=True):
        assert_near(one, other, 2e-5)
    assert (got.hidden_states is not None) == fused_meanwhile
    calls.clear()
    assert said_by(lambda: logits(fused)) == [] and len(calls) == 2
    assert report(fused).fused == {"layer": NAMES}
    assert fuse(fused, LAYER).fused == {"layer": NAMES}


def test_a_hook_that_collects_makes_its_module_run(monkeypatch, device):
    """transformers does this if the config, and no argument, asks for attentions."""
    from transformers.utils import output_capturing

    calls = operands_of_calls(monkeypatch)
    fused, _, _ = pair(device)
    fused(input_ids=ids(device), output_attentions=True)
    token = output_capturing._active_collector.set({"attentions": []})
    try:
        assert "self_attn: it has hooks" in report(fused).left[NAMES[0]]
    finally:
        output_capturing._active_collector.reset(token)
    assert report(fused).fused == {"layer": NAMES} and not calls

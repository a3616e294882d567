"""FP8 layers on an FP8 checkpoint, which transformers loads into its own classes. If each row has a
scale, we use codes and scales unchanged. The classes' own GEMMs need a GPU and more packages, and
here a stand-in replaces them.

We checked that transformers 5.17 loads such checkpoints into these classes, with parameters of
these sizes and dtypes. We used compressed-tensors 0.20 on a CPU, told transformers that there was a
GPU, and loaded files with a scale per row, one scale for all, and a scale per block.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases.codes_case import (
    BLOCKS,
    EACH,
    ROWS,
    TWO,
    assert_is_what_its_codes_make_it,
    assert_same_state,
    models,
    over,
    projections,
)
from cases.fp8_case import FP8, assert_near_plain, fused_again, widened
from cases.fused_case import SHORT, assert_close, batch, pickled, step
from cases.layer_case import layer_of
from cases.peft_models import assert_equal
from cases.reference import assert_near
from safetensors.torch import load_file
from torch import nn
from transformers.integrations import compressed_tensors, finegrained_fp8

from fused_lora import fuse, report, unfuse
from fused_lora.kernels.fp8_rows import E4M3

pytestmark = pytest.mark.usefixtures("fp8_in_fp32")


@pytest.mark.slow("blocks")
@EACH
def test_a_layer_is_what_the_checkpoints_codes_make_it(of, device):
    fused, plain = models(device, of)
    before = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    assert str(fuse(fused, FP8)) == "layer: 1 of 1 layers in FP8 fused"
    assert str(report(fused)) == "layer: 1 of 1 layers in FP8 fused"
    assert_is_what_its_codes_make_it(fused, of, device)
    assert_equal(*(step(fused, length=SHORT) for _ in range(2)))
    assert_near_plain(fused, plain)
    assert_same_state(fused.state_dict(), before)
    unfuse(fused)
    assert_same_state(fused.state_dict(), before)
    for projection in projections(fused):
        base = projection.base_layer
        assert type(base) is of.made and "forward" not in vars(base)
        assert type(base.weight) is nn.Parameter and base.weight.is_contiguous()
        assert base.weight.untyped_storage().nbytes() == base.weight.numel()


OTHERS = {
    "joined projections": {"family": "Phi3", "target_modules": "all-linear"},
    "normed heads": {"family": "Qwen3"},
    "q and v alone": {"target_modules": ["q_proj", "v_proj"]},
    "down alone in FP8": {"only": "down_proj"},
    "gate, which lies beside a bf16 up": {"only": "gate_proj"},
}


@pytest.mark.slow("rows-joined projections", "blocks-gate, which lies beside a bf16 up")
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@TWO
def test_other_models_are_near_what_the_codes_stand_for(other, of, device):
    fused, plain = models(device, of, **other)
    fuse(fused, FP8)
    assert_near_plain(fused, plain)
    before = {name for name, _ in plain.named_parameters()}
    unfuse(fused)
    now = dict(fused.named_parameters())
    assert all(type(now[name]) is nn.Parameter for name in before)


# --- what a fused layer leaves to the checkpoint's own --------------------------------------------


@pytest.fixture
def products(monkeypatch):
    """Replace transformers' FP8 GEMMs, which need a GPU, and record the calls."""
    asked = []

    def multiply_blocks(x, weight, scales, block_size=None, bias=None, *_, **__):
        asked.append("blocks")
        return F.linear(x, weight.float() * over(scales, BLOCKS, weight.shape), bias)

    def multiply_rows(x, weight_t, scale_a, scale_b, out_dtype, bias=None):
        asked.append("rows")
        return F.linear(x.float() * scale_a, weight_t.float().t() * scale_b.t(), bias)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", multiply_blocks)
    monkeypatch.setattr(compressed_tensors, "_scaled_mm_rowwise", multiply_rows)
    monkeypatch.setattr(
        compressed_tensors, "quantize_fp8_per_row", lambda x: (x, torch.ones(len(x)).to(x))
    )
    return asked


@TWO
def test_what_steps_aside_is_transformers_own_and_in_training_has_gradients(of, products, device):
    fused, plain = models(device, of)
    fuse(fused, FP8)
    with torch.no_grad():
        got, want = (m.eval()(**batch(m), use_cache=True).logits for m in (fused, plain))
    assert_near(got, want, 1e-5)
    assert products == ["rows" if of is ROWS else "blocks"] * 7
    ids = torch.arange(5, device=device)[None]
    made = [
        model.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=True)
        for model in (fused, plain)
    ]
    assert torch.equal(*made) and len(products) > 7
    products.clear()
    for model in (fused.train(), plain.train()):
        layer_of(model).self_attn.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="it has hooks"):
        got = step(fused, length=SHORT)
    want = step(plain, length=SHORT)
    assert_close(got, want, 1e-4)
    fused.enable_input_require_grads()
    fused.gradient_checkpointing_enable({"use_reentrant": True})  # its first run has no gradients
    assert_close(step(fused, length=SHORT), want, 1e-4)
    assert not products


@TWO
def test_merging_is_pefts_error_and_the_adapter_is_saved_alone(of, tmp_path, device):
    fused, plain = models(device, of)
    before = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    own = copy.deepcopy(fused)
    fuse(fused, FP8)
    for model in (own, fused):
        with pytest.raises(RuntimeError, match="Float8"):
            model.merge_and_unload(progressbar=False)
    assert_same_state(fused.state_dict(), before)
    for name, model in (("fused", fused), ("plain", plain)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns that it finds no config of this base model
            model.save_pretrained(tmp_path / name)
    saved = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("fused", "plain")
    ]
    assert_equal(*saved)
    base = fused.unload()
    assert type(base.model.layers[0].mlp.down_proj) is of.made
    assert base.state_dict()["model.layers.0.mlp.down_proj.weight"].is_contiguous()


def with_other_codes(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if "weight_scale" in name and "mlp" in name:
            tensor.mul_(2)
        elif tensor.dtype == E4M3 and "down" in name:
            tensor.copy_(-tensor.float())
    model.load_state_dict(state)
    return model


LIVES = {
    "deep copy": copy.deepcopy, "pickled": pickled,
    "other codes loaded": with_other_codes, "wider adapter": widened, "fused again": fused_again,
}  # fmt: skip


@pytest.mark.slow("rows-deep copy")
@pytest.mark.thinned
@pytest.mark.parametrize("live", LIVES.values(), ids=LIVES)
@TWO
def test_it_goes_on_with_the_codes_that_it_has_after(live, of, device):
    fused, _ = models(device, of)
    fuse(fused, FP8)
    step(fused, length=SHORT)
    after = live(fused)
    assert step(after, length=SHORT).functions["DecoderLayer"] == 1
    assert_is_what_its_codes_make_it(after, of, device)


def test_the_hook_that_would_wrap_our_forwards_goes_where_it_would_decompress_nothing(device):
    for is_left in (False, True):
        model, _ = models(device, ROWS)
        of = model.get_base_model()
        of.ct_decompress_hook = of.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
        if is_left:
            of.lm_head.quantization_scheme = "another, of 4 bits say"
        fuse(model, FP8)
        assert hasattr(of, "ct_decompress_hook") == bool(of._forward_pre_hooks) == is_left

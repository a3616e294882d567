"""Fp8Weight: a weight in FP8 to whatever reads it, moves it, casts it or writes it."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from cases.fp8_case import (
    assert_is_what_its_codes_make_it,
    base_weights,
    fused_again,
    pair,
    widened,
)
from cases.fused_case import SHORT, assert_close, batch, pickled, step
from cases.layer_case import layer_of
from cases.peft_models import assert_equal, ids, logits, set_weights
from cases.reference import assert_near, relative_error
from peft import LoraConfig

from fused_lora import report, unfuse
from fused_lora.kernels.fp8_rows import codes_and_scales
from fused_lora.step.graph_checks import addresses_of
from fused_lora.weights.fp8_weight import Fp8Weight

pytestmark = pytest.mark.usefixtures("fp8_in_fp32")


# --- its memory -----------------------------------------------------------------------------------


def test_codes_are_all_that_is_left_of_a_weight_on_the_device(device):
    fused, plain, _ = pair(device, dtype=torch.bfloat16)
    weights = base_weights(fused)
    assert len(weights) == 7
    for name, weight in weights.items():
        assert isinstance(weight, torch.nn.Parameter) and not weight.requires_grad
        assert weight.original.device.type == "cpu"
        want = plain.get_parameter(name)
        assert (weight.shape, weight.dtype, weight.device) == (want.shape, want.dtype, want.device)
        assert torch.equal(weight.original, want.cpu())
        assert_near(weight.dequantised(), want, 0.04)
    buffers = {id(weight.buffer): weight.buffer for weight in weights.values()}
    assert len(buffers) == 4
    assert all(buffer.weight.element_size() == 1 for buffer in buffers.values())


# --- weights to whatever else reads them ----------------------------------------------------------


def loaded(model):
    model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()})
    return model


def merged_and_taken_out(model):
    model.merge_adapter()
    assert not any("layers" in name for name in report(model).fused["layer"])
    model.unmerge_adapter()
    return model


def merged_safely_and_taken_out(model):
    model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    return model


def loaded_from_itself(model):
    model.load_state_dict(model.state_dict())
    return model


def cast_by(name):
    """To float64 and back, in one of the ways that nn.Module has."""

    def cast(model):
        module = torch.__future__
        getattr(module, f"set_{name}_on_conversion")(True)
        try:
            return model.to(torch.float64).to(torch.float32)
        finally:
            getattr(module, f"set_{name}_on_conversion")(False)

    return cast


LIVES = {
    "deep copy": copy.deepcopy,
    "pickled": pickled,
    "loaded": loaded,
    "cast and back": lambda model: model.to(torch.float64).to(torch.float32),
    "wider adapter": widened,
    "cast by swapping": cast_by("swap_module_params"),
    "cast by overwriting": cast_by("overwrite_module_params"),
    "loaded from itself": loaded_from_itself,
    "merged, unmerged": merged_and_taken_out,
    "merged safely, unmerged": merged_safely_and_taken_out,
    "fused once more": fused_again,
}


@pytest.mark.slow("merged, unmerged")
@pytest.mark.parametrize("live", LIVES.values(), ids=LIVES)
def test_it_goes_on_in_fp8_with_the_same_weights_after(live, device):
    fused, plain, _ = pair(device)
    after = live(fused)
    assert step(after, length=SHORT).functions["DecoderLayer"] == 1
    assert_is_what_its_codes_make_it(after, device)
    unfuse(after)
    originals = {n: p for n, p in plain.named_parameters() if ".base_layer." in n}
    now = dict(after.named_parameters())
    assert not base_weights(after)
    for name, weight in originals.items():
        assert type(now[name]) is torch.nn.Parameter and now[name].is_contiguous()
        assert_near(now[name], weight, 1e-6, name)


@pytest.mark.gpu
def test_it_goes_on_in_fp8_after_a_visit_to_the_cpu(device):
    test_it_goes_on_in_fp8_with_the_same_weights_after(lambda m: m.cpu().to(device), device)


def assign(weight, value):
    weight.data = value


def load_another(base):
    base.load_state_dict({"weight": base.weight * 2}, strict=False, assign=True)


def take_from_another_place(base):
    """gate's, where up's is to be, in the same buffer."""
    other = base.other
    assign(base.weight, other.weight.data)


def write_an_old_alias(base):
    alias = base.weight.data
    base.make_room()
    alias.mul_(2)


# What writes a base weight, given its linear layer.
WRITES = {
    "data": lambda base: assign(base.weight, base.weight.data + 0.1),
    "data in place": lambda base: base.weight.data.mul_(2),
    "a row": lambda base: base.weight.data[3].mul_(5),
    "a slice of the transpose": lambda base: base.weight.data.t()[2:4].zero_(),
    "rows, in inference_mode": torch.inference_mode()(
        lambda base: base.weight.data.reshape(-1)[:64].mul_(5)
    ),
    "where a mask is": lambda base: base.weight.data.__setitem__(base.weight.data > 0, 0.1),
    "a chunk of columns": lambda base: base.weight.data.chunk(2, 1)[1][::2].mul_(4),
    "out=": lambda base: torch.mul(base.weight.data[:4], 3, out=base.weight.data[:4]),
    "foreach": lambda base: torch._foreach_mul_([base.weight.data, base.other.weight.data], 2.0),
    "a new parameter": lambda base: setattr(
        base, "weight", torch.nn.Parameter(base.weight * 2, requires_grad=False)
    ),
    "assign=True": load_another,
    "another place": take_from_another_place,
    "an old alias": write_an_old_alias,
}


@pytest.mark.slow("a slice of the transpose")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_codes_and_originals_follow_what_writes_a_weight(write, device):
    models = pair(device)[:2]
    fused, plain = models
    for model in models:
        mlp = layer_of(model).mlp
        base = mlp.up_proj.base_layer
        # not registered, or it would be a module of base
        vars(base).update(other=mlp.gate_proj.base_layer, make_room=lambda m=model: widened(m))
        with torch.device(device):
            write(base)
        model.eval()(**batch(model))
    weights, want = base_weights(fused), dict(plain.named_parameters())
    assert len(weights) == 7
    for name, weight in weights.items():
        codes, scales = codes_and_scales(want[name])
        assert torch.equal(weight.original.to(device), want[name]), name
        assert torch.equal(weight.codes.float(), codes.float()), name
        assert torch.equal(weight.scales, scales), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_alone_read_what_the_codes_stand_for(mode, device):
    fused, plain, _ = pair(device)
    got, want = (layer_of(model).mlp.up_proj.base_layer.weight for model in (fused, plain))
    x, coded = torch.ones(2, 32, device=device), got.dequantised()
    assert relative_error(coded, want) > 0.01
    with mode():
        einsum = functools.partial(torch.einsum, "ti,oi")
        for multiply in (F.linear, lambda x, w: x @ w.t(), einsum):
            assert torch.equal(multiply(x, got), multiply(x, coded))
        copied = torch.zeros_like(want).copy_(got)
        for read in (copied, got + 0, torch.cat([got]), got.T.contiguous().T, got.cpu().to(device)):
            assert torch.equal(read, want)


def test_what_codes_cannot_follow_is_refused(device):
    fused, _, _ = pair(device)
    before = {name: weight.original.clone() for name, weight in base_weights(fused).items()}
    weight = layer_of(fused).mlp.up_proj.base_layer.weight
    for change in (
        lambda: weight.data.resize_(32, 48), lambda: weight.data.set_(torch.ones(48, 32)),
        lambda: weight.data.t_(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="in FP8 would leave its codes as they are: assign"):
            change()
    layer_of(fused).mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="it has hooks"):
        loss = fused(**batch(fused)).loss
    with pytest.raises(RuntimeError, match="call backward, or delete that loss, first"):
        assign(weight, torch.ones_like(weight))
    assert_equal({name: one.original for name, one in base_weights(fused).items()}, before)
    del loss
    assign(weight, torch.ones_like(weight))
    assert type(weight) is torch.nn.Parameter


@pytest.mark.parametrize("after", [lambda model: model, copy.deepcopy], ids=["itself", "a copy"])
def test_cast_it_is_what_plain_peft_is(after, device):
    fused, plain, _ = pair(device)
    fused = after(fused.to(torch.float64))
    unfuse(fused)
    assert_near(logits(fused), logits(plain.to(torch.float64)), 1e-12)


@pytest.mark.slow
def test_a_graph_of_a_step_would_notice_weights_in_other_buffers(device):
    fused, _, _ = pair(device)
    addresses = []
    for cast in (torch.float32, torch.float32, torch.float64):
        fused.to(cast).to(torch.float32)
        step(fused, length=SHORT)
        addresses.append(addresses_of([p for p in fused.parameters() if isinstance(p, Fp8Weight)]))
    assert addresses[0] == addresses[1] != addresses[2]


def test_what_steps_aside_computes_with_what_the_codes_stand_for(device):
    fused, plain, _ = pair(device)
    with torch.no_grad():
        for name, weight in base_weights(fused).items():
            plain.get_parameter(name).copy_(weight.dequantised())
    with torch.no_grad():
        got, want = (model(**batch(model), use_cache=True).logits for model in (fused, plain))
    assert_near(got, want, 1e-5)
    layer_of(fused).self_attn.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="it has hooks"):
        got = step(fused, length=SHORT)
    assert_close(got, step(plain, length=SHORT), 1e-4)


@pytest.mark.parametrize("safe", [False, True])
def test_merged_is_what_plain_peft_merges(safe, device):
    fused, plain, _ = pair(device)
    for model in (fused, plain):
        model.add_adapter("other", LoraConfig(target_modules="all-linear", init_lora_weights=False))
    names = ["default", "other"]
    set_weights(plain, device, only="other")
    fused.load_state_dict(
        {n: p for n, p in plain.state_dict().items() if "other" in n}, strict=False
    )
    got, want = (
        model.merge_and_unload(safe_merge=safe, adapter_names=names) for model in (fused, plain)
    )
    assert_near(got(ids(device)).logits, want(ids(device)).logits, 0.2)
    state = got.state_dict()
    assert_close(state, want.state_dict(), 1e-6)
    assert all(type(tensor) is torch.Tensor for tensor in state.values())

"""The products with bordered weights, against plain PEFT and float64."""

import copy
from itertools import product

import pytest
import torch
from attention_case import LAYOUTS, assert_all_within_budget, raw_gradients
from bordered_case import in_place, pair, scale
from peft_models import adapt, base_model
from reference import random

from fused_lora import bordered as module
from fused_lora.adopt.borders import BorderedLinear, border

PRODUCTS = ("grow_k_forward", "grow_n_forward", "grow_k_backward", "grow_n_backward")


def side_by_side(projections, x, *_):
    """As PEFT computes it: every projection by itself."""
    return torch.cat([projection(x) for projection in projections], dim=-1)


def run(function, x, adapters, grad, layout=None):
    """The output and every gradient by name; `adapters` are the leaves of function's."""
    leaf = x.detach().clone().requires_grad_()
    for adapter in adapters:
        adapter.grad = None
    output = function(leaf if layout is None else layout(leaf))
    output.backward(grad.to(output.dtype))
    gradients = {f"adapter {i}": adapter.grad for i, adapter in enumerate(adapters)}
    return {"output": output.detach(), "x": leaf.grad} | gradients


def make(device, part, *, dtype=torch.float32, shape=(3, 13), family="Qwen2", **options):
    """One group, what BorderedLinear takes, the same projections in PEFT, and x and dy."""
    options = {"autocast_adapter_dtype": False} | options
    _, plain, borders = pair(device, dtype=dtype, family=family, **options)
    group = borders.groups[part]
    *adapters, bordered = borders.read(group)
    projections = [plain.get_submodule(name) for name in group.names]
    x = random(*shape, bordered.in_features, seed=1, dtype=dtype, device=device)
    grad = random(*shape, bordered.out, seed=2, dtype=dtype, device=device)
    return borders, adapters, bordered, projections, x, grad


def adapters_of(projections):
    parts = ((p.lora_A[p.active_adapters[0]], p.lora_B[p.active_adapters[0]]) for p in projections)
    return [one.weight for pair in parts for one in pair]


def assert_products_right(case, layout=None, autocast=False):
    _, adapters, bordered, projections, x, grad = case
    if layout is not None:
        grad = random(*layout(x).shape[:-1], bordered.out, seed=2, dtype=x.dtype, device=x.device)

    def under(function):
        def call(x):
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
                return function(x)

        return call

    got = run(
        under(lambda x: BorderedLinear.apply(x, *adapters, bordered)), x, adapters, grad, layout
    )
    eager = run(
        under(lambda x: side_by_side(projections, x)), x, adapters_of(projections), grad, layout
    )
    exact = [copy.deepcopy(projection).double() for projection in projections]
    truth = run(
        lambda x: side_by_side(exact, x), x.double(), adapters_of(exact), grad.double(), layout
    )
    assert_all_within_budget(got, eager, truth)


@pytest.mark.parametrize(
    ("part", "dtype", "family"),
    list(product(range(4), (torch.float32, torch.bfloat16), ("Qwen2", "Llama"))),
)
def test_products_are_right(part, dtype, family, device):
    assert_products_right(make(device, part, dtype=dtype, family=family))


@pytest.mark.parametrize("part", range(4))
def test_products_are_right_under_autocast_with_fp32_adapters(part, device):
    case = make(device, part, dtype=torch.bfloat16, autocast_adapter_dtype=True)
    assert case[1][0].dtype == torch.float32
    assert_products_right(case, autocast=True)


@pytest.mark.parametrize("part", [0, 2, 3])
def test_an_fp32_model_computes_in_autocasts_dtype(part, device):
    case = make(device, part)
    _, adapters, bordered, _, x, _ = case
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert BorderedLinear.apply(x, *adapters, bordered).dtype == torch.bfloat16
    assert_products_right(case, autocast=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_right_where_the_output_is_the_narrow_side(dtype, device):
    narrow = adapt(base_model(device, dtype=dtype, head_dim=6), device, False)
    plain = copy.deepcopy(narrow)
    borders = border(narrow)
    group = borders.groups[0]
    *adapters, bordered = borders.read(group)
    assert bordered.out == 24 < bordered.in_features and bordered.bias is not None
    x = random(3, 13, bordered.in_features, seed=1, dtype=dtype, device=device)
    grad = random(3, 13, bordered.out, seed=2, dtype=dtype, device=device)
    projections = [plain.get_submodule(name) for name in group.names]
    assert_products_right((borders, adapters, bordered, projections, x, grad))


def test_products_are_right_after_the_scaling_and_the_adapters_changed(device):
    model, _, borders = pair(device, autocast_adapter_dtype=False)
    scale(model), in_place(model)
    group = borders.groups[3]
    *adapters, bordered = borders.read(group)
    x = random(3, 13, bordered.in_features, seed=1, device=device)
    grad = random(3, 13, bordered.out, seed=2, device=device)
    plain = [copy.deepcopy(projection) for projection in group.projections]
    assert plain[0].scaling == {"default": 3.0 * 12 / 8}
    assert_products_right((borders, adapters, bordered, plain, x, grad))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("options", [{"r": 3}, {"rank_pattern": {"k_proj": 5, "up_proj": 1}}])
def test_products_are_right_with_any_ranks(part, options, device):
    assert_products_right(make(device, part, **options))


@pytest.mark.parametrize("part", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_x_may_lie_in_memory_in_any_way(part, layout, device):
    assert_products_right(make(device, part, dtype=torch.bfloat16), LAYOUTS[layout])


@pytest.mark.parametrize("part", [0, 2, 3])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 3, 4)])
def test_any_number_of_tokens(part, shape, device):
    assert_products_right(make(device, part, shape=shape, dtype=torch.bfloat16))


def test_the_narrow_side_grows(device, monkeypatch):
    ran = []
    for name in PRODUCTS:
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, name=name, function=function: ran.append(name) or function(*a)
        )
    found = []
    for part in range(4):
        _, adapters, bordered, _, x, grad = make(device, part)
        ran.clear()
        BorderedLinear.apply(x.requires_grad_(), *adapters, bordered).backward(grad)
        found.append([PRODUCTS.index(name) for name in ran])
    # in 52: qkv to 104 and o to 52; gate and up to 278, down back from 139
    assert found == [[0, 3], [1, 3], [0, 3], [1, 2]]


@pytest.fixture(params=[2, 3], ids=["gate and up", "down"])
def case(request, device):
    """One that grows K forward and N backward, and one the other way round."""
    _, adapters, bordered, _, x, grad = make(device, request.param, dtype=torch.bfloat16)
    return x.requires_grad_(), adapters, bordered, grad


def test_a_second_backward_through_a_retained_graph_gives_the_same(case):
    x, adapters, bordered, grad = case
    output = BorderedLinear.apply(x, *adapters, bordered)
    first = torch.autograd.grad(output, (x, *adapters), grad, retain_graph=True)
    second = torch.autograd.grad(output, (x, *adapters), grad)
    assert all(map(torch.equal, first, second))


def test_differentiating_twice_is_a_clear_error(case):
    x, adapters, bordered, grad = case
    output = BorderedLinear.apply(x, *adapters, bordered)
    with pytest.raises(RuntimeError, match="BorderedLinear is not twice differentiable"):
        torch.autograd.grad(output, x, grad, create_graph=True)


def test_nothing_that_came_in_or_was_saved_is_written(case):
    x, adapters, bordered, grad = case
    tensors = [x, *adapters, bordered.matrix, grad]
    if bordered.bias is not None:
        tensors.append(bordered.bias)
    before = [t.detach().clone() for t in tensors]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = BorderedLinear.apply(x, *adapters, bordered)
    tensors += [*saved, output]
    before += [t.detach().clone() for t in (*saved, output)]
    output.backward(grad)
    assert all(map(torch.equal, tensors, before))


def test_x_and_its_product_with_A_are_all_that_is_kept(case):
    x, adapters, bordered, _ = case
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        BorderedLinear.apply(x, *adapters, bordered)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    width = bordered.matrix.shape[0] - bordered.out
    assert kept.pop(bordered.matrix.untyped_storage().data_ptr())
    assert kept.pop(x.untyped_storage().data_ptr())
    assert list(kept.values()) == [3 * 13 * width * 2]


def test_the_output_may_be_changed_in_place(case):
    x, adapters, bordered, grad = case
    want = torch.autograd.grad(
        BorderedLinear.apply(x, *adapters, bordered) * 3, (x, *adapters), grad
    )
    output = BorderedLinear.apply(x, *adapters, bordered)
    got = torch.autograd.grad(output.mul_(3), (x, *adapters), grad)
    assert all(map(torch.equal, got, want))


def test_a_border_refreshed_before_backward_is_autograds_error(device):
    borders, adapters, bordered, _, x, grad = make(device, 3)
    output = BorderedLinear.apply(x.requires_grad_(), *adapters, bordered)
    borders.refresh_stale()  # copies nothing
    output.backward(grad, retain_graph=True)
    with torch.no_grad():
        adapters[0].mul_(2)
    borders.refresh_stale()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(grad)


def test_every_subset_of_frozen_inputs_gives_none_there_and_the_same_values_elsewhere(case):
    x, adapters, bordered, grad = case
    full = torch.autograd.grad(BorderedLinear.apply(x, *adapters, bordered), (x, *adapters), grad)
    for needs in product((False, True), repeat=1 + len(adapters)):
        leaves = [
            t.detach().requires_grad_(need) for t, need in zip((x, *adapters), needs, strict=True)
        ]
        output = BorderedLinear.apply(*leaves, bordered)
        assert output.requires_grad == any(needs)
        if not any(needs):
            continue
        for need, got, want in zip(needs, raw_gradients(output, [grad]), full, strict=True):
            assert (got is None) is not need
            # p alone and p beside dy are two products, rounded apart on some machines
            assert got is None or torch.allclose(got, want, rtol=2e-2, atol=2e-2)


def test_bad_input_is_a_value_error(device):
    _, adapters, bordered, _, x, _ = make(device, 3)
    A, B = adapters
    with pytest.raises(ValueError, match=r"x is \[3, 13, 138\], its last dimension should be 139"):
        BorderedLinear.apply(x[..., 1:], A, B, bordered)
    with pytest.raises(ValueError, match="1 adapter tensors given, should be 2"):
        BorderedLinear.apply(x, A, bordered)
    with pytest.raises(ValueError, match=r"A 0 is \[9, 139\] .* of one r up to 8"):
        BorderedLinear.apply(x, torch.zeros(9, 139), torch.zeros(52, 9), bordered)
    with pytest.raises(ValueError, match=r"B 0 \[51, 8\], should be"):
        BorderedLinear.apply(x, A, B[1:], bordered)
    with pytest.raises(ValueError, match=r"the buffer is torch.float32 and x torch.bfloat16"):
        BorderedLinear.apply(x.bfloat16(), A, B, bordered)

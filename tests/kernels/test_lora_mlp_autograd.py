"""LoRA_MLP as a citizen of autograd: what it saves, writes and skips, and the GPU's own traps."""

from itertools import product

import pytest
import torch
from cuda_graph import capture
from lora_mlp_case import (
    HIDDEN,
    INTERMEDIATE,
    NAMES,
    assert_equal,
    assert_right,
    double,
    fused,
    mlp,
    raw_gradients,
    run,
    tokens,
    truth_of,
)
from reference import (
    ADAPTER_NAMES,
    BUDGET,
    CHECKPOINTS,
    assert_within_budget,
    checkpointed,
    lora_mlp,
    random,
    relative_error,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fused_mlp

# --- autograd -------------------------------------------------------------------------------------


def test_a_second_backward_through_a_retained_graph_gives_the_same(case):
    x, adapters, frozen, grad_output = case
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    output = fused(*leaves, frozen)
    first = torch.autograd.grad(output, leaves, grad_output, retain_graph=True)
    second = torch.autograd.grad(output, leaves, grad_output)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_differentiating_twice_is_a_clear_error(case):
    x, adapters, frozen, grad_output = case
    output = fused(x.requires_grad_(), *adapters, frozen)
    with pytest.raises(RuntimeError, match="LoRA_MLP is not twice differentiable"):
        torch.autograd.grad(output, x, grad_output, create_graph=True)


def test_nothing_that_came_in_or_was_saved_is_written(case):
    x, adapters, frozen, grad_output = case
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = fused(*leaves, frozen)
    owned_by_others = [*leaves, *frozen[:3], *saved, output, grad_output]
    before = [t.detach().clone() for t in owned_by_others]
    output.backward(grad_output)
    for now, old in zip(owned_by_others, before, strict=True):
        assert torch.equal(now, old)


def test_x_and_the_incoming_gradient_may_have_other_consumers(case):
    x, adapters, frozen, grad_output = case
    other = random(*x.shape, dtype=x.dtype, device=x.device, seed=5)

    def residual(function):
        def block(x, *rest):  # x and the gradient reach the MLP, a sum and a product
            return x * other.to(x.dtype) + function(x, *rest) + x

        return block

    got, eager = run(residual(fused), *case), run(residual(lora_mlp), *case)
    double_case = x.double(), [t.double() for t in adapters], double(frozen), grad_output.double()
    truth = run(residual(lora_mlp), *double_case)
    for name in NAMES:
        assert_within_budget(name, got[name], eager[name], truth[name])


@pytest.mark.parametrize("changed", ["x", "down_B", "gate_weight"])
def test_an_input_changed_in_place_before_backward_is_autograds_error(changed, case):
    x, adapters, frozen, grad_output = case
    x = x.requires_grad_() * 1
    adapters = [t.requires_grad_() for t in adapters]
    output = fused(x, *adapters, frozen)
    with torch.no_grad():
        {"x": x, "down_B": adapters[5], "gate_weight": frozen.gate_weight}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(grad_output)


def test_every_subset_of_frozen_inputs_gives_none_there_and_the_same_values_elsewhere(case):
    x, adapters, frozen, grad_output = case
    tensors = (x, *adapters)
    full = run(fused, *case)
    for needs in product((False, True), repeat=7):
        leaves = [t.clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        output = fused(*leaves, frozen)
        assert torch.equal(output, full["output"]) and output.requires_grad == any(needs)
        if not any(needs):
            continue
        gradients = raw_gradients(output, grad_output)
        for name, need, gradient in zip(NAMES[1:], needs, gradients, strict=True):
            if need:
                assert torch.equal(gradient, full[name]), (name, needs)
            else:
                assert gradient is None, (name, needs)


class CountProducts(TorchDispatchMode):
    """How many matrix products run inside."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += name.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("trained", "in_backward"),
    [
        (NAMES[1:], 14),
        (ADAPTER_NAMES, 11),  # the first layer: 3 products of dx less
        (("x",), 8),
        (("gate_A", "up_A", "down_A"), 7),
        (("gate_B", "up_B", "down_B"), 7),
        (("down_A", "down_B"), 6),
    ],
    ids=("all", "adapters", "x", "A", "B", "down"),
)
def test_forward_is_8_products_and_backward_only_those_that_are_needed(trained, in_backward, case):
    x, adapters, frozen, grad_output = case
    for name, tensor in zip(NAMES[1:], (x, *adapters), strict=True):
        tensor.requires_grad_(name in trained)
    with CountProducts() as forward:
        output = fused(x, *adapters, frozen)
    with CountProducts() as backward:
        raw_gradients(output, grad_output)
    assert (forward.count, backward.count) == (8, in_backward)


def saved_for_backward(function, x, adapters, frozen):
    """The activations that autograd keeps alive, each storage once."""
    saved = {}
    parameters = {t.data_ptr() for t in (*adapters, *frozen[:3])}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(x, *adapters, frozen)
    return list(saved.values()), output


def test_the_activations_saved_are_x_gate_up_and_z(case):
    x, adapters, frozen, _ = case
    adapters = [t.requires_grad_() for t in adapters]
    rows = x.view(-1, HIDDEN)
    A = torch.cat([adapters[0], adapters[2]]).detach()
    z = rows @ A.t()
    gate, up = (
        fused_mlp.matmul_lora(rows, weight, columns, B.detach(), scaling)
        for weight, columns, B, scaling in (
            (frozen.gate_weight, z[:, : len(adapters[0])], adapters[1], frozen.gate_scaling),
            (frozen.up_weight, z[:, len(adapters[0]) :], adapters[3], frozen.up_scaling),
        )
    )
    saved, output = saved_for_backward(fused, x.requires_grad_(), adapters, frozen)
    assert saved[0] is x  # not a copy
    assert len(saved) == 5
    for got, want in zip(saved[1:], (gate, up, z, A), strict=True):
        assert torch.equal(got, want)
    del output  # it held them


# eager keeps gate, up, silu(gate), their product, three x A' of rank 8 and x; where adapters are
# fp32 it keeps what it has cast for them: x twice, and the product
EAGER_BYTES = {
    (torch.bfloat16, False): 2 * (HIDDEN + 4 * INTERMEDIATE + 3 * 8),
    (torch.float32, True): 2 * (2 * HIDDEN + 4 * INTERMEDIATE + 3 * 8),
    (torch.float32, False): 2 * 3 * INTERMEDIATE + 4 * (2 * HIDDEN + INTERMEDIATE + 3 * 8),
}


@pytest.mark.parametrize(("adapter_dtype", "autocast"), EAGER_BYTES, ids=str)
def test_bytes_saved_per_token(adapter_dtype, autocast, device):
    x, _ = tokens(39, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device, adapter_dtype=adapter_dtype)
    x, *adapters = (t.requires_grad_() for t in (x, *adapters))
    saved_bytes = {}
    for function in (fused, lora_mlp):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            saved, output = saved_for_backward(function, x, adapters, frozen)
        saved_bytes[function] = sum(t.nbytes for t in saved if t.shape[0] == 39)
        del output
    assert saved_bytes[fused] == 39 * 2 * (HIDDEN + 2 * INTERMEDIATE + 2 * 8)
    assert saved_bytes[lora_mlp] == 39 * EAGER_BYTES[adapter_dtype, autocast]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_gradients_are_bitwise_equal(kind, case):
    assert_equal(run(checkpointed(fused, kind), *case), run(fused, *case))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same_and_nothing_is_saved(mode, case):
    x, adapters, frozen, _ = case
    adapters = [t.requires_grad_() for t in adapters]
    want = fused(x, *adapters, frozen)
    with mode():
        saved, output = saved_for_backward(fused, x * 1, adapters, frozen)
    assert torch.equal(output, want) and not output.requires_grad and not saved


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_compiled_is_within_the_error_budget(case):
    got = run(torch.compile(lambda *inputs: fused(*inputs)), *case)
    eager, truth = run(lora_mlp, *case), truth_of(*case)
    for name in NAMES:
        assert_within_budget(name, got[name], eager[name], truth[name])


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_a_captured_cuda_graph_is_right_on_new_data(autocast, device):
    x, grad_output = tokens(3, 13, dtype=torch.bfloat16, device=device)
    adapter_dtype = torch.float32 if autocast else torch.bfloat16
    adapters, frozen = mlp(torch.bfloat16, device, adapter_dtype=adapter_dtype)
    leaves = [t.clone().requires_grad_() for t in (x, *adapters)]

    def step():
        # the cache of casts outlives neither this block nor, so, the capture
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
            output = fused(*leaves, frozen)
        return output, *torch.autograd.grad(output, leaves, grad_output)

    replay, results = capture(step)
    for seed in (50, 60):
        with torch.no_grad():
            for number, tensor in enumerate((*leaves, grad_output)):
                scale = tensor.float().std().item()
                tensor.copy_(random(*tensor.shape, seed=seed + number, scale=scale))
        replay()
        now = leaves[0].detach(), [t.detach() for t in leaves[1:]], frozen, grad_output
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            eager = run(lora_mlp, *now)
        truth = truth_of(*now)
        for name, result in zip(NAMES, results, strict=True):
            assert_within_budget(name, result, eager[name], truth[name])


@pytest.mark.gpu
def test_a_second_gpu_is_right():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, grad_output = tokens(3, 13, dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_right(x, *mlp(torch.bfloat16, "cuda:1"), grad_output)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_more_than_2_to_the_31_gate_elements(device):
    """A few tokens over and over, so that eager PyTorch on those few says what is right."""
    count, intermediate, hidden, pattern = 195_100, 11_008, 64, 256
    assert count * intermediate > 2**31
    # gate and up, hidden, their three gradients, and room
    if torch.cuda.mem_get_info()[0] < 7 * 2 * count * intermediate:
        pytest.skip("needs 31 GB of free GPU memory")
    options = {"hidden": hidden, "intermediate": intermediate}
    adapters, frozen = mlp(torch.bfloat16, device, **options)
    few = random(pattern, hidden, dtype=torch.bfloat16, device=device, seed=1)
    few_gradient = random(pattern, hidden, dtype=torch.bfloat16, device=device, seed=2)
    which = torch.arange(count, device=device) % pattern
    got = run(fused, few[which], adapters, frozen, few_gradient[which])
    # output and dx of each token are its pattern's; the adapters' gradients are sums, in which a
    # pattern counts as often as it occurs
    often = torch.bincount(which, minlength=pattern)[:, None]
    case = few, adapters, frozen, few_gradient
    eager, truth = run(lora_mlp, *case), truth_of(*case)
    weighted = few.double(), adapters, frozen, few_gradient.double() * often
    truth_of_sums = truth_of(*weighted)
    for name in ("output", "x"):
        assert got[name].isfinite().all()
        for window in (slice(0, 256), slice(-256, None), slice(195_083 - 128, 195_083 + 17)):
            rows = which[window]
            assert_within_budget(name, got[name][window], eager[name][rows], truth[name][rows])
    for name in ADAPTER_NAMES:
        allowed = BUDGET * relative_error(eager[name], truth[name])
        assert relative_error(got[name], truth_of_sums[name]) <= allowed, name

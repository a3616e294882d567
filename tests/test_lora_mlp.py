"""LoRA_MLP, its output and its seven gradients, against eager PyTorch in float64."""

import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from reference import ADAPTER_NAMES, BUDGET, assert_within_budget, lora_mlp, random, relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fused_mlp
from fused_mlp import FrozenMLP, LoRA_MLP

HIDDEN, INTERMEDIATE = 52, 139  # multiples of nothing
NAMES = ("output", "x", *ADAPTER_NAMES)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
fused = LoRA_MLP.apply


def mlp(
    dtype, device, *, r=(8, 8, 8), adapter_dtype=None, hidden=HIDDEN, intermediate=INTERMEDIATE
):
    """Six adapters, no B zero, and three frozen weights with three different scales."""
    sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    adapters, weights = [], []
    for seed, (rank, (rows, columns)) in enumerate(zip(r, sizes, strict=True)):
        options = {"dtype": adapter_dtype or dtype, "device": device}
        adapters.append(random(rank, columns, seed=10 + seed, scale=columns**-0.5, **options))
        adapters.append(random(rows, rank, seed=20 + seed, scale=rank**-0.5, **options))
        options["dtype"] = dtype
        weights.append(random(rows, columns, seed=30 + seed, scale=columns**-0.5, **options))
    return adapters, FrozenMLP(*weights, 2.0, 0.5, 1.5)


def tokens(*shape, dtype, device):
    """x and an incoming gradient."""
    return [random(*shape, HIDDEN, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]


def double(frozen):
    return FrozenMLP(*(weight.double() for weight in frozen[:3]), *frozen[3:])


def run(function, x, adapters, frozen, grad_output, layout=None):
    """Output and gradients by name; `layout` makes another view of x inside the graph."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *adapters)]
    x, *adapters = leaves
    output = function(x if layout is None else layout(x), *adapters, frozen)
    output.backward(grad_output.to(output.dtype))
    return dict(zip(NAMES, (output.detach(), *(t.grad for t in leaves)), strict=True))


@torch.no_grad()
def raw_gradients(output, grad_output):
    """What LoRA_MLP.backward itself returns for x and the adapters."""
    *gradients, of_frozen = output.grad_fn.apply(grad_output)
    assert of_frozen is None
    return gradients


def truth_of(x, adapters, frozen, grad_output, layout=None):
    adapters = [t.double() for t in adapters]
    return run(lora_mlp, x.double(), adapters, double(frozen), grad_output.double(), layout)


def assert_right(*case, layout=None):
    got, eager = run(fused, *case, layout), run(lora_mlp, *case, layout)
    truth = truth_of(*case, layout)
    for name in NAMES:
        assert_within_budget(name, got[name], eager[name], truth[name])


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name


@pytest.fixture
def case(device):
    """x, adapters, frozen, grad_output: bf16, 3 x 13 tokens."""
    x, grad_output = tokens(3, 13, dtype=torch.bfloat16, device=device)
    return x, *mlp(torch.bfloat16, device), grad_output


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [(1, 1, 1), (4, 4, 4), (8, 8, 8), (12, 12, 12), (32, 32, 32),
                               (64, 64, 64), (1, 12, 64), (64, 4, 1)], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradients_are_within_the_error_budget(dtype, r, device):
    x, grad_output = tokens(3, 13, dtype=dtype, device=device)
    assert_right(x, *mlp(dtype, device, r=r), grad_output)


@pytest.mark.parametrize("shape", [(), (1,), (13,), (1, 1), (2, 13), (2, 1, 3, 5)], ids=str)
def test_any_number_of_leading_dimensions_is_right(shape, device):
    x, grad_output = tokens(*shape, dtype=torch.bfloat16, device=device)
    assert_right(x, *mlp(torch.bfloat16, device), grad_output)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)], ids=str)
def test_zero_tokens_give_an_empty_output_and_zero_gradients(shape, device):
    x, grad_output = tokens(*shape, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device)
    got = run(fused, x, adapters, frozen, grad_output)
    assert got["output"].shape == got["x"].shape == (*shape, HIDDEN)
    for name, adapter in zip(ADAPTER_NAMES, adapters, strict=True):
        assert torch.equal(got[name], torch.zeros_like(adapter))


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "sliced": lambda t: torch.cat([t, t, t], dim=-1)[..., 1 : 1 + t.shape[-1]],
    "every second token": lambda t: torch.repeat_interleave(t, 2, dim=1)[:, ::2],
    "expanded": lambda t: t[:1].expand(5, *t.shape[1:]),
    "features first": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_x_is_right(name, case):
    x, adapters, frozen, grad_output = case
    layout = LAYOUTS[name]
    assert not layout(x).is_contiguous()
    assert_right(x, adapters, frozen, layout(grad_output).contiguous(), layout=layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_incoming_gradient_gives_what_a_contiguous_one_does(name, case):
    x, adapters, frozen, grad_output = case
    grad_output = LAYOUTS[name](grad_output)
    x = LAYOUTS[name](x).contiguous()
    assert not grad_output.is_contiguous()
    assert_right(x, adapters, frozen, grad_output)


def test_gradient_of_a_sum_is_right(case):
    x, adapters, frozen, _ = case
    one = torch.ones((), dtype=x.dtype, device=x.device)
    assert_right(x, adapters, frozen, one.expand(x.shape))  # strides 0, 0, 0, as sum() gives


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in the interpreter
def test_large_gates_give_finite_and_right_values(case):
    x, adapters, frozen, grad_output = case
    frozen = frozen._replace(gate_weight=frozen.gate_weight * 60)
    gate = x.float() @ frozen.gate_weight.float().t()
    assert gate.min() < -100 and gate.max() > 100
    assert_right(x, adapters, frozen, grad_output)


def test_with_B_zero_A_gets_exactly_zero_and_B_does_not(case):
    x, adapters, frozen, grad_output = case
    adapters[1::2] = [torch.zeros_like(B) for B in adapters[1::2]]
    got = run(fused, x, adapters, frozen, grad_output)
    for name in ADAPTER_NAMES:
        assert (got[name] == 0).all() if name.endswith("A") else (got[name] != 0).any()


def test_repetition_is_bitwise_equal(case):
    assert_equal(run(fused, *case), run(fused, *case))


def test_accumulated_micro_batches_are_within_the_error_budget_of_one_batch(device):
    x, grad_output = tokens(4, 13, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device)

    def accumulate(function):
        leaves = [t.clone().requires_grad_() for t in adapters]
        for micro_x, micro_gradient in zip(x.split(1), grad_output.split(1), strict=True):
            function(micro_x, *leaves, frozen).backward(micro_gradient)
        return [leaf.grad for leaf in leaves]

    truth = truth_of(x, adapters, frozen, grad_output)
    for name, got, eager in zip(
        ADAPTER_NAMES, accumulate(fused), accumulate(lora_mlp), strict=True
    ):
        assert_within_budget(name, got, eager, truth[name])


# --- dtypes and autocast --------------------------------------------------------------------------


@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_is_right_and_gives_dtypes_as_eager_does(
    dtype, weight_dtype, adapter_dtype, device
):
    x, grad_output = tokens(3, 13, dtype=dtype, device=device)
    case = (x, *mlp(weight_dtype, device, adapter_dtype=adapter_dtype), grad_output)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, eager = run(fused, *case), run(lora_mlp, *case)
    truth = truth_of(*case)
    assert got["output"].dtype == torch.bfloat16
    for name in NAMES:
        assert got[name].dtype == eager[name].dtype
        assert_within_budget(name, got[name], eager[name], truth[name])


def test_fp32_adapters_without_autocast_are_right(device):
    x, grad_output = tokens(3, 13, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device, adapter_dtype=torch.float32)
    assert run(fused, x, adapters, frozen, grad_output)["output"].dtype == torch.bfloat16
    assert_right(x, adapters, frozen, grad_output)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_backward_itself_returns_each_gradient_in_its_tensors_dtype(
    adapter_dtype, autocast, device
):
    x, grad_output = tokens(3, 13, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device, adapter_dtype=adapter_dtype)
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        output = fused(*leaves, frozen)
        gradients = raw_gradients(output, grad_output)  # autograd's engine would cast
    assert [t.dtype for t in gradients] == [leaf.dtype for leaf in leaves]


def test_autocast_around_backward_alone_changes_nothing(device):
    x, grad_output = tokens(3, 13, dtype=torch.float32, device=device)
    adapters, frozen = mlp(torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    want = torch.autograd.grad(fused(*leaves, frozen), leaves, grad_output)
    output = fused(*leaves, frozen)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = torch.autograd.grad(output, leaves, grad_output)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


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
        (NAMES[1:], 18),
        (ADAPTER_NAMES, 14),  # the first layer: 4 products of dx less
        (("x",), 9),
        (("gate_A", "up_A", "down_A"), 8),
        (("gate_B", "up_B", "down_B"), 9),
        (("down_A", "down_B"), 6),
    ],
    ids=("all", "adapters", "x", "A", "B", "down"),
)
def test_forward_is_9_products_and_backward_only_those_that_are_needed(trained, in_backward, case):
    x, adapters, frozen, grad_output = case
    for name, tensor in zip(NAMES[1:], (x, *adapters), strict=True):
        tensor.requires_grad_(name in trained)
    with CountProducts() as forward:
        output = fused(x, *adapters, frozen)
    with CountProducts() as backward:
        raw_gradients(output, grad_output)
    assert (forward.count, backward.count) == (9, in_backward)


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


def test_the_activations_saved_are_x_gate_and_up(case):
    x, adapters, frozen, _ = case
    adapters = [t.requires_grad_() for t in adapters]
    rows = x.view(-1, HIDDEN)
    gate, up = (
        fused_mlp.matmul_lora(rows, weight, A.detach(), B.detach(), scaling)
        for weight, A, B, scaling in (
            (frozen.gate_weight, *adapters[0:2], frozen.gate_scaling),
            (frozen.up_weight, *adapters[2:4], frozen.up_scaling),
        )
    )
    saved, output = saved_for_backward(fused, x.requires_grad_(), adapters, frozen)
    assert len(saved) == 3
    assert saved[0] is x  # not a copy
    assert torch.equal(saved[1], gate) and torch.equal(saved[2], up)
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
    assert saved_bytes[fused] == 39 * 2 * (HIDDEN + 2 * INTERMEDIATE)
    assert saved_bytes[lora_mlp] == 39 * EAGER_BYTES[adapter_dtype, autocast]


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "nested"])
def test_checkpointed_gradients_are_bitwise_equal(kind, case):
    def checkpointed(*inputs):
        if kind == "nested":
            inner = lambda *inputs: checkpoint(fused, *inputs, use_reentrant=False)  # noqa: E731
            return checkpoint(inner, *inputs, use_reentrant=False)
        return checkpoint(fused, *inputs, use_reentrant=kind == "reentrant")

    assert_equal(run(checkpointed, *case), run(fused, *case))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same_and_nothing_is_saved(mode, case):
    x, adapters, frozen, _ = case
    adapters = [t.requires_grad_() for t in adapters]
    want = fused(x, *adapters, frozen)
    with mode():
        saved, output = saved_for_backward(fused, x * 1, adapters, frozen)
    assert torch.equal(output, want) and not output.requires_grad and not saved


# --- errors ---------------------------------------------------------------------------------------


def with_weight(**changes):
    def change(x, adapters, frozen):
        return (
            x,
            adapters,
            frozen._replace(**{k: f(getattr(frozen, k)) for k, f in changes.items()}),
        )

    return change


def with_adapter(index, function):
    def change(x, adapters, frozen):
        adapters[index] = function(adapters[index])
        return x, adapters, frozen

    return change


ERRORS = {
    "x narrow": (
        lambda x, *rest: (x[..., 1:], *rest), r"x is \[3, 13, 51\].* should be 52"
    ),
    "x without dimensions": (
        lambda x, *rest: (x[0, 0, 0], *rest), r"x is \[\].* should be 52"
    ),
    "up_weight": (
        with_weight(up_weight=lambda t: t[1:]), r"up_weight is \[138, 52\], should be \[139, 52\]"
    ),
    "down_weight": (
        with_weight(down_weight=lambda t: t.t()), r"down_weight is \[139, 52\].* \[52, 139\]"
    ),
    "gate_A": (
        with_adapter(0, lambda t: t[:, 1:]),
        r"gate_A is \[8, 51\] and gate_B \[139, 8\], should be \[r, 52\] and \[139, r\] of one r",
    ),
    "up_B": (
        with_adapter(3, lambda t: t[:, 1:]), r"up_A is \[8, 52\] and up_B \[139, 7\], should be"
    ),
    "down_A": (
        with_adapter(4, lambda t: t.t()), r"down_A is \[139, 8\] .*should be \[r, 139\]"
    ),
    "weight trained": (
        with_weight(up_weight=lambda t: t.requires_grad_()),
        r"up_weight requires a gradient.*requires_grad_\(False\)",
    ),
    "weight dtype": (
        with_weight(down_weight=lambda t: t.float()),
        "down_weight is torch.float32 and x torch.bfloat16: give both one dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_a_value_error_that_names_it(name, case):
    change, message = ERRORS[name]
    x, adapters, frozen = change(*case[:3])
    with pytest.raises(ValueError, match="LoRA_MLP: " + message):
        fused(x, *adapters, frozen)


# --- the folder on its own ------------------------------------------------------------------------


def test_a_copy_of_the_folder_works_elsewhere_with_torch_and_triton_alone(tmp_path, device):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(fused_mlp.__file__).parent, tmp_path / "borrowed", ignore=ignored)
    program = f"""
import sys, torch, borrowed
weights = [torch.randn(*size, device="{device}") for size in ((6, 4), (6, 4), (4, 6))]
adapters = [torch.randn(*size, device="{device}", requires_grad=True)
            for size in ((2, 4), (6, 2), (2, 4), (6, 2), (2, 6), (4, 2))]
frozen = borrowed.FrozenMLP(*weights, 1.0, 1.0, 1.0)
borrowed.LoRA_MLP.apply(torch.randn(3, 4, device="{device}"), *adapters, frozen).sum().backward()
assert all(adapter.grad.isfinite().all() for adapter in adapters)
print(*{{"peft", "transformers", "fused_mlp", "fused_lora"}} & set(sys.modules))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


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

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in (50, 60):
        with torch.no_grad():
            for number, tensor in enumerate((*leaves, grad_output)):
                scale = tensor.float().std().item()
                tensor.copy_(random(*tensor.shape, seed=seed + number, scale=scale))
        graph.replay()
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

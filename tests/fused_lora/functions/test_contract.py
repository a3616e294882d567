"""What every operation promises its callers: the same tests over the whole table."""

import pytest
import torch
from cases.cuda_graph import capture
from cases.operands import BF16, DTYPES, FP32, Case
from cases.reference import is_poison, over_draws, random, use_poisoned_memory
from cases.rms_norm_case import Kernel
from contract import (
    ALL,
    KERNELS,
    LAYOUTS,
    LOSSES,
    OF_A_KERNEL,
    OF_KERNELS,
    OF_PRODUCTS,
    OPERATIONS,
    WITH_VALUES,
    as_tuple,
    assert_equal,
    assert_right,
    every,
    leaves_of,
    run,
    tensors_in,
    usual,
    with_layout,
)
from triton.runtime.interpreter import GridExecutor

OF_VARIANTS = ("transposed", "one for all")  # layouts
OF_OTHER_VALUES = ("within wider rows", "one for all", *OF_KERNELS)


# --- values ---------------------------------------------------------------------------------------


def axes_of_values(operation):
    """Sums over few tokens err by luck, so products are tried on the usual number of them."""
    shapes = (operation.usual,) if operation.has_matmuls else operation.shapes
    return {"dtype": DTYPES, "shape": shapes, **operation.options}


@every(WITH_VALUES, axes_of_values)
def test_results_are_within_the_error_budget(operation, options, device):
    assert_right(operation, operation.case(device, **options))


@pytest.mark.parametrize(
    ("operation", "shape"),
    [(operation, shape) for operation in OF_PRODUCTS for shape in operation.shapes],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_any_number_of_tokens_and_leading_dimensions_is_right(operation, shape, device):
    over_draws(lambda: assert_right(operation, operation.case(device, shape=shape)), first=1)


@pytest.mark.parametrize("operation", LOSSES, ids=lambda operation: operation.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_their_gradients_are_within_the_error_budget(dtype, operation, device):
    """In a single number eager's errors may happen to cancel."""
    over_draws(lambda: assert_right(operation, operation.case(device, dtype)))


def axes_of_layouts(operation):
    gradients = range(len(operation.case("cpu").gradients))
    where = (*operation.strided, *(f"gradient {i}" for i in gradients))
    layouts = OF_VARIANTS if operation.is_variant else LAYOUTS
    return {"where": where, "layout": (*layouts, *(() if operation.has_matmuls else OF_KERNELS))}


@every(WITH_VALUES, axes_of_layouts)
def test_any_layout_gives_what_a_contiguous_one_does(operation, options, device):
    where, layout = options.values()
    case = with_layout(operation.case(device), (where,), (LAYOUTS | OF_KERNELS)[layout])
    if tensors_in(case)[where].is_contiguous():
        pytest.skip("so small that it is contiguous")
    got = run(operation, case)
    if operation.has_matmuls:
        assert_right(operation, case, got)
    elif layout in OF_OTHER_VALUES:
        assert_equal(got, run(operation, with_layout(case, (where,), torch.Tensor.contiguous)))
    else:
        assert_equal(got, usual(operation, device))


@pytest.mark.parametrize("operation", OF_A_KERNEL, ids=lambda operation: operation.name)
@pytest.mark.parametrize(
    "layout", ["within wider rows", "every second row", "by token", "one row for all"]
)
def test_one_launch_each_way_reads_rows_where_they_are(layout, operation, monkeypatch, device):
    module, *names = KERNELS[operation.name]
    kernel = Kernel()
    for name in names:
        monkeypatch.setattr(module, name, kernel)
    where = ("x", "delta", "gate", "q", "k", "gradient 0", "gradient 1")
    case = with_layout(operation.case(device), where, (LAYOUTS | OF_KERNELS)[layout])
    run(operation, case)
    given = [case.inputs[name] for name in where if name in case.inputs], case.gradients
    for tensors, (_, arguments) in zip(given, kernel.launches, strict=True):
        read = [t.data_ptr() for t in arguments[: len(tensors)]]
        assert read == [t.data_ptr() for t in tensors]


@pytest.mark.parametrize("operation", OF_A_KERNEL, ids=lambda operation: operation.name)
@pytest.mark.parametrize("layout", ["transposed", "by token", "features first", "elements apart"])
def test_results_are_new_contiguous_tensors(layout, operation, device):
    """But RoPE's, in which the heads of a token lie side by side."""
    case = operation.case(device, shape=None if operation.name == "rope" else (2, 3, 4, 20))
    case = with_layout(case, (*operation.strided, "gradient 0", "gradient 1"), LAYOUTS[layout])
    leaves = leaves_of(operation, case)
    outputs = as_tuple(operation.function(*leaves.values()))
    trained = {name: leaves[name] for name in operation.trained if name != "delta"}  # may be x's
    gradients = torch.autograd.grad(outputs, trained.values(), case.gradients)
    for result in (*outputs, *gradients):
        assert (result.transpose(1, 2) if operation.name == "rope" else result).is_contiguous()
    everything = [*outputs, *gradients, *tensors_in(case).values()]
    assert len({t.untyped_storage().data_ptr() for t in everything}) == len(everything)


@pytest.mark.parametrize("operation", OF_PRODUCTS, ids=lambda operation: operation.name)
def test_the_gradient_of_a_sum_is_right(operation, device):
    """Its strides are all 0."""
    case = operation.case(device)
    ones = [torch.ones((), dtype=g.dtype, device=device).expand(g.shape) for g in case.gradients]
    assert_right(operation, Case(case.inputs, ones))


@pytest.mark.parametrize(
    ("operation", "shape"),
    [(operation, shape) for operation in OPERATIONS.values() for shape in operation.empty],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_no_tokens_give_empty_results_and_gradients_of_zero(operation, shape, monkeypatch, device):
    """And launch nothing: the interpreter would do it in vain."""
    case, execute = operation.case(device, shape=shape), GridExecutor.__call__

    def executed(launch, *arguments, **options):
        assert all(launch.grid), "a launch of no programs"
        execute(launch, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", executed)
    use_poisoned_memory(monkeypatch)
    got = run(operation, case)
    for i, gradient in enumerate(case.gradients):
        assert got[f"output {i}"].shape == gradient.shape
    for name in operation.trained:
        gradient, given = got[f"gradient of {name}"], case.inputs[name]
        assert (gradient.shape, gradient.dtype) == (given.shape, given.dtype)
        assert not gradient.any()


@ALL
def test_what_new_memory_holds_does_not_matter(operation, monkeypatch, device):
    """Nor is anything written behind it; and a repetition is bitwise equal."""
    case = operation.case(device)
    with monkeypatch.context() as patch:
        behind = use_poisoned_memory(patch)
        got = run(operation, case)
    assert behind and all(map(is_poison, behind))
    assert_equal(got, usual(operation, device))


@pytest.mark.parametrize("operation", OF_PRODUCTS, ids=lambda operation: operation.name)
def test_with_B_zero_A_gets_exactly_zero_and_B_does_not(operation, device):
    case = operation.case(device)
    B_names = [name for name in operation.trained if name.endswith("B")]
    zeros = {name: torch.zeros_like(case.inputs[name]) for name in B_names}
    got = run(operation, Case({**case.inputs, **zeros}, case.gradients))
    # where o's A gets none, and so do q, k and v
    if not operation.name.startswith("LoRA_Attention"):
        assert all(got[f"gradient of {name}"].any() for name in B_names)
    for name in B_names:
        assert not got[f"gradient of {name[:-1]}A"].any()


# --- on the GPU -----------------------------------------------------------------------------------


# Attention is not one function under torch.compile (adopt/attention.py), and norms by themselves
# make it fail (torch 2.11); within a model they compile (test_fuse_peft.py). Experts leave compiled
# code (adopt/experts.py).
COMPILED = [
    operation
    for operation in WITH_VALUES
    if not operation.name.startswith(
        ("LoRA_Attention", "LoRA_Experts", "rms_norm", "add_rms_norm", "gated_rms_norm", "causal")
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize("operation", COMPILED, ids=lambda operation: operation.name)
def test_compiled_is_within_the_error_budget(operation, device):
    case = operation.case(device)
    compiled = torch.compile(lambda *inputs: operation.function(*inputs))
    assert_right(operation, case, run(operation, case, compiled))


# of cross entropy what the host need not wait for
CAPTURED = [*WITH_VALUES, OPERATIONS["linear_cross_entropy, all"]]


@pytest.mark.gpu
@pytest.mark.parametrize("operation", CAPTURED, ids=lambda operation: operation.name)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_captured_cuda_graph_is_right_on_new_data(autocast, operation, device):
    fp32 = {"adapter_dtype": FP32} if autocast and operation in OF_PRODUCTS else {}
    case = operation.case(device, **fp32)
    leaves = leaves_of(operation, case)
    trained = [leaves[name] for name in operation.trained]

    def step():
        # the cache of casts outlives neither this block nor, so, the capture
        with torch.autocast(device, dtype=BF16, enabled=autocast, cache_enabled=False):
            outputs = as_tuple(operation.function(*leaves.values()))
        return *outputs, *torch.autograd.grad(outputs, trained, case.gradients)

    replay, results = capture(step)
    for seed in (60, 80):
        with torch.no_grad():
            for number, tensor in enumerate((*trained, *case.gradients)):
                scale = tensor.float().square().mean().sqrt().item()
                tensor.copy_(random(*tensor.shape, seed=seed + number, scale=scale))
            if "labels" in leaves:
                leaves["labels"].copy_(leaves["labels"].flip(-1))
                leaves["num_items"].fill_(seed)
        replay()
        now = Case(leaves, case.gradients)
        with torch.autocast(device, dtype=BF16, enabled=autocast):
            eager, direct = run(operation, now, operation.eager), run(operation, now)
        got = dict(zip(eager, (result.detach() for result in results), strict=True))
        if operation.has_values:
            assert_right(operation, now, got, eager)
        else:
            assert_equal(got, direct)


@pytest.mark.gpu
@ALL
def test_a_second_gpu_is_right(operation):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    case = operation.case("cuda:1")
    if operation.has_values:
        assert_right(operation, case)
    else:
        want = run(operation, operation.case("cuda:0"))
        assert_equal({k: t.to("cuda:0") for k, t in run(operation, case).items()}, want)
    assert torch.cuda.current_device() == 0

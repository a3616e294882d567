"""What every operation promises autograd and its callers: the same tests over the whole table."""

from functools import cache
from itertools import combinations

import pytest
import torch
import triton
from cases.counting import saved_tensors
from cases.cuda_graph import capture
from cases.pairwise import pairwise
from cases.reference import CHECKPOINTS, checkpointed, is_poison, random, use_poisoned_memory
from cases.rms_norm_case import Kernel
from contract import (
    BF16,
    DTYPES,
    FP32,
    LAYOUTS,
    MIXED,
    OF_KERNELS,
    OPERATIONS,
    Case,
    as_tuple,
    assert_equal,
    assert_right,
    leaves_of,
    run,
    tensors_in,
    with_layout,
)
from triton.runtime.interpreter import GridExecutor

from fused_lora import cross_entropy, rms_norm, rope

ALL = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
WITH_VALUES = [operation for operation in OPERATIONS.values() if operation.has_values]
OF_PRODUCTS = [operation for operation in WITH_VALUES if operation.of_products]
KERNELS = {  # with modules: forward's and backward's
    "rms_norm": (rms_norm, "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
    "add_rms_norm": (rms_norm, "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
    "rope": (rope, "_rope_kernel"),
    "linear_cross_entropy": (cross_entropy, "_cross_entropy_kernel"),
}
OF_A_KERNEL = [operation for operation in WITH_VALUES if not operation.of_products]
OF_VARIANTS = ("transposed", "one for all")  # layouts
OF_OTHER_VALUES = ("within wider rows", "one for all", *OF_KERNELS)


def every(operations, axes):
    """`pairwise` for each operation: `axes` of it are names and values."""
    return pytest.mark.parametrize(
        ("operation", "options"),
        [
            pytest.param(operation, *one.values, marks=one.marks, id=f"{operation.name}-{one.id}")
            for operation in operations
            for one in pairwise(**axes(operation))
        ],
    )


@cache
def usual(operation, device):
    """The results of the usual case, to hold others against."""
    return run(operation, operation.case(device))


# --- values ---------------------------------------------------------------------------------------


def axes_of_values(operation):
    """Sums over few tokens err by luck, so products are tried on the usual number of them."""
    shapes = (operation.usual,) if operation.of_products else operation.shapes
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
    assert_right(operation, operation.case(device, shape=shape))


def axes_of_layouts(operation):
    gradients = range(len(operation.case("cpu").gradients))
    where = (*operation.strided, *(f"gradient {i}" for i in gradients))
    layouts = OF_VARIANTS if operation.is_variant else LAYOUTS
    return {"where": where, "layout": (*layouts, *(() if operation.of_products else OF_KERNELS))}


@every(WITH_VALUES, axes_of_layouts)
def test_any_layout_gives_what_a_contiguous_one_does(operation, options, device):
    where, layout = options.values()
    case = with_layout(operation.case(device), (where,), (LAYOUTS | OF_KERNELS)[layout])
    if tensors_in(case)[where].is_contiguous():
        pytest.skip("so small that it is contiguous")
    got = run(operation, case)
    if operation.of_products:
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
    where = ("x", "delta", "q", "k", "gradient 0", "gradient 1")
    case = with_layout(operation.case(device), where, (LAYOUTS | OF_KERNELS)[layout])
    run(operation, case)
    given = [case.inputs[name] for name in where if name in case.inputs], case.gradients
    for tensors, (_, arguments) in zip(given, kernel.launches, strict=True):
        read = [t.data_ptr() for t in arguments[:2] if t is not None]
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
    of_B = [name for name in operation.trained if name.endswith("B")]
    zeros = {name: torch.zeros_like(case.inputs[name]) for name in of_B}
    got = run(operation, Case({**case.inputs, **zeros}, case.gradients))
    # where o's A gets none, and so do q, k and v
    if not operation.name.startswith("LoRA_Attention"):
        assert all(got[f"gradient of {name}"].any() for name in of_B)
    for name in of_B:
        assert not got[f"gradient of {name[:-1]}A"].any()


# --- dtypes and autocast --------------------------------------------------------------------------


def axes_of_autocast(operation):
    if operation.is_variant:  # as PEFT has them
        return {"dtype": (BF16, FP32), "frozen_dtype": (BF16,), "adapter_dtype": (FP32,)}
    dtypes = (BF16, FP32)
    return {"dtype": dtypes, "frozen_dtype": dtypes, "adapter_dtype": (*dtypes, MIXED)}


@every(OF_PRODUCTS, axes_of_autocast)
def test_autocast_is_right_and_gives_dtypes_as_eager_does(operation, options, device):
    case = operation.case(device, **options)
    with torch.autocast(device, dtype=BF16):
        got, eager = run(operation, case), run(operation, case, operation.eager)
    assert got["output 0"].dtype == BF16
    assert_right(operation, case, got, eager)


@pytest.mark.parametrize("operation", OF_A_KERNEL, ids=lambda operation: operation.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_changes_nothing(dtype, operation, device):
    case = operation.case(device, dtype)
    with torch.autocast(device, dtype=BF16):
        got = run(operation, case)
    assert_equal(got, run(operation, case))


@pytest.mark.parametrize("operation", OF_PRODUCTS, ids=lambda operation: operation.name)
def test_autocast_around_backward_alone_changes_nothing(operation, device):
    case = operation.case(device, FP32)
    leaves = leaves_of(operation, case)
    outputs = as_tuple(operation.function(*leaves.values()))
    with torch.autocast(device, dtype=BF16):
        torch.autograd.backward(outputs, case.gradients)
    want = run(operation, case)
    for name in operation.trained:
        assert torch.equal(leaves[name].grad, want[f"gradient of {name}"]), name


@torch.no_grad()
def raw_gradients(operation, leaves, outputs, gradients) -> dict:
    """What the function's own backward returns, before autograd's engine casts or drops it."""
    node = as_tuple(outputs)[0].grad_fn
    returned = as_tuple(node.apply(*gradients))
    given = dict(zip(leaves, returned, strict=False))
    return {name: given[name] for name in operation.trained}


def axes_of_gradients(operation):
    if operation.is_variant:
        return {"dtype": (BF16, FP32), "adapter_dtype": (FP32,), "autocast": (True,)}
    return {
        "dtype": (BF16, FP32), "adapter_dtype": (BF16, FP32, MIXED), "autocast": (False, True)
    }  # fmt: skip


@every(OF_PRODUCTS, axes_of_gradients)
def test_backward_itself_returns_each_gradient_in_its_tensors_dtype(operation, options, device):
    dtype, adapter_dtype, autocast = options.values()
    case = operation.case(device, dtype, adapter_dtype=adapter_dtype)
    leaves = leaves_of(operation, case)
    with torch.autocast(device, dtype=BF16, enabled=autocast):
        outputs = operation.function(*leaves.values())
        gradients = raw_gradients(operation, leaves, outputs, case.gradients)
    assert {n: g.dtype for n, g in gradients.items()} == {
        name: leaves[name].dtype for name in operation.trained
    }


# --- autograd -------------------------------------------------------------------------------------


@ALL
def test_nothing_that_came_in_or_was_saved_is_written(operation, device):
    case = operation.case(device)
    leaves = leaves_of(operation, case)
    watched = list(tensors_in(Case(leaves, case.gradients)).values())
    before = [t.detach().clone() for t in watched]
    with saved_tensors() as saved:
        outputs = as_tuple(operation.function(*leaves.values()))
    watched += [*saved, *outputs]
    before += [t.detach().clone() for t in (*saved, *outputs)]
    torch.autograd.backward(outputs, case.gradients)
    assert saved or operation.name == "rope"
    assert all(torch.equal(now, old) for now, old in zip(watched, before, strict=True))


@ALL
def test_a_second_backward_through_a_retained_graph_gives_the_same(operation, device):
    case = operation.case(device)
    leaves = leaves_of(operation, case)
    trained = [leaves[name] for name in operation.trained]
    outputs = operation.function(*leaves.values())
    first = torch.autograd.grad(outputs, trained, case.gradients, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(outputs, trained, case.gradients)
    for one, other, old in zip(first, second, kept, strict=True):
        assert torch.equal(one, other) and torch.equal(one, old)
        assert one.data_ptr() != other.data_ptr()  # whoever changes one does not change the other


@ALL
def test_differentiating_twice_is_a_clear_error(operation, device):
    case = operation.case(device)
    leaves = leaves_of(operation, case)
    outputs, name = operation.function(*leaves.values()), operation.name.partition(",")[0]
    with pytest.raises(RuntimeError, match=f"^{name} is not twice differentiable") as it:
        torch.autograd.grad(
            outputs, leaves[operation.trained[0]], case.gradients, create_graph=True
        )
    assert "\n" not in str(it.value)


@pytest.mark.parametrize(
    ("operation", "changed"),
    [(operation, name) for operation in OPERATIONS.values() for name in operation.saved],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_saved_changed_in_place_before_backward_is_autograds_error(
    operation, changed, device
):
    case = operation.case(device)
    given = leaves_of(operation, case)
    for name in operation.trained:  # no leaves, which may not be changed at all
        given[name] = given[name] * 1
    outputs = as_tuple(operation.function(*given.values()))
    tensors = tensors_in(Case(given, [])) | {f"output {i}": t for i, t in enumerate(outputs)}
    with torch.no_grad():
        tensors[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, case.gradients)


@pytest.mark.parametrize("operation", WITH_VALUES, ids=lambda operation: operation.name)
def test_inputs_may_have_other_consumers_and_outputs_may_be_changed_in_place(operation, device):
    """And one gradient may reach the operation and what stands beside it."""
    case = operation.case(device, FP32)
    first = operation.trained[0]
    side = random(*case.inputs[first].shape, device=device, seed=5)

    def block(function):
        def block(*inputs):
            outputs = as_tuple(function(*inputs))
            beside = (inputs[0] * side.to(inputs[0].dtype)).sum()
            return [
                output if f"output {i}" in operation.saved else output.mul_(3).add_(beside)
                for i, output in enumerate(outputs)
            ]

        return block

    assert_right(operation, case, run(operation, case, block(operation.function)),
                 of=block(operation.eager))  # fmt: skip


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("name", ["add_rms_norm", "rope"])
def test_an_output_that_nobody_uses_counts_as_one_with_a_gradient_of_zero(name, used, device):
    operation = OPERATIONS[name]
    case = operation.case(device)
    leaves = leaves_of(operation, case)
    operation.function(*leaves.values())[used].backward(case.gradients[used])
    zeros = [torch.zeros_like(g) if i != used else g for i, g in enumerate(case.gradients)]
    want = run(operation, Case(case.inputs, zeros))
    for name in operation.trained:
        assert torch.equal(leaves[name].grad, want[f"gradient of {name}"]), name


def subsets(operation):
    """Which inputs need a gradient: x, the adapters, none and, where no variant is usual, each
    alone. (Beside all together, that is every two of them with and without the other.)"""
    names = operation.trained
    each = names[:1] if operation.is_variant else names
    chosen = {(), names[1:], *((name,) for name in each)}
    everything = [s for size in range(len(names) + 1) for s in combinations(names, size)]
    return [
        pytest.param(operation, subset, id=f"{operation.name}-{' '.join(subset) or 'none'}",
                     marks=() if len(names) < 4 or subset in chosen else pytest.mark.exhaustive)
        for subset in (everything if len(names) < 9 else sorted(chosen))
    ]  # fmt: skip


@pytest.mark.slow(
    "LoRA_MLP",
    "LoRA_W",
    "LoRA_QKV",
    "rms_norm",
    "add_rms_norm",
    "LoRA_Attention-none",
    "LoRA_Attention-q_A",
    "linear_cross_entropy-x",
    "rope-q",
)
@pytest.mark.parametrize(
    ("operation", "needs"), [one for operation in OPERATIONS.values() for one in subsets(operation)]
)
def test_frozen_inputs_get_no_gradient_and_the_others_get_the_same(operation, needs, device):
    case, want = operation.case(device), usual(operation, device)
    leaves = leaves_of(operation, case, needs)
    outputs = as_tuple(operation.function(*leaves.values()))
    for i, output in enumerate(outputs):
        assert torch.equal(output, want[f"output {i}"]) and output.requires_grad == bool(needs)
    if not needs:
        return
    if operation.of_products:  # it does not even compute the others
        got = raw_gradients(operation, leaves, outputs, case.gradients)
    else:
        torch.autograd.backward(outputs, case.gradients)
        got = {name: leaves[name].grad for name in operation.trained}
    for name, gradient in got.items():
        if name in needs:
            assert torch.equal(gradient, want[f"gradient of {name}"]), name
        else:
            assert gradient is None, name


@ALL
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_outputs_are_the_same_and_nothing_is_saved(mode, operation, device):
    case = operation.case(device)
    leaves = leaves_of(operation, case)
    with mode(), saved_tensors() as saved:
        got = as_tuple(operation.function(*leaves.values()))
    assert not saved and not any(output.requires_grad for output in got)
    assert all(
        torch.equal(output, usual(operation, device)[f"output {i}"]) for i, output in enumerate(got)
    )


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        pytest.param(operation, kind, id=f"{operation.name}-{kind}")
        for operation in OPERATIONS.values()
        for kind in (CHECKPOINTS[-1:] if operation.is_variant else CHECKPOINTS)
    ],
)
def test_checkpointed_gradients_are_bitwise_equal(kind, operation, device):
    function = checkpointed(operation.function, kind)
    assert_equal(run(operation, operation.case(device), function), usual(operation, device))


# a seed's masks are those of a batch
WITHOUT_DROPOUT = [operation for operation in OF_PRODUCTS if "dropout" not in operation.name]


@pytest.mark.parametrize("operation", WITHOUT_DROPOUT, ids=lambda operation: operation.name)
def test_micro_batches_add_up_to_one_batch(operation, device):
    case = operation.case(device, shape=(4, 9))

    def accumulated(function):
        leaves = leaves_of(operation, case)
        for i in range(4):
            given = [leaves[name][i : i + 1] if name == "x" else leaves[name] for name in leaves]
            gradients = [gradient[i : i + 1] for gradient in case.gradients]
            torch.autograd.backward(as_tuple(function(*given)), gradients)
        return {f"gradient of {name}": leaves[name].grad for name in operation.trained}

    assert_right(operation, case, accumulated(operation.function), accumulated(operation.eager))


@pytest.mark.parametrize("name", KERNELS)
def test_what_no_kernel_runs_on_is_a_value_error(name, monkeypatch, device):
    operation, (module, kernel, *_) = OPERATIONS[name], KERNELS[name]
    options = {"angle_dtype": FP32} if name == "rope" else {}
    with pytest.raises(ValueError, match=f"^{name} computes in .*, got torch.float64"):
        run(operation, operation.case(device, torch.float64, **options))
    monkeypatch.setattr(module, kernel, triton.JITFunction(getattr(module, kernel).fn))
    with pytest.raises(ValueError, match=f"^{name} got tensors on the CPU.*TRITON_INTERPRET=1"):
        run(operation, operation.case("cpu"))


# --- on the GPU -----------------------------------------------------------------------------------


# Attention is not one function under torch.compile (adopt/attention.py), and norms by themselves
# make it fail (torch 2.11); within a model they compile (test_fuse_peft.py).
COMPILED = [
    operation
    for operation in WITH_VALUES
    if not operation.name.startswith(("LoRA_Attention", "rms_norm", "add_rms_norm"))
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

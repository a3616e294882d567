"""What every operation promises autograd and autocast: the same tests over the whole table."""

from itertools import combinations

import pytest
import torch
from cases.counting import saved_tensors
from cases.operands import BF16, DTYPES, FP32, MIXED, Case
from cases.reference import CHECKPOINTS, checkpointed, random
from contract import (
    ALL,
    KERNELS,
    OF_A_KERNEL,
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
)

from fused_mlp import launching

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
    residual = case.inputs.get("residual")  # its dtype goes on
    assert got["output 0"].dtype == (BF16 if residual is None else residual.dtype)
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
    given = dict(zip(operation.operands or leaves, returned, strict=False))
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
        is_passed_on = one.data_ptr() == case.gradients[0].data_ptr()  # as an addition does
        # otherwise whoever changes one does not change the other
        assert is_passed_on or one.data_ptr() != other.data_ptr()


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
    ("operation", "needs"),
    [subset for operation in OPERATIONS.values() for subset in subsets(operation)],
)
def test_frozen_inputs_get_no_gradient_and_the_others_get_the_same(operation, needs, device):
    case, want = operation.case(device), usual(operation, device)
    leaves = leaves_of(operation, case, needs)
    outputs = as_tuple(operation.function(*leaves.values()))
    for i, output in enumerate(outputs):
        assert torch.equal(output, want[f"output {i}"]) and output.requires_grad == bool(needs)
    if not needs:
        return
    if operation.has_matmuls:  # it does not even compute the others
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


BY_TOKEN = ("x", "weights", "residual", "chosen")
# a seed's masks are those of a batch
WITHOUT_DROPOUT = [operation for operation in OF_PRODUCTS if "dropout" not in operation.name]


@pytest.mark.parametrize("operation", WITHOUT_DROPOUT, ids=lambda operation: operation.name)
def test_micro_batches_add_up_to_one_batch(operation, device):
    case = operation.case(device, shape=(4, 9))

    def accumulated(function):
        leaves = leaves_of(operation, case)
        for i in range(4):
            given = [
                leaf if leaf is None or name not in BY_TOKEN else leaf[i : i + 1]
                for name, leaf in leaves.items()
            ]
            gradients = [gradient[i : i + 1] for gradient in case.gradients]
            torch.autograd.backward(as_tuple(function(*given)), gradients)
        return {f"gradient of {name}": leaves[name].grad for name in operation.trained}

    assert_right(operation, case, accumulated(operation.function), accumulated(operation.eager))


@pytest.mark.parametrize("name", KERNELS)
def test_what_no_kernel_runs_on_is_a_value_error(name, monkeypatch, device):
    operation = OPERATIONS[name]
    options = {"angle_dtype": FP32} if name == "rope" else {}
    with pytest.raises(ValueError, match=f"^{name} computes in .*, got torch.float64"):
        run(operation, operation.case(device, torch.float64, **options))
    monkeypatch.setattr(launching, "is_interpreted", lambda kernel: False)
    with pytest.raises(ValueError, match=f"^{name} got tensors on the CPU.*TRITON_INTERPRET=1"):
        run(operation, operation.case("cpu"))

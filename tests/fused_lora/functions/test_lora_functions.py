"""Promises of the adapter functions beyond test_contract.py: the number of matmuls, what they keep
for backward, the dtype they compute in, and what they refuse."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import attention_case, lora_mlp_case
from cases.counting import Calls, saved_for_backward
from cases.operands import BF16, FP16, FP32
from cases.reference import random, use_poisoned_memory
from cases.refusal import assert_refused, changed, narrow, short, trained
from contract import OPERATIONS, as_tuple, assert_equal, assert_right, leaves_of, run

from fused_lora.kernels.head_norms import HeadNorms

W, QKV, ATTENTION, MLP = NAMES = ("LoRA_W", "LoRA_QKV", "LoRA_Attention", "LoRA_MLP")
EXPERTS = "LoRA_Experts, clamped gate"

# --- what runs and what is kept -------------------------------------------------------------------

# an attention's projections and adapters share matrices, and kernels sum its dA and dB
PRODUCTS_OF_FORWARD = {W: 3, QKV: 7, ATTENTION: 3, MLP: 8}
PRODUCTS_OF_BACKWARD = [  # the inputs that are trained, and the outputs in a loss
    (W, "x A B", "all", 5),
    (W, "A B", "all", 3),
    (W, "x", "all", 3),
    (W, "A", "all", 2),
    (W, "B", "all", 1),
    (QKV, "x q_A q_B k_A k_B v_A v_B", "all", 11),
    (QKV, "q_A q_B k_A k_B v_A v_B", "all", 7),  # the first layer: 4 fewer matmuls, for dx
    (QKV, "x", "all", 7),
    (QKV, "q_A k_A v_A", "all", 4),
    (QKV, "q_B k_B v_B", "all", 3),
    (QKV, "q_A q_B", "all", 3),
    (QKV, "x q_A q_B k_A k_B v_A v_B", "q v", 8),
    (QKV, "k_A k_B", "q v", 0),
    (ATTENTION, "x q_A q_B k_A k_B v_A v_B o_A o_B", "all", 4),
    (ATTENTION, "q_A q_B k_A k_B v_A v_B o_A o_B", "all", 3),
    (MLP, "x gate_A gate_B up_A up_B down_A down_B", "all", 14),
    (MLP, "gate_A gate_B up_A up_B down_A down_B", "all", 11),
    (MLP, "x", "all", 8),
    (MLP, "gate_A up_A down_A", "all", 7),
    (MLP, "gate_B up_B down_B", "all", 7),
    (MLP, "down_A down_B", "all", 6),
]


@pytest.mark.parametrize(("name", "trained", "used", "products"), PRODUCTS_OF_BACKWARD)
def test_only_the_products_that_are_needed_run(name, trained, used, products, device):
    operation = OPERATIONS[name]
    case = operation.case(device)
    leaves = leaves_of(operation, case, trained.split())
    with Calls() as forward:
        outputs = as_tuple(operation.function(*leaves.values()))
    in_loss = [i for i in range(len(outputs)) if used == "all" or "qkv"[i] in used]
    with Calls() as backward:
        torch.autograd.grad(
            [outputs[i] for i in in_loss],
            [leaves[name] for name in trained.split()],
            [case.gradients[i] for i in in_loss],
            allow_unused=True,
        )
    assert forward.counted["GEMM"] == PRODUCTS_OF_FORWARD[name]
    assert backward.counted.get("GEMM", 0) == products


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("name", "gemms", "casts"), [(W, 5, 2), (QKV, 11, 4)])
def test_calls_with_fp32_adapters_under_autocast(name, gemms, casts, bias, device):
    """Count every kernel launch: the matmuls, one copy of all adapters, and on the CPU a cast of
    their gradients."""
    operation = OPERATIONS[name]
    case = operation.case(device, bias=bias, adapter_dtype=FP32)
    leaves = leaves_of(operation, case)
    with Calls() as forward, torch.autocast(device, dtype=BF16):
        outputs = as_tuple(operation.function(*leaves.values()))
    with Calls() as backward:
        torch.autograd.grad(outputs, [leaves[name] for name in operation.trained], case.gradients)
    assert forward.counted == {"GEMM": PRODUCTS_OF_FORWARD[name], "_foreach_copy_": 1}
    assert backward.counted == {"GEMM": gemms} | ({"cast": casts} if device == "cpu" else {})


SAVED = {  # per token, in bf16: x, all x A', and the activations between two matmuls
    W: attention_case.IN + 8,
    QKV: attention_case.IN + 3 * 8,
    # [x | z] and [a | za] in whole lines of 64, [q | k | v], za and an fp32 log-sum-exp per head
    ATTENTION: 128 + 192 + 8 * 32 + 8 + 2 * 4,
    MLP: lora_mlp_case.HIDDEN + 2 * lora_mlp_case.INTERMEDIATE + 2 * 8,  # gate and up
}


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("adapter_dtype", "autocast"), [(BF16, False), (FP32, True), (FP32, False)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_saved_per_token(name, adapter_dtype, autocast, device):
    """Measure how much more two more sequences save."""
    operation, found = OPERATIONS[name], []
    for batch in (2, 4):
        case = operation.case(device, shape=(batch, 9), adapter_dtype=adapter_dtype)
        leaves = leaves_of(operation, case)
        with torch.autocast(device, dtype=BF16, enabled=autocast), saved_for_backward() as saved:
            outputs = operation.function(*leaves.values())
        # attention keeps the rows that its product has read
        assert name == ATTENTION or leaves["x"].untyped_storage().data_ptr() in saved
        found.append(sum(storage.nbytes() for storage in saved.values()))
        del outputs  # it held them
    assert found[1] - found[0] == 2 * 9 * 2 * SAVED[name]


@pytest.mark.slow("LoRA_W-False")
@pytest.mark.parametrize(("name", "autocast"), [(W, False), (QKV, True)])
def test_compiled_in_one_graph_is_bitwise_equal(name, autocast, device):
    operation = OPERATIONS[name]
    case = operation.case(device, adapter_dtype=FP32 if autocast else BF16)
    compiled = torch.compile(
        lambda *inputs: operation.function(*inputs), backend="aot_eager", fullgraph=True
    )
    with torch.autocast(device, dtype=BF16, enabled=autocast):
        got, want = run(operation, case, compiled), run(operation, case)
    if autocast and device == "cuda":
        # the matmul itself stores fp32 gradients of A and B, but not in compiled code
        got, want = ({k: t.bfloat16() for k, t in one.items()} for one in (got, want))
    assert_equal(got, want)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fp32_adapters_without_autocast_are_right_for_a_computation_in_the_dtype_of_x(
    name, dtype, device
):
    """Compute in the dtype of x, where PEFT would compute the adapters' part in fp32."""
    operation = OPERATIONS[name]
    case = operation.case(device, dtype, adapter_dtype=FP32)

    def eager(x, *rest):
        return operation.eager(
            x, *(t.to(x.dtype) if isinstance(t, torch.Tensor) else t for t in rest)
        )

    got = run(operation, case)
    assert got["output 0"].dtype == dtype
    assert_right(operation, case, got, of=eager)


def test_a_mask_to_add_in_fp32_is_taken_under_autocast(device):
    """Pass the mask of an fp32 model while q, k and v are bf16."""
    operation = OPERATIONS[ATTENTION]
    case = operation.case(device, FP32, kind="MQA of 3, a mask")
    mask = torch.where(case.inputs["mask"], 0.0, -30.0)
    case = replace(case, inputs=case.inputs | {"mask": mask})
    with torch.autocast(device, dtype=BF16):
        got, eager = run(operation, case), run(operation, case, operation.eager)
    assert_right(operation, case, got, eager)


def test_a_bf16_gradient_takes_no_precision_from_an_fp32_one(device):
    """Use one cast for the three dA: it must keep the precision of their widest dtype."""
    operation = OPERATIONS[QKV]
    case = operation.case(device, FP32, adapter_dtype=(BF16, *(FP32,) * 5))
    in_fp32 = replace(case, inputs=case.inputs | {"q_A": case.inputs["q_A"].float()})
    results = run(operation, case), run(operation, in_fp32, operation.eager)
    others = ("gradient of k_A", "gradient of v_A")
    assert_right(operation, case, *({name: result[name] for name in others} for result in results))


# --- one of three layers --------------------------------------------------------------------------


@pytest.mark.parametrize("missing", "012")
def test_one_projection_without_a_bias_is_right(missing, device):
    operation = OPERATIONS[QKV]
    case = operation.case(device)
    frozen = changed(case.inputs["frozen"], ["layers", missing, "bias"], lambda _: None)
    assert_right(operation, replace(case, inputs=case.inputs | {"frozen": frozen}))


@pytest.mark.parametrize("used", list(product((False, True), repeat=3))[1:-1], ids=str)
def test_an_output_in_no_loss_gives_its_adapter_no_gradient_as_eager_does(
    used, monkeypatch, device
):
    """Give None, whatever values new memory holds."""

    def only_used(function):
        return lambda *inputs: tuple(
            output for output, use in zip(function(*inputs), used, strict=True) if use
        )

    operation = OPERATIONS[QKV]
    case = operation.case(device)
    gradients = [grad for grad, use in zip(case.gradients, used, strict=True) if use]
    case = replace(case, gradients=gradients)
    eager = run(operation, case, only_used(operation.eager))
    use_poisoned_memory(monkeypatch)
    got = run(operation, case, only_used(operation.function))
    without = [name for name in eager if eager[name] is None]
    assert len(without) == 2 * used.count(False)
    for name in without:
        assert got.pop(name) is eager.pop(name) is None
    assert_right(operation, case, got, eager, of=only_used(operation.eager))


# --- biases that are trained ----------------------------------------------------------------------

BIASES = {  # and how wide they are
    W: {"bias": 71},
    QKV: {"q_bias": 71, "k_bias": 23, "v_bias": 37},
    ATTENTION: {"q_bias": 128, "k_bias": 64, "v_bias": 64, "o_bias": 44},
    MLP: {"gate_bias": 139, "up_bias": 139, "down_bias": 52},
}


def with_biases(name, device, dtype=BF16, bias_dtype=FP32, missing=(), **options):
    """Return an operation and a case with biases before the frozen operands. Biases inside the
    frozen operands then do not matter."""
    operation = OPERATIONS[name]
    case = operation.case(device, dtype, **options)
    biases: dict[str, Any] = dict.fromkeys(BIASES[name])
    for seed, (bias, width) in enumerate(BIASES[name].items()):
        if bias not in missing:
            biases[bias] = random(width, seed=80 + seed, dtype=bias_dtype, device=device)
    frozen = case.inputs.pop("frozen")
    inputs = case.inputs | biases | {"frozen": frozen}
    trained = (*operation.trained, *(bias for bias in biases if bias not in missing))
    return replace(operation, trained=trained), replace(case, inputs=inputs)


@pytest.mark.thinned
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"), [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, FP32)], ids=str
)
def test_biases_that_are_trained_are_right(dtype, bias_dtype, name, device):
    """Use fp32 biases beside bf16, as PEFT's adapters have. Each is rounded once."""
    assert_right(*with_biases(name, device, dtype, bias_dtype))


@pytest.mark.parametrize(
    ("name", "missing"), [(QKV, "k_bias"), (ATTENTION, "o_bias"), (MLP, "up_bias")]
)
def test_one_layer_without_a_bias_beside_trained_ones_is_right(name, missing, device):
    assert_right(*with_biases(name, device, missing=(missing,)))


@pytest.mark.parametrize("name", NAMES)
def test_biases_alone_may_be_trained(name, device):
    operation, case = with_biases(name, device)
    want = run(operation, case)
    some = replace(operation, trained=tuple(BIASES[name]))
    case = replace(case, inputs={
        key: value.detach() if isinstance(value, torch.Tensor) else value
        for key, value in case.inputs.items()
    })  # fmt: skip
    got = run(some, case)
    assert_equal(got, {key: want[key] for key in got})


# --- what does not fit ----------------------------------------------------------------------------


# LoRA_W and LoRA_QKV ask the same function about their linear layers.
ERRORS = [
    *((name, {"frozen": None}, "frozen is .*, should be a Frozen.*: give it as the last operand")
      for name in (W, QKV, MLP)),
    (W, {"x": narrow}, r"x is \[3, 13, 51\].* should be 52"),
    (W, {"B": torch.t}, r"A is \[8, 52\] and B \[8, 71\], should"),
    (W, {"x": torch.Tensor.half}, "weight is torch.bfloat16 and x torch.float16: give both one"),
    (QKV, {"x": lambda t: t[0, 0, 0]}, r"x is \[\].* should be 52"),
    (QKV, {"frozen.layers.1.weight": narrow},
     r"k_weight is \[23, 51\], should be \[23, 52\] as x is"),
    (QKV, {"frozen.layers.2.bias": short}, r"v_bias is \[36\], should be \[37\]"),
    (QKV, {"frozen.layers.0.bias": lambda t: t[None]}, r"q_bias is \[1, 71\], should be \[71\]"),
    (QKV, {"q_A": narrow}, r"q_A is \[8, 51\] and q_B \[71, 8\], should be \[r, 52\] and \[71, r"),
    (QKV, {"k_B": narrow}, r"k_A is \[8, 52\] and k_B \[23, 7\], should be"),
    (QKV, {"v_B": short}, r"v_A is \[8, 52\] and v_B \[36, 8\], should be"),
    (QKV, {"frozen.layers.1.weight": trained},
     r"k_weight requires a gradient.*requires_grad_\(False\)"),
    (QKV, {"frozen.layers.2.bias": trained},
     r"v_bias requires a gradient.*requires_grad_\(False\)"),
    (QKV, {"frozen.layers.0.weight": torch.Tensor.float},
     "q_weight is torch.float32 and x torch.bfloat"),
    (QKV, {"frozen.layers.1.bias": torch.Tensor.half},
     "k_bias is torch.float16 and x torch.bfloat16: "),
    (ATTENTION, {"x": lambda t: t[0]}, r"hidden is \[5, 52\], should be \[batch, positions, 52\]"),
    (ATTENTION, {"sin": trained}, "cos or sin requires a gradient"),
    (ATTENTION, {"frozen.sinks": lambda _: torch.zeros(4, requires_grad=True)},
     "sinks require a gradient, which they would not get"),
    (ATTENTION, {"o_A": narrow}, r"A 0 is \[8, 127\] and B 0 \[44, 8\], should be \[r, 128\]"),
    (ATTENTION, {"cos": lambda t: t.repeat(1, 1, 2), "sin": lambda t: t.repeat(1, 1, 2)},
     r"cos is \[1, 5, 64\], should be \[1 or 2, 5, 32\]"),
    (ATTENTION, {"sin": lambda _: None}, "only one of cos and sin is given"),
    (ATTENTION, {"frozen.head_norms": lambda _: HeadNorms(*[torch.ones(64)] * 2, 1e-6, 1e-6)},
     r"q_norm is \[64\], should be \[32\], or of all heads together \[128\] for q"),
    (EXPERTS, {"x": narrow}, r"x is \[3, 13, 39\], its last dimension should be 40"),
    (EXPERTS, {"frozen.gate_up_bias": narrow}, r"gate_up_bias is \[4, 47\], should be \[4, 48\]"),
    (MLP, {"x": lambda t: t[0, 0, 0]}, r"x is \[\].* should be 52"),
    (MLP, {"frozen.up_weight": short}, r"up_weight is \[138, 52\], should be \[139, 52\]"),
    (MLP, {"frozen.activation": lambda _: "relu"}, "activation is 'relu', should be 'silu' or"),
    (MLP, {"frozen.down_weight": torch.t}, r"down_weight is \[139, 52\].* \[52, 139\]"),
    (MLP, {"gate_A": narrow}, r"gate_A is \[8, 51\] and gate_B \[139, 8\], should be \[r, 52\]"),
    (MLP, {"up_B": narrow}, r"up_A is \[8, 52\] and up_B \[139, 7\], should be"),
    (MLP, {"down_A": torch.t}, r"down_A is \[139, 8\] .*should be \[r, 139\]"),
    (MLP, {"frozen.up_weight": trained}, r"up_weight requires a gradient.*requires_grad_\(False\)"),
    (MLP, {"frozen.down_weight": torch.Tensor.float},
     "down_weight is torch.float32 and x torch.bfloat16: give both one dtype"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "message"), ERRORS, ids=[f"{name}-{says}" for name, _, says in ERRORS]
)
def test_what_does_not_fit_is_a_value_error_that_names_it(name, changes, message, device):
    operation = OPERATIONS[name]
    message = f"^{name.partition(',')[0]}\\b.*: .*{message}"
    assert_refused(operation.function, operation.case(device).inputs, changes, message)


ERRORS_OF_BIASES = [
    (W, {"bias": short}, r"bias is \[70\], should be \[71\]"),
    (QKV, {"k_bias": short}, r"k_bias is \[22\], should be \[23\]"),
    (QKV, {"k_bias": None}, "2 biases given, should be none or those of all 3 layers, None for"),
    (ATTENTION, {"o_bias": short}, r"output: bias 0 is \[43\], should be \[44\]"),
    (ATTENTION, {"o_bias": None}, "16 trained tensors given, should be 18: A and B of each proj"),
    (MLP, {"down_bias": short}, r"down_bias is \[51\], should be \[52\]"),
    (MLP, {"up_bias": None}, "2 biases given, should be none or those of gate, up and down, None"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"), ERRORS_OF_BIASES, ids=[says for *_, says in ERRORS_OF_BIASES]
)
def test_biases_that_do_not_fit_are_a_value_error_that_names_them(name, changes, message, device):
    operation, case = with_biases(name, device)
    assert_refused(operation.function, case.inputs, changes, f"^{name}\\b.*: .*{message}")

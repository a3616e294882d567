"""A table of every operation that autograd knows: its inputs, and the same thing in eager PyTorch.

`test_contract.py` and `test_contract_autograd.py` hold each operation to the same promises. What is
special about one operation has tests in its own files.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import (
    attention_case,
    causal_conv_case,
    cross_entropy_case,
    experts_case,
    log_probs_case,
    lora_attention_case,
    rms_norm_case,
    rope_case,
)
from cases.operands import (
    ATTENTIONS,
    BF16,
    DTYPES,
    OF_GROUP,
    OF_QKV,
    OF_W,
    Case,
    make_causal_conv,
    make_cross_entropy,
    make_gated_norm,
    make_linear,
    make_log_probs,
    make_lora_attention,
    make_lora_experts,
    make_lora_mlp,
    make_norm,
    make_rope,
)
from cases.pairwise import pairwise
from cases.reference import ADAPTER_NAMES, assert_within_budget, lora_mlp
from torch import Tensor

from fused_lora.functions import causal_conv as conv_module
from fused_lora.functions import gated_norm
from fused_lora.functions.causal_conv import causal_conv
from fused_lora.functions.gated_norm import gated_rms_norm
from fused_lora.functions.lora_experts import LoRA_Experts
from fused_lora.functions.lora_linear import LoRA_QKV, LoRA_W
from fused_lora.functions.rms_norm import add_rms_norm, rms_norm
from fused_lora.functions.rope import rope
from fused_lora.kernels import qkv_rope, row_norm
from fused_lora.kernels.routed_rows import ClampedGate
from fused_lora.loss import cross_entropy
from fused_lora.loss.cross_entropy import linear_cross_entropy
from fused_lora.loss.log_probs import log_probs
from fused_mlp import LoRA_MLP

ATTENTION = lora_attention_case.lora_attention, lora_attention_case.eager


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation that autograd knows, and how to test it.

    name: the name in its errors, and after a comma the options that we call it with.
    function, eager: take a case's inputs in order and return an output or a tuple of them.
    make: (shape, dtype=, device=, **options) -> Case. Most tests use the `usual` shape, tests of
        values try the ones in `shapes`. `empty` has shapes without tokens.
    options: names and values for `make` that make another case than the usual one.
    trained: the inputs that may require a gradient.
    saved: inputs that backward reads. Autograd has to notice when they change.
    strided: inputs that may have any layout, as incoming gradients may.
    has_matmuls: True if it multiplies matrices. It then runs in autocast's dtype, adapters and
        weights may have another dtype than x, and another layout changes the last bits. Otherwise
        it is one kernel of ours, and autocast changes nothing.
    operands: the names of what its autograd function takes, where that is not the inputs.
    has_values: True if its outputs have enough elements for an error budget.
    """

    name: str
    function: Callable
    eager: Callable
    make: Callable[..., Case]
    trained: tuple[str, ...]
    saved: tuple[str, ...]
    usual: Any
    shapes: tuple = ()
    empty: tuple = ()
    options: dict[str, tuple] = field(default_factory=dict)
    strided: tuple[str, ...] = ("x",)
    has_matmuls: bool = True
    has_values: bool = True
    operands: tuple[str, ...] = ()

    @property
    def is_variant(self) -> bool:
        """Whether another operation is the same with fewer options, and tests the rest."""
        return "," in self.name

    def case(self, device, dtype=BF16, shape=None, **options) -> Case:
        return self.make(self.usual if shape is None else shape, dtype=dtype, device=device,
                         **options)  # fmt: skip


def as_tuple(outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def leaves_of(operation, case, needs=None) -> dict[str, Any]:
    """Return the inputs with trainable ones detached and their layouts kept. Those in `needs`, by
    default all trainable ones, require a gradient."""
    needs = operation.trained if needs is None else needs
    return {
        name: value.detach().requires_grad_(name in needs) if name in operation.trained else value
        for name, value in case.inputs.items()
    }


def run(operation, case, function=None) -> dict[str, Tensor]:
    """Return outputs and the gradients of all trainable inputs, by name."""
    leaves = leaves_of(operation, case)
    outputs = as_tuple((function or operation.function)(*leaves.values()))
    gradients = [g.to(output.dtype) for g, output in zip(case.gradients, outputs, strict=True)]
    torch.autograd.backward(outputs, gradients)
    results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return results | {f"gradient of {name}": leaves[name].grad for name in operation.trained}


def double(value):
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        doubled = map(double, value)
        return type(value)(*doubled) if hasattr(value, "_fields") else tuple(doubled)
    return value


def truth_of(operation, case, function=None) -> dict[str, Tensor]:
    exact = Case(
        {k: double(v) for k, v in case.inputs.items()}, [double(g) for g in case.gradients]
    )
    return run(operation, exact, function or operation.eager)


def assert_right(operation, case, got=None, eager=None, of=None) -> None:
    """Check that each result is within the error budget, in the dtype that eager returns. `of`
    replaces the operation's eager function."""
    got = run(operation, case) if got is None else got
    eager = run(operation, case, of or operation.eager) if eager is None else eager
    truth = truth_of(operation, case, of)
    assert got.keys() == eager.keys() <= truth.keys()
    for name in got:
        assert (got[name].shape, got[name].dtype) == (eager[name].shape, eager[name].dtype), name
        if got[name].numel():  # an adapter of rank 0 has no elements
            assert_within_budget(name, got[name], eager[name], truth[name])


def assert_equal(got, want) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name


def tensors_in(case) -> dict[str, Tensor]:
    """Return every tensor that a call and its backward get."""
    found = {f"gradient {i}": gradient for i, gradient in enumerate(case.gradients)}

    def add(name, value):
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            for i, part in enumerate(value):
                add(f"{name}.{getattr(value, '_fields', range(len(value)))[i]}", part)

    for name, value in case.inputs.items():
        add(name, value)
    return found


def with_layout(case, where, layout) -> Case:
    """Return the case with this layout for the tensors in `where`: names of inputs, and of incoming
    gradients ("gradient 0")."""
    inputs = {name: layout(t) if name in where else t for name, t in case.inputs.items()}
    gradients = [layout(t) if f"gradient {i}" in where else t for i, t in enumerate(case.gradients)]
    return Case(inputs, gradients)


LAYOUTS = {  # for three dimensions or more; each keeps the shape
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "within wider rows": lambda t: torch.cat([t, t, t], -1)[..., 1 : 1 + t.shape[-1]],
    "every second row": lambda t: torch.repeat_interleave(t, 2, dim=-2)[..., ::2, :],
    "by token": lambda t: t.transpose(1, -2).contiguous().transpose(1, -2),
    "one for all": lambda t: t[:1].expand(t.shape),
    "features first": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "elements apart": lambda t: torch.repeat_interleave(t, 2, dim=-1)[..., ::2],
}


OF_KERNELS = {  # too much alike for a budget of sums
    "one row for all": lambda t: t[(slice(1),) * (t.dim() - 1)].expand(t.shape),
    "one number for all": lambda t: t[(slice(1),) * t.dim()].expand(t.shape),
}


# --- the table ---


def in_table_order(function, **options):
    """Return the function with its operands in the table's order: differentiated ones first."""
    return lambda x, weight, bias, labels, num_items: function(
        x, weight, labels, bias=bias, num_items_in_batch=num_items, **options
    )


RANKS = attention_case.RANKS
ADAPTED = ("x", *ADAPTER_NAMES)
HEAD = ("x", "weight", "bias")
TOKENS = ((), (1,), (13,), (1, 1), (2, 1, 3, 5))
NO_TOKENS = ((0,), (0, 5), (2, 0))
ZERO_CENTERED = {"zero_centered": (False, True)}
ROWS = ((2, 3, 139), (7, 52), (1, 300), (64,), (3, 2048), (2, 2, 2, 33))

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "LoRA_MLP", LoRA_MLP.apply, lora_mlp, make_lora_mlp, ADAPTED,
            saved=("x", "down_B", "frozen.gate_weight"), usual=(3, 13), shapes=TOKENS,
            empty=NO_TOKENS,
            options={"r": (*RANKS, (1, 12, 64), (64, 4, 1), (0, 8, 0), (8, 0, 8))},
        ),
        Operation(
            "LoRA_MLP, GeGLU", LoRA_MLP.apply, lora_mlp,
            partial(make_lora_mlp, activation="gelu_tanh"), ADAPTED,
            saved=("x", "down_B", "frozen.gate_weight"), usual=(3, 13), shapes=TOKENS,
            empty=NO_TOKENS, options={"r": (8, (64, 4, 1), (0, 8, 0))},
        ),
        Operation(
            "LoRA_Experts", LoRA_Experts.apply, experts_case.eager, make_lora_experts,
            ("x", "weights", *experts_case.NAMES, "residual"),
            saved=("x", "frozen.gate_up_weight"),
            usual=(3, 13), shapes=TOKENS, empty=NO_TOKENS,
            options={"r": ((4, 8), (16, 1), (0, 8)), "spread": ("usual", "one")},
        ),
        Operation(
            "LoRA_Experts, clamped gate", LoRA_Experts.apply, experts_case.eager,
            partial(make_lora_experts, gate=ClampedGate(1.702, 4.0), residual=False),
            ("x", "weights", *experts_case.NAMES), saved=("x", "frozen.gate_up_weight"),
            usual=(3, 13), shapes=TOKENS, empty=NO_TOKENS,
        ),
        Operation(
            "LoRA_W", LoRA_W.apply, attention_case.lora_linears, make_linear(1), OF_W,
            saved=("x", "A", "B", "frozen.layers.0.weight"), usual=(3, 13), shapes=TOKENS,
            empty=NO_TOKENS, options={"r": RANKS, "bias": (False, True), "dropout": (None, (0.3,))},
        ),
        Operation(
            "LoRA_QKV", LoRA_QKV.apply, attention_case.lora_linears, make_linear(3), OF_QKV,
            saved=("x", "q_B", "frozen.layers.2.weight"), usual=(3, 13), shapes=TOKENS,
            empty=NO_TOKENS,
            options={
                "r": (8, 1, (1, 12, 64), (64, 4, 1), (0, 8, 0)), "bias": (False, True),
                "dropout": (None, (0.05, 0.5, 0.3), (0.0, 0.3, 0.0), (0.3, None, None)),
            },
        ),
        Operation(
            "LoRA_QKV, four layers", LoRA_QKV.apply, attention_case.lora_linears, make_linear(4),
            OF_GROUP, saved=("x", "z_B", "frozen.layers.3.weight"), usual=(3, 13), shapes=TOKENS,
            empty=NO_TOKENS, options={
                "r": ((8, 4, 8, 1), (4, 0, 1, 64)), "dropout": (None, (0.05, 0.0, 0.5, 0.3)),
            },
        ),
        Operation(
            "LoRA_Attention", *ATTENTION, make_lora_attention,
            ("x", *lora_attention_case.NAMES), operands=lora_attention_case.OPERANDS,
            saved=("cos", "k_B", "o_A"), usual=(2, 5),
            shapes=((1, 19),), empty=((0, 9),),
            options={
                "kind": tuple(ATTENTIONS), "r": (8, (1, 12, 32, 3), (8, 0, 8, 0)),
                "bias": (False, True),
                "dropout": (
                    None, (0.05, 0.5, 0.3, 0.3), (0.0, 0.3, 0.0, 0.0), (0.3, None, None, 0.5),
                ),
            },
        ),
        Operation(
            "LoRA_MLP, dropout", LoRA_MLP.apply, lora_mlp,
            partial(make_lora_mlp, dropout=(0.05, 0.5, 0.3)), ADAPTED,
            saved=("x", "down_B", "frozen.gate_weight"), usual=(3, 13), shapes=TOKENS,
            empty=NO_TOKENS, options={
                "r": (8, (64, 4, 1), (0, 8, 0)),
                "dropout": (
                    (0.05, 0.5, 0.3), (0.0, 0.3, 0.0), (0.3, 0.0, 0.3), (0.3, None, 0.5),
                ),
            },
        ),
        Operation(
            "LoRA_Attention, dropout", *ATTENTION,
            partial(make_lora_attention, heads=2, dropout=(0.05, 0.5, 0.3, 0.3)),
            ("x", *lora_attention_case.NAMES), operands=lora_attention_case.OPERANDS,
            saved=("cos", "k_B", "o_A"), usual=(2, 5),
            shapes=((1, 19),), empty=((0, 9),),
        ),
        Operation(
            "LoRA_Attention, normed heads", *ATTENTION,
            partial(make_lora_attention, heads=2, norms=True), ("x", *lora_attention_case.NAMES),
            operands=lora_attention_case.OPERANDS,
            saved=("cos", "q_B", "frozen.head_norms.k_weight"),
            usual=(2, 5), shapes=((1, 19),), empty=((0, 9),),
            options={
                "norms": (True, "together"),
                "kind": ("usual", "MQA of 3, a mask", "MHA, not rotated"),
            },
        ),
        Operation(
            "rms_norm", rms_norm, rms_norm_case.eager_rms_norm, make_norm(rms_norm),
            ("x", "weight"), saved=("x", "weight"), usual=(2, 3, 139), shapes=ROWS,
            empty=((0, 52), (2, 0, 139)), options=ZERO_CENTERED, has_matmuls=False,
        ),
        Operation(
            "add_rms_norm", add_rms_norm, rms_norm_case.eager_add_rms_norm, make_norm(add_rms_norm),
            ("x", "delta", "weight"), saved=("weight", "output 1"), usual=(2, 3, 139), shapes=ROWS,
            empty=((0, 52), (2, 0, 139)), options=ZERO_CENTERED, strided=("x", "delta"),
            has_matmuls=False,
        ),
        Operation(
            "gated_rms_norm", gated_rms_norm, rms_norm_case.eager_gated_rms_norm, make_gated_norm,
            ("x", "gate", "weight"), saved=("x", "gate", "weight"), usual=(2, 3, 139), shapes=ROWS,
            empty=((0, 52), (2, 0, 139)), options={"gate_dtype": DTYPES}, strided=("x", "gate"),
            has_matmuls=False,
        ),
        Operation(
            "causal_conv", causal_conv, causal_conv_case.eager, make_causal_conv,
            ("x", "weight", "bias"), saved=("x", "weight", "bias"), usual=(2, 5, 11),
            shapes=((1, 35, 70), (3, 1, 4), (2, 33, 9)), empty=((0, 5, 11), (2, 0, 11)),
            options={"taps": (4, 1, 3), "outputs": (3, 1), "is_packed": (True, False)},
            has_matmuls=False,
        ),
        Operation(
            "rope", rope, rope_case.eager, make_rope, ("q", "k"), saved=("cos", "sin"),
            usual="MQA, angles of each sequence", shapes=tuple(rope_case.SIZES),
            options={"angle_dtype": DTYPES, "interleaved": (False, True), "tables": (1, 2)},
            empty=("no batch", "no positions", "no angles"), strided=("q", "k", "cos", "sin"),
            has_matmuls=False,
        ),
        *(
            Operation(
                name, in_table_order(linear_cross_entropy, **options),
                in_table_order(cross_entropy_case.eager, softcap=options.get("softcap")),
                partial(make_cross_entropy, **sizes),
                trained, saved=(), usual=(3, 7), has_values=False,
            )
            for name, trained, sizes, options in (
                ("linear_cross_entropy", HEAD, {}, {}),
                ("linear_cross_entropy, all", HEAD, {},
                 {"drop_ignored": False, "chunk_tokens": 5}),
                ("linear_cross_entropy, soft-capped", HEAD, {}, {"softcap": 2.0}),
                ("linear_cross_entropy, FP8", HEAD[:1], {"vocabulary": 144, "features": 32},
                 {"fp8": True, "chunk_tokens": 5}),
            )
        ),
        *(
            Operation(
                name, log_probs_case.by_operand(log_probs, outputs, **options),
                log_probs_case.by_operand(log_probs_case.eager, outputs),
                partial(make_log_probs, outputs=outputs), trained, saved=saved,
                usual=(3, 7), has_values=False,
            )
            for name, outputs, trained, saved, options in (
                ("log_probs", 2, HEAD, ("x", "weight"), {}),
                ("log_probs, all", 2, HEAD, ("x",), {"drop_ignored": False, "chunk_tokens": 5}),
                # its gradient is computed in the forward
                ("log_probs, frozen head", 1, HEAD[:1], (), {"outputs": (), "chunk_tokens": 5}),
            )
        ),
    )
}  # fmt: skip


# --- what the tests take of it ---

ALL = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
WITH_VALUES = [operation for operation in OPERATIONS.values() if operation.has_values]
LOSSES = [one for name, one in OPERATIONS.items() if not one.has_values and "FP8" not in name]
OF_PRODUCTS = [operation for operation in WITH_VALUES if operation.has_matmuls]
KERNELS = {  # the module, and the kernels of forward and backward
    "rms_norm": (row_norm, "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
    "add_rms_norm": (row_norm, "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
    "gated_rms_norm": (
        gated_norm,
        "_gated_rms_norm_forward_kernel",
        "_gated_rms_norm_backward_kernel",
    ),
    "causal_conv": (
        conv_module,
        "_causal_conv_forward_kernel",
        "_causal_conv_backward_kernel",
    ),
    "rope": (qkv_rope, "_qkv_rope_kernel"),
    "linear_cross_entropy": (cross_entropy, "_cross_entropy_kernel"),
    "log_probs": (cross_entropy, "_cross_entropy_kernel"),
}
OF_A_KERNEL = [operation for operation in WITH_VALUES if not operation.has_matmuls]


def every(operations, axes):
    """Apply `pairwise` to each operation: `axes(operation)` has names and values."""
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
    """Return the results of the usual case, to compare others with."""
    return run(operation, operation.case(device))

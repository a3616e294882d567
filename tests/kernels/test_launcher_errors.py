"""Checks of what our kernels' launchers refuse, by name: the same tests for all."""

import pytest
import torch
from cases.refusal import apart, assert_refused, narrow, on_meta, short
from cases.rms_norm_case import EPS

import fused_mlp.dropout
import fused_mlp.swiglu
from fused_lora.kernels import (
    causal_attention,
    causal_attention_backward,
    dropped_products,
    fp8_norm,
    fp8_rows,
    fp8_swiglu,
    output_gate,
    qkv_norm_rope,
    qkv_rope,
    routed_rows,
    swiglu_products_backward,
    swiglu_products_forward,
)
from fused_lora.kernels import residual as residual_kernels
from fused_lora.kernels.head_norms import HeadNorms
from fused_lora.kernels.swiglu_products_backward import Product


def ones(*shape):
    return torch.ones(*shape)


QKV, COS, OTHER = ones(10, 24), ones(1, 5, 6), ones(3, 5, 6)
Q, K = ones(2, 2, 5, 6), ones(2, 1, 5, 6)
NORMS = HeadNorms(ones(6), ones(6), EPS, EPS)
OF_ROPE = {"cos": COS, "sin": COS}
# in bf16: on a GPU the attention kernels take no fp32
HEADS, ATTENDED = ones(80, 256).bfloat16(), ones(80, 128).bfloat16()
LONG = ones(513, 256).bfloat16()
OF_SCORES = {"kv_heads": 2, "scaling": 0.3}
ARGUMENTS = {
    residual_kernels.residual_norm_forward: {
        "x": ones(4, 8), "weight": ones(8), "eps": EPS, "y": ones(4, 8), "copy": ones(4, 8)
    },
    residual_kernels.residual_norm_backward: {
        "grad_y": ones(4, 8), "grad_residual": ones(4, 8), "x": ones(4, 8), "weight": ones(8),
        "rstd": ones(4), "grad_x": ones(4, 8),
    },
    residual_kernels.add_normed: {
        "residual": ones(4, 8), "x": ones(4, 8), "weight": ones(8), "eps": EPS, "total": ones(4, 8)
    },
    residual_kernels.extend_rows: {
        "x": ones(4, 8), "A": ones(2, 8), "extended": ones(4, 10), "z": ones(4, 2),
    },
    fp8_rows.fp8_rows: {"x": ones(4, 8), "padded": 128, "column_scales": ones(8)},
    fp8_norm.norm_codes: {"x": ones(4, 8), "weight": ones(8), "eps": EPS, "padded": 128},
    fp8_norm.norm_backward_codes: {
        "grad_y": ones(4, 8), "grad_residual": ones(4, 8), "x": ones(4, 8), "weight": ones(8),
        "rstd": ones(4), "grad_x": ones(4, 8), "column_scales": ones(8), "padded": 128,
    },
    fp8_swiglu.swiglu_codes: {"gate_up": ones(4, 20), "padded": 128, "activation": "silu"},
    dropped_products.dropped_products: {
        "x": ones(9, 10), "A": ones(8, 10), "ranks": (4, 3), "masks": (None, None), "z": ones(9, 8)
    },
    dropped_products.dropped_gradient: {
        "p": ones(9, 8), "A": ones(8, 10), "ranks": (4, 3), "masks": (None, None),
        "total": ones(9, 10),
    },
    fused_mlp.swiglu_forward: {"gate": ones(3, 5), "up": ones(3, 5)},
    fused_mlp.swiglu_backward: {"grad_hidden": ones(3, 5), "gate": ones(3, 5), "up": ones(3, 5)},
    fused_mlp.geglu_forward: {"gate": ones(3, 5), "up": ones(3, 5)},
    fused_mlp.geglu_backward: {"grad_hidden": ones(3, 5), "gate": ones(3, 5), "up": ones(3, 5)},
    swiglu_products_forward.swiglu_forward_product: {
        "gate_up": ones(9, 20), "A": ones(8, 10), "hidden": ones(9, 10), "copy": ones(9, 8),
        "mask": None, "activation": "silu",
    },
    swiglu_products_backward.swiglu_backward_products: {
        "grad_hidden": ones(9, 10), "gate_up": ones(9, 20),
        **{
            name: Product(ones(9, 8), ones(10, 8))
            for name in ("hidden_product", "gate_product", "up_product")
        },
        "grad_gate_up": ones(9, 20), "activation": "silu",
    },
    output_gate.gate_forward: {"attended": ones(4, 6), "raw": ones(4, 16), "head_dim": 3},
    output_gate.gate_backward: {
        "grad": ones(4, 6), "attended": ones(4, 6), "raw": ones(4, 16), "head_dim": 3,
        "grad_raw": ones(4, 16),
    },
    routed_rows.routed_swiglu_forward: {
        "base": ones(4, 10), "addend": ones(4, 10), "scaling": 2.0, "weight": ones(4)
    },
    routed_rows.routed_swiglu_backward: {
        "base": ones(4, 5), "addend": ones(4, 5), "scaling": 2.0, "gate_up": ones(4, 10),
        "weight": ones(4),
    },
    routed_rows.sum_routed: {
        "base": ones(4, 5), "addend": ones(4, 5), "scaling": 2.0,
        "places": torch.arange(4).view(2, 2),
    },
    qkv_rope.rope_forward: {"qkv": QKV, **OF_ROPE, "heads": 2, "kv_heads": 1},
    qkv_rope.rotate_back: {"grad_qkv": QKV, **OF_ROPE, "heads": 2, "kv_heads": 1},
    qkv_rope.rope_together: {"q": Q, "k": K, "v": K, **OF_ROPE, "qkv": QKV},
    qkv_rope.rope_backward: {"grad_q": Q, "grad_k": K, "grad_v": K, **OF_ROPE, "grad_qkv": QKV},
    qkv_norm_rope.norm_rope_together: {
        "q": Q, "k": K, "v": K, "norms": NORMS, **OF_ROPE, "qkv": QKV
    },
    qkv_norm_rope.head_norms_backward: {"q": Q, "k": K, "v": K, "norms": NORMS, "grad_qkv": QKV},
    causal_attention.causal_attention_forward: {
        "qkv": HEADS, "positions": 40, "heads": 4, **OF_SCORES
    },
    causal_attention_backward.causal_attention_backward: {
        "grad": ATTENDED, "qkv": HEADS, "cos": ones(1, 40, 32), "sin": ones(1, 40, 32),
        "attended": ATTENDED, "logsumexp": ones(2, 4, 40), **OF_SCORES, "grad_qkv": HEADS,
    },
}  # fmt: skip
NAMES = {function.__name__: function for function in ARGUMENTS}
half, double = torch.Tensor.half, torch.Tensor.double


def half_of_them(t):
    return t[:, : t.shape[1] // 2]


def to(value):
    return lambda t: value.to(t.device) if isinstance(value, torch.Tensor) else value


# launchers accept any layout, and another dtype where none has to match
TAKEN = {
    *(
        (name, key, change)
        for name, key in (("fp8_rows", "x"), ("swiglu_codes", "gate_up"))
        for change in (short, half)
    ),
    ("norm_codes", "x", short),
    ("rope_forward", "qkv", half),
    ("rotate_back", "grad_qkv", half),
    ("causal_attention_forward", "qkv", half),
    ("residual_norm_forward", "y", half),
    ("residual_norm_backward", "grad_y", half),
    ("residual_norm_backward", "grad_x", half),
    *(
        (f"{which}_{way}", name, apart)
        for which in ("swiglu", "geglu")
        for way, names in (("forward", ()), ("backward", ("grad_hidden",)))
        for name in ("gate", "up", *names)
    ),
    *(
        (name, key, apart)
        for name in ("routed_swiglu_forward", "routed_swiglu_backward", "sum_routed")
        for key in ("base", "addend", "gate_up", "places")
    ),
    ("sum_routed", "places", short),
}
MATRICES = [
    (name, f"{argument}.factor" if isinstance(value, Product) else argument, change)
    for name, function in NAMES.items()
    for argument, value in ARGUMENTS[function].items()
    if isinstance(value, Product) or (isinstance(value, torch.Tensor) and value.ndim == 2)
    for change in (short, half, apart)
    if (name, argument, change) not in TAKEN
]
ERRORS = [
    ("residual_norm_forward", {"copy": half}, "copy is torch.float16 on"),
    ("residual_norm_forward", {"y": apart}, "y has elements 4 apart"),
    ("residual_norm_forward", {"weight": short}, r"weight is \[7\], should be \[8\] and contigu"),
    ("residual_norm_forward", {"weight": half}, "weight is torch.float16"),
    ("add_normed", {"weight": short}, r"weight is \[7\], should be \[8\] and contiguous"),
    ("extend_rows", {"A": narrow}, r"A is \[2, 7\], should be \[2, 8\]"),
    ("fp8_rows", {"x": lambda t: t[0]}, r"x is \[8\], should be \[rows, columns\]"),
    ("fp8_rows", {"column_scales": short},
     r"column_scales is \[7\] in torch.float32, should be \[8\]"),
    ("fp8_rows", {"column_scales": half}, "column_scales is .* in torch.float16, should be"),
    ("norm_codes", {"x": lambda t: t[0]}, r"x is \[8\], should be \[rows, columns\]"),
    ("norm_codes", {"weight": short}, r"weight is \[7\], should be \[8\] and contiguous"),
    ("norm_backward_codes", {"weight": half}, "weight is torch.float16"),
    ("swiglu_codes", {"gate_up": narrow}, r"\[4, 19\], should be \[rows, 2 intermediate\]"),
    ("dropped_products", {"ranks": to((4, 5))}, r"ranks are \[4, 5\] and masks 2, should be as"),
    ("dropped_products", {"masks": to((None,))}, r"ranks are \[4, 3\] and masks 1, should be as"),
    ("dropped_gradient", {"A": narrow}, r"A is \[8, 9\], should be \[8, 10\]"),
    ("swiglu_forward", {"up": on_meta}, r"needs tensors of one shape, dtype and device.* on meta"),
    ("swiglu_forward_product", {"A": narrow}, r"A is \[8, 9\], should be \[8, 10\]"),
    ("swiglu_forward_product", {"copy": narrow}, r"copy is \[9, 7\], should be \[9, 8\]"),
    *(
        (name, {"activation": lambda _: "relu"}, "is 'relu', should be 'silu' or 'gelu_tanh'")
        for name in ("swiglu_forward_product", "swiglu_backward_products")
    ),
    ("swiglu_forward_product", {"gate_up": narrow}, r"\[9, 19\], should be \[rows, 2 intermediate"),
    ("swiglu_backward_products", {"grad_hidden": narrow}, r"is \[9, 9\], should be \[9, 10\]"),
    ("swiglu_backward_products", {"gate_up": narrow}, r"19\], should be \[rows, 2 intermediate\]"),
    ("swiglu_backward_products", {"hidden_product.factor": short},
     r"hidden_product: factor is \[8, 8\]"),
    ("swiglu_backward_products", {"up_product.gradient": narrow},
     r"up_product: gradient is \[10, 7\]"),
    ("swiglu_backward_products", {"gate_product.gradient": double}, "gradient is torch.float64"),
    ("gate_forward", {"raw": lambda t: t[:, :11]}, r"\[4, 11\], should be \[4, 12 or more\]"),
    ("gate_backward", {"grad_raw": narrow}, r"grad_raw is \[4, 15\], should be \[4, 16\]"),
    ("routed_swiglu_forward", {"weight": short}, r"weight is \[3\], should be \[4\]"),
    ("routed_swiglu_backward", {"gate_up": narrow}, r"gate_up is \[4, 9\] .* be \[4, 10\]"),
    ("sum_routed", {"base": lambda t: t[0]}, r"base is \[5\]"),
    ("rope_forward", {"qkv": short}, r"\[9, 24\], should be \[batch \* 5, 4 \* 6\]"),
    ("rope_forward", {"heads": to(3)}, r"\[10, 24\], should be \[batch \* 5, 5 \* 6\]"),
    ("rope_forward", {"cos": narrow, "sin": narrow}, "head_dim even"),
    ("rope_forward", {"sin": half_of_them}, "should both be"),
    ("rope_forward", {"cos": to(OTHER), "sin": to(OTHER)}, r"\[batch \* 5, 4 \* 6\]"),
    ("rope_forward", {"cos": torch.Tensor.long}, "cos is torch.int64"),
    ("rope_together", {"v": short}, r"v is \[1, 1, 5, 6\], should be \[2, 1, 5, 6\]"),
    ("rope_together", {"k": half}, "k is torch.float16"),
    ("rope_backward", {"grad_v": short}, r"grad_v is \[1, 1, 5, 6\], should be \[2, 1, 5, 6\]"),
    ("norm_rope_together", {"qkv": short}, r"\[9, 24\], should be \[batch \* 5, 4 \* 6\]"),
    ("norm_rope_together", {"v": short}, r"v is \[1, 1, 5, 6\], should be \[2, 1, 5, 6\]"),
    ("norm_rope_together", {"q": half}, "q is torch.float16"),
    ("norm_rope_together", {"norms.k_weight": narrow}, r"k_weight is \[5\], should be \[6\], or"),
    ("norm_rope_together", {"norms.q_weight": torch.Tensor.long}, "q_weight is torch.int64"),
    ("head_norms_backward", {"k": short}, r"k is \[1, 1, 5, 6\], should be \[2, 1, 5, 6\]"),
    ("head_norms_backward", {"grad_qkv": narrow}, r"is \[10, 23\], should be \[10, 24\] as q is"),
    ("head_norms_backward", {"norms.q_weight": on_meta}, "q_weight is torch.float32 on meta"),
    ("causal_attention_forward", {"qkv": short}, r"\[79, 256\] .* \[batch \* 40, 8 \* head_dim\]"),
    ("causal_attention_forward", {"qkv": narrow}, r"\[80, 255\]"),
    ("causal_attention_forward", {"heads": to(2), "kv_heads": to(3)}, "as many heads for each of"),
    ("causal_attention_forward", {"positions": to(0)}, r"batch \* 0"),
    ("causal_attention_forward", {"qkv": to(LONG), "positions": to(513)}, "up to 512"),
    ("causal_attention_backward", {"grad": narrow}, r"grad is \[80, 127\], should be \[80, 128\]"),
    ("causal_attention_backward", {"grad_qkv": narrow}, r"grad_qkv is \[80, 255\]"),
    ("causal_attention_backward", {"cos": torch.Tensor.long}, "cos is torch.int64"),
    ("causal_attention_backward", {"cos": half_of_them, "sin": half_of_them}, r"be \[4, 4, 20\]"),
    ("causal_attention_backward", {"logsumexp": half}, "should be .* in torch.float32"),
    ("causal_attention_backward", {"logsumexp": lambda t: t.mT.contiguous().mT}, "and contiguous"),
]  # fmt: skip


def arguments_of(function, **options):
    """Return the arguments, moved to a device or cast to a dtype."""

    def moved(value):
        if isinstance(value, Product):
            return Product(moved(value.factor), moved(value.gradient))
        if isinstance(value, HeadNorms):
            return HeadNorms(*map(moved, value))
        return value.to(**options) if isinstance(value, torch.Tensor) else value

    return {name: moved(value) for name, value in ARGUMENTS[function].items()}


@pytest.mark.parametrize(("name", "path", "change"), MATRICES)
def test_a_matrix_unlike_the_others_is_a_value_error(name, path, change, device):
    """Try one too short, one in another dtype, and one whose rows have gaps between elements."""
    arguments = arguments_of(NAMES[name], device=device)
    assert_refused(NAMES[name], arguments, {path: change}, f"^{name}.* should |^{name} needs")


@pytest.mark.parametrize(
    ("name", "changes", "message"), ERRORS, ids=[f"{name}-{says}" for name, _, says in ERRORS]
)
def test_what_does_not_fit_is_a_value_error_that_names_it(name, changes, message, device):
    arguments = arguments_of(NAMES[name], device=device)
    assert_refused(NAMES[name], arguments, changes, f"^{name}.*{message}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_without_a_kernel_is_a_value_error(name, dtype, device):
    message = f"^{name} computes in bfloat16, float16 or float32, got {dtype}: cast first"
    arguments = arguments_of(NAMES[name], device=device, dtype=dtype)
    assert_refused(NAMES[name], arguments, {}, message)

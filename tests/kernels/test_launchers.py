"""What the launchers of our kernels promise: the same tests over all. What is one's alone is
tested in its own file."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import test_causal_attention as attention
import test_dropout as dropout
import test_qkv_rope as rope
import test_residual_kernels as residual
import test_sums_over_tokens as sums
import test_swiglu as swiglu
import test_swiglu_products_backward as products_backward
import test_swiglu_products_forward as products_forward
import torch
from cases import rope_case
from cases.reference import assert_within_budget, use_poisoned_memory
from cases.refusal import apart, assert_refused, narrow, on_meta, short
from cases.rms_norm_case import EPS, Kernel
from contract import BF16, DTYPES, FP16, FP32

import fused_mlp.dropout
import fused_mlp.swiglu
from fused_lora.kernels import (
    causal_attention,
    causal_attention_backward,
    dropped_products,
    qkv_norm_rope,
    qkv_rope,
    sums_over_tokens,
    swiglu_products_backward,
    swiglu_products_forward,
)
from fused_lora.kernels import residual as residual_kernels
from fused_lora.kernels.qkv_norm_rope import HeadNorms
from fused_lora.kernels.swiglu_products_backward import Product

tiles_of_forward = products_forward.small_tiles  # fixtures that every test of theirs has
tiles_of_backward = products_backward.small_tiles
tiles_of_sums = sums.small_tiles


@dataclass(frozen=True)
class Launcher:
    """kernels: the modules that launch, and their kernels' names.
    sizes: what `make` takes by name; `usual` is one of them, `none` one more, of no rows.
    make: (size, dtype, device) -> operands. fused, eager: take a size and its operands, give the
        results; `layout` lays out every [rows, columns] tensor that fused reads or writes.
    writes: how many of these it writes.
    is_exact: another layout gives the same bits on a GPU too.
    """

    kernels: tuple
    sizes: dict[str, Any]
    usual: str
    none: tuple
    make: Callable
    fused: Callable
    eager: Callable
    writes: int
    dtypes: tuple = DTYPES
    is_exact: bool = True


def make_rope(size, dtype, device):
    inputs, gradients = rope_case.make(size, dtype=dtype, device=device)
    return *inputs, *gradients


def of_case(function):
    return lambda size, case, **layout: function(*case, **layout)


KEEP_BITS = fused_mlp.dropout, "_keep_bits_kernel"
ABOUT_ONE = {"": {}, ", about one": {"zero_centered": True}}
OF_SWIGLU = {"": {}, ", GeGLU": {"activation": "gelu_tanh"}, ", dropout": {"dropout": 0.3}}
LAUNCHERS = {
    **{
        f"residual_norm{which}": Launcher(
            ((residual_kernels, "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),),
            residual.SIZES, "odd", (0, 8), residual.norm_case,
            of_case(partial(residual.fused_norm, **options)),
            of_case(partial(residual.eager_norm, **options)), writes=3,
        )
        for which, options in ABOUT_ONE.items()
    },
    **{
        f"add_normed{which}": Launcher(
            ((residual_kernels, "_add_normed_kernel", "_rms_norm_backward_kernel"),),
            residual.SIZES, "odd", (0, 8), residual.normed_sum_case,
            of_case(partial(residual.fused_normed_sum, **options)),
            of_case(partial(residual.eager_normed_sum, **options)), writes=2,
        )
        for which, options in ABOUT_ONE.items()
    },
    "sums_over_tokens": Launcher(
        ((sums_over_tokens, "_sums_over_tokens_kernel", "_sum_partials_kernel"),),
        sums.CASES, "odd", (0, sums.CASES["odd"][1]), sums.make, sums.fused, sums.eager, writes=6,
    ),
    "extend_rows": Launcher(
        ((residual_kernels, "_extend_rows_kernel"),),
        residual.EXTENDED, "odd", (0, 8, 4), residual.extended_case,
        of_case(residual.fused_extension), of_case(residual.eager_extension), writes=4,
    ),
    "dropped_products": Launcher(
        (
            (dropped_products, "_dropped_products_kernel", "_dropped_gradient_kernel"),
            KEEP_BITS,
        ),
        dropout.CASES, "odd", (0, 8, 8, (4,), (0.5,)), dropout.make, dropout.fused, dropout.eager,
        writes=2,
    ),
    **{
        which.name: Launcher(
            ((which.module, f"_{which.name}_forward_kernel", f"_{which.name}_backward_kernel"),),
            swiglu.SHAPES, "two dimensions", (0, 8),
            lambda size, dtype, device: swiglu.inputs(
                *swiglu.SHAPES[size], dtype=dtype, device=device
            ),
            lambda size, case, layout, which=which: swiglu.fused(which, *map(layout, case)),
            of_case(partial(swiglu.eager, which)), writes=0,
        )
        for which in (swiglu.SWIGLU, swiglu.GEGLU)
    },
    **{
        f"swiglu_forward_product{which}": Launcher(
            (
                (swiglu_products_forward, "_swiglu_forward_product_kernel", "_sum_z_kernel"),
                KEEP_BITS,
            ),
            products_forward.CASES, "odd", (0, 10, 4), products_forward.make,
            of_case(partial(products_forward.fused, **options)),
            of_case(partial(products_forward.eager, **options)), writes=2,
        )
        for which, options in OF_SWIGLU.items()
    },
    **{
        f"swiglu_backward_products{which}": Launcher(
            (
                (swiglu_products_backward, "_swiglu_backward_products_kernel",
                 "_sum_products_kernel"),
                KEEP_BITS,
            ),
            products_backward.CASES, "odd", (0, 10, (4, 4, 4)), products_backward.make,
            of_case(partial(products_backward.fused, **options)),
            of_case(partial(products_backward.eager, **options)), writes=4,
        )
        for which, options in OF_SWIGLU.items()
    },
    "rope on [q | k | v]": Launcher(
        ((qkv_rope, "_qkv_rope_kernel"),),
        rope_case.SIZES, "GQA", rope_case.EMPTY["no batch"], make_rope,
        lambda size, case, layout: rope.fused(case[:4], case[4:], layout),
        lambda size, case: rope_case.run(rope_case.eager, case[:4], case[4:]),
        writes=2, is_exact=False,
    ),
    **{
        f"norms and rope on [q | k | v]{which}": Launcher(
            ((qkv_norm_rope, "_qkv_norm_rope_kernel", "_qkv_norm_backward_kernel"),),
            rope_case.SIZES, "GQA", rope_case.EMPTY["no batch"],
            partial(rope.make_normed, together="together" in which),
            of_case(lambda *case, options=options, **layout: rope.fused_normed(
                case, **layout, **options)),
            of_case(lambda *case, options=options: rope.eager_normed(case, **options)),
            writes=2, is_exact=False,
        )
        for which, options in (ABOUT_ONE | {", all heads together": {}}).items()
    },
    "causal_attention": Launcher(
        (
            (qkv_rope, "_qkv_rope_kernel"),
            (causal_attention, "_attention_forward_kernel"),
            (causal_attention_backward, "_attention_queries_backward_kernel",
             "_attention_keys_backward_kernel"),
        ),
        attention.SIZES, "not whole tiles, angles of each sequence", (0, 2, 1, 5, 32, 1),
        attention.make, attention.fused, attention.eager,
        writes=2, dtypes=(BF16, FP16), is_exact=False,  # in fp32 PyTorch attends
    ),
}  # fmt: skip

ALL = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)


def assert_right(launcher, size, case, got):
    truth = launcher.eager(size, [t.double() for t in case])
    rows = zip(got, launcher.eager(size, case), truth, strict=True)
    for number, (one, eager, exact) in enumerate(rows):
        assert one.dtype == eager.dtype or one.dtype == FP32
        assert_within_budget(f"result {number}", one, eager, exact)


@pytest.mark.parametrize(
    ("launcher", "size", "dtype"),
    [
        pytest.param(
            launcher, size, dtype, id=f"{name}-{size}-{dtype}",
            marks=pytest.mark.exhaustive if dtype != BF16 and size != launcher.usual else (),
        )
        for name, launcher in LAUNCHERS.items()
        for size in launcher.sizes
        for dtype in launcher.dtypes
    ],
)  # fmt: skip
def test_results_are_within_the_error_budget(launcher, size, dtype, device):
    case = launcher.make(size, dtype, device)
    assert_right(launcher, size, case, launcher.fused(size, case, layout=torch.clone))


def run_wide(launcher, case, more):
    """Results, with every tensor in the first columns of a buffer so many wider, of which as many
    are written as should be, and nothing behind them."""
    seen = []

    def wide(t):
        rows = t.new_full((t.shape[0], t.shape[1] + more), torch.inf)  # times 0 it shows
        rows[:, : t.shape[1]] = t
        seen.append((rows, t.shape[1], rows.clone()))
        return rows[:, : t.shape[1]]

    results = launcher.fused(launcher.usual, case, layout=wide)
    written = 0
    for rows, columns, before in seen:
        assert torch.equal(rows[:, columns:], before[:, columns:])
        written += not torch.equal(rows[:, :columns], before[:, :columns])
    assert written == launcher.writes
    return results


@pytest.mark.parametrize("more", [24, 1])
@ALL
def test_rows_any_stride_apart_give_what_contiguous_ones_do_and_nothing_else_is_written(
    launcher, more, device
):
    case = launcher.make(launcher.usual, BF16, device)
    want, got = run_wide(launcher, case, 0), run_wide(launcher, case, more)
    if launcher.is_exact or device == "cpu":
        assert all(map(torch.equal, got, want))
    else:  # unaligned, a GPU's threads hold other elements and add in another order
        assert_right(launcher, launcher.usual, case, got)


@ALL
def test_repetition_is_bitwise_equal_whatever_new_memory_holds(launcher, monkeypatch, device):
    case = launcher.make(launcher.usual, BF16, device)
    want = launcher.fused(launcher.usual, case, layout=torch.clone)
    use_poisoned_memory(monkeypatch)
    assert all(map(torch.equal, launcher.fused(launcher.usual, case, layout=torch.clone), want))


@ALL
def test_no_rows_launch_nothing_and_give_sums_of_zero(launcher, monkeypatch, device):
    kernel = Kernel()
    for module, *names in launcher.kernels:
        for name in names:
            monkeypatch.setattr(module, name, kernel)
    monkeypatch.setitem(launcher.sizes, "none", launcher.none)
    case = launcher.make("none", BF16, device)
    got, want = launcher.fused("none", case, layout=torch.clone), launcher.eager("none", case)
    assert not kernel.launches
    assert [t.shape for t in got] == [t.shape for t in want]
    assert not any(t.any() for t in got)


# --- what does not fit ----------------------------------------------------------------------------


def ones(*shape):
    return torch.ones(*shape)


QKV, COS, OTHER = ones(10, 24), ones(1, 5, 6), ones(3, 5, 6)
Q, K = ones(2, 2, 5, 6), ones(2, 1, 5, 6)
NORMS = HeadNorms(ones(6), ones(6), EPS, EPS)
OF_ROPE = {"cos": COS, "sin": COS}
# in bf16, for on a GPU attention's kernels take no fp32
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
        **{name: Product(ones(9, 8), ones(10, 8)) for name in ("of_hidden", "of_gate", "of_up")},
        "grad_gate_up": ones(9, 20), "activation": "silu",
    },
    qkv_rope.rope_forward: {"qkv": QKV, **OF_ROPE, "heads": 2, "kv_heads": 1},
    qkv_rope.rope_together: {"q": Q, "k": K, "v": K, **OF_ROPE, "qkv": QKV},
    qkv_rope.rope_backward: {"grad_q": Q, "grad_k": K, "grad_v": K, **OF_ROPE, "grad_qkv": QKV},
    qkv_norm_rope.norm_rope_together: {
        "q": Q, "k": K, "v": K, "norms": NORMS, **OF_ROPE, "qkv": QKV
    },
    qkv_norm_rope.head_norms_backward: {"q": Q, "k": K, "norms": NORMS, "grad_qkv": QKV},
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


# what a launcher does take: another dtype where nothing has to be of the same, and any layout
TAKEN = {
    ("rope_forward", "qkv", half),
    ("causal_attention_forward", "qkv", half),
    *(
        (f"{which}_{way}", name, apart)
        for which in ("swiglu", "geglu")
        for way, names in (("forward", ()), ("backward", ("grad_hidden",)))
        for name in ("gate", "up", *names)
    ),
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
    ("residual_norm_forward", {"y": half}, "y is torch.float16 on"),
    ("residual_norm_forward", {"y": apart}, "y has elements 4 apart"),
    ("residual_norm_forward", {"weight": short}, r"weight is \[7\], should be \[8\] and contigu"),
    ("residual_norm_forward", {"weight": half}, "weight is torch.float16"),
    ("add_normed", {"weight": short}, r"weight is \[7\], should be \[8\] and contiguous"),
    ("extend_rows", {"A": narrow}, r"A is \[2, 7\], should be \[2, 8\]"),
    ("dropped_products", {"ranks": to((4, 5))}, r"ranks are \[4, 5\] and masks 2, should be as"),
    ("dropped_products", {"masks": to((None,))}, r"ranks are \[4, 3\] and masks 1, should be as"),
    ("dropped_gradient", {"A": narrow}, r"A is \[8, 9\], should be \[8, 10\]"),
    ("swiglu_forward", {"up": on_meta}, r"wants tensors of one shape, dtype and device.* on meta"),
    ("swiglu_forward_product", {"A": narrow}, r"A is \[8, 9\], should be \[8, 10\]"),
    ("swiglu_forward_product", {"copy": narrow}, r"copy is \[9, 7\], should be \[9, 8\]"),
    *(
        (name, {"activation": lambda _: "relu"}, "is 'relu', should be 'silu' or 'gelu_tanh'")
        for name in ("swiglu_forward_product", "swiglu_backward_products")
    ),
    ("swiglu_forward_product", {"gate_up": narrow}, r"\[9, 19\], should be \[rows, 2 intermediate"),
    ("swiglu_backward_products", {"grad_hidden": narrow}, r"is \[9, 9\], should be \[9, 10\]"),
    ("swiglu_backward_products", {"gate_up": narrow}, r"19\], should be \[rows, 2 intermediate\]"),
    ("swiglu_backward_products", {"of_hidden.factor": short}, r"of_hidden: factor is \[8, 8\]"),
    ("swiglu_backward_products", {"of_up.gradient": narrow}, r"of_up: gradient is \[10, 7\]"),
    ("swiglu_backward_products", {"of_gate.gradient": double}, "gradient is torch.float64"),
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
    """On a device, or in a dtype."""

    def moved(value):
        if isinstance(value, Product):
            return Product(moved(value.factor), moved(value.gradient))
        if isinstance(value, HeadNorms):
            return HeadNorms(*map(moved, value))
        return value.to(**options) if isinstance(value, torch.Tensor) else value

    return {name: moved(value) for name, value in ARGUMENTS[function].items()}


@pytest.mark.parametrize(("name", "path", "change"), MATRICES)
def test_a_matrix_unlike_the_others_is_a_value_error(name, path, change, device):
    """Too short, in another dtype, or with the elements of its rows apart."""
    arguments = arguments_of(NAMES[name], device=device)
    assert_refused(NAMES[name], arguments, {path: change}, f"^{name}.* should |^{name} wants")


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

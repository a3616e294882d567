"""Checks of what our kernels' launchers promise: the same tests for all. Each kernel's own file has
the tests that only it needs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import test_causal_attention as attention
import test_dropout as dropout
import test_fp8_codes as coded
import test_magnitudes as magnitudes_of
import test_qkv_rope as rope
import test_routed_rows as routed
import test_row_norm as norms
import test_sums_over_tokens as sums
import test_swiglu as swiglu
import test_swiglu_products_backward as products_backward
import test_swiglu_products_forward as products_forward
import torch
from cases import output_gate_case as gates
from cases import rope_case
from cases.operands import BF16, DTYPES, FP16, FP32
from cases.reference import assert_within_budget, over_draws, use_poisoned_memory
from cases.rms_norm_case import Kernel

import fused_mlp.dropout
import fused_mlp.swiglu
from fused_lora.kernels import (
    causal_attention,
    causal_attention_backward,
    dropped_products,
    extend_rows,
    fp8_rows,
    fp8_swiglu,
    head_norms,
    magnitudes,
    output_gate,
    qkv_rope,
    routed_rows,
    row_norm,
    sums_over_tokens,
    swiglu_products_backward,
    swiglu_products_forward,
)
from fused_mlp.utils import ACTIVATIONS

tiles_of_forward = products_forward.small_tiles  # fixtures that every test of theirs has
tiles_of_backward = products_backward.small_tiles
tiles_of_sums = sums.small_tiles
ranges_of_magnitudes = magnitudes_of.few_ranges


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


def on_case(function):
    return lambda size, case, **layout: function(*case, **layout)


NORM_KERNELS = ((row_norm, "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),)
KEEP_BITS = fused_mlp.dropout, "_keep_bits_kernel"
ABOUT_ONE = {"": {}, ", about one": {"zero_centered": True}}
OF_SWIGLU = {
    "": {}, ", GeGLU": {"activation": "gelu_tanh"}, ", dropout": {"dropout": 0.3},
    ", scaled": {"has_scale": True},
}  # fmt: skip
LAUNCHERS = {
    **{
        f"rms_norm{which}": Launcher(
            NORM_KERNELS, norms.SIZES, "odd", (0, 8), norms.norm_case,
            on_case(partial(norms.fused_norm, **options)),
            on_case(partial(norms.eager_norm, **options)), writes=3,
        )
        for which, options in ABOUT_ONE.items()
    },
    **{
        f"add_normed{which}": Launcher(
            NORM_KERNELS, norms.SIZES, "odd", (0, 8), norms.normed_sum_case,
            on_case(partial(norms.fused_normed_sum, **options)),
            on_case(partial(norms.eager_normed_sum, **options)), writes=2,
        )
        for which, options in ABOUT_ONE.items()
    },
    "sums_over_tokens": Launcher(
        ((sums_over_tokens, "_sums_over_tokens_kernel", "_sum_partials_kernel"),),
        sums.CASES, "odd", (0, sums.CASES["odd"][1]), sums.make, sums.fused, sums.eager, writes=6,
    ),
    "extend_rows": Launcher(
        ((extend_rows, "_extend_rows_kernel"),),
        norms.EXTENDED, "odd", (0, 8, 4), norms.extended_case,
        on_case(norms.fused_extension), on_case(norms.eager_extension), writes=4,
    ),
    "magnitude_factors": Launcher(
        ((magnitudes, "_magnitude_factors_kernel"),),
        magnitudes_of.WEIGHTS, "odd", (0, 8, 4), magnitudes_of.factors_case,
        on_case(magnitudes_of.fused_factors), on_case(magnitudes_of.eager_factors), writes=0,
    ),
    "scale_columns": Launcher(
        ((magnitudes, "_scale_columns_kernel", "_scale_columns_backward_kernel",
          "_sum_magnitudes_kernel"),),
        magnitudes_of.SIZES, "odd", (0, 8), magnitudes_of.scaled_case,
        on_case(magnitudes_of.fused_scaled), on_case(magnitudes_of.eager_scaled), writes=3,
    ),
    "fp8_rows": Launcher(
        ((fp8_rows, "_fp8_rows_kernel"),),
        coded.SIZES, "odd", coded.NONE, coded.rows_case,
        on_case(coded.fused_rows), on_case(coded.eager_rows), writes=0,
    ),
    "norm_codes": Launcher(
        NORM_KERNELS, coded.SIZES, "odd", coded.NONE, coded.norm_case,
        on_case(coded.fused_norm), on_case(coded.eager_norm), writes=1,
    ),
    **{
        f"swiglu_codes, {activation}": Launcher(
            ((fp8_swiglu, "_swiglu_codes_kernel"),),
            coded.SIZES, "odd", coded.NONE, coded.swiglu_case,
            on_case(partial(coded.fused_swiglu, activation=activation)),
            on_case(partial(coded.eager_swiglu, activation=activation)), writes=0,
        )
        for activation in ACTIVATIONS
    },
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
            on_case(partial(swiglu.eager, which)), writes=0,
        )
        for which in (swiglu.SWIGLU, swiglu.GEGLU)
    },
    **{
        f"routed rows{which}": Launcher(
            (
                (routed_rows, "_routed_swiglu_forward_kernel", "_routed_swiglu_backward_kernel",
                 "_sum_routed_kernel"),
            ),
            routed.SIZES, "odd", routed.NONE, routed.make,
            on_case(partial(routed.fused, gate=gate)), on_case(partial(routed.eager, gate=gate)),
            writes=0,
        )
        for which, gate in (("", routed.SWIGLU), (", clamped gate", routed.CLAMPED))
    },
    **{
        f"swiglu_forward_product{which}": Launcher(
            (
                (swiglu_products_forward, "_swiglu_forward_product_kernel", "_sum_z_kernel"),
                KEEP_BITS,
            ),
            products_forward.CASES, "odd", (0, 10, 4), products_forward.make,
            on_case(partial(products_forward.fused, **options)),
            on_case(partial(products_forward.eager, **options)), writes=2,
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
            on_case(partial(products_backward.fused, **options)),
            on_case(partial(products_backward.eager, **options)), writes=4,
        )
        for which, options in OF_SWIGLU.items()
    },
    "output_gate": Launcher(
        ((output_gate, "_output_gate_kernel", "_output_gate_backward_kernel"),),
        gates.SIZES, "odd", (0, 2, 8, 8), gates.make, gates.fused, gates.eager, writes=2,
    ),
    "rope on [q | k | v]": Launcher(
        ((qkv_rope, "_qkv_rope_kernel"),),
        rope_case.SIZES, "GQA", rope_case.EMPTY["no batch"], make_rope,
        lambda size, case, layout: rope.fused(case[:4], case[4:], layout),
        lambda size, case: rope_case.run(rope_case.eager, case[:4], case[4:]),
        writes=2, is_exact=False,
    ),
    **{
        f"norms and rope on [q | k | v]{which}": Launcher(
            ((qkv_rope, "_qkv_rope_kernel"), (head_norms, "_qkv_norm_backward_kernel")),
            rope_case.SIZES, "GQA", rope_case.EMPTY["no batch"],
            partial(rope.make_normed, together="together" in which),
            on_case(lambda *case, options=options, **layout: rope.fused_normed(
                case, **layout, **options)),
            on_case(lambda *case, options=options: rope.eager_normed(case, **options)),
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
    def check():
        case = launcher.make(size, dtype, device)
        assert_right(launcher, size, case, launcher.fused(size, case, layout=torch.clone))

    over_draws(check, first=1)


def run_wide(launcher, case, more):
    """Return the results with every tensor in the first columns of a buffer `more` columns wider.

    Checks that the right number of tensors is written, and nothing behind their columns."""
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
    else:  # unaligned rows: a GPU's threads hold other elements and add in another order
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

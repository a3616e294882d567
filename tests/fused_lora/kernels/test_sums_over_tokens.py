"""The adapters' sums over tokens in one launch: the cases for test_launchers.py, and the tests that
only these sums need."""

import pytest
import torch
from cases.reference import random
from cases.rms_norm_case import Kernel

from fused_lora.kernels import sums_over_tokens as module
from fused_lora.kernels.fp8_rows import E4M3
from fused_lora.kernels.sums_over_tokens import sums_over_tokens
from fused_lora.kernels.swiglu_products_backward import Product
from fused_lora.kernels.tiling import Tiling

# T, and for each x its columns and the ranks of its products
CASES = {
    "odd": (39, [(139, (8, 8, 8)), (52, (12,)), (3, (8, 1))]),
    "one row": (1, [(52, (12,)), (20, (8, 4))]),
    "one column": (21, [(1, (8,)), (33, (1, 1, 1, 1))]),
    "whole tiles": (64, [(64, (32, 32, 32)), (32, (32,))]),
    "more than a block": (39, [(20, (72, 8)), (35, (136,)), (20, (1,))]),
    "more than a launch": (20, [(5 + i, (4 + i,)) for i in range(10)]),
    "nothing of some": (20, [(20, ()), (0, (8,)), (20, (0, 8)), (33, (8,))]),
    # a layer's: dA of q, k and v, dB of each, dA and dB of o, dA of gate and up
    "a layer": (
        50,
        [(64, (8, 8, 8)), (64, (8,)), (16, (8,)), (16, (8,)), (64, (8,)), (64, (8,)), (64, (8, 8))],
    ),
}
SMALL = Tiling(16, 32, 2, 4, 2)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Split a few rows into several tiles and ranges, the last of each partial."""
    for name in ("TILING", "TILING_IN_FP32"):
        monkeypatch.setattr(module, name, SMALL)
    monkeypatch.setattr(module, "TILING_OF_MANY_ROWS", Tiling(16, 64, 8, 4, 2))
    monkeypatch.setattr(module, "_SUM_COLUMNS", 32)


@pytest.fixture(params=[1, 2], ids=["one range", "two ranges"])
def ranges(request, monkeypatch):
    """Split the rows into one range, whose sums are the gradients, or two with partial sums."""
    for name in ("TILING", "TILING_OF_MANY_ROWS", "TILING_IN_FP32"):
        monkeypatch.setattr(module, name, SMALL._replace(splits=request.param))


def make(size, dtype, device):
    """Return each x and its factors, side by side in one tensor as in a border."""
    rows, xs = CASES[size]
    widths = [width for columns, ranks in xs for width in (columns, sum(ranks))]
    return [random(rows, n, seed=i, dtype=dtype, device=device) for i, n in enumerate(widths)]


def products_of(size, case):
    """Yield each x with its factors and the scaling of each product."""
    for i, (_, ranks) in enumerate(CASES[size][1]):
        x, factors = case[2 * i : 2 * i + 2]
        yield x, [(factor, 1.0 + i / 2 + j) for j, factor in enumerate(factors.split(ranks, dim=1))]


def fused(size, case, layout=torch.clone, dtype=None):
    """Return the gradients of all products. Every other one is transposed, as A is."""
    sums, gradients = [], []
    for x, factors in products_of(size, list(map(layout, case))):
        products = []
        for factor, scaling in factors:
            shape, is_B = (x.shape[1], factor.shape[1]), len(gradients) % 2
            like = {"dtype": dtype or x.dtype, "device": x.device}
            empty = layout(torch.full(shape if is_B else shape[::-1], 7.0, **like))
            gradients.append(empty if is_B else empty.t())
            products.append(Product(factor, gradients[-1], scaling))
        sums.append((x, products))
    sums_over_tokens(sums)
    return gradients


def eager(size, case):
    return [
        scaling * (x.t() @ factor)
        for x, factors in products_of(size, case)
        for factor, scaling in factors
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", ["odd", "a layer", "nothing of some"])
def test_an_x_may_be_codes(size, dtype, ranges, device, monkeypatch):
    """Make every third x codes, starting with the first. Their values count, with one loop for all
    factors and with a loop for each."""
    case = make(size, dtype, device)
    codes = [t.to(E4M3) if i % 6 == 0 else t for i, t in enumerate(case)]
    want = fused(size, [t.to(dtype) for t in codes], dtype=dtype)
    assert_equal(fused(size, codes, dtype=dtype), want)
    if device == "cpu":  # on a GPU Triton keeps the kernel it compiled
        monkeypatch.setattr(module, "dots_of_a_tile", lambda dtype, count: 1)
        assert_equal(fused(size, codes, dtype=dtype), want)


def assert_equal(got, want):
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def assert_exact(got, size, case):
    for one, truth in zip(got, eager(size, [t.double() for t in case]), strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-4)


@pytest.mark.slow("two ranges-a layer-torch.bfloat16", "one range-nothing of some")
@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", ["a layer", "more than a block", "nothing of some"])
def test_gradients_in_fp32_were_never_rounded(size, dtype, ranges, device):
    case = make(size, dtype, device)
    got = fused(size, case, dtype=torch.float32)
    assert_exact(got, size, case)
    for to in (torch.bfloat16, torch.float16):
        assert_equal([gradient.to(to) for gradient in got], fused(size, case, dtype=to))


@pytest.mark.parametrize("size", ["odd", "more than a block", "a layer"])
def test_partial_sums_stay_inside_the_workspace_and_fill_it(size, device, monkeypatch):
    seen = []
    new_empty = torch.Tensor.new_empty

    def guarded(tensor, *shape, **options):
        if "dtype" not in options:  # the interpreter's own
            return new_empty(tensor, *shape, **options)
        count = torch.Size(shape).numel()
        big = new_empty(tensor, count + 128, **options).fill_(torch.nan)
        seen.append(big)
        return big[64:-64].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    case = make(size, torch.float32, device)
    assert_exact(fused(size, case), size, case)
    assert seen
    for big in seen:
        assert big[:64].isnan().all() and big[-64:].isnan().all() and not big[64:-64].isnan().any()
        # all of rank 8, in blocks of 16: nothing beside a factor is read
        assert size != "a layer" or not big[64:-64].view(-1, 2, 8)[:, 1].any()
    seen.clear()
    monkeypatch.setattr(module, "PROGRAMS", 0)  # one range, whose sums need no workspace
    assert_exact(fused(size, case), size, case)
    assert not seen


def test_all_rows_may_be_one(device):
    case = [t[:1].expand(t.shape) for t in make("odd", torch.bfloat16, device)]
    assert_equal(fused("odd", case, lambda t: t), fused("odd", case, torch.Tensor.contiguous))


def test_products_give_alone_what_they_give_together(device, monkeypatch):
    """Leave out frozen adapters. The others' results stay the same."""
    monkeypatch.setattr(module, "PROGRAMS", 10**6)  # otherwise fewer tiles would give more ranges
    case = make("a layer", torch.bfloat16, device)
    together = iter(fused("a layer", case))
    for x, factors in products_of("a layer", case):
        for factor, scaling in factors:
            gradient = torch.empty(x.shape[1], factor.shape[1], dtype=x.dtype, device=device)
            sums_over_tokens([(x, []), (x, [Product(factor, gradient, scaling)])])
            assert torch.equal(gradient, next(together))


class Launches(Kernel):
    """Record the launches: first the sums, then the addition of the partial sums."""

    def __init__(self, monkeypatch):
        super().__init__()
        for name in ("_sums_over_tokens_kernel", "_sum_partials_kernel"):
            monkeypatch.setattr(module, name, self)


@pytest.mark.parametrize(
    ("size", "launches"),
    [("a layer", 1), ("more than a launch", 2), ("nothing of some", 1), ("more than a block", 1)],
)
def test_a_layer_is_one_launch_and_another_adds_up_ranges_of_rows_if_there_are_several(
    size, launches, device, monkeypatch
):
    for programs, ranges in ((0, 1), (27, 2)):
        kernel = Launches(monkeypatch)
        monkeypatch.setattr(module, "PROGRAMS", programs)
        fused(size, make(size, torch.bfloat16, device))
        assert len(kernel.launches) == ranges * launches
        if size == "a layer":
            assert [grid for grid, _ in kernel.launches] == [(12, ranges), (18,)][:ranges]


def test_many_rows_have_a_tiling_of_their_own(device, monkeypatch):
    for rows, grid in ((module.MANY_ROWS - 1, (3, 2)), (module.MANY_ROWS, (2, 8))):
        kernel = Launches(monkeypatch)
        x = torch.ones(1, 65, dtype=torch.bfloat16, device=device).expand(rows, 65)
        sums_over_tokens([(x, [Product(x[:, :8], torch.empty(65, 8, device=device))])])
        assert kernel.launches[0][0] == grid


def test_nothing_wanted_is_nothing_to_do(device, monkeypatch):
    kernel = Launches(monkeypatch)
    x = torch.ones(3, 4, device=device)
    nothing = Product(x[:, :0], torch.empty(4, 0, device=device))
    no_columns = Product(x, torch.empty(0, 4, device=device))
    for sums in ([], [(x, [])], [(x, [nothing])], [(x[:, :0], [no_columns])]):
        sums_over_tokens(sums)
    assert not kernel.launches

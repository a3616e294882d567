"""The adapters' sums over tokens in one launch, against eager PyTorch in float64."""

import pytest
import torch
from cuda_graph import capture
from reference import assert_within_budget, random
from refusal import apart, assert_refused, narrow, on_meta, short
from rms_norm_case import Kernel

from fused_lora.kernels import sums_over_tokens as module
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
    """So that a few rows are several tiles in several ranges, the last of each not full."""
    for name in ("TILING", "TILING_IN_FP32"):
        monkeypatch.setattr(module, name, SMALL)
    monkeypatch.setattr(module, "TILING_OF_MANY_ROWS", Tiling(16, 64, 8, 4, 2))
    monkeypatch.setattr(module, "_SUM_COLUMNS", 32)


@pytest.fixture(params=[1, 2], ids=["one range", "two ranges"])
def ranges(request, monkeypatch):
    """Of the rows: one, whose sums are the gradients, or two, whose partial sums are added up."""
    for name in ("TILING", "TILING_IN_FP32"):
        monkeypatch.setattr(module, name, SMALL._replace(splits=request.param))


def make(case, dtype, device):
    """Each x with its factors, which lie side by side in one tensor, as those of a border do."""
    rows, of_xs = CASES[case]
    pairs = []
    for i, (columns, ranks) in enumerate(of_xs):
        x = random(rows, columns, seed=2 * i, dtype=dtype, device=device)
        factors = random(rows, sum(ranks), seed=2 * i + 1, dtype=dtype, device=device)
        pairs.append((x, factors.split(ranks, dim=1)))
    return pairs


def scaling_of(i, j):
    return 1.0 + i / 2 + j


def canary(shape, dtype, device):
    """A tensor of sevens inside a larger one of sevens, nothing of which may change."""
    big = torch.full((shape[0] + 3, shape[1] + 5), 7.0, dtype=dtype, device=device)
    return big[2:-1, 1:-4]


def launched(pairs, dtype=None):
    """Gradients of all products, every other of which lies as A does: transposed."""
    sums, gradients = [], []
    for i, (x, factors) in enumerate(pairs):
        products = []
        for j, factor in enumerate(factors):
            shape = x.shape[1], factor.shape[1]
            like = dtype or x.dtype, x.device
            gradient = canary(shape, *like) if (i + j) % 2 else canary(shape[::-1], *like).t()
            products.append(Product(factor, gradient, scaling_of(i, j)))
            gradients.append(gradient)
        sums.append((x, products))
    sums_over_tokens(sums)
    return gradients


def fused(pairs, dtype=None):
    """The gradients, and that nothing is written around them."""
    gradients = launched(pairs, dtype)
    for gradient in gradients:
        base = gradient._base.clone()
        base.as_strided(gradient.shape, gradient.stride(), gradient.storage_offset()).fill_(7.0)
        assert (base == 7).all()
    return gradients


def eager(pairs):
    return [
        scaling_of(i, j) * (x.t() @ factor)
        for i, (x, factors) in enumerate(pairs)
        for j, factor in enumerate(factors)
    ]


def double(pairs):
    return [(x.double(), [factor.double() for factor in factors]) for x, factors in pairs]


def assert_equal(got, want):
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def assert_exact(got, pairs):
    for one, truth in zip(got, eager(double(pairs)), strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-4)


@pytest.mark.thinned
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_within_the_error_budget_and_inputs_are_not_written(
    dtype, case, ranges, device
):
    pairs = make(case, dtype, device)
    before = [(x.clone(), [factor.clone() for factor in factors]) for x, factors in pairs]
    rows = zip(fused(pairs), eager(pairs), eager(double(pairs)), strict=True)
    for i, row in enumerate(rows):
        assert row[0].dtype == dtype
        assert_within_budget(f"gradient {i}", *row)
    for (x, factors), (x_before, factors_before) in zip(pairs, before, strict=True):
        assert_equal((x, *factors), (x_before, *factors_before))


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["a layer", "more than a block", "nothing of some"])
def test_gradients_in_fp32_were_never_rounded(case, dtype, ranges, device):
    pairs = make(case, dtype, device)
    got = fused(pairs, torch.float32)
    assert_exact(got, pairs)
    for to in (torch.bfloat16, torch.float16):
        assert_equal([gradient.to(to) for gradient in got], fused(pairs, to))


@pytest.mark.parametrize("case", ["odd", "more than a block", "a layer"])
def test_partial_sums_stay_inside_the_workspace_and_fill_it(case, device, monkeypatch):
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
    pairs = make(case, torch.float32, device)
    assert_exact(fused(pairs), pairs)
    assert seen
    for big in seen:
        assert big[:64].isnan().all() and big[-64:].isnan().all() and not big[64:-64].isnan().any()
        # of rank 8 all, in blocks of 16: what lies beside a factor is not read
        assert case != "a layer" or not big[64:-64].view(-1, 2, 8)[:, 1].any()
    seen.clear()
    monkeypatch.setattr(module, "PROGRAMS", 0)  # one range, whose sums need no workspace
    assert_exact(fused(pairs), pairs)
    assert not seen


def with_every(pairs, layout):
    return [(layout(x), [layout(factor) for factor in factors]) for x, factors in pairs]


@pytest.mark.parametrize("more", [24, 1], ids=lambda n: f"{n} more")
def test_rows_may_lie_any_stride_apart_and_what_lies_around_them_is_not_added(more, device):
    def amid_nan(t):
        rows = torch.full((t.shape[0] + 3, t.shape[1] + more), torch.nan).to(t)
        return rows[:-3, more // 2 : more // 2 + t.shape[1]].copy_(t)

    pairs = make("odd", torch.bfloat16, device)
    assert_equal(fused(with_every(pairs, amid_nan)), fused(with_every(pairs, torch.clone)))


def test_all_rows_may_be_one(device):
    pairs = with_every(make("odd", torch.bfloat16, device), lambda t: t[:1].expand(t.shape))
    assert_equal(fused(pairs), fused(with_every(pairs, torch.Tensor.contiguous)))


def test_products_give_alone_what_they_give_together(device, monkeypatch):
    """Frozen adapters are left out, and change nothing for the others."""
    monkeypatch.setattr(module, "PROGRAMS", 10**6)  # or fewer tiles would be more ranges
    pairs = make("a layer", torch.bfloat16, device)
    together = iter(fused(pairs))
    for i, (x, factors) in enumerate(pairs):
        for j, factor in enumerate(factors):
            gradient = torch.empty(x.shape[1], factor.shape[1], dtype=x.dtype, device=device)
            sums_over_tokens([(x, []), (x, [Product(factor, gradient, scaling_of(i, j))])])
            assert torch.equal(gradient, next(together))


@pytest.mark.parametrize(
    ("tiling", "programs"),
    [(SMALL, 20), (Tiling(16, 16, 5, 4, 1), 10**6), (Tiling(32, 128, 8, 4, 4), 1)],
)
def test_repetition_is_bitwise_equal_and_tiles_do_not_matter(tiling, programs, device, monkeypatch):
    for name in ("TILING", "TILING_IN_FP32"):
        monkeypatch.setattr(module, name, tiling)
    monkeypatch.setattr(module, "PROGRAMS", programs)
    for dtype in (torch.bfloat16, torch.float32):
        pairs = make("odd", dtype, device)
        one, other = fused(pairs, torch.float32), fused(pairs, torch.float32)
        assert_equal(one, other)
        assert_exact(one, pairs)


class Launches(Kernel):
    """Notes the launches, the first of which is that of the sums."""

    def __init__(self, monkeypatch):
        super().__init__()
        for name in ("_sums_over_tokens_kernel", "_sum_partials_kernel"):
            monkeypatch.setattr(module, name, self)


@pytest.mark.parametrize(
    ("case", "launches"),
    [("a layer", 1), ("more than a launch", 2), ("nothing of some", 1), ("more than a block", 1)],
)
def test_a_layer_is_one_launch_and_another_adds_up_ranges_of_rows_if_there_are_several(
    case, launches, device, monkeypatch
):
    for programs, ranges in ((0, 1), (27, 2)):
        kernel = Launches(monkeypatch)
        monkeypatch.setattr(module, "PROGRAMS", programs)
        fused(make(case, torch.bfloat16, device))
        assert len(kernel.launches) == ranges * launches
        if case == "a layer":
            assert [grid for grid, _ in kernel.launches] == [(12, ranges), (18,)][:ranges]


def test_many_rows_have_a_tiling_of_their_own(device, monkeypatch):
    for rows, grid in ((module.MANY_ROWS - 1, (3, 2)), (module.MANY_ROWS, (2, 8))):
        kernel = Launches(monkeypatch)
        x = torch.ones(1, 65, dtype=torch.bfloat16, device=device).expand(rows, 65)
        sums_over_tokens([(x, [Product(x[:, :8], torch.empty(65, 8, device=device))])])
        assert kernel.launches[0][0] == grid


def test_no_rows_give_gradients_of_zero_and_launch_nothing(device, monkeypatch):
    kernel = Launches(monkeypatch)
    monkeypatch.setitem(CASES, "no rows", (0, CASES["odd"][1]))
    gradients = fused(make("no rows", torch.bfloat16, device))
    assert len(gradients) == 6 and not kernel.launches
    assert not any(gradient.any() for gradient in gradients)
    assert all(gradient._base.any() for gradient in gradients)


def test_nothing_wanted_is_nothing_to_do(device, monkeypatch):
    kernel = Launches(monkeypatch)
    x = torch.ones(3, 4, device=device)
    nothing = Product(x[:, :0], torch.empty(4, 0, device=device))
    no_columns = Product(x, torch.empty(0, 4, device=device))
    for sums in ([], [(x, [])], [(x, [nothing])], [(x[:, :0], [no_columns])]):
        sums_over_tokens(sums)
    assert not kernel.launches


ERRORS = [
    ({"x": lambda t: t.new_ones(2, 3, 4)}, r"x 1 is \[2, 3, 4\], should be \[rows, columns\]"),
    ({"x": short}, r"x 1 is \[38, 139\], should be \[39, 139\]"),
    ({"x": torch.Tensor.half}, "x 1 is torch.float16 on"),
    ({"x": apart}, "x 1 has elements 39 apart"),
    ({"x": on_meta}, "x 1 is .* on meta, should be"),
    ({"factor": lambda t: t[0]}, r"factor 1 of x 1 is \[8\], should be \[rows, columns\]"),
    ({"factor": short}, r"factor 1 of x 1 is \[38, 8\], should be \[39, 8\]"),
    ({"factor": torch.Tensor.half}, "factor 1 of x 1 is torch.float16 on"),
    ({"factor": apart}, "factor 1 of x 1 has elements 39 apart"),
    ({"gradient": narrow}, r"gradient 1 of x 1 is \[139, 7\], should be \[139, 8\]"),
    ({"gradient": torch.t}, r"gradient 1 of x 1 is \[8, 139\], should be \[139, 8\]"),
    ({"gradient": torch.Tensor.double}, "gradient 1 of x 1 is torch.float64 on"),
    ({"gradient": on_meta}, "gradient 1 of x 1 is .* on meta, should be"),
    ({"first": torch.Tensor.double}, "computes in bfloat16, float16 or float32"),
    ({"first": lambda t: t.sum()}, r"x 0 is \[\], should be \[rows, columns\]"),
    ({"first": short}, r"factor 0 of x 0 is \[39, 8\], should be \[38, 8\]"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_what_does_not_fit_is_a_value_error_and_nothing_is_written(changes, message, device):
    x, factor = (random(39, n, seed=n, device=device) for n in (139, 8))
    gradients = [torch.full((139, 8), 7.0, device=device) for _ in range(3)]
    good, also_good = (Product(factor, gradient) for gradient in gradients[:2])

    def of_two(first, x, factor, gradient):
        sums_over_tokens([(first, [good]), (x, [also_good, Product(factor, gradient)])])

    arguments = {"first": x, "x": x, "factor": factor, "gradient": gradients[2]}
    assert_refused(of_two, arguments, changes, message)
    assert all((gradient == 7).all() for gradient in gradients)


@pytest.mark.gpu
def test_a_graph_holds_the_launches(device):
    pairs = make("a layer", torch.bfloat16, device)
    replay, gradients = capture(lambda: launched(pairs, torch.float32))
    for x, _ in pairs:
        x.mul_(3)
    replay()
    assert_exact(gradients, pairs)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device, monkeypatch):
    """The rows are zero but in windows at the beginning, where offsets overflow, and at the end."""
    monkeypatch.undo()  # the tiles that are used
    columns, rank = 4096, 32
    rows = 2**31 // columns + 1000
    if torch.cuda.mem_get_info()[0] < 3 * rows * columns:
        pytest.skip("needs 7 GB of free GPU memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
    factor = torch.ones(rows, rank, dtype=torch.bfloat16, device=device)
    over = 2**31 // columns
    where = torch.cat([torch.arange(a, a + 200) for a in (0, over - 100, rows - 200)]).to(device)
    x[where] = random(600, columns, seed=1, dtype=torch.bfloat16, device=device)
    factor[where] = random(600, rank, seed=2, dtype=torch.bfloat16, device=device)
    gradient = torch.empty(columns, rank, device=device)
    sums_over_tokens([(x, [Product(factor, gradient)])])
    few = x[where], factor[where]
    truth = few[0].double().t() @ few[1].double()
    torch.testing.assert_close(gradient.double(), truth, rtol=1e-5, atol=1e-3)

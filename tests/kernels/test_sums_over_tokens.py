"""The adapters' sums over tokens in one launch, against eager PyTorch in float64."""

import pytest
import torch
from reference import assert_within_budget, random
from rms_norm_case import Kernel

from fused_lora.kernels import sums_over_tokens as module
from fused_lora.kernels.sums_over_tokens import sums_over_tokens
from fused_lora.kernels.swiglu_products_backward import Product
from fused_lora.kernels.tiling import Tiling
from fused_mlp.launching import DTYPES

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


def fused(pairs, dtype=None):
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize("case", ["odd", "more than a block", "nothing of some"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_written_around_a_gradient(dtype, case, ranges, device):
    for gradient in fused(make(case, torch.bfloat16, device), dtype):
        base = gradient._base.clone()
        offset = gradient.storage_offset()
        inside = base.as_strided(gradient.shape, gradient.stride(), offset)
        inside.fill_(7.0)
        assert (base == 7).all()


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


def test_bf16_gives_fp32_gradients_that_were_never_rounded(ranges, device):
    pairs = make("a layer", torch.bfloat16, device)
    got = fused(pairs, torch.float32)
    assert_exact(got, pairs)
    assert_equal([g.bfloat16() for g in got], fused(pairs))


@pytest.mark.parametrize("more", [24, 1, 0], ids=lambda n: f"{n} more")
def test_rows_any_stride_apart_give_what_contiguous_ones_do(more, device):
    pairs = make("odd", torch.bfloat16, device)
    want = fused([(x, [factor.contiguous() for factor in factors]) for x, factors in pairs])

    def apart(t):
        """The same as a column slice of wider rows, with NaN around it; or rows all in one."""
        if not more:
            return t[:1].expand(t.shape)
        rows = torch.full((t.shape[0], t.shape[1] + more), torch.nan, dtype=t.dtype, device=device)
        inside = rows[:, more // 2 : more // 2 + t.shape[1]]
        return inside.copy_(t)

    got_pairs = [(apart(x), [apart(factor) for factor in factors]) for x, factors in pairs]
    if not more:
        want = fused([(x.clone(), [f.contiguous() for f in factors]) for x, factors in got_pairs])
    assert_equal(fused(got_pairs), want)


def test_what_lies_behind_the_last_row_is_not_added(device):
    pairs = make("odd", torch.bfloat16, device)

    def longer(t):
        behind = torch.full_like(t, torch.nan)
        return torch.cat((t, behind))[: t.shape[0]]

    got = fused([(longer(x), [longer(factor) for factor in factors]) for x, factors in pairs])
    assert_equal(got, fused(pairs))


def test_products_give_alone_what_they_give_together(ranges, device, monkeypatch):
    """Frozen adapters are left out, and change nothing for the others."""
    monkeypatch.setattr(module, "PROGRAMS", 10**6)  # or fewer tiles would be more ranges
    pairs = make("a layer", torch.bfloat16, device)
    together = iter(fused(pairs))
    for i, (x, factors) in enumerate(pairs):
        for j, factor in enumerate(factors):
            gradient = torch.empty(x.shape[1], factor.shape[1], dtype=x.dtype, device=device)
            sums_over_tokens([(x, []), (x, [Product(factor, gradient, scaling_of(i, j))])])
            assert torch.equal(gradient, next(together))


def test_a_product_without_scaling_is_not_scaled(device):
    ((x, (factor, *_)), *_) = make("odd", torch.float32, device)
    gradient = torch.empty(x.shape[1], factor.shape[1], device=device)
    sums_over_tokens([(x, [Product(factor, gradient)])])
    torch.testing.assert_close(gradient, x.t() @ factor)


@pytest.mark.parametrize("programs", [1, 20, 10**6])
@pytest.mark.parametrize("tiling", [SMALL, Tiling(16, 16, 5, 4, 1), Tiling(32, 128, 8, 4, 4)])
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


@pytest.mark.parametrize("programs", [0, 10**6])
def test_rows_are_parted_into_ranges_that_hold_all_of_them_once(programs, device, monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", programs)
    monkeypatch.setattr(module, "TILING", Tiling(16, 32, 5, 4, 2))
    for rows in (1, 15, 16, 17, 79, 80, 81, 97):
        kernel = Launches(monkeypatch)
        x = torch.ones(rows, 20, dtype=torch.bfloat16, device=device)
        sums_over_tokens([(x, [Product(x, torch.empty(20, 20, device=device))])])
        (_, splits), arguments = kernel.launches[0]
        rows_of_a_split = arguments[13]
        assert rows_of_a_split % 16 == 0 and splits <= (5 if programs else 1)
        assert (splits - 1) * rows_of_a_split < rows <= splits * rows_of_a_split


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


BAD = {
    r"x 1 is \[2, 3, 4\], should be \[rows, columns\]": lambda x, f, g: (x.new_ones(2, 3, 4), f, g),
    r"x 1 is \[38, 139\], should be \[39, 139\]": lambda x, f, g: (x[:38], f, g),
    "x 1 is torch.float16 on": lambda x, f, g: (x.half(), f, g),
    "x 1 has elements 39 apart": lambda x, f, g: (x.t().contiguous().t(), f, g),
    r"factor 1 of x 1 is \[8\], should be \[rows, columns\]": lambda x, f, g: (x, f[0], g),
    r"factor 1 of x 1 is \[38, 8\], should be \[39, 8\]": lambda x, f, g: (x, f[:38], g),
    "factor 1 of x 1 is torch.float16 on": lambda x, f, g: (
        x, f.half(), g,
    ),
    "factor 1 of x 1 is torch.bfloat16 on": lambda x, f, g: (x, f.bfloat16(), g),
    "factor 1 of x 1 has elements 39 apart": lambda x, f, g: (x, f.t().contiguous().t(), g),
    r"gradient 1 of x 1 is \[139, 7\], should be \[139, 8\]": lambda x, f, g: (x, f, g[:, :7]),
    r"gradient 1 of x 1 is \[8, 139\], should be \[139, 8\]": lambda x, f, g: (x, f, g.t()),
    "gradient 1 of x 1 is torch.float64 on": lambda x, f, g: (x, f, g.double()),
    "gradient 1 of x 1 is .* on meta, should be": lambda x, f, g: (x, f, g.to("meta")),
    "x 1 is .* on meta, should be": lambda x, f, g: (x.to("meta"), f, g),
    "factor 1 of x 1 is .* on meta, should be": lambda x, f, g: (x, f.to("meta"), g),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_a_value_error_and_nothing_is_written(message, device):
    x, factor = (random(39, n, seed=n, device=device) for n in (139, 8))
    gradients = [torch.full((139, 8), 7.0, device=device) for _ in range(3)]
    bad_x, bad_factor, bad_gradient = BAD[message](x, factor, gradients[2])
    sums = [
        (x, [Product(factor, gradients[0])]),
        (bad_x, [Product(factor, gradients[1]), Product(bad_factor, bad_gradient)]),
    ]
    with pytest.raises(ValueError, match=message):
        sums_over_tokens(sums)
    assert all((gradient == 7).all() for gradient in gradients)


def test_a_first_x_that_does_not_fit_is_a_value_error_too(device):
    factor, gradient = torch.ones(4, 2, device=device), torch.ones(3, 2, device=device)
    for bad, message in (
        (torch.ones(4, 3, device=device).double(), "computes in bfloat16, float16 or float32"),
        (torch.ones((), device=device), r"x 0 is \[\], should be \[rows, columns\]"),
        (torch.ones(4, device=device), r"x 0 is \[4\], should be \[rows, columns\]"),
        (torch.ones(5, 3, device=device), r"factor 0 of x 0 is \[4, 2\], should be \[5, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            sums_over_tokens([(bad, [Product(factor, gradient)])])


@pytest.mark.gpu
def test_a_graph_holds_the_launches(device):
    pairs = make("a layer", torch.bfloat16, device)
    gradients = [
        [torch.empty(x.shape[1], f.shape[1], device=device) for f in factors]
        for x, factors in pairs
    ]
    sums = [
        (x, list(map(Product, factors, of_x)))
        for (x, factors), of_x in zip(pairs, gradients, strict=True)
    ]
    sums_over_tokens(sums)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums_over_tokens(sums)
    for x, _ in pairs:
        x.mul_(3)
    graph.replay()
    want = [x.double().t() @ factor.double() for x, factors in pairs for factor in factors]
    got = [gradient for of_x in gradients for gradient in of_x]
    for one, truth in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-4)


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

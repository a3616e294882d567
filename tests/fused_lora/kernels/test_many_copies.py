"""ManyCopies compared with single copies: the same arithmetic, so bitwise the same."""

import pytest
import torch
from cases.reference import random
from cases.refusal import assert_refused
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_lora.kernels import many_copies as module
from fused_lora.kernels.many_copies import ManyCopies
from fused_mlp.launching import DTYPES

SHAPES = [(8, 64), (71, 3), (1, 1), (1, 5000), (300, 32), (0, 7), (4, 0)]


@pytest.fixture(autouse=True, params=[True, False], ids=["kernel", "PyTorch"])
def way(request, monkeypatch):
    """Try both ways of copying. Without a GPU the kernel runs in Triton's interpreter."""
    monkeypatch.setattr(module, "_has_kernel", lambda *_: request.param)


def copy(*given):
    ManyCopies().copy(None, lambda: given)


def matrices(source_dtype, target_dtype, device):
    """Return (targets, sources, scalings). Targets and every other source lie within wider rows."""
    sources = [
        random(rows, columns + i % 2, dtype=source_dtype, device=device, seed=i)[:, i % 2 :]
        for i, (rows, columns) in enumerate(SHAPES)
    ]
    targets = [
        torch.full((rows, columns + 5), 7.0, dtype=target_dtype, device=device)[:, 2 : 2 + columns]
        for rows, columns in SHAPES
    ]
    return targets, sources, [1.0 + i / 3 for i in range(len(SHAPES))]


def rows_around(targets):
    """Return the memory around each target's rows, including before and behind it."""
    return [t._base.clone() if t._base is not None else t.clone() for t in targets]


def assert_copied(targets, sources, scalings):
    """Check that it copies as PyTorch does and writes nothing else."""
    copy(targets, sources, scalings)
    got = rows_around(targets)
    for target, source, scaling in zip(targets, sources, scalings, strict=True):
        # in fp32, like the kernel's scaling
        target.copy_(source.float() * torch.tensor(scaling, dtype=torch.float32).to(source.device))
    assert all(map(torch.equal, got, rows_around(targets)))
    assert any((one == 7).any() for one in got)  # the memory between the rows


@pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_copies_are_those_of_pytorch_and_nothing_else_is_written(
    source_dtype, target_dtype, device
):
    assert_copied(*matrices(source_dtype, target_dtype, device))


@pytest.mark.parametrize(
    ("ranks", "columns", "to", "of", "want"),
    [
        ((32, 8), 64, 0, 0, 8),
        ((32, 12), 64, 0, 0, 4),
        ((32, 8), 64, 2, 0, 2),
        ((32, 8), 64, 0, 4, 4),
        ((32, 8), 64, 0, -2, 4),
        ((32, 8), 65, 0, 0, 1),
        ((1, 8), 64, 0, 0, 1),
    ],
)
def test_as_many_elements_go_at_once_as_rows_and_addresses_allow(
    ranks, columns, to, of, want, device
):
    """Copy A [r, in] and B [out, r] in a border: a single odd stride limits all of them."""
    targets, sources = [], []
    for rank in ranks:
        for rows, width in ((rank, columns), (90, rank)):
            border = torch.full((100, 200), 7.0, dtype=torch.bfloat16, device=device)
            targets.append(border[:rows, to : to + width])
            source = random(rows, width + 2 * abs(of), device=device)
            sources.append(source[:, max(of, 0) :][:, :width])
    given = targets, sources, [1.0, 0.3] * len(ranks)
    assert module._table_of(*given).run == want
    assert_copied(*given)


def test_where_nothing_is_copied_from_are_zeros(device):
    targets, sources, scalings = matrices(torch.float32, torch.bfloat16, device)
    sources = [None if i % 2 else source for i, source in enumerate(sources)]
    copy(targets, sources, [1.0] * len(sources))
    for target, source in zip(targets, sources, strict=True):
        assert not target.any() if source is None else torch.equal(target, source.to(target))
    copy(targets, [None] * len(sources), scalings)
    assert not any(target.any() for target in targets)


def test_a_key_that_is_known_is_not_looked_up_again_and_the_latest_few_are(device, monkeypatch):
    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    looked = []
    source, copies = torch.ones(4, 8, device=device), ManyCopies()
    targets = [torch.zeros(4, 8, device=device) for _ in range(module.MAX_TABLES + 1)]

    def copy_to(index):
        copies.copy(index, lambda: looked.append(index) or ([targets[index]], [source], [2.0]))

    for index in (0, 1, 0, *range(2, len(targets)), 1, 0):
        copy_to(index)
        assert torch.equal(targets[index], 2 * source)
        source.add_(1)
    assert looked == [*range(len(targets)), 0]  # that of 0 had made room


def test_what_a_graph_holds_stays_and_what_it_would_have_to_look_up_pytorch_copies(
    device, monkeypatch
):
    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    copies, made, capturing = ManyCopies(), [], [False]
    table_of = module._table_of
    monkeypatch.setattr(module, "_table_of", lambda *a: made.append(1) or table_of(*a))
    monkeypatch.setattr(module, "is_capturing", lambda _: capturing[0])
    source = torch.ones(4, 8, device=device)
    targets = [torch.zeros(4, 8, device=device) for _ in range(2 * module.MAX_TABLES)]
    copies.copy(0, lambda: ([targets[0]], [source], [1.0]))
    capturing[0] = True
    assert not copies.is_captured
    for index in (0, 0, 1):
        copies.copy(index, lambda index=index: ([targets[index]], [source], [1.0]))
        assert torch.equal(targets[index], source)
    assert copies.is_captured and len(made) == 1
    capturing[0] = False
    held = copies._tables[0]
    for index in range(1, len(targets)):
        copies.copy(index, lambda index=index: ([targets[index]], [source], [1.0]))
    assert 0 not in copies._tables and copies._captured == [held]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": lambda sources: sources[1:]}, "7 targets, 6 sources and 7 scalings"),
        ({"sources": lambda sources: [x.t() for x in sources]}, r"source 0 \[64, 8\]"),
    ],
)
def test_what_does_not_fit_is_a_value_error_and_writes_nothing(changes, message, device):
    given = matrices(torch.float32, torch.bfloat16, device)
    before = rows_around(given[0])
    names = ("targets", "sources", "scalings")
    assert_refused(copy, zip(names, given, strict=True), changes, message)
    assert all(map(torch.equal, before, rows_around(given[0])))
    copy([], [], [])  # nothing to copy is nothing to do


def test_the_kernel_is_for_one_gpu_and_dtypes_that_it_has(device, monkeypatch):
    monkeypatch.undo()
    targets, sources, _ = matrices(torch.float32, torch.bfloat16, device)
    assert module._has_kernel(targets, sources) is (device == "cuda")
    for changed in (
        [s.double() for s in sources],
        [s.half() if i else s for i, s in enumerate(sources)],
        [s.t().contiguous().t() for s in sources],
    ):
        assert not module._has_kernel(targets, changed)
    assert not module._has_kernel([t.cpu() for t in targets], sources)


def test_the_kernel_is_for_matrices_of_less_than_2_to_the_31_elements(monkeypatch):
    """Use fake GPU tensors: shapes without a GPU or memory."""
    monkeypatch.undo()
    with FakeTensorMode():
        shapes = (64, 2**15), (2**15, 2**16 - 1), (2**15, 2**16)
        small, fits, large = (torch.empty(*s, device="cuda", dtype=torch.half) for s in shapes)
    assert module._has_kernel([small, fits], [small, fits])
    assert not module._has_kernel([small, large], [small, large])


@pytest.mark.gpu
@pytest.mark.alone
def test_the_most_elements_and_rows_2_to_the_30_elements_apart(device, monkeypatch):
    if torch.cuda.mem_get_info()[0] < 18 * 2**30:
        pytest.skip("needs 19 GB of free GPU memory")
    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    large = torch.zeros(1, module.MAX_ELEMENTS - 1, dtype=torch.bfloat16, device=device)
    large[:, :: 2**20 + 1] = large[:, -1] = 3.0
    few = random(3, 5, dtype=torch.bfloat16, device=device)
    wide = few.new_empty(3, 2**30 + 8)
    targets, sources = [torch.full_like(large, 7.0), wide[:, :5]], [large, few]
    copy(targets, sources, [1.0, 1.0])
    assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))

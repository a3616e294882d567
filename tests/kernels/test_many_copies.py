"""ManyCopies against copies one by one: the same arithmetic, so bitwise the same."""

import pytest
import torch
from reference import random
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_lora.kernels import many_copies as module
from fused_lora.kernels.many_copies import ManyCopies
from fused_mlp.launching import DTYPES

SHAPES = [(8, 64), (71, 3), (1, 1), (1, 5000), (300, 32), (0, 7), (4, 0)]


@pytest.fixture(autouse=True, params=[True, False], ids=["kernel", "PyTorch"])
def way(request, monkeypatch):
    """Both ways of copying, the kernel's in Triton's interpreter where there is no GPU."""
    monkeypatch.setattr(module, "_has_kernel", lambda *_: request.param)


def matrices(source_dtype, target_dtype, device):
    """(targets, sources, scalings): targets within wider rows, one after the other."""
    sources = [random(*s, dtype=source_dtype, device=device, seed=i) for i, s in enumerate(SHAPES)]
    targets = [
        torch.full((rows, columns + 5), 7.0, dtype=target_dtype, device=device)[:, 2 : 2 + columns]
        for rows, columns in SHAPES
    ]
    return targets, sources, [1.0 + i / 3 for i in range(len(SHAPES))]


def rows_around(targets):
    """What lies in the memory of each target's rows, before and behind it too."""
    return [t._base.clone() if t._base is not None else t.clone() for t in targets]


@pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_what_is_copied_is_what_pytorch_copies_and_nothing_else_is_written(
    source_dtype, target_dtype, device
):
    targets, sources, scalings = matrices(source_dtype, target_dtype, device)
    ManyCopies().copy(targets, sources, scalings)
    got = rows_around(targets)
    for target, source, scaling in zip(targets, sources, scalings, strict=True):
        # as the kernel has the scaling: in fp32
        scaled = source.float() * torch.tensor(scaling, dtype=torch.float32, device=device)
        target.copy_(scaled)
    assert all(
        torch.equal(one, other) for one, other in zip(got, rows_around(targets), strict=True)
    )
    assert any((one == 7).any() for one in got)  # what lies between the rows


@pytest.mark.parametrize(
    ("ranks", "columns", "offset", "want"),
    [
        ((32, 8), 64, 0, 8),
        ((32, 12), 64, 0, 4),
        ((32, 8), 64, 2, 2),
        ((32, 8), 65, 0, 1),
        ((1, 8), 64, 0, 1),
    ],
)
def test_as_many_elements_go_at_once_as_rows_and_addresses_allow(
    ranks, columns, offset, want, device
):
    """Of A [r, in] and B [out, r] in a border, of which one odd stride is enough."""
    border = torch.full((100, 200), 7.0, dtype=torch.bfloat16, device=device)
    targets, sources = [], []
    for rank in ranks:
        for rows, width in ((rank, columns), (90, rank)):
            targets.append(border[:rows, offset : offset + width])
            sources.append(random(rows, width, device=device))
            border = torch.full((100, 200), 7.0, dtype=torch.bfloat16, device=device)
    given = targets, sources, [1.0, 0.3] * len(ranks)
    assert module._table_of((), *given).run == want
    ManyCopies().copy(*given)
    got = rows_around(targets)
    for target, source, scaling in zip(*given, strict=True):
        target.copy_(source * torch.tensor(scaling, device=device))
    assert all(map(torch.equal, got, rows_around(targets)))


def test_strided_sources_and_values_that_changed_are_copied_anew(device):
    wide = random(40, 90, device=device)
    sources, copies = [wide[:, :64], wide[:, 70:75]], ManyCopies()
    targets = [torch.zeros(40, 64, device=device), torch.zeros(40, 5, device=device)]
    for _ in range(2):
        copies.copy(targets, sources, [1.0, 1.0])
        assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))
        wide.mul_(3)


def test_the_very_same_sequences_are_not_looked_through_again(device, monkeypatch):
    looked = []
    monkeypatch.setattr(module, "_has_kernel", lambda *_: looked.append(1) or True)
    targets, sources, scalings = map(tuple, matrices(torch.float32, torch.float32, device))
    copies = ManyCopies()
    for seed in range(3):
        for source in sources:
            source.copy_(random(*source.shape, seed=seed))
        copies.copy(targets, sources, scalings)
        for target, source, scaling in zip(targets, sources, scalings, strict=True):
            assert torch.equal(target, source * torch.tensor(scaling, device=device))
    assert len(looked) == 1
    copies.copy(targets, tuple(source + 1 for source in sources), scalings)
    assert len(looked) == 2 and torch.equal(targets[0], sources[0] + 1)


def test_the_table_is_made_again_only_for_other_places_or_scalings(device, monkeypatch):
    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    made = []
    table_of = module._table_of
    monkeypatch.setattr(module, "_table_of", lambda *a: made.append(1) or table_of(*a))
    targets, sources, scalings = matrices(torch.float32, torch.float32, device)
    copies = ManyCopies()
    for _ in range(3):
        copies.copy(targets, sources, scalings)
    assert len(made) == 1
    copies.copy(targets, sources, [2.0 for _ in scalings])
    assert len(made) == 2 and torch.equal(targets[0], 2 * sources[0])
    moved = [s.clone() + 1 for s in sources]
    copies.copy(targets, moved, scalings)
    assert len(made) == 3 and torch.equal(targets[0], moved[0])


def test_autograd_sees_the_targets_change(device):
    """A graph that saved what lies there would else be run backward with something else."""
    wide = torch.zeros(8, 70, device=device)
    weight = torch.ones(3, 64, device=device, requires_grad=True)
    product = wide[:, :64] @ weight.t()
    ManyCopies().copy([wide[:, :64]], [torch.ones(8, 64, device=device)], [1.0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_nothing_to_copy_is_nothing_to_do():
    ManyCopies().copy([], [], [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, s, f: (t, s[1:], f), "7 targets, 6 sources and 7 scalings"),
        (lambda t, s, f: (t, [x.t() for x in s], f), r"source 0 \[64, 8\]"),
    ],
)
def test_what_does_not_fit_is_a_value_error_and_writes_nothing(change, message, device):
    given = matrices(torch.float32, torch.bfloat16, device)
    before = rows_around(given[0])
    with pytest.raises(ValueError, match=message):
        ManyCopies().copy(*change(*given))
    assert all(torch.equal(a, b) for a, b in zip(before, rows_around(given[0]), strict=True))


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
    """Shapes on a GPU without one and without memory."""
    monkeypatch.undo()
    with FakeTensorMode():
        shapes = (64, 2**15), (2**15, 2**16 - 1), (2**15, 2**16)
        small, fits, large = (torch.empty(*s, device="cuda", dtype=torch.half) for s in shapes)
    assert module._has_kernel([small, fits], [small, fits])
    assert not module._has_kernel([small, large], [small, large])


@pytest.mark.gpu
def test_the_most_elements_and_rows_2_to_the_30_elements_apart(device, monkeypatch):
    if torch.cuda.mem_get_info()[0] < 18 * 2**30:
        pytest.skip("needs 19 GB of free GPU memory")
    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    large = torch.zeros(1, module.MAX_ELEMENTS - 1, dtype=torch.bfloat16, device=device)
    large[:, :: 2**20 + 1] = large[:, -1] = 3.0
    few = random(3, 5, dtype=torch.bfloat16, device=device)
    wide = few.new_empty(3, 2**30 + 8)
    targets, sources = [torch.full_like(large, 7.0), wide[:, :5]], [large, few]
    ManyCopies().copy(targets, sources, [1.0, 1.0])
    assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))

"""`launch` against `kernel[grid](...)`: what it remembers, and what it asks Triton for."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp import launching
from fused_mlp.launching import launch


class OnGPU(Tensor):
    """A tensor on the CPU that says it is on a GPU, the first by default."""

    is_cuda = True
    index = 0

    def get_device(self):
        return self.index


class Kernel:
    """A fake Triton kernel that records its launches."""

    def __init__(self, *counts: int):
        self.params = [SimpleNamespace(num=n, do_not_specialize=n in counts) for n in range(5)]
        self.by_triton: list[tuple] = []  # grid, arguments, options
        self.remembered: list[tuple] = []  # grid, arguments

    def run(self, *arguments, grid, warmup, **options):
        assert not warmup
        self.by_triton.append((grid, arguments, options))
        return Compiled(self.remembered)


class Compiled:
    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_kinds", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def compiled_keys():
    return [key for kind in launching._kinds.values() for key in kind.compiled or ()]


def on_gpu(elements=64, dtype=torch.float32, first=0, index=0):
    # aligned as PyTorch's GPU allocator does, whatever the CPU's did
    bytes_ = torch.empty(elements * dtype.itemsize + 16, dtype=torch.uint8)
    skip = -bytes_.data_ptr() % 16
    rows = bytes_[skip : skip + elements * dtype.itemsize].view(dtype)
    tensor = rows[first:].as_subclass(OnGPU)
    tensor.index = index
    return tensor


def test_the_second_launch_goes_to_what_the_first_compiled(kernel):
    x, y, z = on_gpu(), on_gpu(), on_gpu(32)
    launch(kernel, (3,), x, 7, None, 0.5, num_warps=4)
    launch(kernel, (5, 2), y, 7, None, 0.5, num_warps=4)
    launch(kernel, (1, 2, 3), z, 7, None, 0.5, num_warps=4)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    assert kernel.by_triton == [((3,), (x, 7, None, 0.5), options)]
    assert kernel.remembered == [
        ((5, 2, 1), (y.data_ptr(), 7, None, 0.5)),
        ((1, 2, 3), (z.data_ptr(), 7, None, 0.5)),
    ]
    (key,) = compiled_keys()
    assert not any(isinstance(part, Tensor) for part in key)  # it would be kept alive


OPTIONS = {"num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((on_gpu(dtype=torch.bfloat16), 7, 0.5, True), OPTIONS),
        ((on_gpu(), 8, 0.5, True), OPTIONS),
        ((on_gpu(), 7.0, 0.5, True), OPTIONS),
        ((on_gpu(), None, 0.5, True), OPTIONS),
        ((on_gpu(), 7, 0.25, True), OPTIONS),
        ((on_gpu(), 7, 0.5, 1), OPTIONS),
        ((on_gpu(), 7, 0.5, 1.0), OPTIONS),
        ((on_gpu(), 7, 0.5, True), OPTIONS | {"num_warps": 8}),
        ((on_gpu(), 7, 0.5, True), {"num_stages": 4, "num_warps": 2}),
        ((on_gpu(), 7, 0.5, True), {"num_warps": 4}),
        ((on_gpu(), 7, 0.5, True), OPTIONS | {"enable_fp_fusion": False}),
    ],
)
def test_another_launch_is_compiled_by_triton(kernel, arguments, options):
    launch(kernel, (1,), on_gpu(), 7, 0.5, True, **OPTIONS)
    launch(kernel, (1,), *arguments, **options)
    assert len(kernel.by_triton) == 2
    assert kernel.remembered == []
    assert kernel.by_triton[1][2] == {"enable_fp_fusion": True} | options


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.empty(64), 7),
        (on_gpu(), torch.empty(64)),
        (on_gpu(), on_gpu(index=1)),
        (on_gpu(first=1), on_gpu()),
        (on_gpu(), on_gpu(first=1)),
        (on_gpu(), (on_gpu(), on_gpu())),
    ],
    ids=("on the CPU", "one on the CPU", "on two", "not aligned", "one not aligned", "a tuple"),
)
def test_what_an_address_does_not_stand_for_is_left_to_triton_and_not_kept(kernel, arguments):
    launch(kernel, (1,), on_gpu(), on_gpu())
    for _ in range(2):
        launch(kernel, (1,), *arguments)
    assert len(kernel.by_triton) == 3 and kernel.remembered == []
    assert len(compiled_keys()) == 1


def test_an_integer_that_is_not_specialised_may_change(monkeypatch, kernel):
    kernel = Kernel(1)
    for count, size in ((7, 7), (16, 7), (1, 7), (2**31, 7), (7, 16)):
        launch(kernel, (1,), on_gpu(), count, size)
    assert [arguments[1:] for _, arguments, _ in kernel.by_triton] == [(7, 7), (2**31, 7), (7, 16)]
    assert [arguments[1:] for _, arguments in kernel.remembered] == [(16, 7), (1, 7)]


def test_launches_of_many_lengths_are_forgotten(kernel, monkeypatch):
    monkeypatch.setattr(launching, "MAX_COMPILED", 3)
    for length in range(10):
        launch(kernel, (1,), on_gpu(), length)
    assert len(compiled_keys()) <= 3
    launch(kernel, (1,), on_gpu(), 9)
    assert len(kernel.remembered) == 1


def test_each_kernel_and_device_has_its_own(kernel, monkeypatch):
    other = Kernel()
    for device in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch(kernel, (1,), on_gpu(index=device))
        launch(other, (1,), on_gpu(index=device))
    assert len(kernel.by_triton) == len(other.by_triton) == 2


def test_nothing_is_remembered_while_torch_compile_traces(kernel, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for _ in range(2):
        launch(kernel, (1,), on_gpu())
    assert len(kernel.by_triton) == 2


@triton.jit
def _scale_kernel(x_ptr, y_ptr, length, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < length
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, (x * factor).to(y_ptr.dtype.element_ty), mask=mask)


@pytest.mark.gpu
def test_on_a_gpu_it_computes_what_triton_does_and_asks_it_once(monkeypatch):
    by_triton = []
    run = triton.JITFunction.run

    def counted(self, *arguments, **options):
        by_triton.append(arguments)
        return run(self, *arguments, **options)

    monkeypatch.setattr(triton.JITFunction, "run", counted)
    monkeypatch.setattr(launching, "_kinds", {})
    # aligned, unaligned, another dtype, 1 and multiples of 16: Triton compiles each of these anew
    cases = [
        (dtype, length, first, factor)
        for dtype in (torch.float32, torch.bfloat16)
        for length in (1, 16, 333)
        for first in (0, 1)
        for factor in (1, 1.0, 2, 2.0, 0.5)
    ]
    for again in (False, True):
        asked = len(by_triton)
        for dtype, length, first, factor in cases:
            x = torch.randn(512, device="cuda").to(dtype)[first : first + length]
            y = torch.zeros(512, device="cuda", dtype=dtype)[first : first + length]
            launch(_scale_kernel, (triton.cdiv(length, 64),), x, y, length, factor, 64, num_warps=1)
            assert torch.equal(y, x * factor), (dtype, length, first, factor)
        odd = sum(first for _, _, first, _ in cases)
        assert len(by_triton) - asked == (odd if again else len(cases))

"""Fixtures and options of all tests. Kernels run on a GPU if there is one, otherwise in Triton's
interpreter, whose switch has to be set before importing triton. Tests that need a GPU are marked
`gpu`, and skipped without one."""

import os
from unittest.mock import patch

import pytest
import torch
from cases.alone import turn

HAS_GPU = torch.cuda.is_available()
IS_A_WORKER = "PYTEST_XDIST_WORKER" in os.environ
CACHED = 2**30  # bytes of the GPU that a worker keeps between tests
os.environ["HF_HUB_OFFLINE"] = "1"
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    threads = os.environ.get("TEST_THREADS", "1")
    os.environ["OMP_NUM_THREADS"] = threads  # for processes that tests start: see below
    from fused_lora.kernels import interpreter  # imports Triton

    interpreter.prepare_interpreter()
    from cases.quick_interpreter import make_quick

    make_quick()
    # tensors here are tiny, and on shared cores threads that wait for each other take three times
    # as long as a single thread
    torch.set_num_threads(int(threads))
elif IS_A_WORKER:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # instead of one per core in each worker


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """Restore the environment after each test, because commands set it for processes they start. A
    rehearsal's TRITON_INTERPRET would make all later tests interpret torch.compile's kernels."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def turn_on_the_gpu(request, tmp_path_factory):
    """Let workers share a GPU, except while a test marked `alone` times it or fills its memory.
    Empty PyTorch's cache if it grew large: other workers could not use that memory."""
    if not (HAS_GPU and IS_A_WORKER):
        yield
        return
    file = tmp_path_factory.getbasetemp().parent / "gpu.lock"
    with turn(file, alone="alone" in request.keywords):
        yield
        if torch.cuda.memory_reserved() > CACHED:
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def shipped_tilings(turn_on_the_gpu, monkeypatch):
    """Keep kernels from autotuning on any GPU, except in tests about that. Whatever a test patches
    is restored before its turn on the GPU ends."""
    if HAS_GPU:
        from fused_lora.kernels import autotune

        monkeypatch.setattr(autotune, "MEASURED_ON", {torch.cuda.get_device_capability()})
        monkeypatch.setattr(autotune, "CHOSEN", {})


@pytest.fixture
def fp8_in_fp32(monkeypatch):
    """Allow FP8 layers in fp32 models on a GPU as well. They are exact, because their GEMMs are not
    those of `_scaled_mm`."""
    from fused_lora.weights import fp8_weight as fp8_weight

    kinds = torch.bfloat16, torch.float32, torch.float64
    monkeypatch.setattr(fp8_weight, "FP8_DTYPES", kinds)


@pytest.fixture
def calls(monkeypatch):
    """Record the gate weight of every call of LoRA_MLP, in order."""
    from fused_mlp import LoRA_MLP

    seen = []
    apply = LoRA_MLP.apply

    def spy(*arguments):
        seen.append(arguments[-1].gate_weight)
        return apply(*arguments)

    monkeypatch.setattr(LoRA_MLP, "apply", spy)
    return seen


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="as `make test`: fewer cases")
    parser.addoption("--rest", action="store_true", help="the cases that --quick leaves out")


def _values_of(item):
    """Return a case's parameter values by test and parameter, and those in a dict by name."""
    test = item.nodeid.partition("[")[0]
    # not callspec.indices, which number the combinations where pytest 9 has no fixture to share
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {
        (test, name, key, id(value))
        for name, given in params.items()
        for key, value in (given if isinstance(given, dict) else {"": given}).items()
    } or {(test,)}


def _is_tried(item, shown, is_quick):
    """Return whether to run a case. A `thinned` test runs only cases that show a parameter's value
    for the first time, and in a quick run every test does. A quick run of a `slow` test runs the
    cases that its mark names by a part of their ids."""
    if "exhaustive" in item.keywords or ("gpu" in item.keywords and not HAS_GPU):
        return "exhaustive" not in item.keywords
    mark = item.get_closest_marker("slow") if is_quick else None
    if mark is not None:
        return any(f"-{part}-" in f"-{item.callspec.id}-" for part in mark.args)
    values = _values_of(item)
    is_new = not values <= shown
    shown |= values
    return is_new or not (is_quick or "thinned" in item.keywords)


def _are_tried(items, is_quick):
    shown: set[tuple] = set()
    return [_is_tried(item, shown, is_quick) for item in items]


def _check_slow_marks(items):
    """Raise UsageError if a `slow` mark names a part that no case's id has: a quick run would leave
    out what should stay."""
    ids: dict[tuple, str] = {}
    for item in items:
        mark = item.get_closest_marker("slow")
        for part in mark.args if mark else ():
            test = item.nodeid.partition("[")[0], part
            ids[test] = ids.get(test, "") + f"-{item.callspec.id}-\n"
    for (test, part), found in ids.items():
        if f"-{part}-" not in found:
            raise pytest.UsageError(f"{test}: no case is named {part!r}, as its slow mark says")


def pytest_collection_modifyitems(config, items):
    if not any("::" in str(arg) for arg in config.args):  # else not all cases are here
        _check_slow_marks(items)
    if "exhaustive" not in config.option.markexpr:  # whatever else -m asks for
        tried = _are_tried(items, config.option.quick)
        if config.option.rest:
            quick = _are_tried(items, is_quick=True)
            tried = [is_tried and not was for is_tried, was in zip(tried, quick, strict=True)]
        left = [item for item, is_tried in zip(items, tried, strict=True) if not is_tried]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item, is_tried in zip(items, tried, strict=True) if is_tried]
    items.sort(key=lambda item: "alone" in item.keywords)  # last, when nobody has to wait for them
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

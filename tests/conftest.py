"""Kernels run on the GPU where there is one, else in Triton's interpreter, which wants its switch
set before triton is imported. What needs a GPU is marked `gpu` and skipped without one."""

import os
from unittest.mock import patch

import pytest
import torch
from cases.alone import turn

from bench import interpreter

HAS_GPU = torch.cuda.is_available()
IS_A_WORKER = "PYTEST_XDIST_WORKER" in os.environ
CACHED = 2**30  # bytes of the GPU that a worker keeps between tests
os.environ["HF_HUB_OFFLINE"] = "1"
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start: see below
    interpreter.prepare_interpreter()
    from cases.quick_interpreter import make_quick

    make_quick()
    # tensors here are tiny, and on shared cores threads that wait for each other take three times
    # as long as one
    torch.set_num_threads(1)
elif IS_A_WORKER:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # not a process a core for each worker


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """What a command sets for the processes that it starts ends with the test: a rehearsal's
    TRITON_INTERPRET would have torch.compile's kernels interpreted in all tests after it."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def turn_on_the_gpu(request, tmp_path_factory):
    """Workers share a GPU, but while a test that is marked `alone` times it or fills its memory.
    What a test leaves in PyTorch's cache, others could not have."""
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
    """Kernels choose no tiling but where a test is about that, whatever GPU this is. What a test
    patches is put back before its turn on the GPU ends."""
    if HAS_GPU:
        from fused_lora.kernels import autotune

        monkeypatch.setattr(autotune, "MEASURED_ON", {torch.cuda.get_device_capability()})
        monkeypatch.setattr(autotune, "CHOSEN", {})


@pytest.fixture
def fp8_in_fp32(monkeypatch):
    """Layers in FP8 of models in fp32 on a GPU, too: exact, for their products are not those of
    `_scaled_mm`."""
    from fused_lora.adopt.fp8 import weight as fp8_weight

    kinds = torch.bfloat16, torch.float32, torch.float64
    monkeypatch.setattr(fp8_weight, "FP8_DTYPES", kinds)


@pytest.fixture
def calls(monkeypatch):
    """The gate weight of every call of LoRA_MLP, in order."""
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


def _values_of(item):
    """The values of a case's parameters, by test and parameter; those of a dict by their names."""
    test = item.nodeid.partition("[")[0]
    # not callspec.indices, which number the combinations where pytest 9 has no fixture to share
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {
        (test, name, key, id(value))
        for name, given in params.items()
        for key, value in (given if isinstance(given, dict) else {"": given}).items()
    } or {(test,)}


def _is_tried(item, shown, is_quick):
    """Whether a case is run. Of a `thinned` test, and of each in a quick run, those are that show a
    value of one of its parameters for the first time; in a quick run of one that is `slow` those
    that the mark names by a part of their ids."""
    if "exhaustive" in item.keywords or ("gpu" in item.keywords and not HAS_GPU):
        return "exhaustive" not in item.keywords
    mark = item.get_closest_marker("slow") if is_quick else None
    if mark is not None:
        return any(f"-{part}-" in f"-{item.callspec.id}-" for part in mark.args)
    values = _values_of(item)
    is_new = not values <= shown
    shown |= values
    return is_new or not (is_quick or "thinned" in item.keywords)


def pytest_collection_modifyitems(config, items):
    if "exhaustive" not in config.option.markexpr:  # whatever else -m asks for
        shown: set[tuple] = set()
        tried = [_is_tried(item, shown, config.option.quick) for item in items]
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

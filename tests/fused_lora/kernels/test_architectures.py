"""The kernels compile for every GPU with bf16 tensor cores, and fit into it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2]

# What a program may have of shared memory, in kB of 1,024 bytes: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}

# The least shared memory there is, and what is published. To compile for one takes 12 s.
USUAL = (89, 90)


@pytest.fixture(
    scope="module",
    params=[USUAL, pytest.param(tuple(SHARED_KB), marks=pytest.mark.exhaustive)],
    ids=("usual", "all"),
)
def shared_bytes(request):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{HERE.parent}:{HERE}"
    env["TRITON_DEFAULT_FP_FUSION"] = "0"  # as Triton 3.10 has it; compile_case looks that we ask
    program = [sys.executable, str(HERE / "cases" / "compile_case.py"), *map(str, request.param)]
    limit = 150 * len(request.param)  # seconds
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_kernels_compile_and_fit_into_shared_memory(shared_bytes):
    kernels = {
        f"{path.stem}.{name}"
        for package in ("fused_mlp", "fused_lora")
        for path in (HERE.parent / package).rglob("*.py")
        for name in re.findall(r"@triton.jit.*\ndef (_\w+_kernel)\(", path.read_text())
    }
    assert len(shared_bytes) > 1
    for arch, found in shared_bytes.items():
        in_fp8 = {name for name in kernels if name.startswith("fp8_")}
        assert set(found) == (kernels if int(arch) >= 89 else kernels - in_fp8)
        assert sum(size > 0 for size in found.values()) >= 9  # of them multiply tiles
        assert all(size <= SHARED_KB[int(arch)] * 1024 for size in found.values()), arch

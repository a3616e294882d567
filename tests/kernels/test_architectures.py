"""The kernels compile for every GPU with bf16 tensor cores, and fit into it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]

# What a program may have of shared memory, in kB of 1,024 bytes: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
WITH_DOTS = {
    "swiglu_products_backward._swiglu_backward_products_kernel",
    "swiglu_products_forward._swiglu_forward_product_kernel",
    "sums_over_tokens._sums_over_tokens_kernel",
    "residual._add_adapted_kernel",
    "dropped_products._dropped_products_kernel",
    "dropped_products._dropped_gradient_kernel",
    "causal_attention._attention_forward_kernel",
    "causal_attention_backward._attention_queries_backward_kernel",
    "causal_attention_backward._attention_keys_backward_kernel",
}
KERNELS = WITH_DOTS | {
    "swiglu._swiglu_forward_kernel",
    "swiglu._swiglu_backward_kernel",
    "geglu._geglu_forward_kernel",
    "geglu._geglu_backward_kernel",
    "residual._add_normed_kernel",
    "dropout._keep_bits_kernel",
    "dropout._drop_kernel",
    "rms_norm._rms_norm_forward_kernel",
    "rms_norm._rms_norm_backward_kernel",
    "rope._rope_kernel",
    "qkv_rope._qkv_rope_kernel",
    "qkv_norm_rope._qkv_norm_rope_kernel",
    "qkv_norm_rope._qkv_norm_backward_kernel",
    "cross_entropy._cross_entropy_kernel",
    "many_copies._copy_kernel",
    "swiglu_products_backward._sum_products_kernel",
    "swiglu_products_forward._sum_z_kernel",
    "sums_over_tokens._sum_partials_kernel",
}


# The least shared memory there is, and what is published. To compile for one takes 12 s.
USUAL = (89, 90)


@pytest.fixture(
    scope="module",
    params=[USUAL, pytest.param(tuple(SHARED_KB), marks=pytest.mark.exhaustive)],
    ids=("usual", "all"),
)
def shared_bytes(request):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(HERE.parent)
    program = [sys.executable, str(HERE / "compile_case.py"), *map(str, request.param)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_kernels_compile_and_fit_into_shared_memory(shared_bytes):
    assert len(shared_bytes) > 1
    for arch, found in shared_bytes.items():
        assert set(found) == KERNELS
        assert all(found[name] > 0 for name in WITH_DOTS)
        assert all(size <= SHARED_KB[int(arch)] * 1024 for size in found.values()), arch

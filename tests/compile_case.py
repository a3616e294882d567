"""The kernels that have a tiling, compiled as for GPUs that are not there.

``python compile_case.py 80 90`` prints, for each of these architectures, the bytes of shared memory
that a program of each kernel takes. Not in Triton's interpreter, so in a process of its own.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

from fused_lora.sums_over_tokens import sums_over_tokens
from fused_lora.swiglu_products_backward import Product, swiglu_backward_products
from fused_lora.swiglu_products_forward import swiglu_forward_product

TOKENS, COLUMNS, RANK = 2048, 11_008, 32


class Driver:
    """All that Triton asks of one to compile."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # what is compiled is kept by device

    def get_current_stream(self, device):
        return 0


def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def launch_all():
    products = [Product(empty(TOKENS, RANK), empty(COLUMNS, RANK)) for _ in range(3)]
    gate_up, hidden = empty(TOKENS, 2 * COLUMNS), empty(TOKENS, COLUMNS)
    swiglu_backward_products(hidden, gate_up, *products, torch.empty_like(gate_up))
    swiglu_forward_product(gate_up, empty(RANK, COLUMNS), hidden, empty(TOKENS, RANK))
    sums_over_tokens([(hidden, products[:1])])


def shared_bytes(arch: int) -> dict[str, int]:
    triton.runtime.driver.set_active(Driver(arch))
    found = {}
    run = triton.JITFunction.run

    def compile_only(self, *arguments, warmup, **options):
        compiled = run(self, *arguments, warmup=True, **options)
        found[self.__name__] = compiled.metadata.shared

    triton.JITFunction.run = compile_only
    try:
        launch_all()
    finally:
        triton.JITFunction.run = run
    return found


if __name__ == "__main__":
    print(json.dumps({arch: shared_bytes(int(arch)) for arch in sys.argv[1:]}))

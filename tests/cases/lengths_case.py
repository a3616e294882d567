"""Ask Triton which kernels it would compile for batches of many lengths, on a GPU not there.

``python lengths_case.py`` prints, by length, the kernels that the first length does not need, and
those that only the first needs. Nothing is compiled. It needs Triton's compiler and not its
interpreter, so the test starts it in a separate process.
"""

import json

import triton
from cases import compile_case

# Positions of two sequences: 50 lengths, odd, even and multiples of 16. Our attention's backward
# takes up to 512, and PyTorch's the others.
LENGTHS = range(65, 512, 9)
ARCH = 90


def wanted(length: int) -> set[str]:
    """Return the kernels that a batch needs, each with everything that it is compiled for."""
    found: set[str] = set()

    def note(*, fn, key, **_) -> bool:
        found.add(f"{fn.name} {key}")
        return True  # do not compile

    triton.knobs.runtime.jit_cache_hook = note
    compile_case.BATCH, compile_case.POSITIONS = 2, length
    compile_case.TOKENS = 2 * length
    compile_case.launch_parts()
    compile_case.launch_layer()
    compile_case.launch_fp8()
    return found


if __name__ == "__main__":
    triton.runtime.driver.set_active(compile_case.Driver(ARCH))
    first = wanted(LENGTHS[0])
    assert len(first) > 50
    print(json.dumps({length: sorted(wanted(length) ^ first) for length in LENGTHS}))

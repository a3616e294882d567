"""The fastest of a few tilings, on a GPU where the shipped one was not measured.

On MEASURED_ON, where it was measured, nothing is timed. On other GPUs the first call for a shape
times the shipped tiling and a handful of others. That takes some ms, and the time to compile them.
Every later call gets the fastest. `GraphedStep` runs two eager calls before it captures, and the
benchmark warms up. The first call is therefore in no timed step, and the tiling is chosen before
the capture.

We do not use `triton.autotune`. It times where it need not, where it must not (a CUDA graph's
capture) and where it cannot (Triton's interpreter), and it knows only one kernel. Here a tiling
also decides how large the partial sums are and what a second kernel has to add up.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from threading import Lock

import torch
from torch import Tensor

from fused_mlp.launching import is_capturing, is_interpreted, next_power_of_2

from .tiling import Tiling

MEASURED_ON = {(9, 0)}  # compute capabilities

TIMED_RUNS = 5  # per tiling
SLEEP_CYCLES = 2_000_000  # 1 ms at 2 GHz, in which the host launches them

CHOSEN: dict[Hashable, Tiling] = {}
_LOCK = Lock()  # autograd runs backwards in a thread for each device

_capability = cache(torch.cuda.get_device_capability)  # asked at every launch


def fastest(
    kernel,
    tensor: Tensor,
    rows: int,
    shape: Hashable,
    shipped: Tiling,
    others: Sequence[Mapping[str, int]],
    launch: Callable[[Tiling], None],
) -> Tiling:
    """Return the tiling with which `launch` is fastest on the GPU, the same for the whole process.

    It is `shipped`, untimed, on MEASURED_ON, on the CPU, in Triton's interpreter, in fp32, while
    torch.compile is tracing, and while a CUDA graph is captured before anything was chosen. It is
    `shipped` under torch.use_deterministic_algorithms as well: another process might choose another
    tiling, and so add in another order.

    Args:
        kernel: the kernel to tile.
        tensor: an operand. It gives the dtype and the device, which is the current one.
        rows: the operands' rows. Counts with the same next power of two share a choice.
        shape: everything else that the choice depends on.
        others: the other tilings, each as its changes to the shipped one.
        launch: launches every kernel that the tiling affects. It can be called repeatedly, because
            it reads nothing that it writes. A tiling with which it raises is skipped (it does not
            compile, or needs more shared memory than there is). If all are skipped we return
            `shipped`, and the caller's own launch raises the error.
    """
    if (
        torch.compiler.is_compiling()
        or is_interpreted(kernel)
        or not tensor.is_cuda
        or tensor.dtype == torch.float32
        or _capability(tensor.get_device()) in MEASURED_ON
        or torch.are_deterministic_algorithms_enabled()
    ):
        return shipped
    key = kernel.__name__, tensor.get_device(), tensor.dtype, next_power_of_2(rows), shape
    chosen = CHOSEN.get(key)
    if chosen is not None:
        return chosen
    if is_capturing(tensor):
        return shipped
    with _LOCK:
        if key not in CHOSEN:
            tilings = shipped, *(shipped._replace(**changes) for changes in others)
            CHOSEN[key] = _fastest_of(tilings, launch)
        return CHOSEN[key]


def _fastest_of(tilings: Sequence[Tiling], launch: Callable[[Tiling], None]) -> Tiling:
    milliseconds = {}
    for tiling in dict.fromkeys(tilings):
        try:
            milliseconds[tiling] = _milliseconds(launch, tiling)
        except Exception:  # Triton has many, a failed pass is a RuntimeError
            continue
    return min(milliseconds, key=milliseconds.__getitem__, default=tilings[0])


def _milliseconds(launch: Callable[[Tiling], None], tiling: Tiling) -> float:
    """Measure a launch's time on the GPU, the median of TIMED_RUNS, without the host's time."""
    launch(tiling)  # compiles
    torch.cuda._sleep(SLEEP_CYCLES)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_RUNS + 1)]
    events[0].record()
    for event in events[1:]:
        launch(tiling)
        event.record()
    events[-1].synchronize()
    return median(start.elapsed_time(end) for start, end in pairwise(events))

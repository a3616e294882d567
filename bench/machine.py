"""The machine and its state, read through NVML: no CUDA context, no waiting for the GPU."""

import os
import platform
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from statistics import median

import pynvml

from bench.experiment_records import Environment, Git, Gpu

RECORDED_PACKAGES = (
    "torch", "triton", "transformers", "peft", "bitsandbytes", "accelerate", "unsloth",
    "unsloth_zoo", "liger_kernel",
)  # fmt: skip

# Why clocks are below their maximum, in words. Under load these cards run at their power cap. Only
# what slows a card further makes a round "throttled".
CLOCK_REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonApplicationsClocksSetting": "application clocks",
    "nvmlClocksThrottleReasonSyncBoost": "sync boost",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "hardware power brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "software thermal slowdown",
}
THROTTLED = ("slowdown", "brake")


def has_gpu() -> bool:
    """Return True if an NVIDIA GPU is visible to CUDA programs."""
    return gpu_handle() is not None


def visible_gpus() -> list[str]:
    """Return the GPUs that are visible to CUDA programs, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return list(takewhile(lambda name: name not in ("", "-1"), names))
    try:
        pynvml.nvmlInit()
        return [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def gpu_name() -> str:
    return pynvml.nvmlDeviceGetName(gpu_handle())


def gpu_handle(number: int = 0):
    """Return NVML's handle of one of the `visible_gpus`, the first by default, or None."""
    names = visible_gpus()
    if number >= len(names):
        return None
    try:
        pynvml.nvmlInit()
        if names[number].isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(names[number]))
        return pynvml.nvmlDeviceGetHandleByUUID(names[number])
    except pynvml.NVMLError:
        return None


def environment() -> Environment:
    """Return the machine, the packages and this repository's commit."""
    return Environment(
        gpu=_gpu(),
        cpu=f"{_cpu_name()}, {_cores()} cores",
        platform=platform.platform(),
        python=platform.python_version(),
        packages={name: _version(name) for name in RECORDED_PACKAGES},
        cuda=_cuda_version(),
        git=_git(),
    )


@dataclass(frozen=True)
class Sample:
    """The GPU's state at one moment. Values that cannot be read are None or empty."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    clock_reasons: list[str]


def sample() -> Sample:
    """Read the state. Takes about a millisecond and leaves the GPU alone."""
    handle = gpu_handle()
    power_mw = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return Sample(
        sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1e3,
        clock_reasons=[
            words for name, words in CLOCK_REASONS.items() if reasons & getattr(pynvml, name, 0)
        ],
    )


@dataclass(frozen=True)
class Conditions(Sample):
    """The samples taken between a cell's steps: their medians and all clock reasons."""

    throttled: bool | None


def conditions_of(samples: list[Sample]) -> Conditions:
    """Return medians and clock reasons of samples."""

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    reasons = sorted({reason for one in samples for reason in one.clock_reasons})
    throttled = any(word in reason for reason in reasons for word in THROTTLED)
    return Conditions(
        middle(one.sm_clock_mhz for one in samples),
        middle(one.memory_clock_mhz for one in samples),
        middle(one.temperature_c for one in samples),
        middle(one.power_w for one in samples),
        reasons,
        throttled if samples else None,
    )


def card() -> str | None:
    """Return eight hex digits that tell this GPU from others: the start of its UUID's sha256.
    People publish these files, so the UUID itself stays out."""
    uuid = _ask(pynvml.nvmlDeviceGetUUID, gpu_handle())
    if uuid is None:
        return None
    return sha256(uuid.encode()).hexdigest()[:8]


def other_processes(own: int, gpus: int = 1) -> int | None:
    """Count the processes that compute on the GPU besides `own` of ours, on the busiest of the
    first `gpus`. None: it cannot be read.

    We only count: in most containers NVML lists the host's process ids, where `own` have others. In
    some it lists none, not even ours, which tells nothing.
    """
    ask = pynvml.nvmlDeviceGetComputeRunningProcesses
    on_each = [_ask(ask, gpu_handle(number)) for number in range(gpus)]
    counts = [len(processes) for processes in on_each if processes is not None]
    return max(counts) - own if counts and max(counts) >= own else None


def host_launch_us() -> float | None:
    """Measure how fast the host is: its time to launch one small kernel, in us.

    Median of 20 batches of 50 launches. None without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    tensor = torch.zeros(8, device="cuda")
    took_us = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            tensor.add_(1.0)
        took_us.append((time.perf_counter() - began) / 50 * 1e6)
    torch.cuda.synchronize()
    return median(took_us)


def _ask(function, handle, *arguments):
    """Return NVML's answer, None without a GPU or if the driver does not say."""
    if handle is None:
        return None
    try:
        return function(handle, *arguments)
    except pynvml.NVMLError:
        return None


def _gpu() -> Gpu | None:
    handle = gpu_handle()
    if handle is None:
        return None
    limit_mw = _ask(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
    return Gpu(
        name=gpu_name(),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        driver=pynvml.nvmlSystemGetDriverVersion(),
        power_limit_w=None if limit_mw is None else limit_mw / 1e3,
        max_sm_clock_mhz=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        max_memory_clock_mhz=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        ecc=_on((_ask(pynvml.nvmlDeviceGetEccMode, handle) or [None])[0]),
        uncorrected_ecc_errors=_ask(
            pynvml.nvmlDeviceGetTotalEccErrors, handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC,
        ),
        persistence=_on(_ask(pynvml.nvmlDeviceGetPersistenceMode, handle)),
    )  # fmt: skip


def _on(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Count the cores this process may run on: short steps wait for them."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda


def _git() -> Git | None:
    def git(*arguments: str) -> str:
        options: dict = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
        return subprocess.run(["git", *arguments], check=True, **options).stdout.strip()

    try:
        return Git(
            commit=git("rev-parse", "HEAD"),
            dirty=bool(git("status", "--porcelain", "--untracked-files=no")),
        )
    except (OSError, subprocess.CalledProcessError):
        return None

"""The machine that a number comes from, and the state that it is in, read through NVML, which
neither starts a CUDA context nor waits for the GPU."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pynvml

from bench.records import Environment, Git, Gpu

RECORDED_PACKAGES = (
    "torch", "triton", "transformers", "peft", "accelerate", "unsloth", "unsloth_zoo",
    "liger_kernel",
)  # fmt: skip

# Why clocks are below their maximum, in words. Only what means a slower card than its power limit
# allows makes a round "throttled": the power cap itself is how these cards run under load.
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


def gpu_name() -> str:
    """Return NVML's name for the first GPU that CUDA would use."""
    name = pynvml.nvmlDeviceGetName(gpu_handle())
    return name if isinstance(name, str) else name.decode()


def gpu_handle():
    """NVML's handle of the first GPU that CUDA would use, None where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return None
    try:
        pynvml.nvmlInit()
        first = visible.split(",")[0].strip() if visible else "0"
        if first.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(first))
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    except pynvml.NVMLError:
        return None


def environment() -> Environment:
    """The machine, the packages and this repository's commit."""
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
    """The GPU's state at one moment; a value is None, or empty, where it cannot be read."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    clock_reasons: list[str]


def sample() -> Sample:
    """Ask for the state now. Takes about a millisecond and leaves the GPU alone."""
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


class Conditions(NamedTuple):
    """Summary of the samples taken between a cell's steps: medians, and every clock reason."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    clock_reasons: list[str]
    throttled: bool | None


def conditions_of(samples: list[Sample]) -> Conditions:
    """Sum up the samples that were taken between a cell's steps."""

    def middle(name: str) -> float | None:
        values = [getattr(s, name) for s in samples if getattr(s, name) is not None]
        return median(values) if values else None

    reasons = sorted({reason for one in samples for reason in one.clock_reasons})
    throttled = any(word in reason for reason in reasons for word in THROTTLED)
    return Conditions(
        sm_clock_mhz=middle("sm_clock_mhz"),
        memory_clock_mhz=middle("memory_clock_mhz"),
        temperature_c=middle("temperature_c"),
        power_w=middle("power_w"),
        clock_reasons=reasons,
        throttled=throttled if samples else None,
    )


def card() -> str | None:
    """Return eight hex digits that tell this GPU from others of its kind: the start of the sha256
    of its UUID, which a file that people publish need not hold."""
    uuid = _ask(pynvml.nvmlDeviceGetUUID, gpu_handle())
    if uuid is None:
        return None
    return sha256(uuid if isinstance(uuid, bytes) else uuid.encode()).hexdigest()[:8]


def other_processes(own: int) -> int | None:
    """Count the processes that compute on the GPU besides `own` of ours; None where the number
    cannot be read.

    They are counted and not looked up by their ids, which in a container are not the host's.
    """
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu_handle())
    return None if processes is None else max(0, len(processes) - own)


def host_launch_us() -> float | None:
    """Measure the time that the host takes to launch one small kernel, in us. The work is the same
    in every run, so it tells how fast the host was. Median of 20 batches of 50 launches; None
    without a GPU."""
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
    """NVML's answer, None where there is no GPU or the driver does not say."""
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
    driver = pynvml.nvmlSystemGetDriverVersion()
    limit_mw = _ask(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
    return Gpu(
        name=gpu_name(),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        driver=driver if isinstance(driver, str) else driver.decode(),
        power_limit_w=None if limit_mw is None else limit_mw / 1e3,
        max_sm_clock_mhz=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        max_memory_clock_mhz=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        ecc=_on((_ask(pynvml.nvmlDeviceGetEccMode, handle) or [None])[0]),
        uncorrected_ecc_errors=_ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        persistence=_on(_ask(pynvml.nvmlDeviceGetPersistenceMode, handle)),
    )


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
    """Count the cores this process may run on; short steps wait for them."""
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
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        return Git(
            commit=git("rev-parse", "HEAD"),
            dirty=bool(git("status", "--porcelain", "--untracked-files=no")),
        )
    except (OSError, subprocess.CalledProcessError):
        return None

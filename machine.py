"""The machine a number comes from: what it is, and what state it is in. Asked through NVML, which
neither starts a CUDA context nor waits for the GPU."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml

PACKAGES = (
    "torch", "triton", "transformers", "peft", "accelerate", "unsloth", "unsloth_zoo",
    "liger_kernel",
)  # fmt: skip

# Throttle reasons that mean a slower card than its power limit allows; the power cap itself is how
# these cards run under load.
_HOT_OR_HELD = (
    "nvmlClocksEventReasonHwSlowdown",
    "nvmlClocksEventReasonSwThermalSlowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
)


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible to CUDA programs."""
    return gpu_handle() is not None


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


def environment() -> dict[str, Any]:
    """What results.json records of the machine, the packages and this repository's commit."""
    return {
        "gpu": _gpu(),
        "cpu": _cpu_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": _cuda_version(),
        "git": _git(),
    }


def state() -> dict[str, Any]:
    """The GPU's state at this moment; every value is None where it cannot be read."""
    handle = gpu_handle()
    throttle = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    reasons = [getattr(pynvml, name, 0) for name in _HOT_OR_HELD]
    power_mw = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return {
        "sm_clock_mhz": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "temperature_c": _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power_mw is None else power_mw / 1e3,
        "throttled": None if throttle is None else any(throttle & reason for reason in reasons),
        "other_gpu_processes": (
            None if processes is None else sum(p.pid != os.getpid() for p in processes)
        ),
    }


def _ask(function, handle, *arguments):
    """NVML's answer, None where there is no GPU or the driver does not say."""
    if handle is None:
        return None
    try:
        return function(handle, *arguments)
    except pynvml.NVMLError:
        return None


def _gpu() -> dict[str, Any] | None:
    handle = gpu_handle()
    if handle is None:
        return None
    name = pynvml.nvmlDeviceGetName(handle)
    driver = pynvml.nvmlSystemGetDriverVersion()
    limit_mw = _ask(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
    return {
        "name": name if isinstance(name, str) else name.decode(),
        "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        "driver": driver if isinstance(driver, str) else driver.decode(),
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
        "max_sm_clock_mhz": _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda


def _git() -> dict[str, Any] | None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None

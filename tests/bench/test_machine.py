"""Readings of NVML, from a fake NVML whose answers each test sets."""

import dataclasses
from importlib import metadata

import msgspec
import pynvml
import pytest

from bench import machine
from bench.experiment_records import Environment, Gpu
from bench.machine import CLOCK_REASONS, Conditions, Sample, conditions_of, other_processes, sample

POWER_CAP = pynvml.nvmlClocksThrottleReasonSwPowerCap
IDLE = pynvml.nvmlClocksThrottleReasonGpuIdle
THERMAL = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
NO_DRIVER = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


class Driver:
    """An NVML with one GPU. `answers` by function name; an exception is raised."""

    def __init__(self, monkeypatch):
        self.answers = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetHandleByUUID": "another handle",
            "nvmlDeviceGetPowerUsage": 690_500,
            "nvmlDeviceGetCurrentClocksThrottleReasons": POWER_CAP,
            "nvmlDeviceGetTemperature": 52,
            "nvmlDeviceGetComputeRunningProcesses": ["ours"],
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetUUID": "GPU-0",
            "nvmlSystemGetDriverVersion": "580.95",
            "nvmlDeviceGetMemoryInfo": dataclasses.make_dataclass("M", ["total"])(150_121_545_728),
            "nvmlDeviceGetPowerManagementLimit": 700_000,
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetPersistenceMode": 1,
        }
        self.asked = []
        for name in self.answers:
            monkeypatch.setattr(pynvml, name, self.function(name))
        clocks = {pynvml.NVML_CLOCK_SM: (1755, 1980), pynvml.NVML_CLOCK_MEM: (3100, 3201)}
        monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda _, kind: clocks[kind][0])
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxClockInfo", lambda _, kind: clocks[kind][1])

    def function(self, name):
        def answer(*arguments):
            self.asked.append((name, *arguments))
            if isinstance(self.answers[name], Exception):
                raise self.answers[name]
            return self.answers[name]

        return answer


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Driver(monkeypatch)


def test_a_card_is_told_from_another_and_not_named(driver):
    first = machine.card()
    assert "GPU" not in first and len(first) == 8
    for uuid, same in (("GPU-0", True), ("GPU-1", False)):
        driver.answers["nvmlDeviceGetUUID"] = uuid
        assert (machine.card() == first) is same
    driver.answers["nvmlDeviceGetUUID"] = NOT_SUPPORTED
    assert machine.card() is None


# --- samples --------------------------------------------------------------------------------------


def test_a_sample_has_units_and_words_and_none_for_what_the_driver_does_not_say(driver):
    assert sample() == Sample(1755, 3100, 52, 690.5, ["power cap"])
    for name in ("PowerUsage", "Temperature", "CurrentClocksThrottleReasons"):
        driver.answers[f"nvmlDeviceGet{name}"] = NOT_SUPPORTED
    assert sample() == Sample(1755, 3100, None, None, [])


def test_every_reason_has_its_bit_and_its_words(driver):
    """Check the names: one that pynvml lacks would never show."""
    bits = [(getattr(pynvml, name), [words]) for name, words in CLOCK_REASONS.items()]
    both = ["power cap", "software thermal slowdown"]
    for bit, words in (*bits, (POWER_CAP | THERMAL, both), (IDLE, [])):
        driver.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = bit
        assert sample().clock_reasons == words


def test_without_a_gpu_nothing_is_known_and_nothing_fails(driver):
    driver.answers["nvmlInit"] = NO_DRIVER
    assert sample() == Sample(None, None, None, None, [])
    assert not machine.has_gpu()
    assert other_processes(own=0) is machine.environment().gpu is None


def state(clock=1700, power=650.0, reasons=()):
    return Sample(clock, 3201, 50, power, list(reasons))


def test_a_cell_records_medians_and_every_reason_once():
    uneven = [state(1980, 300.0), state(1700, 690.0, ["power cap"]),
              state(1720, None, ["power cap", "application clocks"])]  # fmt: skip
    power = 495.0  # of the two that were read
    reasons = ["application clocks", "power cap"]
    assert conditions_of(uneven) == Conditions(1720, 3201, 50, power, reasons, throttled=False)
    assert conditions_of([]) == Conditions(None, None, None, None, [], throttled=None)


@pytest.mark.parametrize("words", CLOCK_REASONS.values())
def test_a_slowdown_or_brake_in_one_sample_is_throttling_and_the_power_cap_is_not(words):
    found = conditions_of([state(), state(reasons=[words]), state()])
    throttles = words not in ("power cap", "application clocks", "sync boost")
    assert (found.clock_reasons, found.throttled) == ([words], throttles)


# --- which GPU, and who is on it ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        (None, [("nvmlDeviceGetHandleByIndex", 0)]),
        ("2,0", [("nvmlDeviceGetHandleByIndex", 2)]),
        (" 1 ", [("nvmlDeviceGetHandleByIndex", 1)]),
        ("GPU-5e8f", [("nvmlDeviceGetHandleByUUID", "GPU-5e8f")]),
        ("", []),  # hidden
        ("-1", []),
    ],
)
def test_the_gpu_that_is_asked_is_the_first_that_cuda_sees(visible, asked, driver, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.has_gpu() is bool(asked)
    assert driver.asked[-1:] == asked


def test_the_gpus_that_cuda_sees_are_named_in_its_order(driver, monkeypatch):
    assert machine.visible_gpus() == ["0", "1"]
    driver.answers["nvmlInit"] = NO_DRIVER
    assert machine.visible_gpus() == []
    for visible, names in (("3, 1", ["3", "1"]), ("1,-1,0", ["1"]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.visible_gpus() == names


@pytest.mark.parametrize(
    ("there", "own", "others"),
    [
        # what `nvidia-smi --query-compute-apps=pid,gpu_uuid` shows of one GPU
        ("41230, GPU-5e8f", 1, 0),  # on the host, where ours is 41230
        ("3118207, GPU-5e8f", 1, 0),  # in a container, where ours is 77
        ("41230, GPU-5e8f\n50017, GPU-5e8f", 1, 1),
        ("41230, GPU-5e8f\n50017, GPU-5e8f", 0, 2),
        ("", 0, 0),
        ("", 1, None),  # in a container that lists no process, not even ours
        ("41230, GPU-5e8f", 2, None),
        (NOT_SUPPORTED, 1, None),  # and not zero
    ],
)
def test_processes_besides_ours_are_counted(there, own, others, driver):
    listed = there.splitlines() if isinstance(there, str) else there
    driver.answers["nvmlDeviceGetComputeRunningProcesses"] = listed
    assert other_processes(own=own) == others


def test_processes_are_counted_on_the_busiest_of_several_gpus(driver, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda number: ["another's"] * number
    )
    assert (other_processes(own=0), other_processes(own=0, gpus=2)) == (0, 1)


# --- the environment ------------------------------------------------------------------------------

H200 = Gpu(
    name="NVIDIA H200", memory_bytes=150_121_545_728, driver="580.95", power_limit_w=700.0,
    max_sm_clock_mhz=1980, max_memory_clock_mhz=3201, ecc=True, uncorrected_ecc_errors=0,
    persistence=True,
)  # fmt: skip


def test_the_gpu_in_the_environment(driver):
    """Count as ECC errors the uncorrected ones since the last boot."""
    found = machine.environment()
    assert found.gpu == H200
    asked = next(call for call in driver.asked if call[0] == "nvmlDeviceGetTotalEccErrors")
    assert asked[2:] == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Environment) == found
    assert found.packages["torch"] == metadata.version("torch")


def test_ecc_that_is_off_is_not_unknown(driver):
    driver.answers |= {
        "nvmlDeviceGetEccMode": [0, 1],  # on from the next boot
        "nvmlDeviceGetPersistenceMode": 0,
    }
    gpu = machine.environment().gpu
    assert (gpu.ecc, gpu.persistence) == (False, False)


def test_what_a_card_does_not_support_is_none(driver):
    for name in ("EccMode", "TotalEccErrors", "PersistenceMode", "PowerManagementLimit"):
        driver.answers[f"nvmlDeviceGet{name}"] = NOT_SUPPORTED
    unknown = ("ecc", "uncorrected_ecc_errors", "persistence", "power_limit_w")
    assert machine.environment().gpu == msgspec.structs.replace(H200, **dict.fromkeys(unknown))


def test_the_cores_are_those_that_this_process_may_run_on(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    assert machine.environment().cpu.endswith(", 3 cores")
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 7)
    assert machine.environment().cpu.endswith(", 7 cores")


@pytest.mark.gpu
@pytest.mark.alone
def test_a_launch_takes_a_few_microseconds_of_the_host():
    assert 0.5 < machine.host_launch_us() < 200

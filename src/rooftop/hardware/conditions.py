"""What else the machine did while something was measured: other processes, clocks, temperature, power.

    others_share             of the cores that this process may use, the part that other processes took
    others_on_gpu_percent    utilization of the GPU by other processes when the measurement began
    sm_clock_mhz, max_sm_clock_mhz, temperature_c, power_w, power_limit_w     of the GPU, at the end

What the system or the driver does not tell is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import TracebackType

import psutil
import torch

from rooftop.hardware.device import gpu_uuid
from rooftop.hardware.nvml import nvml_session

BUSY_SHARE = 0.05
"""Of the cores, or of the GPU's time: more than this in other hands disturbs a measurement."""

Conditions = Mapping[str, float]


def busy(conditions: Conditions, kind: str) -> bool:
    """Whether others disturbed a measurement on a "cpu" or a "cuda" device. Kernels need none of the host's cores."""
    if kind == "cpu":
        return conditions.get("others_share", 0.0) > BUSY_SHARE
    return conditions.get("others_on_gpu_percent", 0.0) > 100 * BUSY_SHARE


class Watch:
    """A context around a measurement; `conditions` are there after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.conditions: dict[str, float] = {}

    def __enter__(self) -> Watch:
        if self._device.type == "cuda":
            self._ask_for_others()
        self._began = time.perf_counter()
        self._used, self._own = _used_s(), _own_s()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        elapsed = time.perf_counter() - self._began
        others = (_used_s() - self._used) - (_own_s() - self._own)
        self.conditions["seconds"] = elapsed
        self.conditions["others_share"] = min(1.0, max(0.0, others / (elapsed * len(_cores()))))
        if self._device.type == "cuda":
            self._ask_for_state()

    def _ask_for_others(self) -> None:
        """The GPU's utilization, if somebody else has it open; alone, it would be this process's own work."""
        uuid = gpu_uuid(self._device.index or 0)
        with nvml_session() as nvml:
            users = nvml.gpu(uuid, lambda m, h: len(m.nvmlDeviceGetComputeRunningProcesses(h)))
            used = nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetUtilizationRates(h).gpu)
        if users is not None and used is not None:
            self.conditions["others_on_gpu_percent"] = float(used) if users > 1 else 0.0

    def _ask_for_state(self) -> None:
        uuid = gpu_uuid(self._device.index or 0)
        with nvml_session() as nvml:
            answers = {
                "sm_clock_mhz": nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetClockInfo(h, m.NVML_CLOCK_SM)),
                "max_sm_clock_mhz": nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetMaxClockInfo(h, m.NVML_CLOCK_SM)),
                "temperature_c": nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetTemperature(h, m.NVML_TEMPERATURE_GPU)),
                "power_w": nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetPowerUsage(h) / 1000),
                "power_limit_w": nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetPowerManagementLimit(h) / 1000),
            }
        self.conditions.update({name: float(value) for name, value in answers.items() if value is not None})


def _cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def _used_s() -> float:
    """Seconds that these cores have worked, for anybody; what another virtual machine took counts too."""
    times = psutil.cpu_times(percpu=True)
    return sum(
        sum(times[core]) - times[core].idle - getattr(times[core], "iowait", 0.0) - _counted_twice(times[core])
        for core in _cores()
        if core < len(times)
    )


def _counted_twice(times: object) -> float:
    """Linux counts the time of guests within that of users."""
    return float(getattr(times, "guest", 0.0)) + float(getattr(times, "guest_nice", 0.0))


def _own_s() -> float:
    """Seconds that this process and those it has waited for have worked."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system

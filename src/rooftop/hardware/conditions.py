"""Conditions during a measurement: other processes, clocks, temperature, power.

    seconds                  duration of the measurement
    others_cores             cores that other programs kept busy
    threads, cores           threads that the measurement used; cores of the machine
    others_on_gpu_percent    utilization of the GPU when the measurement began; 0 if no other process used the GPU
    sm_clock_mhz, max_sm_clock_mhz, temperature_c, power_w, power_limit_w
                             values of the GPU at the end

A measurement of ceilings also has "seconds PART" for each of its parts. Values that the driver does not report are
omitted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType

import torch

from rooftop.hardware.device import gpu_uuid
from rooftop.hardware.load import DISTURBING_SHARE, OtherLoad, other_load
from rooftop.hardware.nvml import nvml_session

Conditions = Mapping[str, float]


def busy(conditions: Conditions, kind: str) -> bool:
    """Whether other processes disturbed a measurement on a "cpu" or a "cuda" device. On a GPU, only other use of the
    GPU counts.
    """
    if kind == "cpu":
        return missing_cores(conditions) > DISTURBING_SHARE * conditions.get("threads", 1.0)
    return conditions.get("others_on_gpu_percent", 0.0) > 100 * DISTURBING_SHARE


def missing_cores(conditions: Conditions) -> float:
    """The number of missing cores: cores in use by other programs plus the measurement's threads, minus the machine's
    cores; at least 0.
    """
    wanted = conditions.get("others_cores", 0.0) + conditions.get("threads", 1.0)
    return max(0.0, wanted - conditions.get("cores", wanted))


class Watch:
    """A context manager around a measurement, which sets `conditions` at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack = ExitStack()
        self._load = OtherLoad()
        self.conditions: dict[str, float] = {}

    def __enter__(self) -> Watch:
        if self._device.type == "cuda":
            self._ask_for_others()
        self._load = self._stack.enter_context(other_load())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()
        self.conditions["seconds"] = self._load.seconds
        self.conditions["others_cores"] = self._load.cores
        self.conditions["threads"] = float(torch.get_num_threads())
        self.conditions["cores"] = float(os.cpu_count() or 1)
        if self._device.type == "cuda":
            self._ask_for_state()

    def _ask_for_others(self) -> None:
        """Record the GPU's utilization if another process uses the GPU. If no other process uses the GPU, record 0,
        because the utilization is then this process's own work.
        """
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

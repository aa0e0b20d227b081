"""CUPTI, NVIDIA's interface for profilers, taken off the process again.

PyTorch's profiler attaches CUPTI when it first begins and leaves it there. Attached, each call of the CUDA runtime goes
through it: a program that is bound by its host is slower for the rest of its life, though nobody profiles it any more
(the GPU's own times stay). PyTorch has a switch against that, `TEARDOWN_CUPTI=1`, under which every second profiler
misses kernels. So CUPTI is detached here, where the device is idle and all records have been read.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

__all__ = ["detach"]

_MAPS = Path("/proc/self/maps")  # what is loaded into this process, with paths

_library: ctypes.CDLL | None = None


def detach() -> bool:
    """Take CUPTI off this process until a profiler begins again. True if it was there.

    No profiler may be active. What runs on the devices is waited for, as CUPTI requires.
    """
    global _library
    if _library is None:
        path = _loaded("libcupti.so")
        if path is None:
            return False
        _library = ctypes.CDLL(path)
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
            torch.cuda.synchronize(device)
    return bool(_library.cuptiFinalize() == 0)


def _loaded(name: str) -> str | None:
    """The path of a library that this process has loaded, None if it has not or the system does not say."""
    if not _MAPS.exists():
        return None
    for line in _MAPS.read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return f"/{path}"
    return None

"""Detach CUPTI, NVIDIA's interface for profilers, from the process.

PyTorch's profiler attaches CUPTI when it first begins, and never detaches it. While CUPTI is attached, it intercepts
each call of the CUDA runtime. So a host-bound program stays slower until it ends, even after profiling. (The GPU's own
times do not change.) PyTorch can detach CUPTI after each run of the profiler (`TEARDOWN_CUPTI=1`), but then every
second run of the profiler misses kernels. So this module detaches CUPTI when the device is idle and all records have
been read.

During the detachment, no other thread may be inside a CUDA call. The GIL is held, so no Python thread can begin a CUDA
call, and a thread that waits in the standard library is not inside a CUDA call. But NCCL's threads call CUDA all the
time, and a process that detaches CUPTI during such a call can hang. So CUPTI stays attached if another thread may be
inside a CUDA call.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["detach", "others_in_calls", "stays_for"]

PATIENCE_S = 0.05  # seconds that other threads get to finish their calls

_MAPS = Path("/proc/self/maps")  # lists the libraries that this process has loaded, with paths
_WITHOUT_CUDA = {"debugpy", "execnet", "ipykernel", "rich", "tornado", "tqdm", "zmq"}
"""Packages whose threads call no CUDA. Consoles, notebooks and debuggers run such threads."""
_WAITING = {
    *("wait", "join", "acquire", "_wait_for_tstate_lock", "get", "put", "_worker", "select", "poll", "_poll", "_wait"),
    *("recv", "_recv", "read", "readinto", "accept", "communicate", "_communicate", "sleep"),
}
"""Functions of the standard library that only wait. Other functions, such as `Thread.run`, may call anything."""

_library: ctypes.PyDLL | None = None
stays_for = ""
"""Name of the thread because of which the last `detach` left CUPTI attached; "" if there was none."""


def detach() -> bool:
    """Detach CUPTI from this process until a profiler begins again. Return True if CUPTI was attached and has been
    detached.

    No profiler may be active. This function first waits for all work on the devices, as CUPTI requires. CUPTI stays
    attached if another thread may be in a call of the CUDA runtime.
    """
    global _library, stays_for
    stays_for = ""
    if _library is None:
        path = _loaded("libcupti.so")
        if path is None:
            return False
        _library = ctypes.PyDLL(path)  # PyDLL holds the GIL in its calls
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
            torch.cuda.synchronize(device)
    began = time.perf_counter()
    while True:
        with _keeping_the_gil():
            stays_for = others_in_calls()
            if not stays_for:
                return bool(_library.cuptiFinalize() == 0)
        if time.perf_counter() - began > PATIENCE_S:
            return False
        time.sleep(1e-3)


def others_in_calls() -> str:
    """The thread or library (NCCL) that may be inside a CUDA call now, besides this thread, such as "the thread
    loader"; "" if there is none.
    """
    if dist.is_available() and dist.is_initialized():
        groups = dist.distributed_c10d._world
        if any("nccl" in str(groups.pg_backend_config.get(group)) for group in groups.pg_map):
            return "NCCL"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    # `frames` holds this function's frame, and is a local variable of that frame: the cycle would keep callers alive
    del frames[threading.get_ident()]
    for ident, frame in frames.items():
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        waits = package in sys.stdlib_module_names and frame.f_code.co_name in _WAITING
        if not waits and package not in _WITHOUT_CUDA:
            return f"the thread {names[ident]}" if ident in names else f"a thread of {package or 'unknown code'}"
    return ""


@contextmanager
def _keeping_the_gil() -> Iterator[None]:
    """Keep other Python threads from running, unless the code inside releases the GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _loaded(name: str) -> str | None:
    """The path of a library that this process has loaded. None if the library is not loaded or the system does not list
    libraries.
    """
    if not _MAPS.exists():
        return None
    for line in _MAPS.read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return f"/{path}"
    return None

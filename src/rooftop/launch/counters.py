"""Zeroed counters in device memory. The programs of a kernel count their arrivals in counters, which the kernel then
resets to zero.

Launches on one stream run one after another and share their counters. A captured launch may be replayed on any stream,
at the same time as any other work. So each captured launch has its own counters as long as the process lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from rooftop.launch import triton_launch

STREAM_COUNTERS = 4096  # number of counters of a stream: 16 KiB
CAPTURED_COUNTERS = 1 << 18  # counters for all captured launches of a device: 1 MiB


@dataclass
class _Captured:
    zeros: Tensor
    taken: int = 0


_of_stream: dict[tuple[torch.device, int], Tensor] = {}
_of_graphs: dict[torch.device, _Captured] = {}
_lock = Lock()


def counters(device: torch.device, count: int) -> Tensor | None:
    """Return `count` zeros (int32) for one launch on the device's current stream; the launch must leave zeros in them.

    Return None if `count` exceeds a stream's supply. During a capture, also return None if no launch outside a capture
    has used counters on the device before, or if captured launches have used up the device's supply.
    """
    if count > STREAM_COUNTERS:
        return None
    if triton_launch._observer is not None:
        return triton_launch._observer.zeros(device, count)  # type: ignore[no-any-return]
    return counters_now(device, count)


def counters_now(device: torch.device, count: int) -> Tensor | None:
    """Return the same as `counters` for a `count` of at most STREAM_COUNTERS, without notifying an observer of the
    call.
    """
    if device.type != "cuda":
        return _stream_zeros(device, 0)[:count]
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return _captured_zeros(device, count)
        return _stream_zeros(device, torch.cuda.current_stream().cuda_stream)[:count]


def _stream_zeros(device: torch.device, stream: int) -> Tensor:
    zeros = _of_stream.get((device, stream))
    if zeros is None:
        with _lock:
            zeros = torch.zeros(STREAM_COUNTERS, dtype=torch.int32, device=device)
            if device not in _of_graphs:
                _of_graphs[device] = _Captured(torch.zeros(CAPTURED_COUNTERS, dtype=torch.int32, device=device))
                if device.type == "cuda":
                    # wait until the zeros are written, so that graphs on any stream can use them; once per device
                    torch.cuda.current_stream().synchronize()
            _of_stream[device, stream] = zeros
    return zeros


def _captured_zeros(device: torch.device, count: int) -> Tensor | None:
    count = -(-count // 4) * 4  # rounded up to units of 16 bytes, because compiled code assumes that alignment
    with _lock:
        captured = _of_graphs.get(device)
        if captured is None or captured.taken + count > CAPTURED_COUNTERS:
            return None
        captured.taken += count
        return captured.zeros[captured.taken - count : captured.taken]

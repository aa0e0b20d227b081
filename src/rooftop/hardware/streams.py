"""Run work on a second CUDA stream, including two steps that are easily forgotten: waiting, and `record_stream`.

    side = side_stream()
    with on_stream(side, x):     # side waits for the current stream, and x lives until side is done with it
        y = f(x)
    g()                          # runs at the same time as f
    join(side, y)                # the current stream waits for side, and y lives until that stream is done with it

A kernel on one stream does not wait for kernels on another stream. Without a wait, the kernel reads data that are not
yet written. The caching allocator reuses freed memory immediately for the stream that allocated the memory. Without
`record_stream`, the allocator reuses the memory while the other stream still reads it.
`rooftop.debugging.stream_races.check_streams` finds missing waits and missing `record_stream` calls.

Without CUDA there are no streams: `side_stream()` returns None, and the other calls do nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def side_stream(device: torch.device | int | None = None, *, priority: int = 0) -> torch.cuda.Stream | None:
    """A stream from PyTorch's pool; None without CUDA.

    The pool has 32 streams for each device and priority, which PyTorch returns in turn. So the 33rd call returns the
    stream of the first call again.

    Args:
        device: by default the current GPU.
        priority: 0 or negative. Streams with lower numbers run first.
    """
    return torch.cuda.Stream(device, priority=priority) if torch.cuda.is_available() else None


@contextmanager
def on_stream(stream: torch.cuda.Stream | None, *inputs: Any) -> Iterator[None]:
    """Run the block's kernels on `stream`, after the work launched on the current stream so far.

    Args:
        stream: the stream. None: the block runs on the current stream.
        inputs: every tensor that the block uses and that another stream allocated (or lists, tuples and dicts of such
            tensors).
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    _record(inputs, stream)
    with torch.cuda.stream(stream):
        yield


def join(stream: torch.cuda.Stream | None, *outputs: Any) -> None:
    """Make the current stream wait for the work launched on `stream` so far. The host does not wait.

    Args:
        stream: the stream. None: the call does nothing.
        outputs: every tensor that `stream` allocated and the current stream will use (or lists, tuples and dicts of
            such tensors).
    """
    if stream is None:
        return
    current = torch.cuda.current_stream(stream.device)
    current.wait_stream(stream)
    _record(outputs, current)


def _record(tree: Any, stream: torch.cuda.Stream) -> None:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)


def ensure_context(device: torch.device | None = None) -> None:
    """Make a GPU's CUDA context current in this thread, if it has none. Call this before calls of the CUDA driver.

    A new thread has no context until it calls the CUDA runtime. An allocation from PyTorch's cache is no such call.

    Args:
        device: torch's current device; None has the same meaning.
    """
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        torch.cuda.current_stream(device).query()  # the runtime makes the device's context current

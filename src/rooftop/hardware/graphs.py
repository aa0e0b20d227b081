"""CUDA graphs: what everybody needs who captures one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def captured(fn: Callable[[], object], stream: torch.cuda.Stream | None = None) -> Callable[[], object]:
    """The call as a CUDA graph's replay. Its inputs and outputs stay where they were at capture.

    Args:
        stream: where it is captured. autograd runs a backward on the stream of its forward: to capture a backward, run
            the forward on this stream before.
    """
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lazy initialization must not fall into the capture
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with collection_paused(), torch.cuda.graph(graph, stream=stream):
        fn()
    return graph.replay


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection in the `with` block: to free the memory of another graph would end a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def waits_for_gpu(fn: Callable[[], object]) -> bool:
    """Whether the host waits for the GPU in the call, so that no graph can capture it. Calls it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            fn()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return any("called a synchronizing CUDA operation" in str(warning.message) for warning in told)


def first_error(error: BaseException) -> str:
    """What went wrong in the capture; that the capture then cannot end is only its consequence."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

"""Tools for code that captures CUDA graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def captured(fn: Callable[[], object], stream: torch.cuda.Stream | None = None) -> Callable[[], object]:
    """Capture the call in a CUDA graph, and return a function that replays the graph.

    Inputs and outputs stay at the addresses of the capture.

    Args:
        stream: stream of the capture. To capture a backward pass, first run its forward pass on this stream: autograd
            runs a backward pass on the stream of its forward pass.
    """
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lazy initialization must not happen during the capture
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with captured_into(graph, stream):
        fn()

    def replay(_reads_memory_of: Callable[[], object] = fn) -> None:
        graph.replay()

    return replay


@contextmanager
def captured_into(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture the `with` block in a CUDA graph. Other threads may call CUDA during the capture, because NCCL's watchdog
    thread queries events.

    An error inside the block is raised unchanged. (torch would only report that the capture cannot end.)
    """
    within: BaseException | None = None
    try:
        try:
            with collection_paused(), own_workspaces(), torch.cuda.graph(graph, pool, stream, "thread_local"):
                try:
                    yield
                except BaseException as error:
                    within = error
                    raise
        except BaseException as error:
            if within is None or error is within:
                raise
        # Raise outside the `except` block: inside it, the later error would become the context of this error, and the
        # frames of the later error would keep this error alive.
        if within is not None:
            raise within
    finally:
        within = None  # break the cycle of error and frame, which would keep the capture's memory


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Give a graph that is captured in the `with` block its own cuBLAS workspaces, in its own memory pool.

    PyTorch keeps one workspace per stream, and a captured product contains the workspace's address. But torch.compile
    with reduce-overhead frees all workspaces, and newer versions of PyTorch free a stream's workspace when any graph of
    the stream is deleted. The captured product would then overwrite other tensors
    (https://github.com/pytorch/pytorch/issues/193402). Freeing the workspaces before the capture makes PyTorch allocate
    new ones in the graph's pool. Freeing the workspaces afterwards keeps other work out of the graph's pool.
    """
    if not torch.cuda.is_available():
        yield
        return
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def collection_paused(collect: bool = True) -> Iterator[None]:
    """Disable garbage collection in the `with` block, because freeing another graph's memory would end a capture.

    Args:
        collect: whether to collect garbage once before the block. This collection takes about 0.1 s in a large process.
    """
    if collect:
        gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def waits_for_gpu(fn: Callable[[], object]) -> bool:
    """Whether `fn` makes the host wait for the GPU. A CUDA graph cannot capture such a call. This runs `fn` once."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            fn()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return any("called a synchronizing CUDA operation" in str(warning.message) for warning in told)

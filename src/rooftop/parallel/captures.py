"""Destroy CUDA graphs before the NCCL communicators that they use.

An NCCL communicator counts the CUDA graphs that contain its work. Destroying the communicator waits until the last of
these graphs is destroyed (NVIDIA, NCCL User Guide, "Using NCCL with CUDA Graphs"). If a trainer, a traceback or a
reference cycle still holds such a graph, the process hangs at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def graphs_end_here() -> Iterator[None]:
    """Reset all CUDA graphs that were captured within the `with` block, even if other code captured or still holds
    them.

    Replaying such a graph afterwards raises RuntimeError. The graph's tensors keep their memory.
    """
    begin = torch.cuda.CUDAGraph.capture_begin
    graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def noted(graph: torch.cuda.CUDAGraph, *arguments: object, **options: object) -> None:
        graphs.add(graph)
        begin(graph, *arguments, **options)  # type: ignore[arg-type]

    with patch.object(torch.cuda.CUDAGraph, "capture_begin", noted):
        try:
            yield
        finally:
            for graph in list(graphs):
                graph.reset()

"""CUDA graphs end before the communication that they hold.

A communicator of NCCL counts the graphs that were captured with its work, and its end waits for the last of them
(NVIDIA, NCCL User Guide, "Using NCCL with CUDA Graphs"). A graph that a trainer, a traceback or a cycle of references
still holds would keep the process for good.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def graphs_end_here() -> Iterator[None]:
    """CUDA graphs that were captured in the `with` block are empty after it, whoever captured or still holds them.

    To replay one then is a RuntimeError of torch's. The memory of its tensors stays theirs.
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

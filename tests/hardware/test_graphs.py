"""A failed capture raises the error that occurred inside it, and keeps no memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.hardware.graphs import captured_into


@contextmanager
def cannot_end(*_: Any) -> Iterator[None]:
    """Like `torch.cuda.graph`, which reports that a capture with an error cannot end."""
    try:
        yield
    finally:
        raise RuntimeError("the capture cannot end")


def test_what_went_wrong_in_a_capture_is_raised_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", cannot_end)
    stand_in: Any = None

    def fails() -> weakref.ref[Tensor]:
        x = torch.ones(4)
        with pytest.raises(ValueError, match="not this one"), captured_into(stand_in, stand_in):
            raise ValueError(f"not this one: {x.shape}")
        return weakref.ref(x)

    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_graph_keeps_the_workspaces_that_it_uses() -> None:
    """PyTorch frees its own workspaces of cuBLAS, and empties its cache. A product with few results of long sums is
    split, so its parts are in a workspace.
    """
    stream = torch.cuda.Stream()
    a, b = (torch.randn(16, 1 << 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with torch.cuda.stream(stream):
        expected = a @ b.T  # a workspace outside of the graph
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with captured_into(graph, stream):
        result = a @ b.T
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    other = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")  # what would take the place of the workspace
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
    assert not other.any()

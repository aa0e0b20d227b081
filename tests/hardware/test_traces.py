"""The profiler's raw events can be read; its tree of Python objects is never created."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftop.hardware.traces import Trace

CPU = torch.device("cpu")


def test_events_of_the_host_are_seen_and_no_tree_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("the tree was made")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", parse)
    with Trace(CPU) as trace:
        torch.ones(3).relu()
    assert "aten::relu" in {event.name() for event in trace.events}


def test_events_are_saved_for_perfetto(tmp_path: Path) -> None:
    with Trace(CPU, save_to=tmp_path / "trace.json"):
        torch.ones(3).relu()
    assert "aten::relu" in (tmp_path / "trace.json").read_text()


def test_an_error_inside_passes_and_ends_the_profiler() -> None:
    with pytest.raises(KeyError), Trace(CPU):
        raise KeyError("inside")
    with Trace(CPU) as trace:
        torch.ones(3).relu()
    assert len(trace.events) > 0


def test_the_native_result_does_not_outlive_the_block() -> None:
    """Kineto's destructor must not run after the next profiler has begun, as it would if garbage collection freed
    it."""
    freed: list[bool] = []
    seen: list[weakref.ref[Any]] = []

    def read(results: Any) -> str:
        seen.append(weakref.ref(results, lambda _: freed.append(True)))
        return "read"

    gc.disable()
    try:
        with Trace(CPU, read=read) as trace:
            torch.ones(3).relu()
        assert freed == [True]
    finally:
        gc.enable()
    assert trace.found == "read"
    assert "aten::relu" in {event.name() for event in trace.events}

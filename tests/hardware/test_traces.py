"""The profiler's raw events are there; its tree of Python objects is never made."""

from __future__ import annotations

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
    with Trace(CPU) as trace:
        torch.ones(3).relu()
    trace.save(tmp_path / "trace.json")
    assert "aten::relu" in (tmp_path / "trace.json").read_text()


def test_an_error_inside_passes_and_ends_the_profiler() -> None:
    with pytest.raises(KeyError), Trace(CPU):
        raise KeyError("inside")
    with Trace(CPU) as trace:
        torch.ones(3).relu()
    assert len(trace.events) > 0

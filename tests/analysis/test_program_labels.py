"""Labels of a program that are open when our profiler begins or ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

import rooftop
from rooftop.analysis.program_labels import ProgramLabels
from rooftop.analysis.recordings import NEEDED
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.traces import Trace

CPU = torch.device("cpu")


class Told:
    """The beginnings and ends of a label that occurred while our profiler was active, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[str, str]] = []
        for name in ("__enter__", "__exit__"):
            monkeypatch.setattr(record_function, name, self._telling(name, getattr(record_function, name)))

    def _telling(self, name: str, original: Any) -> Any:
        def tell(label: record_function, *error: Any) -> Any:
            self.told.append((name.strip("_"), label.name))
            return original(label, *error)

        return tell

    def take(self) -> list[tuple[str, str]]:
        told, self.told = self.told, []
        return told


def names(trace: Trace) -> list[str]:
    return [event.name() for event in trace.events if event.name() in ("outer", "inner")]


def test_open_labels_end_before_a_profiler_begins_or_ends_and_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    again = [("exit", "inner"), ("exit", "outer"), ("enter", "outer"), ("enter", "inner")]
    with ProgramLabels(), record_function("outer"), record_function("inner"):
        told.take()
        with Trace(CPU) as first:
            assert told.take() == again
            with record_function("over"):
                pass
            told.take()
        assert told.take() == again
        with Trace(CPU) as second:
            pass
        told.take()
    assert told.take() == [("exit", "inner"), ("exit", "outer")]
    assert sorted(names(first)) == sorted(names(second)) == ["inner", "outer"]


def test_outside_of_it_nothing_is_in_place() -> None:
    before = (record_function.__enter__, record_function.__exit__, Trace.switching)
    with ProgramLabels(), ProgramLabels(), record_function("outer"), Trace(CPU) as trace:
        assert record_function.__enter__ is not before[0]
    assert names(trace) == ["outer"]
    assert (record_function.__enter__, record_function.__exit__, Trace.switching) == before


def test_labels_of_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with record_function("elsewhere"):
            began.set()
            go_on.wait(60)

    with ProgramLabels():
        other = threading.Thread(target=elsewhere)
        other.start()
        assert began.wait(60)
        told = Told(monkeypatch)
        with Trace(CPU):
            assert told.take() == []
        go_on.set()
        other.join()


def test_modes_of_the_program_do_not_see_it() -> None:
    class Seeing(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with ProgramLabels(), record_function("outer"), Seeing() as mode:
        with Trace(CPU):
            torch.ones(2).add(1)
        assert not any("record_function" in name for name in mode.seen)
        assert len(mode.seen) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_program_may_label_its_steps_and_its_loop(compiled: bool, ceilings: Ceilings) -> None:
    model = nn.Linear(8, 4)
    called = torch.compile(model, backend="eager") if compiled else model
    with rooftop.recording(ceilings=ceilings, device="cpu") as recorded, record_function("outer"):
        for _ in range(NEEDED + 8):
            with record_function("inner"):
                called(torch.ones(2, 8)).sum().backward()
                recorded.step()
    assert recorded.report.mode == f"{NEEDED + 8} recorded steps"

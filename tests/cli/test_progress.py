"""A progress bar appears for anything that takes long, even if it reports nothing meanwhile, and for nothing else."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rich.console import Console

from rooftop.cli import progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The output that a terminal on stderr would show, with a short patience."""
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80))
    monkeypatch.setattr(progress, "PATIENCE_S", 0.2)
    return screen


def test_the_bar_appears_in_the_midst_of_a_long_call(terminal: io.StringIO) -> None:
    with progress.progress_bar() as show:
        show("compiling", 0.5)
        ends = time.monotonic() + 60
        while "compiling" not in terminal.getvalue():
            assert time.monotonic() < ends
            time.sleep(0.01)


def test_no_bar_before_it_takes_long(terminal: io.StringIO) -> None:
    began = time.monotonic()
    with progress.progress_bar() as show:
        show("compiling", 0.5)
        said, took_s = terminal.getvalue(), time.monotonic() - began
    assert said == "" or took_s > progress.PATIENCE_S


def test_no_bar_for_what_is_done_at_once(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is stopped: nothing starts the bar later."""
    timers: list[threading.Timer] = []

    def timer(seconds: float, function: Callable[[], None]) -> threading.Timer:
        timers.append(threading.Timer(60.0, function))
        return timers[-1]

    monkeypatch.setattr(progress, "threading", SimpleNamespace(Timer=timer))
    with progress.progress_bar() as show:
        show("compiling", 0.5)
    assert [each.is_alive() for each in timers] == [False]
    assert terminal.getvalue() == ""


def test_no_bar_on_other_ranks(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with progress.progress_bar(shown=False) as show:
        show("compiling", 0.5)
        time.sleep(0.3)
    assert terminal.getvalue() == ""


def test_lines_in_a_file_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    said, ends = "", time.monotonic() + 60
    with progress.progress_bar() as show:
        show("compiling", 0.5)
        while said.count("\n") < 2:
            assert time.monotonic() < ends
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said.startswith("rooftop: 50% done after 0 s: compiling\n")
    time.sleep(0.2)
    capsys.readouterr()
    with progress.progress_bar():  # nothing is known of the activity yet
        while not (said := capsys.readouterr().err):
            assert time.monotonic() < ends
            time.sleep(0.01)
    assert said.startswith("rooftop: working for 0 s\n")
    monkeypatch.setenv("RANK", "1")
    with progress.progress_bar():
        time.sleep(0.1)
    assert capsys.readouterr().err == ""

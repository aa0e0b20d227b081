"""A bar appears where something takes long, also if it says nothing meanwhile, and nowhere else."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from rooftop.cli import progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal on stderr would show; patience is short."""
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80))
    monkeypatch.setattr(progress, "PATIENCE_S", 0.2)
    return screen


def test_the_bar_appears_in_the_midst_of_a_long_call(terminal: io.StringIO) -> None:
    with progress.progress_bar() as show:
        show("compiling", 0.5)
        assert terminal.getvalue() == ""
        time.sleep(0.6)
        assert "compiling" in terminal.getvalue()


def test_no_bar_for_what_is_done_at_once(terminal: io.StringIO) -> None:
    with progress.progress_bar() as show:
        show("compiling", 0.5)
    time.sleep(0.4)
    assert "compiling" not in terminal.getvalue()

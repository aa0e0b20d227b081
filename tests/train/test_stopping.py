"""Requests to save and stop."""

from __future__ import annotations

import os
import signal

import pytest

from rooftop.train.stopping import stop_on_signals


@pytest.mark.usefixtures("ctrl_c_raises")
def test_the_end_of_the_launcher_is_no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """When torchrun dies, its ranks are interrupted. Such a rank must fail, so that the other ranks name it."""
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    with stop_on_signals() as stop:
        monkeypatch.setattr(os, "getppid", lambda: 1 << 30)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert not stop.requested

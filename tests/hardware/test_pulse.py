"""A CPU's pulse: the best of what was taken, beside what the same CPU has reached."""

from __future__ import annotations

import pytest

from rooftop.hardware import pulse as pulses
from rooftop.hardware.pulse import Pulse


def test_each_taking_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.5, 0.1, 0.25, 0.2])
    monkeypatch.setattr(pulses, "_best_s", lambda call: next(seconds))
    pulse = Pulse()
    pulse.take()
    pulse.take()
    assert pulse.rates == {"product": 2 * 1024**3 / 0.25, "read": (64 << 20) / 0.1}


def test_the_slower_of_the_two_is_told() -> None:
    pulse = Pulse()
    assert pulse.share_of({"product": 1.0}) is None
    pulse.rates = {"product": 80.0, "read": 30.0}
    assert pulse.share_of({"product": 100.0, "read": 30.0}) == ("product", 0.8)
    assert pulse.share_of({"product": 100.0, "read": 60.0}) == ("read", 0.5)
    assert pulse.share_of({}) is None  # ceilings of before


def test_it_computes_what_it_counts() -> None:
    """A product of 2 GFLOP takes more than a microsecond, and memory is read."""
    pulse = Pulse()
    pulse.take()
    assert set(pulse.rates) == {"product", "read"}
    assert 1e6 < pulse.rates["product"] < 2 * 1024**3 / 1e-6
    assert 1e6 < pulse.rates["read"] < 1e13

"""A CPU's pulse: the median of the samples, compared with the best of the same CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rooftop.hardware import pulse as pulses
from rooftop.hardware.pulse import Pulse


def taken(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Pulse:
    """A pulse whose samples took this long: product and read alternate."""
    following = iter(seconds)
    monkeypatch.setattr(pulses, "_mean_s", lambda call: next(following))
    pulse = Pulse()
    for _ in range(len(seconds) // 2):
        pulse.take()
    return pulse


def test_one_fast_moment_is_not_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = taken(monkeypatch, 0.5, 0.1, 0.125, 0.2, 0.5, 0.2)
    assert pulse.rates == {"product": 2 * pulses.SIDE**3 / 0.5, "read": pulses.READ_BYTES / 0.2}


def test_the_slower_of_the_two_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pulse().share_of({"product": 1.0}) is None
    pulse = taken(monkeypatch, 1.0, 1.0)
    product, read = 2.0 * pulses.SIDE**3, float(pulses.READ_BYTES)
    assert pulse.share_of({"product": product / 0.8, "read": read}) == ("product", pytest.approx(0.8))
    assert pulse.share_of({"product": product, "read": 2 * read}) == ("read", 0.5)
    assert pulse.share_of({}) is None  # ceilings from before


def test_it_computes_what_it_counts() -> None:
    """The bounds are rates of multiplying and reading that no current processor reaches."""
    pulse = Pulse()
    pulse.take()
    assert set(pulse.rates) == {"product", "read"}
    assert 1e6 < pulse.rates["product"] < 2 * pulses.SIDE**3 / 1e-6
    assert 1e6 < pulse.rates["read"] < 1e13


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_defaults_of_the_program_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pulse uses float32 numbers on the CPU, even if a program has other defaults."""
    seen = []

    def looked_at(call: Callable[[], Tensor]) -> float:
        result = call()
        seen.append((result.dtype, result.device.type))
        return 1.0

    monkeypatch.setattr(pulses, "_mean_s", looked_at)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            Pulse().take()
            assert torch.empty(1).is_meta
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(before)
    assert seen == [(torch.float32, "cpu")] * 2


def test_a_core_that_is_taken_away_now_and_then_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third call takes four times as long as the others, so the average call takes twice as long."""
    now, calls = [0.0], [0]
    monkeypatch.setattr(pulses.time, "perf_counter", lambda: now[0])

    def call() -> None:
        calls[0] += 1
        now[0] += 0.004 if calls[0] % 3 == 0 else 0.001

    assert pulses._mean_s(call) == pytest.approx(0.002)


def test_moments_that_differ_are_told_by_the_worst_of_both_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.1, 0.1, 0.1, 0.2, 0.11, 0.1])  # product and read alternate
    monkeypatch.setattr(pulses, "_mean_s", lambda call: next(seconds))
    pulse = Pulse()
    pulse.take()
    assert pulse.varied is None  # a single sample has no spread
    pulse.take()
    pulse.take()
    assert pulse.varied == ("read", pytest.approx(0.5))  # 1, 0.5 and 1 times its median

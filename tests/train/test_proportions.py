"""Proportions are exact after any number of draws, from any start."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.train.tokens import proportions
from rooftop.train.tokens.proportions import FINEST, Proportions

WHOLE = st.integers(0, 40).map(Fraction)
DECIMAL = st.decimals(0, 1, places=4, allow_nan=False).map(Fraction)
WEIGHTS = st.lists(st.one_of(WHOLE, DECIMAL), min_size=1, max_size=9).filter(any)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_after_every_draw_each_source_has_its_share(weights: list[Fraction]) -> None:
    """Tijdeman's bound, in exact arithmetic."""
    sources, numbers = Proportions(weights).between(0, 200)
    there, total = sum(weight > 0 for weight in weights), sum(weights)
    bound = 1 - Fraction(1, 2 * there - 2) if there > 1 else Fraction(0)
    counts = [0] * len(weights)
    for done, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist(), strict=True), 1):
        assert number == counts[source]
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - weight / total * done) <= bound


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, st.lists(st.tuples(st.integers(0, 600), st.integers(0, 50)), min_size=1, max_size=6))
def test_draws_do_not_depend_on_where_one_begins(weights: list[Fraction], parts: list[tuple[int, int]]) -> None:
    """The draws are read in any order, even backwards, and across the period and stored states."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(proportions, "KEPT", 16)
        sources, numbers = Proportions(weights).between(0, 650)
        again = Proportions(weights)
        for start, count in parts:
            found = again.between(start, start + count)
            np.testing.assert_array_equal(found[0], sources[start : start + count])
            np.testing.assert_array_equal(found[1], numbers[start : start + count])


def test_compiled_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    weights = [Fraction("0.123456789"), Fraction("0.3"), Fraction("0.576543211")]
    plain = Proportions(weights).between(100_000, 101_000)
    monkeypatch.setattr(proportions, "COMPILED", 1 << 10)
    for found, expected in zip(Proportions(weights).between(100_000, 101_000), plain, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_weights_finer_than_any_training_are_rounded() -> None:
    third = Fraction(str(1 / 3))
    odd = Proportions([third, Fraction(1, 7), Fraction(2, 10**17)])
    assert odd.period <= FINEST + 3
    sources, _ = odd.between(0, 1000)
    expected = [float(1000 * weight / (third + Fraction(1, 7))) for weight in (third, Fraction(1, 7))]
    assert np.abs(np.bincount(sources, minlength=3)[:2] - expected).max() < 1


@pytest.mark.parametrize("weights", [[], [Fraction(0)], [Fraction(1), Fraction(-1)]])
def test_weights_that_are_none_are_refused(weights: list[Fraction]) -> None:
    with pytest.raises(ValueError, match="expected weights of 0 or more, not all 0"):
        Proportions(weights)

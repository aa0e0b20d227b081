"""Draw from several sources in exact proportions: after n draws, the number of draws from each source differs from n
times the source's share by less than one.

Let the k sources have weights w_i that sum to 1. Source i gets c_i of the first n draws, with |c_i - w_i n| <= 1 - 1 /
(2k - 2). No smaller bound holds for all weights. Each draw considers the sources that stay within the bound if they are
drawn. Among these sources, the draw selects the source that would fall below the bound first if it were not drawn.
Source: Tijdeman 1980, "The chairman assignment problem".

Integer arithmetic avoids accumulated rounding. The period of the draws is the common denominator of the weights.
Weights whose common denominator exceeds `FINEST` are rounded first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rooftop.launch.numba_loops import numba_works

FINEST = 1 << 50  # weights are rounded to multiples of (their sum / FINEST), an error of about 1e-15 of the sum
KEPT = 1 << 16  # number of draws between two stored states
COMPILED = 1 << 20  # minimum number of draws for which numba compiles the loop; compilation takes a second

Ints = NDArray[np.int64]


class Proportions:
    """Determines the source of each draw, and the number of earlier draws from this source.

    Args:
        weights: weights of the sources, 0 or more; at least one is positive. Only the ratios of the weights matter.

    Raises:
        ValueError: a weight is negative, or all weights are 0.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        if not weights or min(weights) < 0 or sum(weights) == 0:
            raise ValueError(f"Proportions: expected weights of 0 or more, not all 0, got {[*map(float, weights)]}")
        parts = _whole(weights)
        self.period = sum(parts)
        self._sources = [number for number, part in enumerate(parts) if part]
        self._parts = [parts[number] for number in self._sources]
        self._each = np.array(parts)
        none = [0] * len(self._parts)
        self._kept: list[tuple[list[int], list[int]]] = [(none, none)]  # states after every KEPT draws of a period
        self._last = (0, none, none)

    def between(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """For the draws `start` to `stop - 1`, return the number of the source that each draw takes, and how many
        earlier draws took the same source."""
        if len(self._parts) == 1:
            return np.full(stop - start, self._sources[0]), np.arange(start, stop)
        sources, numbers = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        at = start
        while at < stop:
            turn, first = divmod(at, self.period)
            count = min(stop - at, self.period - first)
            place = slice(at - start, at - start + count)
            sources[place], numbers[place] = self._within_period(first, count)
            numbers[place] += turn * self._each[sources[place]]
            at += count
        return sources, numbers

    def _within_period(self, first: int, count: int) -> tuple[Ints, Ints]:
        at, behind, drawn = self._state_before(first)
        while at < first:
            step = min(KEPT - at % KEPT, first - at)
            behind, drawn, _, _ = self._draw(behind, drawn, step, first - at)
            at += step
            if at == len(self._kept) * KEPT:
                self._kept.append((behind, drawn))
        behind, drawn, which, numbers = self._draw(behind, drawn, count, count)
        self._last = (first + count, behind, drawn)
        return np.array(self._sources)[which], numbers

    def _state_before(self, first: int) -> tuple[int, list[int], list[int]]:
        """The latest stored state at or before draw `first`: the number of draws so far, the list `behind` for
        `_draws`, and the number of draws of each source."""
        kept = min(first // KEPT, len(self._kept) - 1)
        if kept * KEPT <= self._last[0] <= first:
            return self._last
        return (kept * KEPT, *self._kept[kept])

    def _draw(
        self, behind: list[int], drawn: list[int], count: int, all_of: int
    ) -> tuple[list[int], list[int], Ints, Ints]:
        """Draw `count` times. Return the new `behind` and `drawn`, the source of each draw as an index in `_parts`, and
        the source's number of earlier draws.

        `all_of` is the number of draws in this call and in the later calls of the loop in `_within_period`. If it is at
        least `COMPILED`, numba compiles `_draws`.
        """
        which, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        if all_of >= COMPILED and numba_works():
            state = np.array([behind, drawn])
            _compiled_draws()(np.array(self._parts), *state, self.period, which, numbers)
            return state[0].tolist(), state[1].tolist(), which, numbers
        behind, drawn = list(behind), list(drawn)
        _draws(self._parts, behind, drawn, self.period, which, numbers)
        return behind, drawn, which, numbers


def _whole(weights: Sequence[Fraction]) -> list[int]:
    """Convert weights to the smallest integers with the same ratios. If a weight is too fine for integers with a sum of
    `FINEST`, the integers are rounded, and their sum is about `FINEST`."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    common = math.lcm(*(share.denominator for share in shares))
    if common > FINEST:
        return [max(1, round(share * FINEST)) if share else 0 for share in shares]
    parts = [int(share * common) for share in shares]
    factor = math.gcd(*parts)
    return [part // factor for part in parts]


def _draws(parts, behind, drawn, period, which, numbers):  # type: ignore[no-untyped-def]
    """Write the source of each draw to `which`, and the source's number of earlier draws to `numbers`.

    `behind` says how many draws each source is behind its share, in units of 1 / `period`.
    """
    sources = len(parts)
    least = -(-period // (2 * sources - 2))  # a source must be at least this far behind to be drawn
    most = period - least
    for place in range(len(which)):
        found, soonest = -1, 0
        for source in range(sources):
            behind[source] += parts[source]
            if behind[source] >= least:
                # number of draws that other sources may get before this source
                left = (most - behind[source]) // parts[source]
                if found < 0 or left < soonest:
                    found, soonest = source, left
        behind[found] -= period
        which[place], numbers[place] = found, drawn[found]
        drawn[found] += 1


@cache
def _compiled_draws() -> Callable[..., None]:
    from rooftop.launch.numba_loops import kept_loop

    return kept_loop(_draws)

"""Rows of different lengths, one after the other in one array: their starts, their sums, their extremes, and numbers
for their items."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

DENSE = 8  # with up to this many possible values per given value, marking is faster than sorting


def starts_of(counts: npt.ArrayLike) -> Counts:
    """The start of each row, and the end of the last: (N + 1,)."""
    counts = np.asarray(counts, np.int64)
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def within(counts: npt.ArrayLike) -> Counts:
    """The index of each element in its row."""
    counts = np.asarray(counts, np.int64)
    starts = starts_of(counts)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def taken(starts: npt.ArrayLike, counts: npt.ArrayLike) -> Counts:
    """The indices of the elements of rows that start at `starts`, row by row."""
    counts = np.asarray(counts, np.int64)
    return np.repeat(np.asarray(starts, np.int64), counts) + within(counts)


def rows_of(counts: npt.ArrayLike) -> Counts:
    """The row of each element."""
    counts = np.asarray(counts, np.int64)
    return np.repeat(np.arange(len(counts)), counts)


def lowest(values: Numbers, starts: Counts) -> Numbers:
    """The lowest value of each row; no row may be empty."""
    return np.minimum.reduceat(values, starts[:-1], axis=0)


def highest(values: Numbers, starts: Counts) -> Numbers:
    """The highest value of each row; no row may be empty."""
    return np.maximum.reduceat(values, starts[:-1], axis=0)


def numbered(values: Numbers, below: int) -> tuple[Numbers, npt.NDArray[np.uint32]]:
    """The distinct values, ascending, and for each value its index among them.

    Args:
        values: integers of at least 0.
        below: upper bound of the values.
    """
    if below <= DENSE * values.size:
        there = np.zeros(below, bool)
        there[values] = True
        return np.flatnonzero(there).astype(values.dtype), (np.cumsum(there, dtype=np.uint32) - np.uint32(1))[values]
    ordered = np.sort(values, axis=None)
    if len(ordered):
        ordered = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
    return ordered, np.searchsorted(ordered, values).astype(np.uint32)

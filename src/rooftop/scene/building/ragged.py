"""Ragged arrays: rows of different lengths, concatenated in one array. Functions compute starts, indices, extremes and
distinct values of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.compiled import INT, array, loop, output

Numbers = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]


def starts_of(counts: npt.ArrayLike) -> Counts:
    """The start of each row and the end of the last, (N + 1,), from the rows' lengths."""
    counts = np.asarray(counts, np.int64)
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def within(counts: npt.ArrayLike) -> Counts:
    """For rows of these lengths, the index of each element in its row."""
    counts = np.asarray(counts, np.int64)
    starts = starts_of(counts)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def taken(starts: npt.ArrayLike, counts: npt.ArrayLike) -> Counts:
    """The indices of the elements of rows that start at `starts` and have `counts` elements, row by row."""
    counts = np.asarray(counts, np.int64)
    return np.repeat(np.asarray(starts, np.int64), counts) + within(counts)


def gathered(items: npt.NDArray[np.uint32], starts: Counts, counts: Counts) -> npt.NDArray[np.uint32]:
    """The items (N, 3) of rows that start at `starts` and have `counts` items, row by row."""
    found = np.empty((int(counts.sum()), 3), np.uint32)
    _gather(items, starts, counts, found)
    return found


@loop(array("uint32", 2), array("int64"), array("int64"), output("uint32", 2))
def _gather(items, starts, counts, found):  # type: ignore[no-untyped-def]
    at = 0
    for row in range(len(starts)):
        for item in range(starts[row], starts[row] + counts[row]):
            found[at, 0], found[at, 1], found[at, 2] = items[item, 0], items[item, 1], items[item, 2]
            at += 1


def rows_of(counts: npt.ArrayLike) -> Counts:
    """For rows of these lengths, the row of each element."""
    counts = np.asarray(counts, np.int64)
    return np.repeat(np.arange(len(counts)), counts)


def lowest(values: Numbers, starts: Counts) -> Numbers:
    """The minimum of each row; no row may be empty."""
    return np.minimum.reduceat(values, starts[:-1], axis=0)


def highest(values: Numbers, starts: Counts) -> Numbers:
    """The maximum of each row; no row may be empty."""
    return np.maximum.reduceat(values, starts[:-1], axis=0)


def numbered(values: Numbers, below: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The distinct values, ascending, and the index of each value among these.

    Args:
        values: integers from 0 to 2^32 - 1.
        below: exclusive upper bound of the values.
    """
    distinct, _, index = numbered_by_row(values, np.array([0, values.size]), below)
    return distinct, index


def numbered_by_row(
    values: Numbers, starts: Counts, below: int
) -> tuple[npt.NDArray[np.uint32], Counts, npt.NDArray[np.uint32]]:
    """Apply `numbered` to each row: return the distinct values row by row, their starts (R + 1,), and the index of each
    value among its row's distinct values.

    Args:
        values: integers from 0 to 2^32 - 1.
        starts: (R + 1,) the start of each row among all values.
        below: exclusive upper bound of the values.
    """
    flat = np.ascontiguousarray(values, np.uint32).reshape(-1)
    distinct, firsts = np.empty(len(flat), np.uint32), np.zeros(len(starts), np.int64)
    index = np.empty(len(flat), np.uint32)
    _number(flat, starts, below, distinct, firsts, index)
    return distinct[: firsts[-1]].copy(), firsts, index.reshape(values.shape)


@loop(INT, result=INT)
def _ones(word):  # type: ignore[no-untyped-def]
    """The number of set bits among the lower 32 bits."""
    word -= word >> 1 & 0x55555555
    word = (word & 0x33333333) + (word >> 2 & 0x33333333)
    word = word + (word >> 4) & 0x0F0F0F0F
    return (word * 0x01010101 & 0xFFFFFFFF) >> 24


@loop(array("uint32"), array("int64"), INT, output("uint32"), output("int64"), output("uint32"))
def _number(values, starts, below, distinct, firsts, index):  # type: ignore[no-untyped-def]
    """The loop of `numbered_by_row`: it sets a bit for each value that occurs, and counts the set bits before each word
    of 32 bits.

    Args:
        distinct, firsts, index: outputs.
    """
    words = (below >> 5) + 1
    bits, before = np.zeros(words, np.uint32), np.empty(words, np.uint32)
    count = 0
    for row in range(len(starts) - 1):
        first = count
        for at in range(starts[row], starts[row + 1]):
            bits[values[at] >> 5] |= np.uint32(1 << (values[at] & 31))
        for word in range(words):
            before[word] = count - first
            left = np.int64(bits[word])
            while left:
                lowest_bit = left & -left
                distinct[count] = word << 5 | _ones(lowest_bit - 1)
                count += 1
                left ^= lowest_bit
        for at in range(starts[row], starts[row + 1]):
            word = values[at] >> 5
            index[at] = before[word] + _ones(bits[word] & (1 << (values[at] & 31)) - 1)
        for at in range(starts[row], starts[row + 1]):
            bits[values[at] >> 5] = 0
        firsts[row + 1] = count

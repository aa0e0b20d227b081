"""Detect the integer type of a token file without a header, from a sample of its numbers.

If 32-bit tokens are read as 16-bit numbers, every second number is the upper half of a token: 0, or a small number for
vocabularies above 65,536. At the right width, numbers at even and odd positions have the same distribution. So the
ratio of the means at odd and even positions decides:

| two neighbouring numbers are | mean at odd positions divided by mean at even positions |
|---|---|
| two halves of one number | below 1/64: with 256 thousand tokens, the upper half of a token is at most 3 |
| two separate numbers | near 1: from 1/4 to 4 |

Any other ratio raises an error. Bytes and big-endian numbers also raise errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.errors import InputError

KINDS: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}
PLACES, LOOKED_AT = 64, 8192  # samples per file, and bytes per sample (a multiple of the size of the widest number)
# Limits of the ratio in the table above: below UPPER_HALF, two neighbours are halves of one number; from NEIGHBOUR to
# 1 / NEIGHBOUR, they are separate numbers.
UPPER_HALF, NEIGHBOUR = 1 / 64, 1 / 4
TEXT_BYTES = 64  # in this many bytes, 16-bit tokens nearly always contain a zero or invalid UTF-8
# BYTE_PAIRS: minimum number of pairs of bytes to compare two distributions. BYTE_VALUES: maximum number of different
# byte values in text. SAME: maximum distance of two distributions that count as the same.
BYTE_PAIRS, BYTE_VALUES, SAME = 1 << 11, 224, 0.1


def found_kind(path: Path) -> str:
    """Detect the integer type of a file without a header; returns a name in `KINDS`: uint16, uint32 or int64.

    Raises:
        InputError: the type is ambiguous, the file is text or bytes, or the numbers are big-endian.
    """
    size = path.stat().st_size
    sample = _sample(path, size)
    if _is_text(sample):
        raise InputError(f"{path} is text, not numbers: rename it to .txt, or give --token-dtype if these are tokens")
    if size % 2:
        raise InputError(
            f"{path} has {size} bytes, which is not a whole number of 16-bit tokens: expected tokens of 16, 32 or 64 "
            "bits, or --token-dtype uint8"
        )
    halves = _mean_ratio(sample.view("<u2"), path, "uint16 or uint32") if size % 4 == 0 else 1.0
    if halves >= NEIGHBOUR:
        _check_bytes(sample, path)
        return "uint16"
    words = _mean_ratio(sample.view("<u4"), path, "uint32 or int64") if size % 8 == 0 else 1.0
    return "uint32" if words >= NEIGHBOUR else "int64"


def _sample(path: Path, size: int) -> NDArray[np.uint8]:
    """Read some bytes at several evenly spaced offsets of a file of `size` bytes; the offsets are multiples of 8. A
    small file is read completely."""
    if size <= PLACES * LOOKED_AT:
        return np.fromfile(path, np.uint8)
    whole = np.memmap(path, np.uint8, mode="r")
    starts = (8 * round((size - LOOKED_AT) // 8 * part / (PLACES - 1)) for part in range(PLACES))
    return np.concatenate([whole[start : start + LOOKED_AT] for start in starts])


def _mean_ratio(halves: NDArray[Any], path: Path, candidates: str) -> float:
    """Ratio of the mean at odd positions to the mean at even positions. A ratio below `NEIGHBOUR` means that two
    neighbours are the halves of one number.

    Raises:
        InputError: the ratio is neither near 0 nor near 1.
    """
    if not len(halves):
        return 1.0
    halves = halves[: len(halves) // 2 * 2]
    lower, upper = float(halves[::2].mean(dtype=float)), float(halves[1::2].mean(dtype=float))
    if lower and (upper < UPPER_HALF * lower or NEIGHBOUR * lower <= upper <= lower / NEIGHBOUR):
        return upper / lower
    what = "all of it is 0" if not (lower or upper) else "it may be big-endian" if upper > lower else "too few or mixed"
    raise InputError(
        f"{path} has no header, and its numbers could be {candidates} ({what}): choose one with --token-dtype: "
        f"{', '.join(KINDS)}, little-endian"
    )


def _is_text(sample: NDArray[np.uint8]) -> bool:
    start = sample[:LOOKED_AT].tobytes()
    if len(start) < TEXT_BYTES or b"\0" in start:
        return False
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"  # the sample may end within a character
    return True


def _check_bytes(sample: NDArray[np.uint8], path: Path) -> None:
    """Raise InputError for 8-bit numbers and big-endian numbers.

    Even and odd bytes of 8-bit numbers have the same distribution. The first byte of a big-endian number is the upper
    byte.
    """
    lower, upper = sample[::2], sample[1::2]
    if upper.any() and not lower.any():
        raise InputError(
            f"all numbers of {path} are multiples of 256, as in a big-endian file: expected little-endian tokens"
        )
    if len(upper) < BYTE_PAIRS or len(np.unique(sample)) > BYTE_VALUES:
        return
    shares = [np.bincount(half, minlength=256) / len(half) for half in (lower, upper)]
    if np.abs(shares[0] - shares[1]).sum() / 2 < SAME and upper.any():
        raise InputError(
            f"{path} has no header, and its numbers look like bytes: give --token-dtype uint8, or uint16 if they "
            "have 16 bits"
        )

"""How wide the numbers in a file of tokens are, found by looking at some of them: a file of numbers alone says nothing.

Tokens of 32 bits, read as 16, are every second time the upper half of a token: 0, or the little that a vocabulary has
above 65,536. Read rightly, every place of a row is like its neighbours. So the means of even and odd places tell:

| of each pair of halves | mean of the upper by that of the lower |
|---|---|
| one number of twice the width | below 1/64: a vocabulary of 256 thousand tokens has an upper half of 3 at most |
| two numbers | near 1 |

What lies between is refused, and so are bytes and numbers in the order of other processors.
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
PLACES, LOOKED_AT = 64, 8192  # of a file; bytes at each, a multiple of the widest number
UPPER_HALF, NEIGHBOUR = 1 / 64, 1 / 4  # ratios of means, as above
TEXT_BYTES = 64  # of tokens of 16 bits as many hardly ever have no zero and are UTF-8
BYTE_PAIRS, BYTE_VALUES, SAME = 1 << 11, 224, 0.1  # enough to compare two distributions; of bytes of text; how close


def found_kind(path: Path) -> str:
    """The name in `KINDS` of what a file of numbers without a header holds: uint16, uint32 or int64.

    Raises:
        InputError: it cannot be told, or it is text or bytes, or the numbers are big-endian.
    """
    size = path.stat().st_size
    sample = _sample(path, size)
    if _is_text(sample):
        raise InputError(f"{path} is text, not numbers: call it .txt, or give --token-dtype if these are tokens")
    if size % 2:
        raise InputError(
            f"{path} has {size} bytes, which is no whole number of 16-bit tokens: expected tokens of 16, 32 or 64 "
            "bits, or --token-dtype uint8"
        )
    halves = _mean_ratio(sample.view("<u2"), path, "uint16 and uint32") if size % 4 == 0 else 1.0
    if halves >= NEIGHBOUR:
        _check_bytes(sample, path)
        return "uint16"
    words = _mean_ratio(sample.view("<u4"), path, "uint32 and int64") if size % 8 == 0 else 1.0
    return "uint32" if words >= NEIGHBOUR else "int64"


def _sample(path: Path, size: int) -> NDArray[np.uint8]:
    """Bytes from all over a file, at places that are multiples of 8; all of a small one."""
    if size <= PLACES * LOOKED_AT:
        return np.fromfile(path, np.uint8)
    whole = np.memmap(path, np.uint8, mode="r")
    starts = (8 * round((size - LOOKED_AT) // 8 * part / (PLACES - 1)) for part in range(PLACES))
    return np.concatenate([whole[start : start + LOOKED_AT] for start in starts])


def _mean_ratio(halves: NDArray[Any], path: Path, candidates: str) -> float:
    """The mean of odd places by that of even ones: below `NEIGHBOUR` they are halves of one number.

    Raises:
        InputError: it is neither near 0 nor near 1.
    """
    if not len(halves):
        return 1.0
    halves = halves[: len(halves) // 2 * 2]
    lower, upper = float(halves[::2].mean(dtype=float)), float(halves[1::2].mean(dtype=float))
    if lower and (upper < UPPER_HALF * lower or NEIGHBOUR * lower <= upper <= lower / NEIGHBOUR):
        return upper / lower
    what = "all of it is 0" if not (lower or upper) else "it may be big-endian" if upper > lower else "too few or mixed"
    raise InputError(
        f"{path} has no header, and its numbers could be {candidates} ({what}): say which with --token-dtype, as one "
        f"of {', '.join(KINDS)}, little-endian"
    )


def _is_text(sample: NDArray[np.uint8]) -> bool:
    start = sample[:LOOKED_AT].tobytes()
    if len(start) < TEXT_BYTES or b"\0" in start:
        return False
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"  # cut within a letter
    return True


def _check_bytes(sample: NDArray[np.uint8], path: Path) -> None:
    """Refuse what looks like 8-bit numbers, of which both halves of a pair are distributed alike, and big-endian
    ones, whose first byte is the upper one."""
    lower, upper = sample[::2], sample[1::2]
    if upper.any() and not lower.any():
        raise InputError(f"{path} has multiples of 256 alone: big-endian numbers? Expected little-endian tokens")
    if len(upper) < BYTE_PAIRS or len(np.unique(sample)) > BYTE_VALUES:
        return
    shares = [np.bincount(half, minlength=256) / len(half) for half in (lower, upper)]
    if np.abs(shares[0] - shares[1]).sum() / 2 < SAME and upper.any():
        raise InputError(
            f"{path} has no header, and its numbers look like bytes: say --token-dtype uint8, or uint16 if they are of "
            "16 bits"
        )

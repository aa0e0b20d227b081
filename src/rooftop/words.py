"""Text for messages and reports: counts, one-line errors, the time, and suggestions for misspelt names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from difflib import SequenceMatcher

MOST_MEANT = 3
"""Largest number of names that are suggested because they begin with the given word."""


def counted(count: int, what: str) -> str:
    """Return a number with its noun, such as "1 graph" or "2 graphs"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def first_line(error: object) -> str:
    """The first line of an error's message, without the C++ source location that PyTorch adds.

    If the first line ends with a colon, the next line is appended, because dynamo puts the compiler's error there.
    """
    first, *rest = [line.strip() for line in _message(error).splitlines() if line.strip()] or [""]
    first = re.sub(r"^\[[^]]*\.(cc|cpp|h|hpp):\d+\] ", "", first)
    return f"{first} {rest[0]}" if first.endswith(":") and rest else first


def whole_message(error: object) -> str:
    """The whole message of an error, in one line."""
    return " ".join(_message(error).split())


def _message(error: object) -> str:
    """The message of an error, with backslash escapes for characters that UTF-8 cannot encode."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # raised by `__str__` of a user's class
        return "<it cannot be printed>"


def in_a_line(error: object) -> str:
    """An error's type, and the first line of its message: "ValueError: expected 3 channels, got 4"."""
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


def utc_now() -> str:
    """The current time in ISO 8601, such as "2026-01-31T23:59:59Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """Suggest the nearest names at the end of a message, as in " (did you mean resnet50?)"; "" if no name is near."""
    near = nearest(given, names)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def nearest(given: object, names: Iterable[str]) -> list[str]:
    """Find the names with the fewest typing errors relative to the given word; none if all names have too many.

    Case, hyphens and underscores are ignored. A word of n characters may have up to max(1, 2 n // 5) errors. Among
    equally near names, the name that shares more characters with the word is returned. If the word is no name, but is
    the beginning of names, the first three of these names, in the given order, are returned instead.
    """
    word = _plain(str(given))
    known = list(dict.fromkeys(names))
    errors = {name: _typing_errors(word, _plain(name)) for name in known}
    least = min(errors.values(), default=0)
    beginning = [name for name in known if word and _plain(name).startswith(word)]
    if least > 0 and beginning:
        return beginning[:MOST_MEANT]
    near = [name for name in known if word and errors[name] == least <= max(1, 2 * len(word) // 5)]
    return [max(near, key=lambda name: (SequenceMatcher(None, word, _plain(name)).ratio(), name))] if near else []


def _plain(word: str) -> str:
    return word.casefold().replace("-", "").replace("_", "")


def _typing_errors(a: str, b: str) -> int:
    """Count missing, extra and wrong characters, and swapped neighbours (Damerau 1964)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, above, row = row, before, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and (x, a[i - 2]) == (b[j - 2], y):
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]

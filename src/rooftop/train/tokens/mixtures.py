"""Mix several rows of tokens (data sets), each with its share of the sequences.

    mixture = open_mixture(["0.7", "books/", "0.3", "code.bin"])    # as in Megatron-LM's --data-path
    mixture = open_mixture(["books/", "code.bin"])                  # weighted by their numbers of sequences

The weights alone determine which row each sequence comes from (`proportions`). After n sequences, the number of
sequences from each row differs from n times the row's share by less than one. When all sequences of a row have been
read, the row starts again in a new order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from rooftop.errors import InputError
from rooftop.train.tokens.tokens import Progress, Tokens, open_tokens
from rooftop.user_paths import user_path

OPTION = "--data-path"
WEIGHT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|[-+]?(nan|inf|infinity)$", re.IGNORECASE)


class Mixture:
    """Rows of tokens (data sets) and their weights.

    Args:
        rows: the rows of the mixture, at least one. Either all rows are text, or all have tokens of the same
            vocabulary.
        weights: weights of the rows, 0 or more; only their ratios matter. None: the number of sequences of each row, so
            that a pass reads every sequence once.

    Attributes:
        source, text, vocabulary, kind: see `Tokens`.

    Raises:
        InputError: text is mixed with other tokens, or vocabularies differ.
        ValueError: the numbers of weights and rows differ, or `checked_weights` rejects the weights.
    """

    def __init__(self, rows: Sequence[Tokens], weights: Sequence[float | Fraction] | None = None) -> None:
        if not rows or (weights is not None and len(weights) != len(rows)):
            given = "no" if weights is None else len(weights)
            raise ValueError(f"Mixture: expected a weight for each row, got {len(rows)} rows and {given} weights")
        self.rows = list(rows)
        self.weights = None if weights is None else checked_weights(weights)
        self.text = self.rows[0].text
        if any(row.text != self.text for row in rows):
            text, others = ([row.source for row in rows if row.text == kind] for kind in (True, False))
            raise InputError(
                f"{', '.join(text)} is text, so its tokens are bytes, but {', '.join(others)} has other tokens: "
                "tokenize the text first"
            )
        known = {row.vocabulary: row.source for row in rows if row.vocabulary is not None}
        if len(known) > 1:
            said = ", ".join(f"{size} in {source}" for size, source in known.items())
            raise InputError(f"the tokens have different vocabularies ({said}): use one tokenizer for all")
        self.vocabulary = next(iter(known), None)

    @property
    def source(self) -> str:
        if self.weights is None:
            return " + ".join(row.source for row in self.rows)
        pairs = zip(self.weights, self.rows, strict=True)
        return " + ".join(f"{float(weight):g} {row.source}" for weight, row in pairs)

    @property
    def kind(self) -> str:
        return " and ".join(dict.fromkeys(row.kind for row in self.rows))

    def __len__(self) -> int:
        """The number of tokens in all rows of the mixture together."""
        return sum(map(len, self.rows))

    def shares(self, sequences: Sequence[int]) -> list[Fraction]:
        """The shares of the rows, which sum to 1.

        Args:
            sequences: the number of sequences of each row; without weights, the shares are proportional to these
                numbers.
        """
        weights = [Fraction(count) for count in sequences] if self.weights is None else self.weights
        total = sum(weights)
        return [weight / total for weight in weights]

    def fingerprint(self) -> str:
        """Fingerprint of the rows and their weights."""
        digest = blake2b(digest_size=16)
        for number, row in enumerate(self.rows):
            digest.update(f"{row.fingerprint()} {self.weights and self.weights[number]}\n".encode())
        return digest.hexdigest()

    def check_vocabulary(self, vocabulary: int, progress: Progress = lambda what, fraction: None) -> None:
        """Check the tokens of each row with `Tokens.check_vocabulary`."""
        for row in self.rows:
            row.check_vocabulary(vocabulary, progress)


def open_mixture(words: Sequence[str], kind: str | None = None, option: str = OPTION) -> Tokens | Mixture:
    """Open the tokens of several files or folders.

    Args:
        words: paths, either each after its weight or all without weights; `rooftop.train.open_tokens` describes paths.
        kind: see `open_tokens`.
        option: name of the command-line option in error messages.

    Returns:
        `Tokens` for one path, a `Mixture` for several.

    Raises:
        InputError: there is no path, a weight has no path, only some paths have weights, or `checked_weights` or
            `open_tokens` raises. Weights are checked before any file is read.
    """
    if not words:
        raise InputError(f"{option} is empty: expected a path, or several paths, each after its weight or all without")
    paths, weights = _pairs(words, option)
    try:
        checked = None if weights is None else checked_weights([_number(each) for each in weights])
    except ValueError as error:
        raise InputError(f"{option} {' '.join(words)}: {error}") from error
    rows = [open_tokens(path, kind) for path in paths]
    return rows[0] if len(rows) == 1 else Mixture(rows, checked)


def paths_of(words: Sequence[str], option: str = OPTION) -> list[Path]:
    """List the paths in these words, each with the .bin and .idx files that `open_mixture` may read instead. Files in
    folders are not listed. No path is read, and a path need not exist.

    Raises:
        InputError: a weight has no path, or only some paths have weights.
    """
    paths, _ = _pairs(words, option)
    return [Path(f"{path}{end}") for path in paths for end in ("", ".bin", ".idx")] + [
        path.with_suffix(end) for path in paths if path.suffix in (".bin", ".idx") for end in (".bin", ".idx")
    ]


def checked_weights(weights: Sequence[float | Fraction]) -> list[Fraction]:
    """Check weights, and convert them to exact decimal fractions: 0.1 becomes 1/10.

    Raises:
        ValueError: a weight is negative or not finite, or all weights are 0.
    """
    for weight in weights:
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"a weight must be finite and 0 or more, got {float(weight):g}")
    found = [weight if isinstance(weight, Fraction) else Fraction(str(weight)) for weight in weights]
    if not any(found):
        raise ValueError("all weights are 0: expected at least one above 0")
    return found


def _number(word: str) -> float | Fraction:
    """Parse a number exactly; a number that is not finite becomes a float."""
    try:
        return Fraction(word)
    except ValueError:
        return float(word)


def _pairs(words: Sequence[str], option: str) -> tuple[list[Path], list[str] | None]:
    """Split an option's words, such as 0.7 A 0.3 B, into paths and weights. The weights are None if no path has a
    weight."""
    given = [bool(WEIGHT.match(word)) for word in words]
    said = f"{option} {' '.join(words)}"
    if not any(given) or (len(words) == 1 and Path(words[0]).exists()):
        return [user_path(word) for word in words], None
    if given[-1] or any(map(all, pairwise(given))):
        at = next(n for n, weight in enumerate(given) if weight and (n + 1 == len(words) or given[n + 1]))
        raise InputError(
            f"{said}: the weight {words[at]} has no path: expected a path after each weight, as 0.7 A 0.3 B (for a "
            f"file of that name write ./{words[at]})"
        )
    if given != [True, False] * (len(words) // 2):
        at = next(n for n, weight in enumerate(given) if not weight and (n == 0 or not given[n - 1]))
        raise InputError(
            f"{said}: {words[at]} has no weight, but other paths have: expected a weight before each path, as in 0.7 "
            "A 0.3 B, or none"
        )
    return [user_path(word) for word in words[1::2]], [*words[::2]]

"""Open training data as one long row of tokens: numbers, or text whose bytes are tokens.

| path | tokens |
|---|---|
| `.bin` | integers, whose dtype comes from Megatron-LM's index, llm.c's header, or detection (`token_files`) |
| `.idx`, or the common name without `.bin` and `.idx` | Megatron-LM's pair of `.bin` and `.idx` |
| `.npy` | a NumPy array of integers with one dimension |
| `.parquet`, `.arrow`, a folder of these | a data set of Hugging Face (`token_tables`) |
| another file | its bytes: text, 256 tokens |
| another folder | the bytes of all text files in the folder, in the order of their paths; hidden files are left out |

Large files are memory-mapped: the operating system reads tokens from the disk when they are used, and caches the tokens
if they fit in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.train.tokens.number_widths import KINDS
from rooftop.train.tokens.token_files import Integers, Numbers, array_numbers, binary_numbers, mapped
from rooftop.train.tokens.token_tables import is_table, table_rows
from rooftop.user_paths import user_path
from rooftop.words import counted

BYTES = 256
"""Vocabulary size of text, whose tokens are bytes."""
PEEKED_BYTES = 8192  # a file is text if its first bytes contain no zero; git checks about as many bytes
SCANNED = 1 << 24  # number of tokens that are checked at a time
PLACES, LOOKED_AT = 256, 64  # number of samples in a fingerprint, and tokens per sample
NUMBERS = (".bin", ".npy")
EXPECTED = "expected a file of tokens (.bin, .npy, .parquet, .arrow), text, or a folder"

Progress = Callable[[str, float], None]


class Tokens:
    """A row of tokens.

    Args:
        parts: 1-D arrays, whose concatenation is the row.
        source: name of the data in error messages.
        text: whether tokens are bytes.
        vocabulary: vocabulary size; None: unknown, or 256 for text.
    """

    def __init__(
        self, parts: Sequence[Integers], source: str, text: bool = False, vocabulary: int | None = None
    ) -> None:
        self.parts, self.source, self.text = list(parts), source, text
        self.vocabulary = BYTES if text else vocabulary
        self._ends = list(accumulate(len(part) for part in self.parts))

    @property
    def kind(self) -> str:
        """ "text", or the names of the numbers' dtypes."""
        return "text" if self.text else " and ".join(sorted({part.dtype.name for part in self.parts})) or "nothing"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Tensor:
        """Read tokens `start` to `stop - 1`, as int64.

        Raises:
            IndexError: there are fewer than `stop` tokens.
        """
        self._check_range(start, stop)
        found = np.empty(stop - start, np.int64)
        at, place = start, bisect_right(self._ends, start)
        while at < stop:
            first = self._ends[place] - len(self.parts[place])
            end = min(stop, self._ends[place])
            found[at - start : end - start] = self.parts[place][at - first : end - first]
            at, place = end, place + 1
        return torch.from_numpy(found)

    def part(self, start: int, stop: int, name: str) -> Tokens:
        """Return tokens `start` to `stop - 1` without a copy; `name` names this part in error messages.

        Raises:
            IndexError: there are fewer than `stop` tokens.
        """
        self._check_range(start, stop)
        spans = zip([0, *self._ends], self.parts, strict=False)
        pieces = [part[max(0, start - first) : max(0, stop - first)] for first, part in spans]
        source = f"{self.source} ({name})"
        return Tokens([piece for piece in pieces if len(piece)], source, self.text, self.vocabulary)

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(
                f"{self.source} has {counted(len(self), 'token')}: expected 0 <= start <= stop <= {len(self)}, got "
                f"{start} and {stop}"
            )

    def fingerprint(self) -> str:
        """A hash of the number of tokens and of a sample of the tokens.

        Different data almost surely have different hashes, unless the data differ in only a few tokens.
        """
        digest = blake2b(str(len(self)).encode(), digest_size=16)
        last = max(0, len(self) - LOOKED_AT)
        for start in sorted({round(last * part / (PLACES - 1)) for part in range(PLACES)}):
            digest.update(self.read(start, min(start + LOOKED_AT, len(self))).numpy().tobytes())
        return digest.hexdigest()

    def check_vocabulary(self, vocabulary: int, progress: Progress = lambda what, fraction: None) -> None:
        """Check that a vocabulary contains all tokens.

        The check reads all data, unless the integer type cannot represent tokens beyond the vocabulary.

        Raises:
            InputError: a token is outside the vocabulary.
        """
        done = 0
        for part in self.parts:
            bounds = np.iinfo(part.dtype)
            if bounds.min >= 0 and bounds.max < vocabulary:
                continue
            for start in range(0, len(part), SCANNED):
                chunk = part[start : start + SCANNED]
                least, most = int(chunk.min()), int(chunk.max())
                if least < 0 or most >= vocabulary:
                    wrong = least if least < 0 else most
                    raise InputError(
                        f"{self.source} has the token {wrong}, but in a vocabulary of {vocabulary}, tokens are 0 to "
                        f"{vocabulary - 1}: "
                        + (
                            f"for text, use a vocabulary of at least {BYTES}"
                            if self.text
                            else "enlarge the vocabulary, or check the integer type of the file"
                        )
                    )
                done += len(chunk)
                progress("checking the tokens", done / len(self))


def open_tokens(path: str | Path, kind: str | None = None) -> Tokens:
    """Open the tokens of a file or folder.

    Args:
        path: see the table at the top of this file.
        kind: integer type of a `.bin` file that does not state the type: "uint8", "uint16", "uint32", "int32" or
            "int64", little-endian. None: detected.

    Raises:
        InputError: the path does not exist, or has neither tokens nor text.
        InputError: the integer type of a `.bin` file cannot be detected, or the type that the file states differs from
            `kind`.
        MissingExtraError: the path is a data set of Hugging Face, and `datasets` is not installed.
        ValueError: `kind` is unknown.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"open_tokens: kind must be one of {', '.join(KINDS)} or None, got {kind!r}")
    path = _data_of_index(user_path(path))
    if path.suffix in NUMBERS and path.is_file():
        read: Callable[[Path, str | None], Numbers] = binary_numbers if path.suffix == ".bin" else array_numbers
        numbers = read(path, kind)
        return Tokens([numbers.tokens], str(path), vocabulary=numbers.vocabulary)
    if not path.exists():
        raise InputError(f"{path} does not exist: {EXPECTED}")
    if kind is not None:
        raise InputError(f"--token-dtype {kind} is only for .bin files, not for {path}: leave it out")
    if is_table(path):
        rows = table_rows(path)
        if not rows.parts:
            raise InputError(f"{path} has no rows with tokens")
        return Tokens(rows.parts, str(path), rows.text)
    if path.is_dir():
        return _text_of_folder(path)
    if not path.is_file() or not _is_text(path):
        raise InputError(f"{path} is not text: it has bytes that are 0. Names of token files must end in .bin or .npy")
    return Tokens([mapped(path, np.dtype(np.uint8))], str(path), text=True)


def _data_of_index(path: Path) -> Path:
    """The `.bin` file of a pair of Megatron-LM, from the name of its `.idx` file or from the common name of both. Any
    other path is returned unchanged."""
    if path.suffix == ".idx":
        return path.with_suffix(".bin")
    pair = [Path(f"{path}{suffix}") for suffix in (".bin", ".idx")]  # `path` may have an empty name, such as "."
    return pair[0] if not path.exists() and all(each.is_file() for each in pair) else path


def _text_of_folder(folder: Path) -> Tokens:
    files = list(_files(folder))
    numbers = [path for path in files if path.suffix in (*NUMBERS, ".idx")]
    if numbers:  # train.bin and val.bin may be in the same folder, and training must not read both
        names = ", ".join(str(path.relative_to(folder)) for path in numbers[:4])
        raise InputError(f"the folder {folder} has files of tokens ({names}): list the files to train on")
    parts = [mapped(path, np.dtype(np.uint8)) for path in files if _is_text(path)]
    if not parts:
        raise InputError(f"the folder {folder} has no text in it")
    return Tokens(parts, str(folder), text=True)


def _files(folder: Path) -> Iterator[Path]:
    """List all files of a folder and its subfolders, except hidden ones, in the same order on every machine."""
    found = [(path.relative_to(folder).parts, path) for path in folder.rglob("*")]
    for parts, path in sorted(found):
        if not any(part.startswith(".") for part in parts) and path.is_file():
            yield path


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(PEEKED_BYTES)

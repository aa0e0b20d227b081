"""What a language model is trained on, as one long row of tokens: a file of tokens, or text, of which each byte is one.

| path | tokens |
|---|---|
| `.bin` | numbers of 16 or 32 bits, unsigned, little-endian, nothing else |
| `.npy` | of NumPy: one dimension, integers |
| another file | its bytes: text, 256 tokens |
| a folder | the bytes of all text files in it, one file after another by their paths; hidden files are left out |

Large files are memory-mapped: what is read comes from the disk, and whatever fits stays in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rooftop.errors import InputError

BYTES = 256
"""Tokens that text has."""
MAPPED_BYTES = 16 << 20  # smaller files are read at once: a process can map only some ten thousand
PEEKED_BYTES = 8192  # text has no zero among its first bytes; git asks the same of as many
SCANNED = 1 << 24  # tokens at a time
PLACES, LOOKED_AT = 256, 64  # of a fingerprint; tokens at each
KINDS: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Integers = NDArray[np.integer[Any]]
Progress = Callable[[str, float], None]


class Tokens:
    """A row of tokens.

    Args:
        parts: of it, one after another, each of one dimension.
        source: what an error calls it.
        text: whether tokens are bytes.
    """

    def __init__(self, parts: Sequence[Integers], source: str, text: bool = False) -> None:
        self.parts, self.source, self.text = list(parts), source, text
        self._ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Tensor:
        """The tokens from `start` to before `stop`, int64.

        Raises:
            IndexError: there are not so many.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{self.source} has tokens 0 to {len(self)}, not {start} to {stop}")
        found = np.empty(stop - start, np.int64)
        at, place = start, bisect_right(self._ends, start)
        while at < stop:
            first = self._ends[place] - len(self.parts[place])
            end = min(stop, self._ends[place])
            found[at - start : end - start] = self.parts[place][at - first : end - first]
            at, place = end, place + 1
        return torch.from_numpy(found)

    def fingerprint(self) -> str:
        """Of how many tokens there are and what stands at some places of them: of other data another, almost surely,
        unless the two differ in a few places."""
        digest = blake2b(str(len(self)).encode(), digest_size=16)
        last = max(0, len(self) - LOOKED_AT)
        for start in sorted({round(last * part / (PLACES - 1)) for part in range(PLACES)}):
            digest.update(self.read(start, min(start + LOOKED_AT, len(self))).numpy().tobytes())
        return digest.hexdigest()

    def check_vocabulary(self, vocabulary: int, progress: Progress = lambda what, fraction: None) -> None:
        """See that a vocabulary has all tokens; reads everything, unless the files' type says enough.

        Raises:
            InputError: it does not.
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
                        f"{self.source} has the token {wrong}, a vocabulary of {vocabulary} has 0 to {vocabulary - 1}: "
                        + (
                            f"text takes at least {BYTES}"
                            if self.text
                            else "enlarge it, or see whether the file's numbers have another size"
                        )
                    )
                done += len(chunk)
                progress("looking at the tokens", done / len(self))


def open_tokens(path: Path, kind: str = "uint16") -> Tokens:
    """The tokens of a file or folder.

    Args:
        path: as the table above says.
        kind: of numbers in a `.bin`, "uint16" or "uint32".

    Raises:
        InputError: nothing is there, or it holds no tokens or no text.
    """
    if path.is_dir():
        return _text_of_folder(path)
    if not path.is_file():
        raise InputError(f"{path} is not there: expected a .bin or .npy file of tokens, a text, or a folder of texts")
    if path.suffix == ".bin":
        return Tokens([_numbers(path, kind)], str(path))
    if path.suffix == ".npy":
        return Tokens([_array(path)], str(path))
    if not _is_text(path):
        raise InputError(f"{path} is no text: it has zero bytes. Files of tokens are called .bin or .npy")
    return Tokens([_mapped(path, np.dtype(np.uint8))], str(path), text=True)


def _numbers(path: Path, kind: str) -> Integers:
    dtype = KINDS[kind]
    if path.stat().st_size % dtype.itemsize:
        raise InputError(f"{path} has {path.stat().st_size} bytes, which is no whole number of {kind} tokens")
    return _mapped(path, dtype)


def _mapped(path: Path, dtype: np.dtype[Any]) -> Integers:
    if path.stat().st_size < MAPPED_BYTES:
        return np.fromfile(path, dtype)
    return np.memmap(path, dtype, mode="r")


def _array(path: Path) -> Integers:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} is no .npy file of numbers ({error})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{path} has {array.dtype} of shape {array.shape}: expected integers of one dimension")
    return array


def _text_of_folder(folder: Path) -> Tokens:
    parts = [_mapped(path, np.dtype(np.uint8)) for path in _files(folder) if _is_text(path)]
    if not parts:
        raise InputError(f"the folder {folder} has no text in it")
    return Tokens(parts, str(folder), text=True)


def _files(folder: Path) -> Iterator[Path]:
    """All that are not hidden, in an order that is the same everywhere."""
    found = [(path.relative_to(folder).parts, path) for path in folder.rglob("*")]
    for parts, path in sorted(found):
        if not any(part.startswith(".") for part in parts) and path.is_file():
            yield path


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(PEEKED_BYTES)

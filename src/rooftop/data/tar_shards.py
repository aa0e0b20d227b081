"""Samples in tar files, in the layout of webdataset.

The files of a sample are adjacent and have the same name except for the suffix:

    shard-000.tar: 000017.jpg 000017.cls 000018.jpg 000018.cls ...

The headers of each shard (tar file) are read once, to index the files' offsets. Then any number of threads and
processes can read samples in any order, with one read per file.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
import tarfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from rooftop.data.image_folders import Transform, change, decode, read
from rooftop.errors import InputError
from rooftop.media.ahead import in_order
from rooftop.media.images import SUFFIXES
from rooftop.user_paths import user_path

IMAGE = "image"
"""The name in `fields` that means the photograph, whatever its suffix."""
CLASS = "cls"
UNREADABLE = -1
"""The label of a sample that cannot be read."""
IMAGE_ENDINGS = tuple(suffix[1:] for suffix in sorted(SUFFIXES))


@dataclass(slots=True)
class _Entry:
    """A sample in the index: index of the shard, key of the sample, and (offset, size) of each file by suffix.

    Attributes:
        wrong: message of an error in the sample's tar headers; None: no error.
    """

    shard: int
    key: str
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    wrong: str | None = None


class TarShards:
    """The samples of tar files, as a data set.

        data = TarShards("photographs/train-{000..146}.tar", ImageTransform(224, {"flip": 0.5}, train=True))
        image, label = data[0]

    Args:
        paths: uncompressed tar files: a list of paths; a pattern with a number range in braces, or with * and ?; or a
            folder.
        transform: transforms photographs, as in `ImageFolder`.
        fields: suffixes of the files to return as a tuple; "image" means the photograph. None: each sample is a dict of
            all its files and "__key__".

    The suffix decides how a file is decoded: photographs by the transform, cls to an integer, txt to a string, json to
    Python objects, npy to a tensor. Other files stay bytes.

    Raises:
        InputError: there are no shards, a shard is not a tar file or has no samples, or `fields` is one string.
            `data[i]` raises InputError if the sample lacks a field, is damaged, or is incomplete because its shard is
            cut off.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        transform: Transform | None = None,
        fields: Sequence[str] | None = (IMAGE, CLASS),
    ) -> None:
        if isinstance(fields, str):
            raise InputError(f"fields is the string {fields!r}: expected a sequence such as ({fields!r},)")
        self.paths = _shards(paths)
        self.transform, self.fields = transform, None if fields is None else tuple(fields)
        found = in_order(lambda numbered: list(_entries(*numbered)), enumerate(self.paths))
        self._index = _Index(chain.from_iterable(found))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Any:
        return self.draw(index, None)

    def draw(self, index: int, generator: np.random.Generator | None) -> Any:
        """Return a sample; the transform augments its photographs with random numbers from this generator."""
        entry = self._index[index]
        return self._sample(entry, lambda ending: self._value(entry, ending, generator))

    def name(self, index: int) -> str:
        """The shard's path and the sample's key."""
        return self._name(self._index[index])

    def labels(self) -> list[int]:
        """The class of each sample, from its cls file; `UNREADABLE` if the sample is damaged or lacks a valid cls file.

        Raises:
            InputError: no sample has a readable cls file, or a class number is below 0.
        """
        found = []
        for shard, entries in groupby((self._index[number] for number in range(len(self))), lambda each: each.shard):
            with self.paths[shard].open("rb") as file:
                found += [self._label(entry, file) for entry in entries]
        if all(label == UNREADABLE for label in found):
            raise InputError(
                f"{self.paths[0]}: no sample has a class: expected a number in NAME.{CLASS} beside NAME.jpg"
            )
        return found

    def _label(self, entry: _Entry, file: BinaryIO) -> int:
        try:
            offset, size = entry.files[self._ending(entry, CLASS)]
            file.seek(offset)
            label = int(file.read(size))
        except ValueError:  # reading the sample raises the error that says what is wrong
            return UNREADABLE
        if label < 0:
            raise InputError(f"{self._name(entry)}.{CLASS} is {label}: expected a class number of 0 or more")
        return label

    def content(self, index: int) -> bytes:
        """The bytes of the sample's photograph in the shard."""
        entry = self._index[index]
        return self._read(entry, self._ending(entry, IMAGE))

    def decoded(self, index: int, content: bytes, generator: np.random.Generator | None = None) -> Any:
        """Return the decoded photograph, in the form that `changed` accepts."""
        return decode(self.transform, content, generator, self.name(index))

    def changed(self, index: int, decoded: Any, generator: np.random.Generator | None) -> Any:
        """Transform a photograph from `decoded`; return the sample with all its fields."""
        entry, image = self._index[index], change(self.transform, decoded, generator)
        photograph = self._ending(entry, IMAGE)
        return self._sample(
            entry, lambda ending: image if ending == photograph else self._value(entry, ending, generator)
        )

    def _sample(self, entry: _Entry, value: Callable[[str], Any]) -> Any:
        """Make a sample: the tuple of `fields`, or without `fields` a dict of all files by suffix, with "__key__".

        `value` reads and decodes the entry's file with a given suffix.
        """
        if self.fields is not None:
            return tuple(value(self._ending(entry, name)) for name in self.fields)
        if entry.wrong is not None:
            raise InputError(entry.wrong)
        return {"__key__": entry.key, **{ending: value(ending) for ending in entry.files}}

    def _ending(self, entry: _Entry, name: str) -> str:
        """The suffix of the sample's file that holds field `name`."""
        if entry.wrong is not None:
            raise InputError(entry.wrong)
        wanted = IMAGE_ENDINGS if name == IMAGE else (name,)
        found = next((ending for ending in entry.files if ending.lower() in wanted), None)
        if found is None:
            raise InputError(f"{self._name(entry)} has no {name}: it has {', '.join(entry.files)}")
        return found

    def _value(self, entry: _Entry, ending: str, generator: np.random.Generator | None) -> Any:
        content = self._read(entry, ending)
        kind = ending.lower().rpartition(".")[2]
        name = f"{self._name(entry)}.{ending}"
        if kind in IMAGE_ENDINGS:
            return read(self.transform, content, generator, name)
        try:
            return _DECODERS[kind](content) if kind in _DECODERS else content
        except ValueError as error:
            raise InputError(f"{name} cannot be read: {error}") from error

    def _read(self, entry: _Entry, ending: str) -> bytes:
        """Read the content of the sample's file with this suffix from its shard, at a fixed offset (pread). Several
        threads can read a shard at the same time."""
        offset, size = entry.files[ending]
        handle = os.open(self.paths[entry.shard], os.O_RDONLY)
        try:
            parts = []
            while size and (part := os.pread(handle, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        finally:
            os.close(handle)
        if size:
            raise InputError(f"{self._name(entry)}.{ending} is cut off: {size:,} bytes are missing")
        return b"".join(parts)

    def _name(self, entry: _Entry) -> str:
        return f"{self.paths[entry.shard]}: {entry.key}"


class _Index:
    """Index of all samples in the shards, stored as columns: a Python object per sample would take gigabytes in each
    process."""

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self._keys: list[str] = []
        self._wrong: dict[int, str] = {}
        kinds: dict[tuple[str, ...], int] = {}  # index of each distinct tuple of suffixes; most samples share one
        shards, kind_of, firsts, spans = array("q"), array("q"), array("q", [0]), array("q")
        for number, entry in enumerate(entries):
            self._keys.append(entry.key)
            shards.append(entry.shard)
            kind_of.append(kinds.setdefault(tuple(entry.files), len(kinds)))
            spans.extend(chain.from_iterable(entry.files.values()))
            firsts.append(len(spans))
            if entry.wrong is not None:
                self._wrong[number] = entry.wrong
        self._kinds = list(kinds)
        self._shards, self._kind_of, self._firsts, self._spans = shards, kind_of, firsts, spans

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> _Entry:
        key = self._keys[index]  # raises IndexError if the index is out of range
        index %= len(self)
        spans = self._spans[self._firsts[index] : self._firsts[index + 1]]
        files = dict(zip(self._kinds[self._kind_of[index]], zip(spans[::2], spans[1::2], strict=True), strict=True))
        return _Entry(self._shards[index], key, files, self._wrong.get(index))


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": int,
    "txt": bytes.decode,
    "json": json.loads,
    "npy": lambda content: torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False)),
}


def _entries(shard: int, path: Path) -> Iterator[_Entry]:
    """Yield the samples of a shard, damaged ones included: reading a damaged sample raises its error."""
    whole = path.stat().st_size
    entry, members = None, 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                members += 1
                key, ending = _parted(member.name)
                if not member.isfile() or not ending:
                    continue
                if entry is not None and entry.key != key:
                    yield entry
                    entry = None
                entry = entry or _Entry(shard, key)
                entry.files[ending] = (member.offset_data, member.size)
                if member.offset_data + member.size > whole:
                    entry.wrong = f"{path}: {member.name} is cut off: the file ends within it"
            _check_end(path, tar.offset)
    except (tarfile.TarError, OSError, ValueError) as error:
        if not members:
            raise InputError(f"{path} is not an uncompressed tar file: {error}") from error
        if entry is None or entry.wrong is None:
            after = f" after {entry.key}" if entry is not None else ""
            if entry is not None:
                yield entry
            entry = _Entry(shard, "damaged", wrong=f"{path} is damaged{after}: {error}")
    if entry is None:
        raise InputError(f"{path} holds no samples: expected files such as 000017.jpg and 000017.cls")
    yield entry


def _check_end(path: Path, offset: int) -> None:
    """Check that a shard really ends where tarfile stopped, because tarfile also stops at a damaged header.

    Raises:
        ValueError: more data follow.
    """
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0") or 0 < len(block) < tarfile.BLOCKSIZE:
        raise ValueError(f"expected a tar header at byte {offset:,}")


def _parted(name: str) -> tuple[str, str]:
    """Split a file's path into key and suffix; the suffix begins at the file name's first dot, as in webdataset."""
    folder, slash, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return (folder + slash + key, ending) if key else ("", "")


def _shards(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    if not isinstance(paths, (str, os.PathLike)):
        found = [each for path in paths for each in (_spread(path) if isinstance(path, str) else [user_path(path)])]
    elif os.path.isdir(folder := user_path(paths)):
        found = sorted(folder.glob("*.tar"))
    else:
        found = _spread(os.fspath(paths))
    if not found:
        raise InputError(f"{paths}: no tar files found; compressed ones, such as .tar.gz, must be unpacked first")
    for path in found:
        if not path.is_file():
            raise InputError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    return found


def _spread(text: str) -> list[Path]:
    """Expand a pattern to paths. Number ranges in braces, such as {000..127}, are expanded first, then the wildcards of
    `glob`."""
    ranged = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if ranged is not None:
        first, last = ranged[1], ranged[2]
        numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
        return [path for number in numbers for path in _spread(text[: ranged.start()] + number + text[ranged.end() :])]
    text = os.path.expanduser(text)
    names = sorted(glob.glob(text)) if glob.has_magic(text) and not os.path.exists(text) else [text]
    return [Path(name) for name in names]

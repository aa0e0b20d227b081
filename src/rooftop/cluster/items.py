"""Find a run's items among the inputs, list them in order, and decode them one by one.

| kind | inputs | the target gets |
|---|---|---|
| image | photographs | (3, H, W) uint8, upright |
| clip | videos | (T, 3, H, W) uint8: frames `first`, `first + step`, ... |
| cloud | .npy, .bin, .ply | (N, C) |
| text | .txt, a line is an item | str |
| row | .parquet, .csv, .jsonl | the row as a dict; values from a .csv are text |
| path | any file | pathlib.Path |

The process that lists items reads lines and rows itself, and sends them to workers. Workers read all other items.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rooftop.cluster.arrow import load_arrow
from rooftop.errors import InputError, MissingExtraError
from rooftop.words import did_you_mean, whole_message

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("image", "clip", "cloud", "text", "row", "path")

BY_SUFFIX = ("text", "row", "cloud", "image", "clip")
"""Kinds that file suffixes determine. Photographs and videos come last, so that torch is loaded only if it is needed.
"""

ROWS_AT_ONCE = 1024  # rows of a Parquet file that are in memory at a time


@dataclass(frozen=True)
class Decoding:
    """Settings for the decoding of items.

    Attributes:
        kind: one of `KINDS`.
        frames, step, stride: for clips, the frames per clip, the distance between these frames, and the distance
            between the first frames of consecutive clips (None: clips share no frames).
        point_columns: numbers per point in a .bin file of float32; KITTI has 4, nuScenes 5.

    Raises:
        InputError: the kind is unknown, or a number is below 1.
    """

    kind: str
    frames: int = 16
    step: int = 1
    stride: int | None = None
    point_columns: int = 4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(
                f"kind {self.kind!r} is not known: expected {', '.join(KINDS)}{did_you_mean(self.kind, KINDS)}"
            )
        numbers = {"frames": self.frames, "step": self.step, "stride": self.stride, "point_columns": self.point_columns}
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise InputError(f"{name} is {number}, expected 1 or more")

    def arguments(self) -> dict[str, Any]:
        """The settings that affect results, by name."""
        found: dict[str, Any] = {"kind": self.kind}
        if self.kind == "clip":
            found |= {"frames": self.frames, "step": self.step, "stride": self.stride}
        if self.kind == "cloud":
            found |= {"point_columns": self.point_columns}
        return found


class Damage(NamedTuple):
    """The reason why an item cannot be read, which replaces the item's content."""

    why: str


class Item(NamedTuple):
    """One item, whose decoded value is passed to the target.

    Attributes:
        input: the item's file, as given; `place`: its line, row or first frame in the file, from 0, or None for a whole
            file.
        source: the absolute path of the file.
        content: the line or row of text and row items; `Damage` for an unreadable item; None for whole files.
    """

    input: str
    place: int | None
    source: str
    content: Any = None


@cache
def suffixes(kind: str) -> frozenset[str]:
    """The file suffixes of a kind. For "path", the suffixes of all kinds."""
    if kind == "image":
        from rooftop.media.images import SUFFIXES

        return frozenset(SUFFIXES)
    if kind == "clip":
        from rooftop.media.reading import VIDEO_SUFFIXES

        return frozenset(VIDEO_SUFFIXES)
    if kind == "path":
        return frozenset().union(*map(suffixes, KINDS[:-1]))
    return frozenset({"cloud": {".npy", ".bin", ".ply"}, "text": {".txt"}, "row": ROWS}[kind])


def find_inputs(inputs: Sequence[str | os.PathLike[str]], kind: str | None = None) -> tuple[str, list[Path]]:
    """Find the items' kind and files. Files that are inputs themselves keep the order of the inputs; files found in
    folders (searched recursively) are sorted by name.

    Args:
        kind: one of `KINDS`; None: the only kind to which all suffixes of the files belong.

    Raises:
        InputError: inputs are empty, a path does not exist, a folder has no such files, or the kind is unclear.
    """
    if isinstance(inputs, (str, bytes, os.PathLike)) or not len(inputs):
        raise InputError(f"inputs: expected a list of files and folders, got {inputs!r}")
    if kind is not None:
        Decoding(kind)  # this raises for an unknown kind
    found: dict[Path, None] = {}
    for path in map(Path, inputs):
        if path.is_dir():
            wanted = suffixes(kind or "path")
            inside = [each for each in _files_below(path) if kind == "path" or each.suffix.lower() in wanted]
            if not inside:
                raise InputError(f"{path} holds no files with {'items' if kind is None else f'items of kind {kind}'}")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        else:
            raise InputError(f"{path} does not exist")
    return kind or _kind_of(list(found)), list(found)


def _files_below(folder: Path) -> Iterator[Path]:
    """The sorted files below a folder, without hidden files and, as in Parquet readers, without names that begin with
    "_"."""
    for each in sorted(folder.iterdir()):
        if each.name.startswith((".", "_")):
            continue
        if each.is_dir() and not each.is_symlink():
            yield from _files_below(each)
        elif each.is_file():
            yield each


def _kind_of(files: Sequence[Path]) -> str:
    kinds: dict[str | None, Path] = {}
    for path in files:
        ends = path.suffix.lower()
        kinds.setdefault(next((kind for kind in BY_SUFFIX if ends in suffixes(kind)), None), path)
    if len(kinds) == 1 and (kind := next(iter(kinds))) is not None:
        return kind
    if None in kinds:
        raise InputError(
            f"{kinds[None]}: its suffix does not determine the kind of its items; give the kind (kind=, "
            f"--as): {', '.join(KINDS)}"
        )
    said = " and ".join(f"{kind}: {path}" for kind, path in kinds.items())
    raise InputError(
        f"the inputs have several kinds ({said}): expected one; choose it (kind=, --as), or map each kind separately"
    )


# ---- listing ---------------------------------------------------------------------------------------------------------


def list_items(files: Sequence[Path], decoding: Decoding) -> Iterator[Item]:
    """Yield the files' items in order, with few items in memory. An unreadable item has `Damage` as its content."""
    for path in files:
        source = os.path.abspath(path)
        name = os.fsencode(path).decode("utf-8", "backslashreplace")
        if decoding.kind in ("image", "cloud", "path"):
            yield Item(name, None, source)
        else:
            yield from LISTED[decoding.kind](name, source, decoding)


def _lines(name: str, source: str, decoding: Decoding) -> Iterator[Item]:
    last = -1
    try:
        with open(source, "rb") as file:
            for last, line in enumerate(file):
                try:
                    yield Item(name, last, source, line.rstrip(b"\r\n").decode("utf-8"))
                except UnicodeDecodeError as error:
                    yield Item(name, last, source, Damage(f"no UTF-8: {error}"))
    except OSError as error:
        yield Item(name, last + 1, source, Damage(f"cannot be read further: {error.strerror}"))


def _rows(name: str, source: str, decoding: Decoding) -> Iterator[Item]:
    rows = ROWS.get(Path(source).suffix.lower())
    if rows is None:
        yield Item(name, None, source, Damage(f"{name} has no rows: expected {', '.join(sorted(ROWS))}"))
        return
    last = -1
    try:
        for last, row in rows(source):
            yield Item(name, last, source, row)
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's own errors are ValueErrors
        yield Item(name, last + 1, source, Damage(f"cannot be read further: {_line(error)}"))


def _parquet_rows(source: str) -> Iterator[tuple[int, Any]]:
    number = 0
    with load_arrow().parquet.ParquetFile(source) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE):
            for row in batch.to_pylist():
                yield number, row
                number += 1


def _csv_rows(source: str) -> Iterator[tuple[int, Any]]:
    with open(source, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        for number, cells in enumerate(each for each in rows if each):
            whole = len(cells) == len(names)
            said = f"{len(cells)} cells, expected as many as the header has: {len(names)}"
            yield number, dict(zip(names, cells, strict=True)) if whole else Damage(said)


def _json_rows(source: str) -> Iterator[tuple[int, Any]]:
    with open(source, "rb") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                row = Damage(f"no JSON: {error}")
            yield number, row if isinstance(row, (dict, Damage)) else Damage(f"expected an object, got {line[:40]!r}")


ROWS: dict[str, Callable[[str], Iterator[tuple[int, Any]]]] = {
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
    ".jsonl": _json_rows,
}


def _clips(name: str, source: str, decoding: Decoding) -> Iterator[Item]:
    from rooftop.media import DamagedVideoError, VideoReader

    span = (decoding.frames - 1) * decoding.step + 1
    try:
        with VideoReader(source) as reader:
            there = len(reader)
    except (InputError, DamagedVideoError) as error:
        yield Item(name, None, source, Damage(_line(error)))
        return
    if there < span:
        yield Item(name, None, source, Damage(f"{there} frames, expected at least {span} for a clip"))
    for first in range(0, there - span + 1, decoding.stride or decoding.frames * decoding.step):
        yield Item(name, first, source)


LISTED: dict[str, Callable[[str, str, Decoding], Iterator[Item]]] = {"text": _lines, "row": _rows, "clip": _clips}


# ---- decoding --------------------------------------------------------------------------------------------------------


DECODED = ("image", "clip", "cloud")
"""Kinds of items that take time to decode."""

LOADED = {"image": ["rooftop.media.images"], "clip": ["rooftop.media"], "cloud": ["numpy", "torch"]}
"""Modules to import in advance for each kind, so that the time of the import does not count for any item."""


def decoder(decoding: Decoding) -> Callable[[Item], Any]:
    """Return a function that decodes an item for the target. Threads may call the function concurrently.

    The function raises `InputError` for a damaged item, and passes on any error of a reader.
    """
    for module in LOADED.get(decoding.kind, ()):
        importlib.import_module(module)
    readers = threading.local()  # each thread keeps open the video that it read last
    decodes: dict[str, Callable[[Item], Any]] = {
        "image": lambda item: _image(item.source),
        "cloud": lambda item: _cloud(item.source, decoding.point_columns),
        "path": lambda item: Path(item.source),
        "clip": partial(_clip, readers, decoding),
    }
    decode = decodes.get(decoding.kind, lambda item: item.content)

    def decoded(item: Item) -> Any:
        if isinstance(item.content, Damage):
            raise InputError(item.content.why)
        return decode(item)

    return decoded


def _image(source: str) -> Tensor:
    """Read a photograph as (3, H, W) uint8."""
    from rooftop.media.images import read_image

    return read_image(source)


def _clip(readers: threading.local, decoding: Decoding, item: Item) -> Tensor:
    """Read a clip as (T, 3, H, W) uint8."""
    from rooftop.media import VideoReader

    if getattr(readers, "source", None) != item.source:
        if hasattr(readers, "reader"):
            readers.reader.close()
        readers.source, readers.reader = None, VideoReader(item.source)
        readers.source = item.source
    first = item.place or 0
    taken: Tensor = readers.reader.take(range(first, first + decoding.frames * decoding.step, decoding.step))
    return taken


def _cloud(source: str, columns: int) -> Tensor:
    """Read a point cloud as (N, C), in the dtype of the file."""
    import numpy as np
    import torch

    suffix = Path(source).suffix.lower()
    if suffix == ".npy":
        points = np.load(source, allow_pickle=False)
    elif suffix == ".bin":
        points = np.fromfile(source, np.float32)
        if points.size % columns:
            raise InputError(
                f"{points.size} numbers are not a multiple of {columns} per point: give the right number per point "
                f"(point_columns=, --point-columns)"
            )
        points = points.reshape(-1, columns)
    elif suffix == ".ply":
        try:
            import trimesh
        except ImportError as error:
            raise MissingExtraError('.ply needs trimesh: pip install "rooftop[scene]"') from error
        geometry: Any = trimesh.load_scene(source).to_geometry()
        points = np.asarray(geometry.vertices)
    else:
        raise InputError(f"{Path(source).name} is not a point cloud: expected .npy, .bin or .ply")
    if points.ndim != 2 or points.dtype.kind not in "fiu":
        raise InputError(
            f"the array has shape {points.shape} and dtype {points.dtype}: expected numbers of shape (N, C)"
        )
    return torch.from_numpy(np.ascontiguousarray(points))


def _line(error: BaseException) -> str:
    return whole_message(error) or type(error).__name__

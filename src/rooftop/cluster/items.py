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

import codecs
import csv
import importlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from rooftop.cluster.arrow import load_arrow
from rooftop.errors import InputError, MissingExtraError
from rooftop.user_paths import user_path
from rooftop.words import counted, did_you_mean, whole_message

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("image", "clip", "cloud", "text", "row", "path")

BY_SUFFIX = ("text", "row", "cloud", "image", "clip")
"""Kinds that file suffixes determine. Photographs and videos come last, so that torch is loaded only if it is needed.
"""

ROWS_AT_ONCE = 1024  # rows of a Parquet file that are in memory at a time
MOST_CHARACTERS = 1 << 26  # maximum length of a .csv cell, so that a quote that is never closed cannot fill the memory
MOST_LEVELS = 200  # maximum depth of a .jsonl row: pickling, which sends it to a worker, stops at 497 (Python 3.11)


@dataclass(frozen=True)
class Decoding:
    """Settings for the decoding of items.

    Attributes:
        kind: one of `KINDS`.
        frames, step, stride: for clips, the frames per clip, the distance between these frames, and the distance
            between the first frames of consecutive clips (None: clips share no frames), in frames of the video.
        point_columns: numbers per point in a .bin file of float32; KITTI has 4, nuScenes 5.

    Raises:
        InputError: the kind is unknown, or a number is not an integer of 1 or more.
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
            if number is not None:
                check_count(name, number, 1)

    def arguments(self) -> dict[str, Any]:
        """The decoding settings that affect results for this kind of items, by name."""
        found: dict[str, Any] = {"kind": self.kind}
        if self.kind == "clip":
            found |= {"frames": self.frames, "step": self.step, "stride": self.stride}
        if self.kind == "cloud":
            found |= {"point_columns": self.point_columns}
        return found


def check_count(name: str, given: Any, least: int) -> None:
    """Check an argument that is a number of things.

    Raises:
        InputError: the argument is not an integer, or is below `least`.
    """
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise InputError(f"{name} is {given!r}, expected an integer of {least} or more")


class Damage(NamedTuple):
    """The reason why an item cannot be read, which replaces the item's content.

    Attributes:
        rest: whether the rest of the file cannot be read either, so that this is the last item of the file.
    """

    why: str
    rest: bool = False


class Item(NamedTuple):
    """One item, whose decoded value is passed to the target.

    Attributes:
        input: the item's file, as given.
        place: the item's line, row or first frame in the file, from 0; None if the item is the whole file.
        source: the absolute path of the file.
        content: the line or row of text and row items; `Damage` for an unreadable item; None for whole files.
    """

    input: str
    place: int | None
    source: str
    content: Any = None


@cache
def suffixes(kind: str) -> frozenset[str]:
    """The file suffixes that belong to a kind of items, such as "image". For "path", the suffixes of all kinds."""
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
    """Find the items' kind and files, in the order of the inputs. A folder is searched recursively; its files and
    subfolders are sorted by name. A file that is found twice is listed once, at its first place.

    Args:
        kind: one of `KINDS`; None: the kind to which the suffixes of all files belong.

    Raises:
        InputError: inputs are empty, a path does not exist, a folder has no files of the kind, or the kind is unclear.
    """
    is_list = isinstance(inputs, Collection) and not isinstance(inputs, (str, bytes, os.PathLike)) and len(inputs) > 0
    if not is_list or not all(isinstance(each, (str, os.PathLike)) for each in inputs):
        raise InputError(f"inputs: expected a list of files and folders, got {inputs!r}")
    if kind is not None:
        Decoding(kind)  # this raises for an unknown kind
    found: dict[Path, None] = {}
    for path in map(user_path, inputs):
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


def _files_below(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder, sorted within each folder. Hidden files are skipped, and so are names that begin
    with "_", as by readers of Parquet. Symbolic links are followed, except a link to a folder that contains the link.

    Args:
        above: the resolved folders that contain this folder.
    """
    here = folder.resolve()
    if here in above:
        return
    for each in sorted(folder.iterdir()):
        if each.name.startswith((".", "_")):
            continue
        if each.is_dir():
            yield from _files_below(each, above | {here})
        elif each.is_file() or each.is_symlink():  # a broken link becomes a row with an error
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
                if not last and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    yield Item(name, 0, source, Damage("UTF-16: save the file with the encoding UTF-8", rest=True))
                    return
                encoding = "utf-8" if last else "utf-8-sig"  # the file may begin with a byte-order mark
                try:
                    yield Item(name, last, source, line.rstrip(b"\r\n").decode(encoding))
                except UnicodeDecodeError as error:
                    yield Item(name, last, source, Damage(f"no UTF-8: {error}"))
    except OSError as error:
        yield Item(name, last + 1, source, _unread(error))


def _rows(name: str, source: str, decoding: Decoding) -> Iterator[Item]:
    rows = ROWS.get(Path(source).suffix.lower())
    if rows is None:
        yield Item(name, None, source, Damage(f"{name} has no rows: expected {', '.join(sorted(ROWS))}"))
        return
    last = -1
    try:
        for last, row in rows(source):
            yield Item(name, last, source, row)
    except (OSError, ValueError, csv.Error, load_arrow().ArrowException) as error:
        yield Item(name, last + 1, source, _unread(error))


def _unread(error: BaseException) -> Damage:
    said = error.strerror if isinstance(error, OSError) and error.strerror else _line(error)
    return Damage(f"cannot be read further: {said}", rest=True)


# ---- Parquet


def _parquet_rows(source: str) -> Iterator[tuple[int, Any]]:
    """The rows of all row groups. If a group is damaged, each of its rows from the damage on becomes `Damage`."""
    pa = load_arrow()
    number = 0
    with pa.parquet.ParquetFile(source) as file:
        _check_names(file.schema_arrow.names)
        for group in range(file.num_row_groups):
            end = number + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group]):
                    for row in _python_rows(batch):
                        yield number, row
                        number += 1
            except (OSError, ValueError, pa.ArrowException) as error:
                damage = Damage(f"its row group {group} cannot be read: {_line(error)}")
                while number < end:
                    yield number, damage
                    number += 1


def _python_rows(batch: Any) -> list[Any]:
    """A batch's rows as dicts. A row that Python cannot represent, such as a date after 9999, becomes `Damage`."""
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [Damage(f"Python cannot represent this row: {_line(error)}")]
        return [row for number in range(batch.num_rows) for row in _python_rows(batch.slice(number, 1))]


def _check_names(names: Sequence[str]) -> None:
    """Refuse columns with the same name, because a dict would lose one of them.

    Raises:
        InputError: two columns have the same name.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"the file has several columns named {twice!r}: give each column a name of its own")


# ---- CSV


def _csv_rows(source: str) -> Iterator[tuple[int, Any]]:
    """The rows below the header. Unnamed columns, such as a spreadsheet appends, must be empty in every row; only the
    last of them may have values."""
    csv.field_size_limit(max(csv.field_size_limit(), MOST_CHARACTERS))
    with open(source, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = _csv_cells(file)
        names = next(rows, [])
        if isinstance(names, Damage):
            raise InputError(names.why)
        _check_names([name for name in names if name])
        # All unnamed columns except the last unnamed one. Their cells must be empty, since a row is a dict, which keeps
        # only the last value of the name "".
        unnamed = [place for place, name in enumerate(names) if not name][:-1]
        for number, cells in enumerate(rows):
            if isinstance(cells, Damage):
                yield number, cells
            elif len(cells) != len(names):
                got = counted(len(cells), "cell")
                yield number, Damage(f"{got}, expected as many as the header has: {len(names)}")
            elif any(cells[place] for place in unnamed):
                yield number, Damage("several cells are in columns without a name: give each column a name of its own")
            else:
                yield number, dict(zip(names, cells, strict=True))


def _csv_cells(file: TextIO) -> Iterator[list[str] | Damage]:
    """The cells of each row that is not empty.

    If a row is malformed, its first line becomes `Damage`, and the next row begins at its second line. So a quote that
    is never closed costs one row, not the rest of the file.
    """
    taken: list[str] = []  # the lines of the current row
    again: list[str] = []  # lines to read again, in reverse order

    def lines() -> Iterator[str]:
        while line := again.pop() if again else file.readline():
            taken.append(line)
            yield line

    rows = csv.reader(lines(), strict=True)
    while True:
        taken.clear()
        try:
            cells = next(rows, None)
        except csv.Error as error:
            again.extend(reversed(taken[1:]))
            rows = csv.reader(lines(), strict=True)
            yield Damage(f"no CSV: {error} (close each quoted cell, and write a quote in a cell as two quotes)")
            continue
        if cells is None:
            return
        if not "".join(cells).isascii() and any("\udc80" <= each <= "\udcff" for each in "".join(cells)):
            yield Damage("no UTF-8: save the file with the encoding UTF-8")
        elif cells:
            yield cells


# ---- JSON lines


def _json_rows(source: str) -> Iterator[tuple[int, Any]]:
    with open(source, "rb") as file:
        for number, line in enumerate(file):
            if line.strip():
                yield number, _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | Damage:
    try:
        row = json.loads(line, object_pairs_hook=_json_object)
        # a quick check first, because `_is_deeper` for each row would take most of the reading time
        brackets = line.count(b"[") + line.count(b"{")
        deep = brackets > MOST_LEVELS and _is_deeper(row, MOST_LEVELS)
    except ValueError as error:
        return Damage(f"no JSON: {error}")
    except RecursionError:
        deep = True
    if deep:
        return Damage(f"its lists and objects are nested more than {MOST_LEVELS} levels deep: expected fewer")
    return row if isinstance(row, dict) else Damage(f"expected an object, got {line[:40]!r}")


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has several values for {twice!r}: give each a name of its own")
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dicts are nested more than this number of levels. A list or dict `value` is itself level 1."""
    if not isinstance(value, (dict, list)):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inside)


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
    except (InputError, DamagedVideoError, OSError) as error:
        yield Item(name, None, source, Damage(_line(error)))
        return
    if there < span:
        yield Item(name, None, source, Damage(f"{counted(there, 'frame')}, expected at least {span} for a clip"))
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

    The function raises `InputError` for an item whose content is `Damage`, and passes on the errors of readers
    unchanged.
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
    """Read a point cloud as (N, C): an .npy in the dtype of the file, a .bin in float32, and x, y and z of a .ply in
    float64.

    Raises:
        InputError: the file is damaged, or is no point cloud.
        MissingExtraError: Numba, for a .ply, is not installed.
    """
    import numpy as np
    import torch

    suffix = Path(source).suffix.lower()
    if suffix == ".npy":
        points = np.load(source, allow_pickle=False)
        if not isinstance(points, np.ndarray):
            points.close()
            raise InputError("the file has several arrays, as a .npz: expected one array, as np.save writes it")
        points = points.astype(points.dtype.newbyteorder("="), copy=False)
    elif suffix == ".bin":
        content = np.fromfile(source, np.uint8)
        if content.size % (4 * columns):
            raise InputError(
                f"{content.size:,} bytes are not a multiple of {4 * columns}, for {columns} float32 per point: give "
                "the right number per point (point_columns=, --point-columns), or copy the file again if its end is "
                "missing"
            )
        points = content.view(np.float32).reshape(-1, columns)
    elif suffix == ".ply":
        try:
            from rooftop.scene.building.ply_files import read_ply_points
        except ImportError as error:
            raise MissingExtraError('.ply needs Numba: pip install "rooftop[scene]"') from error
        points = read_ply_points(Path(source))
    else:
        raise InputError(f"{Path(source).name} is not a point cloud: expected .npy, .bin or .ply")
    if points.ndim != 2 or points.dtype.kind not in "fiu" or points.dtype.itemsize > 8:
        raise InputError(
            f"the array has shape {points.shape} and dtype {points.dtype}: expected numbers of shape (N, C), of at "
            "most 64 bits"
        )
    return torch.from_numpy(np.ascontiguousarray(points))


def _line(error: BaseException) -> str:
    return whole_message(error) or type(error).__name__

"""Read any part of a checkpoint's tensors from the pieces that the ranks wrote.

    saved = SavedTensors(Path("run/step-00000100"))
    saved.fill(rows, "layers.0.mlp.up.weight", Box.shard(shape, 0, index=1, count=4))

index.json lists the dtype and whole shape of each tensor. For each piece, index.json lists the file, the offset in the
file, the position in the whole tensor, and the checksum of each block. A part is assembled from the pieces that overlap
it. The needed rows of the pieces are read in whole blocks, and each block is verified by its checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.kernels import Box
from rooftop.train.checkpoints.files import METADATA, checksum, read_header
from rooftop.train.checkpoints.resharding import common_part

INDEX = "index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
BATCH_BYTES = 64 << 20
"""Number of bytes that are read at a time, rounded up to whole rows and whole blocks. A reader needs this much memory,
in addition to the memory of the tensor to fill.
"""
AGAIN = "use the checkpoint of another step, or a copy of this one"


@dataclass(frozen=True)
class Stored:
    """A piece of a checkpoint's tensor on disk.

    Attributes:
        file: name of the piece's file in the folder of the checkpoint.
        offset: position of the piece's first byte in the file.
        start, size: box of the piece in the whole tensor.
        checksums: CRC-32 of each block of `BLOCK_BYTES` of the piece.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    size: tuple[int, ...]
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint, as index.json describes it.

    Attributes:
        dtype, shape: dtype and shape of the whole tensor.
        pieces: the stored pieces, which together cover the tensor exactly once.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Stored, ...] = ()

    @property
    def bytes(self) -> int:
        """The number of bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


class Readable(Protocol):
    """The tensors of a checkpoint on disk, in any of Rooftop's formats.

    Attributes:
        entries: the tensors' entries, by name.
    """

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def fill(self, place: Tensor, name: str, box: Box) -> None:
        """Read a part of a tensor into a given tensor on any device.

        `entries` must have the tensor, and `box` must be a box in its shape; `entry_of` checks this.

        Raises:
            InputError: the data of the tensor are damaged or incomplete.
        """


def entry_of(saved: Readable, folder: Path, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    """Look up the entry of a tensor by name, and check its shape and dtype.

    Raises:
        InputError: the tensor is missing, or has a different shape or dtype.
    """
    found = saved.entries.get(name)
    if found is None:
        raise InputError(
            f"{folder} has no tensor {name}: it belongs to another model, or to another version of Rooftop"
        )
    if (found.shape, found.dtype) != (tuple(shape), dtype):
        there, here = (
            f"{str(kind).removeprefix('torch.')} {size}" for kind, size in ((found.dtype, found.shape), (dtype, shape))
        )
        raise InputError(f"{folder} does not fit: {name} is {there} in the checkpoint and {here} in the model")
    return found


def whole_tensor(saved: Readable, name: str) -> Tensor:
    """Read a whole tensor to the CPU."""
    entry = saved.entries[name]
    found = torch.empty(entry.shape, dtype=entry.dtype)
    saved.fill(found, name, Box.whole(entry.shape))
    return found


class SavedTensors:
    """The tensors of a checkpoint, in the folder of the training step after which they were saved.

    Args:
        folder: folder of that step.
        index_checksum: the checksum that index.json must have.

    Attributes:
        entries: the tensors' entries, by name.
        files: size in bytes and header checksum of each file.
        step: the last training step before the save.

    Raises:
        InputError: index.json is missing or damaged.
    """

    def __init__(self, folder: Path, index_checksum: str) -> None:
        self.folder = folder
        try:
            text = (folder / INDEX).read_bytes()
        except OSError as error:
            raise InputError(f"{folder / INDEX} cannot be read ({error.strerror}): {AGAIN}") from error
        if checksum(text) != index_checksum:
            raise InputError(
                f"{folder / INDEX} was changed: its checksum differs from the one in the training's record; {AGAIN}"
            )
        said: dict[str, Any] = json.loads(text)
        self.step: int = said["step"]
        self.block_bytes: int = said["block_bytes"]
        self.files: dict[str, tuple[int, str]] = {name: tuple(about) for name, about in said["files"].items()}
        self.entries = {
            name: Entry(
                DTYPES[about["dtype"]],
                tuple(about["shape"]),
                tuple(
                    Stored(file, offset, tuple(start), tuple(size), tuple(sums))
                    for file, offset, start, size, sums in about["pieces"]
                ),
            )
            for name, about in said["tensors"].items()
        }
        self._there: set[str] = set()

    def check_files(self) -> None:
        """Check that all files exist and have the expected length and header.

        Raises:
            InputError: a file is missing, or its length or header differs; the message names the first such file.
        """
        for name, entry in self.entries.items():
            for piece in entry.pieces:
                self._check_file(piece.file, name)

    def _check_file(self, file: str, name: str) -> None:
        if file in self._there:
            return
        path, (size, _) = self.folder / file, self.files[file]
        if not path.is_file():
            raise InputError(f"{path}, which has the tensor {name}, is missing: {AGAIN}")
        if path.stat().st_size != size:
            raise InputError(
                f"{path}, which has the tensor {name}, has {path.stat().st_size:,} bytes, expected {size:,}: it was "
                f"cut off or changed; {AGAIN}"
            )
        self._check_header(file)
        self._there.add(file)

    def _check_header(self, file: str) -> None:
        path, (_, expected) = self.folder / file, self.files[file]
        try:
            header, found = read_header(path)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} has a damaged header ({error}); {AGAIN}") from error
        if checksum(header) != expected or METADATA not in found["__metadata__"]:
            raise InputError(f"{path} is damaged: its header has changed; {AGAIN}")

    def fill(self, place: Tensor, name: str, box: Box) -> None:
        """See `Readable`."""
        entry, copied = self.entries[name], 0
        for piece in entry.pieces:
            found = common_part(box, Box(entry.shape, piece.start, piece.size))
            if found is None:
                continue
            to, of = found
            for first, last in _batches(of, piece.size, entry.dtype.itemsize):
                rows = self._rows(name, entry, piece, first, last)
                if of:
                    begin = of[0].start
                    target = (slice(to[0].start + first - begin, to[0].start + last - begin), *to[1:])
                    source = rows[(slice(None), *of[1:])]
                    copied += place[target].copy_(source).numel()
                else:
                    copied += place.copy_(rows).numel()
        if copied != prod(box.size):
            raise InputError(
                f"{self.folder} is incomplete: of the part of {name} that starts at index {box.start}, it has only "
                f"{copied} of {prod(box.size)} elements"
            )

    def _rows(self, name: str, entry: Entry, piece: Stored, first: int, last: int) -> Tensor:
        """Read rows `first` up to, but not including, `last` of a stored piece, and verify the checksums of the blocks
        that contain them."""
        row_bytes = prod(piece.size[1:]) * entry.dtype.itemsize
        begin, end = first * row_bytes, last * row_bytes
        low = begin // self.block_bytes
        content = self._blocks(name, piece, low, -(-end // self.block_bytes), prod(piece.size) * entry.dtype.itemsize)
        count = (end - begin) // entry.dtype.itemsize
        found = torch.frombuffer(content, dtype=entry.dtype, count=count, offset=begin - low * self.block_bytes)
        return found.view(last - first, *piece.size[1:]) if piece.size else found.view(())

    def _blocks(self, name: str, piece: Stored, low: int, high: int, piece_bytes: int) -> bytearray:
        self._check_file(piece.file, name)
        path = self.folder / piece.file
        begin, end = low * self.block_bytes, min(high * self.block_bytes, piece_bytes)
        content = bytearray(end - begin)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(piece.offset + begin)
                view = memoryview(content)
                while view.nbytes and (count := file.readinto(view)):
                    view = view[count:]
        except OSError as error:
            raise InputError(f"{path}, which has {name}, cannot be read ({error.strerror}): {AGAIN}") from error
        if view.nbytes:
            raise InputError(f"{path} ends in the middle of {name}: it was cut off; {AGAIN}")
        whole = memoryview(content)
        for number in range(low, high):
            block = whole[(number - low) * self.block_bytes : (number - low + 1) * self.block_bytes]
            if checksum(block) != piece.checksums[number]:
                at = piece.offset + number * self.block_bytes
                raise InputError(
                    f"{path} is damaged: a byte of {name} has changed in the {block.nbytes:,} bytes from byte "
                    f"{at:,}; {AGAIN}"
                )
        return content

    def verify(self, progress: Callable[[str, float], None] = lambda what, fraction: None) -> None:
        """Read the data of all tensors, and verify the checksums of all blocks.

        Args:
            progress: called after each tensor with (text that names the tensor, fraction of the bytes of all tensors
                verified so far).

        Raises:
            InputError: a block is damaged; the message names its tensor and file.
        """
        self.check_files()
        for file in self.files:
            self._check_header(file)
        total = sum(entry.bytes for entry in self.entries.values())
        done = 0
        for name, entry in self.entries.items():
            there = 0
            for piece in entry.pieces:
                size = prod(piece.size) * entry.dtype.itemsize
                high = len(piece.checksums)
                step = max(1, BATCH_BYTES // self.block_bytes)
                for low in range(0, high, step):
                    self._blocks(name, piece, low, min(low + step, high), size)
                there += size
            if there != entry.bytes:
                raise InputError(f"{self.folder} has {there:,} of the {entry.bytes:,} bytes of {name}")
            done += there
            progress(f"comparing {name}", done / total)


def _batches(of: tuple[slice, ...], size: tuple[int, ...], item_bytes: int) -> list[tuple[int, int]]:
    """Split the rows `of[0]` of a stored piece of shape `size` into ranges (first row, end row) of at most
    `BATCH_BYTES`, or of one row if a row has more bytes. A scalar has one range, (0, 1)."""
    if not of:
        return [(0, 1)]
    rows = max(1, BATCH_BYTES // max(1, prod(size[1:]) * item_bytes))
    return [(first, min(first + rows, of[0].stop)) for first in range(of[0].start, of[0].stop, rows)]


def index_of(folder: Path, files: Sequence[str], step: int) -> str:
    """Make the text of index.json from the headers of the files in a folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is incomplete.
    """
    tensors: dict[str, Any] = {}
    about: dict[str, tuple[int, str]] = {}
    block_bytes = 0
    for file in files:
        header, found = read_header(folder / file)
        said = json.loads(found["__metadata__"][METADATA])
        block_bytes = said["block_bytes"]
        end = len(header)
        for key, place in said["pieces"].items():
            kind, size = found[key]["dtype"], found[key]["shape"]
            begin, end = (len(header) + offset for offset in found[key]["data_offsets"])
            whole = tensors.setdefault(place["name"], {"dtype": kind, "shape": place["shape"], "pieces": []})
            whole["pieces"].append([file, begin, place["start"], size, place["crc32"]])
        there = (folder / file).stat().st_size
        if there != end:
            raise ValueError(f"{folder / file} has {there:,} bytes, expected {end:,}")
        about[file] = there, checksum(header)
    for name, whole in tensors.items():
        held = sum(prod(size) for _, _, _, size, _ in whole["pieces"])
        if held != prod(whole["shape"]):
            raise ValueError(f"{folder} has {held} of the {prod(whole['shape'])} elements of {name}")
    plain = {"step": step, "block_bytes": block_bytes, "files": about, "tensors": tensors}
    return json.dumps(plain, separators=(",", ":")) + "\n"

"""A file of a checkpoint: pieces of tensors in the safetensors format, each with its position and its checksums.

    8 bytes     length of the header, little-endian
    header      JSON: dtype, shape and bytes of each piece, as in safetensors; in __metadata__, under "rooftop", the
                tensor's name, its whole shape, the start of the piece in the tensor, and the CRC-32 of each 4 MiB block
    data        the pieces, one after another

Each block has its own checksum, so that a reader can verify only the rows that it needs. The checksums are computed
while the data are written and are put into the header last, so a truncated file has no checksums.

This file imports only the standard library. If this file runs as a script, it writes one file of a checkpoint while
the training continues. The script starts in a tenth of a second, and reads the data from memory that it shares with the
training process.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

BLOCK_BYTES = 4 << 20  # each block has a checksum of 8 digits: 200 kB per 100 GB
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes per element of each dtype, by the dtype's name in safetensors."""
CHECKERS = 2  # number of checksum threads: one thread checksums 2.5 GB/s, and disks write up to 5 GB/s
NICENESS = 10  # niceness of the writing process, which must not delay the threads of the training
WAITING_CHECKSUM = "0" * 8
METADATA = "rooftop"


@dataclass(frozen=True)
class FilePiece:
    """A piece of a tensor in a file.

    Attributes:
        name: name of the whole tensor.
        dtype: a key of `ITEM_BYTES`.
        shape: shape of the whole tensor.
        start: for each dimension, the piece's first index in the whole tensor.
        size: shape of the piece.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, plain: dict[str, Any]) -> FilePiece:
        """Create a `FilePiece` from its JSON form, which has lists instead of tuples."""
        return cls(plain["name"], plain["dtype"], *(tuple(plain[key]) for key in ("shape", "start", "size")))

    @property
    def bytes(self) -> int:
        """The number of bytes of the piece."""
        return prod(self.size) * ITEM_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """The piece's key in the file: the tensor's name, with index ranges if the piece is not the whole tensor, such
        as "layers.0.mlp.up.weight[0:64, 0:32]"."""
        if self.size == self.shape:
            return self.name
        return f"{self.name}[{', '.join(f'{a}:{a + n}' for a, n in zip(self.start, self.size, strict=True))}]"

    @property
    def blocks(self) -> int:
        """The number of blocks of at most `BLOCK_BYTES` in the piece. Each block has its own checksum."""
        return -(-self.bytes // BLOCK_BYTES)


def header_of(pieces: Sequence[FilePiece], checksums: Sequence[Sequence[str]]) -> bytes:
    """Make the header of a checkpoint file: the bytes before the tensors' data. `checksums` has one checksum per block
    for each piece. The header's length does not depend on the checksums' values."""
    entries: dict[str, Any] = {}
    places: dict[str, Any] = {}
    end = 0
    for piece, sums in zip(pieces, checksums, strict=True):
        begin, end = end, end + piece.bytes
        entries[piece.key] = {"dtype": piece.dtype, "shape": piece.size, "data_offsets": [begin, end]}
        places[piece.key] = {"name": piece.name, "shape": piece.shape, "start": piece.start, "crc32": sums}
    said = json.dumps({"block_bytes": BLOCK_BYTES, "pieces": places}, separators=(",", ":"))
    text = json.dumps({"__metadata__": {"format": "pt", METADATA: said}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data must begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path,
    pieces: Sequence[FilePiece],
    contents: Iterable[memoryview],
    before_each_block: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint file with these pieces, and wait until it is on the disk.

    Args:
        contents: the bytes of each piece; the next piece is requested after the previous one is written.
        before_each_block: called before each block is written.

    Raises:
        OSError: the file cannot be written.
    """
    sums: list[list[str]] = []
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(CHECKERS) as pool:
        _write_all(file, memoryview(header_of(pieces, [[WAITING_CHECKSUM] * piece.blocks for piece in pieces])))
        for piece, content in zip(pieces, contents, strict=True):
            assert content.nbytes == piece.bytes, piece
            blocks = [*blocks_of(content)]
            checksums = pool.map(checksum, blocks)  # in parallel with the writing, because both release the GIL
            for block in blocks:
                before_each_block()
                _write_all(file, block)
            sums.append([*checksums])
        file.seek(0)
        _write_all(file, memoryview(header_of(pieces, sums)))
        os.fsync(file.fileno())


def blocks_of(content: memoryview) -> Iterator[memoryview]:
    """Split a piece's bytes into blocks of `BLOCK_BYTES`."""
    return (content[at : at + BLOCK_BYTES] for at in range(0, content.nbytes, BLOCK_BYTES))


def checksum(block: memoryview | bytes | bytearray) -> str:
    """Return the CRC-32 of a block as eight hexadecimal digits."""
    return f"{crc32(block):08x}"


def _write_all(file: Any, content: memoryview) -> None:
    while content.nbytes:
        content = content[file.write(content) :]


def read_header(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Read the header of a checkpoint file. Return all bytes before the data, and the JSON object in them.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a safetensors file, or its header is cut off.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > path.stat().st_size:
            raise ValueError("it does not begin like a safetensors file")
        text = file.read(length)
    found = json.loads(text)
    if len(text) < length or not isinstance(found, dict):
        raise ValueError("it does not begin like a safetensors file")
    return start + text, found


def write_text(path: Path, text: str) -> None:
    """Write a file, and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the list of a folder's files is on the disk (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- the process that writes ---------------------------------------------------------------------------------------


def request(path: Path, pieces: Sequence[FilePiece], memory: int) -> str:
    """The text that asks the writing process to write the checkpoint file `path`. The process reads the text from its
    standard input.

    Args:
        memory: an inherited file descriptor of shared memory that holds the concatenated pieces.
    """
    return json.dumps(
        {"path": str(path), "pieces": [asdict(piece) for piece in pieces], "memory": memory, "parent": os.getpid()}
    )


def main() -> int:
    """Write the checkpoint file that the JSON on standard input describes. After an OSError, print the error to
    standard output and return exit status 1."""
    import signal

    os.nice(NICENESS)
    for number in (signal.SIGTERM, signal.SIGINT):  # the training gets these signals too, and waits for this process
        signal.signal(number, signal.SIG_IGN)
    said = json.load(sys.stdin)
    pieces = [FilePiece.of(plain) for plain in said["pieces"]]

    def end_with_the_training() -> None:
        if os.getppid() != said["parent"]:
            os._exit(1)

    try:
        total = sum(piece.bytes for piece in pieces)
        memory = memoryview(mmap.mmap(said["memory"], total, mmap.MAP_SHARED, mmap.PROT_READ))
        write_file(Path(said["path"]), pieces, _in_turn(memory, pieces), end_with_the_training)
    except OSError as error:
        print(error, flush=True)
        return 1
    return 0


def _in_turn(memory: memoryview, pieces: Sequence[FilePiece]) -> Iterator[memoryview]:
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.bytes
        yield memory[begin:end]


if __name__ == "__main__":
    sys.exit(main())

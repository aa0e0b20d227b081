"""Read Megatron-LM's index of a token file: `text.idx` describes `text.bin`.

| bytes | type | meaning |
|---|---|---|
| 9 | `MMIDIDX`, 0, 0 | the format |
| 8 | uint64 | version of the format, 1 |
| 1 | uint8 | the dtype of the tokens, a key of `DTYPES` |
| 8, 8 | uint64 | number of sequences; number of entries of the document index |
| 4 each | int32 | number of tokens of each sequence |
| 8 each | int64 | offset in bytes of each sequence in `text.bin` |
| 8 each | int64 | document index: the first sequence of each document, then the number of sequences |
| 1 each | int8 | only in multimodal data: the mode of each sequence |

All numbers are little-endian. Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from rooftop.errors import InputError

MAGIC, OLD_MAGIC, VERSION = b"MMIDIDX\0\0", b"TNTIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
AGAIN = "create both files again with Megatron's tools/preprocess_data.py"


def index_beside(path: Path) -> Path | None:
    """The path of the `.idx` file of a `.bin` file; None if there is no such file."""
    index = path.with_suffix(".idx")
    return index if index.is_file() else None


def indexed_dtype(index: Path, data: Path) -> np.dtype:
    """Read the dtype of a `.bin` file from its index, and check that the sequences fill the file.

    Raises:
        InputError: the index has a different format, is cut off, or belongs to another file, or the tokens are not
            integers.
    """
    size = index.stat().st_size
    with index.open("rb") as file:
        start = file.read(HEADER.size)
    if start.startswith(OLD_MAGIC):
        raise InputError(f"{index} has Megatron's old format (TNTIDX), not the memory-mapped format: {AGAIN}")
    if not start.startswith(MAGIC):
        raise InputError(
            f"{index} is not an index of Megatron-LM: move it away if {data} has no index, otherwise {AGAIN}"
        )
    if len(start) < HEADER.size:
        raise InputError(f"{index} is cut off after {size} bytes: {AGAIN}")
    _, version, code, sequences, documents = HEADER.unpack(start)
    if version != VERSION:
        raise InputError(f"{index} has version {version}, expected {VERSION}: {AGAIN}")
    name = DTYPES.get(code)
    if name is None or name.startswith("float"):
        raise InputError(f"{index} says its numbers are {name or f'of the unknown code {code}'}: expected integers")
    expected = HEADER.size + sequences * (4 + 8) + documents * 8
    if size not in (expected, expected + sequences):
        raise InputError(
            f"{index} has {size} bytes, but {sequences} sequences and {documents} document entries need {expected}: "
            f"{AGAIN}"
        )
    dtype = np.dtype(name).newbyteorder("<")
    _check_places(index, data, dtype, sequences, documents)
    return dtype


def _check_places(index: Path, data: Path, dtype: np.dtype, sequences: int, documents: int) -> None:
    """Check that the sequences in the index lie one after another and fill the data file exactly."""
    at = HEADER.size
    lengths = np.fromfile(index, "<i4", sequences, offset=at).astype(np.int64)
    begins = np.fromfile(index, "<i8", sequences, offset=(at := at + 4 * sequences))
    starts = np.fromfile(index, "<i8", documents, offset=at + 8 * sequences)
    ends = np.cumsum(lengths) * dtype.itemsize
    if (lengths < 0).any() or (begins != ends - lengths * dtype.itemsize).any():
        raise InputError(f"{index} has sequences that do not lie one after another in {data}: {AGAIN}")
    total, there = int(ends[-1]) if sequences else 0, data.stat().st_size
    if there != total:
        raise InputError(
            f"{data} has {there} bytes, but {index} describes {total}: are they from different runs? {AGAIN}"
        )
    if documents and (starts[0] != 0 or starts[-1] != sequences or (np.diff(starts) < 0).any()):
        raise InputError(f"{index} has documents that do not match its {sequences} sequences: {AGAIN}")

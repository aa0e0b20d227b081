"""Read files of integers as tokens. The dtype comes from a second file, from a header, or from the numbers.

| found in the folder or in the `.bin` file | source of the dtype |
|---|---|
| an `.idx` file with the same name | Megatron-LM's index (`megatron_indexes`) |
| a header of 256 int32: 20240520, 1, number of tokens | llm.c's header of GPT-2's tokens; uint16 tokens follow |
| a header of 256 int32: 20240801, 7, number of tokens | llm.c's header of Llama 3's tokens; uint32 tokens follow |
| `meta.pkl` in the folder | nanoGPT's characters: uint16, and the vocabulary size |
| none of these | the file's numbers (`number_widths`) |

Source: llm.c `dev/data/data_common.py`; nanoGPT `data/shakespeare_char/prepare.py`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rooftop.errors import InputError
from rooftop.train.tokens.megatron_indexes import index_beside, indexed_dtype
from rooftop.train.tokens.number_widths import KINDS, found_kind

MAPPED_BYTES = 16 << 20  # smaller files are not mapped, because a process can map only tens of thousands of files
META = "meta.pkl"
LLMC_HEADER_BYTES = 256 * 4
LLMC_TOKENS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""For each magic number (the first number of llm.c's header): the version of the header, and the dtype of the tokens.
"""
LLMC_OTHERS = {
    20240326: "a model",
    20240327: "a model's state for tests",
    20240328: "a tokenizer",
    20240522: "questions of HellaSwag",
}

CONTAINERS = {
    b"\x1f\x8b\x08": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\0": "compressed by xz",
    b"BZh": "compressed by bzip2",
    b"PK\x03\x04": "a zip archive (.npz, or a file of torch.save)",
    b"\x93NUMPY": "a NumPy array: rename it to .npy",
    b"PAR1": "a table: rename it to .parquet",
    b"ARROW1": "a table: rename it to .arrow",
    b"LITPKDS": "LitGPT's packed data set, in chunks",
    b"GGUF": "a model of llama.cpp",
}
"""The first bytes of files that are not plain numbers, with the name of the format."""

Integers = NDArray[np.integer[Any]]


class Numbers(NamedTuple):
    """The tokens in a file.

    Attributes:
        tokens: a 1-D array.
        vocabulary: vocabulary size; None if neither the file nor another file in its folder states the size.
    """

    tokens: Integers
    vocabulary: int | None = None


def binary_numbers(path: Path, kind: str | None = None) -> Numbers:
    """Read the tokens of a `.bin` file.

    Args:
        path: path of the file.
        kind: integer type of the tokens, a name in `KINDS`, for a file that does not state the type. None: the type is
            detected.

    Raises:
        InputError: the file has a different format, such as gzip, or contradicts its header or index; `kind`
            contradicts the stated type; or no type is stated and the numbers are ambiguous.
    """
    index = index_beside(path)
    if index is not None:
        dtype = indexed_dtype(index, path)
        _check_same(path, kind, dtype, f"the index {index.name}")
        return Numbers(mapped(path, dtype))
    headed = _llmc_numbers(path, kind)
    if headed is not None:
        return headed
    _refuse_containers(path)
    vocabulary = _nanogpt_vocabulary(path.parent / META)
    name = kind or found_kind(path)
    if vocabulary is not None and kind is None and name != "uint16":
        raise InputError(
            f"{path} looks like {name}, but {META} beside it is from nanoGPT, which writes uint16: give --token-dtype"
        )
    dtype = KINDS[name]
    if path.stat().st_size % dtype.itemsize:
        raise InputError(f"{path} has {path.stat().st_size} bytes, which is not a whole number of {name} tokens")
    return Numbers(mapped(path, dtype), vocabulary)


def array_numbers(path: Path, kind: str | None = None) -> Numbers:
    """Read the tokens of a `.npy` file.

    Raises:
        InputError: the file is not a 1-D array of integers, or `kind` contradicts its dtype.
    """
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} is not a .npy file of numbers ({error})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{path} has {array.dtype} of shape {array.shape}: expected integers of one dimension")
    _check_same(path, kind, array.dtype, "its header")
    return Numbers(array)


def mapped(path: Path, dtype: np.dtype[Any], offset: int = 0) -> Integers:
    """Memory-map the numbers of a file, from a byte offset on.

    The numbers of a large file stay on the disk until they are read.
    """
    if path.stat().st_size < MAPPED_BYTES:
        return np.fromfile(path, dtype, offset=offset)
    return np.memmap(path, dtype, mode="r", offset=offset)


def _check_same(path: Path, kind: str | None, dtype: np.dtype[Any], who: str) -> None:
    if kind is not None and KINDS[kind] != dtype:
        raise InputError(
            f"{path} has {dtype.name} tokens, as {who} says: --token-dtype {kind} does not fit, leave it out"
        )


def _refuse_containers(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    for magic, what in CONTAINERS.items():
        if start.startswith(magic):
            raise InputError(f"{path} is {what}: expected only numbers, or a header of llm.c")


def _llmc_numbers(path: Path, kind: str | None) -> Numbers | None:
    """Read the numbers after llm.c's header; None without a header."""
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", min(size, LLMC_HEADER_BYTES) // 4)
    magic = int(header[0]) if len(header) else 0
    # From index 32 on, a header has only zeros. If one of these numbers is not zero, the file has no header, and its
    # first number equals the magic number by chance.
    if magic not in LLMC_TOKENS | LLMC_OTHERS or header[32:].any():
        return None
    if magic in LLMC_OTHERS:
        raise InputError(f"{path} contains {LLMC_OTHERS[magic]} of llm.c ({magic}): expected tokens")
    expected, name = LLMC_TOKENS[magic]
    if len(header) < LLMC_HEADER_BYTES // 4:
        raise InputError(f"{path} begins with llm.c's header ({magic}), but is cut off after {size} bytes")
    version, count = int(header[1]), int(header[2])
    if version != expected:
        raise InputError(f"{path} has llm.c's header {magic} of version {version}: expected version {expected}")
    dtype, there = KINDS[name], size - LLMC_HEADER_BYTES
    if there != count * dtype.itemsize:
        raise InputError(
            f"{path} has {there} bytes after llm.c's header, which announces {count} tokens of {dtype.itemsize} "
            "bytes: is the file complete?"
        )
    _check_same(path, kind, dtype, "llm.c's header")
    return Numbers(mapped(path, dtype, LLMC_HEADER_BYTES))


class _PlainValues(pickle.Unpickler):
    """Unpickles only numbers, text and containers, which cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def _nanogpt_vocabulary(path: Path) -> int | None:
    """Read the vocabulary size from nanoGPT's meta.pkl; None if the file does not exist or has no valid size."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            found = _PlainValues(file).load()
    except Exception:  # for the content of another program, pickle raises errors of any type
        return None
    size = found.get("vocab_size") if isinstance(found, dict) else None
    return size if isinstance(size, int) and size > 0 else None

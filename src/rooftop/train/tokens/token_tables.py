"""Read data sets of Hugging Face as a row of tokens: folders of `save_to_disk`, Parquet and Arrow files.

| column | tokens |
|---|---|
| `input_ids` | lists of integers, one after another |
| `text` | the bytes of the texts, one after another |

The package `datasets` reads the files (`pip install datasets`): it memory-maps Arrow files, and converts Parquet files
to Arrow files in its cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rooftop.errors import InputError, MissingExtraError

SUFFIXES = (".parquet", ".arrow")
TOKENS, TEXT = "input_ids", "text"
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"  # files that save_to_disk writes for one split, and for several
NUMBERED = re.compile(r"[-_.]?\d+(-of-\d+)?$")  # matches the end of train-00000-of-00002


class Rows(NamedTuple):
    """A row of tokens as 1-D arrays to concatenate, and whether the tokens are bytes of text."""

    parts: list[NDArray[np.integer[Any]]]
    text: bool


def is_table(path: Path) -> bool:
    """Whether a path is a file or folder that `table_rows` should open."""
    if path.is_dir():
        return (path / SAVED).is_file() or (path / SAVED_SPLITS).is_file() or any(_files(path))
    return path.suffix in SUFFIXES


def table_rows(path: Path) -> Rows:
    """Read the tokens of a data set.

    Raises:
        InputError: the data set has several splits, has neither of the two columns, or cannot be read; or the column
            has missing values or another type.
        MissingExtraError: `datasets` is not installed.
    """
    splits = path / SAVED_SPLITS
    if splits.is_file():
        names = json.loads(splits.read_text(encoding="utf-8")).get("splits", [])
        raise InputError(
            f"{path} has the splits {', '.join(names)}: name one of them, such as {path / (names or ['train'])[0]}"
        )
    files = [path] if path.is_file() else [] if (path / SAVED).is_file() else sorted(_files(path))
    _check_one_split(path, files)
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is a data set of Hugging Face: reading it needs pip install datasets"
        ) from error
    try:
        table = _table(path, files, datasets)
    except Exception as error:  # the libraries below `datasets` raise various errors
        raise InputError(f"{path} cannot be read by datasets ({type(error).__name__}: {error})") from error
    name = next((each for each in (TOKENS, TEXT) if each in table.column_names), None)
    if name is None:
        raise InputError(f"{path} has the columns {', '.join(table.column_names)}: expected {TOKENS} or {TEXT}")
    chunks = [chunk for chunk in table.column(name).chunks if len(chunk)]
    return Rows([part for chunk in chunks if len(part := _numbers(path, name, chunk))], name == TEXT)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix in SUFFIXES and not hidden and path.is_file():
            yield path


def _check_one_split(path: Path, files: list[Path]) -> None:
    """Raise InputError if a folder has several splits, such as train and test, or files of several kinds."""
    found = {(file.parent, file.suffix, NUMBERED.sub("", file.stem)) for file in files}
    if len(found) > 1:
        names = ", ".join(sorted(str(file.relative_to(path)) for file in files)[:4])
        raise InputError(f"{path} has files of more than one split or kind ({names}): give the path of one of them")


def _table(path: Path, files: list[Path], datasets: Any) -> Any:
    """Open a data set of Hugging Face datasets, stored as Arrow or Parquet files, as one Arrow table."""
    if not files:
        found = datasets.load_from_disk(str(path))
    elif files[0].suffix == ".parquet":
        found = datasets.Dataset.from_parquet([str(file) for file in files])
    else:
        found = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
    return found.data


def _numbers(path: Path, name: str, chunk: Any) -> NDArray[np.integer[Any]]:
    """View the numbers of a chunk of a column, without a copy."""
    import pyarrow as arrow

    kinds, kind = arrow.types, chunk.type
    if chunk.null_count:
        raise InputError(f"{path} has {chunk.null_count} missing values in its column {name}: expected none")
    if name == TEXT and (kinds.is_string(kind) or kinds.is_large_string(kind)):
        _, places, letters = chunk.buffers()
        ends = np.frombuffer(places, np.int64 if kinds.is_large_string(kind) else np.int32)
        begin, end = ends[chunk.offset], ends[chunk.offset + len(chunk)]
        return np.frombuffer(letters, np.uint8)[begin:end] if end > begin else np.empty(0, np.uint8)
    lists = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
    if name == TOKENS and lists and kinds.is_integer(kind.value_type):
        flat = chunk.flatten()
        if flat.null_count:
            raise InputError(f"{path} has {flat.null_count} missing values in its lists of {name}: expected none")
        values: NDArray[np.integer[Any]] = flat.to_numpy(zero_copy_only=True)
        return values
    raise InputError(
        f"{path} has {kind} in its column {name}: expected {'text' if name == TEXT else 'lists of integers'}"
    )

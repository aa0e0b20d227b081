"""Data sets of Hugging Face are read as by their own library. Needs `datasets`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rooftop.errors import InputError, MissingExtraError
from rooftop.train import open_tokens

pytestmark = pytest.mark.filterwarnings("ignore::Warning:dill")
ROWS = {"input_ids": [[3, 1], [], [4, 1, 5, 70000]], "text": ["grün ", "", "and blue"]}


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = pytest.importorskip("datasets")
    monkeypatch.setattr(found.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    found.disable_progress_bars()
    return found


def saved(datasets: Any, way: str, folder: Path, rows: dict[str, list[Any]]) -> Path:
    """A folder with a written data set."""
    data = datasets.Dataset.from_dict(rows)
    if way == "folder":
        data.save_to_disk(str(folder / "data"), num_shards=2)
        return folder / "data"
    if way == "file":
        data.to_parquet(str(folder / "a.parquet"))
        return folder / "a.parquet"
    (folder / "data").mkdir()
    data.select([0]).to_parquet(str(folder / "data" / "train-00000-of-00002.parquet"))
    data.select([1, 2]).to_parquet(str(folder / "data" / "train-00001-of-00002.parquet"))
    return folder


@pytest.mark.parametrize("way", ["folder", "file", "hub"])
def test_lists_of_tokens_and_texts_are_rows(datasets: Any, way: str, tmp_path: Path) -> None:
    for name in ROWS:
        (tmp_path / name).mkdir()
        found = open_tokens(saved(datasets, way, tmp_path / name, {name: ROWS[name], "other": [1, 2, 3]}))
        row = found.read(0, len(found)).tolist()
        if name == "text":
            assert found.text
            assert bytes(row).decode() == "grün and blue"
        else:
            assert (row, found.text, found.vocabulary) == ([3, 1, 4, 1, 5, 70000], False, None)


def test_a_slice_of_a_table_has_its_rows_alone(datasets: Any, tmp_path: Path) -> None:
    """Arrow's buffers also contain the data before and after it."""
    from rooftop.train.tokens.token_tables import _numbers

    for name, expected in (("input_ids", [4, 1, 5, 70000]), ("text", list(b"and blue"))):
        (chunk,) = datasets.Dataset.from_dict({name: ROWS[name]}).data.column(name).slice(1, 2).chunks
        np.testing.assert_array_equal(_numbers(tmp_path, name, chunk), expected)


def test_what_is_no_row_is_refused(datasets: Any, tmp_path: Path) -> None:
    for number, (rows, words) in enumerate(
        [
            ({"label": [1, 2]}, "has the columns label: expected input_ids or text"),
            ({"input_ids": [[1, None], [2]]}, "1 missing values in its lists of input_ids"),
            ({"input_ids": [[1], None]}, "1 missing values in its column input_ids"),
            ({"input_ids": [[0.5]]}, "in its column input_ids: expected lists of integers"),
            ({"text": [1, 2]}, "in its column text: expected text"),
            ({"input_ids": [[]]}, "no rows with tokens|expected lists of integers"),
        ]
    ):
        datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / f"{number}.parquet"))
        with pytest.raises(InputError, match=words):
            open_tokens(tmp_path / f"{number}.parquet")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="cannot be read by datasets"):
        open_tokens(tmp_path / "damaged.parquet")


def test_splits_are_not_mixed(datasets: Any, tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(InputError, match=r"has the splits train, test: name one of them, such as .*both/train"):
        open_tokens(tmp_path / "both")
    assert len(open_tokens(tmp_path / "both" / "train")) == 2


def test_parquet_files_of_several_splits_are_refused(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match="files of more than one split or kind"):
        open_tokens(tmp_path)


def test_without_datasets_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"a\.parquet is a data set of Hugging Face: .* pip install datasets"):
        open_tokens(tmp_path / "a.parquet")

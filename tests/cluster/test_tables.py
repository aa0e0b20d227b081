"""Results as rows: columns and types of the first good one, errors for those that do not fit."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.cluster.items import Item
from rooftop.cluster.tables import Failure, fitted, is_settled, row_of, to_batch, whole_schema
from rooftop.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def rows_of(results: list[Any], columns: Any = None, learn: bool = True) -> tuple[list[dict[str, Any]], int, Any]:
    items = [Item(f"{number}.jpg", None, "") for number in range(len(results))]
    outcomes = [each if isinstance(each, Failure) else row_of(each) for each in results]
    batch, errors, columns = to_batch(items, outcomes, columns, learn)
    return batch.to_pylist(), errors, columns


VALUES = st.fixed_dictionaries(
    {
        "n": st.integers(-(2**63), 2**63 - 1),
        "x": st.floats(allow_nan=False),
        "said": st.text(st.characters(blacklist_categories=["Cs"])),
        "yes": st.booleans(),
        "some": st.lists(st.integers(0, 9), min_size=1),
    }
)


@given(results=st.lists(VALUES, min_size=1), failed=st.sets(st.integers(0, 9)))
def test_results_come_back_as_they_were(results: list[dict[str, Any]], failed: set[int]) -> None:
    given: list[Any] = [Failure("no") if number in failed else each for number, each in enumerate(results)]
    rows, errors, _ = rows_of(given)
    assert errors == sum(isinstance(each, Failure) for each in given)
    for row, result in zip(rows, given, strict=True):
        if isinstance(result, Failure):
            assert row["error"] == "no"
            assert set(row.values()) - {None} == {row["input"], "no"}
        else:
            assert row == {"input": row["input"], "place": None, "error": None, **result}


def test_arrays_and_tensors_say_their_types_also_empty_ones() -> None:
    result = {
        "boxes": np.zeros((0, 4), np.float32),
        "features": torch.ones(2, 3, dtype=torch.bfloat16),
        "score": torch.tensor(0.5),
        "count": np.int16(3),
        "each": [np.arange(2), np.arange(1)],
    }
    rows, errors, columns = rows_of([result])
    assert errors == 0
    assert is_settled(columns)
    assert {each.name: str(each.type) for each in columns} == {
        "boxes": "list<item: list<item: float>>",
        "features": "list<item: list<item: float>>",
        "score": "float",
        "count": "int16",
        "each": "list<item: list<item: int64>>",
    }
    assert rows[0]["features"] == [[1, 1, 1], [1, 1, 1]]
    assert (rows[0]["boxes"], rows[0]["score"], rows[0]["each"]) == ([], 0.5, [[0, 1], [0]])


def test_a_value_without_a_name_is_the_column_result() -> None:
    assert rows_of(["a"])[0] == [{"input": "0.jpg", "place": None, "error": None, "result": "a"}]


def test_empty_lists_and_none_take_their_types_from_later_results() -> None:
    _, _, columns = rows_of([{"a": [], "b": None}])
    assert not is_settled(columns)
    rows, errors, columns = rows_of([{"a": [1.5], "b": None}, {"a": [], "b": "x"}], columns)
    assert errors == 0
    assert is_settled(columns)
    assert [str(each.type) for each in columns] == ["list<item: double>", "string"]
    assert [row["a"] for row in rows] == [[1.5], []]


def test_other_columns_are_an_error_that_names_them() -> None:
    rows, errors, _ = rows_of([{"a": 1, "b": 2}, {"a": 1, "c": 2}, {"a": 3, "b": 4}])
    assert errors == 1
    assert rows[1]["error"] == "its columns differ from those of the first result: without b and with c (expected a, b)"
    assert [row["a"] for row in rows] == [1, None, 3]


def test_other_types_are_an_error_of_that_row_alone() -> None:
    rows, errors, _ = rows_of([{"a": 1, "b": "x"}, {"a": "two", "b": "y"}, {"a": 1.5, "b": "y"}, {"a": 4, "b": "z"}])
    assert errors == 2
    assert [row["a"] for row in rows] == [1, None, None, 4]
    assert [row["b"] for row in rows] == ["x", None, None, "z"]
    assert rows[1]["error"].startswith("column 'a': str instead of int64 as in the first result")


def test_a_column_that_never_had_a_type() -> None:
    _, _, columns = rows_of([{"a": None}])
    rows, errors, _ = rows_of([{"a": 3}, {"a": None}], columns, learn=False)
    assert errors == 1
    assert "the first results showed no type" in rows[0]["error"]


def test_first_results_that_no_table_can_have() -> None:
    for result, said in (
        ({"error": 1}, "'error', which every row already has"),
        ({}, "empty dict"),
        ({"a": object()}, "a object"),
    ):
        with pytest.raises(InputError, match=said):
            rows_of([result])


def test_rows_fit_columns_that_came_later() -> None:
    items = [Item("a", None, "")]
    before, errors, columns = to_batch(items, [Failure("no")], None, learn=True)
    assert (errors, columns) == (1, None)
    schema = whole_schema(pa.schema([("n", pa.int64())]))
    assert fitted(before, schema).to_pylist() == [{"input": "a", "place": None, "error": "no", "n": None}]


def test_an_error_is_one_line_of_some_length() -> None:
    assert Failure.of(ValueError("a\n b")).why == "ValueError: a b"
    assert Failure.of(InputError("a.jpg is damaged")).why == "a.jpg is damaged"
    assert Failure.of(KeyError()).why == "KeyError"
    assert len(Failure.of(ValueError("x" * 10_000)).why) == 500
    assert len(Failure("\udce9" * 10_000).why) == 500


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_each_error_can_be_put_into_a_table() -> None:
    assert Failure.of(Unprintable()).why == "Unprintable: <it cannot be printed>"
    rows, errors, _ = rows_of([{"a": 1}, {"\udce9": 1}, Failure.of(ValueError("bad \udce9"))])
    assert errors == 2
    assert "with \\udce9" in rows[1]["error"]
    assert rows[2]["error"] == "ValueError: bad \\udce9"


@pytest.mark.parametrize("big", [2**63, -(2**63) - 1, 2**70])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("shape", [lambda n: n, lambda n: [0, n], lambda n: {"deep": n}], ids=["n", "list", "dict"])
def test_an_integer_that_no_column_holds_is_an_error_of_its_row(shape: Any, place: int, big: int) -> None:
    results = [{"n": shape(7)}] * 2
    results[place] = {"n": shape(big)}
    rows, errors, _ = rows_of(results)
    assert errors == 1
    assert "too large" in rows[place]["error"]
    assert rows[1 - place]["n"] == shape(7)


def test_values_that_fit_alone_but_not_in_one_list_of_python() -> None:
    rows, errors, _ = rows_of([{"n": 1}, {"n": True}, {"n": 2.0}])
    assert (errors, [row["n"] for row in rows]) == (0, [1, 1, 2])
    rows, errors, _ = rows_of([{"n": [1]}, {"n": [True, False]}])
    assert (errors, [row["n"] for row in rows]) == (0, [[1], [1, 0]])


def test_the_keys_of_a_dict_may_have_another_order_or_be_missing() -> None:
    results = [{"s": {"a": 1, "b": 2.5}}, {"s": {"b": 0.5, "a": 3}}, {"s": {"a": 4}}]
    for shape in (lambda s: s, lambda s: [s]):
        rows, errors, columns = rows_of([{"s": shape(each["s"])} for each in results])
        alone = [rows_of([{"s": shape(each["s"])}], columns, learn=False)[0][0] for each in results]
        for found in (rows, alone):
            wanted = [shape({"a": 1, "b": 2.5}), shape({"a": 3, "b": 0.5}), shape({"a": 4, "b": None})]
            assert (errors, [row["s"] for row in found]) == (0, wanted)
    rows, errors, _ = rows_of([{"s": {"a": 1}}, {"s": {"a": 1, "b": 2}}])
    assert errors == 1
    assert "instead of struct<a: int64>" in rows[1]["error"]


def test_decimals_have_room_for_more_digits_than_the_first_one() -> None:
    numbers = [Decimal("1.5"), Decimal("123.456"), Decimal("-0.000000000000000001"), 2**63 - 1, Decimal(10**20 - 1)]
    rows, errors, _ = rows_of([{"d": each, "deep": [{"d": each}]} for each in numbers])
    assert errors == 0
    assert [row["d"] for row in rows] == numbers
    assert [row["deep"][0]["d"] for row in rows] == numbers
    for first in (Decimal("0.1234567890123456789"), Decimal(10**25), Decimal(10**50)):
        assert rows_of([first])[0][0]["result"] == first
    rows, errors, _ = rows_of([Decimal("0.1"), 0.1])
    assert (errors, rows[1]["result"]) == (1, None)
    rows, errors, _ = rows_of([0.1, Decimal("0.1")])
    assert (errors, rows[1]["result"]) == (1, None)


@pytest.mark.parametrize("unit", ["Y", "M", "W", "D", "h", "m", "s", "ms", "us"])
def test_dates_and_times_of_numpy(unit: str) -> None:
    given = np.array(["2020-01-02", "NaT"], f"datetime64[{unit}]")
    rows, errors, columns = rows_of(
        [{"t": given[0], "ts": given, "deep": given[None]}, {"t": given[1], "ts": given[:0], "deep": given[None]}]
    )
    assert (errors, is_settled(columns)) == (0, True)
    wanted = given.astype("M8[D]" if unit in "YMWD" else "M8[us]").tolist()
    assert ([row["t"] for row in rows], rows[0]["ts"], rows[1]["ts"]) == (wanted, wanted, [])
    assert rows[0]["deep"] == [wanted]


def test_durations_of_numpy_and_a_time_that_becomes_no_date() -> None:
    rows, errors, _ = rows_of([np.timedelta64(2, unit) for unit in ("W", "D", "h", "m", "s")])
    assert (errors, rows[1]["result"]) == (0, datetime.timedelta(days=2))
    rows, errors, _ = rows_of([datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 12)])
    assert (errors, rows[1]["result"]) == (1, None)


def test_arrays_in_the_other_order_of_bytes() -> None:
    given = np.arange(6).reshape(2, 3)
    rows, errors, _ = rows_of([{"n": given.astype(">i4"), "x": given.astype(">f8")[0], "t": given.astype(">M8[s]")[0]}])
    assert errors == 0
    assert (rows[0]["n"], rows[0]["x"]) == (given.tolist(), [0, 1, 2])


def test_a_result_that_is_nested_too_deep_for_a_parquet_file(tmp_path: Path) -> None:
    def nested(levels: int, inner: Any = 1) -> Any:
        return inner if levels == 0 else [nested(levels - 1, inner)]

    whole = to_batch([Item("a", None, "")], [row_of(nested(40))], None, learn=True)[0]
    pq.write_table(pa.Table.from_batches([whole]), tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet")["result"].to_pylist() == [nested(40)]
    for value in (nested(41), nested(900), nested(39, np.ones((1, 1)))):
        with pytest.raises(ValueError, match="more than 40 levels"):
            row_of(value)


@pytest.mark.parametrize("value", [2, 0, 1.0, [2]])
def test_a_number_becomes_no_boolean(value: Any) -> None:
    first = [True] if isinstance(value, list) else True
    rows, errors, _ = rows_of([{"n": first}, {"n": value}])
    assert errors == 1
    assert (rows[0]["n"], rows[1]["n"]) == (first, None)
    assert "instead of" in rows[1]["error"]


UTC = datetime.UTC
NOON = datetime.datetime(2020, 1, 1, 12)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (np.float32(1), 1e300),
        (np.float16(1), np.float32(70000)),
        (np.float32(1), 2**24 + 1),
        (Decimal("1.5"), Decimal("1e30")),
        (Decimal("1.5"), Decimal("123456789012345678901234567890")),
        (NOON, NOON.replace(tzinfo=UTC)),
        (NOON.replace(tzinfo=UTC), NOON),
        (NOON.date(), NOON),
    ],
)
@pytest.mark.parametrize("shape", [lambda v: v, lambda v: [v], lambda v: {"deep": v}], ids=["alone", "list", "dict"])
def test_a_value_that_the_type_of_its_column_would_change(shape: Any, first: Any, later: Any) -> None:
    rows, errors, columns = rows_of([{"v": shape(first)}, {"v": shape(later)}])
    assert (errors, rows[1]["v"]) == (1, None)
    assert "as in the first result" in rows[1]["error"]
    assert rows[0]["v"] == shape(first)
    alone, errors, _ = rows_of([{"v": shape(later)}], columns, learn=False)
    assert (errors, alone[0]["v"]) == (1, None)


def test_floats_are_rounded_to_the_precision_of_their_column() -> None:
    rows, errors, _ = rows_of([{"v": np.float32(1)}, {"v": 0.1}])
    assert (errors, rows[1]["v"]) == (0, np.float32(0.1))


def test_floats_that_a_narrower_type_has_and_those_that_are_not_finite() -> None:
    given = [np.float32(1), 0.5, float("nan"), float("-inf"), None, [2.5, float("nan"), None]]
    rows, errors, _ = rows_of([{"x": [np.float32(1)], "y": each} for each in given])
    assert (errors, rows[5]["y"]) == (1, None)
    rows, errors, _ = rows_of([{"x": np.ones(2, np.float32)}, {"x": given[-1]}, {"x": []}])
    assert errors == 0
    assert str(rows[1]["x"]) == "[2.5, nan, None]"
    rows, errors, _ = rows_of([NOON, NOON.date()])
    assert (errors, rows[1]["result"]) == (0, datetime.datetime(2020, 1, 1))


def test_keys_that_are_the_same_text() -> None:
    for result in ({1: 2, "1": 3}, {"deep": [{1: 2, "1": 3}]}):
        with pytest.raises(ValueError, match="several keys of a dict are '1' as text"):
            row_of(result)


def test_masked_values_of_numpy_are_null() -> None:
    masked = np.ma.array([[1, 2], [3, 4]], mask=[[False, True], [False, False]])
    rows, errors, _ = rows_of([{"all": masked, "mean": np.ma.masked}, {"all": masked.data, "mean": np.float32(1)}])
    assert errors == 0
    assert [row["all"] for row in rows] == [[[1, None], [3, 4]], [[1, 2], [3, 4]]]
    assert [row["mean"] for row in rows] == [None, 1]

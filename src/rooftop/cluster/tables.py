"""Convert results to table rows: determine the columns, and turn results that do not fit into errors.

Every row has `input`, `place` and `error`, followed by the result's columns, which are null in a row with an error. The
first good result, in the order of the items, sets the columns and their types. Arrays and tensors have a type even if
they are empty. Python's empty lists and None have no type, so a later result sets the type of their column.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np

from rooftop.cluster.arrow import load_arrow
from rooftop.cluster.items import Item
from rooftop.errors import InputError
from rooftop.words import whole_message

FIXED = ("input", "place", "error")
MOST_CHARACTERS = 500  # maximum length of an error message in a table
REFUSALS = (ValueError, TypeError, OverflowError)  # raised by pyarrow for unsuitable values, besides its own exceptions
MOST_LEVELS = 40  # maximum nesting of a result; Parquet files with lists in 50 levels can be written, but not read
DECIMAL = (38, 18)  # precision and scale of a column of decimals, as in Spark: 20 digits before the point, 18 after it
# NumPy's units of time that Arrow lacks -> a finer unit that Arrow has. Arrow has D for dates, but not for durations.
DATE_UNITS = {"Y": "D", "M": "D", "W": "D", "h": "s", "m": "s", "generic": "s"}
DURATION_UNITS = {"W": "s", "D": "s", "h": "s", "m": "s", "generic": "s"}
ATOMS = frozenset({bool, int, float, str, bytes, type(None)})  # types whose values contain no arrays or tensors


@dataclass(frozen=True)
class Failure:
    """The reason why a result is missing, in one line of limited length that a table can hold."""

    why: str

    def __post_init__(self) -> None:
        text = whole_message(self.why)
        object.__setattr__(self, "why", text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "...")

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Describe an exception by its type and message, or an InputError by only its message."""
        said = whole_message(error)
        kind = type(error).__name__
        return Failure(said if isinstance(error, InputError) and said else f"{kind}: {said}" if said else kind)


Row = dict[str, Any]


def row_of(result: Any) -> Row:
    """Return a result as a row: a mapping's items, or the column `result` for any other value.

    Raises:
        ValueError: a value is nested too deep, or two keys of a dict have the same name as text.
    """
    if isinstance(result, Mapping):
        return _named(result, 0)
    return {"result": _plain(result)}


def _named(values: Mapping[Any, Any], levels: int) -> Row:
    """Return a mapping as a dict whose keys are text, such as "1" for 1."""
    found = {str(name): _plain(value, levels + 1) for name, value in values.items()}
    if len(found) < len(values):
        names = [str(name) for name in values]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"several keys of a dict are {twice!r} as text: give each key a name of its own")
    return found


def _plain(value: Any, levels: int = 1) -> Any:
    """Convert tensors to arrays of the same dtype (bfloat16: float32), and arrays to dtypes of Arrow, also inside lists
    and dicts."""
    if type(value) in ATOMS:
        return value
    if levels + getattr(value, "ndim", 0) > MOST_LEVELS:
        raise ValueError(f"the result is nested more than {MOST_LEVELS} levels deep: expected fewer levels")
    torch = sys.modules.get("torch")  # no value is a tensor if torch is not loaded
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, Mapping):
        return _named(value, levels)
    if isinstance(value, (list, tuple)):
        return list(value) if _holds_atoms(value) else [_plain(each, levels + 1) for each in value]
    if np.ma.is_masked(value):
        return value.tolist()  # masked values become null
    if isinstance(value, (np.ndarray, np.generic)):
        return value.astype(_dtype_of_arrow(value.dtype), copy=False)
    return value


def _dtype_of_arrow(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype to which arrays are converted for Arrow: in native byte order, with a unit of time that Arrow has. The
    converted values denote the same numbers and times."""
    if dtype.kind in "mM":
        unit, _ = np.datetime_data(dtype)
        unit = (DATE_UNITS if dtype.kind == "M" else DURATION_UNITS).get(unit, unit)
        return np.dtype(f"{dtype.kind}8[{unit}]")
    return dtype.newbyteorder("=")


def _holds_atoms(values: Sequence[Any]) -> bool:
    """Whether no element needs conversion. (A detector's row has hundreds of numbers, and separate checks cost 1 us
    each.)"""
    return ATOMS.issuperset(map(type, values))


# ---- columns ---------------------------------------------------------------------------------------------------------


def whole_schema(columns: Any | None) -> Any:
    """The schema of the Parquet parts: the columns input, place and error, then the columns of the results (a
    pyarrow.Schema, or None)."""
    pa = load_arrow()
    fixed = [("input", pa.string()), ("place", pa.int64()), ("error", pa.string())]
    return pa.schema([*fixed, *(columns or ())])


def is_settled(columns: Any | None) -> bool:
    """Whether the results' columns (a pyarrow.Schema, or None) are known, and each has a type."""
    return columns is not None and not any(_untyped(field.type) for field in columns)


def _untyped(kind: Any) -> bool:
    return load_arrow().types.is_null(kind) or any(_untyped(kind.field(i).type) for i in range(kind.num_fields))


def _type_of(value: Any) -> Any:
    pa = load_arrow()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufmM":
        kind = pa.from_numpy_dtype(value.dtype)
        for _ in range(value.ndim):
            kind = pa.list_(kind)
        return kind
    if isinstance(value, list) and value and all(isinstance(each, np.ndarray) for each in value):
        return pa.list_(_type_of(value[0]))
    return _roomy(pa.infer_type([_nested(value)]))


def _roomy(kind: Any) -> Any:
    """Widen the decimals in a type, since the first decimal does not tell how many digits later ones have."""
    pa = load_arrow()
    if pa.types.is_decimal(kind):
        precision, scale = DECIMAL
        if kind.scale <= scale and kind.precision - kind.scale <= precision - scale:
            return pa.decimal128(precision, scale)
        return pa.decimal128(38, kind.scale) if kind.precision <= 38 else pa.decimal256(76, kind.scale)
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_roomy(each.type)) for each in kind])
    return pa.list_(_roomy(kind.value_type)) if pa.types.is_list(kind) else kind


def _nested(value: Any) -> Any:
    """Convert arrays to nested lists of 1-D arrays, and NumPy's dates to Python's, which pyarrow accepts."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype == "M8[D]":
        return value.tolist()
    if isinstance(value, np.ndarray):
        return value[()] if value.ndim == 0 else value if value.ndim == 1 else [_nested(each) for each in value]
    if isinstance(value, list):
        return value if _holds_atoms(value) else [_nested(each) for each in value]
    if isinstance(value, dict):
        return {name: _nested(each) for name, each in value.items()}
    return value


def learned(columns: Any | None, row: Row) -> Any:
    """The row's columns (a pyarrow.Schema) if no columns are known yet. Otherwise the known columns: if the row has the
    same columns, it sets the types that are missing.

    Raises:
        InputError: a value fits into no type of column, a column has the name of a fixed column, or the row is empty.
    """
    pa = load_arrow()
    taken = [name for name in row if name in FIXED]
    if taken:
        raise InputError(f"a result has the column {taken[0]!r}, which every row already has: give it another name")
    if not row:
        raise InputError("a result is an empty dict: expected a dict with at least one item, or a single value")

    def field(name: str, value: Any) -> Any:
        try:
            return pa.field(name, _type_of(value))
        except (pa.ArrowException, *REFUSALS) as error:
            raise InputError(
                f"column {name!r}: a {type(value).__name__} cannot be put into a table: expected numbers, text, "
                "bytes, dates, arrays, tensors, and lists and dicts of them"
            ) from error

    if columns is None:
        return pa.schema([field(name, value) for name, value in row.items()])
    if set(row) != set(columns.names):
        return columns
    return pa.schema([field(each.name, row[each.name]) if _untyped(each.type) else each for each in columns])


# ---- rows ------------------------------------------------------------------------------------------------------------


def to_batch(
    items: Sequence[Item], outcomes: Sequence[Row | Failure], columns: Any | None, learn: bool = False
) -> tuple[Any, int, Any]:
    """Return a pyarrow.RecordBatch with one row per item, the number of errors, and the columns that are known
    afterwards.

    Args:
        outcomes: the outcome of each item.
        columns: the result columns that are known; None: none yet.
        learn: whether the rows may set columns and types that are not known yet.

    Raises:
        InputError: the first good row cannot become columns; see `learned`.
    """
    pa = load_arrow()
    checked = list(outcomes)
    for number, outcome in enumerate(checked):
        if isinstance(outcome, Failure):
            continue
        if learn and not is_settled(columns):
            if columns is None:
                columns = learned(None, outcome)
            else:
                try:
                    columns = learned(columns, outcome)
                except InputError as error:
                    checked[number] = Failure.of(error)
                    continue
        if (difference := _difference(outcome, columns)) is not None:
            checked[number] = Failure(difference)
    arrays = []
    for field in columns or ():
        values = [None if isinstance(each, Failure) else _nested(each[field.name]) for each in checked]
        try:
            arrays.append(_column(values, field.type))
        except (pa.ArrowException, *REFUSALS):  # find the row that does not fit
            alone = []
            for number, value in enumerate(values):
                try:
                    alone.append(_column([value], field.type))
                except (pa.ArrowException, *REFUSALS) as error:
                    said = " ".join(str(error).split())[:200]
                    got = type(value).__name__
                    why = f"{got} instead of {field.type} as in the first result ({said})"
                    if _untyped(field.type):
                        why = (
                            f"{got}, but the first results showed no type for it: return an array, which has a type "
                            "even when empty"
                        )
                    checked[number] = Failure(f"column {field.name!r}: {why}")
            if len(alone) == len(values):  # each value fits alone, but not all in one list: [True] and [1]
                arrays.append(pa.concat_arrays(alone))
                continue
            return to_batch(items, checked, columns)  # repeat with the failed rows as errors, whose columns are null
    errors = [each.why if isinstance(each, Failure) else None for each in checked]
    return _whole_batch(items, errors, arrays, columns), sum(each is not None for each in errors), columns


def is_table(results: Any) -> bool:
    """Whether results are a pyarrow.RecordBatch."""
    return isinstance(results, load_arrow().RecordBatch)


def with_items(items: Sequence[Item], results: Any) -> Any:
    """Add the columns input, place and error to results, a pyarrow.RecordBatch with one row per item. All errors are
    null."""
    return _whole_batch(items, [None] * len(items), results.columns, results.schema)


def _whole_batch(items: Sequence[Item], errors: Sequence[str | None], arrays: Sequence[Any], columns: Any) -> Any:
    """Make a pyarrow.RecordBatch with the columns input, place and error, and the result columns of the schema
    `columns`, whose values are `arrays`."""
    pa = load_arrow()
    whole = whole_schema(columns)
    fixed = [[item.input for item in items], [item.place for item in items], errors]
    arrays = [*(pa.array(values, whole.field(i).type) for i, values in enumerate(fixed)), *arrays]
    return pa.RecordBatch.from_arrays(arrays, schema=whole)


def _column(values: list[Any], kind: Any) -> Any:
    """Convert values to a type. Only floats that are not whole numbers may be rounded, to another float type. For an
    integer type, 2.0 is converted, but 1.5 and "2" are refused.

    Raises:
        ArrowException, ValueError, TypeError, OverflowError: pyarrow refuses the values, or their type may not become
            this type (see `_alike`).
    """
    pa = load_arrow()
    found = pa.array(values)
    if _holds_times(found.type) and len(set(_clocks(values))) > 1:
        # in one array, Arrow drops the times of day or the time zones
        raise TypeError("a mix of dates and times, or of times with and without a time zone")
    if found.type == kind:
        return found
    if pa.types.is_null(found.type):
        return pa.array(values, kind)
    if not _alike(found.type, kind):
        raise TypeError(f"its type is {found.type}")
    fitting = found.cast(kind)
    if _is_lossy(found, fitting):
        raise ValueError("a number is too large for this type, or has too many digits: return the same dtype each time")
    return fitting


def _holds_times(kind: Any) -> bool:
    types = load_arrow().types
    return (
        types.is_date(kind)
        or types.is_timestamp(kind)
        or any(_holds_times(kind.field(i).type) for i in range(kind.num_fields))
    )


def _clocks(value: Any) -> Iterator[str]:
    """Yield the kind of each `date` and `datetime` in a value: "date", "time" (a datetime without a time zone) or "time
    in a zone" (a datetime with one)."""
    if isinstance(value, datetime):
        yield "time" if value.tzinfo is None else "time in a zone"
    elif isinstance(value, date):
        yield "date"
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _clocks(each)


def _is_lossy(found: Any, fitting: Any) -> bool:
    """Whether a cast has changed a decimal or a float that is a whole number, or has made a finite float infinite.
    Floats that are not whole numbers may be rounded to the column's precision. Arrow does not check casts from float to
    float, and misses some overflows of decimals.

    Args:
        found, fitting: the array before and after the cast.

    Raises:
        ArrowInvalid: a decimal has overflowed.
    """
    pa = load_arrow()
    one, other = found.type, fitting.type
    if pa.types.is_struct(one):
        return any(_is_lossy(found.field(i), fitting.field(each.name)) for i, each in enumerate(one))
    if pa.types.is_list(one):
        return _is_lossy(found.flatten(), fitting.flatten())
    compute = pa.compute
    if pa.types.is_floating(one) and pa.types.is_floating(other):
        whole = compute.equal(found, compute.floor(found))
        changed = compute.not_equal(found, fitting.cast(one))
        lost = compute.or_(compute.and_(whole, changed), compute.is_inf(fitting))
        return bool(compute.any(compute.and_(compute.is_finite(found), lost)).as_py())
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        return compute.all(compute.equal(found, fitting.cast(one))).as_py() is False
    return False


def _alike(one: Any, other: Any) -> bool:
    """Whether values of type `one` may become `other`: both are numbers, both are text, or both are nested in the same
    way. The keys of a dict may have another order, and missing keys are null. An unknown type matches any type.

    A boolean may become a number, but a number may not become a boolean. Floats and decimals may not become each other,
    since the digits of a value would change. A time may not become a date. Times with and without a time zone may not
    become each other."""
    pa = load_arrow()
    if pa.types.is_null(one) or pa.types.is_null(other):
        return True
    if pa.types.is_boolean(other) and not pa.types.is_boolean(one):
        return False  # 2 would become True
    if pa.types.is_date(other) and not pa.types.is_date(one):
        return False  # Arrow drops the time of day
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and (one.tz is None) != (other.tz is None):
        return False  # Arrow takes a time without a zone for UTC
    if pa.types.is_decimal(one) or pa.types.is_decimal(other):
        return all(pa.types.is_decimal(each) or pa.types.is_integer(each) for each in (one, other))
    numbers = [pa.types.is_boolean(each) or pa.types.is_primitive(each) for each in (one, other)]
    if any(numbers):
        return all(numbers) and pa.types.is_temporal(one) == pa.types.is_temporal(other)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        places = [other.get_field_index(each.name) for each in one]
        return -1 not in places and all(
            _alike(each.type, other.field(place).type) for each, place in zip(one, places, strict=True)
        )
    if one.num_fields != other.num_fields or pa.types.is_struct(one) or pa.types.is_struct(other):
        return False
    if not one.num_fields:
        return bool(one == other)
    return all(_alike(one.field(i).type, other.field(i).type) for i in range(one.num_fields))


def _difference(row: Row, columns: Any) -> str | None:
    """Describe which of the known columns a row lacks, and which others it has; None if the names are the same."""
    missing = [name for name in columns.names if name not in row]
    more = [name for name in row if name not in columns.names]
    if not missing and not more:
        return None
    said = [f"{what} {', '.join(names)}" for what, names in (("without", missing), ("with", more)) if names]
    return (
        f"its columns differ from those of the first result: {' and '.join(said)} (expected {', '.join(columns.names)})"
    )


def fitted(batch: Any, schema: Any) -> Any:
    """Fit a batch to a schema: add missing columns as null, and give a type to columns that have none."""
    pa = load_arrow()
    if batch.schema.equals(schema):
        return batch
    arrays = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def fitted_table(batches: Sequence[Any], schema: Any) -> Any:
    """A pyarrow.Table of batches, each fitted to the schema."""
    return load_arrow().Table.from_batches([fitted(each, schema) for each in batches], schema)


def joined(batches: Sequence[Any], columns: Any | None) -> Any:
    """Concatenate batches of rows into one batch, which has all result columns that were known after the last batch."""
    (batch,) = fitted_table(batches, whole_schema(columns)).combine_chunks().to_batches()
    return batch

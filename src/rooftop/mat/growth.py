"""Rows that come and go at the end of a Mat, as in a std::vector: room is taken for more than are asked for.

A header grows in place only into room where no other header of the block has rows; OpenCV lets two headers push
different rows to the same place.

Source of the policy: Mat::reserve and Mat::push_back of OpenCV (half as many rows again, at least 64 bytes).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rooftop.mat import headers
from rooftop.mat.expressions import MatExpr
from rooftop.mat.scalars import ScalarLike

if TYPE_CHECKING:
    from rooftop.mat.matrix import Mat, MatLike

_LEAST_BYTES = 64


def push_back(m: Mat, value: Mat | MatLike | ScalarLike) -> None:
    """Rows after the last, or one element for a single column.

    Raises:
        ValueError: rows of another length or type.
    """
    rows = _as_rows(m, value)
    if rows.empty():
        return
    if not m._sizes or (m._data is None and m.empty() and m._sizes[1:] != rows._sizes[1:]):
        m._become(rows.clone().to(m._device))
        return
    if rows._sizes[1:] != m._sizes[1:] or rows._type != m._type:
        raise ValueError(f"{rows} cannot be pushed to {m}: rows must be of one length and type")
    count, more = len(m), len(rows)
    if not _grows_in_place(m, count + more):
        _move(m, max(count + more, (count * 3 + 1) // 2))
    _set_rows(m, count + more)
    rows.copyTo(m._header((more, *m._sizes[1:]), m._steps, m._offset + count * m._steps[0], True))


def pop_back(m: Mat, nelems: int) -> None:
    """Takes so many rows off the end; their room stays.

    Raises:
        ValueError: more rows than there are.
    """
    if not 0 <= nelems <= len(m):
        raise ValueError(f"{nelems} rows cannot be taken off {m}")
    if m._submatrix:
        m._sizes, m._cached = (len(m) - nelems, *m._sizes[1:]), None
    elif nelems:
        _set_rows(m, len(m) - nelems)


def reserve(m: Mat, nelems: int) -> None:
    """Makes room for so many rows in all, so that as many can be pushed without moving.

    Raises:
        ValueError: an empty Mat, whose rows have no length yet.
    """
    if nelems < 0:
        raise ValueError(f"reserve takes a number of rows, got {nelems}")
    if not m._sizes:
        raise ValueError("rows of an empty Mat have no length: create(0, cols, type) first")
    if nelems > len(m) and not _grows_in_place(m, nelems):
        _move(m, nelems)


def resize(m: Mat, nelems: int, value: ScalarLike | None) -> None:
    """So many rows in all: the last ones go, or new ones come, set to the value or, if it is None, to nothing.

    Raises:
        ValueError: fewer than 0.
    """
    if nelems < 0:
        raise ValueError(f"resize takes a number of rows, got {nelems}")
    before = len(m)
    if nelems <= before:
        pop_back(m, before - nelems)
        return
    reserve(m, nelems)
    _set_rows(m, nelems)
    if value is not None:
        m[before:nelems].setTo(value)


def _as_rows(m: Mat, value: Mat | MatLike | ScalarLike) -> Mat:
    if isinstance(value, m.__class__):
        return value._header_of_itself()
    if isinstance(value, MatExpr) or (isinstance(value, np.ndarray | Tensor) and value.ndim > 1):
        return m.__class__(value)
    if m.dims not in (1, 2) or (m.dims == 2 and m.cols != 1):
        raise ValueError(f"one element can be pushed to a single column, not to {m}: push a Mat of rows")
    return m.__class__((1,) * m.dims, m._type, value, device=m._device)


def _grows_in_place(m: Mat, rows: int) -> bool:
    """Whether there is room, and no other header has rows there."""
    data = m._data
    if data is None or m._submatrix or data.user_given or m._offset + rows * m._steps[0] > m._limit:
        return False
    end = m._offset + len(m) * m._steps[0]
    if data.headers == 1:
        data.used_bytes = end
    return data.used_bytes == end


def _move(m: Mat, rows: int) -> None:
    """To a block with room for so many rows."""
    row_bytes = math.prod(m._sizes[1:]) * m.elemSize()
    if rows * row_bytes < _LEAST_BYTES and row_bytes:
        rows = -(-_LEAST_BYTES // row_bytes)
    room = m.__class__((rows, *m._sizes[1:]), m._type, allocator=m._own_allocator())
    count = len(m)
    if m._data is not None and count:
        m.copyTo(room._header((count, *m._sizes[1:]), room._steps, room._offset, True))
    m._become(room)
    del room
    _set_rows(m, count)


def _set_rows(m: Mat, rows: int) -> None:
    """Another number of rows in the room that there is."""
    m._sizes, m._cached = (rows, *m._sizes[1:]), None
    m._end = m._offset + headers.span_bytes(m._sizes, m._steps)
    if m._data is not None:
        end = m._offset + rows * m._steps[0]
        m._data.used_bytes = end if m._data.headers == 1 else max(m._data.used_bytes, end)

"""Add and remove rows at the end of a Mat, like a std::vector: repeated pushes seldom move the Mat, because a push that
moves the Mat reserves memory for later pushes.

A header grows in place only into memory that no other header of its block uses. (OpenCV lets two headers push different
rows to the same position.)

Source of the policy: Mat::reserve and Mat::push_back of OpenCV. A push to a full Mat moves it to memory for 1.5 times
its present rows, or for all rows after the push if they need more. New memory has at least 64 bytes.
"""

from __future__ import annotations

import math
from operator import index as as_integer
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
    """Append rows. A Mat with a single column also accepts one element.

    Raises:
        ValueError: the new rows differ from the Mat's rows in length or type.
    """
    rows = _as_rows(m, value)
    if rows.empty():
        return
    if not m._sizes or (m._data is None and m.empty() and m._sizes[1:] != rows._sizes[1:]):
        m._become(rows.clone().to(m._device))
        return
    if rows._sizes[1:] != m._sizes[1:] or rows._type != m._type:
        raise ValueError(f"{rows} cannot be pushed to {m}: the rows of both must have the same length and type")
    count, more = len(m), len(rows)
    if not _grows_in_place(m, count + more):
        _move(m, max(count + more, (count * 3 + 1) // 2))
    _set_rows(m, count + more)
    rows.copyTo(m._header((more, *m._sizes[1:]), m._steps, m._offset + count * m._steps[0], True))


def pop_back(m: Mat, nelems: int) -> None:
    """Remove `nelems` rows from the end; their memory stays reserved.

    Raises:
        TypeError: `nelems` is not an integer.
        ValueError: `nelems` is negative, or exceeds the number of rows.
    """
    nelems = as_integer(nelems)
    if not 0 <= nelems <= len(m):
        raise ValueError(f"cannot remove {nelems} rows from {m}: pass at least 0 and at most its number of rows")
    if m._submatrix:
        m._sizes, m._cached = (len(m) - nelems, *m._sizes[1:]), None
    elif nelems:
        _set_rows(m, len(m) - nelems)


def reserve(m: Mat, nelems: int) -> None:
    """Reserve memory for `nelems` rows in total, so that the Mat does not move until it has more rows than that.

    Raises:
        TypeError: `nelems` is not an integer.
        ValueError: `nelems` is negative, or the Mat has no sizes, so its rows have no length yet.
    """
    nelems = as_integer(nelems)
    if nelems < 0:
        raise ValueError(f"reserve takes a number of rows of at least 0, got {nelems}")
    if not m._sizes:
        raise ValueError("rows of a Mat without sizes have no length yet: call create(0, cols, type) first")
    if nelems > len(m) and not _grows_in_place(m, nelems):
        _move(m, nelems)


def resize(m: Mat, nelems: int, value: ScalarLike | None) -> None:
    """Set the number of rows: remove the last rows, or add rows. New rows are set to `value`, or not initialized if
    `value` is None.

    Raises:
        TypeError: `nelems` is not an integer.
        ValueError: `nelems` is negative, or rows are added to a Mat without sizes.
    """
    nelems = as_integer(nelems)
    if nelems < 0:
        raise ValueError(f"resize takes a number of rows of at least 0, got {nelems}")
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
    """Whether the Mat can grow to `rows` rows without a move: the reserved memory after its last row suffices, and no
    other header uses that memory.
    """
    data = m._data
    if data is None or m._submatrix or data.user_given or m._offset + rows * m._steps[0] > m._limit:
        return False
    end = m._offset + len(m) * m._steps[0]
    if data.headers == 1:
        data.used_bytes = end
    return data.used_bytes == end


def _move(m: Mat, rows: int) -> None:
    """Move the Mat's rows to a new block of memory, which has room for at least `rows` rows. The number of rows does
    not change.
    """
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
    """Set a Mat's number of rows. The caller has checked that the rows fit into the reserved memory."""
    m._sizes, m._cached = (rows, *m._sizes[1:]), None
    m._end = m._offset + headers.span_bytes(m._sizes, m._steps)
    if m._data is not None:
        end = m._offset + rows * m._steps[0]
        m._data.used_bytes = end if m._data.headers == 1 else max(m._data.used_bytes, end)

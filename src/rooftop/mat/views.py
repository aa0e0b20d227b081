"""Headers of Mats, their properties, and views. A header has the type, the sizes and the steps of a Mat, and refers to
a block of memory. A view is another header on the same block.

Making a view computes a few integers and runs no tensor operation. The tensor is created when an operation first needs
the elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index as as_integer
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from rooftop.mat import headers
from rooftop.mat.allocation import MatData
from rooftop.mat.headers import Sizes
from rooftop.mat.type_codes import CV_CN_SHIFT, CV_DEPTH_MAX, CV_MAKETYPE, DEPTHS, depth_of, typeToString

_DEPTH_MASK = CV_DEPTH_MAX - 1
Range = slice | int


class MatSize(tuple[int, ...]):
    """The sizes of a Mat's dimensions, rows first, like cv::MatSize: `m.size[0]` is the number of rows.

    An object of this class can also be called, like cv::MatSize: `m.size()` returns (width, height), like cv::Size, so
    columns come first.
    """

    __slots__ = ()

    def __call__(self) -> tuple[int, int]:
        if len(self) > 2:
            raise ValueError(f"width and height exist for at most two dimensions, got {tuple(self)}: use m.size[i]")
        rows, cols = (1, *self)[-2:] if self else (0, 0)
        return cols, rows


class Shaped:
    """Properties that follow from a type and sizes. Mats and matrix expressions have these properties."""

    __slots__ = ()
    _type: int
    _sizes: Sizes

    def type(self) -> int:
        """OpenCV 5's code of the depth and the number of channels, such as CV_8UC3 (64; OpenCV 4's code is 16)."""
        return self._type

    def depth(self) -> int:
        """OpenCV 5's code of the number type of one channel (the depth), such as CV_8U."""
        return self._type & _DEPTH_MASK

    def channels(self) -> int:
        return (self._type >> CV_CN_SHIFT) + 1

    @property
    def dims(self) -> int:
        return len(self._sizes)

    @property
    def rows(self) -> int:
        """Number of rows: 0 if the Mat has no dimensions, 1 if it has one dimension, -1 if it has more than two."""
        if self.dims > 2:
            return -1
        return self._sizes[0] if self.dims == 2 else self.dims

    @property
    def cols(self) -> int:
        """Number of columns: 0 if the Mat has no dimensions, -1 if it has more than two dimensions."""
        if self.dims > 2:
            return -1
        return self._sizes[-1] if self._sizes else 0

    @property
    def size(self) -> MatSize:
        """The sizes of all dimensions, rows first: (rows, columns) for two dimensions.

        The sizes can also be called, as in OpenCV: `m.size()`, with parentheses, returns (width, height), so columns
        come first.
        """
        return MatSize(self._sizes)

    def total(self) -> int:
        """The number of elements."""
        return math.prod(self._sizes) if self._sizes else 0

    def empty(self) -> bool:
        """Whether there are no elements."""
        return not self._sizes or 0 in self._sizes


class Header(Shaped):
    """The read-only part of a `Mat`: type, sizes, steps, memory and views."""

    __slots__ = (
        "__weakref__", "_cached", "_data", "_device", "_end", "_limit", "_offset", "_share", "_sizes", "_start",
        "_steps", "_submatrix", "_type",
    )  # fmt: skip

    _steps: Sizes  # bytes
    _data: MatData | None  # None if no memory was allocated
    _share: object  # shared by all headers of the block: its reference count gives their number
    _offset: int  # byte offset of the first element in the storage
    _start: int  # byte offset of the whole Mat from which this header was cut
    _end: int  # byte offset at which the last row of that whole Mat ends
    _limit: int  # byte offset of the end of the memory into which rows may grow
    _submatrix: bool
    _device: torch.device
    _cached: Tensor | None  # the elements, (..., channels)

    # Properties.

    def elemSize(self) -> int:
        """Bytes of an element with all its channels."""
        return DEPTHS[self._type & _DEPTH_MASK].size_bytes * ((self._type >> CV_CN_SHIFT) + 1)

    def elemSize1(self) -> int:
        """Bytes of one channel."""
        return DEPTHS[self._type & _DEPTH_MASK].size_bytes

    @property
    def step(self) -> Sizes:
        """The steps in bytes from one element to the next, for each dimension (the strides)."""
        return self._steps

    def step1(self, i: int = 0) -> int:
        """The step of dimension `i`, in numbers (one per channel) instead of bytes."""
        if not 0 <= i < self.dims:
            raise IndexError(f"step1({i}): the Mat has {self.dims} dimensions: expected 0 to {self.dims - 1}")
        return self._steps[i] // self.elemSize1()

    def isContinuous(self) -> bool:
        """Whether the elements are contiguous, without gaps between rows."""
        return not self._sizes or headers.is_continuous(self._sizes, self._steps)

    def isSubmatrix(self) -> bool:
        """Whether this Mat is a region of a larger Mat."""
        return self._submatrix

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def data(self) -> MatData | None:
        """The block of memory, which other headers may share; None if none was allocated. An empty view keeps the block
        of its Mat."""
        return self._data

    def data_ptr(self) -> int:
        """The address of the first element; 0 if there are no elements."""
        return self._data.storage.data_ptr() + self._offset if self._data is not None and not self.empty() else 0

    def __len__(self) -> int:
        return self._sizes[0] if self._sizes else 0

    def __repr__(self) -> str:
        if not self._sizes:
            return f"Mat(empty, {self._device})"
        marks = "continuous" if self.isContinuous() else "not continuous"
        if self._submatrix:
            marks += ", submatrix"
        if self._data is not None and self._data.read_only:
            marks += ", read-only"
        sizes = " x ".join(map(str, self._sizes))
        return f"Mat({sizes} {typeToString(self._type)}, {self._device}, {marks})"

    # Views: headers on the same memory.

    def row(self, y: int) -> Self:
        """Row y, as a Mat of one row."""
        return self._cut({self._axis("rows"): _index(y, self._whole("rows"), "row")})

    def col(self, x: int) -> Self:
        """Column x, as a Mat of one column."""
        return self._cut({self._axis("cols"): _index(x, self._whole("cols"), "column")})

    def rowRange(self, start: int, end: int) -> Self:
        """Rows from `start` up to, but not including, `end`."""
        return self._cut({self._axis("rows"): _range(slice(start, end), self._whole("rows"), "rows")})

    def colRange(self, start: int, end: int) -> Self:
        """Columns from `start` up to, but not including, `end`."""
        return self._cut({self._axis("cols"): _range(slice(start, end), self._whole("cols"), "columns")})

    def roi(self, x: int, y: int, width: int, height: int) -> Self:
        """The rectangle with its upper left corner at column x, row y, as cv::Rect: `m.roi(*cv2.boundingRect(p))`."""
        self._two_dimensions("roi")
        if width < 0 or height < 0:
            raise ValueError(f"a rectangle needs a width and a height of at least 0, got {width} x {height}")
        columns = _range(slice(x, x + width), self.cols, "columns")
        return self._cut({0: _range(slice(y, y + height), self.rows, "rows"), 1: columns})

    def diag(self, d: int = 0) -> Self:
        """The diagonal that begins at column d, or at row -d, as a Mat of one column."""
        self._two_dimensions("diag")
        d, (rows, cols) = as_integer(d), self._sizes
        length = min(cols - d, rows) if d >= 0 else min(rows + d, cols)
        if length <= 0:
            raise IndexError(f"{rows} x {cols} has no diagonal {d}: expected {1 - rows} to {cols - 1}")
        offset = self._offset + (d * self._steps[1] if d >= 0 else -d * self._steps[0])
        steps = (self._steps[0] + (self._steps[1] if length > 1 else 0), self._steps[1])
        return self._header((length, 1), steps, offset, self._submatrix or (rows, cols) != (1, 1))

    def reshape(self, cn: int, rows: int | Sequence[int] = 0) -> Self:
        """View the same numbers with another number of channels, rows or sizes.

        Args:
            cn: the number of channels; 0 keeps the present number.
            rows: the number of rows, or a tuple of all sizes. 0 keeps the present size. One size of a tuple may be -1,
                which is computed from the others.

        Raises:
            TypeError: a number is not an integer.
            ValueError: the numbers cannot be divided into these rows, sizes or channels, or the rows or sizes would
                change although the Mat has gaps (`clone()` it first).
        """
        cn = as_integer(cn)
        if cn:
            CV_MAKETYPE(self.depth(), cn)
        if not is_integer(rows):
            return self._reshape_nd(cn, tuple(map(as_integer, rows)))  # type: ignore[arg-type]
        rows = as_integer(rows)  # type: ignore[arg-type]
        if rows < 0:
            raise ValueError(
                f"reshape needs a number of rows of at least 0, got {rows}: pass a tuple of sizes to use -1"
            )
        if self.dims > 2:
            if rows:
                return self._reshape_nd(cn, (rows, -1))
            numbers = self._sizes[-1] * self.channels()
            if cn and numbers % cn:
                raise ValueError(
                    f"the last dimension has {numbers} numbers, which cannot be divided into elements of {cn} channels"
                )
            return self._seen(cn or self.channels(), self._sizes[:-1], numbers, self._steps[:-1])
        if not rows and self.dims == 2:  # the usual request: another number of channels in the same rows
            numbers = self._sizes[1] * self.channels()
            count = cn or self.channels()
            if count <= numbers and numbers % count == 0:
                elem_bytes = count * DEPTHS[self._type & _DEPTH_MASK].size_bytes
                new = self._header(
                    (self._sizes[0], numbers // count), (self._steps[0], elem_bytes), self._offset, self._submatrix
                )
                new._type = self._type & _DEPTH_MASK | (count - 1) << CV_CN_SHIFT
                return new
        new_rows, cols, cn = headers.reshaped_2d(self.rows, self.cols, self.channels(), cn, rows, self.isContinuous())
        step = self._steps[0] if self.dims == 2 and new_rows == self.rows else cols * cn * self.elemSize1()
        return self._seen(cn, (new_rows,), cols * cn, (step,))

    def _reshape_nd(self, cn: int, sizes: Sizes) -> Self:
        if not self.isContinuous():
            raise ValueError(f"{self} has gaps between its rows, so it cannot be reshaped: clone() first")
        kept, cn = headers.reshaped_nd(self._sizes, self.channels(), cn, sizes)
        return self._seen(cn, kept[:-1], kept[-1] * cn, headers.natural_steps(kept, cn * self.elemSize1())[:-1])

    def _seen(self, cn: int, leading: Sizes, numbers: int, leading_steps: Sizes) -> Self:
        """A view of this memory. The last dimension has `numbers` numbers, as elements of `cn` numbers each. `leading`
        and `leading_steps` are the sizes and the steps (in bytes) of the other dimensions."""
        steps = (*leading_steps, cn * self.elemSize1())
        new = self._header((*leading, numbers // cn), steps, self._offset, self._submatrix)
        new._type = CV_MAKETYPE(self.depth(), cn)
        return new

    def locateROI(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Locate this view in the whole Mat: for a view of a view, the outermost Mat. Return (width, height) of the
        whole Mat, and (x, y) of the view's upper left element in it."""
        place = self._place("locateROI")
        return (place.whole_cols, place.whole_rows), (place.col, place.row)

    def adjustROI(self, dtop: int, dbottom: int, dleft: int, dright: int) -> Self:
        """Move the edges of this view within the whole Mat (see `locateROI`), and return this header. Each argument is
        a number of rows or columns, outward if positive and inward if negative."""
        place = self._place("adjustROI")
        dtop, dbottom, dleft, dright = map(as_integer, (dtop, dbottom, dleft, dright))
        row1, row2, col1, col2 = headers.adjusted(place, self.rows, self.cols, dtop, dbottom, dleft, dright)
        self._offset += (row1 - place.row) * self._steps[0] + (col1 - place.col) * self._steps[1]
        self._sizes, self._cached = (row2 - row1, col2 - col1), None
        return self

    def _place(self, of: str) -> headers.Place:
        self._two_dimensions(of)
        if self.empty():
            raise ValueError(f"{of} needs a Mat with elements, got {self}")
        return headers.locate(
            *(self.rows, self.cols, self._steps[0], self._steps[1]), self._offset, self._start, self._end
        )

    def __getitem__(self, index: Range | tuple[Range, ...]) -> Any:
        """Elements or views, without copies.

        `m[y, x]`, an index for each dimension, is the element: a number, or a tuple with a number for each channel.
        `m[y0:y1, x0:x1]`, with a range for at least one dimension, is a Mat of the same number of dimensions; an index
        counts as a range of one. `m[y]` is row y.

        Raises:
            IndexError: an index is negative or too large.
            ValueError: a range has a step.
        """
        place = self._indices(index)
        if isinstance(place, int):
            return self._element_at(place)
        return self._cut(place)

    def at(self, *index: int) -> Any:
        """The element at the given indices, one for each dimension. In a Mat of one row or one column, a single index
        suffices.
        """
        if len(index) == 1 and self.dims == 2 and 1 in self._sizes:
            index = (0, index[0]) if self._sizes[0] == 1 else (index[0], 0)
        if not index or len(index) != self.dims:
            if not self._sizes:
                raise IndexError(f"Mat.at() cannot read an element of {self}, because it is empty")
            raise IndexError(f"Mat.at() needs {self.dims} indices for {self}, got {len(index)}")
        return self[index]

    # Tensors and addresses for internal use.

    def _header(self, sizes: Sizes, steps: Sizes, offset: int, submatrix: bool) -> Self:
        new = self.__class__.__new__(self.__class__)
        new._type, new._sizes, new._steps, new._offset, new._submatrix = self._type, sizes, steps, offset, submatrix
        new._data, new._share, new._device = self._data, self._share, self._device
        new._start, new._end, new._limit, new._cached = self._start, self._end, self._limit, None
        return new

    def _header_of_itself(self) -> Self:
        return self._header(self._sizes, self._steps, self._offset, self._submatrix)

    def _cut(self, ranges: dict[int, tuple[int, int]]) -> Self:
        """A view with some dimensions cut to ranges: {dimension: (start, end)}."""
        sizes, offset, submatrix = list(self._sizes), self._offset, self._submatrix
        for axis, (start, end) in ranges.items():
            if end - start != sizes[axis]:
                sizes[axis] = end - start
                offset += start * self._steps[axis]
                submatrix = True
        return self._header(tuple(sizes), self._steps, offset, submatrix)

    def _indices(self, index: Any) -> int | dict[int, tuple[int, int]]:
        """Parse an index to the byte offset of an element, or to ranges {dimension: (start, end)}."""
        given = index if isinstance(index, tuple) else (index,)
        sizes = self._sizes
        for place, each in enumerate(given):
            if each is Ellipsis:  # stands for all dimensions without an index
                given = (*given[:place], *[slice(None)] * (len(sizes) + 1 - len(given)), *given[place + 1 :])
                break
        if len(given) > len(sizes):
            if not sizes:
                raise IndexError(f"there is no element {index!r} in {self}, because it is empty")
            raise IndexError(
                f"{len(given)} indices of {len(sizes)} dimensions: {self}; channels have no index, because an "
                "element contains all of them: use extractChannel(m, c) or insertChannel(one, m, c)"
            )
        ranges: dict[int, tuple[int, int]] = {}
        single = 0 < len(given) == len(sizes)
        for axis, each in enumerate(given):
            if isinstance(each, slice):
                single = False
                if each.start is None and each.stop is None and each.step is None:
                    continue
                ranges[axis] = _range(each, sizes[axis], f"dimension {axis}")
            else:
                ranges[axis] = _index(each, sizes[axis], f"dimension {axis}")
        if not single:
            return ranges
        return self._offset + sum(ranges[axis][0] * step for axis, step in enumerate(self._steps))

    def _element_at(self, offset: int) -> Any:
        assert self._data is not None
        depth = depth_of(self._type)
        numbers = self._data.strided(depth.dtype, (self.channels(),), (1,), offset // depth.size_bytes).tolist()
        return numbers[0] if len(numbers) == 1 else tuple(numbers)

    def _strided(self, dtype: torch.dtype) -> Tensor:
        channels = self.channels()
        if self._data is None:
            sizes = self._sizes or (0,)  # a tensor without dimensions would have one element
            return torch.empty((*sizes, channels), dtype=dtype, device=self._device)
        item = dtype.itemsize
        strides = (*(step // item for step in self._steps), 1)
        return self._data.strided(dtype, (*self._sizes, channels), strides, self._offset // item)

    def _tensor(self) -> Tensor:
        """A tensor of the elements (..., channels) on this header's memory, in the depth's dtype. The caller must
        not write to the tensor."""
        if self._cached is None:
            self._cached = self._strided(depth_of(self._type).dtype)
        elif self._data is not None:
            self._data.check_mapping()
        return self._cached

    def _address(self) -> int:
        """The address of the first element. The caller must not write there. The Mat must have elements."""
        assert self._data is not None
        self._data.check_mapping()
        return self._data.storage.data_ptr() + self._offset

    def _bits(self) -> Tensor:
        """The elements (..., channels) as integers with the same bits (the depth's carrier dtype). The caller must
        not write to the tensor."""
        depth = depth_of(self._type)
        elements = self._tensor()
        return elements if depth.dtype == depth.carrier else elements.view(depth.carrier)

    def _writable(self) -> Tensor:
        self._refuse_read_only("writing to")
        return self._tensor()

    def _writable_bits(self) -> Tensor:
        self._refuse_read_only("writing to")
        return self._bits()

    def _refuse_read_only(self, what: str) -> None:
        if self._data is not None and self._data.read_only:
            raise ValueError(f"{what} {self}, which shares memory with a read-only array: clone() first")

    def _axis(self, which: Literal["rows", "cols"]) -> int:
        if self.dims == 1:
            if which == "rows":
                raise ValueError("a Mat of one dimension has no rows to cut: reshape(0, 1) makes one row of it")
            return 0
        self._two_dimensions(which)
        return 0 if which == "rows" else 1

    def _whole(self, which: Literal["rows", "cols"]) -> int:
        return self._sizes[self._axis(which)]

    def _two_dimensions(self, of: str) -> None:
        if self.dims != 2:
            raise ValueError(f"{of} needs two dimensions, got {self}: use m[ranges], or reshape")


def is_integer(value: object) -> bool:
    """Whether a value is a Python or NumPy integer. Booleans are excluded, since they are not indices."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _index(value: Any, size: int, what: str) -> tuple[int, int]:
    if not is_integer(value):
        mask = "; setTo(value, mask) sets the elements that a mask selects" if hasattr(value, "__len__") else ""
        raise TypeError(f"an index of {what} must be an integer or a range a:b, got {value!r}{mask}")
    if not 0 <= value < size:
        hint = f"; to count from the end, use {size + value}" if -size <= value < 0 else ""
        raise IndexError(f"index {value} of {what} is out of range 0 to {size - 1}{hint}")
    return int(value), int(value) + 1


def _range(given: slice, size: int, what: str) -> tuple[int, int]:
    start = 0 if given.start is None else given.start
    end = size if given.stop is None else given.stop
    if given.step not in (None, 1):
        raise ValueError(
            f"a range of {what} cannot have a step, got {given.step}: a view of a Mat contains every row and column of "
            "its range"
        )
    if not (is_integer(start) and is_integer(end)):
        raise TypeError(f"a range of {what} needs integers, got {start!r}:{end!r}")
    if not 0 <= start <= end <= size:
        raise IndexError(
            f"range {start}:{end} of {what} is not within 0:{size}"
            + ("; negative numbers do not count from the end here" if start < 0 or end < 0 else "")
        )
    return int(start), int(end)

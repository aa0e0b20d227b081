"""The Triton kernels that build the rulebook by bitmaps. `bitmaps.py` launches and explains them.

A cell's number is the row-major index of (batch element, four coordinates). Grids with fewer than four dimensions get
leading dimensions of size 1. Bit `cell % 32` of word `cell // 32` is set if the cell has a site. `counts` has, for each
word, the number of set bits in all words up to and including that word. A site's rank is the number of set bits before
the site's bit, so it orders the sites by cell number, from 0. One word and its count are enough to find a site's rank.
Offsets are numbered as in `rulebook.py`. `faults` has the flags of `Rulebook.faults`.

In the shapes, N is the number of rows of `sites`, W the number of words, T the number of offsets and O the number of
outputs. A row of `sites` is a batch index and DIMS coordinates; a row of -1 is not a site.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Not specialized, so that one compiled kernel serves point clouds and grids of all sizes.
SIZES = ["rows", "batch_size", "size_0", "size_1", "size_2", "size_3", "count"]
GRIDS = [f"{grid}_{dim}" for grid in ("in", "out") for dim in range(4)]
STEPS = [f"{step}_{dim}" for step in ("shift", "dilation") for dim in range(4)]


@triton.jit(do_not_specialize=SIZES)
def mark_sites(
    sites, words, faults,  # shapes: (N, 1 + DIMS), (W,), (3,)
    rows, batch_size, size_0, size_1, size_2, size_3,
    DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Set the bit of each site's cell in `words`. Set `faults[0]` if a site is repeated, and `faults[1]` if a site is
    off the grid."""
    row, there = _rows(rows, ROWS)
    batch, at_0, at_1, at_2, at_3 = _site(sites, row, there, DIMS)
    inside = _inside(batch, at_0, at_1, at_2, at_3, batch_size, size_0, size_1, size_2, size_3)
    cell = _cell(batch, at_0, at_1, at_2, at_3, size_0, size_1, size_2, size_3)
    bit = tl.full((ROWS,), 1, tl.int32) << (cell & 31)
    before = tl.atomic_or(words + (cell >> 5), bit, mask=inside, sem="relaxed")
    repeated = tl.max((inside & ((before & bit) != 0)).to(tl.int32))
    tl.store(faults, 1, mask=repeated != 0)
    named = row < 0  # whether a row is not all -1; begins as False for all rows
    for column in tl.static_range(1 + DIMS):  # reads raw values, because `_site` turns values outside int32 into -1
        named |= tl.load(sites + row * (1 + DIMS) + column, mask=there, other=-1) != -1
    outside = tl.max((there & named & (inside == 0)).to(tl.int32))
    tl.store(faults + 1, 1, mask=outside != 0)


@triton.jit(do_not_specialize=["count"])
def count_words(
    words, counts,  # shapes: (W,), (W,)
    count,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Write to `counts` the number of set bits of each of the `count` words. The launcher turns these numbers into
    running sums.
    """
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(words + word, mask=word < count, other=0)
    tl.store(counts + word, _population(bits.to(tl.uint32, bitcast=True)), mask=word < count)


@triton.jit(do_not_specialize=SIZES)
def place_sites(
    sites, words, counts, row_of,  # shapes: (N, 1 + DIMS), (W,), (W,), (N,)
    rows, batch_size, size_0, size_1, size_2, size_3,
    DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Set `row_of[rank]` to the site's row in `sites`, for each site. The rank is the site's position when all sites
    are sorted by cell number."""
    row, there = _rows(rows, ROWS)
    batch, at_0, at_1, at_2, at_3 = _site(sites, row, there, DIMS)
    inside = _inside(batch, at_0, at_1, at_2, at_3, batch_size, size_0, size_1, size_2, size_3)
    cell = _cell(batch, at_0, at_1, at_2, at_3, size_0, size_1, size_2, size_3)
    _, rank = _look_up(words, counts, cell, inside)
    tl.store(row_of + rank, row.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=[*SIZES, *STEPS])
def pair_neighbours(
    sites, words, counts, row_of, neighbours,  # shapes: (N, 1 + DIMS), (W,), (W,), (N,), (N, T)
    rows, batch_size, size_0, size_1, size_2, size_3, dilation_0, dilation_1, dilation_2, dilation_3,
    KSIZE_0: tl.constexpr, KSIZE_1: tl.constexpr, KSIZE_2: tl.constexpr, KSIZE_3: tl.constexpr,
    DIMS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write `neighbours[row, offset]` for each site of a submanifold convolution and each offset of its kernel: the row
    of the site at that offset from the site in `row`, or -1 if there is no site."""
    row, there = _rows(rows, ROWS)
    batch, at_0, at_1, at_2, at_3 = _site(sites, row, there, DIMS)
    inside = _inside(batch, at_0, at_1, at_2, at_3, batch_size, size_0, size_1, size_2, size_3)
    tap = tl.program_id(1) * TAPS + tl.arange(0, TAPS)
    tap_0, tap_1, tap_2, tap_3 = _offsets(tap, KSIZE_1, KSIZE_2, KSIZE_3)
    VOLUME: tl.constexpr = KSIZE_0 * KSIZE_1 * KSIZE_2 * KSIZE_3
    tap_0, tap_1 = (tap_0 - KSIZE_0 // 2) * dilation_0, (tap_1 - KSIZE_1 // 2) * dilation_1
    tap_2, tap_3 = (tap_2 - KSIZE_2 // 2) * dilation_2, (tap_3 - KSIZE_3 // 2) * dilation_3
    wanted = there[:, None] & (tap < VOLUME)[None, :]  # (ROWS, TAPS)
    near = inside[:, None] & wanted
    if KSIZE_0 > 1:
        near &= _on_axis(at_0, tap_0, size_0)
    if KSIZE_1 > 1:
        near &= _on_axis(at_1, tap_1, size_1)
    if KSIZE_2 > 1:
        near &= _on_axis(at_2, tap_2, size_2)
    if KSIZE_3 > 1:
        near &= _on_axis(at_3, tap_3, size_3)
    here = _cell(batch, at_0, at_1, at_2, at_3, size_0, size_1, size_2, size_3)
    away = _cell(0, tap_0, tap_1, tap_2, tap_3, size_0, size_1, size_2, size_3)
    cell = here[:, None] + away[None, :]
    known, rank = _look_up(words, counts, cell, near)
    other = tl.load(row_of + rank, mask=known, other=-1)
    is_centre = (tap == VOLUME // 2)[None, :] & inside[:, None]
    # At the centre, a site is its own neighbour, even if it is repeated.
    other = tl.where(is_centre, row.to(tl.int32)[:, None], other)
    tl.store(neighbours + row[:, None] * VOLUME + tap[None, :], other, mask=wanted)


@triton.jit(do_not_specialize=[*SIZES, *GRIDS, *STEPS])
def reach_outputs(
    sites, words, cells,  # shapes: (N, 1 + DIMS), (W,), (N, T)
    rows, batch_size, in_0, in_1, in_2, in_3, out_0, out_1, out_2, out_3,
    shift_0, shift_1, shift_2, shift_3, dilation_0, dilation_1, dilation_2, dilation_3,
    STRIDE_0: tl.constexpr, STRIDE_1: tl.constexpr, STRIDE_2: tl.constexpr, STRIDE_3: tl.constexpr,
    KSIZE_0: tl.constexpr, KSIZE_1: tl.constexpr, KSIZE_2: tl.constexpr, KSIZE_3: tl.constexpr,
    DIMS: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write `cells[row, offset]` for each site and each offset of the kernel: the number of the output's cell to which
    the site contributes, or -1 if it contributes to none. Set that cell's bit in `words`. `shift` is the padding."""
    row, there = _rows(rows, ROWS)
    batch, at_0, at_1, at_2, at_3 = _site(sites, row, there, DIMS)
    inside = _inside(batch, at_0, at_1, at_2, at_3, batch_size, in_0, in_1, in_2, in_3)
    tap = tl.program_id(1) * TAPS + tl.arange(0, TAPS)
    tap_0, tap_1, tap_2, tap_3 = _offsets(tap, KSIZE_1, KSIZE_2, KSIZE_3)
    VOLUME: tl.constexpr = KSIZE_0 * KSIZE_1 * KSIZE_2 * KSIZE_3
    to_0, whole_0 = _reached(at_0, tap_0 * dilation_0 - shift_0, STRIDE_0, TRANSPOSED)  # (ROWS, TAPS)
    to_1, whole_1 = _reached(at_1, tap_1 * dilation_1 - shift_1, STRIDE_1, TRANSPOSED)
    to_2, whole_2 = _reached(at_2, tap_2 * dilation_2 - shift_2, STRIDE_2, TRANSPOSED)
    to_3, whole_3 = _reached(at_3, tap_3 * dilation_3 - shift_3, STRIDE_3, TRANSPOSED)
    wanted = there[:, None] & (tap < VOLUME)[None, :]
    valid = inside[:, None] & wanted & whole_0 & whole_1 & whole_2 & whole_3
    valid &= _inside(batch[:, None], to_0, to_1, to_2, to_3, batch_size, out_0, out_1, out_2, out_3)
    cell = _cell(batch[:, None], to_0, to_1, to_2, to_3, out_0, out_1, out_2, out_3)
    bit = tl.full((ROWS, TAPS), 1, tl.int32) << (cell & 31)
    place = words + (cell >> 5)
    # Load before the atomic operation: most bits are set already, and an atomic costs more than a load.
    new = (tl.load(place, mask=valid, other=0) & bit) == 0
    tl.atomic_or(place, bit, mask=valid & new, sem="relaxed")
    tl.store(cells + row[:, None] * VOLUME + tap[None, :], tl.where(valid, cell, -1), mask=wanted)


@triton.jit(do_not_specialize=[*SIZES, "outputs"])
def pair_outputs(
    cells, words, counts, neighbours, out_cells, faults,  # shapes: (N, VOLUME), (W,), (W,), (O, VOLUME), (O,), (3,)
    rows, count, outputs,
    VOLUME: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Replace each cell number in `cells` by the row of the output at that cell. For each output, write the rows of its
    input sites to `neighbours` and its cell number to `out_cells`. If there are more than `outputs` outputs, set
    `faults[2]`, write no outputs, and set all elements of `cells` to -1."""
    fits = tl.load(counts + (count - 1)) <= outputs
    tl.store(faults + 2, 1, mask=fits == 0)
    row, there = _rows(rows, ROWS)
    tap = tl.program_id(1) * TAPS + tl.arange(0, TAPS)
    wanted = there[:, None] & (tap < VOLUME)[None, :]
    place = row[:, None] * VOLUME + tap[None, :]
    cell = tl.load(cells + place, mask=wanted, other=-1)
    known = (cell >= 0) & fits
    _, rank = _look_up(words, counts, cell, known)
    tl.store(cells + place, tl.where(known, rank, -1), mask=wanted)
    tl.store(out_cells + rank, cell, mask=known)
    output = rank.to(tl.int64) * VOLUME + tap[None, :]
    tl.store(neighbours + output, tl.broadcast_to(row.to(tl.int32)[:, None], (ROWS, TAPS)), mask=known)


@triton.jit(do_not_specialize=SIZES)
def name_outputs(
    out_cells, sites,  # shapes: (O,), with -1 for rows without a cell; (O, 1 + DIMS)
    rows, size_0, size_1, size_2, size_3,
    DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the batch index and the coordinates of each output's cell to `sites`. A row without a cell becomes -1 in
    all columns."""
    row, there = _rows(rows, ROWS)
    cell = tl.load(out_cells + row, mask=there, other=-1)
    none, place = cell < 0, sites + row * (1 + DIMS)
    kind = sites.dtype.element_ty
    tl.store(place + DIMS, tl.where(none, -1, cell % size_3).to(kind), mask=there)
    cell = cell // size_3
    if DIMS > 1:
        tl.store(place + (DIMS - 1), tl.where(none, -1, cell % size_2).to(kind), mask=there)
        cell = cell // size_2
    if DIMS > 2:
        tl.store(place + (DIMS - 2), tl.where(none, -1, cell % size_1).to(kind), mask=there)
        cell = cell // size_1
    if DIMS > 3:
        tl.store(place + 1, tl.where(none, -1, cell % size_0).to(kind), mask=there)
        cell = cell // size_0
    tl.store(place, tl.where(none, -1, cell).to(kind), mask=there)


# ---- parts -----------------------------------------------------------------------------------------------------


@triton.jit
def _rows(rows, ROWS: tl.constexpr):
    """Return the row indices that this Triton program processes, and whether each row exists. Row indices are 64-bit,
    because a table of rows and offsets may have 2^31 elements or more."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < rows


@triton.jit
def _site(sites, row, there, DIMS: tl.constexpr):
    """Return the batch index and the four coordinates of the sites in `row` as int32. A value that does not fit in
    int32 becomes -1, which is off every grid."""
    place = sites + row * (1 + DIMS)
    at_3 = _coordinate(place + DIMS, there)
    at_2 = _coordinate(place + (DIMS - 1), there) if DIMS > 1 else tl.zeros_like(at_3)
    at_1 = _coordinate(place + (DIMS - 2), there) if DIMS > 2 else tl.zeros_like(at_3)
    at_0 = _coordinate(place + 1, there) if DIMS > 3 else tl.zeros_like(at_3)
    return _coordinate(place, there), at_0, at_1, at_2, at_3


@triton.jit
def _coordinate(place, there):
    value = tl.load(place, mask=there, other=-1).to(tl.int64)
    return tl.where(value > 2147483647, -1, tl.maximum(value, -1)).to(tl.int32)


@triton.jit
def _inside(batch, at_0, at_1, at_2, at_3, batch_size, size_0, size_1, size_2, size_3):
    """Whether each site is on the grid: its batch index and its four coordinates are within `batch_size` and the
    sizes."""
    inside = (batch >= 0) & (batch < batch_size) & (at_0 >= 0) & (at_0 < size_0) & (at_1 >= 0) & (at_1 < size_1)
    return inside & (at_2 >= 0) & (at_2 < size_2) & (at_3 >= 0) & (at_3 < size_3)


@triton.jit
def _on_axis(at, away, size):
    """Whether each sum of a coordinate `at` (ROWS,) and a shift `away` (TAPS,) is from 0 to size - 1."""
    return (at[:, None] + away[None, :]).to(tl.uint32, bitcast=True) < size.to(tl.uint32)


@triton.jit
def _cell(batch, at_0, at_1, at_2, at_3, size_0, size_1, size_2, size_3):
    """The number of the grid cell that each site is in, for sites on the grid. Cells are numbered in row-major order,
    with the batch index first.
    """
    return (((batch * size_0 + at_0) * size_1 + at_1) * size_2 + at_2) * size_3 + at_3


@triton.jit
def _offsets(tap, KSIZE_1: tl.constexpr, KSIZE_2: tl.constexpr, KSIZE_3: tl.constexpr):
    """The position of each offset within the convolution's kernel, as four coordinates. `tap`: the offsets' numbers, in
    row-major order.
    """
    rest = tap // KSIZE_3
    return rest // KSIZE_2 // KSIZE_1, rest // KSIZE_2 % KSIZE_1, rest % KSIZE_2, tap % KSIZE_3


@triton.jit
def _reached(at, shift, STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return the output coordinates that input coordinates `at` (ROWS,) reach by `shift` (TAPS,) along one axis, and
    whether each is valid. Both results are (ROWS, TAPS).

    If TRANSPOSED, an output coordinate is at * STRIDE + shift, and always valid. Otherwise it is (at - shift) / STRIDE,
    and valid if it is an integer of at least 0. The caller checks whether coordinates are inside the grid.
    """
    if TRANSPOSED:
        to = at[:, None] * STRIDE + shift[None, :]
        whole = to == to
    else:
        far = at[:, None] - shift[None, :]
        to = far // STRIDE
        whole = (far >= 0) & (to * STRIDE == far)
    return to, whole


@triton.jit
def _look_up(words, counts, cell, wanted):
    """Return whether each cell has a site, and the rank of that site: the number of sites in earlier cells."""
    place = cell >> 5
    above = tl.load(words + place, mask=wanted, other=0).to(tl.uint32, bitcast=True) >> (cell & 31).to(tl.uint32)
    known = wanted & ((above & 1) != 0)
    return known, tl.load(counts + place, mask=known, other=0) - _population(above)


@triton.jit
def _population(bits):
    """The number of set bits in a uint32, as int32."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return ((eights * 0x01010101) >> 24).to(tl.int32)

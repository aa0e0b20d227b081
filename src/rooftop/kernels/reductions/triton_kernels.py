"""Triton kernels of reductions and their gradients; `reductions.py` has the operators.

A tile has KEPT results, and REDUCED elements for each result. A program reads every S-th tile of its results, where S
is the number of splits, and combines these tiles, lane by lane, into accumulators of the shape of a tile. At the end
the program combines the accumulators into KEPT numbers. ALONG is the direction in which memory is contiguous: along the
reduced dimension (ROWS), along the kept dimension (COLUMNS), or neither. There are two kept and two reduced dimensions,
in each case a near (inner) and a far (outer) one. NESTED: the size of the far reduced dimension is above 1.

If the results are too few to fill a GPU, several programs split the elements of each result, and store partial results,
(splits, results). A second kernel, or the program that stores a tile's last partial result, combines the partial
results in the order of the splits. So results are deterministic. A counter with acquire and release semantics counts
the programs that have stored. So the program that increments the counter last sees the partial results of all other
programs. The last program resets the counter to zero for the next launch.

The size of the contiguous dimension of x, and the strides of the other dimensions of x, are in units of UNIT elements.
So the compiler knows that UNIT divides them, and loads several elements at a time. All offsets are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rooftop.kernels.operands.triton_kernels.scalars import largest, smallest

# The reductions: first sums (up to NORM2), then extremes, then (from ARGMAX on) positions of extremes.
TIES = tl.constexpr(0)  # counts the elements that equal the result
ABSOLUTE_TIES = tl.constexpr(1)
SUM = tl.constexpr(2)
MEAN = tl.constexpr(3)
NORM1 = tl.constexpr(4)
NORM2 = tl.constexpr(5)
AMAX = tl.constexpr(6)
AMIN = tl.constexpr(7)
NORM_INF = tl.constexpr(8)
ARGMAX = tl.constexpr(9)
ARGMIN = tl.constexpr(10)

ROWS = tl.constexpr(0)
COLUMNS = tl.constexpr(1)

WHOLE = tl.constexpr(0)  # one program computes the result
PARTIAL = tl.constexpr(1)  # another kernel combines
LAST_COMBINES = tl.constexpr(2)

ACCUMULATORS = {torch.float32: tl.float32, torch.int32: tl.int32, torch.int64: tl.int64}
NOWHERE = tl.constexpr(1 << 62)  # larger than any position: the position of elements that are not the extreme


@triton.jit
def reduce_tiles(
    x, reference, out,  # x strided; reference (results,): TIES counts the elements equal to it; out (results,)
    partials, places, counters,  # partials and (int64, for ARG) places: (splits, results); counters: (tiles,) int32
    kept, kept_stride, out_stride, far_kept_stride, far_out_stride,
    reduced, reduced_stride, far_reduced, far_reduced_stride,
    results, count,  # number of results; elements per result, as a float
    KIND: tl.constexpr, ACCUMULATOR: tl.constexpr, IDENTITY: tl.constexpr, ALONG: tl.constexpr, UNIT: tl.constexpr,
    NESTED: tl.constexpr, FINISH: tl.constexpr, KEPT: tl.constexpr, REDUCED: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, WHOLE_BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute KEPT results or, depending on FINISH, one program's partial results for these KEPT results.

    WHOLE_BLOCKS (only for a single result): all blocks except the last are loaded without a mask, so that loads are 16
        bytes wide for any size of x.
    EARLY selects programmatic dependent launch: this kernel may start while the previous kernel still runs, and waits
    for the previous kernel's results.
    """
    if EARLY:
        gdc_wait()
    if ALONG == COLUMNS:
        kept = kept * UNIT
    if ALONG == ROWS:
        reduced = reduced * UNIT
    split, splits = tl.program_id(1), tl.num_programs(1)
    start, place, exists = _kept_elements(
        tl.program_id(0), kept, kept_stride, out_stride, far_kept_stride, far_out_stride, ALONG, UNIT, KEPT
    )
    if KIND <= ABSOLUTE_TIES:
        target = tl.load(reference + place, mask=exists, other=0.0).to(ACCUMULATOR)[:, None]
    else:
        target = 0.0
    lane = tl.arange(0, REDUCED)
    best = tl.full((KEPT, REDUCED), IDENTITY, ACCUMULATOR)
    found = tl.full((KEPT, REDUCED), 0, tl.int32) + split  # index of the block of each lane's best element
    near = tl.cdiv(reduced, REDUCED)
    masked = split
    if WHOLE_BLOCKS:
        whole = reduced // REDUCED
        for index in tl.range(split, whole, splits, num_stages=STAGES):
            offset = tl.cast(index, tl.int64) * REDUCED + lane
            loaded = tl.load(x + offset[None, :]).to(ACCUMULATOR)
            best, found = _fold(best, found, loaded, index, target, True, KIND)
        masked = whole + (split - whole % splits + splits) % splits  # this split's first block that needs a mask
    for index in tl.range(masked, near * far_reduced, splits, num_stages=1 if WHOLE_BLOCKS else STAGES):
        offset, inside = _reduced_elements(
            index, near, lane, reduced, reduced_stride, far_reduced_stride, ALONG, UNIT, NESTED, REDUCED
        )
        inside = exists[:, None] & inside[None, :]
        loaded = tl.load(x + (start[:, None] + offset[None, :]), mask=inside, other=IDENTITY).to(ACCUMULATOR)
        best, found = _fold(best, found, loaded, index, target, inside, KIND)
    if EARLY:
        gdc_launch_dependents()
    if KIND >= ARGMAX:
        where = found.to(tl.int64) * REDUCED + lane[None, :]
    else:
        where = found
    value, first = _across(best, where, KIND)
    if FINISH == WHOLE:
        _store_results(out, place, exists, value, first, count, KIND)
    else:
        position = tl.cast(split, tl.int64) * results + place
        tl.store(partials + position, value, mask=exists)
        if KIND >= ARGMAX:
            tl.store(places + position, first, mask=exists)
    if FINISH == LAST_COMBINES:
        tl.debug_barrier()  # all threads store before the counter is incremented
        counter = counters + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            value, first = _combined(
                partials, places, place, exists, splits, results, KIND, ACCUMULATOR, IDENTITY, KEPT, SPLITS
            )
            _store_results(out, place, exists, value, first, count, KIND)
            tl.store(counter, 0)


@triton.jit
def combine_partials(
    partials, places, out,  # (splits, results), (splits, results), (results,)
    splits, results, count,
    KIND: tl.constexpr, ACCUMULATOR: tl.constexpr, IDENTITY: tl.constexpr,
    KEPT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of KEPT results. Each result has `splits` partial results, one for each program that
    reduced a part of its elements.
    """
    place = tl.program_id(0).to(tl.int64) * KEPT + tl.arange(0, KEPT)
    exists = place < results
    value, first = _combined(
        partials, places, place, exists, splits, results, KIND, ACCUMULATOR, IDENTITY, KEPT, SPLITS
    )
    _store_results(out, place, exists, value, first, count, KIND)


@triton.jit
def spread_gradient(
    x, y, dy, ties, dx,  # shapes: as x of `reduce_tiles`, (results,), (results,), (results,) float32, as x
    kept, kept_stride, out_stride, far_kept_stride, far_out_stride,
    reduced, reduced_stride, far_reduced, far_reduced_stride,
    KIND: tl.constexpr, ALONG: tl.constexpr, UNIT: tl.constexpr,
    NESTED: tl.constexpr, KEPT: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """Compute dx for a tile of x, from the results y and their gradients dy. `ties`: for each maximum or minimum in y,
    the number of elements of x that equal it and share its gradient.
    """
    if ALONG == COLUMNS:
        kept = kept * UNIT
    if ALONG == ROWS:
        reduced = reduced * UNIT
    near = tl.cdiv(reduced, REDUCED)
    blocks = near * far_reduced
    start, place, exists = _kept_elements(
        tl.program_id(0) // blocks, kept, kept_stride, out_stride, far_kept_stride, far_out_stride, ALONG, UNIT, KEPT
    )
    offset, inside = _reduced_elements(
        tl.program_id(0) % blocks, near, tl.arange(0, REDUCED),
        reduced, reduced_stride, far_reduced_stride, ALONG, UNIT, NESTED, REDUCED,
    )  # fmt: skip
    inside = exists[:, None] & inside[None, :]
    value = tl.load(x + (start[:, None] + offset[None, :]), mask=inside, other=0.0).to(tl.float32)
    result = tl.load(y + place, mask=exists, other=0.0).to(tl.float32)[:, None]
    gradient = tl.load(dy + place, mask=exists, other=0.0).to(tl.float32)[:, None]
    if KIND == NORM1:
        found = _sign(value) * gradient
    elif KIND == NORM2:
        found = tl.where(result == 0.0, 0.0, gradient * (value / result))
    else:
        share = gradient / tl.load(ties + place, mask=exists, other=1.0)[:, None]
        found = _shared(value, result, share, KIND)
    tl.store(dx + (start[:, None] + offset[None, :]), found.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def share_gradient(
    x, y, dy, dx,  # shapes: as x of `reduce_tiles`, (results,), (results,), as x
    kept, kept_stride, out_stride, far_kept_stride, far_out_stride,
    reduced, reduced_stride, far_reduced, far_reduced_stride,
    KIND: tl.constexpr, ALONG: tl.constexpr, UNIT: tl.constexpr,
    NESTED: tl.constexpr, KEPT: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """Compute dx for a tile of x that contains all elements over which its maxima or minima y were taken. The kernel
    counts the elements that share a gradient itself, and reads x once.
    """
    if ALONG == COLUMNS:
        kept = kept * UNIT
    if ALONG == ROWS:
        reduced = reduced * UNIT
    start, place, exists = _kept_elements(
        tl.program_id(0), kept, kept_stride, out_stride, far_kept_stride, far_out_stride, ALONG, UNIT, KEPT
    )
    offset, inside = _reduced_elements(
        0, 1, tl.arange(0, REDUCED), reduced, reduced_stride, far_reduced_stride, ALONG, UNIT, NESTED, REDUCED
    )
    inside = exists[:, None] & inside[None, :]
    value = tl.load(x + (start[:, None] + offset[None, :]), mask=inside, other=0.0).to(tl.float32)
    result = tl.load(y + place, mask=exists, other=0.0).to(tl.float32)[:, None]
    gradient = tl.load(dy + place, mask=exists, other=0.0).to(tl.float32)[:, None]
    if KIND == NORM_INF:
        equal = inside & (tl.abs(value) == result)
    else:
        equal = inside & (value == result)
    ties = tl.where(exists, tl.sum(equal.to(tl.int32), axis=1).to(tl.float32), 1.0)
    found = _shared(value, result, gradient / ties[:, None], KIND)
    tl.store(dx + (start[:, None] + offset[None, :]), found.to(dx.dtype.element_ty), mask=inside)


# ---- functions that several kernels share ------------------------------------------------------------------------


@triton.jit
def _kept_elements(
    tile, kept, kept_stride, out_stride, far_kept_stride, far_out_stride,
    ALONG: tl.constexpr, UNIT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Return (offsets in x, positions in the results, mask) for a tile's kept elements (KEPT,)."""
    tiles = tl.cdiv(kept, KEPT)
    far = (tile // tiles).to(tl.int64)
    near = (tile % tiles).to(tl.int64) * KEPT + tl.arange(0, KEPT)
    if ALONG == COLUMNS:
        offset = near
    else:
        offset = near * (kept_stride * UNIT)
    return far * (far_kept_stride * UNIT) + offset, far * far_out_stride + near * out_stride, near < kept


@triton.jit
def _reduced_elements(
    index, near, lane, reduced, reduced_stride, far_reduced_stride,
    ALONG: tl.constexpr, UNIT: tl.constexpr, NESTED: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """Return (offsets, mask) of block `index` of reduced elements, (REDUCED,). `near`: the number of blocks along the
    inner of two reduced dimensions; used only with NESTED.
    """
    if NESTED:
        block, far = tl.cast(index % near, tl.int64), tl.cast(index // near, tl.int64)
    else:
        block = tl.cast(index, tl.int64)
    element = block * REDUCED + lane
    if ALONG == ROWS:
        offset = element
    else:
        offset = element * (reduced_stride * UNIT)
    if NESTED:
        offset += far * (far_reduced_stride * UNIT)
    return offset, element < reduced


@triton.jit
def _fold(best, found, loaded, index, target, inside, KIND: tl.constexpr):
    """Update the running value of each lane (`best`) with one more element (`loaded`). For ARG kinds, also update
    `found`, the index of the block in which the lane first met its extreme.
    """
    if KIND == NORM1:
        best += tl.abs(loaded)
    elif KIND == NORM2:
        best += loaded * loaded
    elif KIND == TIES:
        best += (inside & (loaded == target)).to(best.dtype)
    elif KIND == ABSOLUTE_TIES:
        best += (inside & (tl.abs(loaded) == target)).to(best.dtype)
    elif KIND == AMAX:
        best = tl.maximum(best, loaded, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == AMIN:
        best = tl.minimum(best, loaded, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == NORM_INF:
        best = tl.maximum(best, tl.abs(loaded), propagate_nan=tl.PropagateNan.ALL)
    elif KIND >= ARGMAX:
        better = _beyond(loaded, best, KIND)
        best = tl.where(better, loaded, best)
        found = tl.where(better, tl.cast(index, tl.int32), found)
    else:
        best += loaded
    return best, found


@triton.jit
def _beyond(value, best, KIND: tl.constexpr):
    """Whether `value` is more extreme than `best`. NaN is more extreme than any number, but not more extreme
    than NaN.
    """
    if KIND == ARGMAX:
        better = value > best
    else:
        better = value < best
    return better | ((value != value) & (best == best))


@triton.jit
def _across(best, where, KIND: tl.constexpr):
    """Combine the running values of all lanes to one value for each result, (KEPT,). For ARG kinds, also return the
    position of the first extreme (`where`: the positions of the lanes' extremes).
    """
    SMALLEST: tl.constexpr = (KIND == AMIN) | (KIND == ARGMIN)
    first = 0
    if KIND <= NORM2:
        value = tl.sum(best, axis=1)
    elif KIND == AMIN:
        value = tl.reduce(best, 1, smallest)
    elif KIND < ARGMAX:
        value = tl.reduce(best, 1, largest)
    else:
        if SMALLEST:
            value = tl.min(best, axis=1)
        else:
            value = tl.max(best, axis=1)
        missing = best != best
        is_nan = tl.max(missing.to(tl.int32), axis=1) != 0
        extreme = (missing & is_nan[:, None]) | ((best == value[:, None]) & ~is_nan[:, None])
        first = tl.min(tl.where(extreme, where, NOWHERE), axis=1)
        if value.dtype.is_floating():
            value = tl.where(is_nan, float("nan"), value)
    return value, first


@triton.jit
def _combined(
    partials, places, place, exists, splits, results,
    KIND: tl.constexpr, ACCUMULATOR: tl.constexpr, IDENTITY: tl.constexpr, KEPT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of all splits into values and positions (KEPT,). The loads bypass L1, since programs
    on other SMs stored the data.
    """
    lane = tl.arange(0, SPLITS)
    best = tl.full((KEPT, SPLITS), IDENTITY, ACCUMULATOR)
    where = tl.full((KEPT, SPLITS), NOWHERE, tl.int64)
    for start in range(0, splits, SPLITS):
        inside = exists[:, None] & (start + lane < splits)[None, :]
        position = (start + lane).to(tl.int64)[None, :] * results + place[:, None]
        value = tl.load(partials + position, mask=inside, other=IDENTITY, cache_modifier=".cg")
        if KIND <= NORM2:
            best += value
        elif KIND == AMIN:
            best = tl.minimum(best, value, propagate_nan=tl.PropagateNan.ALL)
        elif KIND < ARGMAX:
            best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
        else:
            other = tl.load(places + position, mask=inside, other=NOWHERE, cache_modifier=".cg")
            same = (value == best) | ((value != value) & (best != best))
            better = _beyond(value, best, KIND) | (same & (other < where))
            best, where = tl.where(better, value, best), tl.where(better, other, where)
    return _across(best, where, KIND)


@triton.jit
def _store_results(out, place, exists, value, first, count, KIND: tl.constexpr):
    """Store a tile of results: positions for ARG kinds, value / count for a mean, the value's root for the 2-norm."""
    if KIND >= ARGMAX:
        tl.store(out + place, first, mask=exists)
    else:
        if KIND == MEAN:
            value = value / count
        if KIND == NORM2:
            value = tl.sqrt_rn(value)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _shared(value, result, share, KIND: tl.constexpr):
    """The gradient of each element: `share` for the elements that equal the extreme, 0 for all other elements."""
    if KIND == NORM_INF:
        return tl.where(tl.abs(value) == result, _sign(value) * share, 0.0)
    else:
        # if the extreme is NaN, no element equals it, so `share` is not finite, and 0.0 * share is NaN
        return tl.where(value == result, share, 0.0 * share)


@triton.jit
def _sign(value):
    """1.0, -1.0 or 0.0 for each value; 0.0 for NaN."""
    return (value > 0.0).to(tl.float32) - (value < 0.0).to(tl.float32)

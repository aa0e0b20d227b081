"""Expressions on the CPU: a list of torch operations, run over one block of rows after another.

A block's intermediate values stay in the cache, so that of the whole expression only the Mats are read from memory and
the result written, however many operations there are. Blocks are so small that torch runs each operation in the thread
that calls it; large Mats are divided among as many threads as torch would use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rooftop.launch.numba_loops import in_threads
from rooftop.launch.strides import merged
from rooftop.mat.conversions import store_64
from rooftop.mat.exactness import Bounds, BoundsOf, depth_bounds, limits_in, trusted
from rooftop.mat.expressions import BITWISE, COMPARISONS, MatExpr, same_number, topological
from rooftop.mat.type_codes import DEPTHS, CV_Bool

BLOCK = 1 << 15  # elements: the most that torch computes in one thread. 16 KB to 256 KB an operand: within an L2
_LEAST_PER_THREAD = 1 << 18  # below, a thread costs as much as it saves
_TILE_COLUMNS = 256  # of blocks where an operand is transposed: whole lines of cache are used on both sides
Block = tuple[slice, ...]
Step = tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...], int | None]
"""A function, the registers that it takes, numbers after them, and the register for its `out=`, None if it has none."""


@dataclass
class RowProgram:
    """Steps on registers: first the leaves, then the target, then rows of numbers, then scratch.

    Attributes:
        dtype: that is computed in.
        leaves: of the expression, in the order of their registers.
        patterns: numbers of the channels, as an operand.
        scratch: dtypes of the other registers.
    """

    dtype: torch.dtype
    leaves: list[MatExpr]
    patterns: list[tuple[int | float, ...]] = field(default_factory=list)
    scratch: list[torch.dtype] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def run(self, tensors: Sequence[Tensor], target: Tensor) -> None:
        """Writes the value into the target.

        Args:
            tensors: of the leaves, (..., channels), of the target's shape, in their depths' dtypes.
            target: overlaps none of them, or has the very same elements.
        """
        if not target.numel():
            return
        channels = target.shape[-1]
        tensors = [each.view(torch.uint8) if each.dtype == torch.bool else each for each in tensors]
        views = in_few_dims([*tensors, target])
        blocks = list(blocks_of(views, channels))
        most = target.numel() // _LEAST_PER_THREAD
        in_threads(lambda first, last: self._run_blocks(views, blocks[first:last], channels), len(blocks), most)

    def _run_blocks(self, views: list[Tensor], share: list[Block], channels: int) -> None:
        rooms = [torch.empty(BLOCK + 512, dtype=dtype, device="cpu") for dtype in self.scratch]
        shaped: dict[torch.Size, list[Tensor]] = {}
        for registers in _parts(views, share):
            shape = registers[0].shape
            if shape not in shaped:
                patterns = [_pattern(numbers, shape, self.dtype, channels) for numbers in self.patterns]
                shaped[shape] = patterns + [room[: shape.numel()].view(shape) for room in rooms]
            registers += shaped[shape]
            for function, places, numbers, out in self.steps:
                given = [registers[place] for place in places]
                if out is None:
                    function(*given, *numbers)
                else:
                    function(*given, *numbers, out=registers[out])


def _parts(views: list[Tensor], share: list[Block]) -> Iterator[list[Tensor]]:
    """What the views have in each block."""
    if views[0].dim() > 1 or not share:
        for block in share:
            yield [view[block] for view in views]
        return
    first, width = share[0][0].start, share[0][0].stop - share[0][0].start
    length = min(share[-1][0].stop, views[0].shape[0]) - first
    for parts in zip(*(view.narrow(0, first, length).split(width) for view in views), strict=True):
        yield list(parts)  # one call for all blocks: slicing each took a third of the time


def _pattern(numbers: tuple[int | float, ...], shape: torch.Size, dtype: torch.dtype, channels: int) -> Tensor:
    """The numbers of the channels along the last dimension of a block, which begins at the first channel."""
    row = torch.tensor(numbers, dtype=dtype, device="cpu").repeat(shape[-1] // channels)
    return row.expand(shape).contiguous()


# ---- blocks ----------------------------------------------------------------------------------------------------


def in_few_dims(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with those dimensions as one that all of them walk through as one; one at least."""
    dims = merged(tensors[0].shape, *(each.stride() for each in tensors)) or [(1, (1,) * len(tensors))]
    sizes = [size for size, _ in dims]
    return [
        each.as_strided(sizes, [steps[n] for _, steps in dims], each.storage_offset()) for n, each in enumerate(tensors)
    ]


def blocks_of(views: Sequence[Tensor], channels: int) -> Iterator[Block]:
    """Blocks of at most `BLOCK` elements that begin at a first channel, in order."""
    shape = views[0].shape
    turned = len(shape) > 1 and any(view.stride(-1) > view.stride(-2) for view in views if view.dim() > 1)
    turned = turned or (len(shape) > 2 and any(view.stride(-2) > view.stride(-3) for view in views))
    yield from _cut(tuple(shape), channels, _TILE_COLUMNS * channels if turned else BLOCK)


def _cut(shape: tuple[int, ...], channels: int, columns: int) -> Iterator[Block]:
    *outer, last = shape
    width = max(min(columns, BLOCK) // channels * channels, channels)
    if last == channels and outer:  # channels that merge with nothing stay together
        width = channels
        wide = max(columns // channels, 1)
    else:
        wide = 1 << 62
    inner = min(width, last)
    if not outer:
        for first in range(0, last, width):
            yield (slice(first, first + width),)
        return
    # Chunks of each dimension: as many indices as fit beside the whole chunks after it.
    chunks = [inner]
    room = max(BLOCK // inner, 1)
    for n, size in enumerate(reversed(outer)):
        chunk = max(min(size, room, wide if n == 0 else 1 << 62), 1)
        chunks.insert(0, chunk)
        room = max(room // chunk, 1)
    yield from _boxes(shape, chunks)


def _boxes(shape: tuple[int, ...], chunks: list[int]) -> Iterator[Block]:
    if not shape:
        yield ()
        return
    for first in range(0, shape[0], chunks[0]):
        for rest in _boxes(shape[1:], chunks[1:]):
            yield (slice(first, first + chunks[0]), *rest)


# ---- steps -----------------------------------------------------------------------------------------------------


def row_program(root: MatExpr, bounds: BoundsOf, dtype: torch.dtype, depth: int) -> RowProgram:
    """The steps of an expression computed in a dtype and stored as numbers of a depth.

    Leaves are Mats; there are no products or inverses left.
    """
    return _Writer(root, bounds, dtype).written(depth)


Value = int | float | int  # a register or, in `_Writer.numbers`, what stands for one


class _Writer:
    """Writes the steps; `places` are the registers of nodes that have been computed."""

    def __init__(self, root: MatExpr, bounds: BoundsOf, dtype: torch.dtype) -> None:
        self.nodes = topological(root)
        self.root, self.dtype = root, dtype
        self.bounds = trusted(bounds, dtype)
        leaves = [each for each in self.nodes if each._operation == "mat"]
        self.program = RowProgram(dtype, leaves)
        self.leaves = {id(each): n for n, each in enumerate(leaves)}
        self.target = len(leaves)
        self.patterns: dict[str, int] = {}
        for each in self.nodes:  # patterns have registers before scratch does
            for numbers in self._patterns_of(each):
                if _key(numbers) not in self.patterns:
                    self.patterns[_key(numbers)] = self.target + 1 + len(self.patterns)
                    self.program.patterns.append(numbers)
        self.first_scratch = self.target + 1 + len(self.patterns)
        self.free: dict[torch.dtype, list[int]] = {}
        self.places: dict[int, int] = {}
        self.uses = Counter(id(operand) for each in self.nodes for operand in each._operands)

    # Registers.

    def room(self, dtype: torch.dtype) -> int:
        """A register of scratch."""
        free = self.free.setdefault(dtype, [])
        if free:
            return free.pop()
        self.program.scratch.append(dtype)
        return self.first_scratch + len(self.program.scratch) - 1

    def give_back(self, register: int) -> None:
        """Scratch that is not needed any more; nothing of other registers."""
        if register >= self.first_scratch:
            self.free[self.program.scratch[register - self.first_scratch]].append(register)

    def step(self, function: Callable[..., Any], *places: int, numbers: tuple[Any, ...] = (), out: int | None) -> None:
        self.program.steps.append((function, places, numbers, out))

    # Numbers.

    def number(self, each: MatExpr) -> int | float | None:
        """The number that all channels have, in the dtype that is computed in; None where they differ."""
        if each._operation != "numbers" or not all(same_number(value, each._value[0]) for value in each._value):
            return None
        return self.cast(each._value[0])

    def cast(self, value: int | float) -> int | float:
        return float(value) if self.dtype.is_floating_point else int(value)

    def _patterns_of(self, each: MatExpr) -> list[tuple[int | float, ...]]:
        """The numbers among the operands that must be an operand of torch's: those that differ, and those in front."""
        found = []
        for n, operand in enumerate(each._operands):
            if operand._operation == "numbers":
                plain = self.number(operand) is not None
                in_front = n == 0 and each._operation in ("sub", "div")
                if not plain or in_front or each._operation in BITWISE:
                    found.append(self._stored_numbers(operand) if each._operation in BITWISE else operand._value)
        return found

    def _stored_numbers(self, each: MatExpr) -> tuple[int | float, ...]:
        """As numbers of their depth, whose bits are meant."""
        if each.depth() == CV_Bool:
            return tuple(int(value != 0) for value in each._value)
        low, high = DEPTHS[each.depth()].limits or (0, 0)
        return tuple(min(max(int(value), low), high) for value in each._value)

    # Nodes.

    def written(self, depth: int) -> RowProgram:
        direct = self._is_stored_as_it_is(depth)
        for each in self.nodes:
            if each._operation == "mat":
                self._load(each)
            elif each._operation != "numbers":
                self._compute(each, self.target if direct and each is self.root else None)
        if self.places[id(self.root)] != self.target:
            self._store(self.places[id(self.root)], depth)
        return self.program

    def _is_stored_as_it_is(self, depth: int) -> bool:
        """Whether the last operation can write into the target."""
        if self.root._operation == "mat" or self.dtype != DEPTHS[depth].dtype:
            return False
        known, limits = self.bounds[id(self.root)], depth_bounds(depth)
        return limits is None or (known is not None and limits.contain(known))

    def _load(self, each: MatExpr) -> None:
        place = self.leaves[id(each)]
        dtype = torch.uint8 if each.depth() == CV_Bool else DEPTHS[each.depth()].dtype
        if dtype != self.dtype:
            place, leaf = self.room(self.dtype), place
            self.step(Tensor.copy_, place, leaf, out=None)
        self.places[id(each)] = place

    def _place(self, operand: MatExpr, stored: bool = False) -> int:
        if operand._operation == "numbers":
            return self.patterns[_key(self._stored_numbers(operand) if stored else operand._value)]
        return self.places[id(operand)]

    def _done(self, each: MatExpr) -> None:
        """Gives back the registers of operands that nobody needs after this."""
        for operand in each._operands:
            self.uses[id(operand)] -= 1
            if not self.uses[id(operand)] and operand._operation != "numbers":
                self.give_back(self.places[id(operand)])

    def _compute(self, each: MatExpr, target: int | None) -> None:
        operation = each._operation
        if operation in COMPARISONS:
            self._compare(each, target)
        elif operation in BITWISE:
            self._bits(each, target)
        elif operation == "div":
            self._divide(each, target)
        else:
            places, numbers, function = self._elementwise(each)
            self._done(each)
            out = self.room(self.dtype) if target is None else target
            self.step(function, *places, numbers=numbers, out=out)
            self.places[id(each)] = out

    def _elementwise(self, each: MatExpr) -> tuple[list[int], tuple[Any, ...], Callable[..., Any]]:
        operands = list(each._operands)
        operation = each._operation
        if operands[0]._operation == "numbers" and operation in ("add", "mul", "min", "max"):
            operands.reverse()
        number = self.number(operands[-1]) if len(operands) == 2 else None
        if number is None:
            return [self._place(operand) for operand in operands], (), _FUNCTIONS[operation]
        return [self._place(operands[0])], (number,), _WITH_NUMBER.get(operation, _FUNCTIONS[operation])

    def _compare(self, each: MatExpr, target: int | None) -> None:
        left, right = each._operands
        operation = each._operation
        if left._operation == "numbers":
            left, right, operation = right, left, _MIRRORED[operation]
        number = self.number(right)
        places = [self._place(left)] if number is not None else [self._place(left), self._place(right)]
        truth = self.room(torch.bool)
        self.step(_FUNCTIONS[operation], *places, numbers=() if number is None else (number,), out=truth)
        self._done(each)
        out = self.room(self.dtype) if target is None else target
        self.step(_TRUTH_OF.get(self.dtype, _truth), out, truth, out=None)
        self.give_back(truth)
        self.places[id(each)] = out

    def _divide(self, each: MatExpr, target: int | None) -> None:
        """In integer depths what is divided by 0 is 0."""
        left, right = each._operands
        number = self.number(right)
        checked = DEPTHS[each.depth()].limits is not None or each.depth() == CV_Bool
        if checked and number == 0:
            places, numbers, function = [self._place(left)], (0,), torch.mul
            self._done(each)
            out = self.room(self.dtype) if target is None else target
            self.step(torch.zero_, out, out=None)
            self.places[id(each)] = out
            return
        zero = None
        if checked and number is None:
            zero = self.room(torch.bool)
            self.step(torch.eq, self._place(right), numbers=(0,), out=zero)
        places, numbers, function = self._elementwise(each)
        self._done(each)
        out = self.room(self.dtype) if target is None else target
        self.step(function, *places, numbers=numbers, out=out)
        if zero is not None:
            self.step(_zero_where, out, zero, out=None)
            self.give_back(zero)
        self.places[id(each)] = out

    def _bits(self, each: MatExpr, target: int | None) -> None:
        """Of numbers as their depth stores them."""
        limits = depth_bounds(each.depth())
        assert limits is not None
        whole = not self.dtype.is_floating_point
        compute = self.dtype if whole else _INTEGER_OF[self.dtype]
        places = []
        made = []
        for operand in each._operands:
            place = self._place(operand, stored=True)
            known = self.bounds[id(operand)]
            if operand._operation != "numbers" and not (known is not None and limits.contain(known)):
                stored = self.room(self.dtype)
                self._within_limits(place, stored, known, each.depth())
                place = stored
                made.append(stored)
            if not whole:
                bits = self.room(compute)
                self.step(Tensor.copy_, bits, place, out=None)
                place = bits
                made.append(bits)
            places.append(place)
        out = self.room(self.dtype) if target is None else target
        bits_out = out if whole else self.room(compute)
        if each._operation == "not":  # also where the dtype is wider than the depth
            ones = -1 if limits.low < 0 else int(limits.high)
            self.step(torch.bitwise_xor, *places, numbers=(ones,), out=bits_out)
        else:
            self.step(_FUNCTIONS[each._operation], *places, out=bits_out)
        if not whole:
            self.step(Tensor.copy_, out, bits_out, out=None)
            self.give_back(bits_out)
        for place in made:
            self.give_back(place)
        self._done(each)
        self.places[id(each)] = out

    # The store.

    def _within_limits(self, place: int, out: int, known: Bounds | None, depth: int) -> None:
        """Rounded and saturated, in the dtype that is computed in."""
        if depth == CV_Bool:
            truth = self.room(torch.bool)
            self.step(torch.ne, place, numbers=(0,), out=truth)
            self.step(Tensor.copy_, out, truth, out=None)
            self.give_back(truth)
            return
        low, high = limits_in(self.dtype, depth)
        if self.dtype.is_floating_point and (known is None or known.unit):
            self.step(torch.round, place, out=out)
            place = out
        limits = depth_bounds(depth)
        assert limits is not None
        if known is None or not (limits.low <= known.low and known.high <= limits.high):
            self.step(torch.clamp, place, numbers=(self.cast(low), self.cast(high)), out=out)
            place = out
        if place != out:
            self.step(Tensor.copy_, out, place, out=None)
        if known is None:
            self.step(_nan_to, out, numbers=(float(low),), out=None)

    def _store(self, place: int, depth: int) -> None:
        target, known = DEPTHS[depth], self.bounds[id(self.root)]
        limits = depth_bounds(depth)
        if depth == CV_Bool:
            self.step(torch.ne, place, numbers=(0,), out=self.target)
        elif limits is None:
            if target.size_bytes == 2 and not (known is not None and known.within(torch.float32)):
                place = self._as(place, torch.float64) if self.dtype != torch.float32 else place
                function = store_half if self.dtype != torch.float32 else Tensor.copy_
                self.step(function, self.target, place, out=None)
            else:
                self.step(Tensor.copy_, self.target, place, out=None)
        elif known is not None and limits.contain(known):
            self.step(Tensor.copy_, self.target, place, out=None)
        elif target.size_bytes == 8 and self.dtype.is_floating_point:
            wide = self._as(place, torch.float64)
            rounded = self.room(torch.float64)
            self.step(torch.round, wide, out=rounded)
            self.step(_store_64, self.target, rounded, numbers=(depth,), out=None)
        else:
            if self.dtype == torch.float32 and target.size_bytes == 4:  # whose limits float32 does not have
                place, self.dtype = self._as(place, torch.float64), torch.float64
            out = self.room(self.dtype)
            self._within_limits(place, out, known, depth)
            if target.dtype in _BY_WAY_OF:
                between = self.room(_BY_WAY_OF[target.dtype])
                self.step(Tensor.copy_, between, out, out=None)
                out = between
            self.step(Tensor.copy_, self.target, out, out=None)

    def _as(self, place: int, dtype: torch.dtype) -> int:
        if self.dtype == dtype:
            return place
        other = self.room(dtype)
        self.step(Tensor.copy_, other, place, out=None)
        return other


def _key(numbers: tuple[int | float, ...]) -> str:
    """Another one for -0.0 than for 0.0."""
    return repr(numbers)


def _truth(out: Tensor, truth: Tensor) -> None:
    """255 where it is true."""
    out.copy_(truth)
    out.mul_(255)


def _truth_of_bytes(out: Tensor, truth: Tensor) -> None:
    torch.neg(truth.view(torch.uint8), out=out)


def _zero_where(out: Tensor, zero: Tensor) -> None:
    out.masked_fill_(zero, 0)


def _nan_to(x: Tensor, number: float) -> None:
    x.nan_to_num_(nan=number)


def _store_64(into: Tensor, rounded: Tensor, depth: int) -> None:
    store_64(rounded, into, depth)


def store_half(into: Tensor, y: Tensor) -> None:
    """float64 as half precision, rounded once: by way of float32, rounded to odd there.

    What float32 cannot hold gets an odd last bit, so that it is never taken for a number halfway between two of half
    precision (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums").
    """
    near = y.float()
    rest = y - near.double()
    bits = near.view(torch.int32)
    outward = (rest > 0) == (near > 0)  # whether the exact number has the larger magnitude
    even = (rest != 0) & (bits & 1 == 0) & near.isfinite() & (near != 0)
    bits += torch.where(even, torch.where(outward, 1, -1), 0).to(torch.int32)
    into.copy_(near)


_INTEGER_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
_BY_WAY_OF = {torch.uint16: torch.int32, torch.uint32: torch.int64}  # torch converts floats to them by way of others
_TRUTH_OF = {torch.uint8: _truth_of_bytes}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_WITH_NUMBER: dict[str, Callable[..., Any]] = {"min": torch.clamp_max, "max": torch.clamp_min}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "abs": torch.abs,
    "min": torch.minimum,
    "max": torch.maximum,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}

"""Expressions on the CPU: a list of torch operations, run over one block of rows after another.

A block's intermediate values stay in the cache. So main memory is accessed only to read the Mats and to write the
result, for any number of operations. Blocks are so small that torch runs each operation in the calling thread. Large
Mats are divided among as many threads as torch would use.

Every operation writes into the target or into a register, a tensor of a block's size. Each thread allocates its
registers once per evaluation. Operations that return new tensors take 1.3 times as long, and up to 2 times for sums of
bytes, because the system reclaims freed memory, and then maps it again page by page. (1.3 is the geometric mean over
the operations of `benchmarks/mat.py`, in uint8 and float32, for whole images and regions, with one and with two threads
of an EPYC that has 512 KB of L2 per core.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rooftop.launch.numba_loops import in_threads
from rooftop.launch.strides import merged
from rooftop.mat.conversions import store_64
from rooftop.mat.exactness import Bounds, BoundsOf, depth_bounds, limits_in, trusted
from rooftop.mat.expressions import BITWISE, COMPARISONS, MatExpr, is_one, topological
from rooftop.mat.type_codes import DEPTHS, CV_Bool

# elements of a block: torch uses one thread for up to this many, and a block of one operand (32 KB to 256 KB) fits in
# L2
BLOCK = 1 << 15
_LEAST_PER_THREAD = 1 << 18  # elements; with fewer elements per thread, an additional thread saves no time
_TILE_COLUMNS = 256  # columns of a block if an operand is transposed, so that reads and writes use whole cache lines
Block = tuple[slice, ...]
Step = tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...], int | None]
"""A function, the registers of its tensor arguments, the numeric arguments after these, and the register for `out=`
(None without `out=`)."""


@dataclass
class RowProgram:
    """Torch operations on registers (tensors), which are numbered in this order: leaves, target, numbers, scratch.

    Attributes:
        dtype: the dtype of the computation.
        numbers: the constants. Each is a tensor () with one number for all channels, or (channels,) with one number for
            each channel.
        scratch: dtypes of the scratch registers.
    """

    dtype: torch.dtype
    numbers: list[Tensor] = field(default_factory=list)
    scratch: list[torch.dtype] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def run(self, tensors: Sequence[Tensor], target: Tensor) -> None:
        """Write the expression's value into the target.

        Args:
            tensors: tensors of the leaves, (..., channels), of the target's shape, in their depths' dtypes.
            target: the output. A tensor that overlaps the target must have exactly the same elements.
        """
        if not target.numel():
            return
        tensors = [each.view(torch.uint8) if each.dtype == torch.bool else each for each in tensors]
        views = in_few_dims([*tensors, target])
        blocks = list(blocks_of(views, target.shape[-1]))
        most = target.numel() // _LEAST_PER_THREAD
        in_threads(lambda first, last: self._run_blocks(views, blocks[first:last]), len(blocks), most)

    def _run_blocks(self, views: list[Tensor], share: list[Block]) -> None:
        rooms = [torch.empty(BLOCK + 512, dtype=dtype, device="cpu") for dtype in self.scratch]
        shaped: dict[torch.Size, list[Tensor]] = {}
        for registers in _parts(views, share):
            shape = registers[0].shape
            if shape not in shaped:
                shaped[shape] = [_along(numbers, shape) for numbers in self.numbers]
                shaped[shape] += [room[: shape.numel()].view(shape) for room in rooms]
            registers += shaped[shape]
            for function, places, numbers, out in self.steps:
                given = [registers[place] for place in places]
                if out is None:
                    function(*given, *numbers)
                else:
                    function(*given, *numbers, out=registers[out])


def _parts(views: list[Tensor], share: list[Block]) -> Iterator[list[Tensor]]:
    """For each block of `share`, yield the slice of each view."""
    if views[0].dim() > 1 or not share:
        for block in share:
            yield [view[block] for view in views]
        return
    first, width = share[0][0].start, share[0][0].stop - share[0][0].start
    length = min(share[-1][0].stop, views[0].shape[0]) - first
    for parts in zip(*(view.narrow(0, first, length).split(width) for view in views), strict=True):
        yield list(parts)  # one `split` cuts all blocks; slicing them one by one was a third of the total time


def _along(numbers: Tensor, shape: torch.Size) -> Tensor:
    """Repeat numbers (one per channel) along the last dimension of a block of this shape, which begins at the first
    channel. A single number stays unchanged."""
    return numbers.repeat(shape[-1] // len(numbers)).expand(shape).contiguous() if numbers.dim() else numbers


# ---- blocks ----------------------------------------------------------------------------------------------------


def in_few_dims(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Merge adjacent dimensions that each tensor traverses with a single stride; at least one dimension remains."""
    dims = merged(tensors[0].shape, *(each.stride() for each in tensors)) or [(1, (1,) * len(tensors))]
    sizes = [size for size, _ in dims]
    return [
        each.as_strided(sizes, [steps[n] for _, steps in dims], each.storage_offset()) for n, each in enumerate(tensors)
    ]


def blocks_of(views: Sequence[Tensor], channels: int) -> Iterator[Block]:
    """Iterate in order over blocks of at most `BLOCK` numbers. Each block begins at channel 0 of an element."""
    *outer, last = shape = views[0].shape
    turned = len(shape) > 1 and any(view.stride(-1) > view.stride(-2) for view in views)
    turned = turned or (len(shape) > 2 and any(view.stride(-2) > view.stride(-3) for view in views))
    columns = min(_TILE_COLUMNS * channels if turned else BLOCK, BLOCK)
    most = BLOCK
    width = max(columns // channels * channels, channels)
    if last == channels and outer:  # the last dimension has only the channels: `most` limits the dimension before
        most, width = max(columns // channels, 1), channels
    # A chunk of a dimension takes as many indices as fit into a block, given the chunks of all later dimensions.
    chunks = [min(width, last)]
    room = max(BLOCK // chunks[0], 1)
    for size in reversed(outer):
        chunks.insert(0, min(size, room, most))
        room, most = max(room // chunks[0], 1), BLOCK
    cuts = zip(shape, chunks, strict=True)
    return product(*([slice(n, n + chunk) for n in range(0, size, chunk)] for size, chunk in cuts))


# ---- steps -----------------------------------------------------------------------------------------------------


def row_program(root: MatExpr, bounds: BoundsOf, dtype: torch.dtype, depth: int) -> RowProgram:
    """The steps of an expression, computed in a dtype and stored as numbers of a depth.

    All leaves must be Mats or numbers. The expression must not contain matrix products or inverses.
    """
    return _Writer(root, bounds, dtype).written(depth)


class _Writer:
    """Generates the steps of a RowProgram. `places` maps the id of each node (a Mat, numbers or an operation) to the
    register that holds its value.
    """

    def __init__(self, root: MatExpr, bounds: BoundsOf, dtype: torch.dtype) -> None:
        self.nodes = topological(root)
        self.root, self.dtype = root, dtype
        self.bounds = trusted(bounds, dtype)
        self.program = RowProgram(dtype)
        leaves = [each for each in self.nodes if each._operation == "mat"]
        self.places = {id(each): n for n, each in enumerate(leaves)}
        self.target = len(leaves)
        for each in self.nodes:  # registers of numbers precede the scratch registers
            for operand in each._operands:
                if operand._operation == "numbers":
                    self.places[id(operand)] = self.target + 1 + len(self.program.numbers)
                    row = torch.tensor(self._numbers(operand, each._operation in BITWISE), dtype=dtype, device="cpu")
                    self.program.numbers.append(row[0] if is_one(operand) else row)
        self.first_scratch = self.target + 1 + len(self.program.numbers)
        self.free: dict[torch.dtype, list[int]] = {}
        self.uses = Counter(id(operand) for each in self.nodes for operand in each._operands)

    def _numbers(self, each: MatExpr, as_bits: bool) -> tuple[int | float, ...]:
        """Convert a node's numbers to the computation's dtype. Operands of bitwise operations become the bits that
        their depth stores."""
        if not as_bits:
            return tuple(float(value) if self.dtype.is_floating_point else int(value) for value in each._value)
        if each.depth() == CV_Bool:
            return tuple(int(value != 0) for value in each._value)
        low, high = DEPTHS[each.depth()].limits or (0, 0)
        return tuple(min(max(int(value), low), high) for value in each._value)

    # Registers.

    def room(self, dtype: torch.dtype) -> int:
        """Take a free scratch register of this dtype, or add one. Return its index."""
        free = self.free.setdefault(dtype, [])
        if free:
            return free.pop()
        self.program.scratch.append(dtype)
        return self.first_scratch + len(self.program.scratch) - 1

    def give_back(self, register: int) -> None:
        """Free a register if it is a scratch register. If it belongs to a Mat, the target or numbers, do nothing."""
        if register >= self.first_scratch:
            self.free[self.program.scratch[register - self.first_scratch]].append(register)

    def step(
        self, function: Callable[..., Any], *places: int, numbers: tuple[Any, ...] = (), out: int | None = None
    ) -> None:
        self.program.steps.append((function, places, numbers, out))

    def copied(self, place: int, dtype: torch.dtype) -> int:
        """Add a step that converts the numbers in register `place` to a dtype. Return the scratch register that will
        hold the result.
        """
        room = self.room(dtype)
        self.step(Tensor.copy_, room, place)
        return room

    # Nodes.

    def written(self, depth: int) -> RowProgram:
        known, limits = self.bounds[id(self.root)], depth_bounds(depth)
        fits = limits is None or (known is not None and limits.contain(known))
        direct = fits and self.dtype == DEPTHS[depth].dtype and self.root._operation != "mat"
        for each in self.nodes:
            if each._operation == "mat":
                if self.dtype != (torch.uint8 if each.depth() == CV_Bool else DEPTHS[each.depth()].dtype):
                    self.places[id(each)] = self.copied(self.places[id(each)], self.dtype)
            elif each._operation != "numbers":
                self._compute(each, self.target if direct and each is self.root else None)
        if not direct:
            self._store(self.places[id(self.root)], depth)
        return self.program

    def _compute(self, each: MatExpr, target: int | None) -> None:
        operation, places = each._operation, [self.places[id(operand)] for operand in each._operands]
        if operation in COMPARISONS:
            truth = self.room(torch.bool)
            self.step(_FUNCTIONS[operation], *places, out=truth)
            self.step(_TRUTH_OF.get(self.dtype, _truth), self._result(each, target), truth)
            self.give_back(truth)
        elif operation in BITWISE:
            self._bits(each, places, target)
        elif operation == "div" and (DEPTHS[each.depth()].limits is not None or each.depth() == CV_Bool):
            self._divide(each, places, target)
        elif operation in ("min", "max"):
            self._extreme(each, target)
        else:
            self.step(_FUNCTIONS[operation], *places, out=self._result(each, target))

    def _extreme(self, each: MatExpr, target: int | None) -> None:
        """Compute min or max. A constant is always the second operand, because the order of the operands can affect the
        result: if the operands are 0 and -0, torch may return either."""
        mat, other = each._operands if each._operands[0]._operation != "numbers" else each._operands[::-1]
        if is_one(other):
            function = torch.clamp_max if each._operation == "min" else torch.clamp_min
            place, (number, *_) = self.places[id(mat)], self._numbers(other, as_bits=False)
            self.step(function, place, numbers=(number,), out=self._result(each, target))
        else:
            places = [self.places[id(mat)], self.places[id(other)]]
            self.step(_FUNCTIONS[each._operation], *places, out=self._result(each, target))

    def _result(self, each: MatExpr, target: int | None) -> int:
        """Allocate the register for the result of a node. First free the registers of operands that no later node uses,
        so that the result may reuse one. With `target`, that register is used instead.
        """
        for operand in each._operands:
            self.uses[id(operand)] -= 1
            if not self.uses[id(operand)]:
                self.give_back(self.places[id(operand)])
        self.places[id(each)] = self.room(self.dtype) if target is None else target
        return self.places[id(each)]

    def _divide(self, each: MatExpr, places: list[int], target: int | None) -> None:
        """Divide element by element; division by 0 gives 0."""
        right = each._operands[1]
        if is_one(right) and right._value[0] == 0:
            self.step(torch.zero_, self._result(each, target))
            return
        if is_one(right):
            self.step(torch.div, *places, out=self._result(each, target))
            return
        zero = self.room(torch.bool)
        self.step(torch.eq, places[1], numbers=(0,), out=zero)
        out = self._result(each, target)
        self.step(torch.div, *places, out=out)
        self.step(Tensor.masked_fill_, out, zero, numbers=(0,))
        self.give_back(zero)

    def _bits(self, each: MatExpr, places: list[int], target: int | None) -> None:
        """Compute a bitwise operation on the operands as stored: rounded and saturated to integers of the node's
        depth.
        """
        limits = depth_bounds(each.depth())
        assert limits is not None
        integers = _INTEGER_OF.get(self.dtype, self.dtype)
        made = []
        for n, operand in enumerate(each._operands):
            known = self.bounds[id(operand)]
            if operand._operation != "numbers" and not (known is not None and limits.contain(known)):
                places[n] = self._within_limits(places[n], self.dtype, known, each.depth())
                made.append(places[n])
            if integers != self.dtype:
                places[n] = self.copied(places[n], integers)
                made.append(places[n])
        out = self._result(each, target)
        bits = out if integers == self.dtype else self.room(integers)
        if each._operation == "not":  # xor is right even if the dtype is wider than the depth
            self.step(torch.bitwise_xor, *places, numbers=(-1 if limits.low < 0 else int(limits.high),), out=bits)
        else:
            self.step(_FUNCTIONS[each._operation], *places, out=bits)
        if bits != out:
            self.step(Tensor.copy_, out, bits)
            made.append(bits)
        for place in made:
            self.give_back(place)

    # The store.

    def _within_limits(self, place: int, dtype: torch.dtype, known: Bounds | None, depth: int) -> int:
        """Round and saturate the value in register `place` for `depth`. Return a new scratch register of `dtype` with
        the result."""
        out = self.room(dtype)
        limits = depth_bounds(depth)
        assert limits is not None
        if depth == CV_Bool:
            truth = self.room(torch.bool)
            self.step(torch.ne, place, numbers=(0,), out=truth)
            self.step(Tensor.copy_, out, truth)
            self.give_back(truth)
            return out
        low, high = (float(each) if dtype.is_floating_point else each for each in limits_in(dtype, depth))
        if dtype.is_floating_point and (known is None or known.unit):
            self.step(torch.round, place, out=out)
            place = out
        if known is None or not (limits.low <= known.low and known.high <= limits.high):
            self.step(torch.clamp, place, numbers=(low, high), out=out)
        if known is None:
            self.step(Tensor.nan_to_num_, out, numbers=(low,))
        return out

    def _store(self, place: int, depth: int) -> None:
        target, known, dtype = DEPTHS[depth], self.bounds[id(self.root)], self.dtype
        limits = depth_bounds(depth)
        if depth == CV_Bool:
            self.step(torch.ne, place, numbers=(0,), out=self.target)
            return
        if limits is None:
            is_half = target.size_bytes == 2 and not (known is not None and known.within(torch.float32))
            if is_half and dtype != torch.float32:
                place = place if dtype == torch.float64 else self.copied(place, torch.float64)
                self.step(store_half, self.target, place)
                return
        elif known is None or not limits.contain(known):
            if dtype == torch.float32 and target.size_bytes >= 4:  # float32 cannot represent the limits
                place, dtype = self.copied(place, torch.float64), torch.float64
            if target.size_bytes == 8 and dtype.is_floating_point:
                rounded = self.room(torch.float64)
                self.step(torch.round, place, out=rounded)
                self.step(_store_64, self.target, rounded, numbers=(depth,))
                return
            place = self._within_limits(place, dtype, known, depth)
            if target.dtype in _BY_WAY_OF:
                place = self.copied(place, _BY_WAY_OF[target.dtype])
        self.step(Tensor.copy_, self.target, place)


def _truth(out: Tensor, truth: Tensor) -> None:
    """Write 255 where true and 0 where false."""
    out.copy_(truth)
    out.mul_(255)


def _truth_of_bytes(out: Tensor, truth: Tensor) -> None:
    torch.neg(truth.view(torch.uint8), out=out)


def _store_64(into: Tensor, rounded: Tensor, depth: int) -> None:
    store_64(rounded, into, depth)


def store_half(into: Tensor, y: Tensor) -> None:
    """Store float64 as half precision, rounded once: first to float32, with rounding to odd.

    If float32 cannot represent a value exactly, the last bit of the float32 becomes odd, so that it never lies halfway
    between two numbers of half precision (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums").
    """
    near = y.float()
    rest = y - near.double()
    bits = near.view(torch.int32)
    outward = (rest > 0) == (near > 0)  # whether the exact number has a larger magnitude than the rounded one
    even = (rest != 0) & (bits & 1 == 0) & near.isfinite() & (near != 0)
    bits += torch.where(even, torch.where(outward, 1, -1), 0).to(torch.int32)
    into.copy_(near)


_INTEGER_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
# unsigned dtype -> the dtype to which floats are converted first
_BY_WAY_OF = {torch.uint16: torch.int32, torch.uint32: torch.int64}
_TRUTH_OF = {torch.uint8: _truth_of_bytes}
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

"""Store elementwise expressions into existing memory: y[...] = f(a, b, ...), in one kernel.

`fused` (`elementwise.py`) allocates its results. `store_fused` writes to the caller's strided tensor, and its kernels
also compute float64. The kernels use no fused multiply-add, so each operation is rounded as in PyTorch. A list of
numbers may repeat along the last dimension (`rows`, from `operands/repeating_numbers.py`), such as one number for each
channel of an image.

The kernel is bound by memory: it reads every operand once and writes the result once. If all tensors have the same
layout, the kernel treats them as one-dimensional, for any shape. A program reads a strided region one block of a row at
a time, or as a tile of several short rows. A thread handles at least 16 bytes of the narrowest tensor. Triton
vectorizes only if a pointer is a multiple of 16 bytes, but a region may begin anywhere. So pointers are rounded down to
a multiple of 16 bytes. For tensors whose rows are contiguous, the kernel's arguments give the remaining offsets and the
strides between rows as multiples of `UNIT`. UNIT is the largest power of 2, up to 16 elements, that divides all these
offsets and strides and the length of a row. So Triton can vectorize loads and stores of up to UNIT elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.kernels.elementwise.expression_sources import (
    Access,
    Body,
    Layout,
    block_function,
    calls_of_block,
    columns_of_tile,
    compiled,
    flat_kernel,
    index_lines,
    kernel_name,
    module_of,
)
from rooftop.kernels.elementwise.expression_types import NUMBER
from rooftop.kernels.elementwise.expressions import arguments_of, text_of, topological
from rooftop.kernels.elementwise.launches import merged_dims
from rooftop.kernels.elementwise.programs import Number, Plan, Program, planned
from rooftop.kernels.elementwise.tables import STORES, TURNED
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.repeating_numbers import COLUMNS as TABLE
from rooftop.kernels.operands.repeating_numbers import table_of
from rooftop.kernels.operands.strided_rows import LINE_BYTES, from_line
from rooftop.launch.strides import Dims
from rooftop.launch.triton_launch import Repeated, require_triton

MOST_DIMS = 5
FAST = frozenset(
    {"exp", "expm1", "log", "log1p", "log2", "tanh", "sigmoid", "ndtr", "erf", "sin", "cos", "sqrt", "rsqrt"}
    | {"reciprocal", "pow"}
)
"""Operations that kernels compute in float32 only."""


class Row(NamedTuple):
    """A list of numbers of one dtype, stored as bytes. As bytes, -0.0 differs from 0.0, and NaN equals itself."""

    bits: bytes
    dtype: torch.dtype


def row_of(numbers: Sequence[Number], dtype: torch.dtype) -> Row:
    """A `Row` of the numbers, rounded to the dtype."""
    return Row(torch.tensor(numbers, dtype=dtype, device="cpu").numpy().tobytes(), dtype)


def store_fused(
    program: Program | str,
    tensors: Sequence[Tensor],
    numbers: Sequence[Number],
    out: Tensor,
    rows: Sequence[Row] = (),
) -> Stored | None:
    """Compute a program's only result into `out`.

    Args:
        program: a tree, or its text "ttn: a0 * a1 + a2", with t for tensors and n for numbers.
        tensors: tensors of the shape of `out`, with any strides, on the device of `out`.
        numbers: Python numbers. Floats are passed as float32. To pass a float64 number, pass the integer with the same
            bits, and write `float64_of_bits(a0)` in the program.
        out: the memory of the result. `out` may be the memory of an input tensor, but must not overlap an input
            partially.
        rows: lists of numbers that repeat along the last dimension of `out`, whose size must be a multiple of the
            length of each list. Among the program's arguments, rows follow the tensors.

    Returns:
        The launch, which can be repeated with different memory. None if there was no launch, or several launches, or a
        launch with temporary memory.

    Raises:
        TypeError: the result's dtype differs from that of `out`, or an operation does not support float64 here.
        ValueError: the arguments do not match the program.
        RuntimeError: an element of `rows` is used for the first time while a CUDA graph is captured.
    """
    tables = [table_of(each.bits, each.dtype, out.device) for each in rows]
    plan, arguments = planned([*tensors, *(each.numbers for each in tables)], numbers, program)
    if plan.results != (out.dtype,):
        raise TypeError(f"store_fused: the result has dtype {plan.results}, but out has {out.dtype}")
    if rows and out.dim() and any(0 < abs(step) < abs(out.stride(-1)) for step in out.stride()[:-1]):
        raise ValueError(
            f"store_fused: with rows, the last dimension of out must have the smallest stride, got strides "
            f"{out.stride()}"
        )
    if not out.numel():
        return None
    require_triton()
    given = [i for i, each in enumerate(arguments) if isinstance(each, Tensor)]
    periods = {i: len(each.numbers) for i, each in zip(given[len(tensors) :], tables, strict=True)}
    stored = _store(plan, arguments, out, periods)
    lasting = all(each.is_kept for each in tables)
    return stored if lasting and all(arguments[i] is each for i, each in zip(given, tensors, strict=False)) else None


def _check_double(plan: Plan) -> None:
    """Raise TypeError if the program has an operation in float64 that kernels compute only in float32."""
    for node in topological(plan.outputs):
        if node.operation in FAST and plan.types[id(node)].common == torch.float64:
            raise TypeError(f"store_fused: {node.operation} is not computed in float64: cast its operand to float32")


class Stored(NamedTuple):
    """A past launch, which can be repeated with tensors of the same layout and the same addresses modulo 16 bytes.

    Attributes:
        launch: the kernel with its arguments.
        tensors: for each pointer of the launch, the number of the tensor to which the pointer points; -1 for the
            result.
        leads: for each pointer of the launch, the number of bytes from the pointer to the beginning of its tensor.
    """

    launch: Repeated
    tensors: tuple[int, ...]
    leads: tuple[int, ...]

    def again(self, addresses: Sequence[int]) -> bool:
        """Repeat the launch with the same rows on tensors at these addresses; the last address is that of the result.
        Return whether the launch could be repeated (see `Repeated.at`).
        """
        return self.launch.at([addresses[n] - lead for n, lead in zip(self.tensors, self.leads, strict=True)])


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments that are not tensors, which follow from a program and the layout of its tensors."""

    kernel: Any
    grid: tuple[int, ...]
    values: tuple[int, ...]
    constants: dict[str, Any]


_launches: dict[Any, Launch | None] = {}
_MOST_LAUNCHES = 4096


def _store(plan: Plan, arguments: list[Any], out: Tensor, periods: dict[int, int]) -> Stored | None:
    used = plan.used[0]
    moving = {i: x for i in used if isinstance(x := arguments[i], Tensor) and i not in periods}
    begins = {i: from_line(x) for i, x in moving.items()}
    into, lead = from_line(out)
    leads = (*(each for _, each in begins.values()), lead)
    lie = tuple((x.shape, x.stride()) for x in (*moving.values(), out))
    key = (plan, lie, leads, tuple(periods.items()))
    try:
        found = _launches[key]
    except KeyError:
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = found = _launch_of(plan, moving, out, leads, periods)
    if found is None:  # too many dimensions: launch once for each index of the first dimension
        for n in range(out.shape[0]):
            parts = [each[n] if i in moving else each for i, each in enumerate(arguments)]
            _store(plan, parts, out[n], periods)
        return None
    pointers = [*(begin for begin, _ in begins.values()), into]
    places = [place for place, i in enumerate(used) if i in moving] + [len(used)]
    others = [0 if i in moving else int(a) if isinstance(a := arguments[i], bool) else a for i in used]
    launch = Repeated(found.kernel, found.grid, out.device, (*others, 0, *found.values), places, **found.constants)
    launch(*pointers)
    numbers = {i: n for n, i in enumerate(i for i, each in enumerate(arguments) if isinstance(each, Tensor))}
    sizes = [each.element_size() for each in (*moving.values(), out)]
    return Stored(
        launch,
        (*(numbers[i] for i in moving), -1),
        tuple(lead * size for lead, size in zip(leads, sizes, strict=True)),
    )


def _launch_of(
    plan: Plan, moving: dict[int, Tensor], out: Tensor, leads: tuple[int, ...], periods: dict[int, int]
) -> Launch | None:
    """Plan the launch of a program that writes to `out`. Return None if the tensors have more dimensions after merging
    than a kernel supports.
    """
    dims = merged_dims(out, [*moving.values(), out])
    if len(dims) > MOST_DIMS:
        return None
    if len(dims) == 1 and (dims[0][1][-1] != 1 or any(leads)):
        dims = [(1, (0,) * len(dims[0][1])), *dims]
    every = [_access(dims, n) for n in range(len(leads))]
    accesses: list[Access | None] = [None] * len(plan.kinds)
    for n, i in enumerate(moving):
        accesses[i] = every[n]
    for i, period in periods.items():
        accesses[i] = Access((False,) * (len(dims) - 1), 3, period)
    spans = [sum((size - 1) * abs(strides[n]) for size, strides in dims) for n in range(len(leads))]
    narrow = min(each.element_size() for each in (out, *moving.values()))
    config = next(each for each in STORES if narrow <= each.bytes)
    *outer, (columns, steps) = dims
    if outer and any(steps[n] != 1 and outer[-1][1][n] == 1 for n in range(len(every))):
        config = TURNED
    rows = math.prod(size for size, _ in outer)
    width = min(config.columns, power_of_two(columns))
    height = min(config.elements // width, power_of_two(rows))
    wide = max(*spans, out.numel()) >= 2**31
    layout = Layout(tuple(accesses), wide=wide, stored=every[-1], lines=bool(outer) and height == 1)
    kernel = _kernel(plan, layout)
    constants = {"num_warps": config.warps, "enable_fp_fusion": False}
    if not outer:
        strides = [steps[n] for n, access in enumerate(every) if access.column == 2]
        grid = (-(-out.numel() // config.elements),)
        return Launch(kernel, grid, (out.numel(), *strides), {"BLOCK": config.elements, **constants})
    unit = _unit(dims, every, leads)
    values: list[int] = []
    for n, access in enumerate(every):
        divisor = unit if access.column == 1 else 1
        values += [leads[n] // divisor]
        values += [strides[n] // divisor for moves, (_, strides) in zip(access.outer, outer, strict=True) if moves]
        values += [steps[n]] if access.column == 2 else []
    sizes = [size for size, _ in outer[1:]]
    grid = (-(-rows // height) * -(-columns // width),)
    constants |= {"UNIT": unit} | ({"BLOCK": width} if layout.lines else {"ROWS": height, "COLUMNS": width})
    return Launch(kernel, grid, (rows, columns // unit, *sizes, *values), constants)


def _unit(dims: Dims, every: Sequence[Access], leads: Sequence[int]) -> int:
    """The width of loads and stores in elements, up to 16: the largest power of two that divides the number of columns,
    and the offsets and outer strides of all tensors whose columns are contiguous.
    """
    *outer, (columns, _) = dims
    unit = math.gcd(LINE_BYTES, columns)
    for n, access in enumerate(every):
        if access.column == 1:
            unit = math.gcd(unit, leads[n], *(strides[n] for _, strides in outer))
    return unit


def _access(dims: Dims, n: int) -> Access:
    """How the kernel steps through the memory of tensor n, from the strides of all tensors along the merged dimensions
    `dims`.
    """
    return Access(tuple(strides[n] != 0 for _, strides in dims[:-1]), min(dims[-1][1][n], 2))


def _steps(access: Access | None) -> bool:
    """Whether the kernel has an argument for the stride of the tensor's columns."""
    return access is not None and access.column == 2


# ---- source ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _kernel(plan: Plan, layout: Layout) -> Any:
    return compiled(*_source_of(plan, layout))


def _source_of(plan: Plan, layout: Layout) -> tuple[str, str]:
    """(source, name) of the kernel for arguments with this layout."""
    _check_double(plan)
    body = Body(plan.types, layout, precise=True)
    used = arguments_of(plan.outputs)
    numbers = [f"a{i}" for i in used if (kind := plan.kinds[i]) is not None and kind.rank == NUMBER]
    name = kernel_name(plan.outputs).replace("fused_", "store_", 1)
    write = _flat if layout.outer_dims == 0 else _lines if layout.lines else _tiles
    return module_of(write(body, plan, used, name, numbers)), name


def _flat(body: Body, plan: Plan, used: list[int], name: str, numbers: list[str]) -> list[str]:
    """Source lines of a flat kernel, which computes one index for all tensors, and of the function that computes one
    block.
    """
    names, lines = _block(body, plan, used)
    return flat_kernel(name, ", ".join(names), numbers, text_of(plan.outputs), lines)


def _block(body: Body, plan: Plan, used: list[int]) -> tuple[list[str], list[str]]:
    """The names of a block's arguments, and the lines that compute the block beginning at `start`."""
    accesses = {i: access for i in used if (access := body.layout.accesses[i])}
    stored = body.layout.stored
    assert stored is not None
    every = {**{f"a{i}": access for i, access in accesses.items()}, "y0": stored}
    names = [*(f"a{i}" for i in used), "y0", "elements", *(f"{each}_step" for each, a in every.items() if _steps(a))]
    for i, access in accesses.items():
        place = {
            0: f"a{i} + lane * 0",
            1: f"a{i} + start + lane",
            2: f"a{i} + (start + lane) * a{i}_step",
            3: f"a{i} + (start % {access.period}).to(tl.int32) * {TABLE} + lane",
        }[access.column]
        body.load(i, place, "inside")
    place = {0: "lane * 0", 1: "start + lane", 2: "(start + lane) * y0_step"}[stored.column]
    stores = body.stores(plan.outputs, plan.results, place, "inside")
    return names, [*body.lines, *stores]


def _lines(body: Body, plan: Plan, used: list[int], name: str, numbers: list[str]) -> list[str]:
    """Source lines of a kernel. Each program computes BLOCK consecutive elements of one row, and computes values that
    depend only on the row once.
    """
    layout = body.layout
    given, lines = _block(body, plan, used)
    names, every = _names(layout, used)
    moved = [f"{tensor} += {_row_of(tensor, access)}" for tensor, access in every.items() if access.column != 3]
    wide = ".to(tl.int64)" if layout.wide else ""
    units = "tl.cast(units, tl.int64)" if layout.wide else "units"
    return [
        *block_function(", ".join(given), lines),
        f"@triton.jit(do_not_specialize={[*numbers, *_leads(every)]})",
        f"def {name}({', '.join(names)}, UNIT: tl.constexpr, BLOCK: tl.constexpr):",
        f'    """{text_of(plan.outputs)}"""',
        f"    elements = {units} * UNIT",
        "    blocks = tl.cdiv(elements, BLOCK)",
        "    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK",
        f"    row = (tl.program_id(0) // blocks){wide}",
        *(
            f"    {line}"
            for line in [
                *index_lines(layout.outer_dims, range(layout.outer_dims)),
                *moved,
                *calls_of_block(", ".join(given)),
            ]
        ),
    ]


def _names(layout: Layout, used: list[int]) -> tuple[list[str], dict[str, Access]]:
    """The arguments of a row kernel that precede its constants, and the `Access` of each tensor by its name."""
    assert layout.stored is not None
    every = {**{f"a{i}": access for i in used if (access := layout.accesses[i])}, "y0": layout.stored}
    names = [*(f"a{i}" for i in used), "y0", "rows", "units", *(f"size{d}" for d in range(1, layout.outer_dims))]
    for tensor, access in every.items():
        if access.column == 3:
            continue
        names += [f"{tensor}_lead", *(f"{tensor}_stride{d}" for d, moves in enumerate(access.outer) if moves)]
        names += [f"{tensor}_step"] if _steps(access) else []
    return names, every


def _row_of(tensor: str, access: Access) -> str:
    """Source text of the offset from a tensor's pointer to the first element of one row, or of each of several rows."""
    terms = [f"{tensor}_lead", *(f"index{d} * {tensor}_stride{d}" for d, moves in enumerate(access.outer) if moves)]
    return f"({' + '.join(terms)})" + (" * UNIT" if access.column == 1 else "")


def _leads(every: Mapping[str, Access]) -> list[str]:
    """The names of the kernel arguments that give the offset, in elements, from each tensor's pointer to the tensor's
    first element.
    """
    return [f"{tensor}_lead" for tensor, access in every.items() if access.column != 3]


def _tiles(body: Body, plan: Plan, used: list[int], name: str, numbers: list[str]) -> list[str]:
    """Source lines of a kernel that computes tiles of rows and columns."""
    layout = body.layout
    names, every = _names(layout, used)

    def place(tensor: str, access: Access) -> str:
        column = {
            0: "column * 0", 1: "column", 2: f"column * {tensor}_step",
            3: f"(block * COLUMNS) % {access.period} * {TABLE} + tl.arange(0, COLUMNS)"
        }[access.column]  # fmt: skip
        if access.column == 3:
            return f"{tensor} + ({column})[None, :]"
        row = f"({_row_of(tensor, access)})" + ("[:, None]" if any(access.outer) else "")
        return f"{tensor} + {row} + ({column})[None, :]"

    for i in used:
        if f"a{i}" in every:
            moves = any(every[f"a{i}"].outer)
            body.load(i, place(f"a{i}", every[f"a{i}"]), "inside" if moves else "(column < columns)[None, :]")
    stores = body.stores(plan.outputs, plan.results, place("y0", every["y0"]).removeprefix("y0 + "), "inside")
    wide = ".to(tl.int64)" if layout.wide else ""
    return [
        f"@triton.jit(do_not_specialize={[*numbers, *_leads(every)]})",
        f"def {name}({', '.join(names)}, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):",
        f'    """{text_of(plan.outputs)}"""',
        *columns_of_tile(wide),
        f"    row = part{wide} * ROWS + tl.arange(0, ROWS)",
        "    inside = (row < rows)[:, None] & (column < columns)[None, :]",
        *(f"    {line}" for line in [*index_lines(layout.outer_dims, range(layout.outer_dims)), *body.lines, *stores]),
    ]

"""Elementwise expressions stored into memory that is there: y[...] = f(a, b, ...), in one kernel.

Beside `fused` (`elementwise.py`), which makes its results: here the result is the caller's strided tensor, float64 is
computed in the kernel too, no product is fused with a sum (each operation is rounded as PyTorch's is), and there are
operands that repeat along the last dimension (`periods`): a number for each channel of interleaved images.

Bound by memory: every operand is read once, the result written once. Tensors that are walked through alike are one flat
dimension, whatever their shape; regions are tiles of rows and columns, read where they are. 16 bytes a thread: with
bytes that takes 16 elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.elementwise_launches import Dims, merged_dims
from rooftop.kernels.elementwise_programs import Number, Plan, plan_of, planned
from rooftop.kernels.expression_sources import Access, Body, Layout, compiled, flat_kernel, helpers_of, kernel_name
from rooftop.kernels.expression_texts import text_of
from rooftop.kernels.expression_types import NUMBER, Kind
from rooftop.kernels.expressions import arguments_of, topological
from rooftop.launch.triton_launch import launch, require_triton

MOST_DIMS = 5
FAST = frozenset(
    {"exp", "expm1", "log", "log1p", "log2", "tanh", "sigmoid", "ndtr", "erf", "sin", "cos", "sqrt", "rsqrt"}
    | {"reciprocal", "pow"}
)
"""Operations whose kernels are float32's."""


@dataclass(frozen=True)
class StoreConfig:
    """Elements and warps of a program whose narrowest tensor has elements of so many bytes, and the columns of its
    tiles at most."""

    bytes: int
    elements: int
    columns: int
    warps: int


# 16 bytes a thread of the narrowest tensor.
STORES = (StoreConfig(1, 2048, 2048, 4), StoreConfig(8, 1024, 1024, 4))
TURNED = StoreConfig(8, 4096, 64, 4)  # where neighbours of an operand lie along rows
_LINE_BYTES = 16


def store_fused(
    program: str,
    tensors: Sequence[Tensor],
    numbers: Sequence[Number],
    out: Tensor,
    periods: Mapping[int, int] | None = None,
) -> None:
    """Computes a program's one result into `out`.

    Args:
        program: "ttn: a0 * a1 + a2", as `expression_texts.py` reads it, with t for tensors and n for numbers.
        tensors: of the shape of `out`, with any strides, on its device; those with a period have (period,) elements.
        numbers: Python's. Floats are float32; one of float64 is an integer of the same bits, `float64_of_bits(a0)`.
        out: overlaps no tensor, or has the very same elements.
        periods: by argument number; the elements of that tensor repeat along the last dimension of `out`, whose size is
            a multiple of the period.

    Raises:
        TypeError: the result has another dtype than `out`, or float64 is needed in an operation that has none here.
        ValueError: other arguments than the program's.
    """
    periods = periods or {}
    plan, arguments = planned(tensors, numbers, program)
    if plan.results != (out.dtype,):
        raise TypeError(f"store_fused: the result has dtype {plan.results}, and out {out.dtype}")
    _check_double(plan)
    if out.numel():
        require_triton()
        _store(program, plan, arguments, out, dict(periods))


def _check_double(plan: Plan) -> None:
    for node in topological(plan.outputs):
        if node.operation in FAST and plan.types[id(node)].common == torch.float64:
            raise TypeError(f"store_fused: {node.operation} is not computed in float64: cast its operand to float32")


def _store(text: str, plan: Plan, arguments: list[Any], out: Tensor, periods: dict[int, int]) -> None:
    used = plan.used[0]
    moving = {i: arguments[i] for i in used if isinstance(arguments[i], Tensor) and i not in periods}
    dims = merged_dims(out, [*moving.values(), out])
    if len(dims) > MOST_DIMS:  # one dimension less, as many launches as it has indices
        for n in range(out.shape[0]):
            parts = [each[n] if i in moving else each for i, each in enumerate(arguments)]
            _store(text, plan, parts, out[n], periods)
        return
    if len(dims) == 1 and dims[0][1][-1] != 1:
        dims = [(1, (0,) * len(dims[0][1])), *dims]
    accesses: list[Access | None] = [None] * len(arguments)
    for n, i in enumerate(moving):
        accesses[i] = _access(dims, n)
    for i, period in periods.items():
        accesses[i] = Access((False,) * (len(dims) - 1), 3, period)
    spans = [sum((size - 1) * abs(strides[n]) for size, strides in dims) for n in range(len(moving) + 1)]
    layout = Layout(tuple(accesses), wide=max(*spans, out.numel()) >= 2**31, stored=_access(dims, -1))
    kernel = _kernel(text, plan.kinds, torch.get_default_dtype(), layout)
    given = [int(a) if isinstance(a := arguments[i], bool) else a for i in used]
    narrow = min(each.element_size() for each in (out, *moving.values()))
    config = next(each for each in STORES if narrow <= each.bytes)
    constants = {"num_warps": config.warps, "enable_fp_fusion": False}
    if len(dims) == 1:
        steps = [dims[0][1][n] for n, i in enumerate(moving) if _steps(accesses[i])]
        grid = (-(-out.numel() // config.elements),)
        launch(kernel, grid, out.device, *given, out, out.numel(), *steps, BLOCK=config.elements, **constants)
        return
    _launch_tiles(kernel, given, out, moving, accesses, dims, config)


def _launch_tiles(
    kernel: Any,
    given: list[Any],
    out: Tensor,
    moving: dict[int, Tensor],
    accesses: list[Access | None],
    dims: Dims,
    config: StoreConfig,
) -> None:
    *outer, (columns, steps) = dims
    every = [*(accesses[i] for i in moving), _access(dims, -1)]
    unit, values = math.gcd(_LINE_BYTES, columns), []
    for n, access in enumerate(every):
        assert access is not None
        if access.column == 1:
            unit = math.gcd(unit, *(strides[n] for _, strides in outer))
    for n, access in enumerate(every):
        assert access is not None
        divisor = unit if access.column == 1 else 1
        values += [strides[n] // divisor for moves, (_, strides) in zip(access.outer, outer, strict=True) if moves]
        values += [steps[n]] if access.column == 2 else []
    rows = math.prod(size for size, _ in outer)
    if any(steps[n] != 1 and outer[-1][1][n] == 1 for n in range(len(every))):
        config = TURNED
    width = min(config.columns, 1 << (columns - 1).bit_length())
    height = min(config.elements // width, 1 << (rows - 1).bit_length())
    grid = (-(-rows // height) * -(-columns // width),)
    sizes = [size for size, _ in outer[1:]]
    constants = {"UNIT": unit, "ROWS": height, "COLUMNS": width, "num_warps": config.warps, "enable_fp_fusion": False}
    launch(kernel, grid, out.device, *given, out, rows, columns // unit, *sizes, *values, **constants)


def _access(dims: Dims, n: int) -> Access:
    return Access(tuple(strides[n] != 0 for _, strides in dims[:-1]), min(dims[-1][1][n], 2))


def _steps(access: Access | None) -> bool:
    return access is not None and access.column == 2


# ---- source ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _kernel(text: str, kinds: tuple[Kind | None, ...], default: torch.dtype, layout: Layout) -> Any:
    return compiled(*store_source(text, kinds, default, layout))


def store_source(text: str, kinds: tuple[Kind | None, ...], default: torch.dtype, layout: Layout) -> tuple[str, str]:
    """(source, name) of the kernel for arguments of these kinds that lie so."""
    plan = plan_of(text, kinds, default)
    body = Body(plan.types, layout, precise=True)
    used = arguments_of(plan.outputs)
    numbers = [f"a{i}" for i in used if (kind := kinds[i]) is not None and kind.rank == NUMBER]
    name = kernel_name(plan.outputs).replace("fused_", "store_", 1)
    write = _flat if layout.outer_dims == 0 else _tiles
    lines = write(body, plan, used, name, numbers)
    helpers = helpers_of(lines)
    imported = [f"from rooftop.kernels.elementwise_kernels import {', '.join(helpers)}"] if helpers else []
    return "\n".join(["import triton", "import triton.language as tl", *imported, "", "", *lines]) + "\n", name


def _flat(body: Body, plan: Plan, used: list[int], name: str, numbers: list[str]) -> list[str]:
    """All tensors walked through alike; the function of one block, and the kernel."""
    accesses = {i: access for i in used if (access := body.layout.accesses[i])}
    names = [*(f"a{i}" for i in used), "y0", "elements", *(f"a{i}_step" for i, a in accesses.items() if _steps(a))]
    for i, access in accesses.items():
        place = {
            0: f"a{i} + lane * 0",
            1: f"a{i} + start + lane",
            2: f"a{i} + (start + lane) * a{i}_step",
            3: f"a{i} + ((start % {access.period}).to(tl.int32) + lane) % {access.period}",
        }[access.column]
        body.load(i, place, "inside")
    stores = body.stores(plan.outputs, plan.results, "start + lane", "inside")
    return flat_kernel(name, ", ".join(names), numbers, text_of(plan.outputs), [*body.lines, *stores])


def _tiles(body: Body, plan: Plan, used: list[int], name: str, numbers: list[str]) -> list[str]:
    """Tiles of rows and columns."""
    layout = body.layout
    dims = layout.outer_dims
    assert layout.stored is not None
    accesses = {f"a{i}": access for i in used if (access := layout.accesses[i])}
    every = {**accesses, "y0": layout.stored}
    names = [*(f"a{i}" for i in used), "y0", "rows", "units", *(f"size{d}" for d in range(1, dims))]
    for tensor, access in every.items():
        names += [f"{tensor}_stride{d}" for d, moves in enumerate(access.outer) if moves]
        names += [f"{tensor}_step"] if _steps(access) else []

    def place(tensor: str, access: Access) -> str:
        unit = " * UNIT" if access.column == 1 else ""
        rows = [f"index{d} * ({tensor}_stride{d}{unit})" for d in range(dims) if access.outer[d]]
        column = {
            0: "column * 0", 1: "column", 2: f"column * {tensor}_step", 3: f"column % {access.period}"
        }[access.column]  # fmt: skip
        return " + ".join([tensor, *([f"({' + '.join(rows)})[:, None]"] if rows else []), f"({column})[None, :]"])

    for i in used:
        if f"a{i}" in accesses:
            moves = any(accesses[f"a{i}"].outer)
            body.load(i, place(f"a{i}", accesses[f"a{i}"]), "inside" if moves else "(column < columns)[None, :]")
    stores = body.stores(plan.outputs, plan.results, place("y0", layout.stored).removeprefix("y0 + "), "inside")
    wide = ".to(tl.int64)" if layout.wide else ""
    indices = []
    for d in range(dims):
        divided = "".join(f" // size{later}" for later in range(dims - 1, d, -1))
        indices.append(f"index{d} = row{divided}" + (f" % size{d}" if d else ""))
    return [
        f"@triton.jit(do_not_specialize={numbers})",
        f"def {name}({', '.join(names)}, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):",
        f'    """{text_of(plan.outputs)}"""',
        "    columns = units * UNIT",
        "    blocks = tl.cdiv(columns, COLUMNS)",
        "    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks",
        f"    column = block{wide} * COLUMNS + tl.arange(0, COLUMNS)",
        f"    row = part{wide} * ROWS + tl.arange(0, ROWS)",
        "    inside = (row < rows)[:, None] & (column < columns)[None, :]",
        *(f"    {line}" for line in [*indices, *body.lines, *stores]),
    ]

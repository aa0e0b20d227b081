"""How the kernels of fused elementwise expressions are launched: dimensions merged_dims, parameters as tables.

`launch_program` serves the operator in `elementwise.py`. `expression_sources.py` writes the kernels, one for a program,
its dtypes and a class of memory layouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.elementwise import tables
from rooftop.kernels.elementwise.expression_sources import (
    Access,
    Layout,
    compiled,
    kernel_name,
    source_of,
    stride_names,
)
from rooftop.kernels.elementwise.programs import Plan
from rooftop.kernels.elementwise.tables import FlatConfig
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.strided_rows import unit
from rooftop.kernels.reductions.launches import reduce_into, viewed
from rooftop.launch.strides import Dims, merged
from rooftop.launch.triton_launch import launch, processors

MOST_DIMS = 5  # after merging

# ---- launch ---------------------------------------------------------------------------------------------------


def launch_program(plan: Plan, chosen: tuple[int, ...], arguments: list[Any], y: Tensor, results: list[Tensor]) -> None:
    """One kernel for outputs whose elements, before any are summed, have the shape and strides of y."""
    used = sorted({number for i in chosen for number in plan.used[i]})
    tensors = {i: arguments[i] for i in used if isinstance(arguments[i], Tensor)}
    marks = [_mark(y, plan.kept[i]) for i in chosen] if any(plan.kept) else []
    dims = merged_dims(y, [*tensors.values(), *marks])
    if len(dims) > MOST_DIMS:  # copies in the results' order, which then merge to one dimension
        tensors = {
            i: t if t.dim() == 0 else torch.empty_strided(y.shape, y.stride(), dtype=t.dtype, device=t.device).copy_(t)
            for i, t in tensors.items()
        }
        arguments = [tensors.get(i, each) for i, each in enumerate(arguments)]
        dims = merged_dims(y, [*tensors.values(), *marks])
    sums = tuple(_summed_over(y, plan.kept[i], dims, n) for n, i in enumerate(chosen, len(tensors)))
    if not any(sums):
        dims = merged_dims(y, list(tensors.values()))
    elif len(dims) == 1:
        dims = [(1, (0,) * len(dims[0][1])), *dims]
    device = results[0].device
    stored = [  # what is summed and has no such kernel is stored first
        torch.empty_strided(y.shape, y.stride(), dtype=r.dtype, device=device) if plan.kept[i] and not over else r
        for r, i, over in zip(results, chosen, sums, strict=True)
    ]
    layout = layout_of(dims, tensors, len(arguments), y, sums if any(sums) else ())
    kernel = _kernel(plan, chosen, layout)
    given = [int(a) if isinstance(a := arguments[i], bool) else a for i in used]
    if layout.outer_dims == 0:
        config = flat_config([*tensors.values(), *stored])
        steps = [dims[-1][1][n] for n, i in enumerate(tensors) if layout.accesses[i].column == 2]  # type: ignore[union-attr]
        grid = (-(-y.numel() // config.block),)
        constants = {"BLOCK": config.block, "num_warps": config.warps}
        launch(kernel, grid, device, *given, *stored, y.numel(), *steps, **constants)
    else:
        _launch_tiles(kernel, given, stored, tensors, layout, dims)
    for i, result, full, over in zip(chosen, results, stored, sums, strict=True):
        if plan.kept[i] and not over:
            _sum_into(result, full, [d for d, keep in enumerate(plan.kept[i]) if keep == "0"])


def _launch_tiles(
    kernel: Any, given: list[Any], results: list[Tensor], tensors: dict[int, Tensor], layout: Layout, dims: Dims
) -> None:
    """One launch of the kernel in tiles of rows and columns, for tensors that are broadcast or strided and for sums.

    `dims` have strides of the tensors and then of the outputs, which are 0 where these are summed.
    """
    *outer, (columns, steps) = dims
    group, values = columns, []
    accesses = [layout.accesses[i] for i in tensors]
    for n, access in enumerate(accesses):
        if access is not None and access.column == 1:
            group = unit(group, *(strides[n] for _, strides in outer))
    group = unit(group)
    for n, (i, access) in enumerate(zip(tensors, accesses, strict=True)):
        assert access is not None
        divisor = group if access.column == 1 else 1
        values += [strides[n] // divisor for moves, (_, strides) in zip(access.outer, outer, strict=True) if moves]
        values += [steps[n]] if access.column == 2 else []
        assert len(stride_names(i, access)) == sum(access.outer) + (access.column == 2)
    rows = math.prod(size for size, _ in outer)
    turned = any(steps[n] > 1 and outer[-1][1][n] == 1 for n in range(len(accesses)))
    loops = "rows" in layout.sums
    config = (
        tables.SQUARE if turned else tables.LONG_SUMS if loops else tables.SUMS if any(layout.sums) else tables.TILES
    )
    width = min(config.columns, power_of_two(columns))
    height = min(config.elements // width, power_of_two(rows))
    parts, blocks = -(-rows // height), -(-columns // width)
    sizes = [size for size, _ in outer[1:]]
    if loops:
        tiles = -(-parts // max(1, tables.PROGRAMS_PER_SM * processors(results[0]) // blocks))
        parts = -(-parts // tiles)
        sizes = [tiles, *sizes]
    partial: list[tuple[Tensor, Tensor, list[int]]] = []
    pointers: list[Any] = [*given]
    for n, (result, over) in enumerate(zip(results, layout.sums or ("",) * len(results), strict=True), len(tensors)):
        shape: list[int] = []
        reduced: list[int] = []
        if over == "rows":
            shape, reduced = [parts, columns], [0]
        elif over == "columns":
            shape = [*(size for size, _ in outer), blocks]
            reduced = [*(d for d, (_, strides) in enumerate(outer) if not strides[n]), len(outer)]
        if math.prod(shape[d] for d in reduced) > 1:
            partial.append((result, torch.empty(shape, dtype=torch.float32, device=result.device), reduced))
            pointers.append(partial[-1][1])
        else:
            pointers.append(result)
    constants = {"UNIT": group, "ROWS": height, "COLUMNS": width, "num_warps": config.warps}
    launch(
        kernel, (parts * blocks,), results[0].device, *pointers, rows, columns // group, *sizes, *values, **constants
    )
    for each in partial:
        _sum_into(*each)


# ---- sums ------------------------------------------------------------------------------------------------------


def _mark(y: Tensor, kept: str) -> Tensor:
    """A view that moves along the dimensions of y that are kept, so that these are not merged with others."""
    if not kept:
        return y
    return y.as_strided(y.shape, [s if keep == "1" else 0 for s, keep in zip(y.stride(), kept, strict=True)])


def _summed_over(y: Tensor, kept: str, dims: Dims, mark: int) -> str:
    """What the kernel in tiles can sum a result over: its columns, all rows, or "" neither.

    The sums lie in the order of y's memory, that of the result where y is contiguous or one dimension is kept.
    """
    if not kept or len(dims) > MOST_DIMS:
        return ""
    if not y.is_contiguous() and sum(keep == "1" and size > 1 for keep, size in zip(kept, y.shape, strict=True)) > 1:
        return ""
    moves = [strides[mark] != 0 for _, strides in dims]
    if not moves[-1]:
        return "columns"
    return "" if any(moves[:-1]) else "rows"


def _sum_into(result: Tensor, x: Tensor, dims: list[int]) -> None:
    """The sum of x over these dimensions, in the contiguous memory of a result."""
    table, view = viewed(x, dims, ordered=False)
    reduce_into(result, table, "sum", view, result.dtype)


def flat_config(tensors: Sequence[Tensor]) -> FlatConfig:
    """The parameters for a kernel that moves these."""
    element_bytes = sum(each.element_size() for each in tensors if each.dim())
    return next(config for config in tables.FLAT if element_bytes <= config.element_bytes)


def merged_dims(y: Tensor, tensors: Sequence[Tensor]) -> Dims:
    """The dimensions in the order of y's memory, those merged that all tensors walk through as if they were one."""
    if all((t.shape == y.shape and t.is_contiguous()) or t.dim() == 0 for t in tensors) and y.is_contiguous():
        return [(y.numel(), tuple(int(t.dim() > 0) for t in tensors))]
    strides = [
        (0,) * (y.dim() - t.dim()) + tuple(s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True))
        for t in tensors
    ]
    order = sorted(range(y.dim()), key=y.stride, reverse=True)
    dims = merged([y.shape[d] for d in order], *([each[d] for d in order] for each in strides))
    return dims or [(1, (0,) * len(tensors))]


def layout_of(dims: Dims, tensors: dict[int, Tensor], arguments: int, y: Tensor, sums: tuple[str, ...] = ()) -> Layout:
    """The class of layouts of the tensors, by argument number, over merged dimensions."""
    accesses: list[Access | None] = [None] * arguments
    for n, i in enumerate(tensors):
        outer = tuple(strides[n] != 0 for _, strides in dims[:-1])
        accesses[i] = Access(outer, min(dims[-1][1][n], 2))
    spans = [sum((size - 1) * strides[n] for size, strides in dims) for n in range(len(tensors))]
    return Layout(tuple(accesses), wide=len(dims) > 1 and max(*spans, y.numel()) >= 2**31, sums=sums)


@functools.lru_cache(maxsize=4096)
def source_for(plan: Plan, chosen: tuple[int, ...], layout: Layout) -> tuple[str, str]:
    """(source, name) of the kernel for some of a plan's outputs."""
    outputs = [plan.outputs[i] for i in chosen]
    source = source_of(outputs, [plan.results[i] for i in chosen], plan.types, plan.kinds, layout)  # type: ignore[arg-type]
    return source, kernel_name(outputs)


@functools.lru_cache(maxsize=4096)
def _kernel(plan: Plan, chosen: tuple[int, ...], layout: Layout) -> Any:
    """The compiled kernel of `source_for`."""
    return compiled(*source_for(plan, chosen, layout))

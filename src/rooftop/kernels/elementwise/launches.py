"""Launch the kernels of fused elementwise expressions: merge dimensions, and choose launch parameters from tables.

`elementwise.py` has the operator. `expression_sources.py` writes one kernel for each combination
of program, dtypes and class of memory layouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rooftop.kernels.elementwise import tables
from rooftop.kernels.elementwise.expression_sources import (
    Access,
    Layout,
    compiled,
    kernel_name,
    source_of,
    stride_names,
)
from rooftop.kernels.elementwise.programs import Plan, empty, shape_of, strides_of
from rooftop.kernels.elementwise.tables import FlatConfig
from rooftop.kernels.operands.launch_data import Constants, power_of_two
from rooftop.kernels.operands.strided_rows import unit
from rooftop.kernels.reductions.launches import reduce_into
from rooftop.launch.strides import Dims, merged
from rooftop.launch.triton_launch import launch, processors, require_triton

MOST_DIMS = 5  # largest number of dimensions after merging

# ---- launch ---------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One launch of a program, which can be repeated for arguments of the same shapes, strides and dtypes.

    Attributes:
        used: indices of the program's arguments that are the kernel's first parameters.
        stored: indices of the results that are the kernel's next parameters.
        sizes: the kernel's last parameters.
    """

    kernel: Any
    grid: tuple[int, ...]
    used: tuple[int, ...]
    stored: tuple[int, ...]
    sizes: tuple[int, ...]
    constants: Constants

    def launch(self, arguments: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Launch the kernel on the device of the results."""
        given = [int(each) if isinstance(each := arguments[i], bool) else each for i in self.used]
        pointers = [results[i] for i in self.stored]
        launch(self.kernel, self.grid, pointers[0].device, *given, *pointers, *self.sizes, **self.constants)


def run(
    plan: Plan, arguments: list[Any], shapes: Sequence[torch.Size], results: Sequence[Tensor]
) -> tuple[Step, ...] | None:
    """Compute all results of a program, with one kernel for all results of the same shape and strides before any sum.
    `shapes`: for each result, its shape before the result is summed.

    Returns:
        The launches; None if the call also copied arguments or summed a result.
    """
    require_triton()
    like = next(each for each in arguments if isinstance(each, Tensor))
    stored = {shape: y for y, shape, kept in zip(results, shapes, plan.kept, strict=True) if not kept}
    full: list[Tensor] = []  # for each result, a tensor with its shape and strides before any sum
    for y, shape, kept, used in zip(results, shapes, plan.kept, plan.used, strict=True):
        if kept and shape not in stored:
            stored[shape] = empty(shape, strides_of(shape, arguments, used), y.dtype, like.to("meta"))
        full.append(stored[shape] if kept else y)
    steps: list[Step | None] = []
    for shape, strides in dict.fromkeys((y.shape, y.stride()) for y in full):
        chosen = [i for i, y in enumerate(full) if y.shape == shape and y.stride() == strides]
        if math.prod(shape):
            steps.append(launch_program(plan, tuple(chosen), arguments, full[chosen[0]], [results[i] for i in chosen]))
        else:
            for i in chosen:
                results[i].zero_()
    if any(plan.kept):
        return None
    whole = tuple([each for each in steps if each is not None])
    return whole if len(whole) == len(steps) else None


def launch_program(
    plan: Plan, chosen: tuple[int, ...], arguments: list[Any], y: Tensor, results: list[Tensor]
) -> Step | None:
    """Launch one kernel for the outputs `chosen`, whose elements have the shape and strides of y before a sum. Return
    the launch, which later calls can repeat; None if the call also copied arguments, or if the program sums a result.
    """
    used = sorted({number for i in chosen for number in plan.used[i]})
    tensors = {i: arguments[i] for i in used if isinstance(arguments[i], Tensor)}
    marks = [_mark(y, plan.kept[i]) for i in chosen] if any(plan.kept) else []
    dims = merged_dims(y, [*tensors.values(), *marks])
    copied = len(dims) > MOST_DIMS
    if copied:  # give the copies the strides of the results, so that all dimensions can be merged
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
    stored = [  # if the kernel cannot sum a result, it stores the elements before the sum
        torch.empty_strided(y.shape, y.stride(), dtype=r.dtype, device=device) if plan.kept[i] and not over else r
        for r, i, over in zip(results, chosen, sums, strict=True)
    ]
    layout = layout_of(dims, tensors, len(arguments), y, sums if any(sums) else ())
    kernel = _kernel(plan, chosen, layout)
    given = [int(a) if isinstance(a := arguments[i], bool) else a for i in used]
    if layout.outer_dims == 0:
        config = flat_config([*tensors.values(), *stored])
        constants: Constants
        steps = [dims[-1][1][n] for n, i in enumerate(tensors) if layout.accesses[i].column == 2]  # type: ignore[union-attr]
        grid: tuple[int, ...] = (-(-y.numel() // config.block),)
        constants = {"BLOCK": config.block, "num_warps": config.warps}
        sizes: tuple[int, ...] = (y.numel(), *steps)
        launch(kernel, grid, device, *given, *stored, *sizes, **constants)
    else:
        grid, sizes, constants = _launch_tiles(kernel, given, stored, tensors, layout, dims)
    if not copied and not any(plan.kept):
        return Step(kernel, grid, tuple(used), chosen, sizes, constants)
    for i, result, full, over in zip(chosen, results, stored, sums, strict=True):
        if plan.kept[i] and not over:
            reduce_into(result, full, "sum", [d for d, keep in enumerate(plan.kept[i]) if keep == "0"])
    return None


def _launch_tiles(
    kernel: Any, given: list[Any], results: list[Tensor], tensors: dict[int, Tensor], layout: Layout, dims: Dims
) -> tuple[tuple[int, ...], tuple[int, ...], Constants]:
    """Launch the tiled kernel, for tensors that are broadcast or strided and for sums. Return the grid, the kernel's
    integer arguments (sizes of dimensions, then strides), and its constants.

    Each entry of `dims` is (size, strides): the stride of each tensor in this dimension, followed by the stride of each
    output. In summed dimensions, the stride of an output is 0.
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
    constants: Constants = {"UNIT": group, "ROWS": height, "COLUMNS": width, "num_warps": config.warps}
    grid, numbers = (parts * blocks,), (rows, columns // group, *sizes, *values)
    launch(kernel, grid, results[0].device, *pointers, *numbers, **constants)
    for result, sums, reduced in partial:
        reduce_into(result, sums, "sum", reduced)
    return grid, numbers, constants


# ---- sums ------------------------------------------------------------------------------------------------------


def _mark(y: Tensor, kept: str) -> Tensor:
    """A view of y with stride 0 in the summed dimensions, so that `merged_dims` does not merge kept and summed
    dimensions.
    """
    if not kept:
        return y
    return y.as_strided(y.shape, [s if keep == "1" else 0 for s, keep in zip(y.stride(), kept, strict=True)])


def _summed_over(y: Tensor, kept: str, dims: Dims, mark: int) -> str:
    """What the tiled kernel can add up for a result: "rows" (one sum for each column), "columns" (one sum for each
    row), or "" if it cannot sum the result.

    y has the shape and strides of the elements before the sum. The kernel writes the sums in the order of y's memory.
    The contiguous result has this order if y is contiguous, or if at most one kept dimension has more than one element.
    """
    if not kept or len(dims) > MOST_DIMS:
        return ""
    if not y.is_contiguous() and sum(keep == "1" and size > 1 for keep, size in zip(kept, y.shape, strict=True)) > 1:
        return ""
    moves = [strides[mark] != 0 for _, strides in dims]
    if not moves[-1]:
        return "columns"
    return "" if any(moves[:-1]) else "rows"


def flat_config(tensors: Sequence[Tensor]) -> FlatConfig:
    """The launch parameters for a kernel that reads or writes these tensors."""
    element_bytes = sum(each.element_size() for each in tensors if each.dim())
    return next(config for config in tables.FLAT if element_bytes <= config.element_bytes)


def merged_dims(y: Tensor, tensors: Sequence[Tensor]) -> Dims:
    """The dimensions of y, sorted by their strides in y, the largest first. Neighbouring dimensions are merged if each
    tensor can step through the merged dimension with a single stride.
    """
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
    """The `Layout` of these tensors, over merged dimensions."""
    accesses: list[Access | None] = [None] * arguments
    for n, i in enumerate(tensors):
        outer = tuple(strides[n] != 0 for _, strides in dims[:-1])
        accesses[i] = Access(outer, min(dims[-1][1][n], 2))
    spans = [sum((size - 1) * strides[n] for size, strides in dims) for n in range(len(tensors))]
    return Layout(tuple(accesses), wide=len(dims) > 1 and max(*spans, y.numel()) >= 2**31, sums=sums)


def source_like(plan: Plan, arguments: list[Any]) -> str:
    """The source of the kernel that computes the first result together with all other results that have the same shape
    before a sum.
    """
    used = plan.used[0]
    shape = shape_of(arguments, used)
    of = {i: arguments[i] for i in sorted(used) if isinstance(arguments[i], Tensor)}
    y = empty(shape, strides_of(shape, arguments, used), plan.results[0], next(iter(of.values())).to("meta"))
    layout = layout_of(merged_dims(y, list(of.values())), of, len(arguments), y)
    same = tuple(i for i, each in enumerate(plan.used) if shape_of(arguments, each) == shape)
    return source_for(plan, same, layout)[0]


@functools.lru_cache(maxsize=4096)
def source_for(plan: Plan, chosen: tuple[int, ...], layout: Layout) -> tuple[str, str]:
    """(source, name) of the kernel for some of a plan's outputs."""
    outputs = [plan.outputs[i] for i in chosen]
    source = source_of(outputs, [plan.results[i] for i in chosen], plan.types, plan.kinds, layout)  # type: ignore[arg-type]
    return source, kernel_name(outputs)


@functools.lru_cache(maxsize=4096)
def _kernel(plan: Plan, chosen: tuple[int, ...], layout: Layout) -> Any:
    """The compiled kernel of the source from `source_for`. What its generation computes is no part of an observed call
    (repeated_calls.py).
    """
    with _disable_current_modes():
        return compiled(*source_for(plan, chosen, layout))

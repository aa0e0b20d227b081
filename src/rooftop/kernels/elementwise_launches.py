"""How the kernels of fused elementwise expressions are launched: dimensions merged_dims, parameters as tables.

`launch_program` serves the operator in `elementwise.py`. `expression_sources.py` writes the kernels, one for a program,
its dtypes and a class of memory layouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.elementwise_programs import Plan, plan_of
from rooftop.kernels.expression_sources import Access, Layout, compiled, kernel_name, source_of, stride_names
from rooftop.kernels.expression_types import Kind
from rooftop.kernels.tiles import unit
from rooftop.launch.triton_launch import launch

MOST_DIMS = 5  # after merging

# ---- launch parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatConfig:
    """Elements and warps of a program, for kernels that move up to `element_bytes` for each element."""

    element_bytes: int
    block: int
    warps: int


@dataclass(frozen=True)
class TileConfig:
    """Elements of a tile, its columns at most, and warps. Rows of fewer columns leave room for more rows."""

    elements: int
    columns: int
    warps: int


# Measured on an H200 with up to four inputs, and chosen for all of them: differences are small but for activations of
# one tensor in half precision, which want 16 elements a thread, and for transposed ones, which want large tiles (larger
# ones still gain little, and more tensors would spill).
FLAT = (FlatConfig(4, 2048, 4), FlatConfig(1 << 30, 1024, 4))
TILES = TileConfig(elements=4096, columns=1024, warps=8)
SQUARE = TileConfig(elements=8192, columns=64, warps=8)  # where a tensor's neighbours lie along rows: transposed


# ---- launch ---------------------------------------------------------------------------------------------------


def launch_program(text: str, plan: Plan, chosen: tuple[int, ...], arguments: list[Any], results: list[Tensor]) -> None:
    """One kernel for outputs of the same shape and strides."""
    used = sorted({number for i in chosen for number in plan.used[i]})
    tensors = {i: arguments[i] for i in used if isinstance(arguments[i], Tensor)}
    y = results[0]
    dims = merged_dims(y, list(tensors.values()))
    if len(dims) > MOST_DIMS:  # copies in the results' order, which then merge to one dimension
        tensors = {
            i: t if t.dim() == 0 else torch.empty_like(y, dtype=t.dtype).copy_(t.expand(y.shape))
            for i, t in tensors.items()
        }
        arguments = [tensors.get(i, each) for i, each in enumerate(arguments)]
        dims = merged_dims(y, list(tensors.values()))
    layout = layout_of(dims, tensors, len(arguments), results)
    kernel = _kernel(text, plan.kinds, torch.get_default_dtype(), chosen, layout)
    pointers = [*(int(a) if isinstance(a := arguments[i], bool) else a for i in used), *results]
    if layout.outer_dims == 0:
        config = flat_config([*tensors.values(), *results])
        steps = [dims[-1][1][n] for n, i in enumerate(tensors) if layout.accesses[i].column == 2]  # type: ignore[union-attr]
        grid = (-(-y.numel() // config.block),)
        launch(kernel, grid, y.device, *pointers, y.numel(), *steps, BLOCK=config.block, num_warps=config.warps)
    else:
        _launch_tiles(kernel, pointers, tensors, layout, dims, y.device)


Dims = list[tuple[int, tuple[int, ...]]]  # (size, a stride for each tensor), the outermost dimension first


def _launch_tiles(
    kernel: Any, pointers: list[Any], tensors: dict[int, Tensor], layout: Layout, dims: Dims, device: torch.device
) -> None:
    """One launch of the kernel in tiles of rows and columns, for tensors that are broadcast or strided."""
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
    config = SQUARE if turned else TILES
    width = min(config.columns, 1 << (columns - 1).bit_length())
    height = min(config.elements // width, 1 << (rows - 1).bit_length())
    grid = (-(-rows // height) * -(-columns // width),)
    sizes = [size for size, _ in outer[1:]]
    constants = {"UNIT": group, "ROWS": height, "COLUMNS": width, "num_warps": config.warps}
    launch(kernel, grid, device, *pointers, rows, columns // group, *sizes, *values, **constants)


def flat_config(tensors: Sequence[Tensor]) -> FlatConfig:
    """The parameters for a kernel that moves these."""
    element_bytes = sum(each.element_size() for each in tensors if each.dim())
    return next(config for config in FLAT if element_bytes <= config.element_bytes)


def merged_dims(y: Tensor, tensors: Sequence[Tensor]) -> Dims:
    """The dimensions in the order of y's memory, those merged that all tensors walk through as if they were one."""
    if all((t.shape == y.shape and t.is_contiguous()) or t.dim() == 0 for t in tensors) and y.is_contiguous():
        return [(y.numel(), tuple(int(t.dim() > 0) for t in tensors))]
    strides = [
        (0,) * (y.dim() - t.dim()) + tuple(s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True))
        for t in tensors
    ]
    dims: Dims = []
    for d in sorted(range(y.dim()), key=y.stride, reverse=True):
        size, moves = y.shape[d], tuple(each[d] for each in strides)
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], moves, strict=True)):
            dims[-1] = (dims[-1][0] * size, moves)
        else:
            dims.append((size, moves))
    return dims or [(1, (0,) * len(tensors))]


def layout_of(dims: Dims, tensors: dict[int, Tensor], arguments: int, results: Sequence[Tensor]) -> Layout:
    """The class of layouts of the tensors, by argument number, over merged dimensions."""
    accesses: list[Access | None] = [None] * arguments
    for n, i in enumerate(tensors):
        outer = tuple(strides[n] != 0 for _, strides in dims[:-1])
        accesses[i] = Access(outer, min(dims[-1][1][n], 2))
    spans = [sum((size - 1) * strides[n] for size, strides in dims) for n in range(len(tensors))]
    return Layout(tuple(accesses), wide=len(dims) > 1 and max(*spans, results[0].numel()) >= 2**31)


@functools.lru_cache(maxsize=4096)
def source_for(
    text: str, kinds: tuple[Kind | None, ...], default: torch.dtype, chosen: tuple[int, ...], layout: Layout
) -> tuple[str, str]:
    """(source, name) of the kernel for some of a program's outputs."""
    plan = plan_of(text, kinds, default)
    outputs = [plan.outputs[i] for i in chosen]
    source = source_of(outputs, [plan.results[i] for i in chosen], plan.types, kinds, layout)  # type: ignore[arg-type]
    return source, kernel_name(outputs)


@functools.lru_cache(maxsize=4096)
def _kernel(
    text: str, kinds: tuple[Kind | None, ...], default: torch.dtype, chosen: tuple[int, ...], layout: Layout
) -> Any:
    """The compiled kernel of `source_for`."""
    return compiled(*source_for(text, kinds, default, chosen, layout))

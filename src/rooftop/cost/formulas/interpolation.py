"""Cost of resizing and sampling on grids: each result is a weighted sum of `taps` neighbours along each dimension.

Each neighbour takes 2 flops (a multiplication and an addition); nearest neighbours are only copied. Shrinking without
anti-aliasing skips parts of the input: along a dimension, each result reads at most `taps` positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensor_bytes
from rooftop.cost.formulas.streaming import arithmetic, aten, requested, streaming
from rooftop.cost.registry import Formula, cost_of

# operator: (neighbours along each dimension, dimensions)
RESIZES: dict[str, tuple[int, int]] = {
    "_upsample_nearest_exact1d": (1, 1),
    "_upsample_nearest_exact2d": (1, 2),
    "_upsample_nearest_exact3d": (1, 3),
    "upsample_bicubic2d": (4, 2),
    "upsample_bilinear2d": (2, 2),
    "upsample_linear1d": (2, 1),
    "upsample_nearest1d": (1, 1),
    "upsample_nearest2d": (1, 2),
    "upsample_nearest3d": (1, 3),
    "upsample_trilinear3d": (2, 3),
}

# Number of neighbours along each dimension at scale 1. With anti-aliasing, it grows as the image shrinks.
ANTIALIASED_RESIZES: dict[str, int] = {
    "_upsample_bicubic2d_aa": 4,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_lanczos2d_aa": 6,
}

GRID_TAPS = {0: 2, 1: 1, 2: 4}
"""Neighbours along each dimension by `interpolation_mode`: bilinear, nearest, bicubic."""


def _resize(taps: int, dimensions: int) -> Formula:
    def formula(call: Call) -> Cost:
        source, out = call.read_tensors[0], call.out  # (N, C, *spatial)
        sizes = list(zip(source.shape[-dimensions:], out.shape[-dimensions:], strict=True))
        touched = prod(min(before, taps * after) for before, after in sizes)
        read = tensor_bytes(source) * touched // max(prod(before for before, _ in sizes), 1)
        return Cost(read, tensor_bytes(out), arithmetic(_weighing(taps, dimensions) * out.numel(), [source]))

    return formula


def _weighing(taps: int, dimensions: int) -> int:
    """Flops of one weighted sum over a neighbourhood of `taps` elements along each dimension; 0 for a single element,
    which is only copied.
    """
    return 0 if taps == 1 else 2 * taps**dimensions


for _name, (_taps, _dimensions) in RESIZES.items():
    cost_of(f"aten::{_name}")(_resize(_taps, _dimensions))
    cost_of(f"aten::{_name}_backward")(streaming(_weighing(_taps, _dimensions) or 1, per="grad_output"))


def _antialiased(taps: int) -> Formula:
    """Cost of an anti-aliased resize, which resizes one dimension after the other, in the order with fewer flops."""

    def formula(call: Call) -> Cost:
        is_backward = "grad_output" in call
        fine, coarse = (call.out, call["grad_output"]) if is_backward else (call.read_tensors[0], call.out)
        flops = _separable_flops(taps, fine.shape, coarse.shape)
        read = call.read_tensors
        return Cost(distinct_bytes(read), tensor_bytes(call.out), arithmetic(flops, read))

    return formula


def _separable_flops(taps: int, source: Sequence[int], out: Sequence[int]) -> int:
    (*planes, rows, columns), (*_, new_rows, new_columns) = source, out
    row_taps = min(rows, ceil(taps * max(1.0, rows / max(new_rows, 1))))
    column_taps = min(columns, ceil(taps * max(1.0, columns / max(new_columns, 1))))
    rows_first = new_rows * columns * row_taps + new_rows * new_columns * column_taps
    columns_first = rows * new_columns * column_taps + new_rows * new_columns * row_taps
    return 2 * prod(planes) * min(rows_first, columns_first)


for _name, _taps in ANTIALIASED_RESIZES.items():
    cost_of(f"aten::{_name}", f"aten::{_name}_backward")(_antialiased(_taps))


@cost_of(*aten("grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback cudnn_grid_sampler"))
def grid_sampler(call: Call) -> Cost:
    """The operator reads the grid, and at most the neighbourhood of each grid point in the input. The conversion of a
    grid coordinate to a position in the input takes 2 flops."""
    out, grid = call.out, call["grid"]  # (N, C, *spatial), (N, *spatial, dimensions)
    taps, dimensions = _grid_taps(call), grid.shape[-1]
    flops = _weighing(taps, dimensions) * out.numel() + 2 * grid.numel()
    read = tensor_bytes(grid) + _sampled_bytes(_sampled(call), grid, taps**dimensions)
    return Cost(read, tensor_bytes(out), arithmetic(flops, [out]))


@cost_of(*aten("grid_sampler_2d_backward grid_sampler_3d_backward cudnn_grid_sampler_backward"))
def grid_sampler_backward(call: Call) -> Cost:
    """Both gradients read the grid and the gradient of the output. The gradient of the grid also reads the input
    (except in nearest mode), and takes one weighted sum for each dimension."""
    gradient, grid = call["grad_output"], call["grid"]
    taps, dimensions = _grid_taps(call), grid.shape[-1]
    mask = call.get("output_mask", (True, True))
    to_input, to_grid = mask
    per_result = to_input * (_weighing(taps, dimensions) or 1) + to_grid * dimensions * _weighing(taps, dimensions)
    read = distinct_bytes([gradient, grid])
    if to_grid and taps > 1:  # with mode "nearest", the grid's gradient is 0
        read += _sampled_bytes(_sampled(call), grid, taps**dimensions)
    flops = per_result * gradient.numel() + 2 * grid.numel()
    return Cost(read, distinct_bytes(requested(call.results, mask)), arithmetic(flops, [gradient]))


def _grid_taps(call: Call) -> int:
    """The number of neighbours along each dimension. cuDNN has only the bilinear mode."""
    return GRID_TAPS[call.get("interpolation_mode", 0)]


def _sampled(call: Call) -> Tensor:
    source: Tensor = call["input"] if "input" in call else call["self"]
    return source


def _sampled_bytes(source: Tensor, grid: Tensor, neighbours: int) -> int:
    points = grid.numel() // max(grid.shape[-1], 1)  # over the batch
    channels = source.shape[1]
    return min(tensor_bytes(source), points * neighbours * channels * source.element_size())


@cost_of("aten::affine_grid_generator")
def affine_grid(call: Call) -> Cost:
    """Each coordinate is a product of a row of theta (N, d, d + 1) with a homogeneous point."""
    theta: Tensor = call["theta"]
    flops = 2 * theta.shape[-1] * call.out.numel()
    return Cost(tensor_bytes(theta), tensor_bytes(call.out), arithmetic(flops, [theta]))

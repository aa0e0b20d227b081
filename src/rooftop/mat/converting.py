"""Choose the fastest way to convert elements: one kernel on a GPU, one loop on a CPU, or a sequence of torch
operations."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rooftop.launch.numba_loops import worth_a_loop
from rooftop.launch.triton_launch import INTERPRETED
from rooftop.mat.conversions import WITHOUT_PROGRAMS, convert_blocks, scaling_of

_EPSILON = 2.0**-52  # if the scale is this close to 1 and the shift this close to 0, both are ignored


def convert(source: Tensor, target: Tensor, depth: int, new_depth: int, alpha: float, beta: float) -> None:
    """Convert a tensor to another depth. Both tensors have the same shape and device.

    Each tensor must have its depth's dtype. The tensors must not overlap, unless they are the same elements of the
    same depth.
    """
    alpha, beta = float(alpha), float(beta)
    plain = abs(alpha - 1) < _EPSILON and abs(beta) < _EPSILON
    scaling = None if plain else scaling_of(depth, new_depth, alpha, beta)
    by_blocks = partial(convert_blocks, source, target, depth, new_depth, scaling)
    if depth in WITHOUT_PROGRAMS or new_depth in WITHOUT_PROGRAMS or (plain and depth == new_depth):
        by_blocks()
    elif source.device.type != "cpu" or INTERPRETED:
        from rooftop.mat import kernel_programs  # this imports Triton

        kernel_programs.run_conversion(source, target, depth, new_depth, scaling)
    elif worth_a_loop(source.numel()):
        from rooftop.mat import loop_programs  # this imports all kernels

        loop_programs.run_conversion(source, target, depth, new_depth, scaling, by_blocks)
    else:
        by_blocks()

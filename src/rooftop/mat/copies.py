"""Copy elements as bits: the elements that a mask selects, or one element to all positions.

Tensors here have the shape (..., channels) and the carrier dtype of a depth (type_codes.py). Copies do not
interpret values, so NaNs keep their bits, and unsigned types need no special operators.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rooftop.launch.numba_loops import numba_works, worth_a_loop
from rooftop.launch.triton_launch import INTERPRETED
from rooftop.mat.conversions import row_blocks


def fill(target: Tensor, value: Tensor) -> None:
    """Set every element of `target` to `value`, a tensor (channels,) on the CPU."""
    if not target.numel():
        return
    numbers = value.tolist()
    if all(number == numbers[0] for number in numbers):
        target.fill_(numbers[0])
        return
    # One row is written channel by channel, and the others are copied from it, because copies move many bytes at a
    # time.
    row = target
    while row.dim() > 2:
        row = row[0]
    row.copy_(value.to(target.device))
    if target.dim() > 2:
        _repeat_first(target)


def _repeat_first(target: Tensor) -> None:
    if target.dim() > 3:
        _repeat_first(target[0])
    if target.shape[0] > 1:
        target[1:].copy_(target[:1].expand_as(target[1:]))


def copy_masked(source: Tensor, target: Tensor, mask: Tensor) -> None:
    """Copy the elements whose mask is not 0.

    Args:
        source: a tensor with the target's shape and dtype, or one element (channels,) on the CPU.
        mask: uint8 or bool, (..., 1) for whole elements or (..., channels).
    """
    if target.device.type != "cpu" or INTERPRETED:
        from rooftop.mat.masked_copies import copy_by_kernel  # this imports Triton

        copy_by_kernel(source, target, mask)
        return
    if worth_a_loop(target.numel()) and numba_works():
        from rooftop.mat.masked_loops import copy_by_loops  # this imports Numba

        if copy_by_loops(source, target, mask):
            return
    value = source if source.dim() == 1 else None
    some = torch.empty(0, device="cpu")
    for into, chosen, *rest in row_blocks(target, mask, *([] if value is not None else [source])):
        if value is None:
            (some,) = rest
        elif some.shape != into.shape:
            some = value.expand_as(into).contiguous()
        _copy_block(some, into, _spread(chosen != 0, target.shape[-1]))


def _spread(chosen: Tensor, channels: int) -> Tensor:
    """Expand a mask of elements to a mask of numbers, with NumPy, which is faster than torch. If the mask were
    broadcast over channels instead, torch would loop over single numbers, and a masked copy of a 4K image of CV_8UC3
    would take four times as long in one thread."""
    if chosen.shape[-1] == channels:
        return chosen
    return torch.from_numpy(np.repeat(chosen.numpy(), channels, axis=-1))


def _copy_block(some: Tensor, into: Tensor, chosen: Tensor) -> None:
    if into.dtype == torch.uint8:  # the mask becomes 0 or all ones, so that no byte needs a branch
        into.bitwise_xor_((some ^ into) & chosen.view(torch.int8).neg().view(torch.uint8))
    else:
        torch.where(chosen, some, into, out=into)


def apart(source: Tensor, target: Tensor) -> Tensor:
    """The source, or a copy of it if writing to the target would overwrite source elements that are not read yet."""
    return source.clone() if overlap(source, target) else source


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether writing to one tensor may change elements of the other that are not read yet. Two tensors with exactly
    the same elements do not count: each element is read before it is written."""
    if one.device != other.device or not (one.numel() and other.numel()) or same_elements(one, other):
        return False
    return one.data_ptr() < end_of(other) and other.data_ptr() < end_of(one)


def same_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of equal shape view the same memory with the same strides and dtype."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype


def end_of(x: Tensor) -> int:
    """The address after the last element of a tensor that has elements."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()

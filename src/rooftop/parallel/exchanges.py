"""Differentiable collectives of a group's ranks. The backward of each function is another of these functions.

| function | forward | backward |
|---|---|---|
| `copy_to_ranks` | x, unchanged | sum over the ranks |
| `sum_of_ranks` | sum over the ranks | the gradient, unchanged |
| `gather_of_ranks` | the ranks' parts, joined | this rank's part of the sum over the ranks |
| `scattered_sum_of_ranks` | this rank's part of the sum over the ranks | the ranks' parts, joined |
| `join_of_ranks` | the ranks' parts, joined | this rank's part |

`copy_to_ranks` and `sum_of_ranks` surround the layers that tensor parallel ranks split. `gather_of_ranks` and
`scattered_sum_of_ranks` replace these two functions if the activations between these layers are split along the
sequence. `join_of_ranks` is for a result that all ranks use in the same way. Without a group, each function returns its
argument and communicates nothing. Double backward works, since these functions also compute the gradients.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rooftop.parallel.flight_records import ranks_in_words
from rooftop.parallel.places import interrupted

Group = ProcessGroup | None
"""The ranks that exchange data; None: only this rank."""

# ---- without gradients -------------------------------------------------------------------------------------------

Pending = Callable[[], Tensor]
"""An operation in progress. Calling it waits for the operation and returns the result."""

# torch 2.13 renamed these functions. The old names may be missing in later versions.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def place_in(group: Group) -> tuple[int, int]:
    """Return (this rank's index in a group, the group's size); (0, 1) without a group."""
    return (0, 1) if group is None else (group.rank(), group.size())


def start_sum(x: Tensor, group: Group) -> Pending:
    """Start to sum all ranks' x. The sum overwrites a contiguous x. Do not use x before the sum is complete."""
    if group is None or group.size() == 1:
        return lambda: x
    total = x.contiguous()
    work = dist.all_reduce(total, group=group, async_op=True)
    return lambda: _waited("all_reduce", group, work, total)


def start_gather(x: Tensor, dim: int, group: Group) -> Pending:
    """Start to join all ranks' x along a dimension. Every rank's x must have the same shape."""
    if group is None or group.size() == 1:
        return lambda: x
    part = x.movedim(dim, 0).contiguous()
    joined = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    work = _all_gather(joined, part, group=group, async_op=True)
    return lambda: _waited("all_gather", group, work, joined, part).movedim(0, dim)


def start_scattered_sum(x: Tensor, dim: int, group: Group) -> Pending:
    """Start to sum all ranks' x. The result is this rank's part of the sum along a dimension.

    Raises:
        ValueError: the dimension cannot be split among the ranks.
    """
    if group is None or group.size() == 1:
        return lambda: x
    _check(x, dim, group)
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    work = _reduce_scatter(part, whole, group=group, async_op=True)
    return lambda: _waited("reduce_scatter", group, work, part, whole).movedim(0, dim)


def _waited(name: str, group: ProcessGroup, work: Any, result: Tensor, *_kept_until_then: Tensor) -> Tensor:
    try:
        work.wait()
    except RuntimeError:
        shape, dtype = "x".join(map(str, result.shape)) or "one", str(result.dtype).removeprefix("torch.")
        interrupted(f"{name} of {shape} {dtype} ({ranks_in_words(dist.get_process_group_ranks(group))})")
        raise
    return result


def _check(x: Tensor, dim: int, group: ProcessGroup) -> None:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} has no dimension {dim} to split among {group.size()} ranks"
            + (" (sequence_parallel splits the positions of (..., S, features))" if dim == -2 else "")
        )
    if x.shape[dim] % group.size():
        raise ValueError(
            f"dimension {dim} of {tuple(x.shape)} cannot be split among {group.size()} ranks: its length must be a "
            f"multiple of the number of ranks (with sequence_parallel, pad the sequence or leave out sequence_parallel)"
        )


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """Take this rank's part of x along a dimension, as a view and without communication.

    Raises:
        ValueError: the dimension cannot be split among the ranks.
    """
    if group is None or group.size() == 1:
        return x
    _check(x, dim, group)
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length)


# ---- with gradients ----------------------------------------------------------------------------------------------


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Return x, which is the same on all ranks. The gradient of x is the sum of the ranks' gradients."""
    return x if group is None else _Copy.apply(x, group)  # type: ignore[no-any-return]


def sum_of_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum all ranks' x, of any shape. The sum and its gradient are the same on all ranks."""
    return x if group is None else _Sum.apply(x, group)  # type: ignore[no-any-return]


def gather_of_ranks(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join all ranks' parts along a dimension. Each rank uses the result differently, so backward sums the gradient
    over the ranks. All parts must have the same shape and dtype.

    Raises:
        ValueError: in backward, if the dimension cannot be split among the ranks.
    """
    return x if group is None else _Gather.apply(x, dim, group)  # type: ignore[no-any-return]


def scattered_sum_of_ranks(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum all ranks' x, and return this rank's part of the sum along a dimension.

    Raises:
        ValueError: the dimension cannot be split among the ranks.
    """
    return x if group is None else _ScatteredSum.apply(x, dim, group)  # type: ignore[no-any-return]


def join_of_ranks(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join all ranks' parts along a dimension. All ranks use the result in the same way, so backward needs no sum. All
    parts must have the same shape and dtype."""
    return x if group is None else _Join.apply(x, dim, group)  # type: ignore[no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return sum_of_ranks(dy, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return start_sum(x.clone(memory_format=torch.contiguous_format), group)()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return copy_to_ranks(dy, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_gather(x, dim, group)()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return scattered_sum_of_ranks(dy, ctx.dim, ctx.group), None, None


class _ScatteredSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_scattered_sum(x, dim, group)()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return gather_of_ranks(dy, ctx.dim, ctx.group), None, None


class _Join(_Gather):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return own_part(dy, ctx.dim, ctx.group), None, None

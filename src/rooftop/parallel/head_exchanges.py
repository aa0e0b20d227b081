"""Exchange positions for heads (all-to-all). A rank gives up most heads of its own positions, and gets some heads of
all positions. The inverse exchange restores the original split.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rooftop.parallel.chunks import Chunks
from rooftop.parallel.exchanges import Group, place_in


def heads_here(x: Tensor, order: Tensor, group: Group) -> Tensor:
    """Exchange all heads of this rank's positions for this rank's heads of all positions in the group.

    Args:
        x: (B, H, S, D) of this rank's positions. If there are fewer heads than ranks, several ranks get the same head.
            The head's gradient is the sum of these ranks' gradients.
        order: result of `order_of`, on the device of x. All ranks must hold the same number of positions.
        group: the ranks.

    Returns:
        (B, H / ranks, ranks * S, D), or one head if there are fewer heads than ranks. Positions are in ascending order.

    Raises:
        ValueError: the number of heads is neither a multiple nor a divisor of the number of ranks.
    """
    ranks, heads = place_in(group)[1], x.shape[1]
    if group is None or ranks == 1:
        return x
    if heads % ranks and ranks % heads:
        raise ValueError(
            f"context parallel: {heads} heads of a tensor parallel rank cannot be exchanged among {ranks} ranks (a2a): "
            "one must divide the other; use p2p or all_gather"
        )
    if heads < ranks:
        x = x.repeat_interleave(ranks // heads, 1)
    return _Exchange.apply(x, order, group, True)  # type: ignore[no-any-return]


def positions_here(x: Tensor, order: Tensor, group: Group) -> Tensor:
    """Exchange this rank's heads of all positions for all heads of this rank's positions: the inverse of `heads_here`.

    x is (B, H / ranks, ranks * S, D); the result is (B, H, S, D).
    """
    if group is None or group.size() == 1:
        return x
    return _Exchange.apply(x, order, group, False)  # type: ignore[no-any-return]


def order_of(held: Sequence[Chunks]) -> Tensor:
    """For each position in ascending order, its index in the concatenation of all ranks' positions."""
    return torch.cat([each.positions() for each in held]).argsort()


def _to_heads(x: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
    ranks = group.size()
    parts = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()  # (receivers, B, H / ranks, S, D)
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found.movedim(0, 2).flatten(2, 3)[:, :, order]


def _to_positions(x: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
    ranks = group.size()
    by_rank = torch.empty_like(x, memory_format=torch.contiguous_format)
    by_rank[:, :, order] = x
    parts = by_rank.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()  # (ranks, B, H / ranks, S, D)
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """The all-to-all exchange from split positions to split heads (`to_heads`), or back. The backward pass of one
    direction is the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        ctx.save_for_backward(order)
        return (_to_heads if to_heads else _to_positions)(x, order, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return (_to_positions if ctx.to_heads else _to_heads)(dy, order, ctx.group), None, None, None

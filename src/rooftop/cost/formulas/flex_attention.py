"""Cost of attention with a score function and a block mask (`torch.nn.attention.flex_attention`), as one kernel:

    forward    2 P (D + V)          scores, weighted values
    backward   2 P (3 D + 2 V)      see `attentions`

P is the number of pairs of a query and a key, over all sequences and heads, in the blocks that the mask keeps. A partly
kept block counts as a whole, because only the mask's function knows the hidden pairs in it. The work of the score
function is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from rooftop.cost.accounting import Cost, distinct_bytes, tensors_in
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.softmaxes import SOFTMAX_BACKWARD_FLOPS, SOFTMAX_FLOPS
from rooftop.cost.formulas.streaming import arithmetic


def forward(args: tuple[Any, ...], out: Any) -> Callable[[], Cost]:
    """A function that computes the cost of `flex_attention` later, when the values of its block mask can be read."""
    query, key, value, _, block_mask, *_ = args
    output, log_sum_exp, *_ = out
    read = distinct_bytes([query, key, value, *_buffers(args[7:])])
    written = distinct_bytes([output, log_sum_exp])
    pairs = _visible_pairs(query, key, block_mask)
    like, per_pair = query.new_empty(0, device="meta"), key.shape[-1] + value.shape[-1]

    def cost() -> Cost:
        seen = pairs()
        flops = merged(matrix_flops(like, seen * per_pair), arithmetic(seen * SOFTMAX_FLOPS, [like]))
        return Cost(read, written, flops)

    return cost


def backward(args: tuple[Any, ...], out: Any) -> Callable[[], Cost]:
    """A function that computes the cost of `flex_attention_backward` later (see `forward`)."""
    query, key, value, output, log_sum_exp, gradient, _, _, _, block_mask, *_ = args
    read = distinct_bytes([query, key, value, output, log_sum_exp, gradient, *_buffers(args[12:])])
    written = distinct_bytes(tensors_in(out))
    pairs = _visible_pairs(query, key, block_mask)
    like, per_pair = query.new_empty(0, device="meta"), 3 * key.shape[-1] + 2 * value.shape[-1]

    def cost() -> Cost:
        seen = pairs()
        pointwise = seen * (2 + SOFTMAX_BACKWARD_FLOPS)
        return Cost(read, written, merged(matrix_flops(like, seen * per_pair), arithmetic(pointwise, [like])))

    return cost


def _buffers(captured: Iterable[Any]) -> list[Tensor]:
    """Tensors that the score and mask functions read."""
    return [each for group in captured for each in tensors_in(group)]


def _visible_pairs(query: Tensor, key: Tensor, block_mask: tuple[Any, ...]) -> Callable[[], int]:
    """A function that counts the pairs of a query and a key in the blocks that a mask keeps, over all sequences and
    heads. All pairs of a partly kept block count.

    Args:
        query, key: (B, H, S_q, D) and (B, H', S_k, D).
        block_mask: a tuple that begins with the numbers of queries and of keys. Then it has, for each row of blocks,
            the number of partly kept blocks, the indices of these blocks, the number of fully kept blocks, the indices
            of these blocks, ... The tuple ends with the height and width of a block, and the mask's function.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    kept = [(count, numbers) for count, numbers in (block_mask[2:4], block_mask[4:6]) if count is not None]
    height, width = block_mask[-3:-1]

    def pairs() -> int:
        if height >= queries and width >= keys:
            return batch * heads * queries * keys
        if any(isinstance(count, FakeTensor) for count, _ in kept):
            raise ValueError("the blocks that its mask keeps depend on values, and a prediction has no values")
        with _disable_current_modes():
            return sum(_of_blocks(count.cpu(), numbers.cpu()) for count, numbers in kept)

    def _of_blocks(count: Tensor, numbers: Tensor) -> int:
        rows = (queries - height * torch.arange(count.shape[-1])).clamp(0, height)
        columns = (keys - width * numbers).clamp(0, width)
        columns = columns * (torch.arange(numbers.shape[-1]) < count.unsqueeze(-1))
        in_mask = int((columns.sum(-1) * rows).sum())
        # one mask may serve all sequences or heads
        return in_mask * (batch // count.shape[0]) * (heads // count.shape[1])

    return pairs

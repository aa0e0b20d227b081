"""Causal self-attention whose heads are split over tensor parallel ranks.

Each rank has some query heads, and the key and value heads that these query heads use. If there are fewer key and value
heads than ranks, several ranks hold the same head. `ModelGradients` sums the gradients of such a head over the ranks
that hold it.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3; Ainslie et al., "GQA" (arXiv:2305.13245).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from rooftop.kernels import Box, attention, rope_pair
from rooftop.nn import RMSNorm
from rooftop.parallel.block_attentions import seen_positions
from rooftop.parallel.dropouts import CounterDropout
from rooftop.parallel.exchanges import Group, place_in
from rooftop.parallel.norm_sums import NormSums, Summand
from rooftop.parallel.recomputing import made_again, recomputed
from rooftop.parallel.shards import Piece, Shard
from rooftop.parallel.tensor_linears import ColumnParallelLinear, RowParallelLinear
from rooftop.parallel.turns import Phases

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the positions' angles, each (S, D / 2) or (B, S, D / 2)."""


class Remembered(Protocol):
    """A source of keys and values beyond the layer's input: a cache, or other ranks."""

    def attended(self, attention: ParallelSelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from new positions, with queries (B, H, S, D), keys and values (B, H_k, S, D). Returns (B, H, S,
        D)."""


class ParallelSelfAttention(nn.Module):
    """Causal attention of a sequence to itself and, by `Remembered`, to a cache or other ranks: (B, S, W) -> (B, S, W).

    With sequence parallelism, input and output are this rank's part of the sequence.

    Args:
        width: W, features of a position.
        heads: number of query heads.
        kv_heads: number of key and value heads, each of which a group of query heads shares; None: as many as `heads`.
        head_features: D, the features of a head; None: the heads split W evenly.
        bias: whether the linear layers have a bias.
        out_bias: whether the output layer has a bias; None: as `bias`.
        norms_epsilon: epsilon of the RMS norms of each head's queries and keys; None: no such norms.
        window: the number of positions that a position attends to, including itself; None: all positions up to itself.
        layer: the layer's index in the cache.
        weights_dropout: dropout of the attention weights. With this dropout, training uses plain PyTorch instead of the
            kernel.
        dropout: the dropout that is applied to the result.
        group: the ranks; None: only this rank.
        sequence_parallel: whether the ranks split activations outside the attention along the sequence.
        selective: whether backward recomputes tensors that are cheap to compute (`rooftop.parallel.recomputing`).

    Raises:
        ValueError: a size or the window is below 1, `heads` does not divide the width (without `head_features`),
            `kv_heads` does not divide `heads`, or heads cannot be split among the ranks.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_features: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        norms_epsilon: float | None = None,
        window: int | None = None,
        layer: int = 0,
        weights_dropout: nn.Module | None = None,
        dropout: nn.Module | None = None,
        group: Group = None,
        sequence_parallel: bool = False,
        selective: bool = False,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        _check(width, heads, kv_heads, head_features, group)
        if window is not None and window < 1:
            raise ValueError(f"ParallelSelfAttention: window must be at least 1 position, got {window}")
        self.layer, self.head_features, self.window = layer, head_features or width // heads, window
        query_width, kv_width = (count * self.head_features for count in (heads, kv_heads))
        self.qkv = ColumnParallelLinear(
            width,
            {"query": query_width, "key": kv_width, "value": kv_width},
            bias,
            blocks={"query": heads, "key": kv_heads, "value": kv_heads},
            group=group,
            sequence_parallel=sequence_parallel,
        )
        last = bias if out_bias is None else out_bias
        self.out = RowParallelLinear(query_width, width, last, group=group, sequence_parallel=sequence_parallel)
        self.query_norm, self.key_norm = (_head_norm(self.head_features, norms_epsilon, group) for _ in range(2))
        self.weights_dropout, self.dropout, self.selective = weights_dropout, dropout, selective
        self.qkv.gathers_again = selective

    def forward(self, x: Tensor, rotation: Rotation | None = None, cache: Remembered | None = None) -> Tensor:
        """Apply the layer to x (B, S, W). `rotation` rotates queries and keys; with sequence parallelism, it covers the
        positions of all tensor ranks. None: no rotary positions."""
        seen = self._attended(self._in_order(self.qkv(self._rows(x)), x.shape), rotation, cache)
        merged = self._merged(seen, x.shape)
        with self._again((merged,), lambda seen: (self._merged(seen, x.shape),), seen):
            out = self.out(merged)
        return self._dropped(out.view(x.shape))

    def summand(self, x: Tensor, rotation: Rotation | None, cache: Remembered | None, sums: NormSums) -> Summand:
        """Run `forward` for inference, but return this rank's summand. The kernel of the norm that follows sums over
        the ranks."""
        seen = self._attended(self.qkv(x), rotation, cache)
        return Summand(self.out.summand(self._merged(seen, x.shape)), self.out.bias, sums)

    def in_phases(self, x: Tensor, rotation: Rotation | None = None) -> Phases[Tensor]:
        """Run `forward` in phases, for `rooftop.parallel.turns`."""
        entering = self.qkv.begin(self._rows(x))
        yield
        projected = self.qkv.product_of(entering.arrived())
        yield
        seen = self._attended(self._in_order(projected, x.shape), rotation)
        leaving = self.out.begin(self._merged(seen, x.shape))
        yield
        return self._dropped(self.out.with_bias(leaving.arrived()).view(x.shape))

    def _attended(self, projected: Tensor, rotation: Rotation | None, cache: Remembered | None = None) -> Tensor:
        """Attention of this rank's heads, (B, H, S, D), from packed queries, keys and values (B, S, features)."""
        parts = projected.split(list(self.qkv.parts.values()), -1)
        # (B, S, H, D) for this rank's heads; keys and values may have fewer heads
        *given, value = (part.unflatten(-1, (-1, self.head_features)) for part in parts)
        value = value.transpose(1, 2)
        query, key = self._turned(rotation, *given)
        with self._again((query, key), partial(self._turned, rotation), *given):
            return self.attend(query, key, value) if cache is None else cache.attended(self, query, key, value)

    def _turned(self, rotation: Rotation | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize and rotate queries and keys (B, S, H, D), and transpose them for attention: (B, H, S, D)."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        return (query, key) if rotation is None else rope_pair(query, key, *rotation)

    def _merged(self, seen: Tensor, shape: torch.Size) -> Tensor:
        """Reshape the result (B, H, S, D) to rows for the output layer. `shape` is the shape of this rank's input."""
        return self._out_of_order(seen.transpose(1, 2).flatten(2), shape)

    def _again(
        self, made: Sequence[Tensor], make: Callable[..., Sequence[Tensor]], *sources: Tensor
    ) -> AbstractContextManager[None]:
        return made_again(made, make, *sources) if self.selective else nullcontext()

    def _dropped(self, out: Tensor) -> Tensor:
        return out if self.dropout is None else self.dropout(out)

    # With sequence parallelism, rows pass through the linear layers in the order in which the ranks' parts arrive:
    # (rank, B, S of a rank). Only the inputs and results of attention are reordered.

    def _rows(self, x: Tensor) -> Tensor:
        """Flatten this rank's x (B, S, W) to rows, if the sequence is split."""
        return x if self._ranks == 1 else x.flatten(0, 1)

    def _in_order(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Reorder rows of all positions to sequence order, (B, S, features). `shape` is the shape of this rank's
        input."""
        if self._ranks == 1:
            return rows
        return rows.view(self._ranks, *shape[:2], rows.shape[-1]).transpose(0, 1).flatten(1, 2)

    def _out_of_order(self, seen: Tensor, shape: torch.Size) -> Tensor:
        """Flatten `seen`, which is in sequence order, to rows in the order of the tensor ranks: the inverse of
        `_in_order`."""
        if self._ranks == 1:
            return seen
        return seen.unflatten(1, (self._ranks, shape[1])).transpose(0, 1).flatten(0, 2)

    @property
    def _ranks(self) -> int:
        """The number of ranks that split the sequence; 1 without sequence parallelism."""
        return place_in(self.qkv.group)[1] if self.qkv.sequence_parallel else 1

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from queries (B, H, S, D) to keys and values (B, H_k, T, D). The queries are at the last S of the T
        positions. Returns (B, H, S, D).
        """
        queries, keys, window = query.shape[2], key.shape[2], self.window
        if window is not None and keys >= queries + window:  # with a window, no query attends to the first keys
            begin = keys - queries - window + 1
            key, value, keys = key[:, :, begin:], value[:, :, begin:], keys - begin
        narrow = window is not None and keys > window
        if self.weights_dropout is not None and self.training:
            seen = seen_positions(queries, keys, query.device, window)
            return self.attend_in_pytorch(query, key, value, seen)
        if queries == keys and not narrow:
            return attention(query, key, value, is_causal=True, enable_gqa=True)
        mask = None if queries == 1 else seen_positions(queries, keys, query.device, window)
        return attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def attend_in_pytorch(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """Run `attend_with_dropout`. With selective recomputation, backward recomputes the attention weights."""
        dropout = self.weights_dropout
        assert dropout is not None
        if not self.selective or not torch.is_grad_enabled():
            return attend_with_dropout(query, key, value, seen, dropout)
        masks = dropout.made_by if isinstance(dropout, CounterDropout) else None
        return recomputed(partial(attend_with_dropout, seen=seen, dropout=dropout), masks, query, key, value)


def _head_norm(features: int, epsilon: float | None, group: Group) -> RMSNorm | None:
    """A norm over a head's features, with one weight for all heads. Each rank has the whole weight, but only its own
    heads' part of the gradient. `ModelGradients` sums these parts over the ranks."""
    if epsilon is None:
        return None
    norm = RMSNorm(features, eps=epsilon)
    index, ranks = place_in(group)
    if ranks > 1:
        norm.shards = {"weight": Shard((Piece(Box.whole((features,)), ranks, index == 0),))}  # type: ignore[assignment]
    return norm


def _check(width: int, heads: int, kv_heads: int, head_features: int | None, group: Group) -> None:
    if min(width, heads, kv_heads) < 1 or (head_features is None and width % heads) or heads % kv_heads:
        raise ValueError(
            f"ParallelSelfAttention: width={width}, heads={heads} and kv_heads={kv_heads} must be at least 1, kv_heads "
            f"must divide heads, and heads must divide width unless head_features (the features of a head) is given"
        )
    if head_features is not None and head_features < 1:
        raise ValueError(f"ParallelSelfAttention: head_features must be at least 1, got {head_features}")
    ranks = 1 if group is None else group.size()
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ValueError(
            f"ParallelSelfAttention: heads={heads} and kv_heads={kv_heads} cannot be split among {ranks} ranks: use "
            f"{', '.join(map(str, fitting))} ranks, or other numbers of heads"
        )


def attend_with_dropout(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, dropout: nn.Module) -> Tensor:
    """Attend in plain PyTorch, where attention weights are a tensor (B, H, S, T). `dropout` drops elements of this
    tensor.

    Args:
        query: (B, H, S, D).
        key, value: (B, H_k, T, D), where H_k divides H.
        seen: mask that is True where a query attends to a key, broadcastable to (B, H, S, T). Each query must attend to
            at least one key.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    scores = query @ key.mT * query.shape[3] ** -0.5
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return dropout(weights).to(value.dtype) @ value

"""Attention by blocks: attention of some queries over some keys, with partial results merged by their log-sum-exp.

Partial results are merged in float32 (in float64 for float64 inputs), so that the error does not grow with the number
of blocks. Backward uses only the merged result and its log-sum-exp, so no block's result is saved
(`rooftop.kernels.attentions.parts`).

Large blocks run one by one in the back end that is fastest for their shape. On GPUs in half precision, small blocks,
such as short documents, run together in one launch of flash attention's kernels for packed sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from rooftop.kernels.attentions.parts import attention_part, attention_part_backward
from rooftop.kernels.attentions.states import merge_attention_states, merge_into
from rooftop.parallel.documents import Span
from rooftop.parallel.packings import Block
from rooftop.parallel.uploads import uploaded

aten = torch.ops.aten

TOGETHER = 1024
"""Blocks with at most this many queries and without a window run together in one launch, if `runs_packed` allows it."""
WIDEST = 256  # maximum head dimension that flash attention supports


class Blocks:
    """Attention blocks, prepared once and used by each layer of a model. Either all blocks are causal or none is.

    Args:
        blocks: the blocks. No two blocks share a query.
        batch, queries, keys: the sizes B, S and T of the tensors.
        device: the device of the tensors.
    """

    def __init__(self, blocks: Sequence[Block], batch: int, queries: int, keys: int, device: torch.device) -> None:
        small = [block for block in blocks if _is_small(block)]
        self._alone = [_Alone(block, device) for block in blocks if not _is_small(block)]
        self._small = [_Group(tuple(group), batch, queries, keys, device) for group in _grouped(small)]
        self._only = self._alone[0] if len(blocks) == 1 and self._alone else None
        self._all_queries, self._all_keys = ((0, queries), (0, keys))
        self._apart = not _overlap([(block.row, block.keys) for block in blocks])

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute (out, log-sum-exp) for causal blocks. Each query must be in exactly one of the blocks.

        Args:
            query: (B, H, S, D).
            key, value: (B, H_k, T, D), where H_k divides H.
            scale: factor of the scores.
            dtype: dtype of `out`, which has the memory layout of `empty_like_rows`. The log-sum-exp (B, H, S) has the
                dtype `wide_dtype`.
        """
        if self._only is not None and self._only.block.queries == self._all_queries:
            out, lse = self._only.attended(query, key, value, scale)
            if out.dtype == dtype:
                return out, lse
        out, lse = empty_like_rows(query, dtype), query.new_empty(query.shape[:3], dtype=wide_dtype(query))
        self.attend(query, key, value, scale, out, lse)
        return out, lse

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Compute the blocks. The results of causal blocks overwrite `out` and `lse`. The results of other blocks are
        merged into `out` and `lse`.

        Args:
            query, key, value, scale: as in `attended`.
            out, lse: the tensors to update, with the layouts of the results of `attended`.
        """
        for unit in self._units(query):
            unit.attend(query, key, value, scale, out, lse)

    def gradients(self, given: Given, key: Tensor, value: Tensor, dtype: torch.dtype) -> Three:
        """Compute the gradients of queries, keys and values, in the memory layout of `empty_like_rows`.

        The blocks must be causal. Each query and each key must be in exactly one of the blocks.

        Args:
            given: gradients and forward results of the queries.
            key, value: as in `attended`.
            dtype: the dtype of the gradients.
        """
        if self._only is not None and self._only.block.queries == self._all_queries:
            return _three(each.to(dtype) for each in self._only.gradients(given, key, value))
        into = _three(empty_like_rows(each, dtype) for each in (given.query, key, value))
        for unit in self._units(given.query):
            unit.put(unit.gradients(given, key, value), into, first=True)
        return into

    def add_gradients(
        self, given: Given, key: Tensor, value: Tensor, dquery: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of the queries to `dquery`, and return the gradients of keys and values.

        Args:
            given, key, value, dtype: as in `gradients`.
            dquery: the gradient to add to, in the memory layout of `empty_like_rows`.
        """
        if self._only is not None and self._only.block.keys == self._all_keys:
            part, dkey, dvalue = self._only.gradients(given, key, value)
            dquery[self._only.places[0]] += part
            return dkey.to(dtype), dvalue.to(dtype)
        summed = dtype if self._apart else wide_dtype(key)
        dkey, dvalue = (empty_like_rows(each, summed).zero_() for each in (key, value))
        for unit in self._units(given.query):
            unit.put(unit.gradients(given, key, value), (dquery, dkey, dvalue), first=False)
        return dkey.to(dtype), dvalue.to(dtype)

    def _units(self, query: Tensor) -> Iterator[_Unit]:
        """Yield the units of work: single attention blocks, or groups of blocks. Each unit is one launch, and they run
        one after another."""
        yield from self._alone
        for group in self._small:
            if runs_packed(query) and len(group.blocks) > 1:
                yield group
            else:
                yield from (_Alone(block, group.device) for block in group.blocks)


@dataclass(frozen=True)
class Given:
    """Tensors of the queries that backward needs.

    Attributes:
        dout: gradient of the merged result, (B, H, S, D).
        query: (B, H, S, D).
        out, lse: the merged result, in the queries' dtype, and its log-sum-exp (B, H, S).
        scale: the factor of the scores.
    """

    dout: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor
    scale: float


Three = tuple[Tensor, Tensor, Tensor]
"""The gradients of queries, keys and values."""


def _three(gradients: Iterable[Tensor]) -> Three:
    dquery, dkey, dvalue = gradients
    return dquery, dkey, dvalue


class _Unit(Protocol):
    """Attention blocks that run in one launch. `gradients` returns the gradients of only this unit's queries, keys and
    values."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor, lse: Tensor
    ) -> None: ...  # as in `Blocks`

    def gradients(self, given: Given, key: Tensor, value: Tensor) -> Three: ...

    def put(
        self, parts: Three, into: Three, *, first: bool
    ) -> None: ...  # stores the gradients if `first`, adds them if not


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype for merging and summing partial results that have the dtype of x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def empty_like_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a tensor with x's shape (B, H, S, D) and the memory layout of (B, S, H, D)."""
    batch, heads, length, features = x.shape
    return x.new_empty((batch, length, heads, features), dtype=dtype or x.dtype).transpose(1, 2)


def runs_packed(query: Tensor) -> bool:
    """Whether flash attention's kernels for packed sequences support queries (B, H, S, D) of this shape and dtype."""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and narrow and query.shape[3] <= WIDEST and query.shape[3] % 8 == 0


def seen_positions(queries: int, keys: int, device: torch.device, window: int | None) -> Tensor:
    """A mask (queries, keys), True where a query attends to a key. A query attends to the keys up to its own position.
    With a window, it attends only to the last `window` of these keys. The queries are the last positions of the
    sequence.
    """
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)


def _is_small(block: Block) -> bool:
    return block.window is None and block.queries[1] - block.queries[0] <= TOGETHER


# ---- one launch for each block ---------------------------------------------------------------------------------

Place = tuple[slice, slice, slice]


@dataclass(frozen=True)
class _Alone:
    """An attention block that runs in a launch of its own."""

    block: Block
    device: torch.device

    def attended(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Compute (out, log-sum-exp) of the block's queries, in the layout of `empty_like_rows`."""
        at, there = self.places
        is_causal = self.block.causal and self._mask is None
        out, lse = attention_part(query[at], key[there], value[there], self._mask, is_causal, scale)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        at, _ = self.places
        part, part_lse = self.attended(query, key, value, scale)
        if self.block.causal:
            out[at], lse[at] = part, part_lse
        else:
            merge_into(out[at], lse[at], part, part_lse)

    def gradients(self, given: Given, key: Tensor, value: Tensor) -> Three:
        at, there = self.places
        is_causal = self.block.causal and self._mask is None
        return attention_part_backward(
            *(given.dout[at], given.query[at], key[there], value[there], self._mask),
            *(given.out[at], given.lse[at], is_causal, given.scale),
        )

    def put(self, parts: Three, into: Three, *, first: bool) -> None:
        at, there = self.places
        for total, part, place in zip(into, parts, (at, there, there), strict=True):
            if first:
                total[place] = part
            else:
                total[place] += part

    @property
    def _mask(self) -> Tensor | None:
        block = self.block
        if block.window is None:
            return None
        queries, keys = (end - first for first, end in (block.queries, block.keys))
        return seen_positions(queries, keys, self.device, block.window)

    @property
    def places(self) -> tuple[Place, Place]:
        """The indices that select the block's queries from a tensor (B, H, S, ...), and its keys from a tensor (B, H_k,
        T, ...)."""
        block = self.block
        row = slice(None) if block.row is None else slice(block.row, block.row + 1)
        return (row, slice(None), slice(*block.queries)), (row, slice(None), slice(*block.keys))


# ---- many blocks in one launch ---------------------------------------------------------------------------------


def _overlap(places: Sequence[tuple[int | None, Span]]) -> bool:
    """Whether two of the pairs `places`, (row of the batch, span of keys), share a key. A row of None means all rows of
    the batch."""
    rows = {row for row, _ in places}
    if None in rows and len(rows) > 1:
        return True
    ordered = sorted((row or 0, span) for row, span in places)
    return any(row == after and end > first for (row, (_, end)), (after, (first, _)) in pairwise(ordered))


def _grouped(blocks: Sequence[Block]) -> list[list[Block]]:
    """Distribute attention blocks over groups that run in one launch each. In a group, either all blocks are causal or
    none is, and no two blocks share a query."""
    groups: dict[tuple[bool, int], list[Block]] = {}
    times = Counter[tuple[int | None, Span, bool]]()
    for block in blocks:
        same = (block.row, block.queries, block.causal)
        groups.setdefault((block.causal, times[same]), []).append(block)
        times[same] += 1
    return list(groups.values())


@dataclass(frozen=True)
class _Group:
    """Several blocks that run in one launch as packed sequences. Either all blocks are causal or none is, and no two
    blocks share a query."""

    blocks: tuple[Block, ...]
    batch: int
    queries: int
    keys: int
    device: torch.device

    @property
    def causal(self) -> bool:
        return self.blocks[0].causal

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Attend with the group's blocks, and merge the results into out and lse. Results of causal blocks are stored
        instead, because a causal block is the first block of its queries."""
        part, part_lse, *_ = aten._flash_attention_forward(
            *(self._query_rows(query), self._key_rows(key), self._key_rows(value)),
            *self._lengths,
            *(0.0, self.causal, False),
            scale=scale,
        )  # part (T, H, D), part_lse (H, T)
        rows, row_lse = _flat(out), lse.transpose(1, 2).flatten(0, 1)
        if not self.causal:
            at = self._query_index
            part, part_lse = (
                each.squeeze(0)
                for each in merge_attention_states(
                    *(rows[at].transpose(0, 1)[None], row_lse[at].t()[None]),
                    *(part.transpose(0, 1)[None], part_lse[None]),
                )
            )
            part = part.transpose(0, 1)
        rows.index_copy_(0, self._query_index, part.to(out.dtype))
        row_lse = row_lse.index_copy(0, self._query_index, part_lse.t().to(lse.dtype))
        lse.copy_(row_lse.unflatten(0, (self.batch, self.queries)).transpose(1, 2))

    def gradients(self, given: Given, key: Tensor, value: Tensor) -> Three:
        seed = torch.zeros((), dtype=torch.int64, device=self.device)  # a placeholder for dropout's state
        row_lse = given.lse.transpose(1, 2).flatten(0, 1)[self._query_index].t().contiguous()
        return _three(
            aten._flash_attention_backward(
                *(self._query_rows(given.dout), self._query_rows(given.query)),
                *(self._key_rows(key), self._key_rows(value), self._query_rows(given.out), row_lse),
                *self._lengths,
                *(0.0, self.causal, seed, seed),
                scale=given.scale,
            )
        )

    def put(self, parts: Three, into: Three, *, first: bool) -> None:
        for total, part, index in zip(into, parts, (self._query_index, *(self._key_index,) * 2), strict=True):
            put = _flat(total).index_copy_ if first else _flat(total).index_add_
            put(0, index, part.to(total.dtype))

    def _query_rows(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(0, 1)  # (B * S, H, D)
        return rows.contiguous() if self._has_all_queries else rows[self._query_index]

    def _key_rows(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows.contiguous() if self._has_all_keys else rows[self._key_index]

    @cached_property
    def _has_all_queries(self) -> bool:
        return _follow_each_other(self._query_borders, self.batch * self.queries)

    @cached_property
    def _has_all_keys(self) -> bool:
        return _follow_each_other(self._key_borders, self.batch * self.keys)

    @cached_property
    def _spans(self) -> list[tuple[int, Span, Span]]:
        """(row, queries, keys) for each block. A block for all rows of the batch has an entry for each row."""
        rows = ([block.row] if block.row is not None else range(self.batch) for block in self.blocks)
        return [(row, block.queries, block.keys) for block, each in zip(self.blocks, rows, strict=True) for row in each]

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Return (start of each sequence in the packed queries, start of each sequence in the packed keys, maximum
        number of queries of a sequence, maximum number of keys of a sequence).
        """
        queries, keys = (
            [end - first for first, end in borders] for borders in (self._query_borders, self._key_borders)
        )
        at, there = (
            uploaded(torch.tensor([0, *accumulate(each)], dtype=torch.int32), self.device) for each in (queries, keys)
        )
        return at, there, max(queries), max(keys)

    @cached_property
    def _query_borders(self) -> list[Span]:
        """The start and end of each sequence in the packed rows (B * S, H, D)."""
        return [(row * self.queries + first, row * self.queries + end) for row, (first, end), _ in self._spans]

    @cached_property
    def _key_borders(self) -> list[Span]:
        return [(row * self.keys + first, row * self.keys + end) for row, _, (first, end) in self._spans]

    @cached_property
    def _query_index(self) -> Tensor:
        return uploaded(_index(self._query_borders), self.device)

    @cached_property
    def _key_index(self) -> Tensor:
        return uploaded(_index(self._key_borders), self.device)


def _index(borders: Sequence[Span]) -> Tensor:
    return torch.cat([torch.arange(first, end) for first, end in borders])


def _follow_each_other(borders: Sequence[Span], length: int) -> bool:
    """Whether the spans cover all rows from 0 to `length`, in order and without gaps."""
    ends = [0, *(end for _, end in borders)]
    return ends[:-1] == [first for first, _ in borders] and ends[-1] == length


def _flat(x: Tensor) -> Tensor:
    """View x (B, H, S, D), which has the memory layout of (B, S, H, D), as (B * S, H, D)."""
    return x.transpose(1, 2).view(-1, x.shape[1], x.shape[3])

"""Attention of blocks: what some queries see of some keys, merged by log-sum-exp.

Partial results are merged in float32, so that the error does not grow with the number of blocks. Backward begins from
the merged result and its log-sum-exp, so that nothing of a block is kept (`rooftop.kernels.attention_parts`).

Large blocks run one by one in the fastest back end for their shape. Small ones, such as short documents, run together
in one launch of flash attention's kernels for packed sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from rooftop.kernels.attention_parts import attention_part, attention_part_backward
from rooftop.kernels.attention_states import merge_attention_states, merge_into
from rooftop.parallel.documents import Span
from rooftop.parallel.packings import Block

aten = torch.ops.aten

TOGETHER = 2048
"""Queries up to which blocks run together."""
WIDEST = 256  # features of a head that flash attention takes


class Blocks:
    """Blocks of one step, made ready once and computed in each layer of a model.

    Args:
        blocks: each query has at most one causal block; the blocks of two queries are either of the same queries or of
            none in common. Of the first step, each query has one: it is computed before what is merged with it.
        batch, queries, keys: sizes of the tensors: B, S and T.
        device: of the tensors.
    """

    def __init__(self, blocks: Sequence[Block], batch: int, queries: int, keys: int, device: torch.device) -> None:
        self._whole = [*blocks] == [Block(None, (0, queries), (0, keys), True)]
        small = [block for block in blocks if _is_small(block)]
        self._alone = [block for block in blocks if not _is_small(block)]
        self._small = [_Group(tuple(group), batch, queries, keys, device) for group in _grouped(small)]
        self.merges = any(not block.causal for block in blocks)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out (B, H, S, D), log-sum-exp (B, H, S)).

        Args:
            query: (B, H, S, D). key, value: (B, H_k, T, D), where H_k divides H.
            scale: of the scores.
            into: what earlier steps have found, which is changed and returned; None: this is the first. Then out is
                float32 (float64 for float64), unless one causal block is all that there is.
        """
        if self._whole and into is None:
            return attention_part(query, key, value, None, True, scale)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        if into is None:
            into = empty_like_rows(query), query.new_empty(query.shape[:3], dtype=wide)
        out, lse = into
        for block in self._units(query):
            if isinstance(block, _Group):
                block.attend(query, key, value, scale, out, lse)
                continue
            at, there = _places(block)
            part, part_lse = attention_part(
                query[at],
                key[there],
                value[there],
                _mask(block, query.device),
                block.causal and not block.window,
                scale,
            )
            if block.causal:
                out[at], lse[at] = part, part_lse
            else:
                merge_into(out[at], lse[at], part, part_lse)
        return out, lse

    def add_gradients(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        into: tuple[Tensor, Tensor, Tensor],
        *,
        first: bool = True,
    ) -> None:
        """Add the gradients of queries, keys and values to `into`.

        Args:
            dout: gradient of the merged result, (B, H, S, D).
            query, key, value, scale: as of `attend`.
            out, lse: the merged result in the queries' dtype, and its log-sum-exp.
            into: three tensors of `empty_like_rows`, zeros or what was added before.
            first: whether this is the first step. Then nothing is in the queries' part of `into`.
        """
        for block in self._units(query):
            if isinstance(block, _Group):
                block.add_gradients(dout, query, key, value, out, lse, scale, into, first=first)
                continue
            at, there = _places(block)
            is_causal = block.causal and not block.window
            found = attention_part_backward(
                *(dout[at], query[at], key[there], value[there], _mask(block, query.device)),
                *(out[at], lse[at], is_causal, scale),
            )
            dquery, *others = found
            if first and block.causal:
                into[0][at] = dquery
            else:
                into[0][at] += dquery
            for total, part in zip(into[1:], others, strict=True):
                total[there] += part

    def _units(self, query: Tensor) -> list[Block | _Group]:
        """Blocks that run one by one, and groups that run together; causal ones first."""
        units: list[Block | _Group] = list(self._alone)
        for group in self._small:
            units += [group] if runs_packed(query) and len(group.blocks) > 1 else group.blocks
        return sorted(units, key=lambda unit: not unit.causal)


def empty_like_rows(x: Tensor) -> Tensor:
    """Memory for the shape of x (B, H, S, D), float32 (float64 for float64), which lies as (B, S, H, D)."""
    batch, heads, length, features = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((batch, length, heads, features), dtype=wide).transpose(1, 2)


def runs_packed(query: Tensor) -> bool:
    """Whether flash attention's kernels for packed sequences take such queries (B, H, S, D)."""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and narrow and query.shape[3] <= WIDEST and query.shape[3] % 8 == 0


def seen_positions(queries: int, keys: int, device: torch.device, window: int | None) -> Tensor:
    """(queries, keys): True for the keys up to a query's own, in a window for the last of these; the queries are the
    last of the positions."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)


def _is_small(block: Block) -> bool:
    return block.window is None and block.queries[1] - block.queries[0] <= TOGETHER


def _mask(block: Block, device: torch.device) -> Tensor | None:
    if block.window is None:
        return None
    return seen_positions(block.queries[1] - block.queries[0], block.keys[1] - block.keys[0], device, block.window)


Place = tuple[slice, slice, slice]


def _places(block: Block) -> tuple[Place, Place]:
    """Its queries in (B, H, S, ...), and its keys in (B, H_k, T, ...)."""
    row = slice(None) if block.row is None else slice(block.row, block.row + 1)
    return (row, slice(None), slice(*block.queries)), (row, slice(None), slice(*block.keys))


# ---- many in one launch ------------------------------------------------------------------------------------------


def _grouped(blocks: Sequence[Block]) -> list[list[Block]]:
    """Groups of one kind in which no two blocks have a query in common."""
    groups: dict[tuple[bool, int], list[Block]] = {}
    times = Counter[tuple[int | None, Span, bool]]()
    for block in blocks:
        same = (block.row, block.queries, block.causal)
        groups.setdefault((block.causal, times[same]), []).append(block)
        times[same] += 1
    return list(groups.values())


@dataclass(frozen=True)
class _Group:
    """Blocks of one kind, without a common query, as packed sequences."""

    blocks: tuple[Block, ...]
    batch: int
    queries: int
    keys: int
    device: torch.device

    @property
    def causal(self) -> bool:
        return self.blocks[0].causal

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Merge into out and lse; causal blocks are the first of their queries."""
        part, part_lse, *_ = aten._flash_attention_forward(
            *(self._query_rows(query), self._key_rows(key), self._key_rows(value)),
            *self._lengths,
            *(0.0, self.causal, False),
            scale=scale,
        )  # (T, H, D), (H, T)
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

    def add_gradients(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        into: tuple[Tensor, Tensor, Tensor],
        *,
        first: bool,
    ) -> None:
        seed = torch.zeros((), dtype=torch.int64, device=self.device)  # of the dropout that there is not
        row_lse = lse.transpose(1, 2).flatten(0, 1)[self._query_index].t().contiguous()
        found = aten._flash_attention_backward(
            *(self._query_rows(dout), self._query_rows(query), self._key_rows(key), self._key_rows(value)),
            *(self._query_rows(out), row_lse),
            *self._lengths,
            *(0.0, self.causal, seed, seed),
            scale=scale,
        )
        dquery, *others = found
        rows = _flat(into[0])
        if first and self.causal:
            rows.index_copy_(0, self._query_index, dquery.to(rows.dtype))
        else:
            rows.index_add_(0, self._query_index, dquery.to(rows.dtype))
        for total, part in zip(into[1:], others, strict=True):
            _flat(total).index_add_(0, self._key_index, part.to(total.dtype))

    def _query_rows(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(0, 1)  # (B S, H, D)
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
        """(row, queries, keys) of each block; of one for all rows each by itself."""
        rows = ([block.row] if block.row is not None else range(self.batch) for block in self.blocks)
        return [(row, block.queries, block.keys) for block, each in zip(self.blocks, rows, strict=True) for row in each]

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Where each sequence begins among the rows of queries and of keys, and the longest ones."""
        queries, keys = (
            [end - first for first, end in borders] for borders in (self._query_borders, self._key_borders)
        )
        at, there = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32).to(self.device, non_blocking=True)
            for each in (queries, keys)
        )
        return at, there, max(queries), max(keys)

    @cached_property
    def _query_borders(self) -> list[Span]:
        """Of each sequence, in the rows (B S, H, D)."""
        return [(row * self.queries + first, row * self.queries + end) for row, (first, end), _ in self._spans]

    @cached_property
    def _key_borders(self) -> list[Span]:
        return [(row * self.keys + first, row * self.keys + end) for row, _, (first, end) in self._spans]

    @cached_property
    def _query_index(self) -> Tensor:
        return _index(self._query_borders).to(self.device, non_blocking=True)

    @cached_property
    def _key_index(self) -> Tensor:
        return _index(self._key_borders).to(self.device, non_blocking=True)


def _index(borders: Sequence[Span]) -> Tensor:
    return torch.cat([torch.arange(first, end) for first, end in borders])


def _follow_each_other(borders: Sequence[Span], length: int) -> bool:
    """Whether they are all rows, in their order."""
    ends = [0, *(end for _, end in borders)]
    return ends[:-1] == [first for first, _ in borders] and ends[-1] == length


def _flat(x: Tensor) -> Tensor:
    """(B, H, S, D) with memory as (B, S, H, D); (B S, H, D), a view."""
    return x.transpose(1, 2).view(-1, x.shape[1], x.shape[3])

"""Context parallelism: ranks split every activation along the sequence, and exchange the rows that attention needs.

    context = Context(groups["cp"], "p2p")
    packing = context.packing(length, documents)
    chunks = packing.held[context.index]                   # this rank's positions
    model(chunks.of(tokens, 1), chunks.of(targets, 1), positions=chunks.positions(), packing=packing)

| transport | exchanged data | attention |
|---|---|---|
| `all_gather` | all keys and values that a rank needs, at once; their gradients are sent back | in one step |
| `p2p` | needed keys and values, from one rank after another, during computation | one step per rank, merged |
| `a2a` | some heads of all positions (queries, keys, values); the result is sent back | some heads of whole sequences |
| `a2a+p2p` | `a2a` within groups of neighbours, `p2p` between the groups | combines both |

With `all_gather` and `p2p`, a rank sends only rows that the receiver's queries attend to. For backward, it saves only
its own keys and values, and receives other ranks' keys and values again. With `a2a`, a rank sends the rows of all its
positions, and saves the heads that it has received.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889); Jacobs et al. 2023,
"DeepSpeed Ulysses" (arXiv:2309.14509); Llama Team 2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rooftop.parallel.block_attentions import Blocks, Given, empty_like_rows, wide_dtype
from rooftop.parallel.chunks import Chunks
from rooftop.parallel.documents import Documents, Span
from rooftop.parallel.exchanges import Group, gather_of_ranks, place_in
from rooftop.parallel.head_exchanges import heads_here, order_of, positions_here
from rooftop.parallel.packings import Block, Packing
from rooftop.parallel.uploads import uploaded
from rooftop.words import did_you_mean

if TYPE_CHECKING:
    from rooftop.parallel.self_attentions import ParallelSelfAttention

TRANSPORTS = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""The names of transports, as for Megatron's `--cp-comm-type`."""


@dataclass(frozen=True)
class Context:
    """The ranks that split sequences, and the transport by which they exchange keys and values.

    Attributes:
        group: the ranks; None: this rank has whole sequences.
        transport: one of `TRANSPORTS`.
        near, far: two groups for "a2a+p2p", created by `Context.of`. The ranks of `near` are neighbours, which exchange
            heads. The ranks of `far` have the same index in different groups of neighbours. They exchange keys and
            values.

    Raises:
        ValueError: the transport is unknown, or the two groups for "a2a+p2p" are missing.
    """

    group: Group = None
    transport: str = "p2p"
    near: Group = None
    far: Group = None
    _packings: dict[tuple[int, int], Packing] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(
                f"Context: the transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}"
                f"{did_you_mean(self.transport, TRANSPORTS)}"
            )
        if self.transport == "a2a+p2p" and self.ranks > 1 and (self.near is None or self.far is None):
            raise ValueError("Context: a2a+p2p needs the groups near and far: create the context with Context.of")

    @staticmethod
    def of(group: Group, transport: str = "p2p", near: int | None = None) -> Context:
        """Create the context of a group. All ranks of all context parallel groups must call this together, since the
        call may create groups.

        Args:
            group: this rank's group, such as `Layout.process_groups()["cp"]`.
            transport: one of `TRANSPORTS`.
            near: for "a2a+p2p", the number of neighbours that exchange heads, a divisor of the number of ranks.
        """
        if transport != "a2a+p2p" or group is None or group.size() == 1:
            return Context(group, transport)
        index, ranks = place_in(group)
        if near is None or near < 1 or ranks % near:
            raise ValueError(
                f"Context: a2a+p2p needs a number of neighbours that divides the {ranks} context parallel ranks, got "
                f"{near}"
            )
        members = dist.get_process_group_ranks(group)
        start = index // near * near
        made = [members[start : start + near], members[index % near :: near]]
        within, between = (dist.new_group(ranks, use_local_synchronization=True) for ranks in made)
        return Context(group, transport, within, between)

    @property
    def index(self) -> int:
        """This rank's index in the group of ranks that share a sequence."""
        return place_in(self.group)[0]

    @property
    def ranks(self) -> int:
        """The number of ranks that share a sequence."""
        return place_in(self.group)[1]

    def packing(self, length: int, documents: Documents | None = None, parts: int = 1) -> Packing:
        """Compute the positions of each rank, by `Packing.of`. Without documents, all calls with the same length and
        parts return the same object."""
        if documents is not None:
            return Packing.of(length, self.ranks, documents, parts)
        if (length, parts) not in self._packings:
            self._packings[length, parts] = Packing.of(length, self.ranks, None, parts)
        return self._packings[length, parts]


class ContextAttention:
    """Attention of a rank's positions, used by all layers of a model. This class implements `Remembered`, the source of
    keys and values that `ParallelSelfAttention` accepts.

    Args:
        context: the ranks.
        packing: which rank has which positions. The first layer prepares tables that the next layers reuse.
    """

    def __init__(self, context: Context, packing: Packing) -> None:
        self.context, self.packing = context, packing
        self._seen: dict[int | None, Tensor] = {}

    def attended(self, attention: ParallelSelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention for this rank's positions: query (B, H, S, D), key and value (B, H_k, S, D). Returns (B, H,
        S, D)."""
        if attention.weights_dropout is not None and attention.training:
            return self._with_dropout(attention, query, key, value)
        context, packing = self.context, self.packing
        scale = query.shape[3] ** -0.5
        if context.ranks == 1 or context.transport in ("all_gather", "p2p"):
            plan = self._plan(packing, context.group, attention.window, query)
            return _Attend.apply(query, key, value, plan, scale)  # type: ignore[no-any-return]
        near = context.group if context.transport == "a2a" else context.near
        neighbours = place_in(near)[1]
        first = context.index // neighbours * neighbours
        held, device = packing.held[first : first + neighbours], query.device
        order = self._ready(("order", first, device), lambda: uploaded(order_of(held), device))
        query, key, value = (heads_here(each, order, near) for each in (query, key, value))
        joined = Packing(packing.length, _joined(packing.held, neighbours), packing.documents)
        far = None if context.transport == "a2a" else context.far
        plan = self._plan(joined, far, attention.window, query)
        return positions_here(_Attend.apply(query, key, value, plan, scale), order, near)

    def _plan(self, packing: Packing, group: Group, window: int | None, query: Tensor) -> _RankPlan:
        in_steps = self.context.transport in ("p2p", "a2a+p2p") and place_in(group)[1] > 1
        if in_steps and window is not None:
            raise ValueError(
                f"context parallel: the transport {self.context.transport} does not support attention windows: use "
                "all_gather or a2a"
            )
        batch = query.shape[0]
        place = ("plan", len(packing.held), group, in_steps, window, batch, query.device)
        return self._ready(place, lambda: _RankPlan(packing, group, window, in_steps, batch, query.device))

    def _ready(self, place: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if place not in self.packing.ready:
            self.packing.ready[place] = make()
        return self.packing.ready[place]

    def _with_dropout(self, attention: ParallelSelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention with dropout, in plain PyTorch over all keys. All keys are gathered, whatever the transport."""
        order = uploaded(order_of(self.packing.held), query.device)
        key, value = (gather_of_ranks(each, 2, self.context.group)[:, :, order] for each in (key, value))
        return attention.attend_in_pytorch(query, key, value, self._seen_by(attention.window, query.device))

    def _seen_by(self, window: int | None, device: torch.device) -> Tensor:
        """The mask of positions that this rank's queries attend to: (S, T), or with documents (B, 1, S, T)."""
        if window not in self._seen:
            packing = self.packing
            queries = packing.held[self.context.index].positions(device)[:, None]
            keys = torch.arange(packing.length, device=device)
            seen = keys <= queries
            if window is not None:
                seen = seen & (keys > queries - window)
            if packing.documents is not None:
                starts = packing.documents.starts().to(device)[:, queries[:, 0]]  # (B, S)
                seen = seen & (keys >= starts[:, None, :, None])
            self._seen[window] = seen
        return self._seen[window]


def _joined(held: Sequence[Chunks], near: int) -> tuple[Chunks, ...]:
    """For each group of `near` consecutive ranks, join the positions that the ranks of the group hold."""
    return tuple(
        Chunks(held[0].length, held[0].size, tuple(sorted(p for each in held[at : at + near] for p in each.places)))
        for at in range(0, len(held), near)
    )


# ---- communication -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """One step of an exchange: rows that arrive together, and the attention blocks to compute with these rows.

    Attributes:
        sent: the rows that this rank sends to each rank, as indices into its own rows.
        received: the number of rows from each rank.
        order: indices that sort the arriving rows by position.
        blocks: the attention blocks of this rank's queries with these rows.
    """

    sent: tuple[Tensor, ...]
    received: tuple[int, ...]
    order: Tensor
    blocks: Blocks


@dataclass(frozen=True)
class _RankPlan:
    """A rank's plan for all steps: in each step, the rows to send and to receive, and the blocks to compute."""

    packing: Packing
    group: Group
    window: int | None
    in_steps: bool
    batch: int
    device: torch.device

    @property
    def index(self) -> int:
        return place_in(self.group)[0]

    @cached_property
    def own(self) -> Blocks | None:
        """The blocks in which this rank's rows attend to each other. These blocks are computed while the first rows are
        in transit. With an attention window, the result is None, since a window may reach into other ranks' rows.
        """
        if self.window is not None:
            return None
        return self._made_ready(self.packing.own_blocks(self.index), len(self.packing.held[self.index]))

    @cached_property
    def steps(self) -> tuple[_Step, ...]:
        """All steps in which rows arrive. With a window, the rows include this rank's own rows."""
        index, ranks = self.index, place_in(self.group)[1]
        everybody = set(range(ranks)) - (set() if self.window is not None else {index})
        if not everybody:
            return ()
        if not self.in_steps:
            return (self._step(everybody, everybody),)
        apart = [(index + away) % ranks for away in range(1, ranks)]
        return tuple(self._step({to}, {of}) for to, of in zip(apart, apart[::-1], strict=True))

    def dtype_of_sums(self, x: Tensor) -> torch.dtype:
        """The dtype in which partial results of x are merged and summed. With at most two partial results, this
        is x's dtype, because the result is then rounded only once.
        """
        return wide_dtype(x) if len(self.steps) > 1 else x.dtype

    def _step(self, to: Collection[int], of: Collection[int]) -> _Step:
        """Plan a step of the exchange of rows (keys and values). This rank sends the rows that the ranks `to` need, and
        receives the rows that it needs from the ranks `of`."""
        index, ranks = self.index, place_in(self.group)[1]
        held = self.packing.held[index]
        arriving = [self.packing.rows(index, rank, self.window) if rank in of else () for rank in range(ranks)]
        sent = [self.packing.rows(rank, index, self.window) if rank in to else () for rank in range(ranks)]
        received = [sum(end - first for first, end in spans) for spans in arriving]
        spans = [span for each in arriving for span in each]
        order = torch.cat([torch.arange(*span) for span in spans]).argsort() if spans else torch.zeros(0).long()
        if self.window is None:
            blocks = self.packing.full_blocks(index, spans)
        else:
            blocks = self.packing.blocks(index, range(ranks), self.window)
        return _Step(
            tuple(uploaded(_places_in(held, each), self.device) for each in sent),
            tuple(received),
            uploaded(order, self.device),
            self._made_ready(blocks, sum(received)),
        )

    def _made_ready(self, blocks: Sequence[Block], keys: int) -> Blocks:
        return Blocks(blocks, self.batch, len(self.packing.held[self.index]), keys, self.device)


def _places_in(held: Chunks, spans: Sequence[Span]) -> Tensor:
    """For each position in `spans`, its index in the rows of a rank that holds the positions `held`."""
    wanted = torch.cat([torch.arange(first, end) for first, end in spans]) if spans else torch.zeros(0).long()
    return torch.searchsorted(held.positions(), wanted)


Rows = tuple[Tensor, Tensor]
"""Keys and values (B, H_k, T, D) of some positions."""


def _send(step: _Step, key: Tensor, value: Tensor, group: Group) -> Callable[[], Rows]:
    """Start to send this rank's keys and values that other ranks need in a step. The returned function waits for the
    arriving keys and values, and returns them in ascending order of position."""
    both = torch.cat([key, value], 1).transpose(0, 2)  # (S, 2 * H_k, B, D)
    out = both.index_select(0, torch.cat(step.sent)).contiguous()
    arriving = out.new_empty((sum(step.received), *out.shape[1:]))
    wait = _start_exchange(arriving, step.received, out, [len(each) for each in step.sent], group)

    def waited() -> Rows:
        wait()
        rows = arriving[step.order].transpose(0, 2)  # (B, 2 * H_k, T, D)
        first, second = rows.chunk(2, 1)
        return first, second

    return waited


def _send_back(step: _Step, dkey: Tensor, dvalue: Tensor, group: Group) -> Callable[[Tensor, Tensor], None]:
    """Start to send the gradients of arrived keys and values back to the ranks that own them. The returned function
    waits for the gradients of this rank's own keys and values, and adds them to its two arguments.
    """
    both = torch.cat([dkey, dvalue], 1).transpose(0, 2)  # (T, 2 * H_k, B, D)
    out = torch.empty_like(both, memory_format=torch.contiguous_format)
    out[step.order] = both
    sent = [len(each) for each in step.sent]
    returning = out.new_empty((sum(sent), *out.shape[1:]))
    wait = _start_exchange(returning, sent, out, step.received, group)

    def add(to_key: Tensor, to_value: Tensor) -> None:
        wait()
        for total, rows in zip((to_key, to_value), returning.transpose(0, 2).chunk(2, 1), strict=True):
            total.index_add_(2, torch.cat(step.sent), rows)

    return add


def _start_exchange(
    arriving: Tensor, received: Sequence[int], out: Tensor, sent: Sequence[int], group: Group
) -> Callable[[], None]:
    """Start an all-to-all exchange of rows. Each pair of ranks may exchange a different number of rows, or none."""
    if group is None:
        arriving.copy_(out)
        return lambda: None
    work = dist.all_to_all_single(arriving, out, list(received), list(sent), group=group, async_op=True)

    def wait(_kept: Tensor = out) -> None:
        work.wait()

    return wait


# ---- attention ---------------------------------------------------------------------------------------------------


class _Attend(torch.autograd.Function):
    """Attention of a rank's queries to the rows of all ranks. Each step computes with rows that have arrived, while the
    next rows are in transit. Only this rank's keys and values are saved for backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _RankPlan, scale: float) -> Tensor:
        ctx.plan, ctx.scale = plan, scale
        dtype, arriving = plan.dtype_of_sums(query), _arriving(plan, key, value)
        if plan.own is not None:
            out, lse = plan.own.attended(query, key, value, scale, dtype)
        else:
            out, lse = empty_like_rows(query, dtype), query.new_empty(query.shape[:3], dtype=wide_dtype(query))
        for step, rows in arriving:
            step.blocks.attend(query, *rows, scale, out, lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan = ctx.plan
        given = Given(dout, query, out, lse, ctx.scale)
        dtype, arriving = plan.dtype_of_sums(query), _arriving(plan, key, value)
        if plan.own is not None:
            dquery, dkey, dvalue = plan.own.gradients(given, key, value, dtype)
        else:
            dquery, dkey, dvalue = (empty_like_rows(each, dtype).zero_() for each in (query, key, value))
        returning: list[Callable[[Tensor, Tensor], None]] = []
        for step, rows in arriving:
            dkeys, dvalues = step.blocks.add_gradients(given, *rows, dquery, dtype)
            returning.append(_send_back(step, dkeys, dvalues, plan.group))
        for add in returning:
            add(dkey, dvalue)
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None


def _arriving(plan: _RankPlan, key: Tensor, value: Tensor) -> Iterator[tuple[_Step, Rows]]:
    """Yield each step with its arrived rows, while the next step's rows are in transit."""
    pending = [_send(step, key, value, plan.group) for step in plan.steps[:1]]

    def steps() -> Iterator[tuple[_Step, Rows]]:
        for number, step in enumerate(plan.steps):
            rows = pending.pop()()
            pending.extend(_send(each, key, value, plan.group) for each in plan.steps[number + 1 : number + 2])
            yield step, rows

    return steps()

"""Context parallel attention agrees with the attention of one process, forward and backward, on any number of ranks,
with any transport, and with documents, windows and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.parallel import CounterDropouts, Layout, contexts
from rooftop.parallel.contexts import Context, ContextAttention
from rooftop.parallel.documents import Documents
from rooftop.parallel.dropouts import Place
from rooftop.parallel.head_exchanges import heads_here
from rooftop.parallel.packings import Packing
from rooftop.parallel.self_attentions import ParallelSelfAttention

Run = Callable[..., list[Any]]

BATCH, HEADS, FEATURES, LENGTH = 2, 4, 6, 32
ENDS = [[3, 4, 20], [13, 29]]


@dataclass(frozen=True)
class Case:
    """An attention, and its division among ranks."""

    transport: str
    ranks: int
    documents: bool = False
    kv_heads: int = 2
    window: int | None = None
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64

    def packing(self) -> Packing:
        documents = Documents.of_ends(LENGTH, ENDS) if self.documents else None
        return Packing.of(LENGTH, self.ranks, documents)


class Layer:
    """An attention with the interface that `ContextAttention` needs."""

    selective = False
    attend_in_pytorch = ParallelSelfAttention.attend_in_pytorch

    def __init__(self, case: Case) -> None:
        self.window, self.training = case.window, True
        self.masks = CounterDropouts(seed=5)
        self.weights_dropout = self.masks(case.dropout, "weights_dropout") if case.dropout else None


def whole(case: Case) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, for all positions."""
    made = torch.Generator().manual_seed(0)
    heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)
    return [torch.randn(BATCH, n, LENGTH, FEATURES, generator=made, dtype=torch.float64).to(case.dtype) for n in heads]


def expected(case: Case) -> list[Tensor]:
    """The result and the three gradients, computed by the definition."""
    query, key, value, dout = (each.double() for each in whole(case))
    inputs = [each.requires_grad_() for each in (query, key, value)]
    key, value = (each.repeat_interleave(HEADS // case.kv_heads, 1) for each in inputs[1:])
    places = torch.arange(LENGTH)
    seen = places <= places[:, None]
    if case.window is not None:
        seen = seen & (places > places[:, None] - case.window)
    if case.documents:
        seen = seen & (places >= Documents.of_ends(LENGTH, ENDS).starts()[:, None, :, None])
    scores = (query @ key.mT * FEATURES**-0.5).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1)
    layer = Layer(case)
    if layer.weights_dropout is not None:
        weights = layer.weights_dropout(weights)
    out = weights @ value
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def attended(case: Case) -> list[list[int] | Tensor]:
    """On a rank: its positions, and for these the values that `expected` returns."""
    context = context_of(case)
    packing = case.packing()
    chunks, layer = packing.held[context.index], Layer(case)
    query, key, value, dout = (chunks.of(each, 2) for each in whole(case))
    inputs = [each.clone().requires_grad_() for each in (query, key, value)]
    attention: Any = layer
    with layer.masks.at(Place(chunks=chunks)):
        out = ContextAttention(context, packing).attended(attention, *inputs)
        found = torch.autograd.grad(out, inputs, dout)
    return [chunks.positions().tolist(), out.detach(), *found]


def context_of(case: Case) -> Context:
    group = Layout(cp=case.ranks).process_groups()["cp"]
    return Context.of(group, case.transport, near=2 if case.ranks > 2 else case.ranks)


def joined(parts: list[list[Any]]) -> list[Tensor]:
    order = torch.tensor([p for positions, *_ in parts for p in positions]).argsort()
    return [torch.cat(list(each), 2)[:, :, order] for each in zip(*(rest for _, *rest in parts), strict=True)]


CASES = [
    Case("p2p", 2),
    Case("p2p", 4, documents=True, kv_heads=1),
    Case("p2p", 4, kv_heads=4),
    Case("all_gather", 2, documents=True),
    Case("all_gather", 4, window=5),
    Case("all_gather", 2, documents=True, window=3, kv_heads=4),
    Case("a2a", 2, documents=True, window=7),
    Case("a2a", 4, kv_heads=1, documents=True),
    Case("a2a", 4, kv_heads=4),
    Case("a2a+p2p", 4, documents=True),
    Case("a2a+p2p", 4, kv_heads=1),
    Case("p2p", 2, documents=True, dropout=0.3),
    Case("a2a", 2, dropout=0.3, window=5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_transport_attends_as_one_process(case: Case, on_ranks: Run) -> None:
    for ours, theirs in zip(joined(on_ranks(case.ranks, attended, case)), expected(case), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_one_process_attends_within_documents(documents: bool) -> None:
    case = Case("p2p", 1, documents=documents, window=None)
    for ours, theirs in zip(attended(case)[1:], expected(case), strict=True):
        assert isinstance(ours, Tensor)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def counted(case: Case) -> tuple[int, int, int, list[int]]:
    """The numbers of rows sent to others and received, of rows kept for backward, and of pairs computed in blocks."""
    sent, received = [0], [0]
    start = contexts._start_exchange

    def counting(arriving: Tensor, incoming: list[int], out: Tensor, outgoing: list[int], group: Any) -> Any:
        for rank, (there, here) in enumerate(zip(outgoing, incoming, strict=True)):
            sent[0] += there * (rank != dist.get_rank())
            received[0] += here * (rank != dist.get_rank())
        return start(arriving, incoming, out, outgoing, group)

    context, packing = context_of(case), case.packing()
    chunks = packing.held[context.index]
    query, key, value, _ = (chunks.of(each, 2).requires_grad_() for each in whole(case))
    attention: Any = Layer(case)
    kept: list[Tensor] = []
    with (
        patch.object(contexts, "_start_exchange", counting),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t),
    ):
        ContextAttention(context, packing).attended(attention, query, key, value)
    rows = sum(each.shape[2] for each in kept if each.dim() == 4)
    return sent[0], received[0], rows, list(packing.pairs)


@pytest.mark.parametrize("case", [Case("p2p", 4, True), Case("all_gather", 4, True), Case("p2p", 2)], ids=str)
def test_only_needed_rows_are_sent_and_only_own_ones_kept(case: Case, on_ranks: Run) -> None:
    packing = case.packing()
    for rank, (sent, received, kept, pairs) in enumerate(on_ranks(case.ranks, counted, case)):
        others = [each for each in range(case.ranks) if each != rank]
        lengths = [[sum(e - f for f, e in packing.rows(*pair)) for pair in ((o, rank), (rank, o))] for o in others]
        assert [sent, received] == [sum(each) for each in zip(*lengths, strict=True)]
        assert kept == 4 * LENGTH // case.ranks  # query, key, value and the result
        assert max(pairs) <= 1.35 * min(pairs)  # uneven with only 32 positions; test_packings has long sequences


def off_by_a_chunk(self: Packing, rank: int, spans: Any) -> Any:
    return [block for block in FULL_BLOCKS(self, rank, spans) if block.queries[0]]


FULL_BLOCKS = Packing.full_blocks
MUTANTS: dict[str, Callable[[], Any]] = {
    "a chunk is not seen": lambda: patch.object(Packing, "full_blocks", off_by_a_chunk),
    "gradients are not returned": lambda: patch.object(
        contexts, "_send_back", lambda step, dkey, dvalue, group: lambda a, b: None
    ),
    "rows arrive in another order": lambda: patch.object(contexts.Chunks, "positions", shuffled_positions),
    "merged in bfloat16": lambda: patch.object(contexts._RankPlan, "dtype_of_sums", lambda plan, x: torch.bfloat16),
}


def shuffled_positions(self: Any, device: Any = "cpu") -> Tensor:
    runs = [torch.arange(first, end, device=device) for first, end in self.runs()]
    return torch.cat(runs[::-1])


def attended_wrongly(case: Case, mutant: str) -> list[Any]:
    positions = case.packing().held[dist.get_rank()].positions().tolist()
    with MUTANTS[mutant]():
        return [positions, *attended(case)[1:]]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, on_ranks: Run) -> None:
    case = Case("p2p", 2)
    found = joined(on_ranks(2, attended_wrongly, case, mutant))
    errors = [float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected(case), strict=True)]
    assert max(errors) > 1e-6


def test_what_cannot_be_exchanged_is_refused(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    with pytest.raises(ValueError, match=r"must be one of p2p, all_gather, a2a, a2a\+p2p, got 'p2' \(did you mean"):
        Context(None, "p2")
    with pytest.raises(ranks_failed, match=r"3 heads .* among 2 ranks \(a2a\): one must divide the other"):
        on_ranks(2, three_heads)
    with pytest.raises(ranks_failed, match="does not support attention windows: use all_gather or a2a"):
        on_ranks(2, attended, Case("p2p", 2, window=3))
    with pytest.raises(ranks_failed, match=r"a number of neighbours that divides the .* context parallel ranks, got 3"):
        on_ranks(4, near_three)


def three_heads() -> None:
    heads_here(torch.zeros(1, 3, 4, 2), torch.arange(8), Layout(cp=2).process_groups()["cp"])


def near_three() -> None:
    Context.of(Layout(cp=4).process_groups()["cp"], "a2a+p2p", near=3)


def test_layers_and_steps_share_what_was_made_ready() -> None:
    case = Case("p2p", 1, documents=True)
    packing = case.packing()
    query, key, value, _ = whole(case)
    attention: Any = Layer(case)
    with patch.object(contexts, "Blocks", wraps=contexts.Blocks) as blocks:
        for _step in range(2):
            made = ContextAttention(Context(), packing)
            for _layer in range(3):
                made.attended(attention, query, key, value)
    assert blocks.call_count == 1
    context = Context()
    assert context.packing(8) is context.packing(8)


def test_an_attention_layer_takes_it_as_it_takes_a_cache() -> None:
    layer = ParallelSelfAttention(16, 4, 2).double()
    x = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    packing = Packing.of(LENGTH, 1, Documents.of_ends(LENGTH, [[7], [7]]))
    found = layer(x, None, ContextAttention(Context(), packing))
    torch.testing.assert_close(found[:, :7], layer(x[:, :7]), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[:, 7:], layer(x[:, 7:]), rtol=0, atol=1e-12)

"""Blocks of attention together cover exactly the visible pairs, and exactly the needed rows are moved."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.parallel.chunks import Chunks
from rooftop.parallel.documents import Documents
from rooftop.parallel.packings import Block, Packing
from rooftop.parallel.transport_plans import Exchange


@st.composite
def some_packings(draw: st.DrawFn) -> Packing:
    ranks, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    length = 2 * ranks * size * draw(st.sampled_from([1, 2, 4]))
    if draw(st.booleans()):
        return Packing.of(length, ranks)
    rows = st.lists(st.integers(1, length), min_size=0, max_size=6, unique=True)
    ends = [sorted(draw(rows)) for _ in range(draw(st.integers(1, 3)))]
    return Packing.of(length, ranks, Documents.of_ends(length, ends))


def visible(packing: Packing, row: int, window: int | None) -> Tensor:
    """The visible pairs (S, S), from the definition."""
    places = torch.arange(packing.length)
    starts = packing.documents.starts()[row] if packing.documents is not None else torch.zeros_like(places)
    seen = (places[None] <= places[:, None]) & (places[None] >= starts[:, None])
    return seen if window is None else seen & (places[None] > places[:, None] - window)


def covered(packing: Packing, to: int, of: list[int], row: int, window: int | None) -> Tensor:
    """How often each pair of (this rank's queries, all positions) is computed."""
    queries = packing.held[to].positions()
    spans = sorted(span for each in of for span in packing.rows(to, each, window))
    keys = torch.cat([torch.arange(*span) for span in spans]) if spans else torch.zeros(0, dtype=torch.int64)
    counts = torch.zeros(len(queries), packing.length, dtype=torch.int64)
    for block in packing.blocks(to, of, window):
        if block.row not in (None, row):
            continue
        query, key = queries[slice(*block.queries)], keys[slice(*block.keys)]
        seen = torch.ones(len(query), len(key), dtype=torch.bool)
        if block.causal:
            assert torch.equal(query, key[-len(query) :])
            assert window is not None or len(query) == len(key)
            seen = key[None] <= query[:, None]
            if block.window is not None:
                seen &= key[None] > query[:, None] - block.window
        assert int(seen.sum()) == block.pairs
        at = torch.arange(*block.queries)
        counts[at[:, None], key[None]] += seen
    return counts


@settings(deadline=None)
@given(some_packings(), st.one_of(st.none(), st.integers(1, 9)))
def test_blocks_are_the_visible_pairs_each_once(packing: Packing, window: int | None) -> None:
    ranks = list(range(len(packing.held)))
    for row in range(len(packing.documents.spans) if packing.documents is not None else 1):
        seen = visible(packing, row, window)
        for rank in ranks:
            expected = seen[packing.held[rank].positions()].long()
            assert torch.equal(covered(packing, rank, ranks, row, window), expected)
            if window is None:  # steps with the rows of one rank each cover the same pairs
                steps = torch.stack([covered(packing, rank, [each], row, None) for each in ranks])
                assert torch.equal(steps.sum(0), expected)


def counted(blocks: list[Block], queries: Tensor, keys: Tensor, row: int, length: int) -> Tensor:
    """How often each pair of (these queries, all positions) is computed by blocks of some keys."""
    counts = torch.zeros(len(queries), length, dtype=torch.int64)
    for block in blocks:
        if block.row in (None, row):
            at, there = torch.arange(*block.queries), keys[slice(*block.keys)]
            seen = there[None] <= queries[at][:, None] if block.causal else torch.ones(len(at), len(there)).bool()
            counts[at[:, None], there[None]] += seen
    return counts


@settings(deadline=None)
@given(some_packings())
def test_own_blocks_and_those_of_other_ranks_are_the_visible_pairs_each_once(packing: Packing) -> None:
    ranks = range(len(packing.held))
    for row in range(len(packing.documents.spans) if packing.documents is not None else 1):
        seen = visible(packing, row, None)
        for rank in ranks:
            queries, others = packing.held[rank].positions(), [each for each in ranks if each != rank]
            own = counted(packing.own_blocks(rank), queries, queries, row, packing.length)
            for steps in ([[each] for each in others], [others]):
                total = own.clone()
                for of in steps:
                    spans = sorted(span for each in of for span in packing.rows(rank, each))
                    keys = torch.cat([torch.arange(0), *(torch.arange(*span) for span in spans)])
                    blocks = packing.full_blocks(rank, spans)
                    assert not any(block.causal for block in blocks)
                    taken = [(block.row, query) for block in blocks for query in range(*block.queries)]
                    assert len(set(taken)) == len(taken)
                    total += counted(blocks, queries, keys, row, packing.length)
                assert torch.equal(total, seen[queries].long())


def test_without_documents_two_ranks_compute_two_blocks_each() -> None:
    packing = Packing.of(16, 2)
    assert [packing.own_blocks(rank) for rank in range(2)] == [[Block(None, (0, 8), (0, 8), True)]] * 2
    assert packing.full_blocks(0, packing.rows(0, 1)) == [Block(None, (4, 8), (0, 8), False)]
    assert packing.full_blocks(1, packing.rows(1, 0)) == [Block(None, (0, 8), (0, 4), False)]


@settings(deadline=None)
@given(some_packings(), st.one_of(st.none(), st.integers(1, 9)))
def test_rows_that_move_are_those_that_a_query_sees(packing: Packing, window: int | None) -> None:
    batch = range(len(packing.documents.spans) if packing.documents is not None else 1)
    for to, queries in enumerate(packing.held):
        seen = torch.stack([visible(packing, row, window)[queries.positions()].any(0) for row in batch]).any(0)
        for of, keys in enumerate(packing.held):
            rows = [p for span in packing.rows(to, of, window) for p in range(*span)]
            assert rows == [p for p in keys.positions().tolist() if seen[p]]


@given(some_packings())
def test_each_position_is_held_once_and_all_ranks_hold_as_many(packing: Packing) -> None:
    assert sorted(p for each in packing.held for p in each.positions().tolist()) == list(range(packing.length))
    assert len({len(each) for each in packing.held}) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("lengths", [[16384], [8192, 100, 4000, 4092], [512] * 32, [1, 16383], [9000, 7384]])
def test_work_is_balanced_by_counted_pairs(lengths: list[int], ranks: int) -> None:
    packing = Packing.of(16384, ranks, Documents.of_ends(16384, [list(accumulate(lengths))]))
    assert sum(packing.pairs) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(packing.pairs) <= 1.01 * sum(packing.pairs) / ranks


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_work_of_many_documents_is_balanced(ranks: int) -> None:
    length = 64 * 3 * 2**9
    for seed in range(20):
        made = torch.Generator().manual_seed(seed)
        ends = torch.randint(1, length, (int(1.5**seed),), generator=made).unique().tolist()
        packing = Packing.of(length, ranks, Documents.of_ends(length, [ends]))
        assert max(packing.pairs) <= 1.01 * sum(packing.pairs) / ranks, seed


def test_without_documents_work_is_the_same_on_all_ranks() -> None:
    assert len(set(Packing.of(48, 4).pairs)) == 1


def test_a_picture_shows_who_holds_what() -> None:
    assert Packing.of(8, 2).drawn().splitlines() == [
        "positions 0      7",
        "rank 0    ##....##  50.0% of the pairs",
        "rank 1    ..####..  50.0% of the pairs",
    ]
    assert len(Packing.of(65536, 4).drawn().splitlines()[1]) < 100


def test_documents_end_with_their_token() -> None:
    documents = Documents.of_tokens(torch.tensor([[5, 0, 3, 3, 0], [0, 0, 1, 2, 3]]), end=0)
    assert documents.spans == (((0, 2), (2, 5)), ((0, 1), (1, 2), (2, 5)))
    assert documents.starts().tolist() == [[0, 0, 2, 2, 2], [0, 1, 2, 2, 2]]
    assert documents.positions().tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert Documents.of_tokens(torch.zeros(0, 4, dtype=torch.int64), 0).starts().shape == (0, 4)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="must cover 0 to 4 in order, none of them empty"):
        Documents(4, (((0, 2), (3, 4)),))
    with pytest.raises(ValueError, match="must cover"):
        Documents.of_ends(4, [[2, 2]])
    with pytest.raises(ValueError, match=r"expected tokens \(B, S\), got \(3,\)"):
        Documents.of_tokens(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="the documents have 4 positions, the sequences 8"):
        Packing.of(8, 2, Documents.of_ends(4, [[]]))
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        Packing.of(6, 2, Documents.of_ends(6, [[3]]))
    with pytest.raises(ValueError, match="pad the sequences to a multiple of 12"):
        Packing.of(8, 2, parts=3)
    assert Packing.of(8, 2, parts=4).held[0] == Chunks.zigzag(8, 0, 2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Packing.of(0), "must be positive, got 0, 1 and 1"),
        (lambda: Packing.of(8, 0), "must be positive, got 8, 0 and 1"),
        (lambda: Packing.of(8, 2, parts=0), "must be positive, got 8, 2 and 0"),
        (lambda: Packing(8, (Chunks.whole(8), Chunks.whole(8))), "must hold each of the 8 positions once"),
        (lambda: Packing(8, (Chunks(8, 2, (0,)), Chunks(8, 2, (1,)))), "must hold each of the 8 positions once"),
        (lambda: Packing(8, (Chunks.whole(4),)), "must hold each of the 8 positions once"),
        (lambda: Chunks.zigzag(8, 3, 1), "index from 0 to count - 1, got index=3 and count=1"),
        (lambda: Chunks.whole(8).part(-1, 4), "index from 0 to count - 1, got index=-1 and count=4"),
        (lambda: Chunks.zigzag(8, 0, 0), "got index=0 and count=0"),
        (lambda: Chunks.whole(8).of(torch.zeros(2, 9), 1), r"expected a tensor with all 8 positions .* got \(2, 9\)"),
        (lambda: Documents(8, [[(0, 8)]]), "expected a tuple of .* pairs of ints for each sequence"),  # type: ignore[arg-type]
        (lambda: Documents.of_tokens(torch.zeros(1, 4), 0.5), r"must be a token \(an int\), got 0.5"),  # type: ignore[arg-type]
        (lambda: Exchange(8, 0, 64, 1024, 2), "must be positive, got"),
    ],
)
def test_wrong_arithmetic_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()

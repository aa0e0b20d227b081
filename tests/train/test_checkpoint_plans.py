"""In any layout, exactly one rank that holds a part writes it. Ranks that hold the same parts share the writing
evenly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.kernels import Box
from rooftop.parallel import Piece, Shard
from rooftop.parallel.shards import padded_rows_of, rows_of
from rooftop.train.checkpoints import plans as checkpoint_plans
from rooftop.train.checkpoints.files import FilePiece
from rooftop.train.checkpoints.plans import Held, box_of, part_of, planned


def held_by(tp: int, dp: int, stages: int, shared: bool) -> list[list[Held]]:
    """The parts that the ranks of a layout hold of a model with all kinds of parameters; each stage has a layer, and
    the first and last stage a tied embedding."""
    ranks = []
    for stage in range(stages):
        for data in range(dp):
            for tensor in range(tp):
                local = {
                    f"{stage}.norm": (Shard((Piece(Box.whole((7,))),)), 7),
                    f"{stage}.down": (Shard((Piece(Box.shard((5, 16), 1, tensor, tp)),)), 5),
                    f"{stage}.qkv": (
                        Shard(
                            tuple(
                                rows_of("qkv", (24, 3), start, rows, blocks, tensor, tp)
                                for start, rows, blocks in ((0, 16, 8), (16, 4, 2), (20, 4, 2))
                            )
                        ),
                        None,
                    ),
                }
                if stage in (0, stages - 1):
                    local["embedding"] = (padded_rows_of((31, 3), tensor, tp), None)
                held = []
                for name, (shard, _) in local.items():
                    rows = sum(piece.box.size[0] for piece in shard.pieces) + shard.padding
                    each = -(-rows // dp)
                    start = min(data * each, rows)
                    here = shard.rows(start, min(each, rows - start)) if shared else shard
                    shape = shard.pieces[0].box.shape if shard.pieces else (0, 3)
                    held.append(Held.of(name, "F32", shape, here))
                held.append(Held.of(f"step.{stage}", "F32", (), None))
                ranks.append(held)
    return ranks


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_each_element_is_written_once_by_one_who_holds_it(tp: int, dp: int, stages: int, shared: bool) -> None:
    held = held_by(tp, dp, stages, shared)
    counts: dict[str, torch.Tensor] = {}
    for rank, pieces in enumerate(planned(held)):
        there = {each.name: each for each in held[rank]}
        for piece in pieces:
            assert any(is_in(piece, start, size) for start, size in there[piece.name].pieces)
            count = counts.setdefault(piece.name, torch.zeros(piece.shape))
            count[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))] += 1
    assert counts.keys() == {each.name for every in held for each in every}
    assert all(count.eq(1).all() for count in counts.values())


def is_in(piece: FilePiece, start: tuple[int, ...], size: tuple[int, ...]) -> bool:
    ranges = zip(start, size, piece.start, piece.size, strict=True)
    return all(first <= a and a + n <= first + count for first, count, a, n in ranges)


@given(st.integers(2, 8), st.lists(st.integers(1, 2000), min_size=1, max_size=30))
def test_what_all_hold_is_shared_evenly(ranks: int, rows: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_plans, "BLOCK_BYTES", 1)
        held = [Held.of(str(number), "F32", (count, 2), None) for number, count in enumerate(rows)]
        loads = [sum(piece.bytes for piece in pieces) for pieces in planned([held] * ranks)]
    total = 8 * sum(rows)
    assert sum(loads) == total
    assert max(loads) <= total / ranks * (1 + 1 / checkpoint_plans.EVEN) + 8


def test_a_part_is_found_in_what_is_held() -> None:
    """Gate and up of a gated MLP are stored one after the other: rows of up come after those of gate."""
    whole = torch.arange(32.0).view(16, 2)
    shard = Shard(tuple(rows_of("gated", (16, 2), start, 8, 8, 1, 2) for start in (0, 8)))
    held, local = Held.of("gated", "F32", (16, 2), shard), shard.of(whole)
    for pieces in planned([[held], [Held.of("gated", "F32", (16, 2), _other(shard))]])[:1]:
        assert [piece.start for piece in pieces] == [(4, 0), (12, 0)]
        for piece in pieces:
            torch.testing.assert_close(part_of(piece, local, held), box_of(piece).of(whole), rtol=0, atol=0)


def _other(shard: Shard) -> Shard:
    return Shard(tuple(Piece(Box(p.box.shape, (p.box.start[0] - 4, 0), p.box.size)) for p in shard.pieces))


def test_what_nobody_holds_or_ranks_disagree_on_is_an_error() -> None:
    half = Shard((Piece(Box((8, 2), (0, 0), (4, 2))),))
    with pytest.raises(ValueError, match="the ranks together hold 8 elements of up, but it has 16"):
        planned([[Held.of("up", "F32", (8, 2), half)]])
    with pytest.raises(ValueError, match=r"up is .* on one rank, .* on another"):
        planned([[Held.of("up", "F32", (8, 2), None)], [Held.of("up", "F64", (8, 2), None)]])
    apart = Shard((Piece(Box((8, 2), (0, 0), (4, 2), (2, 1))),))
    with pytest.raises(ValueError, match="up: a checkpoint stores shards of contiguous rows and columns"):
        Held.of("up", "F32", (8, 2), apart)

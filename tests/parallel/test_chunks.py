"""Chunks of a sequence: the ranks together hold each position once, and the parts of a mask are those of the whole
mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.kernels import Box
from rooftop.parallel import CounterDropouts
from rooftop.parallel.chunks import Chunks
from rooftop.parallel.dropouts import Place


@st.composite
def some_chunks(draw: st.DrawFn) -> Chunks:
    size, count = draw(st.integers(1, 6)), draw(st.integers(0, 9))
    places = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=count)) if count else set()
    return Chunks(size * count, size, tuple(sorted(places)))


@given(some_chunks(), st.integers(1, 4))
def test_parts_follow_each_other(chunks: Chunks, count: int) -> None:
    positions = chunks.positions().tolist()
    assert len(positions) == len(chunks)
    assert positions == sorted(set(positions))
    if len(chunks) % count:
        with pytest.raises(ValueError, match="cannot be split among"):
            chunks.part(0, count)
        return
    parts = [chunks.part(index, count).positions().tolist() for index in range(count)]
    assert [position for part in parts for position in part] == positions
    assert len({len(part) for part in parts}) == 1


@given(some_chunks())
def test_boxes_and_views_hold_the_positions(chunks: Chunks) -> None:
    whole = torch.arange(3 * chunks.length * 2).view(3, chunks.length, 2)
    expected = whole[:, chunks.positions()]
    assert torch.equal(chunks.of(whole, 1), expected)
    boxes = chunks.boxes(Box.whole(whole.shape).cut(0, 1, 3), 1)
    held = [box.of(whole).flatten(1, 2) for box in boxes] or [whole[1:2, :0]]
    assert torch.equal(torch.cat(held, 1), expected[1:2])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_zigzag_sees_equally_many_pairs_and_is_one_box(count: int) -> None:
    held = [Chunks.zigzag(48, index, count) for index in range(count)]
    assert sorted(p for chunks in held for p in chunks.positions().tolist()) == list(range(48))
    assert len({int((chunks.positions() + 1).sum()) for chunks in held}) == 1
    assert [len(chunks.boxes(Box.whole((2, 48)), 1)) for chunks in held] == [1] * count


def test_wrong_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="got a size of 3, expected a divisor of the length 8"):
        Chunks(8, 3, (0,))
    for places in [(1, 0), (0, 0), (4,), (-1,)]:
        with pytest.raises(ValueError, match="expected increasing places from 0 to 3"):
            Chunks(8, 2, places)
    with pytest.raises(ValueError, match="must be a multiple of 4, two chunks for each rank; pad"):
        Chunks.zigzag(6, 0, 2)


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("name", ["layers.0.mlp.dropout", "layers.1.attention.weights_dropout"])
def test_masks_of_chunks_are_parts_of_the_whole(name: str, splits: int) -> None:
    of_weights = name.endswith("weights_dropout")
    x = torch.randn((2, 6, 24, 24) if of_weights else (2, 24, 5), generator=torch.Generator().manual_seed(0))
    whole = CounterDropouts(seed=5)
    whole.step = 3
    expected = whole(0.4, name)(x)
    for chunks in [Chunks.zigzag(24, 0, 2), Chunks.zigzag(24, 1, 2), Chunks(24, 2, (0, 1, 4, 6, 9, 11))]:
        for split in range(splits):
            part = (split, splits)
            here = CounterDropouts(5, split=(0, 1) if of_weights else part, heads=part if of_weights else (0, 1))
            with here.at(Place(3, (0, 1), chunks)):
                if of_weights:
                    held, wanted = (chunks.of(each.chunk(splits, 1)[split], 2) for each in (x, expected))
                else:
                    held, wanted = (chunks.part(*part).of(each, 1) for each in (x, expected))
                assert torch.equal(here(0.4, name)(held), wanted)

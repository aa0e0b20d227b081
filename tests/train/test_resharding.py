"""The parts of one layout's ranks are put together exactly from the parts of another layout's ranks, and only if all of
them exist."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftop.kernels import Box
from rooftop.parallel import Piece, Shard
from rooftop.parallel.shards import padded_rows_of, rows_of
from rooftop.train.checkpoints.resharding import put_together, shards_from

RANKS = st.sampled_from([1, 2, 4, 8])
Held = tuple[Shard | None, Tensor]


def shard(kind: str, index: int, count: int) -> Shard | None:
    """A rank's part of a parameter of one of the kinds that layers have; None: the whole."""
    if count == 1 or kind == "whole":
        return None
    match kind:
        case "vocabulary":
            return padded_rows_of((11, 3), index, count)
        case "heads":  # heads of queries, and two of keys and values, which several ranks may share
            of = [(0, 16, 8), (16, 4, 2), (20, 4, 2)]
            return Shard(tuple(rows_of("heads", (24, 3), start, rows, n, index, count) for start, rows, n in of))
        case "gated":
            return Shard(tuple(rows_of("gated", (32, 3), start, 16, 16, index, count) for start in (0, 16)))
        case "biases":
            return Shard(tuple(rows_of("biases", (32,), start, 16, 16, index, count) for start in (0, 16)))
        case _:
            return Shard((Piece(Box.shard((3, 16), 1, index, count)),))


WHOLE = {
    "whole": (5, 3),
    "vocabulary": (11, 3),
    "heads": (24, 3),
    "gated": (32, 3),
    "biases": (32,),
    "columns": (3, 16),
}


def records(shards: dict[str, Shard]) -> dict[str, object]:
    """Records of format 1: for each piece the whole shape, start, size and whether it is the first; then padding."""
    return {
        name: ([(p.box.shape, p.box.start, p.box.size, p.first) for p in shard.pieces], shard.padding)
        for name, shard in shards.items()
    }


def held(kind: str, count: int) -> list[Held]:
    """Each rank's part of the numbers 1, 2, 3 and so on, read from its file."""
    whole = 1 + torch.arange(torch.Size(WHOLE[kind]).numel(), dtype=torch.float64).view(WHOLE[kind])
    shards = [shard(kind, index, count) for index in range(count)]
    parts = [each.of(whole) if each else whole for each in shards]
    found = [shards_from(records({"it": each}))["it"] if each else None for each in shards]
    return list(zip(found, parts, strict=True))


@given(st.sampled_from(list(WHOLE)), RANKS, RANKS)
def test_any_layout_from_any(kind: str, before: int, after: int) -> None:
    expected = held(kind, after)
    for index, (_, tensor) in enumerate(expected):
        found = put_together(shard(kind, index, after), tensor.shape, held(kind, before))
        torch.testing.assert_close(found, tensor, rtol=0, atol=0)


@given(st.sampled_from([kind for kind in WHOLE if kind != "whole"]), st.sampled_from([2, 4]))
def test_a_part_that_is_not_there_is_missed(kind: str, count: int) -> None:
    some = held(kind, count)[:-1]
    with pytest.raises(ValueError, match=r"the parts have \d+ of \d+ elements"):
        put_together(None, WHOLE[kind], some)


def test_parts_of_another_whole_and_records_of_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"whole tensors of different shapes, \(33, 3\) and \(32, 3\)"):
        put_together(None, (33, 3), held("gated", 2))
    (first, tensor), second = held("gated", 2)
    for wrong in (tensor[:-1], tensor[:, :2], tensor[0, 0]):
        with pytest.raises(ValueError, match="does not fit the pieces"):
            put_together(None, (32, 3), [(first, wrong), second])


def test_padding_is_zero_whatever_it_was() -> None:
    parts = held("vocabulary", 2)
    parts[1][1][-1] = torch.nan  # the second rank has five rows and one of padding
    for index in range(4):
        found = put_together(shard("vocabulary", index, 4), (3, 3), parts)
        assert found.isfinite().all()
    assert found[-1].eq(0).all()

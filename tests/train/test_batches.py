"""Batches contain each sequence once in each pass, in an order that depends only on seed, step and place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from rooftop.errors import InputError
from rooftop.train import Batches, Tokens
from rooftop.train.tokens.batches import shuffled

TOKENS = Tokens([np.arange(41)], "numbers")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 100, 1000])
def test_shuffling_permutes(count: int) -> None:
    assert sorted(shuffled(place, count, "key") for place in range(count)) == list(range(count))


def test_shuffling_looks_random() -> None:
    """Orders of two keys agree at about one place, and neighbours do not stay neighbours."""
    one, two = ([shuffled(place, 1000, key) for place in range(1000)] for key in ("1", "2"))
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 10
    assert sum(abs(a - b) == 1 for a, b in pairwise(one)) < 10
    assert abs(np.corrcoef(range(1000), one)[0, 1]) < 0.15


def test_a_pass_has_each_sequence_once_and_the_next_another_order() -> None:
    batches = Batches(TOKENS, length=4, batch=5, seed=1)  # 10 sequences: two steps a pass
    assert batches.sequences == 10
    passes = [torch.cat([batches.read(step, range(5)) for step in pair]) for pair in ((0, 1), (2, 3))]
    for found in passes:
        assert sorted(found[:, 0].tolist()) == list(range(0, 40, 4))
        assert torch.equal(found, found[:, :1] + torch.arange(5))  # the last number is the first of the next sequence
    assert not torch.equal(*passes)
    assert not torch.equal(passes[0], torch.cat([Batches(TOKENS, 4, 5, seed=2).read(s, range(5)) for s in (0, 1)]))


def test_parts_of_a_batch_are_those_of_the_whole() -> None:
    batches = Batches(TOKENS, length=3, batch=8, seed=1)
    whole = batches.read(6, range(8))
    assert torch.equal(whole, torch.cat([batches.read(6, [place]) for place in range(8)]))
    assert torch.equal(whole[2:4], Batches(TOKENS, 3, 8, 1).read(6, range(2, 4)))


def test_too_few_tokens_are_refused() -> None:
    assert Batches(TOKENS, 40, 1, 0).sequences == 1
    with pytest.raises(InputError, match="numbers has 41 tokens, but a sequence of 41 needs 42"):
        Batches(TOKENS, 41, 1, 0)

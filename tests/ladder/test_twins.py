"""The Triton twins, through Triton's interpreter: each gives the correct result, and digits are learned as in
PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rooftop.ladder import LADDERS, build, climb, digits
from rooftop.ladder.layer import TritonOperations
from rooftop.ladder.rungs import TRITON
from rooftop.launch import count_launches
from rooftop.launch.triton_launch import INTERPRETED

SIZES = {"vector": 5001, "reduction": 5001, "matmul": 136, "layer": 70, "indexing": 40}
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_the_twins")


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_the_twins(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) == 6


@in_the_interpreter
@pytest.mark.parametrize("name", list(LADDERS))
def test_every_twin_gives_the_right_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.ladder.indexing.SLAB", 32)
    ladder = replace(build(name, SIZES[name], "cpu"), remarks=lambda ceilings: ())
    twins = [rung for rung in ladder.rungs if rung.tool == TRITON and rung.run is not None]
    with count_launches() as launches:
        outcomes = climb(replace(ladder, rungs=tuple(twins))).rungs
    assert len(twins) >= 2
    assert {rung.status for rung in outcomes} == {"checked"}, outcomes
    assert sum(launches.values()) >= len(twins)


@in_the_interpreter
def test_digits_are_learned_as_in_pytorch() -> None:
    pytest.importorskip("sklearn")
    x, target = digits.images(torch.device("cpu"))
    learned = [digits.train(operations, x[:704], target[:704], epochs=1) for operations in (TritonOperations(), None)]
    ours, theirs = (digits.accuracy(p, x[digits.TRAINING :], target[digits.TRAINING :]) for p in learned)
    assert ours == pytest.approx(theirs, abs=0.01)
    assert ours > 2 * digits.accuracy(digits.initial(x.device), x, target)
    torch.testing.assert_close(learned[0].w1, learned[1].w1, rtol=1e-3, atol=1e-4)

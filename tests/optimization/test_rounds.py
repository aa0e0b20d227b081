"""Rounds decide whether a gain exceeds the noise, also if the noise is as large as the gain."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from rooftop.hardware.timing import Timing
from rooftop.optimization.outcomes import Step
from rooftop.optimization.rounds import MOST_IF_LARGE, MOST_ROUNDS, Gain, Rounds
from rooftop.rewrites import Candidate


class Simulated(Rounds):
    """Rounds in which the tried candidate saves the given shares of a step of 10 ms."""

    def __init__(self, shares: Iterable[float]) -> None:
        super().__init__(Step(False, None), ((), {}), nn.Identity(), min_gain=0.02, step_s=0.01)
        self.shares, self.count = iter(shares), 0

    def timed(self, candidates: dict[str, Candidate]) -> dict[str, Timing]:
        self.count += 1
        times = {"best": 10.0, "tried": 10.0 * (1 - next(self.shares))}
        return {name: Timing(ms, ms, 0.0, 5) for name, ms in times.items()}


def gain_of(rounds: Rounds, late: bool = False) -> Gain:
    candidate = Candidate.of(nn.Identity(), None, False, [torch.ones(1)])
    return rounds.gain(candidate, candidate, rounds.min_gain, lambda: late)


@pytest.mark.parametrize(
    ("shares", "sure", "count"),
    [
        pytest.param([0.1, 0.11, 0.1], True, 3, id="clear gain"),
        pytest.param([-0.1, 0.01, -0.02], False, 3, id="no gain"),
        pytest.param([-0.01, 0.05, 0.06, 0.05] * 6, True, 23, id="gain in three of four rounds"),
        pytest.param([0.06, -0.02, 0.01] * 8, False, MOST_ROUNDS, id="small gain in noise"),
        pytest.param([0.06, 0.04, -0.02] * 8, False, MOST_IF_LARGE, id="gain in two of three rounds"),
    ],
)
def test_rounds_go_on_until_the_gain_is_decided(shares: list[float], sure: bool, count: int) -> None:
    rounds = Simulated(shares)
    assert gain_of(rounds).sure == sure
    assert rounds.count == count


def test_no_more_rounds_once_the_time_is_up() -> None:
    rounds = Simulated(itertools.cycle([0.05, -0.01]))
    assert not gain_of(rounds, late=True).sure
    assert rounds.count == 3


@pytest.mark.parametrize(("predicted", "least"), [(0.1, 0.01), (0.001, 0.01), (0.0, 0.02), (-0.1, 0.02)])
def test_half_of_the_gain_is_enough_if_a_gain_was_predicted(predicted: float, least: float) -> None:
    assert Simulated([]).least_share(predicted) == least

"""Time two candidates in rounds, until it is clear whether one of them is faster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from rooftop.hardware.timing import SURE_ROUNDS, Timing, is_sure
from rooftop.optimization.draws import Arguments
from rooftop.optimization.outcomes import Step
from rooftop.optimization.timing import compare_steps
from rooftop.rewrites import Candidate

MOST_ROUNDS = 12
"""Largest number of rounds that compare two candidates, if the first rounds do not decide."""
MOST_IF_LARGE = 24
"""Largest number of rounds if a gain is large enough, but not sure. On a CPU where rounds varied by 4%, 12 rounds found
78% of gains of 4%, and 24 rounds found 92% (simulated)."""
ROUND_S = 0.15
"""Seconds for each of the two candidates in a round. A slow model takes longer, since it runs at least one step."""

Late = Callable[[], bool]
"""Returns whether the time is up. If it is, no rounds are added after the first `SURE_ROUNDS`."""


@dataclass(frozen=True)
class Gain:
    """The gain of a candidate over the best candidate so far.

    Attributes:
        share: the time saved per step, as a share of a step of the best candidate.
        sure: whether the gain surely exceeds the required gain.
        best_ms: time of a step of the best candidate in the same rounds.
    """

    share: float
    sure: bool
    best_ms: float


class Rounds:
    """Times steps of candidates in turns.

    Args:
        step: how the model is run.
        given: arguments of the timed calls.
        original: the user's model; its tensors are restored after each round.
        min_gain: smallest gain that keeps a rule, as a share of a step.

    Attributes:
        step_s: approximate seconds of a step.
    """

    def __init__(self, step: Step, given: Arguments, original: nn.Module, min_gain: float, step_s: float) -> None:
        self.step, self.given, self.original, self.min_gain, self.step_s = step, given, original, min_gain, step_s

    def timed(self, candidates: dict[str, Candidate]) -> dict[str, Timing]:
        """Time all candidates in turns for one round. Each candidate must have run before."""
        return compare_steps(candidates, self.step, self.given, self.original, ROUND_S, self.step_s)

    def least_share(self, predicted_share: float) -> float:
        """The smallest gain, as a fraction of the step's time, for which the search keeps a rule. The result is half of
        `min_gain` if any gain is predicted. So a rule with a gain close to `min_gain` is kept in each search, not only
        in some searches.
        """
        return self.min_gain / 2 if predicted_share > 0 else self.min_gain

    def gain(self, best: Candidate, candidate: Candidate, least: float, late: Late) -> Gain:
        """Time a candidate and the best one so far in turns, until it is clear whether the gain exceeds `least`."""
        shares: list[float] = []
        best_ms: list[float] = []
        while True:
            times = self.timed({"best": best, "tried": candidate})
            shares.append(_saved(times["best"], times["tried"]))
            best_ms.append(times["best"].median_ms)
            share = statistics.median(shares)
            pays = share > least and is_sure(shares)
            over = late() or len(shares) >= (MOST_IF_LARGE if share > least else MOST_ROUNDS)
            unlikely = len(shares) >= (SURE_ROUNDS if least == self.min_gain else 2 * SURE_ROUNDS)
            if len(shares) >= SURE_ROUNDS and (pays or over or (unlikely and _falls_short(shares, least))):
                return Gain(share, pays, statistics.median(best_ms))

    def last(self, candidates: dict[str, Candidate], late: Late) -> tuple[float, dict[str, list[float]]]:
        """Time the candidates in `SURE_ROUNDS` rounds. If these do not show that "after" is faster than "before", add
        rounds until they do, at most up to `MOST_ROUNDS`.

        Args:
            late: returns whether the time is up. If it is, no rounds are added, even if the gains are uncertain.

        Returns:
            (ms of a step of "before", each candidate's gain over "before" in each round, as a share of a step)
        """
        times: list[dict[str, Timing]] = []
        while True:
            times.append(self.timed(candidates))
            gains = {name: [_saved(each["before"], each[name]) for each in times] for name in candidates}
            over = late() or len(times) >= MOST_ROUNDS
            if len(times) >= SURE_ROUNDS and (is_sure(gains["after"]) or over):
                return statistics.median(each["before"].median_ms for each in times), gains


def _saved(before: Timing, after: Timing) -> float:
    return 1 - after.median_ms / before.median_ms


def _falls_short(shares: Sequence[float], least: float) -> bool:
    """Whether at least three quarters of the rounds measured a gain below `least`. If not, timing continues. `shares`
    are the gains, as fractions of the best candidate's time.
    """
    return statistics.quantiles(shares, n=4, method="inclusive")[2] < least

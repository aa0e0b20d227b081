"""The order in which a search tries rules, and the time limit of each rule.

Rules that save memory come first, since they are kept although they make a step slower. Rules that apply at once,
without compiling, come next, by their predicted gain. Rules that compile follow, by their gain per second until the
first call is done. Rules that apply at once but are predicted to make a step slower come last. The whole model is
compiled while there is still time for it, so that a model is not left slower than with torch.compile. If one more trial
of a rule that applies at once would use up this time, the whole model is compiled first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rooftop.rewrites import Rule, Times

WHOLE, BLOCKS = "compile", "compile-blocks"
"""Names of the rules that compile the whole model, as users would, and its repeated blocks."""
LEAST_PACE, MOST_PACE = 0.25, 4.0
"""Bounds of the ratio of measured to estimated compile times."""
WHOLE_FIRST = 2.0
"""The whole model is compiled before its blocks if its estimated compile time is at most this multiple of the blocks'
time."""
LIMIT_OF_BLOCKS = 3.0
"""If blocks are compiled first, their time limit is the longer of two times: this multiple of their estimated time, and
the time that compiling the whole model does not need.
"""
LEFT_AT_ONCE = 0.25
"""If the whole model is compiled first of all, it leaves this share of the time for the rules that apply at once."""
LATE = 0.6
"""The whole model is compiled first of all if that takes more than this share of the time that is left."""
AGAIN = 0.4
"""Estimated time of compiling a model again with another rule, relative to the first time: the compiler has a cache."""

UNSURE_ON_CPU = 0.08
"""Times vary on a CPU. So a rule is tried last there only if it is predicted to lose more than this share of a step."""


class TrialOrder:
    """The rules that wait for a trial.

    Args:
        rules: all rules to try.
        forecasts: (seconds until the first call is done, gain in ms) of each rule, by its name.
        times: times of the original's step.
        loss_ms: a rule that applies at once comes last if it is predicted to make a step slower by more ms than this.
        left_s: seconds that are left for the search.
        ready: whether a rule can be tried now. Rules that apply at once but are not ready come after rules that are
            ready.
        gain: the predicted gain in ms of a rule together with the rules that are kept by now; None: the forecast.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        forecasts: Mapping[str, tuple[float, float]],
        times: Times,
        loss_ms: float,
        left_s: float,
        ready: Callable[[Rule], bool] = lambda rule: True,
        gain: Callable[[Rule], float] | None = None,
    ) -> None:
        self._ready = ready
        self._gain = gain or (lambda rule: forecasts[rule.name][1])
        self._trial_s = 0.0  # seconds of the last trial of a rule that applies at once; 0 before the first
        self._last_chance = False  # whether the rule that was taken last had its last chance
        self._forecasts, self._loss_ms, self._pace = forecasts, loss_ms, 1.0
        self.waiting = sorted(rules, key=self._urgency)
        self._first = self._too_late(times, left_s)

    def peek(self, times: Times, left_s: float) -> Rule:
        """The rule to try next, without removing it from the waiting rules."""
        return self._first or self._soon_too_late(times, left_s) or self._next(times, left_s)

    def take(self, times: Times, left_s: float) -> Rule:
        """Remove the rule to try next from the waiting rules, and return it."""
        rule, self._first = self.peek(times, left_s), None
        self._last_chance = rule is self._soon_too_late(times, left_s)
        self.waiting.remove(rule)
        return rule

    def note_trial(self, rule: Rule, seconds: float) -> None:
        """Note the seconds of a rule's trial, with its timing and its proof."""
        if self._forecasts[rule.name][0] <= 0:
            self._trial_s = seconds

    def seconds(self, rule: Rule, times: Times) -> float:
        """The estimated seconds until a rule's first call is done: the rule's own estimate, scaled by the ratio of the
        last compilation's duration to the estimate for that compilation.
        """
        return self._pace * self._estimate(rule, times)

    def _estimate(self, rule: Rule, times: Times) -> float:
        try:
            return float(rule.seconds(times))
        except Exception:  # a user's rule may raise here, although its forecast did not
            return self._forecasts[rule.name][0]

    def note(self, rule: Rule, times: Times, seconds: float) -> None:
        """Compare the seconds that a rule's first call took with the rule's estimate. Later estimates are scaled by
        this ratio.
        """
        if (estimate := self._estimate(rule, times)) > 0:
            self._pace = min(MOST_PACE, max(LEAST_PACE, seconds / estimate))

    def limit(self, rule: Rule, times: Times, left_s: float) -> tuple[float, str]:
        """(the seconds that the first call of a rule may take, the rule or rules for which the remaining time is
        reserved).

        A rule may take all the time that is left, with two exceptions. Compiling blocks leaves time to compile the
        whole model, if there is enough. If the whole model is compiled first of all, part of the time is reserved for
        the rules that apply at once, because compiling may take longer than estimated. Nothing is reserved if this is
        the last time at which the whole model can be compiled.
        """
        whole, seconds = self._waiting_for(WHOLE), self.seconds(rule, times)
        if rule.name == BLOCKS and whole is not None and (needed := self.seconds(whole, times)) < left_s:
            return min(left_s, max(LIMIT_OF_BLOCKS * seconds, left_s - needed)), WHOLE
        forecasts = [self._forecasts[each.name] for each in self.waiting]
        others = any(seconds <= 0 < gain_ms for seconds, gain_ms in forecasts)
        if rule.name == WHOLE and others and not self._last_chance:
            return (1 - LEFT_AT_ONCE) * left_s, "the other rules"
        return left_s, ""

    def _urgency(self, rule: Rule) -> tuple[bool, bool, bool, float]:
        """The sort key of a rule: (saves no memory, is predicted to lose, compiles, negative gain).

        The gain of a rule that compiles is divided by the seconds until its first call is done.
        """
        seconds, gain_ms = self._forecasts[rule.name]
        at_once = seconds <= 0
        loses = at_once and gain_ms < -self._loss_ms
        return not rule.saves_memory, loses, not at_once, -gain_ms / (1.0 if at_once else seconds)

    def _first_ready(self) -> Rule:
        at_once = [rule for rule in self.waiting if not any(self._urgency(rule)[1:3])]
        if self.waiting[0].saves_memory or self.waiting[0] not in at_once:
            return self.waiting[0]
        return next((rule for rule in at_once if self._ready(rule)), self.waiting[0])

    def _waiting_for(self, name: str) -> Rule | None:
        return next((rule for rule in self.waiting if rule.name == name), None)

    def _too_late(self, times: Times, left_s: float) -> Rule | None:
        """The rule that compiles the whole model, if it has the largest predicted gain, and if there would be no time
        for it after the other rules."""
        whole = self._waiting_for(WHOLE)
        if whole is None or not LATE * left_s < self.seconds(whole, times) <= (1 - LEFT_AT_ONCE) * left_s:
            return None
        others = [self._forecasts[rule.name][1] for rule in self.waiting if rule.kind != whole.kind]
        return whole if self._forecasts[WHOLE][1] >= max(others, default=0.0) else None

    def _soon_too_late(self, times: Times, left_s: float) -> Rule | None:
        """The rule that compiles the whole model, if there would be no time for it after one more trial of a rule that
        applies at once, and if it is predicted to save more than all waiting rules of this kind together."""
        whole = self._waiting_for(WHOLE)
        if whole is None or not 0.0 <= left_s - self.seconds(whole, times) < self._trial_s:
            return None
        others = [max(0.0, self._gain(rule)) for rule in self.waiting if self._forecasts[rule.name][0] <= 0]
        return whole if self._gain(whole) > sum(others) else None

    def _next(self, times: Times, left_s: float) -> Rule:
        """The rule to try next: the first waiting rule. But if this rule compiles the whole model or its blocks, the
        time left decides whether the whole model or the blocks are compiled next.
        """
        first, whole, blocks = self._first_ready(), self._waiting_for(WHOLE), self._waiting_for(BLOCKS)
        if whole is None or blocks is None or first not in (whole, blocks):
            return first
        fits = self.seconds(whole, times) <= min(left_s, WHOLE_FIRST * self.seconds(blocks, times))
        return whole if fits else blocks

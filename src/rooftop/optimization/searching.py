"""The search tries rules, in the order of `trial_order.py`.

Each rule is tried together with the kept rules, and timed against the kept rules alone. A rule that saves time is then
proven, and kept if it is correct.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from rooftop.launch import repeated_calls
from rooftop.optimization.accuracy import RefusedError
from rooftop.optimization.building import Builder, ordered
from rooftop.optimization.deadlines import Deadline, StoppedError
from rooftop.optimization.draws import Draw
from rooftop.optimization.optimized import Change
from rooftop.optimization.profiles import HOW_IT_RUNS, Profiles, allocated, or_earlier_times
from rooftop.optimization.rounds import Rounds
from rooftop.optimization.trial_order import AGAIN, BLOCKS, UNSURE_ON_CPU, WHOLE, TrialOrder
from rooftop.rewrites import Candidate, Rule, Times
from rooftop.rewrites.candidates import NOTHING
from rooftop.words import in_a_line

Progress = Callable[[str, float], None]
STEPS, PROOF_STEPS, LAST_STEPS = 10, 30, 16
"""Approximate numbers of steps that a slow model runs: to time a rule, to prove the first rule that saves time
(including steps in float64), and to time the result at the end.
"""
LAST_S, LAST_SHARE = 3.0, 0.05
"""The end of a search needs `LAST_S` seconds in addition to these steps, but at most `LAST_SHARE` of the budget. On an
H200, building, timing and checking the result took 3 to 4 s."""
NOT_TRIED = "{seconds:.0f} s of the budget were left, but about {needed:.0f} s are needed"
BUDGET_OVER = "the budget was used up: give a larger one"
STOPPED = "its first call was stopped after {seconds:.1f} s, because the budget was used up: give a larger one"
LEFT = "its first call was stopped after {seconds:.1f} s, to leave time for {other}: give a larger budget"
HOPELESS = 0.2
"""If compiling with one set of kept rules makes a step slower by this share, other sets are not tried, because each
compilation takes long."""
WORTH_A_TRY = 0.5
"""A rule is tried if at least this share of its estimated time is left. The estimate may be too long, and a deadline
stops the trial."""
KNOWN_FIRST = 2.0
"""Before compiling without some of the kept rules, the search profiles a step without these rules, if at least this
multiple of the estimated compile time is left."""
WAIT_SHARE = 0.4
"""A search waits for the C++ launcher of our kernels for at most this share of the time left."""
GRACE_S = 2.0
"""If a kept rule turns out to be wrong at the end, the first call without this rule may exceed the budget by these
seconds."""
LEAST_SAVED = 0.1
"""A rule that saves memory is kept if it saves at least this share of a step's memory."""


@dataclass(frozen=True)
class Result:
    """The best candidate, and the times in ms of a step of the original (before) and of this candidate (after).

    Attributes:
        noise: the spread of the gain, as a share of a step.
        without_ms: time of a step without the kept rules that compile or capture graphs. None unless both such rules
            and other rules are kept.
    """

    candidate: Candidate
    before_ms: float
    after_ms: float
    noise: float
    without_ms: float | None = None


class Search:
    """Find the rules that make a model faster.

    Args:
        builder: builds and proves candidates of the model.
        min_gain: smallest gain that keeps a rule, as a share of a step.
        ends: the time limit, by `time.perf_counter`.
        progress: called with (the current activity, fraction done).
        wrap: wraps a candidate as users will call it, with all checks.

    Attributes:
        kept: rules that save time or memory, in the order of `RULES`.
        changes: the outcome of each rule, in the order of trials.
    """

    def __init__(
        self,
        builder: Builder,
        min_gain: float,
        ends: float,
        progress: Progress,
        wrap: Callable[[Candidate], Callable[..., object]],
    ) -> None:
        self._builder, self.min_gain, self.progress, self.wrap = builder, min_gain, progress, wrap
        self.kept: list[Rule] = []
        self.changes: list[Change] = []
        self.planned = False
        self.best = builder.plain
        self._rounds = Rounds(builder.step, builder.given, builder.original, min_gain, builder.step_s)
        self._limit = ends
        at_the_end_s = min(LAST_S, LAST_SHARE * (ends - time.perf_counter()))
        self.ends = ends - LAST_STEPS * self._rounds.step_s - at_the_end_s
        self._profiles = Profiles(builder.step, builder.given, builder.original, builder.plain)
        self._order = TrialOrder([], {}, Times(0.0, ()), 0.0, 0.0)
        self._trial_s: dict[str, float] = {}  # seconds of the last trial of each rule, without the profile before it
        self._profile_s = 0.0  # total seconds of the profiles that `_know` makes, each before a trial
        self._waited = False  # whether the search has waited for the C++ launcher
        self._share = 0.0  # the gain in the last trial, as a share of a step
        self._left = 1.0  # the best candidate's time, as a share of the original's
        self._began_ms = 0.0  # time of a step of the original when the search began; all changes are in such times
        self._unknown: set[frozenset[str]] = set()  # names of the rules of each candidate that `_know` has tried
        self._compile_s = 0.0  # seconds of the best candidate's first call, if one of its rules compiles

    def run(self, rules: Sequence[Rule], all_at_once: bool = False) -> None:
        """Try rules, beginning with the largest predicted gain.

        Args:
            all_at_once: for a plan: apply all rules, and prove and time them together.
        """
        self.planned = all_at_once
        with self._told_if_interrupted():
            if all_at_once:
                self._apply_all(rules)
            else:
                self._search(rules)

    @contextmanager
    def _told_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            print("rooftop.optimize was interrupted. Results until then:", *map(str, self.changes), sep="\n")
            self.progress("interrupted", 1.0)
            raise

    def _search(self, rules: Sequence[Rule]) -> None:
        possible = [rule for rule in rules if self._fits(rule)]
        if self._builder.plain.device.type == "cuda" and any(rule.opaque for rule in possible):
            repeated_calls.ask()
        wall = self._rounds.timed({"": self._builder.plain})[""].median_ms
        self._rounds.step_s = wall / 1e3
        self._began_ms = wall
        times = self._profiles.begin(self._builder.plain, wall)
        possible = [rule for rule in possible if self._has_work(rule, times)]
        forecasts = {rule.name: of for rule in possible if (of := self._forecast(rule, times)) is not None}
        known = [rule for rule in possible if rule.name in forecasts]
        unsure = self.min_gain if self._builder.plain.device.type == "cuda" else max(self.min_gain, UNSURE_ON_CPU)
        self._order = TrialOrder(known, forecasts, times, unsure * wall, self._left_s(), self._ready, self._gain_ms)
        order: list[Rule] = []
        while self._order.waiting:
            following = self._order.peek(self._profiles.now, self._left_s())
            if following.kind == "compile" and not any(each.kind == "compile" for each in order):
                needed_s = self._needed_s(following, compiled=False)
                self._try_again(order, forecasts, promising=True, until=self.ends - needed_s)
            rule = self._order.take(self._profiles.now, self._left_s())
            done = 0.1 + 0.8 * len(order) / len(known)
            if not self._ready(rule) and self._changes_something(rule):
                self.progress("waiting for the C++ compiler", done)
                repeated_calls.wait(WAIT_SHARE * self._left_s())
                self._waited = True
            self.progress(rule.name, done)
            order.append(rule)
            change = self._tried(rule, forecasts[rule.name][1])
            self.changes.append(change)  # `_tried` may have replaced the list `self.changes`
            if change.measured_ms is not None:
                self._order.note_trial(rule, self._trial_s[rule.name])
        self._try_again(order, forecasts, promising=False, until=self.ends)

    def _try_again(
        self, tried: Sequence[Rule], forecasts: Mapping[str, tuple[float, float]], promising: bool, until: float
    ) -> None:
        """Retry each rule that had no gain, now together with the rules that were kept after its first trial. For
        example, fused kernels do not help while the host is slower than the GPU, but they do after graphs were kept.

        Args:
            promising: whether to retry only the rules that are now predicted to save time. True before the first trial
                of a compiler: retries are then still cheap. Once a compiler is kept, each retry compiles the model.
            until: when the last retry must have ended, by `time.perf_counter`. A retry is assumed to take as long as
                the rule's previous trial, or `AGAIN` times as long if the rule compiles.
        """
        again = [each.rule for each in self.changes if each.verdict == "no gain" and each.measured_ms is not None]
        for rule in (rule for rule in tried if rule.name in again):
            share = AGAIN if rule.kind == "compile" else 1.0
            ends = time.perf_counter() + share * self._trial_s[rule.name]
            if ends < until and self._could_pay(rule, promising):
                change = self._tried(rule, forecasts[rule.name][1])
                if change.verdict != "not tried":  # an incomplete trial must not replace the first
                    self.changes = [each for each in self.changes if each.rule != rule.name] + [change]

    def _could_pay(self, rule: Rule, promising: bool) -> bool:
        """Whether a rule that was tried without a gain could have one now, after another rule was kept.

        After a compiler was kept, each trial compiles the model again. So only rules with a predicted gain are then
        tried. Rules whose kernels the compiler cannot look into are not tried again, because the compiler fuses the
        same operators itself.
        """
        names = [change.rule for change in self.changes]
        if not any(names.index(kept.name) > names.index(rule.name) for kept in self.kept):
            return False
        compiled = any(kept.kind == "compile" for kept in self.kept)
        if not compiled and any(kept.kind == rule.kind != "" for kept in self.kept):
            return False  # this rule would replace the kept rule, which is faster
        if not compiled and not promising:
            return True
        if compiled and rule.opaque:
            return False
        try:
            return self._profiles.predicted(rule, self.kept) > self.min_gain * self._profiles.now.wall_ms
        except Exception:  # the trial fails in the same way, and reports it
            return True

    def _apply_all(self, rules: Sequence[Rule]) -> None:
        possible = [rule for rule in rules if self._fits(rule)]
        began = time.perf_counter()
        try:
            candidate = self._builder.built(possible)
            self._builder.first_call(candidate)
            seconds = time.perf_counter() - began
            error = self._builder.proven(candidate, possible)
        except Exception as why:
            reason = f"the plan does not work here: {why if isinstance(why, RefusedError) else in_a_line(why)}"
            self.changes += [Change(rule.name, "refused", reason) for rule in possible]
            warnings.warn(f"rooftop.optimize: the original model runs, {reason}", RuntimeWarning, stacklevel=5)
            return
        finally:
            self._builder.restore()
        self.best = candidate
        self.kept = [rule for rule in possible if candidate.changes[rule.name]]
        for rule in possible:
            where = candidate.changes[rule.name]
            verdict, reason = ("kept", "by the plan") if where else ("no gain", NOTHING)
            self.changes.append(Change(rule.name, verdict, reason, where, error=error, first_call_s=seconds))

    def _fits(self, rule: Rule) -> bool:
        """Whether a rule can be applied to this model in this mode. If not, record that the rule was refused, and
        why.
        """
        if not (rule.trains if self._builder.step.training else rule.infers):
            self.changes.append(
                Change(rule.name, "refused", f"not for {'training' if not rule.trains else 'inference'}")
            )
            return False
        given = replace(self._builder.plain, optimizer=self._builder.optimizer)
        return self._has_no_reason(rule, "refused", "refusal", given)

    def _has_work(self, rule: Rule, times: Times) -> bool:
        """Whether a step has work that the rule could make faster. If not, record that the rule has no gain, and
        why.
        """
        return self._has_no_reason(rule, "no gain", "absent", times)

    def _has_no_reason(self, rule: Rule, verdict: str, method: str, given: object) -> bool:
        """Call a method of the rule, and return whether its result is None. Any other result is a reason to reject the
        rule, and is recorded with the verdict. An error is recorded as "failed"."""
        try:
            reason = getattr(rule, method)(given)
            if reason is not None and (not isinstance(reason, str) or not reason):
                raise TypeError(f"{method} of {rule.name} must return a reason in words, or None, got {reason!r}")
        except Exception as error:
            verdict, reason = "failed", in_a_line(error)
        if reason is not None:
            self.changes.append(Change(rule.name, verdict, reason))
        return reason is None

    def _forecast(self, rule: Rule, times: Times) -> tuple[float, float] | None:
        """(seconds until the first call is done, gain in ms), by the rule's own estimates. If an estimate fails, record
        this and return None.
        """
        try:
            seconds, gain_ms = float(rule.seconds(times)), float(rule.predicted_ms(times))
            if math.isnan(seconds) or math.isnan(gain_ms):
                raise ValueError(f"a time must be a number, got {seconds} s and {gain_ms} ms")
            return seconds, gain_ms
        except Exception as error:
            self.changes.append(Change(rule.name, "failed", f"its prediction: {in_a_line(error)}"))
            return None

    def _gain_ms(self, rule: Rule) -> float:
        """The predicted gain in ms of a rule in addition to the kept rules, without the rules that it replaces first.
        0 if the prediction fails."""
        replaced = self._replaced(rule)[0]
        try:
            return self._profiles.predicted(rule, [kept for kept in self.kept if kept not in replaced])
        except Exception:  # the trial fails in the same way, and reports it
            return 0.0

    def _ready(self, rule: Rule) -> bool:
        """Whether a rule can be tried now. While the C++ launcher of our kernels is compiled, Python launches them, and
        a rule with many launches would seem slower than it is.
        """
        return not rule.opaque or self._waited or repeated_calls.wait(0.0)

    def _changes_something(self, rule: Rule) -> bool:
        """Build a candidate with the rule, and return whether the rule changed anything. True also if building fails:
        the later trial of the rule reports the error.
        """
        try:
            return bool(self._builder.built([rule]).changes[rule.name])
        except Exception:
            return True

    def _left_s(self) -> float:
        return self.ends - time.perf_counter()

    def _needed_s(self, rule: Rule, compiled: bool) -> float:
        """The estimated seconds of a trial.

        Args:
            compiled: whether another rule of the candidate compiles.
        """
        seconds = self._order.seconds(rule, self._profiles.now) + self._steps_s()
        return seconds + (AGAIN * self._compile_s if compiled else 0.0)

    def _steps_s(self) -> float:
        """The estimated seconds of the steps that a trial runs after the first call."""
        steps = STEPS + (0 if self._builder.gate is not None else PROOF_STEPS)
        return steps * self._rounds.step_s

    # ---- trying one rule -----------------------------------------------------------------------------------------

    def _tried(self, rule: Rule, predicted_ms: float) -> Change:
        """Try a rule together with the kept rules, except those that it replaces.

        Args:
            predicted_ms: the rule's predicted gain without the kept rules.
        """
        change, began = Change(rule.name, "not tried", predicted_ms=predicted_ms), time.perf_counter()
        lost, profiled_s = 0.0, self._profile_s
        for replaced in self._replaced(rule):
            self._share = 0.0
            other = self._tried_instead(rule, replaced, predicted_ms)
            if other.verdict == "kept" or change.verdict == "not tried":
                change, lost = other, -self._share
            idle = other.verdict == "not tried" or (other.verdict == "no gain" and not other.where)
            if change.verdict == "kept" or idle or lost > HOPELESS:
                break
        self._trial_s[rule.name] = time.perf_counter() - began - (self._profile_s - profiled_s)
        return change

    def _replaced(self, rule: Rule) -> list[list[Rule]]:
        """The sets of kept rules that a rule may replace, in the order of trials. The compiler cannot look into
        Rooftop's kernels, so it is first tried instead of the rules that use these kernels. In the last trial of the
        rule `WHOLE`, the compiled model replaces all kept rules except those for the optimizer or for memory.
        """
        same = [kept for kept in self.kept if kept.kind and kept.kind == rule.kind]
        if rule.kind != "compile":
            return [same]
        opaque = [kept for kept in self.kept if kept.opaque and kept not in same]
        found = [same + opaque, same] if opaque else [same]
        others = [kept for kept in self.kept if kept.infers]  # not rules for the optimizer or memory: these stay kept
        if rule.name == WHOLE and len(found[0]) < len(others):
            found.append(others)  # torch.compile without other rules for the model, which a user would try first
        return found

    def _tried_instead(self, rule: Rule, replaced: Sequence[Rule], predicted_ms: float) -> Change:
        """Try a rule together with the kept rules except `replaced`. If it saves time and is correct, keep it."""
        change = Change(rule.name, "not tried", predicted_ms=predicted_ms)
        others = [kept for kept in self.kept if kept not in replaced]
        compiled = any(kept.kind == "compile" for kept in others)
        needed = self._needed_s(rule, compiled)
        if rule.kind == "compile" and self._left_s() > KNOWN_FIRST * needed:
            self._know(others)
        left = self._left_s()
        if left <= 0:
            return replace(change, reason=BUDGET_OVER)
        if left < WORTH_A_TRY * needed:
            return replace(change, reason=NOT_TRIED.format(seconds=left, needed=needed))
        rules = [*others, rule]
        first_call_s = left - self._steps_s()  # the time left for the first call
        limit_s, other = self._order.limit(rule, self._profiles.now, first_call_s)
        deadline = Deadline(limit_s)
        try:
            wall_ms = self._profiles.now.wall_ms  # the step time on which the prediction is based
            share = self._profiles.predicted(rule, others) / wall_ms
            best_ms = self._left * self._began_ms  # the best candidate's time, had the machine's speed not changed
            change = replace(change, predicted_ms=share * best_ms)
            began, held = time.perf_counter(), allocated(self._builder.plain.device)
            candidate = self._builder.built(rules)
            where = candidate.changes[rule.name]
            if not where:
                return replace(change, verdict="no gain", reason=NOTHING)
            with deadline:  # not around `built`: if stopped in a trace, torch.fx leaves its patches of PyTorch
                self._builder.first_call(candidate)
            first_s = time.perf_counter() - began
            self._order.note(rule, self._profiles.now, first_s)
            change = replace(change, where=where, first_call_s=first_s)
            change = replace(change, bytes=self._profiles.more_memory(candidate, held))
            least = self._rounds.least_share(share)
            gain = self._rounds.gain(self.best, candidate, least, lambda: time.perf_counter() > self.ends)
            self._share = gain.share
            change = replace(change, measured_ms=gain.share * best_ms)
            self._profiles.note_wall(gain.best_ms)
            tried_ms = gain.best_ms * (1 - gain.share)
            if rule.kind == "compile":
                self._profiles.note_compiled(candidate, others, tried_ms, whole=rule.name != BLOCKS)
            if rule.saves_memory:
                saved, all_ = -(change.bytes or 0), self._profiles.peak
                if saved < LEAST_SAVED * all_:
                    reason = f"saves {saved / 1e6:.0f} of {all_ / 1e6:.0f} MB, which is less than {LEAST_SAVED:.0%}"
                    return replace(change, verdict="no gain", reason=reason)
            elif not gain.sure:
                reason = f"{gain.share:+.1%}, which does not exceed the noise and {least:.0%}"
                return replace(change, verdict="no gain", reason=reason)
            change = replace(change, error=self._builder.proven(candidate, rules))
            self._builder.nothing_changed()
        except StoppedError:
            deadline.end()
            stopped = LEFT if other and limit_s < first_call_s else STOPPED
            return replace(change, reason=stopped.format(seconds=time.perf_counter() - began, other=other))
        except RefusedError as why:
            return replace(change, verdict="refused", reason=str(why))
        except Exception as error:  # the compiler, a kernel or an allocation failed: continue without the rule
            torch.cuda.empty_cache()
            return replace(change, verdict="failed", reason=in_a_line(error))
        finally:
            self._builder.restore()
        self.kept, self.best = ordered(rules), candidate
        self._left *= 1 - gain.share
        self._compile_s = first_s if any(kept.kind == "compile" for kept in self.kept) else 0.0
        self._profiles.note_kept(self.kept, self.best, tried_ms, self._builder.run)
        names = [each.name for each in replaced]
        self.changes = [
            replace(each, verdict="no gain", reason=f"{rule.name} is faster") if each.rule in names else each
            for each in self.changes
        ]
        return replace(change, verdict="kept", reason=f"instead of {', '.join(names)}" if names else "")

    def _know(self, rules: Sequence[Rule]) -> None:
        """Profile a candidate with these rules, if that was not tried before. If profiling fails, predictions continue
        from the times of other candidates.
        """
        names = frozenset(each.name for each in rules)
        if self._profiles.knows(rules) or names in self._unknown:
            return
        self._unknown.add(names)
        began = time.perf_counter()
        with or_earlier_times():
            candidate = self._builder.run(rules)
            times = self._rounds.timed({"best": self.best, "known": candidate})
            self._profiles.note_wall(times["best"].median_ms)
            self._profiles.note(rules, candidate, times["known"].median_ms, self._builder.run)
        self._builder.restore()
        self._profile_s += time.perf_counter() - began

    # ---- the end -------------------------------------------------------------------------------------------------

    def result(self) -> Result:
        """The best candidate, timed as users call it. Return the original if the original is faster, unless there is
        a plan, or a kept rule saves memory.
        """
        with self._told_if_interrupted():
            self.progress("the result", 0.95)
            return self._result()

    def _result(self) -> Result:
        if not self.kept:
            timing = self._rounds.timed({"": self._builder.plain})[""]
            return Result(self._builder.plain, timing.median_ms, timing.median_ms, timing.spread)
        last: Draw | None = None
        try:
            as_called = replace(self.best, call=self.wrap(self.best))
            rounds = {"before": self._builder.plain, "after": as_called, **self._uncompiled()}
            before_ms, gains = self._rounds.last(rounds, lambda: self.planned or time.perf_counter() > self._limit)
            last = self._builder.drawn()
            self._builder.right_on(last, self.best, self.kept)
            self._builder.nothing_changed()
        except Exception as error:
            reason = str(error) if isinstance(error, RefusedError) else in_a_line(error)
            if self.planned or last is None or not self._leave_one_out(reason, last):
                self._give_up(reason)
            return self._result()
        ms = {name: before_ms * (1 - statistics.median(shares)) for name, shares in gains.items()}
        noise = max(gains["after"]) - min(gains["after"])
        for_memory = any(kept.saves_memory for kept in self.kept)
        if ms["after"] >= before_ms and not self.planned and not for_memory:  # each call's checks may cost the gain
            slower = f"together they are slower: {ms['after']:.3g} ms, the original {before_ms:.3g} ms"
            self._give_up(slower, "no gain")
            return Result(self._builder.plain, before_ms, before_ms, noise)
        return Result(self.best, before_ms, ms["after"], noise, ms.get("without"))

    def changes_of(self, before_ms: float) -> list[Change]:
        """The outcomes, with times scaled so that a step of the original takes `before_ms`.

        Otherwise the kept rules together could seem to save more than a step, if the machine was slower during the
        search.
        """
        return [each.scaled(before_ms / self._began_ms if self._began_ms else 1.0) for each in self.changes]

    def _uncompiled(self) -> dict[str, Candidate]:
        """{"without": a candidate without the kept rules that compile or capture graphs}; empty if all kept rules
        compile or capture graphs, or if none does.
        """
        rules = [rule for rule in self.kept if rule.kind not in HOW_IT_RUNS]
        if not rules or len(rules) == len(self.kept):
            return {}
        return {"without": self._builder.run(rules)}

    def _leave_one_out(self, reason: str, last: Draw) -> bool:
        """If the kept rules together are wrong on the draw `last`, find a rule without which the others are correct,
        and refuse that rule. Rules that added the largest errors are tried first. Return whether such a rule was found.
        """
        errors = {each.rule: each.error or 0.0 for each in self.changes if each.verdict == "kept"}
        before = dict(zip(errors, [0.0, *itertools.accumulate(errors.values(), max)], strict=False))
        for worst in sorted(errors, key=lambda name: before[name] - errors[name]):
            rest = [rule for rule in self.kept if rule.name != worst]
            late = time.perf_counter() > self._limit
            if not rest or (late and any(rule.kind == "compile" for rule in rest)):  # compiling again takes long
                continue
            deadline = Deadline(max(self._limit - time.perf_counter(), GRACE_S))
            try:
                candidate = self._builder.built(rest)
                with deadline:
                    self._builder.first_call(candidate)
                self._builder.right_on(last, candidate, rest)
                self._builder.proven(candidate, rest)
            except (Exception, StoppedError):  # this rule was not wrong, or not the only wrong one
                deadline.end()
                self._builder.restore()
                continue
            self.changes = [
                replace(each, verdict="refused", reason=reason, error=None) if each.rule == worst else each
                for each in self.changes
            ]
            self.kept, self.best = rest, candidate
            return True
        return False

    def _give_up(self, reason: str, verdict: str = "refused") -> None:
        self.changes = [
            replace(each, verdict=verdict, reason=reason, error=None if verdict == "refused" else each.error)
            if each.verdict == "kept"
            else each
            for each in self.changes
        ]
        self.kept, self.best = [], self._builder.plain

"""Profile steps with the kept rules, to predict further gains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from rooftop.optimization.draws import Arguments
from rooftop.optimization.forecasts import quick_ceilings
from rooftop.optimization.outcomes import Step, copied
from rooftop.optimization.timing import ahead, step_of, times_of, untouched
from rooftop.rewrites import Candidate, Rule, Times
from rooftop.rewrites.candidates import Compiled, Memory
from rooftop.rewrites.compiler_rules import counted_blocks
from rooftop.rewrites.graph_rules import Replays
from rooftop.rewrites.training_graphs import TrainingReplays
from rooftop.words import in_a_line

HOW_IT_RUNS = ("compile", "graphs")
"""Kinds of rules that change how operators are launched, not which operators run."""


class Profiles:
    """Profiles of a step.

    Args:
        plain: the original as a candidate, which has run before.

    Attributes:
        now: times of a step of the best candidate.
        peak: bytes of GPU memory at the peak of a step of the original, beyond those allocated before it; 0 on a CPU.
    """

    def __init__(self, step: Step, given: Arguments, original: nn.Module, plain: Candidate) -> None:
        self._step, self._given, self._original = step, given, original
        self.now = Times(0.0, ())
        self.peak = self._peak_bytes(plain)
        self._blocks = counted_blocks(plain.model)
        self._operators: dict[frozenset[str], Times] = {}  # by the names of rules that change which operators run
        self._of_kept: dict[frozenset[str], Times] = {}  # by the names of all rules of a candidate
        self._compiled: dict[frozenset[str], Compiled] = {}  # by the names of a candidate's rules that do not compile

    def begin(self, plain: Candidate, wall_ms: float) -> Times:
        """Profile the original: `plain` is the candidate without rules, and `wall_ms` is its time per step. Return its
        times.
        """
        self._ceilings = quick_ceilings(plain.device)
        self.now = self._of_kept[_names([])] = self._operators[_names([])] = self._times_of(plain, wall_ms)
        return self.now

    def predicted(self, rule: Rule, others: Sequence[Rule]) -> float:
        """The predicted time in ms by which a step with `rule` and `others` is shorter than a step of the best
        candidate so far.
        """
        names = _names(others)
        known = max((each for each in self._of_kept if each <= names), key=len)
        times = self._of_kept[known]
        if any(each.kind == "graphs" for each in others) and times.device_ms is not None:
            replayed = any(each.kind == "graphs" and each.name in known for each in others)
            wall_ms = times.wall_ms if replayed else times.device_ms + times.copies_ms
            times = replace(times, wall_ms=wall_ms, host_ms=0.0)
        times = replace(times, compiled=self._compiled.get(names))
        return self.now.wall_ms - times.wall_ms + float(rule.predicted_ms(times))

    def note_compiled(self, candidate: Candidate, others: Sequence[Rule], wall_ms: float, whole: bool) -> None:
        """Measure a compiled step, to predict other rules that compile.

        Args:
            others: the candidate's rules, except the rule that compiles.
            whole: whether the whole model was compiled, not each block.
        """
        device_ms, host_ms = self._ahead(candidate, wall_ms)
        self._compiled[_names(others)] = Compiled(wall_ms, device_ms, host_ms, whole)

    def note_wall(self, best_ms: float) -> None:
        """Scale the wall times of all profiles by one factor, so that the best candidate's time becomes `best_ms`. The
        host's speed varies from moment to moment.
        """
        changed = best_ms / max(1e-6, self.now.wall_ms)

        def corrected(times: Times) -> Times:
            return replace(times, wall_ms=changed * times.wall_ms)

        self.now = corrected(self.now)
        self._of_kept = {names: corrected(times) for names, times in self._of_kept.items()}
        self._compiled = {
            names: replace(times, wall_ms=changed * times.wall_ms) for names, times in self._compiled.items()
        }

    def note_kept(self, kept: Sequence[Rule], best: Candidate, wall_ms: float, run: Callable[..., Candidate]) -> None:
        """Profile the new best candidate. If profiling fails, predictions continue from the earlier times, because the
        candidate is still faster and proven.

        Args:
            kept: all rules of the best candidate.
            wall_ms: time of a step of the best candidate.
            run: creates a candidate with the given rules, and runs it.
        """
        plain = _plain(kept)
        self.now = replace(self.now, wall_ms=wall_ms)
        with or_earlier_times():
            self.now = replace(self._operators_of(plain, kept, best, wall_ms, run), wall_ms=wall_ms)
        with or_earlier_times():
            self.now = self._launched(self.now, plain, kept, best)
        self._of_kept[_names(kept)] = self.now

    def knows(self, rules: Sequence[Rule]) -> bool:
        """Whether a candidate with exactly these rules was profiled."""
        return _names(rules) in self._of_kept

    def note(self, rules: Sequence[Rule], candidate: Candidate, wall_ms: float, run: Callable[..., Candidate]) -> None:
        """Profile a candidate other than the best one, before another rule is tried together with this candidate's
        rules.

        Args:
            rules: all rules of the candidate.
            wall_ms: time of a step of the candidate.
            run: creates a candidate with the given rules, and runs it.
        """
        plain = _plain(rules)
        times = replace(self._operators_of(plain, rules, candidate, wall_ms, run), wall_ms=wall_ms)
        self._of_kept[_names(rules)] = self._launched(times, plain, rules, candidate)

    def _operators_of(
        self,
        plain: Sequence[Rule],
        rules: Sequence[Rule],
        candidate: Candidate,
        wall_ms: float,
        run: Callable[..., Candidate],
    ) -> Times:
        """The times of the operators of a candidate with these rules. Operators in compiled code and in graphs cannot
        be timed one by one, so they are timed in a candidate with the `plain` rules only.
        """
        names = _names(plain)
        if names not in self._operators:
            self._operators[names] = self._times_of(candidate if len(plain) == len(rules) else run(plain), wall_ms)
        return self._operators[names]

    def _launched(self, times: Times, plain: Sequence[Rule], rules: Sequence[Rule], candidate: Candidate) -> Times:
        """`times` with the host and device times of a candidate whose rules compile or capture graphs."""
        if len(plain) == len(rules):
            return times
        device_ms, host_ms = self._ahead(candidate, times.wall_ms)
        return replace(times, device_ms=device_ms, host_ms=host_ms)

    def more_memory(self, candidate: Candidate, held: int) -> int | None:
        """Additional peak memory of a candidate's step in bytes, compared with the original; None on a CPU.

        Args:
            held: allocated bytes before the candidate was built.
        """
        if candidate.device.type != "cuda":
            return None
        graphs = candidate.call.bytes() if isinstance(candidate.call, Replays | TrainingReplays) else 0
        return allocated(candidate.device) - held + graphs + self._peak_bytes(candidate) - self.peak

    def _times_of(self, candidate: Candidate, wall_ms: float) -> Times:
        times = times_of(candidate, self._step, self._given, self._original, wall_ms, self._ceilings)
        times = replace(times, blocks=self._blocks)
        device = candidate.device
        if device.type != "cuda":
            return times
        total = torch.cuda.get_device_properties(device).total_memory
        return replace(times, memory=Memory(allocated(device) + self.peak, total))

    def _ahead(self, candidate: Candidate, wall_ms: float) -> tuple[float | None, float | None]:
        with untouched(self._original, candidate):
            return ahead(step_of(candidate, self._step, copied(self._given)), candidate.device, wall_ms)

    def _peak_bytes(self, candidate: Candidate) -> int:
        """Bytes of GPU memory at the peak of a candidate's step, beyond those allocated before it; 0 on a CPU."""
        device = candidate.device
        if device.type != "cuda":
            return 0
        with untouched(self._original, candidate):
            run = step_of(candidate, self._step, copied(self._given))
            before = allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            run()
            return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def or_earlier_times() -> Iterator[None]:
    """Turn an error in a profile into a warning, because a search can continue with the times of earlier profiles."""
    try:
        yield
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        told = f"rooftop.optimize: further gains are predicted from earlier times: {in_a_line(error)}"
        warnings.warn(told, RuntimeWarning, stacklevel=8)


def _plain(rules: Sequence[Rule]) -> list[Rule]:
    """The rules that change which operators run, and not how they are launched."""
    return [each for each in rules if each.kind not in HOW_IT_RUNS]


def _names(rules: Sequence[Rule]) -> frozenset[str]:
    return frozenset(each.name for each in rules)


def allocated(device: torch.device) -> int:
    """Allocated bytes of GPU memory; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

"""Build candidates from rules, run them, and prove that they compute what the original computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from rooftop.optimization.accuracy import RefusedError
from rooftop.optimization.as_before import Originals
from rooftop.optimization.draws import Arguments, Draw, tensors_of
from rooftop.optimization.gate import Gate
from rooftop.optimization.optimizer_gate import check_steps
from rooftop.optimization.outcomes import Step, copied
from rooftop.optimization.timing import same_state, step_of, untouched
from rooftop.rewrites import RULES, Candidate, Rule


class Builder:
    """Builds candidates of one model, which no candidate may change.

    Args:
        original: the model, in the mode in which it will run.
        optimizer: optimizer of its training step.
        step: how the model is run.
        gate: creates the gate that compares all candidates with the original; called for the first candidate that is to
            be proven.
        given: arguments of the timed calls.
        ends: when comparisons of doubtful results on more inputs (`doubts.py`) should end, by `time.perf_counter`.
        fresh: draws inputs that no candidate has seen.
        originals: tensors of the model, which no rule may change.

    Attributes:
        plain: the original as a candidate, which has already run.
        step_s: approximate seconds of a step of the original.
    """

    def __init__(
        self,
        original: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: Step,
        gate: Callable[[], Gate],
        given: Arguments,
        ends: float,
        fresh: Callable[[], Draw],
        originals: Originals,
    ) -> None:
        self.original, self.optimizer, self.step = original, optimizer, step
        self.given = copied(given)  # copies, because a rule may change its arguments
        self._make_gate, self._ends, self._fresh, self._originals = gate, ends, fresh, originals
        self._gates: dict[tuple[str, ...], Gate] = {}  # by the names of rules that lower the precision
        self._copies: list[torch.optim.Optimizer] = []
        self.plain = self._plain()
        self.step_s = self.first_call(self.plain)

    def built(self, rules: Sequence[Rule]) -> Candidate:
        """A candidate with these rules.

        Raises:
            RefusedError: one of the rules cannot be applied after the others.
        """
        candidate = self._plain()
        for rule in ordered(rules):
            reason = rule.refusal(candidate)
            if reason is not None:
                raise RefusedError(f"{rule.name}: {reason}")
            where = rule.apply(candidate)
            if not isinstance(where, str):
                raise TypeError(f"apply of {rule.name} must return a str that says what it changed, got {where!r}")
            candidate.changes[rule.name] = where
        self.nothing_changed()
        return candidate

    def run(self, rules: Sequence[Rule]) -> Candidate:
        """Make a candidate with these rules, and run two steps of it, so that all compilation is done."""
        candidate = self.built(rules)
        self.first_call(candidate)
        return candidate

    def first_call(self, candidate: Candidate) -> float:
        """Run two steps of a candidate, and return the seconds of the second step. The first step may compile."""
        with untouched(self.original, candidate):
            step_of(candidate, self.step, copied(self.given))()
            began = time.perf_counter()
            step_of(candidate, self.step, copied(self.given))()
            return time.perf_counter() - began

    def proven(self, candidate: Candidate, rules: Sequence[Rule]) -> float:
        """Compare a candidate that has these rules with the original. Return the error, relative to the allowed error.

        Raises:
            RefusedError: the candidate computes something else.
        """
        gate = self._gate_of(rules)
        error = gate.judge(candidate)
        self.right_on(self.drawn(), candidate, rules)
        if candidate.optimizer is not None and self.optimizer is not None and self.changes_optimizer(candidate):
            check_steps(candidate.optimizer, self.optimizer)
        return error

    def drawn(self) -> Draw:
        """Draw inputs that no candidate has seen. They serve to compare a candidate with the original after the
        candidate has run often.
        """
        return replace(self._fresh(), what="other values, after many calls")

    def right_on(self, draw: Draw, candidate: Candidate, rules: Sequence[Rule]) -> None:
        """Compare a candidate that has these rules with the original on one draw.

        Raises:
            RefusedError: the candidate computes something else.
        """
        self._gate_of(rules).judge_on(candidate, draw)

    def nothing_changed(self) -> None:
        """Restore the original model's tensors. If a rule had changed one of them, raise RefusedError."""
        if name := self.restore():
            raise RefusedError(f"it changes {name} of the original: a rule must replace the tensor instead")

    def restore(self) -> str:
        """Restore the tensors of the original. Return the name of a tensor that was changed; "" if none was."""
        return self._originals.restore()

    def changes_optimizer(self, candidate: Candidate) -> bool:
        """Whether a rule has replaced the candidate's optimizer, which was at first a copy of the user's."""
        return all(candidate.optimizer is not each for each in self._copies)

    @property
    def gate(self) -> Gate | None:
        """The gate for candidates in the original's own precision, which compares them with the original; None if no
        candidate has been checked yet.
        """
        return self._gates.get(())

    def _plain(self) -> Candidate:
        optimizer = same_state(self.optimizer) if self.optimizer is not None else None
        self._copies += [optimizer] if optimizer is not None else []
        return Candidate.of(self.original, optimizer, self.step.training, tensors_of(self.given))

    def _gate_of(self, rules: Sequence[Rule]) -> Gate:
        """The gate that checks candidates with these rules. If some of the rules lower the precision, the gate compares
        with the original to which only those rules have been applied.
        """
        lowering = [rule for rule in rules if rule.opt_in]
        key = tuple(rule.name for rule in lowering)
        if key not in self._gates:
            self._gates[key] = self._gate_of([]).lower(self.built(lowering)) if lowering else self._make_gate()
            self._gates[key].ends = self._ends
        return self._gates[key]


def ordered(rules: Sequence[Rule]) -> list[Rule]:
    """The rules in the order in which they are applied: Rooftop's rules as in `RULES`, then the user's own rules."""
    places = {rule.name: place for place, rule in enumerate(RULES)}
    return sorted(rules, key=lambda rule: places.get(rule.name, len(places)))

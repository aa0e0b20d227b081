"""Decisions here do not depend on other work of the machine: they use given rules, and a clock that only models
advance."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import rooftop
from rooftop.hardware.timing import Timing
from rooftop.optimization import Optimized, rounds
from rooftop.optimization.draws import Arguments
from rooftop.optimization.outcomes import Step
from rooftop.optimization.timing import step_of, untouched
from rooftop.rewrites import Candidate, Rule

STEP_MS = 0.1  # the time of a model that does not sleep, on the clock below


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time steps for a short time, which is long enough for the differences that tests depend on."""
    monkeypatch.setattr(rounds, "ROUND_S", 0.02)


class Nothing(Rule):
    """A rule that reports a change but changes nothing."""

    name = "nothing"
    trains = True

    def apply(self, candidate: Candidate) -> str:
        return "nothing"


def proven_with(model: nn.Module, *args: Any, rule: Rule | None = None, **options: Any) -> Optimized:
    """The result of `optimize` with one rule, which is applied and proven."""
    rule = rule or Nothing()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps({"version": 1, "rules": [rule.name]}))
        return rooftop.optimize(model, *args, plan=path, rules=[rule], **options)


@pytest.fixture
def proven() -> Callable[..., Optimized]:
    """`optimize(model, *args, rule=...)` without a search, so that the result does not depend on times."""
    return proven_with


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes as long as the test's models pretend to sleep."""
    slept = [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    def compared(
        candidates: dict[str, Candidate],
        step: Step,
        given: Arguments,
        original: nn.Module,
        seconds: float,
        step_s: float,
    ) -> dict[str, Timing]:
        found = {}
        with untouched(original, *candidates.values()):
            for name, candidate in candidates.items():
                before = slept[0]
                step_of(candidate, step, given)()
                ms = STEP_MS + 1e3 * (slept[0] - before)
                found[name] = Timing(ms, ms, 0.0, 5)
        return found

    monkeypatch.setattr(request.module, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(rounds, "compare_steps", compared)

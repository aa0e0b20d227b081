"""How accurate results and gradients must be: each of them as accurate as the original's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.optimization.draws import Draw
from rooftop.optimization.gate import Gate, Known, RefusedError
from rooftop.optimization.outcomes import Outcome, Step

ERROR = 1e-3


def outcome(errors: dict[str, float]) -> Outcome:
    """Values of 1 with these errors in units of `ERROR`, of both signs."""
    signs = torch.tensor([1.0, -1.0]).repeat(8)
    values: dict[str, Tensor] = {name: 1 + ERROR * size * signs for name, size in errors.items()}
    return Outcome(values, (), {}, frozenset(), ())


def judged(sizes: dict[str, float]) -> float:
    """The gate's answer to a change with these errors, if the original's errors are 1."""
    names = list(sizes)
    exact = outcome(dict.fromkeys(names, 0.0))
    exact = replace(exact, values={name: value.double() for name, value in exact.values.items()})
    given: Any = ((), {})
    known = Known(Draw("the given inputs", given), outcome(dict.fromkeys(names, 1.0)), exact)
    gate = Gate(nn.Identity(), Step(True), [known])
    return gate._compare(outcome(sizes), known)


def gradients(*sizes: float) -> dict[str, float]:
    return {f"gradient of {i}": size for i, size in enumerate(sizes)}


def test_each_gradient_may_be_off_by_twice_the_original() -> None:
    assert judged(gradients(1.9, *[1.1] * 9)) == pytest.approx(0.95, abs=1e-3)
    with pytest.raises(RefusedError, match="gradient of 3 is off by"):
        judged(gradients(1.0, 1.0, 1.0, 2.1, *[1.0] * 9))


def test_results_may_be_off_by_twice_the_original() -> None:
    assert judged({"result 0": 1.9, **gradients(1.0)}) == pytest.approx(0.95, abs=1e-3)
    with pytest.raises(RefusedError, match="result 0 is off by"):
        judged({"result 0": 2.1, **gradients(1.0)})

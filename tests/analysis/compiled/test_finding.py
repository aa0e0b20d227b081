"""A program counts as compiled if any part of it is compiled, even a function that only the code of a module's methods
mentions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.analysis.compiled.finding import has_compiled_parts
from rooftop.analysis.program import Program
from rooftop.hardware import Ceilings


def plain(x: Tensor) -> Tensor:
    return x.sin()


compiled = torch.compile(plain, backend="eager")


class NamesIt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return compiled(x)


class HoldsIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation = compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)


class Decorated(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return plain(x)


def inner_compiled() -> nn.Module:
    return nn.Sequential(nn.ReLU(), torch.compile(nn.Linear(2, 2), backend="eager"))  # type: ignore[arg-type]


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile(backend="eager")
    return model


def _method() -> Any:
    return nn.Sequential(HoldsIt()).forward


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (NamesIt, True),
        (HoldsIt, True),
        (Decorated, True),
        (lambda: nn.Sequential(nn.Sequential(NamesIt())), True),
        (inner_compiled, True),
        (compiled_in_place, True),
        (lambda: torch.compile(Plain(), backend="eager"), True),
        (lambda: compiled, True),
        (lambda: lambda x: compiled(x), True),
        (lambda: lambda x: inner_compiled()(x), False),  # compiled only when it runs
        (_method, True),
        (Plain, False),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), False),
        (lambda: plain, False),
    ],
)
def test_compiled_parts_are_found(make: Callable[[], Any], expected: bool) -> None:
    assert has_compiled_parts(make()) is expected


class NamesItInVain(nn.Linear):
    def other(self, x: Tensor) -> Tensor:
        return compiled(x)


def test_a_program_that_runs_nothing_compiled_is_told_by_its_modules(ceilings: Ceilings) -> None:
    model = nn.Sequential(NamesItInVain(8, 8))
    assert Program(model, (), {}).compiled
    report = rooftop.analyze(model, torch.ones(2, 8), ceilings=ceilings)
    (row,) = [row for row in report.ops if row.name == "aten::addmm"]
    assert row.modules == ("0",)
    assert report.compilation is None

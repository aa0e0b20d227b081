"""Programs that run other operators when told that they are compiled or captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.analysis import profiling
from rooftop.analysis.instruments import Plain
from rooftop.analysis.kernel_times import KernelTimes
from rooftop.analysis.program import Program
from rooftop.analysis.traced_steps import TracingQuestions
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.sequences import StepClock
from rooftop.hardware.tracing_questions import QUESTIONS

ASK = [
    lambda: torch.compiler.is_compiling(),
    lambda: torch.compiler.is_dynamo_compiling(),
    pytest.param(lambda: torch.cuda.is_current_stream_capturing(), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("ask", ASK)
def test_a_program_that_asks_is_noticed_and_gets_the_answer(ask: Callable[[], bool]) -> None:
    questions = TracingQuestions()
    with questions.noticed():
        assert not questions.asked
        assert ask() is False
    assert questions.asked
    with questions.affirmed():
        assert ask() is True
    assert ask() is False


def test_pytorch_is_told_the_truth() -> None:
    """An optimizer refuses to be captured unprepared, and layers choose what they run."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.Adam(layer.parameters())
    questions = TracingQuestions()
    with questions.noticed():
        layer(torch.ones(2, 4, 8)).sum().backward()
        optimizer.step()
    assert not questions.asked
    with questions.affirmed():
        optimizer.step()


def test_nothing_stays_in_place() -> None:
    before = [getattr(*question) for question in QUESTIONS]
    with pytest.raises(KeyError), TracingQuestions().affirmed():
        raise KeyError
    assert [getattr(*question) for question in QUESTIONS] == before


@pytest.mark.parametrize("way", ["noticed", "affirmed"])
def test_who_takes_a_question_by_its_name_meanwhile_gets_the_answer_afterwards(way: str) -> None:
    """A module that the program imports during the analysis may copy a replaced function under its own name."""
    questions = TracingQuestions()
    with getattr(questions, way)():
        from torch.compiler import is_compiling
    assert is_compiling() is False
    assert not questions.asked


class Cautious(nn.Module):
    """A module that omits work unless it is being captured."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more, self.told = more, set[bool]()

    def forward(self, x: Tensor) -> Tensor:
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        self.told.add(capturing)
        for _ in range(self.more if capturing else 0):
            x = x @ x
        for _ in range(40):
            x = x + 1
        return x


def test_a_cpu_has_no_graphs(ceilings: Ceilings) -> None:
    model = Cautious(1)
    rooftop.analyze(model, torch.ones(4, 4), ceilings=ceilings)
    assert model.told == {False}


class Asking(nn.Module):
    """A module that chooses an operator, or refuses, when it is told that it is compiled."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses, self.names = refuses, ("add",)

    def forward(self, x: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if compiling and self.refuses:
            raise NotImplementedError("eager only")
        self.names = ("add", "mul") if compiling else ("add",)
        return x + 1


@pytest.mark.parametrize(("refuses", "before_ms", "more_ms"), [(False, 0.5, 1.5), (False, 3.0, 0.0), (True, 0.5, None)])
def test_what_it_costs_to_be_compiled(
    refuses: bool, before_ms: float, more_ms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Asking(refuses)
    program = Program(model, (torch.ones(2),), {})

    def watched(program: Program, *others: Any) -> KernelTimes:
        program.step()
        return KernelTimes(model.names, tuple(1.0 for _ in model.names), 1.0 * len(model.names), 3)

    monkeypatch.setattr(profiling, "_kernel_times", watched)
    times = KernelTimes(("add",), (before_ms,), before_ms, 3)
    clock = StepClock(program.step, torch.device("cpu"))
    plain = Plain(1.0, [], [], 0.0, 0.0, compiled=False)
    assert profiling._traced_more_ms(program, clock, plain, times) == more_ms


@pytest.mark.gpu
@pytest.mark.parametrize("more", [0, 20])
def test_a_graph_is_not_advised_where_the_program_would_be_slower_in_it(more: int) -> None:
    model = Cautious(more)
    report = rooftop.analyze(model, torch.zeros(2048, 2048, device="cuda"))
    assert model.told == {False, True}
    graphs = [item for item in report.advice if "CUDA graph" in item.title]
    assert len(graphs) <= (not more)


@pytest.mark.gpu
def test_a_program_that_fails_when_it_is_told_so_is_reported_as_ever() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                raise NotImplementedError("no graphs here")
            return x + 1

    report = rooftop.analyze(Refusing(), torch.zeros(64, device="cuda"))
    assert report.summary.kernels == 1
    assert not any("CUDA graph" in item.title for item in report.advice)

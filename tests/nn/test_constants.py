"""Values that depend only on parameters are computed once while the parameters do not change, and are never out of
date."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rooftop.nn.constants import MOST, constant, keep_constants, kept_bytes


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.computed = nn.Parameter(torch.ones(3)), 0

    @constant
    def times(self, factor: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """A multiple of the weight."""
        self.computed += 1
        return (factor * self.weight).to(dtype)

    @constant
    def both(self) -> tuple[Tensor, Tensor]:
        self.computed += 1
        return self.weight + 1, self.weight - 1

    @constant
    def plus(self, other: Tensor) -> Tensor:
        self.computed += 1
        return self.weight + other

    @constant
    def product(self) -> Tensor:
        return self.weight @ self.weight.view(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.times(2.0)


def kept() -> Table:
    table = Table().eval().requires_grad_(False)
    assert keep_constants(table) == ("both", "plus", "product", "times")
    return table


def test_without_a_promise_every_call_sees_the_parameters_as_they_are() -> None:
    table = Table().eval()
    for value in (1.0, 5.0):
        with torch.no_grad():
            table.weight.fill_(value)
        assert table.times(2.0).tolist() == [2 * value] * 3
        assert table(torch.zeros(3)).tolist() == [2 * value] * 3
    assert table.computed == 4
    table.times(2.0).sum().backward()
    assert table.weight.grad is not None


def test_computed_once_for_each_set_of_arguments() -> None:
    table = kept()
    first = table.times(2.0)
    assert table.times(2.0) is first
    assert table.times(2.0, torch.float64).dtype == torch.float64
    assert table.times(3.0).tolist() == [3.0] * 3
    assert [t.tolist() for t in table.both()] == [[2.0] * 3, [0.0] * 3]
    assert table.both() is table.both()
    assert table.computed == 4
    assert kept_bytes(table) == 3 * (4 + 8 + 4 + 2 * 4)
    assert table.times(2) is not first  # another type, which could give another dtype
    assert table.times(factor=2.0) is not table.times(factor=2.0)
    assert Table.times.__doc__ == "A multiple of the weight."


def test_of_many_sets_of_arguments_the_first_stay() -> None:
    """A CUDA graph may read the kept values, so new values replace none of them."""
    table = kept()
    first = [table.times(float(i)) for i in range(MOST + 3)]
    table.computed = 0
    again = [table.times(float(i)) for i in range(MOST + 3)]
    assert [a is b for a, b in zip(first, again, strict=True)] == [True] * MOST + [False] * 3
    assert table.computed == 3
    assert table.both() is table.both()  # each method has its own limit


def test_tensors_that_are_no_parameters_do_not_come_again() -> None:
    table = kept()
    other = torch.ones(3)
    assert table.plus(other) is not table.plus(other)
    other.fill_(7.0)
    assert table.plus(other).tolist() == [8.0] * 3
    parameter = nn.Parameter(torch.ones(3), requires_grad=False)
    assert table.plus(parameter) is table.plus(parameter)
    assert table.plus(nn.Parameter(torch.zeros(3), requires_grad=False)).tolist() == [1.0] * 3


def test_arguments_that_cannot_be_a_key_do_not_come_again() -> None:
    class Sum(nn.Module):
        @constant
        def of(self, sizes: list[int]) -> Tensor:
            return torch.tensor(sum(sizes))

    module = Sum().eval()
    keep_constants(module)
    assert module.of([1, 2]) == 3
    assert kept_bytes(module) == 0


def test_computed_in_each_call_where_it_may_be_another() -> None:
    table = kept()
    assert table.train().times(2.0) is not table.times(2.0)
    table.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert table.product().dtype == torch.bfloat16
    assert table.product().dtype == torch.float32
    table = kept().requires_grad_()
    assert table.times(2.0).requires_grad
    assert table.times(2.0) is not table.times(2.0)
    with torch.no_grad():
        assert table.times(2.0) is table.times(2.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_a_copy_has_its_own(copied: Callable[[Table], Table]) -> None:
    table = kept()
    table.times(2.0)
    other = copied(table)
    with torch.no_grad():
        other.weight.fill_(3.0)
    assert other.times(2.0).tolist() == [6.0] * 3
    assert other.times(2.0) is other.times(2.0)
    assert table.times(2.0).tolist() == [2.0] * 3


def test_modules_with_hooks_in_them_go_on_as_before() -> None:
    model = nn.Sequential(Table(), Table()).eval().requires_grad_(False)
    model[0].register_forward_hook(lambda *_: None)
    assert keep_constants(model) == ("1.both", "1.plus", "1.product", "1.times")
    assert model[0].times(2.0) is not model[0].times(2.0)


@pytest.mark.parametrize("promised", [False, True])
def test_compiled_whole(promised: bool) -> None:
    """A compiler traces the computation itself, and decides whether to fold constants."""
    torch._dynamo.reset()
    table = kept() if promised else Table().eval()
    compiled = torch.compile(table, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert compiled(torch.zeros(3)).tolist() == [2.0] * 3
        table.weight.fill_(5.0)
        assert compiled(torch.zeros(3)).tolist() == [10.0] * 3


@pytest.mark.gpu
def test_not_within_a_capture_on_a_gpu() -> None:
    """Results of a capture have no values until the graph is replayed."""
    table = kept().cuda()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        captured = table.times(2.0)
    outside = table.times(2.0)
    assert outside.tolist() == [2.0] * 3
    assert table.times(2.0) is outside
    graph.replay()
    torch.cuda.synchronize()
    assert captured.tolist() == [2.0] * 3

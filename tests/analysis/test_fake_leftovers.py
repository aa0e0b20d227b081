"""A prediction removes its fake tensors wherever the program stores them, or reports where they remain."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import rooftop
from rooftop.errors import InputError
from rooftop.hardware.ceilings import Ceilings

KEPT: dict[str, Any] = {"before": 1}
LAST: Any = None
CALLS: list[int] = []
TABLES = ModuleType("tables")
TABLES.MASKS = {}  # type: ignore[attr-defined]
VARIABLE: ContextVar[Any] = ContextVar("VARIABLE", default=None)
LOCAL = threading.local()


@functools.lru_cache
def bounded(size: int) -> Tensor:
    return torch.ones(size)


@functools.cache
def unbounded(size: int) -> dict[str, Tensor]:
    return {"mask": torch.ones(size)}


@functools.lru_cache
def the_only_one() -> object:
    return object()


class Registry:
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def keep(cls, tensor: Tensor) -> None:
        cls.tensors += (tensor,)


class Base(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.keep(result)
        return result

    def keep(self, x: Tensor) -> None:
        raise NotImplementedError


class InAGlobal(Base):
    def keep(self, x: Tensor) -> None:
        global LAST
        LAST = x


class InADict(Base):
    def keep(self, x: Tensor) -> None:
        KEPT["now"] = [x]


class InItsClass(Base):
    table: dict[int, Tensor] = {}  # noqa: RUF012

    def keep(self, x: Tensor) -> None:
        self.table[len(self.table)] = x
        type(self).last = x  # type: ignore[attr-defined]


class InAnotherClass(Base):
    def keep(self, x: Tensor) -> None:
        Registry.keep(x)


class InAModule(Base):
    def keep(self, x: Tensor) -> None:
        TABLES.MASKS["now"] = x  # type: ignore[attr-defined]


class InCaches(Base):
    def keep(self, x: Tensor) -> None:
        x * bounded(8) * unbounded(8)["mask"] * self.of_this()

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def of_this(self) -> Tensor:
        return self.weight.sum()


class InAContextVariable(Base):
    def keep(self, x: Tensor) -> None:
        VARIABLE.set(x)


class InAThreadLocal(Base):
    def keep(self, x: Tensor) -> None:
        LOCAL.now = x


class OnATensor(Base):
    def keep(self, x: Tensor) -> None:
        ZEROS.found = x  # type: ignore[attr-defined]


ZEROS = torch.zeros(1)
KEEPERS = [
    *(InAGlobal, InADict, InItsClass, InAnotherClass, InAModule, InCaches),
    *(InAContextVariable, InAThreadLocal, OnATensor),
]


def kept() -> list[Any]:
    """Everything that the program stores, except in caches."""
    of_classes = [dict(InItsClass.table), hasattr(InItsClass, "last"), Registry.tensors]
    return [LAST, dict(KEPT), dict(vars(TABLES)["MASKS"]), VARIABLE.get(), dict(vars(LOCAL)), vars(ZEROS), *of_classes]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("make", [lambda net: net, lambda net: lambda x: net(x)], ids=["module", "callable"])
@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_a_program_keeps_is_taken_out_again(
    keeper: type[Base], make: Callable[[Base], Any], train: bool, ceilings: Ceilings
) -> None:
    net, x, before = keeper(8, 8), torch.ones(2, 8), kept()
    the_only_one()
    rooftop.predict(make(net), x, ceilings=ceilings, train=train)
    assert kept() == before
    assert not any(type(each) is FakeTensor for each in (bounded(8), unbounded(8)["mask"]))
    assert type(net(x)) is Tensor
    bounded.cache_clear()
    unbounded.cache_clear()
    InItsClass.table.clear()


def test_what_is_no_fake_tensor_stays(ceilings: Ceilings) -> None:
    """A library that has initialized itself must not initialize itself again."""

    class SetsUp(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            the_only_one()
            CALLS.append(len(CALLS))
            return super().forward(x)

    CALLS.clear()
    the_only_one.cache_clear()
    rooftop.predict(SetsUp(8, 8), torch.ones(2, 8), ceilings=ceilings)
    assert CALLS == [0]
    assert the_only_one.cache_info().currsize == 1


def test_a_bounded_cache_goes_on_as_before(ceilings: Ceilings) -> None:
    @functools.lru_cache(maxsize=2)
    def table(size: int) -> Tensor:
        return torch.ones(size)

    first = table(1)
    rooftop.predict(lambda x: x * table(2), torch.ones(3, 2), ceilings=ceilings)
    assert table(1) is first
    sizes = [1, 2, 3, 1, 2, 2, 4, 1]
    assert [table(size).tolist() for size in sizes] == [[1.0] * size for size in sizes]


class Hidden(threading.Thread):
    """A thread, whose attributes are not restored because it may still run."""

    kept: Any = None


def test_what_cannot_be_taken_out_is_named(ceilings: Ceilings) -> None:
    class Holder:  # created here, because earlier objects are frozen by the tests and would not be found
        hidden = Hidden()

    class InAThread(Base):
        def keep(self, x: Tensor) -> None:
            Holder.hidden.kept = x

    with pytest.raises(InputError, match=r"of InAThread is complete, but left fake tensors in .*Holder.hidden"):
        rooftop.predict(InAThread(8, 8), torch.ones(2, 8), ceilings=ceilings)
    Holder.hidden.kept = None
    del Holder.hidden
    rooftop.predict(nn.Linear(8, 8), torch.ones(2, 8), ceilings=ceilings)


def test_garbage_that_waits_and_what_the_caller_s_own_mode_made_is_no_error(ceilings: Ceilings) -> None:
    class Cycles(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            cycle: list[Any] = [result]
            cycle.append(cycle)
            return result

    gc.disable()
    try:
        rooftop.predict(Cycles(8, 8), torch.ones(2, 8), ceilings=ceilings, train=True)
    finally:
        gc.enable()
    with rooftop.analysis.fake_tensors():
        mine = Cycles(8, 8)
        rooftop.predict(mine, torch.ones(2, 8), ceilings=ceilings)
    assert type(mine.weight) is FakeTensor

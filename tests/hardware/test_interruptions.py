"""Exceptions from a program's signal handler are distinguished from those of our own code."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rooftop.hardware.interruptions import pass_on


class TimeLimit(Exception):
    pass


def raising(*arguments: Any) -> None:
    raise TimeLimit


class Handlers:
    def method(self, *arguments: Any) -> None:
        raising()

    def __call__(self, *arguments: Any) -> None:
        raising()


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def reading() -> None:
    """Run as Rooftop's code, in which every error is caught."""
    try:
        signal.raise_signal(signal.SIGUSR1)
    except Exception as error:
        pass_on(error)


@pytest.mark.parametrize(
    "handler", [raising, lambda *arguments: raising(), Handlers().method, Handlers(), functools.partial(raising, 1)]
)
def test_what_a_handler_raises_goes_on(handler: Callable[..., None]) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(TimeLimit):
        reading()


def test_other_errors_stay() -> None:
    signal.signal(signal.SIGUSR1, lambda *arguments: None)
    reading()
    try:
        raising()
    except TimeLimit as error:
        pass_on(error)

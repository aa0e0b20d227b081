"""Work ahead: results are in order, memory stays within the limit, and errors are raised at their position."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rooftop.errors import InputError
from rooftop.media.ahead import in_order, usual_threads


def test_results_come_in_order_whichever_is_done_first() -> None:
    def slow_at_first(number: int) -> int:
        time.sleep(0.02 if number % 4 == 0 else 0)
        return number * number

    assert list(in_order(slow_at_first, range(20), threads=4)) == [number * number for number in range(20)]
    assert list(in_order(str, [], threads=2)) == []


def test_work_goes_on_while_results_are_used_but_only_so_far_ahead() -> None:
    begun: list[int] = []
    results = in_order(begun.append, range(100), threads=3, ahead=5)
    assert begun == []  # no work before the first request
    for asked in range(1, 8):
        next(results)
        until = time.monotonic() + 60
        while len(begun) < asked + 4 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(begun) == asked + 4  # the caller has taken one of the five results computed ahead
    results.close()  # type: ignore[attr-defined]


def test_threads_work_at_the_same_time() -> None:
    together = threading.Barrier(3)
    assert len(set(in_order(lambda _: together.wait(60), range(3), threads=3))) == 3


def test_an_error_comes_at_its_place_and_ends_the_work() -> None:
    begun = []

    def fails_at_four(number: int) -> int:
        begun.append(number)
        if number == 4:
            raise ValueError("four")
        return number

    results = in_order(fails_at_four, range(1000), threads=2, ahead=3)
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="four"):
        next(results)
    assert next(results, None) is None
    assert len(begun) <= 8


def test_threads_end_when_nobody_asks_any_more() -> None:
    before = set(threading.enumerate())

    def begun() -> list[str]:
        return [each.name for each in threading.enumerate() if each not in before and "rooftop-ahead" in each.name]

    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield (number := number + 1)

    results = in_order(str, endless(), threads=2)
    assert next(results) == "1"
    assert begun()
    del results
    assert not begun()


def test_wrong_numbers_are_refused_at_once() -> None:
    assert usual_threads() >= 1
    for numbers in ({"threads": 0}, {"ahead": 0}, {"threads": -1}):
        with pytest.raises(InputError, match="expected 1 or more"):
            in_order(str, [1], **numbers)

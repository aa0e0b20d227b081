"""An iterator that works ahead can be closed anywhere, also where its own thread runs the garbage collection."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rooftop.data.prefetching import prefetched
from rooftop.media.ahead import in_order
from rooftop.thread_pools import ThreadPool


def test_calls_that_have_not_begun_are_cancelled_and_running_calls_are_awaited() -> None:
    pool, go = ThreadPool(1, "of-a-test"), threading.Event()
    running, waiting = pool.submit(go.wait, 60), pool.submit(int)
    threading.Timer(0.05, go.set).start()
    pool.shutdown(cancel_futures=True)
    assert running.result(0) is True
    assert waiting.cancelled()


def ahead(work: Callable[[int], int]) -> Iterator[int]:
    return in_order(work, range(4), threads=1, ahead=2)


def prefetch(work: Callable[[int], int]) -> Iterator[int]:
    return prefetched(map(work, range(4)), 4, lambda: None)


@pytest.mark.parametrize("begin", [ahead, prefetch])
def test_garbage_collection_in_its_thread_closes_an_abandoned_iterator(
    begin: Callable[[Callable[[int], int]], Iterator[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned, done = threading.Event(), threading.Event()
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    def work(number: int) -> int:
        if number == 1:
            abandoned.wait(60)
            gc.collect()
            done.set()
        return number

    gc.disable()  # no collection in this thread
    try:
        iterator = begin(work)
        assert next(iterator) == 0
        cycle: list[Any] = [iterator]
        cycle.append(cycle)
        del iterator, cycle
        abandoned.set()
        assert done.wait(60)
    finally:
        gc.enable()
    assert not [each.exc_value for each in raised]

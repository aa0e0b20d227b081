"""Run a function in threads ahead of the consumer, and yield the results in the order of the items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from rooftop.errors import InputError
from rooftop.hardware.cpus import usable_cpus
from rooftop.thread_pools import ThreadPool

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 8  # default maximum, because each thread may keep a whole photograph in memory


def usual_threads() -> int:
    """Return the default number of threads: one for each usable CPU, at most `MOST_THREADS`."""
    return min(usable_cpus(), MOST_THREADS)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None, ahead: int | None = None
) -> Iterator[Result]:
    """Apply `function` to each item in a pool of threads, and return the results in the order of the items.

    If the function raises for an item, the iterator raises at that item's position. After an exception, or when the
    iterator is closed, no more items are started. The function should avoid torch's operators if possible: each thread
    that calls torch starts its own team of threads.

    Args:
        function: must release the GIL for most of its time, or threads do not help.
        items: read one by one, whenever fewer than `ahead` items are pending.
        threads: the number of threads; None: `usual_threads()`.
        ahead: the maximum number of items that are started but not yet requested; None: two for each thread.

    Raises:
        InputError: `threads` or `ahead` is below 1.
    """
    threads = usual_threads() if threads is None else threads
    ahead = 2 * threads if ahead is None else ahead
    if threads < 1 or ahead < 1:
        raise InputError(f"got {threads} threads and {ahead} items ahead: expected 1 or more of each")
    return _results(function, items, threads, ahead)


def _results(function: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int) -> Iterator[Result]:
    pool = ThreadPool(threads, "rooftop-ahead")
    begun: deque[Future[Result]] = deque()
    try:
        for item in items:
            if len(begun) == ahead:
                yield begun.popleft().result()
            begun.append(pool.submit(function, item))
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)

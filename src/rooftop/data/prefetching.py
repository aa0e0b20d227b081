"""Make each item in a thread while the consumer uses the previous item."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


def prefetched(items: Iterator[Item], count: int, interrupt: Callable[[], None]) -> Iterator[Item]:
    """Yield the first `count` items; a thread makes each item while the consumer uses the previous item.

    If making an item raises, the exception is raised when the consumer requests this item.

    Args:
        items: iterator, which one thread runs.
        count: number of items.
        interrupt: makes a waiting `next(items)` raise. `interrupt` is called if the consumer stops before the last
            item.
    """
    done: SimpleQueue[tuple[Item | None, BaseException | None]] = SimpleQueue()
    room, stopped = threading.Semaphore(1), threading.Event()

    def work() -> None:
        for _ in range(count):
            room.acquire()
            if stopped.is_set():
                return
            try:
                done.put((next(items), None))
            except BaseException as error:
                done.put((None, error))
                return

    thread = threading.Thread(target=work, name="rooftop-prefetch", daemon=True)
    ended = count == 0
    thread.start()
    try:
        for number in range(count):
            item, error = done.get()
            ended = error is not None or number == count - 1
            if error is not None:
                raise error
            room.release()
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        room.release()
        if not ended:
            interrupt()
        if thread is not threading.current_thread():  # garbage collection may close the iterator in its own thread
            thread.join()

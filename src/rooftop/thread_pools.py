"""Pools of threads for iterators that read ahead."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


class ThreadPool(ThreadPoolExecutor):
    """A thread pool that can be shut down from one of its own threads.

    An abandoned iterator is closed by garbage collection, which may run in any thread, also in a thread of the
    iterator's pool. `ThreadPoolExecutor` raises there, because a thread cannot wait for its own end.
    """

    def __init__(self, threads: int, name: str) -> None:
        own: set[int] = set()
        super().__init__(threads, name, initializer=lambda: own.add(threading.get_ident()))
        self._own = own

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Start no more calls. With `wait`, wait for the running calls, except if one of them makes this call."""
        super().shutdown(wait and threading.get_ident() not in self._own, cancel_futures=cancel_futures)

"""Count page faults. At a page fault, the system provides a memory page that a program does not have yet.

The C library's `malloc` returns large blocks of memory to the system when they are freed. A step on a CPU that
allocates and frees its activations then requests the same pages each time, and the system first fills each page with
zeros. These page faults make a convolutional network slower. Whether malloc returns memory depends on the rest of the
heap. So the heap is in one of two states: malloc keeps the memory after a step, or returns it. The memory that an
analysis by Rooftop allocates can change the state of the program's heap.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["KEEP_MEMORY", "NO_FAULTS", "PageFaults", "keep_memory", "page_faults"]

MANY = 500  # this many pages per step are 2 MB, and take a few tenths of a millisecond

KEEP_MEMORY = "MALLOC_TRIM_THRESHOLD_=10000000000 MALLOC_MMAP_THRESHOLD_=10000000000 python ..."
"""A command that starts a program whose glibc malloc keeps freed memory."""


@dataclass(frozen=True)
class PageFaults:
    """Page faults of this process, including all its threads.

    Attributes:
        count: pages that the system provided without reading a disk (minor faults).
        system_ms: time for which the system worked for the process, mostly for these pages.
    """

    count: float = 0.0
    system_ms: float = 0.0

    def since(self, before: PageFaults, steps: int) -> PageFaults:
        """The mean page faults of one step. Both readings count from the start of the process; `before` was read
        `steps` steps earlier.
        """
        return PageFaults((self.count - before.count) / steps, (self.system_ms - before.system_ms) / steps)

    def step_ms(self, threads: int) -> float:
        """The time that page faults add to a step of `threads` threads.

        The system serves the page faults of one thread at a time. It is unknown whether the other threads compute
        meanwhile or wait, too. So the result is the mean of two bounds: `system_ms` divided by `threads`, and the whole
        `system_ms`.
        """
        return self.system_ms * (1 + 1 / threads) / 2

    def is_like(self, other: PageFaults) -> bool:
        """Whether two results of `since` come from the same state of the heap: both have fewer than `MANY` page faults
        per step, or the larger number is less than twice the smaller.
        """
        least, most = sorted((self.count, other.count))
        return most < MANY or most < 2 * least


NO_FAULTS = PageFaults()


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# how much free memory a process keeps, and the size of the largest block that malloc keeps
KEPT_BYTES, KEPT_PIECE = 256 << 20, 32 << 20


def page_faults() -> PageFaults:
    """Page faults since the process started. Count and time are 0 if the system does not count page faults."""
    if resource is None:
        return NO_FAULTS
    used = resource.getrusage(resource.RUSAGE_SELF)
    return PageFaults(used.ru_minflt, 1e3 * used.ru_stime)


def keep_memory() -> None:
    """Let this process keep the memory that it frees, for programs that decode photographs.

    By default glibc returns the memory to the system after each photograph, and the next photograph faults each page in
    again. For a photograph of 500 x 375 pixels, returning the memory caused 470 page faults, which took 0.8 ms of
    2.1 ms per photograph.
    """
    with suppress(AttributeError, OSError):  # the C library is not glibc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, KEPT_PIECE)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)

"""Memory pages that a program repeatedly requests from the system.

The C library's `malloc` returns large pieces to the system when they are freed. A step on a CPU that allocates and
frees its activations then requests the same pages each time, and the system first fills each page with zeros. This
makes a convolutional network slower. Whether malloc returns memory depends on the rest of the heap. So a step is in one
of two states, and an analysis, which uses memory, can move it to the other state.
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

MANY = 500  # pages of a step: 2 MB, which take a few tenths of a millisecond

KEEP_MEMORY = "MALLOC_TRIM_THRESHOLD_=10000000000 MALLOC_MMAP_THRESHOLD_=10000000000 python ..."
"""How to start a program so that glibc's malloc keeps freed memory."""


@dataclass(frozen=True)
class PageFaults:
    """Page faults of this process, including all its threads.

    Attributes:
        count: pages that the system provided without reading a disk (minor faults).
        system_ms: time that the system worked for the process, most of it for these pages.
    """

    count: float = 0.0
    system_ms: float = 0.0

    def since(self, before: PageFaults, steps: int) -> PageFaults:
        """The mean over `steps` steps since `before`."""
        return PageFaults((self.count - before.count) / steps, (self.system_ms - before.system_ms) / steps)

    def step_ms(self, threads: int) -> float:
        """The time that page faults add to a step of `threads` threads.

        The system serves one thread at a time, and it is unknown whether the other threads wait meanwhile. So this is
        the mean of two bounds: one thread's share of the time, and all of it.
        """
        return self.system_ms * (1 + 1 / threads) / 2

    def is_like(self, other: PageFaults) -> bool:
        """Whether steps with these faults are in the same state: both have few faults, or about equally many."""
        least, most = sorted((self.count, other.count))
        return most < MANY or most < 2 * least


NO_FAULTS = PageFaults()


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES, KEPT_PIECE = 256 << 20, 32 << 20  # a process keeps so much free memory; the largest piece that malloc keeps


def page_faults() -> PageFaults:
    """Page faults since the process started. All counts are 0 if the system does not count page faults."""
    if resource is None:
        return NO_FAULTS
    used = resource.getrusage(resource.RUSAGE_SELF)
    return PageFaults(used.ru_minflt, 1e3 * used.ru_stime)


def keep_memory() -> None:
    """Let this process keep the memory that it frees, for programs that decode photographs.

    glibc gives it back to the system after each photograph, and the next one faults each page in again: 470 faults and
    0.8 ms of the 2.1 ms that a photograph of 500 x 375 pixels took.
    """
    with suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, KEPT_PIECE)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)

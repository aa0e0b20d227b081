"""Pages of memory that a program takes from the system anew.

The C library's `malloc` gives large pieces back to the system when they are freed. A step on a CPU that allocates and
frees its activations then takes the same pages again each time, and the system fills each page with zeros first. A
convolutional network is slower by that. Whether malloc gives memory back depends on what else lies in the heap: a step
is in one of two states, and the records of an analysis can move it from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["KEEP_MEMORY", "NO_FAULTS", "PageFaults", "page_faults"]

MANY = 500  # pages of a step: 2 MB, which take a few tenths of a millisecond

KEEP_MEMORY = "MALLOC_TRIM_THRESHOLD_=10000000000 MALLOC_MMAP_THRESHOLD_=10000000000 python ..."
"""How to start a program so that glibc's malloc keeps what is freed."""


@dataclass(frozen=True)
class PageFaults:
    """Page faults of this process, all its threads included.

    Attributes:
        count: pages that the system gave it without reading a disk (minor faults).
        system_ms: time that the system worked for the process, most of it for those pages.
    """

    count: float = 0.0
    system_ms: float = 0.0

    def since(self, before: PageFaults, steps: int) -> PageFaults:
        """The mean of so many steps since then."""
        return PageFaults((self.count - before.count) / steps, (self.system_ms - before.system_ms) / steps)

    def step_ms(self, threads: int) -> float:
        """By how much they lengthen a step that so many threads work on.

        The system works for one thread at a time; whether the others wait meanwhile is not known. This is the middle
        between its share of each thread and all of it.
        """
        return self.system_ms * (1 + 1 / threads) / 2

    def is_like(self, other: PageFaults) -> bool:
        """Whether steps with these faults are in the same state: few pages in both, or about as many."""
        least, most = sorted((self.count, other.count))
        return most < MANY or most < 2 * least


NO_FAULTS = PageFaults()


def page_faults() -> PageFaults:
    """Those since the process began. All are 0 where the system does not count them."""
    if resource is None:
        return NO_FAULTS
    used = resource.getrusage(resource.RUSAGE_SELF)
    return PageFaults(used.ru_minflt, 1e3 * used.ru_stime)

"""Pages of memory that a program takes from the system anew.

The C library's `malloc` gives large pieces back to the system when they are freed. A step on a CPU that allocates and
frees its activations then takes the same pages again each time, and the system fills each with zeros first, which shows
in the time of a convolutional network. Whether malloc does so depends on what else lies in the heap, so two runs of one
step may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["KEEP_MEMORY", "PageFaults", "page_faults"]

KEEP_MEMORY = "MALLOC_TRIM_THRESHOLD_=10000000000 MALLOC_MMAP_THRESHOLD_=10000000000 python ..."
"""How to start a program so that glibc's malloc keeps what is freed."""


@dataclass(frozen=True)
class PageFaults:
    """Of this process and all its threads; differences and quotients of them are per step.

    Attributes:
        count: pages taken without reading a disk.
        system_ms: time that the system worked for the process, most of it for those pages.
    """

    count: float = 0.0
    system_ms: float = 0.0

    def since(self, before: PageFaults, steps: int) -> PageFaults:
        """Of each of so many steps since then."""
        return PageFaults((self.count - before.count) / steps, (self.system_ms - before.system_ms) / steps)


def page_faults() -> PageFaults:
    """Until now; none where the system does not count them."""
    if resource is None:
        return PageFaults()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return PageFaults(used.ru_minflt, 1e3 * used.ru_stime)

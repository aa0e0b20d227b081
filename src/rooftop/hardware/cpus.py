"""The CPUs that this process may use. This file does not load torch, so that worker processes start quickly."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use; where the system does not tell, all CPUs."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

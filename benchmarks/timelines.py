"""Read a step from a profiler's timeline: the time of communication, the part of it without computation, and the time
of kernels by kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]
"""The times (begin, end) of an event."""

STEP = "rooftop: step"  # the measured step's name on the timeline
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATION = ("nccl", "ptop", "peer", "symm")
"""Lower-case parts of the names of NCCL's kernels, and of copies between GPUs, which asynchronous tensor parallelism
uses."""

KINDS = {
    "communication": COMMUNICATION,
    "attention": ("attention", "attn", "flash", "fmha", "sdpa"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "matmul", "linear"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "copies": ("memcpy", "memset"),
}
"""For each kind, lower-case parts of kernels' names. A kernel's kind is the first kind that matches."""
OTHERS = "others"


@dataclass(frozen=True)
class Communication:
    """Times in one step of a rank, in ms: with communication, with communication but no other work, and with any
    work."""

    total_ms: float
    exposed_ms: float
    busy_ms: float


def communication(trace: Path) -> Communication:
    """Read the step's communication times from torch.profiler's chrome trace. Waiting for other ranks in a collective
    counts as communication.

    Raises:
        ValueError: the trace has no event named `STEP`, or no GPU work within it.
    """
    work = work_of_step(trace)
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in work:
        name = event["name"].lower()
        spans[any(part in name for part in COMMUNICATION)].append((event["ts"], event["ts"] + event["dur"]))
    communicating, computing = merged(spans[True]), merged(spans[False])
    every = length(merged([*communicating, *computing]))
    return Communication(length(communicating) / 1e3, (every - length(computing)) / 1e3, every / 1e3)


def by_kind(trace: Path) -> dict[str, float]:
    """The ms that kernels and copies of the step took, added up by `KINDS`, the longest first. Raises the same errors
    as `communication`."""
    found: dict[str, float] = {}
    for event in work_of_step(trace):
        name = event["name"].lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHERS)
        found[kind] = found.get(kind, 0.0) + event["dur"] / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def work_of_step(trace: Path) -> list[dict[str, Any]]:
    """Kernels, copies and fills of the last step on the timeline."""
    events = json.loads(trace.read_text())["traceEvents"]
    marks = [event for event in events if event.get("name") == STEP and event.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError(f"{trace}: the trace has no event named {STEP!r}")
    begin, end = marks[-1]["ts"], marks[-1]["ts"] + marks[-1]["dur"]
    work = [event for event in events if event.get("cat") in WORK and begin <= event["ts"] <= end]
    if not work:
        raise ValueError(f"{trace}: the step has no GPU work")
    return work


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, as disjoint spans in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """The total length of disjoint spans."""
    return sum(end - begin for begin, end in spans)

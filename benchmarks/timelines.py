"""Read a step from a profiler's timeline: how long communication took, how much of that was without computation, and
the time of kernels by kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]
"""Beginning and end."""

STEP = "rooftop: step"  # name of the measured step on the timeline
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATION = ("nccl", "ptop", "peer", "symm")
"""Parts of names, in lower case, of NCCL's kernels and of copies between GPUs, which asynchronous tensor parallelism
uses."""

KINDS = {
    "communication": COMMUNICATION,
    "attention": ("attention", "attn", "flash", "fmha", "sdpa"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "matmul", "linear"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "copies": ("memcpy", "memset"),
}
"""For each kind, parts of kernels' names, in lower case. The first kind that matches is the kernel's."""
OTHERS = "others"


@dataclass(frozen=True)
class Communication:
    """Times of one step of a rank, in ms: any communication; communication without other work; any work at all."""

    total_ms: float
    exposed_ms: float
    busy_ms: float


def communication(trace: Path) -> Communication:
    """Read the step's communication from a chrome trace of torch.profiler. Waiting for other ranks in a collective
    counts as communication.

    Raises:
        ValueError: the trace has no step, or no work of a GPU.
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
    """The ms that kernels and copies of the step took, added up by `KINDS`, the longest first. Errors are those of
    `communication`."""
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
        raise ValueError(f"{trace}: nothing on it is called {STEP!r}")
    begin, end = marks[-1]["ts"], marks[-1]["ts"] + marks[-1]["dur"]
    work = [event for event in events if event.get("cat") in WORK and begin <= event["ts"] <= end]
    if not work:
        raise ValueError(f"{trace}: no work of a GPU in the step")
    return work


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, as disjoint spans in order."""
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

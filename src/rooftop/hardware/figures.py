"""The *figures* of a machine: the values that a measurement of ceilings finds, by name. This file also decides which
of two values of a figure is better.

    memory 25165824 copy              bytes/s of a pattern at a working set in bytes
    flops bf16, sustained bf16        flop/s in a short burst at full clocks, and in continuous work
    transfers device_to_host_pinned   bytes/s between host and device
    links all_reduce_8_gpus           bytes/s between GPUs
    pulse product                     the present speed of a CPU (see `pulse`), which is not a ceiling
    kernel_floor_ms, launch_eager_ms, launch_graph_ms

A figure is the best of its samples. A figure counts as reproduced if its second best sample is close.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIB = 1 << 20
DISTURBED_SPREAD = 0.10
"""Two samples do not confirm each other if they differ by more than this share of the larger sample."""

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
KINDS = ("flops", "sustained", "pulse", "transfers", "links")  # the first words of figures whose names have two words
LAUNCHES = ("kernel_floor_ms", "launch_eager_ms", "launch_graph_ms")
PATTERNS = ("read", "write", "copy", "triad", "cast", "update", "raised", "raised_in_place")
"""Last words of the names of bandwidth figures. The first six are access patterns; "raised" and "raised_in_place" are
rates that operators of a program reached."""


def better(name: str, one: float, other: float) -> float:
    """The better of two values of a figure: the shorter time or the higher rate."""
    return min(one, other) if name.endswith("_ms") else max(one, other)


def memory_figure(working_set_bytes: int, pattern: str) -> str:
    """The name of a bandwidth figure: a pattern ("read", "copy", ...) over a working set of this many bytes."""
    return f"memory {working_set_bytes} {pattern}"


def part_of(name: str) -> str:
    """The part of a measurement that produces a figure: "memory", "launches", "transfers", "links", or a precision."""
    kind, _, rest = name.partition(" ")
    if kind in ("flops", "sustained"):
        return rest
    return kind if kind in ("memory", "transfers", "links") else "launches"


def in_words(name: str) -> str:
    """A figure's name for readers: "matrix bf16", "copy in 24 MiB", "device to host pinned"."""
    kind, _, rest = name.partition(" ")
    if kind == "memory":
        size, _, pattern = rest.partition(" ")
        return f"{pattern} in {size_in_words(int(size))}"
    if kind == "flops":
        return f"matrix {rest}"
    return (f"sustained {rest}" if kind == "sustained" else rest or name.removesuffix("_ms")).replace("_", " ")


def size_in_words(size: int) -> str:
    """Format a number of bytes: "24 MiB"."""
    return f"{size / MIB:.3g} MiB" if size < 1000 * MIB else f"{size / MIB:.0f} MiB"


def part_in_words(words: str) -> str:
    """Find the part (see `part_of`) of a figure from its name for readers (see `in_words`). The function also reads
    the names in ceilings files of format 1 ("read 2 MiB" instead of "read in 2 MiB")."""
    first, _, rest = words.partition(" ")
    if first in ("matrix", "convolution", "sustained"):
        return rest
    if first == "memory" or words.endswith(("MiB", "KiB")):
        return "memory"
    if first in ("launch", "kernel"):
        return "launches"
    return "transfers" if words.replace("_", " ").startswith(("host to device", "device to host")) else "links"


@dataclass(frozen=True)
class Raise:
    """A record that a program's operator exceeded a ceiling, so that the ceiling was raised (or the kernel floor
    lowered).

    Attributes:
        figure: name of the figure.
        before, after: values of the figure.
        by: text that names the operator.
        at: the time, UTC, ISO 8601.
    """

    figure: str
    before: float
    after: float
    by: str
    at: str


class Samples:
    """Collect measured values, and keep the best two of each figure."""

    def __init__(self) -> None:
        self._two: dict[str, list[float]] = {}

    def add(self, name: str, values: Iterable[float]) -> None:
        """Add samples of a figure. Values that are not positive are ignored, because the clock did not advance."""
        found = [*self._two.get(name, ()), *(value for value in values if 0 < value < math.inf)]
        if found:
            self._two[name] = sorted(found, reverse=not name.endswith("_ms"))[:2]

    @property
    def figures(self) -> dict[str, float]:
        return {name: values[0] for name, values in self._two.items()}

    @property
    def spread(self) -> dict[str, float]:
        """For each figure, the relative distance of its best two samples. A figure with a single sample is omitted."""
        return {name: distance(*values) for name, values in self._two.items() if len(values) > 1}


def distance(one: float, other: float) -> float:
    """The difference of two positive figures, divided by the larger figure."""
    return abs(one - other) / max(one, other)


def best_of(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The best sample of each figure."""
    best: dict[str, float] = {}
    for figures in several:
        for name, value in figures.items():
            best[name] = better(name, best[name], value) if name in best else value
    return best

"""The memory ladder: how long one load takes at each level of the memory, how many bytes a second, and Little's law.

Little's law (Little 1961, "A proof for the queuing formula L = lambda W") says what joins the two: to keep a memory of
`rate` bytes/s busy whose loads take `latency`, rate x latency bytes must be on their way at any time. They come from
concurrency (loads that one thread starts before it uses the first) times parallelism (threads that load at a time).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Level:
    """One level of the memory.

    Attributes:
        name: "registers", "shared memory", "L1", "L2", "L3", "DRAM", "device memory", "host memory".
        working_set_bytes: that was loaded from; 0 of registers.
        latency_ns: of a load whose address is the result of the load before; of registers, of a multiply-add.
        rate: bytes/s that all cores or multiprocessors load.
        units: cores or multiprocessors that did so.
        line_bytes: that one load of the chain brings.
    """

    name: str
    working_set_bytes: int
    latency_ns: float
    rate: float
    units: int
    line_bytes: int

    @property
    def in_flight_bytes(self) -> float:
        """By Little's law: what must be on its way for this rate."""
        return 1e-9 * self.latency_ns * self.rate


@dataclass(frozen=True)
class Flight:
    """Loads from the farthest memory of the device, at one concurrency and one parallelism.

    Attributes:
        concurrency: loads that a thread has on their way.
        parallelism: threads that load at a time.
        bytes_each: of a load.
        rate: bytes/s, measured.
        expected: bytes/s by Little's law: what is on its way over the latency, the level's rate at most.
    """

    concurrency: int
    parallelism: int
    bytes_each: int
    rate: float
    expected: float

    @property
    def in_flight_bytes(self) -> int:
        """What is on its way."""
        return self.concurrency * self.parallelism * self.bytes_each


@dataclass(frozen=True)
class MemoryClimb:
    """All levels of a device, nearest first, and the law tried in the farthest of its own.

    Attributes:
        device, kind: its name; "cpu" or "cuda".
        unit: what `Level.units` counts, "core" or "multiprocessor".
        flights: of the level `flown`.
        other_cores: how many cores of the CPU other programs kept busy meanwhile.
    """

    device: str
    kind: str
    unit: str
    levels: tuple[Level, ...]
    flown: str
    flights: tuple[Flight, ...]
    other_cores: float
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        plain = asdict(self)
        for level, each in zip(plain["levels"], self.levels, strict=True):
            level["in_flight_bytes"] = each.in_flight_bytes
        return plain


def expected_rate(in_flight_bytes: int, level: Level) -> float:
    """By Little's law, bytes/s."""
    return min(level.rate, 1e9 * in_flight_bytes / level.latency_ns)

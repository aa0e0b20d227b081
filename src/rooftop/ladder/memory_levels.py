"""The memory ladder: how long one load takes from each level of the memory, and how many bytes arrive per second.

Little's law (Little 1961, "A proof for the queuing formula L = lambda W") connects latency and rate: if a load takes
`latency` and the memory delivers `rate` bytes/s, rate x latency bytes must be in flight to keep the memory busy. The
number of loads in flight is concurrency (loads that one thread starts before it uses the first) times parallelism
(threads that load at the same time).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Level:
    """One level of the memory.

    Attributes:
        name: "registers", "shared memory", "L1", "L2", "L3", "DRAM", "device memory", "host memory".
        working_set_bytes: size of the memory that the loads read; 0 for registers.
        latency_ns: latency of a load whose address is the result of the previous load. For registers, latency of a
            multiply-add.
        rate: bytes/s that all cores or multiprocessors load together. For registers, a multiply-add counts as 16 bytes,
            because it reads three registers and writes one.
        units: number of cores or multiprocessors that loaded.
        line_bytes: size of a cache line. Each load of a chain fetches one line from a cache or from memory. For
            registers and shared memory, this number has no meaning.
    """

    name: str
    working_set_bytes: int
    latency_ns: float
    rate: float
    units: int
    line_bytes: int

    @property
    def in_flight_bytes(self) -> float:
        """The bytes that must be on their way from this level at any time to reach its rate: latency times rate, by
        Little's law.
        """
        return 1e-9 * self.latency_ns * self.rate


@dataclass(frozen=True)
class Flight:
    """A measurement of loads from the device's farthest memory, for one combination of the number of threads and the
    number of loads that each thread has in flight.

    Attributes:
        concurrency: loads that a thread has in flight.
        parallelism: threads that load at the same time.
        bytes_each: bytes of one load.
        rate: bytes/s, measured.
        expected: bytes/s by Little's law: the bytes in flight divided by the latency, and at most the level's rate.
    """

    concurrency: int
    parallelism: int
    bytes_each: int
    rate: float
    expected: float

    @property
    def in_flight_bytes(self) -> int:
        """The bytes that all threads together are loading at any time."""
        return self.concurrency * self.parallelism * self.bytes_each


@dataclass(frozen=True)
class MemoryClimb:
    """All levels of a device's memory, the nearest first, and a test of Little's law in the farthest level on the
    device.

    Attributes:
        device, kind: the device's name; "cpu" or "cuda".
        unit: the unit that `Level.units` counts, "core" or "multiprocessor".
        flights: measurements with different numbers of loads in flight.
        flown: name of the level in which these loads were measured.
        other_cores: CPU cores that other programs kept busy during the measurement.
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
    """The bytes/s that Little's law predicts."""
    return min(level.rate, 1e9 * in_flight_bytes / level.latency_ns)

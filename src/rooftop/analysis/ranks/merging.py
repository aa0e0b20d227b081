"""Compare the ranks of a distributed step: exposed communication, stragglers, imbalance.

Communication is *exposed* while nothing else runs on the device. Exposed communication makes the step longer.

All ranks leave a collective together, so all ranks need the same time for a step, even if one rank is late. Ranks
differ in their *own* time, the wall time without the exposed communication. When a late rank arrives, the other ranks
are already waiting. So the late rank has the least exposed communication and the largest own time. If another rank has
more exposed communication than the late rank, it *waited* for the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from rooftop.analysis.formats import time_text

LEAST_IMBALANCE = 0.10
"""A rank is not a straggler if its own time exceeds the mean by less than this fraction."""
NOISE_SPREADS = 3.0
"""A rank is a straggler only if its own time exceeds the mean by more than this multiple of the largest `own_spread_ms`
of the ranks.
"""


@dataclass(frozen=True)
class RankRow:
    """One rank's step, as medians over some steps under the profiler, in ms.

    Attributes:
        rank, device: the rank and its device, with the host's name if there are several hosts.
        wall_ms: wall time of a step.
        busy_ms: time in which the GPU works, or in which operators or collectives run on the CPU.
        communication_ms: time in which collectives, sends and receives run.
        exposed_ms: the part of the communication during which nothing else runs on the device.
        waited_ms: the part of exposed_ms in which the rank waits for a slower rank (0 until `compared` computes it).
        own_spread_ms: interquartile range of the own time (see `own_ms`) over the steps.
    """

    rank: int
    device: str
    wall_ms: float
    busy_ms: float
    communication_ms: float
    exposed_ms: float
    waited_ms: float = 0.0
    own_spread_ms: float = 0.0

    @property
    def own_ms(self) -> float:
        """The wall time minus the exposed communication."""
        return self.wall_ms - self.exposed_ms


@dataclass(frozen=True)
class Ranks:
    """All ranks of a step, by rank (see `compared`)."""

    rows: tuple[RankRow, ...]

    @property
    def slowest(self) -> RankRow:
        """The rank with the largest own time."""
        return max(self.rows, key=lambda row: row.own_ms)

    @property
    def mean_own_ms(self) -> float:
        return fmean(row.own_ms for row in self.rows)

    @property
    def imbalance(self) -> float:
        """(largest own time - mean own time) / mean own time."""
        return (self.slowest.own_ms - self.mean_own_ms) / self.mean_own_ms if self.mean_own_ms > 0 else 0.0

    @property
    def straggler(self) -> int | None:
        """The slow rank for which the other ranks wait, or would wait if they communicated; None if there is none. A
        straggler's own time exceeds the mean by more than 10%, and by more than three times the largest `own_spread_ms`
        of the ranks."""
        excess_ms = self.slowest.own_ms - self.mean_own_ms
        noise_ms = NOISE_SPREADS * max(row.own_spread_ms for row in self.rows)
        late = len(self.rows) > 1 and self.imbalance > LEAST_IMBALANCE and excess_ms > noise_ms
        return self.slowest.rank if late else None

    @property
    def wall_ms(self) -> float:
        """Wall time of a step: the mean over the ranks."""
        return fmean(row.wall_ms for row in self.rows)

    @property
    def waited_ms(self) -> float:
        """Waiting time of the rank that waits the longest."""
        return max(row.waited_ms for row in self.rows)

    @property
    def transfer_ms(self) -> float:
        """Exposed communication without waiting: the smallest exposed communication of any rank."""
        return min(row.exposed_ms for row in self.rows)

    @property
    def exposed_share(self) -> float:
        """Exposed communication divided by wall time, each summed over all ranks."""
        return fmean(row.exposed_ms for row in self.rows) / self.wall_ms if self.wall_ms > 0 else 0.0

    @property
    def sentence(self) -> str:
        """A sentence that sums up the rows."""
        exposed = (
            f"On average {100 * self.exposed_share:.0f}% of a step is exposed communication, "
            f"{time_text(self.transfer_ms)} of it without waiting for another rank."
        )
        if self.straggler is None:
            return f"No rank of {len(self.rows)} holds the others up (imbalance {100 * self.imbalance:.0f}%). {exposed}"
        late = self.slowest
        others_ms = fmean(row.own_ms for row in self.rows if row is not late)
        verb = "holds the others up" if self.waited_ms > 0 else "is slower than the others"
        return (
            f"Rank {late.rank} ({late.device}) {verb}: by itself it needs {time_text(late.own_ms)} a step, "
            f"{time_text(late.own_ms - others_ms)} more than the others. {exposed}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, including the values derived from the rows."""
        return {
            "rows": [{**asdict(row), "own_ms": row.own_ms} for row in self.rows],
            "straggler": self.straggler,
            "imbalance": self.imbalance,
            "exposed_share": self.exposed_share,
            "sentence": self.sentence,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Ranks:
        """Read the result of `to_dict`.

        Raises:
            ValueError: the data are not rows of ranks.
        """
        try:
            names = RankRow.__dataclass_fields__
            rows = tuple(RankRow(**{name: row[name] for name in names}) for row in plain["rows"])
            for row in rows:
                _require_values(row)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the table of ranks is damaged: {type(error).__name__} {error}") from error
        if not rows:
            raise ValueError("the table of ranks is damaged: expected at least one row, got none")
        return cls(rows)


def compared(rows: Iterable[RankRow]) -> Ranks:
    """The rows by rank, with waiting times. A rank's waiting time is its exposed communication minus the smallest
    exposed communication of any rank."""
    rows = sorted(rows, key=lambda row: row.rank)
    least_ms = min(row.exposed_ms for row in rows)
    return Ranks(tuple(replace(row, waited_ms=row.exposed_ms - least_ms) for row in rows))


def _require_values(row: RankRow) -> None:
    for name, value in asdict(row).items():
        if not isinstance(value, str if name == "device" else (int, float)):
            raise TypeError(f"{name} is {value!r}")

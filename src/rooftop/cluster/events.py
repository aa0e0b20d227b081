"""Events that workers report to the process that started them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rooftop.cluster.working import Chunk, Outcome


@dataclass(frozen=True)
class Finished:
    """A finished chunk."""

    chunk: Chunk
    outcome: Outcome


@dataclass(frozen=True)
class Lost:
    """A chunk that was lost with its worker.

    Attributes:
        why: the reason why the chunk's worker ended; None: the chunk did not cause it.
        deaths: number of workers that ended while they had the chunk.
    """

    chunk: Chunk
    why: str | None
    deaths: int = 1


@dataclass(frozen=True)
class Hung:
    """A chunk that was abandoned because the items [first, first + count) took too long."""

    chunk: Chunk
    first: int
    count: int


Event = Finished | Lost | Hung


class Workers(Protocol):
    """Processes that do chunks, on this machine or of a scheduler.

    Attributes:
        start: seconds of the parts of the slowest worker's start, as far as they are known.
    """

    start: dict[str, float]

    def has_room(self, careful: bool = False) -> bool:
        """Whether there is room for a chunk now; a careful chunk needs a worker for itself."""

    def give(self, chunk: Chunk) -> None:
        """Give a chunk; there must be room."""

    def take(self, patience_s: float) -> list[Event]:
        """Return new events; after `patience_s` without any, return an empty list."""

    def close(self, at_once: bool = False) -> None:
        """End the workers, after all chunks are done or at once."""

"""Events that workers report to the process that started them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rooftop.cluster.working import Chunk, Outcome


@dataclass(frozen=True)
class Finished:
    """Reports a finished chunk."""

    chunk: Chunk
    outcome: Outcome


@dataclass(frozen=True)
class Lost:
    """Reports a chunk that was lost with its worker.

    Attributes:
        why: the reason why the worker ended; None: the chunk did not cause the loss.
        deaths: number of workers that have ended because of the chunk, if `why` is not None.
    """

    chunk: Chunk
    why: str | None
    deaths: int = 1


@dataclass(frozen=True)
class Hung:
    """Reports a chunk that was abandoned because its items `first` to `first + count - 1` exceeded the time limit."""

    chunk: Chunk
    first: int
    count: int


Event = Finished | Lost | Hung


class Workers(Protocol):
    """Processes that compute chunks, on this machine or as workers of a scheduler.

    Attributes:
        start: seconds of each known phase of the slowest worker's startup, by name.
    """

    start: dict[str, float]

    def has_room(self, careful: bool = False) -> bool:
        """Whether a worker has room for a chunk now. A careful chunk (an item that may kill workers) needs a worker
        without other chunks."""

    def give(self, chunk: Chunk) -> None:
        """Give a chunk to a worker. `has_room` must be true."""

    def take(self, patience_s: float) -> list[Event]:
        """Wait for new events and return them. After `patience_s` without any, return an empty list."""

    def close(self, at_once: bool = False) -> None:
        """End the workers. `at_once`: even during chunks, whose results are then lost. Otherwise all chunks must be
        finished before."""

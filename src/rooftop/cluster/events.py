"""What workers, wherever they are, tell the process that has started them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rooftop.cluster.working import Chunk, Outcome


@dataclass(frozen=True)
class Finished:
    """A chunk that is done."""

    chunk: Chunk
    outcome: Outcome


@dataclass(frozen=True)
class Lost:
    """A chunk that nobody works on any more.

    Attributes:
        why: what ended the worker that was at it; None: the chunk has no part in it.
        deaths: of workers that were at it.
    """

    chunk: Chunk
    why: str | None
    deaths: int = 1


@dataclass(frozen=True)
class Hung:
    """A chunk that was given up because the items [first, first + count) took too long."""

    chunk: Chunk
    first: int
    count: int


Event = Finished | Lost | Hung


class Workers(Protocol):
    """Processes that do chunks: on this machine, or of a scheduler."""

    def has_room(self, careful: bool = False) -> bool:
        """Whether a chunk can be given now; a careful one gets a worker alone."""

    def give(self, chunk: Chunk) -> None:
        """Give a chunk; there must be room."""

    def take(self, patience_s: float) -> list[Event]:
        """What has happened, after a while if nothing has."""

    def close(self, at_once: bool = False) -> None:
        """End, once all chunks are done, or at once."""

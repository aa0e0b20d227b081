"""Find which ranks are waiting, for which collective and rank, and for how long, from all ranks' reports (`Place`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rooftop.parallel.flight_records import lacks, ranks_in_words
from rooftop.parallel.places import Place

NOTE_S = 20.0
"""Seconds after which a note names the rank that others wait for. This rank may be healthy, so the note does not end
any rank."""
MOST_SHOWN = 3


def context(places: Mapping[int, Place], culprits: Collection[int]) -> str:
    """The end of an error message ("; ..."): the communication that other ranks waited for, and the last reports of
    the failed ranks."""
    awaited: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        if rank not in culprits and (words := _awaited(place, culprits)):
            awaited.setdefault(words, []).append(rank)
    most = sorted(awaited.items(), key=lambda each: -len(each[1]))[:MOST_SHOWN]
    parts = [f"{ranks_in_words(ranks)} {'await' if len(ranks) > 1 else 'awaits'} the {words}" for words, ranks in most]
    return "".join(f"; {part}" for part in (*parts, *_lasts(places, culprits, "was last at")))


def _awaited(place: Place, culprits: Collection[int]) -> str:
    of_them = [each for each in place.operations if set(each.ranks) & set(culprits)]
    if of_them:
        return of_them[0].words
    return place.awaited.removeprefix("the ")


def _lasts(places: Mapping[int, Place], ranks: Collection[int], verb: str) -> list[str]:
    known = [rank for rank in ranks if rank in places and places[rank].words]
    return [f"rank {rank} {verb} {places[rank].words}" for rank in known[:MOST_SHOWN]]


@dataclass(frozen=True)
class Wait:
    """Ranks that keep others waiting.

    Attributes:
        words: a message that says which ranks keep others waiting, for how long, and at which line these ranks are.
        culprits: the ranks that keep others waiting; empty if all ranks are waiting.
        seconds: how long the others have been waiting.
    """

    words: str
    culprits: tuple[int, ...]
    seconds: float


class Waits:
    """One rank's record of how long each rank has been waiting."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._since: dict[int, tuple[object, float]] = {}

    def look(self, places: Mapping[int, Place], now: float) -> Wait | None:
        """Return the longest wait if it has lasted for `NOTE_S`. Return None if the awaited rank has announced long
        work.

        Args:
            places: the current activity of each rank.
            now: the current time in seconds.
        """
        for rank, place in places.items():
            awaited = place.operations[0] if place.operations else place.awaited or None
            if awaited is None:
                self._since.pop(rank, None)
            elif rank not in self._since or self._since[rank][0] != awaited:
                self._since[rank] = awaited, now
        lasted = {rank: now - since for rank, (_, since) in self._since.items() if now - since >= NOTE_S}
        if not lasted:
            return None
        found = [
            each
            for each in lacks({rank: place.operations for rank, place in places.items()})
            if set(each.awaited_by) & lasted.keys()
        ]
        culprits = found[0].by if found else tuple(rank for rank in places if rank not in self._since)
        if any(places[rank].long for rank in culprits if rank in places):
            return None
        seconds = max(lasted.values())
        waited = f"for {seconds:.0f} s {found[0].words}" if found else self._by_words(places, lasted, seconds)
        return Wait("; ".join([waited, *_lasts(places, culprits, "is at")]), culprits, seconds)

    def _by_words(self, places: Mapping[int, Place], lasted: Mapping[int, float], seconds: float) -> str:
        rank = min(lasted)
        return f"for {seconds:.0f} s rank {rank} awaits {places[rank].awaited}"

"""The loops of the memory ladder on a CPU, compiled by Numba. Importing this file imports Numba."""

from __future__ import annotations

from typing import Any

from rooftop.launch.numba_loops import kept_loop


@kept_loop
def chase(following: Any, place: Any, hops: Any) -> Any:
    """Follow a chain for `hops` hops and return the index reached. Each address is the result of the previous load."""
    for _ in range(hops):
        place = following[place]
    return place


@kept_loop
def chase_several(following: Any, places: Any, hops: Any) -> None:
    """Follow several independent chains, interleaved, so that the processor loads for one chain while it waits for
    another. This advances `places`."""
    for _ in range(hops):
        for chain in range(places.size):
            places[chain] = following[places[chain]]


@kept_loop
def read(values: Any, times: Any) -> Any:
    """Read all values `times` times, with vector instructions. Pass n adds up values ^ n (exclusive or). Since n
    changes, the compiler cannot drop a pass.
    """
    total = 0
    for turn in range(times):
        for i in range(values.size):
            total += values[i] ^ turn
    return total

"""The loops of the memory ladder on a CPU, compiled by Numba. Importing this file imports Numba."""

from __future__ import annotations

from typing import Any

from rooftop.launch.numba_loops import kept_loop


@kept_loop
def chase(following: Any, place: Any, hops: Any) -> Any:
    """Follow a chain of indices for `hops` loads, place = following[place], and return the last index. Each load must
    wait for the one before it.
    """
    for _ in range(hops):
        place = following[place]
    return place


@kept_loop
def chase_several(following: Any, places: Any, hops: Any) -> None:
    """Make `hops` loads in each of several independent chains of indices, in turns. So the processor can load for one
    chain while it waits for another. The result, the index reached in each chain, is in `places`."""
    for _ in range(hops):
        for chain in range(places.size):
            places[chain] = following[places[chain]]


@kept_loop
def read(values: Any, times: Any) -> Any:
    """Read all values `times` times, with vector instructions, and return a sum of what was read. Pass n adds up values
    ^ n (exclusive or). Since n changes, the compiler cannot drop a pass.
    """
    total = 0
    for turn in range(times):
        for i in range(values.size):
            total += values[i] ^ turn
    return total

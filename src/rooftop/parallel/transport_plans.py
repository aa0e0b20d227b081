"""Choose the transport of context parallel attention from a measured table or a formula, if the user names none.

The formula computes the exposed time of a forward pass on the busiest rank, in seconds:

    p2p          for each step, the transfer of its rows minus the computation with the previous rows, plus a merge
    all_gather   the transfer of all rows minus the computation with the rank's own rows, plus one merge
    a2a          the whole transfer, since attention waits for it

Backward takes about twice as long as forward for every transport, so it does not change the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

RATE = 4e14
"""Rate of attention in flop/s, as measured on one H100 in bfloat16, forward and backward, with 32 k to 64 k positions
(results/h100/context_attention.json).
"""
LINK = 1.5e11
"""A rank's NVLink rate in bytes/s while it sends and receives at the same time. This rate is assumed and not yet
measured."""
MERGE = 1.5e12
"""Bytes per second that a merge reads and writes. This rate is assumed to be about half of an H100's memory
bandwidth."""
START_S = 2e-5  # seconds to start an exchange
WIDTH = 2  # bytes per element


@dataclass(frozen=True)
class Exchange:
    """The sizes on which the choice depends.

    Attributes:
        heads, kv_heads: number of query heads, and of key heads, that a tensor parallel rank has.
        features: features of a head.
        length: positions of a sequence.
        ranks: number of context parallel ranks.
        windows: whether layers have attention windows.
    """

    heads: int
    kv_heads: int
    features: int
    length: int
    ranks: int
    windows: bool = False

    def __post_init__(self) -> None:
        sizes = (self.heads, self.kv_heads, self.features, self.length, self.ranks)
        if min(sizes) < 1:
            raise ValueError(f"Exchange: heads, kv_heads, features, length and ranks must be positive, got {sizes}")


@dataclass(frozen=True)
class TransportPlan:
    """A transport and the reason for it.

    Attributes:
        transport: one of `rooftop.parallel.TRANSPORTS`.
        reason: a text that explains the choice.
        exposed_s: the exposed seconds that the formula estimates for each possible transport.
    """

    transport: str
    reason: str
    exposed_s: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """The transport that was measured as fastest, forward and backward, with `ranks` context parallel ranks and
    sequences of at least `least_length` positions."""

    ranks: int
    least_length: int
    transport: str


# benchmarks/context.py, two H100s: p2p is the fastest at 32 k and 64 k positions, with and without documents.
TABLE = (Measured(ranks=2, least_length=32768, transport="p2p"),)


def choose_transport(exchange: Exchange) -> TransportPlan:
    """Choose the transport for an exchange. "a2a+p2p" is never chosen, since only the user knows which ranks are
    close."""
    exposed = {name: seconds for name, seconds in _exposed_s(exchange).items() if _can(name, exchange)}
    for row in TABLE:
        if row.ranks == exchange.ranks and exchange.length >= row.least_length and row.transport in exposed:
            return TransportPlan(row.transport, "fastest by the table", exposed)
    best = min(exposed, key=lambda name: exposed[name])
    return TransportPlan(
        best, f"exposes the least communication, by the formula: {1e6 * exposed[best]:.0f} us a forward pass", exposed
    )


def _can(name: str, exchange: Exchange) -> bool:
    if name == "p2p":
        return not exchange.windows
    divides = exchange.kv_heads % exchange.ranks == 0 or exchange.ranks % exchange.kv_heads == 0
    return name != "a2a" or (exchange.heads % exchange.ranks == 0 and divides)


def _exposed_s(exchange: Exchange) -> dict[str, float]:
    ranks, held = exchange.ranks, exchange.length // exchange.ranks
    work_s = 2 * exchange.length**2 * exchange.heads * exchange.features / ranks / RATE
    rows_s = 2 * held * exchange.kv_heads * exchange.features * WIDTH / LINK  # to transfer one rank's keys and values
    merge_s = 10 * held * exchange.heads * exchange.features / MERGE
    moved_s = 2 * held * (exchange.heads + exchange.kv_heads) * exchange.features * WIDTH * (ranks - 1) / ranks / LINK
    others = ranks - 1
    return {
        "p2p": others * (max(0.0, rows_s + START_S - work_s / ranks) + merge_s / 2),
        "all_gather": max(0.0, others * rows_s + START_S - work_s / ranks) + merge_s / 2,
        "a2a": moved_s + 4 * START_S,
    }

"""Measure a CPU's caches and DRAM with Numba loops: chains of loads on one core, and sums on all cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from rooftop.errors import MissingExtraError
from rooftop.hardware import compare
from rooftop.hardware.ceilings import Progress
from rooftop.hardware.device import cpu
from rooftop.hardware.load import other_load
from rooftop.ladder.memory_levels import Flight, Level, MemoryClimb, expected_rate
from rooftop.launch.numba_loops import numba_works

LINE_BYTES = 64  # bytes of a cache line on every x86 and most ARM processors
CHAINS = (1, 2, 4, 8, 16)
# The array for DRAM is this many times as large as the last-level cache, so the cache serves at most 1/4 of the loads,
# unless MOST_BYTES limits the array.
BEYOND = 4
LEAST_BYTES, MOST_BYTES = 64 << 20, 512 << 20  # limits of the size of the array for DRAM
# Hops of each chain in a sample, with one thread and with several threads. The hops are few, so that some samples are
# undisturbed, but take longer than starting the threads.
HOPS, HOPS_IN_THREADS = 2_000, 20_000
READ_BYTES = 8 << 20  # bytes that a thread reads in one call: reading them takes longer than starting the thread
SECONDS = 0.15
FARTHEST = "DRAM"

Array = np.ndarray[Any, np.dtype[Any]]


def working_sets(caches: dict[str, int]) -> dict[str, int]:
    """The size in bytes of the array for each level. The size is half of the level's cache, or for DRAM several times
    the largest cache.
    """
    sizes = {name.removesuffix("d"): size // 2 for name, size in sorted(caches.items())}
    largest = max(caches.values(), default=LEAST_BYTES // BEYOND)
    return {**sizes, FARTHEST: min(MOST_BYTES, max(LEAST_BYTES, BEYOND * largest))}


def ring(size_bytes: int, seed: int = 0) -> Array:
    """Indices that lead once through all cache lines of `size_bytes`, in random order, so that no prefetcher can guess
    the next line.

    The indices are int64, one at the beginning of each line. The rest of a line is not used.
    """
    lines = max(2, size_bytes // LINE_BYTES)
    order = np.random.default_rng(seed).permutation(lines) * (LINE_BYTES // 8)
    following = np.zeros(lines * (LINE_BYTES // 8), np.int64)
    following[order] = np.roll(order, -1)
    return following


def on_cpu(progress: Progress) -> MemoryClimb:
    """Measure all levels.

    Raises:
        MissingExtraError: Numba is not installed.
    """
    if not numba_works():
        raise MissingExtraError('the memory ladder on a CPU needs Numba: pip install "rooftop[ladder]"')
    sizes, threads = working_sets(cpu().caches), torch.get_num_threads()
    with other_load() as load, ThreadPoolExecutor(threads) as pool:
        levels = []
        for done, (name, size) in enumerate(sizes.items()):
            progress(name, done / (len(sizes) + 1))
            levels.append(Level(name, size, latency_ns(size), rate(size, threads, pool), threads, LINE_BYTES))
        progress("concurrency and parallelism", len(sizes) / (len(sizes) + 1))
        flights = flown(levels[-1], threads, pool)
    return MemoryClimb(
        device=cpu().name,
        kind="cpu",
        unit="core",
        levels=tuple(levels),
        flown=FARTHEST,
        flights=tuple(flights),
        other_cores=round(load.cores, 1),
        remarks=tuple(remarks(levels[-1], flights, threads)),
    )


def latency_ns(size_bytes: int) -> float:
    """Time in ns of one load from an array of `size_bytes`, in random order. The time includes the misses of address
    translation (TLB) at that size.
    """
    from rooftop.ladder.memory_loops import chase

    following, place = ring(size_bytes), 0
    chase(following, 0, following.size // (LINE_BYTES // 8))  # one round, so that the caches hold the lines that fit

    def hop() -> None:
        nonlocal place
        place = int(chase(following, place, HOPS))

    return _best_ms(hop) * 1e6 / HOPS


def rate(size_bytes: int, threads: int, pool: ThreadPoolExecutor) -> float:
    """The bytes/s of all threads together. Each thread reads its own array. An array has `size_bytes` if that is below
    2 MiB, because each core has its own L1 and L2. Otherwise all arrays together have `size_bytes`, because the cores
    share the larger levels.
    """
    from rooftop.ladder.memory_loops import read

    each = size_bytes if size_bytes < (2 << 20) else max(LINE_BYTES, size_bytes // threads)
    at_a_time = min(each, READ_BYTES) // 8
    arrays = [np.arange(max(1, each // 8 // at_a_time) * at_a_time, dtype=np.int64) for _ in range(threads)]
    times, place = max(1, READ_BYTES // each), 0

    def everywhere() -> None:
        nonlocal place
        here = slice(place, place + at_a_time)
        for _ in pool.map(lambda values: read(values[here], times), arrays):
            pass
        place = (place + at_a_time) % arrays[0].size

    return threads * times * at_a_time * 8 / (1e-3 * _best_ms(everywhere))


def flown(level: Level, threads: int, pool: ThreadPoolExecutor) -> list[Flight]:
    """Measure the rate of loads from a level for several numbers of independent chains of loads per core, first on one
    core, then on all cores.
    """
    from rooftop.ladder.memory_loops import chase_several

    following = ring(level.working_set_bytes)
    lines = following.size // (LINE_BYTES // 8)
    found = []
    every = following[:: LINE_BYTES // 8]
    for workers in dict.fromkeys((1, threads)):
        hops = HOPS if workers == 1 else HOPS_IN_THREADS
        for chains in CHAINS:
            starts = [every[lines * n // (workers * chains)] for n in range(workers * chains)]
            places = [np.array(starts[n::workers], np.int64) for n in range(workers)]
            milliseconds = _best_ms(_in_turns(chase_several, following, places, hops, pool))
            in_flight = workers * chains * LINE_BYTES
            rate_found = 1e3 * in_flight * hops / milliseconds
            found.append(Flight(chains, workers, LINE_BYTES, rate_found, expected_rate(in_flight, level)))
    return found


def _in_turns(
    loop: Callable[..., None], following: Array, places: list[Array], hops: int, pool: ThreadPoolExecutor
) -> Callable[[], None]:
    def call() -> None:
        if len(places) == 1:
            loop(following, places[0], hops)
            return
        for _ in pool.map(lambda mine: loop(following, mine, hops), places):
            pass

    return call


def _best_ms(call: Callable[[], None]) -> float:
    """The time of the fastest sample, since a rate is what the undisturbed memory can deliver."""
    return compare({"": call}, device="cpu", seconds=SECONDS, warm_up_seconds=SECONDS / 4)[""].best_ms


def remarks(level: Level, flights: list[Flight], threads: int) -> list[str]:
    """Sentences about what Little's law means for this machine."""
    alone = [each for each in flights if each.parallelism == 1]
    most = max(alone, key=lambda each: each.rate)
    needed = level.in_flight_bytes / LINE_BYTES
    return [
        f"Little's law: {level.rate / 1e9:.3g} GB/s at {level.latency_ns:.3g} ns need {level.in_flight_bytes:,.0f} "
        f"bytes in flight, {needed:.0f} lines of {LINE_BYTES} bytes.",
        f"One core follows one chain at {alone[0].rate / 1e9:.3g} GB/s and {most.concurrency} chains at "
        f"{most.rate / 1e9:.3g} GB/s: loads that wait for each other leave the memory idle. A sum knows its addresses "
        "ahead, so the core and its prefetchers start loads long before they are used.",
        f"A linked list, a dict and a list of Python objects are such chains; an array is not. {threads} "
        f"cores have {threads} times as many loads in flight as one, until the memory is busy.",
    ]

"""The project's timing policy.

- Warm up for a given time, so that clocks, caches, allocators and autotuners have settled.
- Measure between device events on a GPU, and with the host's clock on a CPU. Time many short calls in one sample, so
  that the resolution of the clock does not matter.
- Report the median and the spread (interquartile range divided by median), because a disturbed sample hardly changes
  them.
- Compare variants interleaved in one process, in orders in which each variant follows every other variant equally
  often. So drift, and the state that the previous variant left (clocks, caches), affect all variants alike.
- Rotate the inputs if a repeated call would find them in L2 but a real program would not.
- Replay small GPU work from a CUDA graph to see the device's time without the host's.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.hardware.graphs import captured

WARM_UP_S = 0.05
MEASURE_S = 0.25
LEAST_SAMPLES = 5
MOST_SAMPLES = 200
SLOW_SAMPLES = 2
SURE_ROUNDS = 3  # a gain needs at least this many rounds to be more than noise
BY_CHANCE = 0.02  # the highest probability with which equally fast variants may pass for a gain
AHEAD_S, MOST_AHEAD = 5e-3, 64  # how far the host may run ahead in the warm-up: seconds, calls
LEAST_SAMPLE_S = 1e-3  # a CUDA event has a resolution of about 0.5 us: 0.05% of a sample


@dataclass(frozen=True)
class Timing:
    """Times of one call in ms.

    Attributes:
        median_ms, best_ms: median and fastest sample.
        spread: (75th - 25th percentile) / median.
        samples: number of samples.
    """

    median_ms: float
    best_ms: float
    spread: float
    samples: int


def measure(
    fn: Callable[[], object],
    *,
    device: torch.device | str,
    seconds: float = MEASURE_S,
    warm_up_seconds: float = WARM_UP_S,
    graph: bool = False,
) -> Timing:
    """Time one callable.

    Args:
        fn: function without arguments. The function must run on `device`, and need not synchronize with a GPU.
        device: the device on which the call runs. A GPU is the current one during the calls.
        seconds: about how long to measure; at least `LEAST_SAMPLES` samples are taken.
        warm_up_seconds: about how long to warm up; the warm-up calls the function at least twice.
        graph: capture the call in a CUDA graph and time its replays (GPU only).

    Raises:
        ValueError: `graph` is true and the device is a CPU.
    """
    (timing,) = compare({"": fn}, device=device, seconds=seconds, warm_up_seconds=warm_up_seconds, graph=graph).values()
    return timing


def compare(
    variants: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    seconds: float = MEASURE_S,
    warm_up_seconds: float = WARM_UP_S,
    graph: bool = False,
) -> dict[str, Timing]:
    """Time several callables, interleaved. `seconds` and the other arguments apply to each callable (see `measure`).

    Rounds use the orders of `balanced_orders`, because the previous call determines the clocks at which a GPU begins.
    """
    device = torch.device(device)
    if graph and device.type != "cuda":
        raise ValueError(f"graph=True needs a CUDA device, got {device}")
    samples: dict[str, list[float]] = {name: [] for name in variants}
    spent = dict.fromkeys(variants, 0.0)
    names, orders = list(variants), itertools.cycle(balanced_orders(len(variants)))
    # events must be recorded on the device of the calls, even if another GPU is the current one
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        timed = {
            name: _sampler(captured(fn) if graph else fn, device, warm_up_seconds) for name, fn in variants.items()
        }
        for round_, order in zip(range(MOST_SAMPLES), orders, strict=False):
            for name in (names[i] for i in order):
                if round_ < LEAST_SAMPLES or spent[name] < seconds:
                    began = time.perf_counter()
                    samples[name].append(timed[name]())
                    spent[name] += time.perf_counter() - began
            if round_ >= LEAST_SAMPLES and all(s >= seconds for s in spent.values()):
                break
    return {name: timing_of(values) for name, values in samples.items()}


def compare_slow(variants: Mapping[str, Callable[[], object]], samples: int = SLOW_SAMPLES) -> dict[str, Timing]:
    """Time callables that take tenths of a second on the CPU: each sample is a single call, and the callables are
    interleaved as in `compare`.

    There is no warm-up, so call each variant once before.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    names, orders = list(variants), itertools.cycle(balanced_orders(len(variants)))
    for _, order in zip(range(samples), orders, strict=False):
        for name in (names[i] for i in order):
            began = time.perf_counter_ns()
            variants[name]()
            found[name].append((time.perf_counter_ns() - began) / 1e6)
    return {name: timing_of(values) for name, values in found.items()}


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of `count` items in which each item directly follows every other item equally often.

    An even count needs one Latin square, an odd count needs two: Williams 1949, "Experimental designs balanced for the
    estimation of residual effects of treatments".
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]  # 0, 1, -1, 2, -2, ...
    orders = [[(first + step) % count for step in zigzag] for first in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def rotated(fn: Callable[..., object], argument_sets: Sequence[Sequence[Tensor]]) -> Callable[[], object]:
    """A call that uses the next set of arguments each time, in rotation."""
    sets = itertools.cycle(argument_sets)
    return lambda: fn(*next(sets))


def rotated_copies(tensors: Sequence[Tensor], cache_bytes: int) -> list[list[Tensor]]:
    """The tensors, followed by copies of the whole list. The copies alone are at least twice as large as the
    cache.
    """
    size = max(1, sum(t.numel() * t.element_size() for t in tensors))
    count = max(1, math.ceil(2 * cache_bytes / size))
    return [list(tensors)] + [
        [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors] for _ in range(count)
    ]


def _sampler(fn: Callable[[], object], device: torch.device, warm_up_seconds: float) -> Callable[[], float]:
    """Warm `fn` up, and return a function that measures one sample: the mean ms per call over a fixed number of
    calls.
    """
    if device.type != "cuda":
        calls = _warm_up(fn, warm_up_seconds, lambda: None)

        def on_host() -> float:
            began = time.perf_counter_ns()
            for _ in range(calls):
                fn()
            return (time.perf_counter_ns() - began) / 1e6 / calls

        return on_host

    calls = _warm_up(fn, warm_up_seconds, torch.cuda.synchronize)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def on_device() -> float:
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    return on_device


def _warm_up(fn: Callable[[], object], seconds: float, synchronize: Callable[[], None]) -> int:
    """Warm up: call `fn` for at least `seconds`. Return how many calls each sample must time after the warm-up, so that
    a sample takes at least `LEAST_SAMPLE_S`."""
    fn()
    synchronize()
    began, calls, ahead = time.perf_counter(), 0, 1
    while calls == 0 or time.perf_counter() - began < seconds:
        for _ in range(ahead):
            fn()
        calls += ahead
        synchronize()
        spent = time.perf_counter() - began
        ahead = max(1, min(MOST_AHEAD, int(AHEAD_S * calls / spent)))  # the host launches a 30 ms graph in microseconds
    return max(1, math.ceil(LEAST_SAMPLE_S * calls / spent))


def timing_of(samples: Sequence[float]) -> Timing:
    """Make a `Timing` from samples in ms per call, taken with any clock."""
    median = statistics.median(samples)
    if len(samples) == 1:
        return Timing(median, median, 0.0, 1)
    quarters = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, min(samples), (quarters[2] - quarters[0]) / median if median > 0 else 0.0, len(samples))


def is_sure(gains: Sequence[float]) -> bool:
    """Whether the gains measured in several rounds are more than noise. A gain is the fraction of the time saved.

    There must be at least `SURE_ROUNDS` gains. Few gains may be 0 or less (see `_most_losses`), and the median must
    exceed half the distance between the quartiles.
    """
    if len(gains) < SURE_ROUNDS:
        return False
    losses = sum(gain <= 0 for gain in gains)
    quarters = statistics.quantiles(gains, n=4, method="inclusive")
    return losses <= _most_losses(len(gains)) and statistics.median(gains) > (quarters[2] - quarters[0]) / 2


def _most_losses(rounds: int) -> int:
    """The largest number of losses (rounds without a gain) with which a gain is sure: the larger of two numbers.

    The first is one round in six. The second is the largest number of losses such that equally fast variants would have
    so few losses only with a probability under `BY_CHANCE`.
    """
    ways, most = 0, -1
    while (ways := ways + math.comb(rounds, most + 1)) < BY_CHANCE * 2**rounds:
        most += 1
    return max(rounds // 6, most)

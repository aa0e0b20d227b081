"""Measure the limits of a CPU: the cheapest operator, bandwidths by working set, matrix rates.

Each measured value is the best of several bursts. The bursts are spread over the whole measurement, so that a
disturbance affects only some of them. Samples last a millisecond or more, so that the clock's resolution does not
matter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.hardware.figures import LAUNCHES, Samples, memory_figure
from rooftop.hardware.pulse import Pulse

KIB, MIB = 1 << 10, 1 << 20
WORKING_SETS = (256 * KIB, 512 * KIB, *(m * MIB for m in (1, 2, 4, 8, 16, 32, 64, 128, 256)))

SHAPES = (
    *((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (4096, 256, 1024), (512, 3072, 768), (512, 768, 3072)),
    *((2048, 2048, 512), (2048, 2048, 2048)),
)
"""(m, n, k) of matrix products, in order of increasing work."""
LAYOUTS = ("nn", "nt", "tn")
# (batch, input and output channels, image side, kernel side)
CONVOLUTIONS = ((4, 256, 14, 3), (8, 128, 28, 3), (4, 256, 28, 1))
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("launches", "memory", *DTYPES)

ROUNDS = 3
BURST_S = 0.015  # seconds for each candidate in each round; there are up to 185 candidates
SAMPLE_S = 1e-3
SLOW_S = 0.05  # a slower call has no fast path for its dtype: take one sample per round, and skip larger shapes

Call = Callable[[], object]
Candidate = tuple[str, float, Call]
"""A candidate for a figure: the figure's name, the bytes or flops of a call, and the call."""


def probe_cpu(parts: Collection[str], progress: Callable[[str, float], None]) -> tuple[Samples, dict[str, float]]:
    """Measure the given parts ("launches", "memory", precisions), and return samples of their figures. Also return the
    seconds that each part took in all rounds."""
    samples, seconds = Samples(), dict.fromkeys(parts, 0.0)
    for round_ in range(ROUNDS):
        for number, part in enumerate(parts):
            began = time.perf_counter()
            progress(_IN_WORDS.get(part, f"matrix rates, {part}"), (round_ + number / len(parts)) / ROUNDS)
            if part == "launches":
                _launches(samples)
            elif part == "memory":
                _bandwidths(samples)
            else:
                _race(samples, _products(part, DTYPES[part]))
                _race(samples, _convolutions(part, DTYPES[part]))
            seconds[part] += time.perf_counter() - began
    return samples, seconds


_IN_WORDS = {"launches": "launches", "memory": "memory bandwidth"}


def _launches(samples: Samples) -> None:
    """Measure the cheapest operator (a CPU's counterpart of a launch), and the CPU's current speed (see `Pulse`)."""
    times = [1e3 * seconds for seconds in _cheapest_operator_s()]
    for name in LAUNCHES:
        samples.add(name, times)
    pulse = Pulse()
    pulse.take()
    for name, rate in pulse.rates.items():
        samples.add(f"pulse {name}", [rate])


def _cheapest_operator_s() -> list[float]:
    one = torch.zeros(1)
    return _burst(lambda: torch.neg(one, out=one), 4 * BURST_S)


def _bandwidths(samples: Samples) -> None:
    """Measure bandwidths. The time of the cheapest call is subtracted, because the call's overhead would hide the
    cache's rate for small working sets.
    """
    launch_s = min(_cheapest_operator_s())
    whole = torch.rand(WORKING_SETS[-1] // 4)
    for size in WORKING_SETS:
        for pattern, moved, call in _patterns(whole[: size // 4]):
            times = _burst(call, BURST_S)
            samples.add(memory_figure(size, pattern), (moved / _without_launch(s, launch_s) for s in times))


def _without_launch(seconds: float, launch_s: float) -> float:
    """`seconds` minus the cheapest call's time `launch_s`, but at least half of `seconds`, because both are noisy."""
    return max(seconds - launch_s, seconds / 2)


def _patterns(whole: Tensor) -> Iterator[Candidate]:
    """The access patterns to time (read, write, copy, ...) for one working set, the memory of `whole`: (n,) in float32.
    Each pattern stays within this memory.
    """
    half, third = whole.numel() // 2, whole.numel() // 3
    total = torch.empty(())
    a, b = whole[:half], whole[half : 2 * half]
    x, y, z = (whole[i * third : (i + 1) * third] for i in range(3))
    halves = whole.view(torch.bfloat16)
    narrow_after, narrow_before = halves[4 * third : 6 * third], halves[: 2 * third]
    yield "read", whole.nbytes, lambda: torch.sum(whole, 0, out=total)
    yield "write", whole.nbytes, lambda: whole.fill_(0.5)
    yield "copy", 2 * a.nbytes, lambda: b.copy_(a)
    yield "triad", 3 * x.nbytes, lambda: torch.add(x, y, alpha=0.5, out=z)
    yield "cast", 3 * x.nbytes, lambda: narrow_after.copy_(whole[: 2 * third])
    yield "cast", 3 * x.nbytes, lambda: whole[third : 3 * third].copy_(narrow_before)
    yield "update", 2 * whole.nbytes, lambda: whole.mul_(1.0)


def _race(samples: Samples, candidates: Iterator[Candidate]) -> None:
    """Time the candidates in the given order, from little work to much work. Stop after the first candidate whose
    fastest call takes more than `SLOW_S`.
    """
    for figure, flops, call in candidates:
        times = _burst(call, BURST_S)
        samples.add(figure, (flops / seconds for seconds in times))
        if min(times) > SLOW_S:
            return


def _products(precision: str, dtype: torch.dtype) -> Iterator[Candidate]:
    """Matrix products to try, on random data (products of zeros would be faster)."""
    for m, n, k in SHAPES:
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        out = torch.empty(m, n, dtype=dtype)
        for layout in LAYOUTS:
            left = a.t().contiguous().t() if layout[0] == "t" else a
            right = b.t().contiguous().t() if layout[1] == "t" else b
            yield f"flops {precision}", 2 * m * n * k, partial(torch.mm, left, right, out=out)


def _convolutions(precision: str, dtype: torch.dtype) -> Iterator[Candidate]:
    """Convolutions to try. Convolutions use a different library than matrix products do, and are up to twice as fast on
    some CPUs."""
    for batch, channels, side, kernel in CONVOLUTIONS:
        x = torch.randn(batch, channels, side, side).to(dtype)
        weight = torch.randn(channels, channels, kernel, kernel).to(dtype)
        flops = 2 * x.numel() * channels * kernel**2
        yield f"flops {precision}", flops, partial(functional.conv2d, x, weight, padding=kernel // 2)


def _burst(call: Call, seconds: float) -> list[float]:
    """Seconds per call, one value for each sample. The samples together take about `seconds`; there is at least one. An
    additional first call warms up and determines the number of calls in a sample."""
    began = time.perf_counter()
    call()
    first = time.perf_counter() - began
    calls = max(1, math.ceil(SAMPLE_S / first))
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return times

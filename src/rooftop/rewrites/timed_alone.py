"""Time one operator alone, so that rules can predict their gain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftop.rewrites.candidates import Call
from rooftop.rewrites.structures import mapped

REPEATS, CALLS = 3, 10
CYCLES_A_MS = 2_000_000
"""Upper bound of the cycles in one ms of a GPU's clock."""
AHEAD_MS = 0.2
"""The GPU waits for at least this long before an operator, so that the host has launched it by then."""
MOST_AHEAD_MS = 5.0
"""The longest wait of the GPU before an operator. Without this limit, a first call that compiles would cause a wait of
seconds."""


def alone_ms(run: Callable[[], object], device: torch.device) -> float:
    """The time in ms that `run()` takes on the device: the best of three runs, after a warm-up run. If the host takes
    longer to launch the work of a run than the GPU waits, the GPU waits longer before the next run.
    """
    run()
    best_ms, ahead_ms = math.inf, AHEAD_MS
    for _ in range(REPEATS):
        ms, launched_ms = _once(run, device, ahead_ms)
        best_ms = min(best_ms, ms)
        ahead_ms = min(MOST_AHEAD_MS, max(ahead_ms, 2 * launched_ms))
    return best_ms


def _once(run: Callable[[], object], device: torch.device, ahead_ms: float) -> tuple[float, float]:
    """Run `run()` once. Return the time in ms that it took on the device, and the time in ms in which the host launched
    it. The GPU first waits for `ahead_ms`."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        ms = (time.perf_counter() - began) * 1e3
        return ms, ms
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(ahead_ms * CYCLES_A_MS))
        return between_events(run, start, end)


def between_events(run: Callable[[], object], start: torch.cuda.Event, end: torch.cuda.Event) -> tuple[float, float]:
    """Run `run()` once between two events of the current GPU. Return the time in ms between the events, and the time in
    ms in which the host launched the work."""
    start.record()
    began = time.perf_counter()
    run()
    launched_ms = (time.perf_counter() - began) * 1e3
    end.record()
    end.synchronize()
    return start.elapsed_time(end), launched_ms


def launch_ms(run: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """The time in ms that the host takes to launch the work of `run()` on a GPU. The time is 0 on a CPU, where `run()`
    itself computes.

    Args:
        calls: how often `run` is called in a row. The best of a few such rows counts, after a warm-up call.
    """
    if device.type != "cuda":
        return 0.0
    run()
    found = math.inf
    for _ in range(REPEATS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        found = min(found, (time.perf_counter() - began) * 1e3 / calls)
    torch.cuda.synchronize(device)
    return found


def shape_of_result(call: Call) -> torch.Size:
    """The shape of the first result of the operator that `call` describes."""
    with torch.no_grad():
        result = call.operator(*call.arguments)
    return torch.Size((result[0] if isinstance(result, tuple) else result).shape)


def filled(call: Call) -> tuple[Any, ...]:
    """The arguments of the operator that `call` describes, with each meta tensor replaced by a tensor of ones on the
    operator's device."""
    return mapped(call.arguments, lambda tensor: _filled(tensor, call.device))  # type: ignore[no-any-return]


def repeated(call: Call) -> Callable[[], object]:
    """A function that runs the operator that `call` describes, with tensors of ones as arguments."""
    given = filled(call)
    return lambda: call.operator(*given)


def with_backward(make: Callable[..., object], given: Sequence[Any]) -> Callable[[], object]:
    """A function that runs `make(*given)`, then backward from its first result to all floating-point tensors in
    `given`.
    """
    given = [each.requires_grad_() if _has_gradient(each) else each for each in given]
    leaves = [each for each in given if _has_gradient(each)]

    def result() -> Tensor:
        with torch.enable_grad():
            found: Any = make(*given)
        return found[0] if isinstance(found, tuple) else found

    gradient = torch.ones_like(result())
    return lambda: torch.autograd.grad(result(), leaves, gradient)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of ones with the shape, dtype and strides of the given tensor, including strides of 0 (expanded)."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.ones(max(1, span), dtype=tensor.dtype, device=device)
    return memory.as_strided(tensor.shape, tensor.stride())

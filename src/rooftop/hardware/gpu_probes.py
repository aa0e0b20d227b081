"""Measure a GPU part by part: launches, bandwidth, matrix rates, transfers, links."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from rooftop.errors import MeasurementError
from rooftop.hardware.figures import Samples
from rooftop.hardware.gpu_bandwidth import measure_bandwidth
from rooftop.hardware.gpu_matrices import measure_matrices, precisions_of
from rooftop.hardware.graphs import captured
from rooftop.hardware.kernel_times import Variant, kernel_times

TRANSFERRED_BYTES = 256 << 20
LAUNCHES = 200


def parts_of(device: torch.device) -> tuple[str, ...]:
    """All parts that can be measured on this GPU."""
    links = ("links",) if torch.cuda.device_count() > 1 else ()
    return ("launches", "memory", *precisions_of(device), "transfers", *links)


def probe_gpu(
    device: torch.device, parts: Collection[str], l2_bytes: int, progress: Callable[[str, float], None]
) -> tuple[Samples, dict[str, float]]:
    """Measure the given parts ("launches", "memory", precisions, ...), and return samples of their figures. Also return
    the seconds that each part took."""
    samples, seconds = Samples(), {}
    with torch.cuda.device(device):
        torch.cuda.empty_cache()  # return the allocator's unused memory, so that it counts as free
        for number, part in enumerate(parts):
            began, first, share = time.perf_counter(), number / len(parts), 1 / len(parts)
            if part == "launches":
                progress("launches", first)
                _launches(samples, device)
            elif part == "memory":
                measure_bandwidth(
                    samples,
                    device,
                    l2_bytes,
                    lambda done, first=first, share=share: progress("memory bandwidth", first + share * done),  # type: ignore[misc]
                )
            elif part == "transfers":
                progress("transfers", first)
                _transfers(samples, device)
            elif part == "links":
                progress("links", first)
                _links(samples, device)
            else:
                progress(f"matrix rates, {part}", first)
                measure_matrices(samples, device, part)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            seconds[part] = time.perf_counter() - began
    return samples, seconds


def _launches(samples: Samples, device: torch.device) -> None:
    """Measure the time per kernel in a series of tiny kernels, launched eagerly and from a graph. Also measure the
    shortest duration of any kernel.

    A launch time is the time between two events before and after the series, divided by the number of kernels. The
    profiler measures the duration of each single kernel, launched eagerly and in a graph.
    """
    from rooftop.hardware import bandwidth_kernels as kernels

    one, other = torch.zeros(1, device=device), torch.ones(1, device=device)
    kernels.empty()

    def eager() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    def many(fn: Callable[[], object]) -> Callable[[], object]:
        def in_a_row() -> None:
            for _ in range(LAUNCHES):
                fn()

        return captured(in_a_row)

    replays = [many(kernels.empty), many(lambda: one.add_(1))]
    samples.add("launch_eager_ms", _sequence_ms(eager, device, LAUNCHES))
    for replay in replays:
        samples.add("launch_graph_ms", _sequence_ms(replay, device, LAUNCHES))

    tiny = (kernels.empty, lambda: one.add_(1), lambda: one.fill_(1.0), lambda: one.zero_(), lambda: one.copy_(other))
    variants = [Variant(call, repeats=50) for call in tiny] + [Variant(replay, repeats=3) for replay in replays]
    for calls in kernel_times(variants, device):
        samples.add("kernel_floor_ms", (ms for call in calls for ms in call))


def _sequence_ms(fn: Callable[[], object], device: torch.device, calls: int = 1, samples: int = 12) -> list[float]:
    """ms per call of each of `samples` runs of `fn`, which makes `calls` calls. Events measure the time, after two
    warm-up runs."""
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2 + samples):
        torch.cuda.synchronize(device)
        start.record()
        fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return times[2:]


def _transfers(samples: Samples, device: torch.device) -> None:
    on_device = torch.empty(TRANSFERRED_BYTES, dtype=torch.uint8, device=device)
    for memory in ("pageable", "pinned"):
        on_host = torch.ones(TRANSFERRED_BYTES, dtype=torch.uint8, pin_memory=memory == "pinned")
        for name, to, source in (("host_to_device", on_device, on_host), ("device_to_host", on_host, on_device)):
            _add_rate(samples, f"transfers {name}_{memory}", _copying(to, source), device)


def _add_rate(samples: Samples, name: str, fn: Callable[[], object], device: torch.device) -> None:
    samples.add(name, (TRANSFERRED_BYTES / (ms / 1e3) for ms in _sequence_ms(fn, device, samples=8)))


def _copying(to: Tensor, source: Tensor) -> Callable[[], Any]:
    return lambda: to.copy_(source, non_blocking=True)


def _links(samples: Samples, device: torch.device) -> None:
    """Measure the rate of copies to the GPU with the next index, and for each collective over all GPUs the highest bus
    bandwidth of all message sizes."""
    # imported here, because the processes that `collective_rates` starts run that file as their main module: if the
    # package itself imported it, they would load it twice
    from rooftop.hardware.collectives import collective_rates

    count = torch.cuda.device_count()
    here = torch.ones(TRANSFERRED_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(TRANSFERRED_BYTES, dtype=torch.uint8, device=f"cuda:{((device.index or 0) + 1) % count}")
    _add_rate(samples, "links device_to_device", _copying(there, here), device)
    try:
        collectives = collective_rates([f"cuda:{index}" for index in range(count)])
    except MeasurementError as error:
        warnings.warn(f"the rates of collectives could not be measured: {error}", stacklevel=2)
        return
    for name, by_size in collectives.items():
        samples.add(f"links {name}_{count}_gpus", [max(by_size.values())])

"""The measurements behind the ceilings: bandwidth over the working set, matrix rates, launches, transfers.

Each figure is the fastest of several samples of at least a millisecond: a ceiling is what the machine can do when
nothing disturbs it, and a sample that long is no accident of the clock. The spread over the samples is kept beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from rooftop.errors import MeasurementError
from rooftop.hardware.ceilings import Ceilings, MemoryLevel, MemoryPoint, Progress
from rooftop.hardware.device import cpu, gpu, versions
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import Timing, measure

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DISTURBED_SPREAD = 0.10

GPU_WORKING_SETS = [m * MIB for m in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096)]
CPU_WORKING_SETS = [256 * KIB, 512 * KIB, *(m * MIB for m in (1, 2, 4, 8, 16, 32, 64, 128, 256))]
GPU_SHAPES = [(4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 4096)]  # m, n, k
CPU_SHAPES = [(512, 512, 512), (1024, 1024, 1024), (2048, 2048, 512), (2048, 2048, 2048)]
CPU_CONVOLUTIONS = [(4, 256, 14, 3), (8, 128, 28, 3), (4, 256, 28, 1)]  # batch, channels in and out, side, kernel
GPU_CONVOLUTIONS = [(256, 256, 14, 3), (256, 512, 7, 3)]
GPU_CONVOLVED = ("tf32", "fp16", "bf16")
GPU_SECONDS, CPU_SECONDS = 0.04, 0.04  # for each measurement; there are about 200
SLOW_MATRIX_S = 0.05  # a dtype that takes longer at a small shape has no fast path: larger shapes are left out


class _Probe:
    """Measures on one device and remembers spreads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spread: dict[str, float] = {}
        self._seconds = GPU_SECONDS if device.type == "cuda" else CPU_SECONDS

    def best_s(self, name: str, fn: Callable[[], object], calls: int = 1) -> float:
        """Fastest seconds a call, where `fn` makes `calls` of them; keeps the larger spread under `name`."""
        timing: Timing = measure(fn, device=self.device, seconds=self._seconds, warm_up_seconds=self._seconds / 2)
        self.spread[name] = max(self.spread.get(name, 0.0), timing.spread)
        return timing.best_ms / 1e3 / calls


def identity(device: torch.device) -> tuple[str, ...]:
    """What the figures depend on: the device, its driver, the versions, the threads."""
    v = versions()
    if device.type == "cuda":
        g = gpu(device.index or 0)
        several = (f"{count}gpus",) if (count := torch.cuda.device_count()) > 1 else ()
        return (g.uuid or g.name, str(v.get("driver")), v["torch"], str(v.get("cuda")), str(v.get("triton")), *several)
    return (cpu().name, v["torch"], f"{torch.get_num_threads()}threads")


def probe(device: torch.device, progress: Progress) -> Ceilings:
    """Measure everything on one device. Leaves clocks, flags, memory and random numbers as they were."""
    measure_all = _probe_gpu if device.type == "cuda" else _probe_cpu
    gpus = [device.index or 0] if device.type == "cuda" else []
    with torch.no_grad(), _full_precision(), torch.random.fork_rng(gpus):
        ceilings = measure_all(device, progress)
    progress("done", 1.0)
    return ceilings


def _probe_gpu(device: torch.device, progress: Progress) -> Ceilings:
    with torch.cuda.device(device):
        p = _Probe(device)
        g = gpu(device.index or 0)
        progress("launches", 0.0)
        eager_ms, graph_ms, floor_ms = _gpu_launches(p)
        memory = _gpu_memory(p, graph_ms, lambda done: progress("memory bandwidth", 0.05 + 0.5 * done))
        flops = _matrix_rates(p, GPU_SHAPES, _gpu_dtypes(), lambda done: progress("matrix rates", 0.55 + 0.35 * done))
        progress("transfers", 0.9)
        for precision, rate in _convolution_rates(p, [d for d in _gpu_dtypes() if d[0] in GPU_CONVOLVED]).items():
            flops[precision] = max(flops[precision], rate)
        transfers, links = _transfers(p), _links(p)
        torch.cuda.empty_cache()
    return Ceilings(
        device=g.name,
        device_id=g.uuid or g.name,
        kind="cuda",
        threads=1,
        versions=versions(),
        measured_at=_now(),
        memory=tuple(memory),
        levels=_levels(memory, [("L2", g.l2_bytes)]),
        flops=flops,
        kernel_floor_ms=floor_ms,
        launch_eager_ms=eager_ms,
        launch_graph_ms=graph_ms,
        transfers=transfers,
        links=links,
        spread=p.spread,
        disturbed=_disturbed(p),
    )


def _probe_cpu(device: torch.device, progress: Progress) -> Ceilings:
    p = _Probe(device)
    c = cpu()
    progress("launches", 0.0)
    one = torch.zeros(1)
    floor_ms = 1e3 * p.best_s("launch", lambda: torch.neg(one, out=one))
    memory = _cpu_memory(p, floor_ms, lambda done: progress("memory bandwidth", 0.05 + 0.55 * done))
    dtypes = [("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
    flops = _matrix_rates(p, CPU_SHAPES, dtypes, lambda done: progress("matrix rates", 0.6 + 0.3 * done))
    for precision, rate in _convolution_rates(p, dtypes).items():
        flops[precision] = max(flops[precision], rate)
    return Ceilings(
        device=c.name,
        device_id=c.name,
        kind="cpu",
        threads=torch.get_num_threads(),
        versions=versions(),
        measured_at=_now(),
        memory=tuple(memory),
        levels=_levels(memory, [(name, size) for name, size in c.caches.items() if name in ("L2", "L3")]),
        flops=flops,
        kernel_floor_ms=floor_ms,
        launch_eager_ms=floor_ms,
        launch_graph_ms=floor_ms,
        transfers={},
        links={},
        spread=p.spread,
        disturbed=_disturbed(p),
    )


def _gpu_memory(p: _Probe, launch_ms: float, progress: Callable[[float], None]) -> list[MemoryPoint]:
    """Each pattern by our kernels and by torch, whichever is faster, as graphs of back-to-back launches.

    What a launch costs anyhow is taken off: in small working sets it would hide the rate of L2.
    """
    from rooftop.hardware import bandwidth_kernels as kernels

    free_bytes, _ = torch.cuda.mem_get_info(p.device)
    sizes = [size for size in GPU_WORKING_SETS if size <= free_bytes // 2]
    points = []
    for number, size in enumerate(sizes):
        n = size // 4  # float32 elements in the working set
        whole = torch.randn(n, device=p.device)
        sums = torch.empty(kernels.programs(whole), device=p.device)
        (a, b), (x, y, z) = whole.view(2, -1), (whole[i * (n // 3) : (i + 1) * (n // 3)] for i in range(3))
        total = torch.empty((), device=p.device)
        patterns: dict[str, list[Callable[[], object]]] = {
            "read": [lambda: kernels.read(whole, sums), lambda: torch.sum(whole, 0, out=total)],  # noqa: B023
            "write": [lambda: kernels.write(whole, 0.5), lambda: whole.fill_(0.5)],  # noqa: B023
            "copy": [lambda: kernels.copy(a, b), lambda: b.copy_(a)],  # noqa: B023
            "triad": [lambda: kernels.triad(x, y, z, 0.5), lambda: torch.add(x, y, alpha=0.5, out=z)],  # noqa: B023
        }
        launches = max(1, min(100, 8 * GIB // size // 8))
        rates = {}
        for name, variants in patterns.items():
            seconds = min(p.best_s(f"{name} {_size(size)}", _repeated_graph(fn, launches), launches) for fn in variants)
            moved = 3 * (n // 3) * 4 if name == "triad" else size
            rates[name] = moved / _without_launch(seconds, launch_ms)
        points.append(MemoryPoint(size, **rates))
        progress((number + 1) / len(sizes))
    return points


def _cpu_memory(p: _Probe, launch_ms: float, progress: Callable[[float], None]) -> list[MemoryPoint]:
    points = []
    for number, size in enumerate(CPU_WORKING_SETS):
        n = size // 4
        whole = torch.rand(n)
        (a, b), (x, y, z) = whole.view(2, -1), (whole[i * (n // 3) : (i + 1) * (n // 3)] for i in range(3))
        total = torch.empty(())
        patterns: dict[str, Callable[[], object]] = {
            "read": lambda: torch.sum(whole, 0, out=total),  # noqa: B023
            "write": lambda: whole.fill_(0.5),  # noqa: B023
            "copy": lambda: b.copy_(a),  # noqa: B023
            "triad": lambda: torch.add(x, y, alpha=0.5, out=z),  # noqa: B023
        }
        rates = {
            name: size / _without_launch(p.best_s(f"{name} {_size(size)}", fn), launch_ms)
            for name, fn in patterns.items()
        }
        points.append(MemoryPoint(size, **rates))
        progress((number + 1) / len(CPU_WORKING_SETS))
    return points


def _without_launch(seconds: float, launch_ms: float) -> float:
    """The time beyond what an empty launch takes, at least half of it: below that the difference is noise."""
    return max(seconds - launch_ms / 1e3, seconds / 2)


def _repeated_graph(fn: Callable[[], object], launches: int) -> Callable[[], object]:
    def many() -> None:
        for _ in range(launches):
            fn()

    return captured(many)


def _levels(memory: list[MemoryPoint], caches: list[tuple[str, int | None]]) -> tuple[MemoryLevel, ...]:
    """The fastest rate among the working sets that fit each cache but not a smaller one, and beyond all of them."""
    levels, floor = [], 0
    for name, capacity in caches:
        inside = [point.best for point in memory if capacity and floor < point.working_set_bytes <= capacity]
        if capacity and inside:
            levels.append(MemoryLevel(name, capacity, max(inside)))
            floor = capacity
    # Between once and twice the cache a part still hits it.
    beyond = [point.best for point in memory if point.working_set_bytes >= 2 * floor] or [memory[-1].best]
    return (*levels, MemoryLevel("DRAM", None, max(beyond)))


def _gpu_dtypes() -> list[tuple[str, torch.dtype]]:
    dtypes = [("fp64", torch.float64), ("fp32", torch.float32), ("fp16", torch.float16)]
    if torch.cuda.get_device_capability() >= (8, 0):
        dtypes += [("tf32", torch.float32), ("bf16", torch.bfloat16)]
    if torch.cuda.get_device_capability() >= (8, 9):
        dtypes.append(("fp8", torch.float8_e4m3fn))
    return dtypes


def _matrix_rates(
    p: _Probe,
    shapes: list[tuple[int, int, int]],
    dtypes: list[tuple[str, torch.dtype]],
    progress: Callable[[float], None],
) -> dict[str, float]:
    """Best flop/s of a matrix product for each precision over a few shapes, on random data (zeros are faster)."""
    rates: dict[str, float] = {}
    for number, (precision, dtype) in enumerate(dtypes):
        for m, n, k in shapes:
            product = _matrix_product(p.device, precision, dtype, m, n, k)
            seconds = p.best_s(f"matrix {precision}", product)
            rates[precision] = max(rates.get(precision, 0.0), 2 * m * n * k / seconds)
            if seconds > SLOW_MATRIX_S:
                break
        progress((number + 1) / len(dtypes))
    return rates


def _convolution_rates(p: _Probe, dtypes: list[tuple[str, torch.dtype]]) -> dict[str, float]:
    """Best flop/s of a convolution for each precision.

    They may come from another library than matrix products: on some CPUs they are up to twice as fast, on an H200 in
    TF32 by an eighth.
    """
    rates: dict[str, float] = {}
    on_gpu = p.device.type == "cuda"
    for precision, dtype in dtypes:
        for batch, channels, side, kernel in GPU_CONVOLUTIONS if on_gpu else CPU_CONVOLUTIONS:
            layout = torch.channels_last if on_gpu else torch.contiguous_format
            x = torch.randn(batch, channels, side, side, device=p.device).to(dtype, memory_format=layout)
            layer = torch.nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False, device=p.device)
            layer = layer.to(dtype=dtype, memory_format=layout)  # type: ignore[call-overload]
            flops = 2 * x.numel() * channels * kernel**2
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
                seconds = p.best_s(f"convolution {precision}", lambda: layer(x))  # noqa: B023
            rates[precision] = max(rates.get(precision, 0.0), flops / seconds)
            if seconds > SLOW_MATRIX_S:
                break
    return rates


def _matrix_product(
    device: torch.device, precision: str, dtype: torch.dtype, m: int, n: int, k: int
) -> Callable[[], object]:
    if precision == "fp8":
        a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)

    def product() -> None:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.mm(a, b, out=out)

    return product


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products measure the precision that they name; the user's switch is put back."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _gpu_launches(p: _Probe) -> tuple[float, float, float]:
    """(ms a tiny eager launch, ms a tiny kernel in a graph, duration in ms of an empty kernel in a graph)."""
    from rooftop.hardware import bandwidth_kernels as kernels

    one = torch.zeros(1, device=p.device)
    count = 200
    kernels.empty()

    def eager() -> None:
        for _ in range(count):
            one.add_(1)

    eager_ms = 1e3 * p.best_s("launch eager", eager, count)
    replay = _repeated_graph(kernels.empty, count)
    graph_ms = 1e3 * min(
        p.best_s("launch graph", replay, count),
        p.best_s("launch graph", _repeated_graph(lambda: one.add_(1), count), count),
    )
    return eager_ms, graph_ms, min(graph_ms, _kernel_duration_ms(replay))


def _kernel_duration_ms(replay: Callable[[], object]) -> float:
    """Shortest duration of the graph's kernels as the profiler sees them, which is how operators are timed."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        replay()
        torch.cuda.synchronize()
    events: Iterable[Any] = profiler.profiler.kineto_results.events()
    durations = [e.duration_ns() for e in events if "empty" in e.name() and e.duration_ns() > 0]
    return min(durations, default=float("inf")) / 1e6


def _transfers(p: _Probe) -> dict[str, float]:
    size = 256 * MIB
    on_device = torch.empty(size, dtype=torch.uint8, device=p.device)
    rates = {}
    for memory in ("pageable", "pinned"):
        on_host = torch.ones(size, dtype=torch.uint8, pin_memory=memory == "pinned")
        for name, to, source in (("host_to_device", on_device, on_host), ("device_to_host", on_host, on_device)):
            seconds = p.best_s(f"{name} {memory}", _copying(to, source))
            rates[f"{name}_{memory}"] = size / seconds
    return rates


def _copying(to: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: to.copy_(source, non_blocking=True)


def _links(p: _Probe) -> dict[str, float]:
    """Copies to the next GPU, and the best bus bandwidth of collectives over all, if there are several."""
    from rooftop.hardware.collectives import collective_rates  # its processes run it as their main module

    count = torch.cuda.device_count()
    if count < 2:
        return {}
    size = 256 * MIB
    here = torch.ones(size, dtype=torch.uint8, device=p.device)
    there = torch.empty(size, dtype=torch.uint8, device=((p.device.index or 0) + 1) % count)
    rates = {"device_to_device": size / p.best_s("device to device", _copying(there, here))}
    try:
        collectives = collective_rates([f"cuda:{index}" for index in range(count)])
    except MeasurementError as error:
        warnings.warn(f"no rates of collectives: {error}", stacklevel=2)
        return rates
    return rates | {f"{name}_{count}_gpus": max(by_size.values()) for name, by_size in collectives.items()}


def _disturbed(p: _Probe) -> tuple[str, ...]:
    return tuple(name for name, spread in p.spread.items() if spread > DISTURBED_SPREAD)


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Run the measurements for the ceilings. A measurement has parts ("launches", "memory", "bf16", ...).

On a GPU, bandwidths and burst matrix rates come from a kernel's shortest duration in the profiler. An analysis times
the operators of a program by the same profiler. Launches, transfers and sustained rates are timed between events. On a
CPU, every value comes from the fastest of several bursts. A ceiling is the best result of the undisturbed machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rooftop.hardware import cpu_probes
from rooftop.hardware.ceilings import Progress
from rooftop.hardware.conditions import Watch
from rooftop.hardware.defaults import usual_defaults
from rooftop.hardware.device import cpu, gpu, gpu_uuid, versions
from rooftop.hardware.histories import History, Machine, Measurement
from rooftop.words import utc_now


def identity(device: torch.device) -> tuple[str, ...]:
    """The key of a device in the cache: device, driver, versions and threads, on which the figures depend."""
    v = versions()
    if device.type == "cuda":
        name = gpu_uuid(device.index or 0) or torch.cuda.get_device_name(device)
        several = (f"{count}gpus",) if (count := torch.cuda.device_count()) > 1 else ()
        return (name, str(v.get("driver")), v["torch"], str(v.get("cuda")), str(v.get("triton")), *several)
    return (cpu().name, v["torch"], f"{torch.get_num_threads()}threads")


def parts_of(device: torch.device) -> tuple[str, ...]:
    """All parts that can be measured on a device: "launches", "memory", precisions, "transfers", "links"."""
    if device.type == "cpu":
        return cpu_probes.PARTS
    from rooftop.hardware import gpu_probes

    return gpu_probes.parts_of(device)


def machine_of(device: torch.device) -> Machine:
    """Describe a device, for the history of its measurements."""
    if device.type == "cuda":
        g = gpu(device.index or 0)
        return Machine(g.name, g.uuid or g.name, "cuda", 1, versions(), {"L2": g.l2_bytes})
    c = cpu()
    caches = {name: size for name, size in c.caches.items() if name in ("L2", "L3")}
    return Machine(c.name, c.name, "cpu", torch.get_num_threads(), versions(), caches)


def probe(device: torch.device, parts: Collection[str], progress: Progress) -> History:
    """Measure the given parts of a device's ceilings once. The result is a history with only this measurement.

    The measurement leaves the clocks unchanged, frees its memory, and restores PyTorch's flags and random number
    generators.
    """
    machine = machine_of(device)
    wanted = [part for part in parts_of(device) if part in parts]
    gpus = [device.index or 0] if device.type == "cuda" else []
    with Watch(device) as watch, usual_defaults(), torch.no_grad(), full_precision(), torch.random.fork_rng(gpus):
        if device.type == "cuda":
            from rooftop.hardware.gpu_probes import probe_gpu

            samples, seconds = probe_gpu(device, wanted, machine.caches["L2"], progress)
        else:
            samples, seconds = cpu_probes.probe_cpu(wanted, progress)
    progress("done", 1.0)
    conditions = {**watch.conditions, **{f"seconds {part}": taken for part, taken in seconds.items()}}
    measurement = Measurement(utc_now(), samples.figures, samples.spread, conditions)
    return History(machine, (measurement,))


@contextmanager
def full_precision() -> Iterator[None]:
    """Within the block, float32 products and convolutions are computed in float32, not in TF32 or bfloat16. Restore the
    program's switches afterwards.

    PyTorch has older switches (`allow_tf32`, `set_float32_matmul_precision`) and newer ones (`fp32_precision`). Once a
    program has set only the newer ones, reading the older ones raises an error, unless both agree.
    """
    backends: Any = torch.backends
    cudnn = backends.cudnn
    switches = (backends, backends.cuda.matmul, cudnn, cudnn.conv, cudnn.rnn, backends.mkldnn.matmul)
    newer = [(switch, switch.fp32_precision) for switch in switches]
    products = _readable(torch.get_float32_matmul_precision)
    convolutions = _readable(torch._C._get_cudnn_allow_tf32)
    torch.set_float32_matmul_precision("highest")
    torch._C._set_cudnn_allow_tf32(False)
    for switch in switches:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest" if products is None else products)
        torch._C._set_cudnn_allow_tf32(True if convolutions is None else convolutions)
        for switch, precision in newer:
            switch.fp32_precision = precision


def _readable(read: Callable[[], Any]) -> Any:
    """The value of one of PyTorch's older switches; None if PyTorch raises because a newer switch disagrees."""
    try:
        return read()
    except RuntimeError:
        return None

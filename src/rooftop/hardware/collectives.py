"""Measure the rates of collectives between the devices of this machine, as bus bandwidth.

Bus bandwidth is the least number of bytes that each device's link must carry, divided by the time. So bus bandwidth can
be compared with the rate of a link, for any collective and any number of devices. By the convention of nccl-tests, an
all-reduce of S bytes over n devices counts 2 * (n - 1) / n * S bytes, and an all-gather to S bytes counts
(n - 1) / n * S bytes.

Each device gets its own process, so that a collective that hangs can be ended. The processes run this file, not the
calling script, so the script needs no `__main__` guard.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.errors import MeasurementError
from rooftop.hardware.sequences import synchronize

SIZES = tuple(m << 20 for m in (1, 16, 256))
"""Sizes of messages in bytes. Each is rounded down to a size that the devices can divide among them."""
SAMPLES = 3
TIMEOUT_S = 60.0


def collective_rates(
    devices: Sequence[torch.device | str], sizes: Sequence[int] | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, dict[int, float]]:
    """Measure the bus bandwidth of "all_reduce" and "all_gather" by message size.

    Args:
        devices: two or more, all GPUs (through NCCL) or all "cpu" (through gloo).
        sizes: sizes of the messages in bytes, divisible by four times the number of devices; None: `SIZES`, rounded
            down to such sizes.
        timeout_s: time limit after which all processes are killed.

    Returns:
        Name of the collective -> size in bytes -> bytes/s.

    Raises:
        ValueError: there are fewer than two devices, their kinds differ, or a size cannot be divided among them.
        MeasurementError: a process failed or did not finish in time.
    """
    where = [torch.device(device) for device in devices]
    kinds = {device.type for device in where}
    if len(where) < 2 or len(kinds) != 1 or not kinds <= {"cpu", "cuda"}:
        raise ValueError(f"expected two or more GPUs, or two or more times 'cpu', got {list(map(str, where))}")
    unit = 4 * len(where)  # bytes: a float32 for each device
    sizes = [size // unit * unit for size in SIZES] if sizes is None else sizes
    if not sizes or any(size <= 0 or size % unit for size in sizes):
        raise ValueError(f"expected sizes in bytes divisible by {unit}, got {list(sizes)}")
    with tempfile.TemporaryDirectory(prefix="rooftop-collectives-") as folder:
        command = [sys.executable, "-m", __name__, folder, ",".join(map(str, sizes)), *map(str, where)]
        logs = [Path(folder, f"log{rank}") for rank in range(len(where))]
        processes = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    arguments = [*command, str(rank)]
                    processes.append(subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT))
            _wait(processes, logs, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = json.loads(Path(folder, "rates.json").read_text(encoding="utf-8"))
    return {name: {int(size): rate for size, rate in rates.items()} for name, rates in found.items()}


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], timeout_s: float) -> None:
    """Wait until all processes have ended. The first failure ends the measurement, because the other processes would
    wait forever.
    """
    deadline = time.monotonic() + timeout_s
    codes = [process.poll() for process in processes]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.02)
        codes = [process.poll() for process in processes]
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        last = logs[failed[0]].read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise MeasurementError(f"collectives: process {failed[0]} of {len(codes)} failed: {last[-1] if last else '?'}")
    if None in codes:
        raise MeasurementError(
            f"collectives: process {codes.index(None)} of {len(codes)} had not finished after {timeout_s:g} s; "
            "NCCL_DEBUG=INFO in the environment shows what NCCL waits for"
        )


# ---- in each process ---------------------------------------------------------------------------------------------


def _measure(rank: int, devices: Sequence[torch.device], sizes: Sequence[int], folder: Path) -> None:
    """Join the process group, and measure each collective at each size. The first process writes the results."""
    device, count = devices[rank], len(devices)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, meeting = ("nccl" if device.type == "cuda" else "gloo"), f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=count)
    rates: dict[str, dict[int, float]] = {"all_reduce": {}, "all_gather": {}}
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before PyTorch 2.13
    for size in sizes:
        whole = torch.ones(size // 4, device=device)
        part = torch.ones(size // 4 // count, device=device)
        seconds = _seconds(lambda whole=whole: dist.all_reduce(whole), device, size)  # type: ignore[misc]
        rates["all_reduce"][size] = 2 * (count - 1) / count * size / seconds
        gather = lambda whole=whole, part=part: all_gather(whole, part)  # noqa: E731
        rates["all_gather"][size] = (count - 1) / count * size / _seconds(gather, device, size)
    if rank == 0:
        (folder / "rates.json").write_text(json.dumps(rates), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _seconds(collective: Callable[[], object], device: torch.device, size: int) -> float:
    """Seconds of one call of a collective on the slowest process. Each process takes the fastest of `SAMPLES` samples.
    Every process makes the same number of calls.
    """
    calls = max(2, min(50, (64 << 20) // size)) if device.type == "cuda" else 5
    samples = []
    for _ in range(1 + SAMPLES):  # the first sample warms up and is not counted
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            collective()
        synchronize(device)
        samples.append((time.perf_counter() - began) / calls)
    fastest: Tensor = torch.tensor(min(samples[1:]), device=device)
    dist.all_reduce(fastest, op=dist.ReduceOp.MAX)  # the slowest process determines the time of a call
    return float(fastest)


if __name__ == "__main__":
    _folder, _sizes, *_devices, _rank = sys.argv[1:]
    _measure(int(_rank), [torch.device(name) for name in _devices], list(map(int, _sizes.split(","))), Path(_folder))

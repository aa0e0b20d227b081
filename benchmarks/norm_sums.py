"""A sum over tensor parallel ranks and the norm after it: one fused kernel compared with NCCL and a norm, in us per
call.

    python benchmarks/norm_sums.py [--ranks 2] [--out benchmarks/results/h100/norm_sums.json]

Rows have 4096 or 8192 numbers in bfloat16, with a residual and an RMS norm, as in a decoding step with one row per
sequence. A CUDA graph contains 64 calls, each of which takes the result of the previous call. Figures are the median
times of the graph's replays on the slowest rank. The figures decide `rooftop.parallel.norm_sums.WORDS`, the size up to
which the fused kernel is faster than NCCL. `--quick` tests the script on a CPU, where ranks use gloo and have no fused
kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import Results
from torch import Tensor

from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.nn import RMSNorm
from rooftop.nn.norms import norm_of_sum
from rooftop.parallel import Layout, join, launched
from rooftop.parallel.exchanges import start_sum
from rooftop.parallel.norm_sums import Summand, norm_sums

CALLS, REPLAYS, REPEATS = 64, 20, 9
ROWS, COLUMNS = (1, 2, 4, 8, 16, 32), (4096, 8192)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100/norm_sums.json"))
    parser.add_argument("--ranks", type=int, default=2, help="number of GPUs [default: 2]")
    parser.add_argument("--quick", action="store_true", help="a tiny run on the CPU, to test the script")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.quick)
    if not options.quick and options.ranks > torch.cuda.device_count():
        parser.error(
            f"--ranks {options.ranks}: expected at most one rank for each of {torch.cuda.device_count()} "
            f"GPUs; --quick needs no GPU"
        )
    results = Results(options.out, ceilings_of("h200") if options.quick else measure_ceilings("cuda"))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows.json")
        subprocess.run([*start, __file__, *["--quick"] * options.quick, "--worker", str(found)], check=True)
        for row in json.loads(found.read_text()):
            results.add(row)
    return 0


def worker(path: Path, small: bool) -> int:
    """Run one rank. Rank 0 writes the measurements."""
    layout = Layout(tp=launched().size)
    with join(layout, device="cpu" if small else "cuda", timeout_s=120.0) as world:
        shapes = [(1, 32)] if small else [(rows, columns) for columns in COLUMNS for rows in ROWS]
        found = [row for shape in shapes for row in measured(*shape, world.device)]
        if world.rank == 0:
            path.write_text(json.dumps(found))
    return 0


@torch.no_grad()
def measured(rows: int, columns: int, device: torch.device) -> list[dict[str, Any]]:
    group, dtype = dist.group.WORLD, torch.bfloat16
    norm = RMSNorm(columns, eps=1e-5).to(device, dtype)
    x, y = (torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(2))
    sums = norm_sums(group, device)
    refused = sums.refused(rows, columns, dtype)

    def by_nccl(part: Tensor) -> Tensor:
        return norm_of_sum(norm, start_sum(part, group)(), x)[0]  # updates the tensors in place, as in inference

    def by_one_kernel(part: Tensor) -> Tensor:
        return Summand(part, None, sums).summed_and_normed(norm, x)[1]

    ways: dict[str, Callable[[Tensor], Tensor]] = {"NCCL and a norm": by_nccl}
    if not refused:
        ways["one kernel"] = by_one_kernel

    sizes = {"ranks": dist.get_world_size(), "rows": rows, "columns": columns}
    found = []
    for way, call in ways.items():
        us, spread = call_us(call, y, device)
        row = {"case": f"{rows}x{columns}", "variant": way, **sizes, "us": us, "spread": spread, "refused": refused}
        found.append(row)
    return found


def call_us(call: Callable[[Tensor], Tensor], first: Tensor, device: torch.device) -> tuple[float, float]:
    """Microseconds of a call on the slowest rank, and the spread over `REPEATS`."""

    def chain() -> None:
        y = first.clone()
        for _ in range(CALLS):
            y = call(y)

    chain()
    on_gpu = device.type == "cuda"
    run, replays = (captured(chain), REPLAYS) if on_gpu else (chain, 1)
    each = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(replays):
            run()
        if on_gpu:
            torch.cuda.synchronize(device)
        each.append(1e6 * (time.perf_counter() - begin) / (replays * CALLS))
    slowest = torch.tensor(each, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times = slowest.tolist()
    return statistics.median(times), (max(times) - min(times)) / statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())

"""Time conv_act's kernels and cuDNN on every convolution of ResNet-50, and print lines for
`kernels/convolutions/tables.py`.

    python benchmarks/tuning/conv_acts.py --out conv_acts.json [--batch 256 32 1] [--only 3x3] [--seconds 240]
    python benchmarks/tuning/conv_acts.py --quick

Figures are microseconds. `--only` selects jobs whose names contain the text, such as "3x3 128-128 28". `--quick` runs
tiny sizes on the CPU, through the interpreter.

Several processes compile the candidates by launching each once; they share Triton's cache. Then the candidates are
checked against torch and timed. All candidates of a shape are interleaved, in CUDA graphs whose operands do not stay in
L2. Candidates that do not compile or do not fit are recorded under "errors" and left out. The last rows add up the
network's convolutions, with the best candidate for each and with cuDNN.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if "--quick" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.hardware import compare
from rooftop.hardware.graphs import captured
from rooftop.kernels.convolutions.launches import copied, forward, plan_of
from rooftop.kernels.convolutions.tables import ConvPlan, ConvTile, Geometry, Problem, fitted
from rooftop.kernels.operands.activations import activated
from rooftop.whole_files import write_json

PEERS = ("torch", "library", "cudnn", "cudnn, benchmarked", "product")
L2_BYTES = 120_000_000  # no GPU's L2 holds operands of this many bytes


@dataclass(frozen=True)
class Job:
    """A convolution of ResNet-50, and how often the network has it."""

    channels: int
    size: int
    out_channels: int
    kernel: int
    stride: int
    residual: bool
    activation: str
    count: int

    def geometry(self, batch: int) -> Geometry:
        pairs = ((each, each) for each in (self.kernel, self.stride, self.kernel // 2, 1))
        return Geometry(batch, self.channels, self.size, self.size, self.out_channels, *pairs)

    def __str__(self) -> str:
        added = " +residual" * self.residual
        stride = f" /{self.stride}" if self.stride > 1 else ""
        window = f"{self.kernel}x{self.kernel}"
        return f"{window} {self.channels}-{self.out_channels} {self.size}{stride}{added} {self.activation}"


def stage(width: int, size: int, blocks: int) -> list[Job]:
    """The convolutions of a later stage (second to fourth). `size` is the side of the result."""
    return [
        Job(2 * width, 2 * size, width, 1, 1, False, "relu", 1),
        Job(width, 2 * size, width, 3, 2, False, "relu", 1),
        Job(width, size, width, 3, 1, False, "relu", blocks - 1),
        Job(width, size, 4 * width, 1, 1, True, "relu", blocks),
        Job(2 * width, 2 * size, 4 * width, 1, 2, False, "none", 1),
        Job(4 * width, size, width, 1, 1, False, "relu", blocks - 1),
    ]


JOBS = [
    Job(3, 224, 64, 7, 2, False, "relu", 1),
    Job(64, 56, 64, 1, 1, False, "relu", 1),
    Job(64, 56, 64, 3, 1, False, "relu", 3),
    Job(64, 56, 256, 1, 1, True, "relu", 3),
    Job(64, 56, 256, 1, 1, False, "none", 1),
    Job(256, 56, 64, 1, 1, False, "relu", 2),
    *stage(128, 28, 4),
    *stage(256, 14, 6),
    *stage(512, 7, 3),
]
TINY = [Job(3, 8, 16, 3, 2, False, "relu", 1), Job(16, 4, 16, 1, 1, True, "relu", 1)]


def p(rows: int, columns: int, depth: int, warps: int, stages: int, per_sm: int = 1, parts: int = 1) -> ConvTile:
    return ConvTile("persistent", rows, columns, depth, warps, stages, group=16, parts=parts, programs_per_sm=per_sm)


def s(rows: int, columns: int, depth: int, warps: int, stages: int, split: int = 1, early: bool = True) -> ConvTile:
    return ConvTile("single", rows, columns, depth, warps, stages, split=split, early=early)


def g(rows: int, columns: int, depth: int, warps: int, stages: int, split: int = 1, early: bool = True) -> ConvTile:
    return ConvTile("gathered", rows, columns, depth, warps, stages, split=split, early=early)


# In ptxas's output (Triton 3.6 and 3.7), no inspected candidate spills registers. Shared memory is at most 227 KiB per
# multiprocessor.
MANY = [
    p(128, 128, 64, 4, 3, 2, 2),
    p(128, 128, 64, 4, 3, 2, 4),
    p(128, 128, 64, 4, 2, 2, 2),
    p(128, 128, 64, 8, 5, 1, 2),
    p(256, 128, 64, 8, 3, 1, 2),
    p(256, 128, 64, 8, 4, 1, 4),
    p(128, 256, 64, 8, 3, 1, 2),
    p(256, 64, 64, 4, 3, 2, 4),
    p(128, 64, 64, 4, 4, 2, 2),
    p(128, 64, 64, 4, 3, 3, 2),
    s(128, 128, 64, 4, 2),
    s(128, 128, 64, 4, 3),
    s(64, 128, 64, 4, 3),
    s(128, 64, 64, 4, 3),
    g(128, 128, 64, 8, 3),
    g(128, 64, 64, 4, 3),
]
STEM = [
    p(128, 64, 32, 4, 4, 3, 2),
    p(128, 64, 32, 4, 5, 4, 4),
    p(256, 64, 32, 4, 4, 2, 2),
    p(256, 64, 32, 8, 4, 2, 2),
    p(256, 64, 32, 4, 4, 3, 4),
    s(128, 64, 32, 4, 4),
    s(256, 64, 32, 8, 4),
    g(128, 64, 32, 4, 3),
    g(128, 64, 64, 4, 2),
    g(256, 64, 32, 8, 2),
]
FEW = [
    *[s(64, 64, 64, 4, 4, split) for split in (1, 2, 4, 8)],
    s(64, 64, 64, 4, 4, 4, early=False),
    *[s(32, 64, 64, 4, 5, split) for split in (1, 2, 4, 8)],
    s(64, 64, 128, 4, 3, 2),
    s(64, 64, 128, 4, 3, 8),
    s(32, 64, 128, 4, 4, 4),
    s(16, 64, 128, 4, 4, 2),
    s(32, 128, 64, 4, 4, 4),
    s(64, 128, 64, 4, 4, 16),
    g(64, 64, 64, 4, 4, 4),
    g(32, 64, 128, 4, 3, 4),
]
FEW_STEM = [s(64, 64, 32, 4, 4), s(128, 64, 32, 4, 4), s(32, 64, 32, 4, 5), g(64, 64, 32, 4, 3), g(64, 64, 64, 4, 2)]
TRIED = [p(16, 32, 16, 4, 2), s(16, 32, 16, 4, 2, 2), g(16, 32, 16, 4, 2, 2)]


def candidates(job: Job, batch: int, device: str) -> list[ConvTile]:
    """The suitable candidates without duplicates, each adapted as `tables.py` adapts its entries."""
    if device == "cpu":
        tiles = TRIED
    elif job.channels < 8:
        tiles = STEM if batch > 8 else FEW_STEM
    else:
        tiles = MANY if batch > 8 else FEW
    x, weight, _, added = operands(job, 1, "meta")
    problem = Problem(
        job.geometry(batch), job.residual, keep=False, dtype=torch.bfloat16, device="cuda", kernels=True,
        channels_last=True, copied=copied(x, weight, added, job.geometry(1)), cudnn=True, sms=132, capability=9,
    )  # fmt: skip
    return list(dict.fromkeys(fitted(tile, problem) for tile in tiles))


def label(tile: ConvTile) -> str:
    text = f"{tile.kernel[0]}{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
    text += f" parts{tile.parts}" * (tile.parts > 1) + f" split{tile.split}" * (tile.split > 1)
    return text + f" x{tile.programs_per_sm}" * (tile.programs_per_sm > 1) + " early" * tile.early


Operands = tuple[Tensor, Tensor, Tensor, Tensor | None]


def operands(job: Job, batch: int, device: str, filled: bool = True) -> Operands:
    geometry = job.geometry(batch)

    def random(*size: int) -> Tensor:
        t = torch.empty(size, dtype=torch.bfloat16, device=device)
        t = t.contiguous(memory_format=torch.channels_last) if len(size) == 4 else t
        return t.normal_() if filled and device != "meta" else t

    weight = random(job.out_channels, job.channels, job.kernel, job.kernel)
    weight *= (job.channels * job.kernel**2) ** -0.5
    added = random(batch, job.out_channels, *geometry.out) if job.residual else None
    return random(batch, job.channels, job.size, job.size), weight, random(job.out_channels), added


Task = tuple[ConvTile, Job, int]
_broken = False


def name_of(task: Task) -> str:
    tile, job, batch = task
    return f"{job}, batch {batch}: {label(tile)}"


def compile_one(task: Task) -> tuple[str, str]:
    """Launch a candidate once, in a separate process."""
    global _broken
    tile, job, batch = task
    try:
        x, weight, bias, added = operands(job, batch, "cuda", filled=False)
        forward(ConvPlan(tile.kernel, tile, ""), x, weight, bias, added, job.geometry(batch), job.activation, False)
        torch.cuda.synchronize()
        del x, added
        torch.cuda.empty_cache()
        return name_of(task), ""
    except Exception as error:
        if _broken:
            return name_of(task), ""  # an earlier kernel broke this process, so the parent tries this candidate
        _broken = "CUDA error" in str(error)
        return name_of(task), f"{type(error).__name__}: {str(error)[:200]}"


def by_torch(job: Job, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None) -> Tensor:
    """The in-place torch calls that a network with folded norms makes."""
    y = functional.conv2d(x, weight, bias, job.stride, job.kernel // 2)
    y = y if added is None else y.add_(added)
    return y.relu_() if job.activation == "relu" else y


def check(tile: ConvTile, job: Job, given: Operands) -> None:
    """Check the first and the last image against torch in float32."""
    x, weight, bias, added = given
    geometry = job.geometry(x.shape[0])
    y, _ = forward(ConvPlan(tile.kernel, tile, ""), x, weight, bias, added, geometry, job.activation, False)
    for image in (slice(0, 1), slice(-1, None)):
        sums = functional.conv2d(x[image].float(), weight.float(), bias.float(), job.stride, job.kernel // 2)
        expected = activated(sums if added is None else sums + added[image].float(), job.activation)
        assert (y[image].float() - expected).abs().max() < 1e-2 * (1 + expected.abs().max()), "wrong"


def variants(job: Job, batch: int, tiles: list[ConvTile], device: str) -> dict[str, Callable[..., object]]:
    geometry = job.geometry(batch)

    def ours(plan: ConvPlan) -> Callable[..., object]:
        return lambda x, w, b, r: forward(plan, x, w, b, r, geometry, job.activation, False)

    def benchmarked(x: Tensor, w: Tensor, b: Tensor, r: Tensor | None) -> object:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            return forward(ConvPlan("cudnn", None, ""), x, w, b, r, geometry, job.activation, False)

    found: dict[str, Callable[..., object]] = {
        "torch": lambda x, w, b, r: by_torch(job, x, w, b, r),
        "library": ours(ConvPlan("library", None, "")),
    }
    if job.activation == "relu" and device == "cuda":
        found |= {"cudnn": ours(ConvPlan("cudnn", None, "")), "cudnn, benchmarked": benchmarked}
    if geometry.pointwise and not job.residual:
        found["product"] = ours(ConvPlan("product", None, ""))
    return found | {label(tile): ours(ConvPlan(tile.kernel, tile, "")) for tile in tiles}


def measure(job: Job, batch: int, tiles: list[ConvTile], device: str, seconds: float) -> dict[str, Any]:
    first = operands(job, batch, device)
    one = sum(t.numel() * t.element_size() for t in first if t is not None)
    count = max(1, min(16, -(-L2_BYTES // one))) if device == "cuda" else 1
    sets = [first, *(operands(job, batch, device) for _ in range(count - 1))]
    calls, failed = {}, {}
    for name, fn in variants(job, batch, tiles, device).items():
        try:
            fn(*first)
            replay = lambda fn=fn: [fn(*each) for each in sets]  # noqa: E731
            calls[name] = captured(replay) if device == "cuda" else replay
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:150]}"
    times = compare(calls, device=device, seconds=seconds, warm_up_seconds=seconds / 3)
    us = {name: round(t.median_ms / count * 1e3, 3) for name, t in times.items()}
    x, weight, bias, added = first
    planned = plan_of(x, weight, bias, added, job.geometry(batch), job.activation, False)
    taken = label(planned.tile) if planned.tile else planned.backend
    best = min((name for name in us if name not in ("torch", "cudnn, benchmarked")), key=us.__getitem__)
    row = {"job": str(job), **asdict(job), "batch": batch, "sets": count, "us": us, "best": best, "taken": taken}
    return row | {"failed": failed, "line": line(job, batch, best, us, tiles)}


def line(job: Job, batch: int, best: str, us: dict[str, float], tiles: list[ConvTile]) -> str:
    """The table's line for the best candidate of a job."""
    tile = next((tile for tile in tiles if label(tile) == best), None)
    geometry = job.geometry(batch)
    shape = (geometry.rows, job.out_channels, job.channels, geometry.taps, job.stride, job.residual)
    shown = "None"
    if tile is not None:
        plain = ConvTile(tile.kernel, tile.rows, tile.columns, tile.depth, tile.warps, tile.stages)
        options = {k: v for k, v in asdict(tile).items() if v != getattr(plain, k)}
        sizes = ", ".join(map(str, (tile.rows, tile.columns, tile.depth, tile.warps, tile.stages)))
        shown = f'ConvTile("{tile.kernel}", {sizes}{"".join(f", {k}={v}" for k, v in options.items())})'
    backend = tile.kernel if tile is not None else best
    return f'Entry({shape}, "{backend}", {shown}, {us[best] / 1e3:.4g}, {us["library"] / 1e3:.4g}),'


def totals(rows: list[dict[str, Any]], batch: int) -> dict[str, Any] | None:
    """Total times of the network's convolutions at a batch size, by the best candidates and, if measured, by torch and
    cuDNN."""
    measured = [row for row in rows if row["batch"] == batch]
    if len(measured) < len(JOBS):
        return None
    of_peer = {
        "best": lambda us, best: us[best],
        "library": lambda us, best: us["library"],
        "torch": lambda us, best: us["torch"],
        "cudnn": lambda us, best: min(us.get("cudnn", us["library"]), us.get("cudnn, benchmarked", math.inf)),
    }
    us = {
        name: round(sum(row["count"] * take(row["us"], row["best"]) for row in measured), 1)
        for name, take in of_peer.items()
    }
    return {"batch": batch, "us": us, "images_per_second": {name: round(batch / t * 1e6) for name, t in us.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1, 32])
    parser.add_argument("--only", default="", help="run only jobs whose names contain this")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="run tiny sizes on the CPU, to test the script")
    options = parser.parse_args()
    began = time.perf_counter()
    device, jobs, batches = ("cpu", TINY, [2]) if options.quick else ("cuda", JOBS, options.batch)
    work = [(job, batch) for batch in batches for job in jobs if options.only in str(job)]
    if not work:
        sys.exit(f"no job has {options.only!r} in its name; there are: {'; '.join(map(str, jobs))}")
    errors: dict[str, str] = {}
    rows: list[dict[str, Any]] = []

    def save() -> None:
        if options.out:
            name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
            sums = [found for batch in batches if (found := totals(rows, batch))]
            content = {"device": name, "torch": torch.__version__, "rows": rows, "totals": sums, "errors": errors}
            write_json(options.out, content)

    waiting: dict[Task, Any] = {}
    pool: Any = None
    if device == "cuda":
        assert not torch.cuda.is_initialized()  # after CUDA's initialization, forked processes cannot use the GPU
        pool = multiprocessing.get_context("fork").Pool(options.processes)
        for job, batch in work:
            for tile in candidates(job, batch, device):
                waiting[tile, job, batch] = pool.apply_async(compile_one, ((tile, job, batch),))

    def fits(task: Task, given: Operands) -> bool:
        name = name_of(task)
        try:
            if task in waiting and (error := waiting[task].get(0)[1]):
                raise RuntimeError(error)
            check(*task[:2], given)
            return True
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error)[:200]}"
            print("left out:", name, errors[name][:120], flush=True)
            return False

    # All candidates are compiled before the first timing, which launches of other processes would disturb.
    for result in waiting.values():
        result.wait(max(0.0, 0.6 * options.seconds - (time.perf_counter() - began)))
    late = [task for task, result in waiting.items() if not result.ready()]
    errors |= {name_of(task): "not compiled in time" for task in late}
    if pool is not None:
        print(
            f"{len(waiting)} candidates, {len(late)} of them not compiled after {time.perf_counter() - began:.1f} s",
            flush=True,
        )
        pool.terminate()
    for job, batch in work:
        if time.perf_counter() - began > 0.95 * options.seconds and not options.quick:
            print(f"out of time before {job}, batch {batch}")
            break
        given = operands(job, batch, device)
        tasks = [(tile, job, batch) for tile in candidates(job, batch, device)]
        tiles = [task[0] for task in tasks if name_of(task) not in errors and fits(task, given)]
        del given
        row = measure(job, batch, tiles, device, 0.03 if device == "cuda" else 0.002)
        rows.append(row)
        save()
        us = row["us"]
        ranked = sorted((name for name in us if name not in PEERS), key=us.__getitem__)
        peers = "  ".join(f"{name} {us[name]:.1f}" for name in PEERS if name in us)
        ours = "  ".join(f"[{name}] {us[name]:.1f}" for name in ranked[:4])
        print(f"{job}, batch {batch}: {peers} | {ours} | chosen by the tables: {row['taken']}", flush=True)
        for name, error in row["failed"].items():
            print("  failed:", name, error)
    print("\n".join(row["line"] for row in rows))
    for batch in batches:
        if found := totals(rows, batch):
            print(f"batch {batch}: {found['us']} us, {found['images_per_second']} images/s for the convolutions alone")
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()

"""Tune linear_act's tiles for `kernels/matmuls/tables.py`, and compare with cuBLAS and torch.compile.

    python benchmarks/tuning/matmuls.py --out matmuls.json [--seconds 60] [--processes 15]
    python benchmarks/tuning/matmuls.py --quick

Figures are TFLOP/s. `--quick` runs tiny sizes on the CPU, through the interpreter.

Several processes compile the candidates by launching each once on small operands; they share Triton's cache. Then the
candidates are checked against torch and timed. All candidates of a shape are interleaved, in CUDA graphs whose operands
do not stay in L2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--quick" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.hardware import compare
from rooftop.hardware.graphs import captured
from rooftop.kernels.matmuls import launches as matmul_launches
from rooftop.kernels.matmuls.launches import forward
from rooftop.kernels.matmuls.tables import LinearPlan, Tile
from rooftop.whole_files import write_json

LIB = LinearPlan("library", None, "")
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}
ALL = 1 << 20  # so many programs per SM that each tile has its own program


def d(rows: int, columns: int, depth: int, warps: int, stages: int, **more: int) -> Tile:
    return Tile("descriptors", rows, columns, depth, warps, stages, **more)  # type: ignore[arg-type]


def s(rows: int, columns: int, depth: int, warps: int, stages: int, **more: int) -> Tile:
    return Tile("single", rows, columns, depth, warps, stages, **more)  # type: ignore[arg-type]


def p(rows: int, columns: int, depth: int, warps: int, stages: int, **more: int) -> Tile:
    return Tile("pointers", rows, columns, depth, warps, stages, **more)  # type: ignore[arg-type]


# The most promising come first. In ptxas's output, none spills registers. Shared memory is at most 227 KiB per
# multiprocessor. `lag` is in clock cycles per element of K. At the tensor cores' peak, a tile of 128 x 128 takes 8
# cycles, and a tile of 64 x 128 takes 4. The lag should be half of these cycles.
LARGE = [
    d(128, 128, 64, 4, 3, parts=2, programs_per_sm=2, group=16, lag=5),
    d(128, 128, 64, 4, 3, parts=2, programs_per_sm=2, group=16),
    d(128, 128, 64, 4, 3, parts=2, programs_per_sm=2, group=16, lag=3),
    d(128, 128, 64, 4, 3, parts=2, programs_per_sm=2, group=16, lag=8),
    d(128, 256, 64, 8, 3),
    d(128, 128, 64, 4, 3, parts=4, programs_per_sm=2, group=16, lag=5),
    s(128, 128, 64, 4, 3, parts=2, group=16),
    d(128, 128, 64, 4, 2, parts=4, programs_per_sm=3, group=16),
    d(128, 256, 64, 8, 4, parts=2),
    d(256, 128, 64, 8, 4, parts=2),
    s(256, 128, 64, 8, 4, parts=2),
]
# One tile for each multiprocessor, or two small tiles.
SMALL = [
    s(128, 128, 64, 4, 6, parts=2),
    s(128, 128, 64, 8, 6, parts=2),
    d(128, 128, 64, 4, 6, parts=2),
    d(64, 128, 64, 4, 4, programs_per_sm=2, lag=3),
    d(64, 128, 64, 4, 4, programs_per_sm=2),
    s(128, 128, 128, 8, 3, parts=2),
    s(64, 128, 64, 4, 4),
    d(128, 128, 64, 8, 6, parts=2),
    s(64, 256, 64, 4, 4, parts=2),
    s(128, 64, 64, 4, 4),
    s(128, 128, 64, 4, 6, parts=2, early=True),
    s(128, 128, 64, 8, 6, parts=2, early=True),
]
# A result of 4096 x 768 has 128 tiles of 128 x 192, about one per multiprocessor.
NARROW = [
    s(128, 128, 64, 8, 4, parts=2, more=64),
    s(128, 128, 64, 8, 5, parts=2, more=64),
    d(128, 128, 64, 4, 3, parts=4, programs_per_sm=2, group=16, lag=5),
    s(64, 128, 64, 4, 3, parts=2, more=64),
    s(128, 128, 64, 4, 3, parts=2),
]
FEW = [
    d(64, 64, 128, 4, 4, split=4),
    d(64, 128, 128, 4, 3, split=4),
    d(64, 32, 256, 4, 3, split=2),
    d(64, 64, 128, 4, 4, split=8),
    p(16, 64, 256, 4, 3, split=4),
    p(16, 128, 128, 4, 4, split=8),
    p(64, 64, 128, 4, 3, split=4),
    d(64, 64, 128, 4, 4, split=2),
]
# For odd K or N: `d` loads padded copies by descriptors, `p` loads two bytes at a time.
ODD = [
    d(128, 256, 64, 8, 3, parts=2),
    d(128, 128, 64, 4, 3, parts=2, programs_per_sm=2),
    p(128, 128, 32, 8, 4),
    p(128, 128, 64, 8, 3),
]

# (M, N, K, activation, kept, residual, candidates, how many of the candidates fastest so far to try (0: all))
Job = tuple[int, int, int, str, bool, bool, list[Tile], int]
JOBS: list[Job] = [
    (4096, 4096, 4096, "sigmoid", False, False, LARGE, 0),
    (512, 4096, 4096, "sigmoid", False, False, SMALL, 0),
    (4096, 768, 3072, "none", False, True, NARROW, 0),
    (4096, 4096, 4096, "gelu", False, False, LARGE, 5),
    (512, 4096, 4096, "gelu", False, False, SMALL, 3),
    (4096, 3072, 768, "gelu_tanh", False, False, LARGE, 4),
    (4096, 3072, 768, "gelu_tanh", True, False, LARGE, 3),
    (8192, 8192, 8192, "gelu", False, False, LARGE, 3),
    (4096, 768, 3072, "gelu", False, True, NARROW, 2),
    (2048, 4096, 4096, "silu", False, False, LARGE, 3),
    (1024, 4096, 4096, "silu", False, False, SMALL, 3),
    (64, 4096, 4096, "silu", False, False, FEW, 0),
    (16, 4096, 4096, "silu", False, False, FEW, 0),
    (4096, 4096, 4095, "silu", False, False, ODD, 0),
    (4096, 4096, 4096, "none", False, False, LARGE, 2),
]  # fmt: skip
LATER = 8  # jobs from this index on only extend the tables
TINY: list[Job] = [
    (40, 64, 48, "sigmoid", False, False, [d(32, 32, 16, 4, 2), d(32, 32, 16, 4, 2, parts=2, split=2)], 0),
    (40, 64, 48, "gelu", True, False, [p(32, 32, 16, 4, 2)], 1),
    (40, 64, 48, "gelu", False, True, [s(32, 32, 16, 4, 2, parts=2, more=16)], 1),
]


def label(tile: Tile) -> str:
    text = f"{tile.kernel[0]}{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
    for name, plain in (("parts", 1), ("split", 1), ("group", 8), ("lag", 0), ("more", 0), ("early", False)):
        value = getattr(tile, name)
        text += f" {name}{value}" if value != plain else ""
    per_sm = tile.programs_per_sm
    return text + ("" if per_sm == 1 else " all" if per_sm == ALL else f" x{per_sm}")


def operands(m: int, n: int, k: int, residual: bool, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).bfloat16()

    return random(m, k), random(n, k) / k**0.5, random(n), random(m, n) if residual else None


def compile_one(task: tuple[Tile, str, bool, bool, int]) -> tuple[str, str]:
    """Launch a candidate once in a separate process, on small operands for which the compiler makes the same kernel."""
    global _broken
    tile, activation, keep, residual, odd = task
    name = f"{label(tile)}|{activation}|{keep}|{residual}|{odd}"
    try:
        k = max(512, tile.depth * tile.split * 2) - odd
        x, weight, bias, added = operands(max(256, tile.rows), max(512, tile.columns), k, residual, "cuda")
        forward(LinearPlan(tile.kernel, tile, ""), x, weight, bias, activation, added, keep)
        torch.cuda.synchronize()
        return name, ""
    except Exception as error:
        if _broken:
            return name, ""  # an earlier kernel broke this process, so the parent tries this candidate
        _broken = "CUDA error" in str(error)
        return name, f"{type(error).__name__}: {str(error)[:200]}"


_broken = False


def check(tile: Tile, job: Job, device: str) -> None:
    """Check against torch in float32, on operands of the job's size with at most 1008 rows, which tiles do not
    divide."""
    m, n, k, activation, keep, residual, *_ = job
    x, weight, bias, added = operands(min(m, 1008), n, k, residual, device)
    y, before = forward(LinearPlan(tile.kernel, tile, ""), x, weight, bias, activation, added, keep)
    z = functional.linear(x.float(), weight.float(), bias.float())
    expected = TORCH[activation](z) + (added.float() if added is not None else 0)
    assert (y.float() - expected).abs().max() < 4e-2 * (1 + expected.abs().max() / 4), "wrong"
    assert not keep or (before.float() - z).abs().max() < 4e-2 * (1 + z.abs().max() / 4), "wrong before"


def variants(job: Job, tiles: list[Tile], device: str) -> dict[str, Callable[..., object]]:
    _, _, _, activation, keep, *_ = job

    def eager(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None) -> Tensor:
        y = TORCH[activation](functional.linear(x, weight, bias))
        return y if added is None else y + added

    def ours(plan: LinearPlan) -> Callable[..., object]:
        return lambda x, w, b, r: forward(plan, x, w, b, activation, r, keep)

    found: dict[str, Callable[..., object]] = {
        "bare": lambda x, w, b, r: torch.mm(x, w.t()),
        "bare+bias": lambda x, w, b, r: functional.linear(x, w, b),
        "torch": eager,
        "library": ours(LIB),
    }
    if device == "cuda" and job in JOBS[:2]:  # only for two jobs, since torch.compile takes seconds
        torch._dynamo.reset()
        found["compile"] = torch.compile(eager, dynamic=False)
    return found | {label(tile): ours(LinearPlan(tile.kernel, tile, "")) for tile in tiles}


def measure(job: Job, tiles: list[Tile], device: str, seconds: float) -> dict[str, Any]:
    m, n, k, activation, keep, residual, *_ = job
    one = 2 * (m * k + n * k + m * n * (1 + keep + residual))
    count = max(1, min(8, -(-120_000_000 // one))) if device == "cuda" else 1
    sets = [operands(m, n, k, residual, device) for _ in range(count)]
    calls, failed = {}, {}
    for name, fn in variants(job, tiles, device).items():
        try:
            fn(*sets[0])
            replay = lambda fn=fn: [fn(*each) for each in sets]  # noqa: E731
            calls[name] = captured(replay) if device == "cuda" else replay
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:150]}"
    times = compare(calls, device=device, seconds=seconds, warm_up_seconds=seconds / 3)
    ms = {name: t.median_ms / count for name, t in times.items()}
    tflops = {name: round(2 * m * n * k / value / 1e9, 1) for name, value in ms.items()}
    row = {"shape": [m, n, k], "activation": activation, "keep": keep, "residual": residual, "sets": count, "ms": ms}
    return {**row, "tflops": tflops, "failed": failed}


def pointwise(device: str, seconds: float) -> list[dict[str, Any]]:
    """Times of the kernel that adds the epilogue to a library's product, and of its gradient's kernel, in ms at 4096 x
    4096."""
    size = 4096 if device == "cuda" else 64
    z, dy = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    y = torch.empty_like(z)
    rows = []
    for name, fn in (
        ("finish", lambda: matmul_launches.finish(z, 1, size, None, "sigmoid", None, y, y.new_empty(0))),
        ("backward", lambda: matmul_launches.backward(dy, z, "gelu", False, True)),
    ):
        calls: dict[str, Callable[[], object]] = {}
        if name == "finish":
            calls["torch"] = lambda: torch.sigmoid(z)
            settings = [
                (2048, 512, 4),
                (4096, 1024, 4),
                (2048, 2048, 4),
                (4096, 512, 8),
                (1024, 512, 4),
                (8192, 1024, 8),
            ]
            names = ("FINISH_ELEMENTS", "FINISH_COLUMNS", "FINISH_WARPS")
        else:
            calls["torch"] = lambda: torch.ops.aten.gelu_backward(dy, z).sum(0)
            settings = [
                (16, 128, 4, 8),
                (32, 128, 8, 4),
                (8, 128, 4, 8),
                (8, 128, 2, 16),
                (16, 64, 4, 8),
                (16, 128, 8, 8),
            ]
            names = ("BACKWARD_ROWS", "BACKWARD_COLUMNS", "BACKWARD_WARPS", "BACKWARD_PROGRAMS_PER_SM")
        before = [getattr(matmul_launches, each) for each in names]
        for values in settings:
            for each, value in zip(names, values, strict=True):
                setattr(matmul_launches, each, value)
            fn()
            if device == "cuda":
                calls[str(values)] = captured(fn)
        for each, value in zip(names, before, strict=True):
            setattr(matmul_launches, each, value)
        if device == "cuda":
            calls["torch"] = captured(calls["torch"])
        else:
            calls["ours"] = fn
        ms = {key: t.median_ms for key, t in compare(calls, device=device, seconds=seconds).items()}
        rows.append({"kernel": name, "size": size, "ms": ms})
        print(name, "  ".join(f"{key} {value * 1e3:.1f} us" for key, value in ms.items()), flush=True)
    return rows


def chosen(job: Job, best: dict[int, list[Tile]]) -> list[Tile]:
    """The candidates of a job: its whole list, or the list's best candidates, as measured at the list's first shape."""
    tiles, most = job[6], job[7]
    return best.get(id(tiles), tiles)[:most] if most else tiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="run tiny sizes on the CPU, to test the script")
    options = parser.parse_args()
    began = time.perf_counter()
    device, jobs = ("cpu", TINY) if options.quick else ("cuda", JOBS)
    errors: dict[str, str] = {}
    rows: list[dict[str, Any]] = []

    def save() -> None:
        if options.out:
            name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
            write_json(options.out, {"device": name, "rows": rows, "errors": errors})

    pool: Any = None
    if device == "cuda":
        assert not torch.cuda.is_initialized()  # after CUDA's initialization, forked processes cannot use the GPU
        pool = multiprocessing.get_context("fork").Pool(options.processes)

    def precompile(jobs: list[Job], best: dict[int, list[Tile]], until: float) -> None:
        nonlocal pool
        if pool is None:
            return
        tasks = [(t, j[3], j[4], j[5], j[2] % 2) for j in jobs for t in chosen(j, best)]
        waiting = [(task, pool.apply_async(compile_one, (task,))) for task in tasks]
        for task, result in waiting:
            try:
                name, error = result.get(max(0.1, began + until - time.perf_counter()))
            except multiprocessing.TimeoutError:
                name, error = "|".join(map(str, (label(task[0]), *task[1:]))), "not compiled in time"
            if error:
                errors[name] = error
                print("left out:", name, error[:120], flush=True)
        if any(error == "not compiled in time" for error in errors.values()):
            # a kernel may hang, so the processes are ended, and remaining candidates compile when they are timed
            pool.terminate()
            pool = None
        print(f"{len(tasks)} compiled after {time.perf_counter() - began:.1f} s", flush=True)

    if device == "cuda":
        precompile(jobs[:2], {}, 0.45 * options.seconds)
    best: dict[int, list[Tile]] = {}
    for index, job in enumerate(jobs):
        if index == 2 and device == "cuda":
            precompile(jobs[2:LATER], best, 0.75 * options.seconds)
        if index == LATER:
            rows.extend(pointwise(device, 0.04))
            save()
            precompile(jobs[LATER:], best, 0.85 * options.seconds)
        if index and time.perf_counter() - began > 0.9 * options.seconds:
            print(f"out of time before {job[:6]}")
            break
        tiles = []
        for tile in chosen(job, best):
            name = f"{label(tile)}|{job[3]}|{job[4]}|{job[5]}|{job[2] % 2}"
            if name in errors:
                continue
            try:
                check(tile, job, device)
                tiles.append(tile)
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {str(error)[:200]}"
                print("left out:", name, errors[name][:120], flush=True)
        row = measure(job, tiles, device, 0.04 if device == "cuda" else 0.002)
        rows.append(row)
        save()
        ranked = sorted(tiles, key=lambda tile: row["ms"].get(label(tile), 1e9))
        if not job[7]:
            best[id(job[6])] = ranked
        rate = row["tflops"]
        tried = {label(tile) for tile in tiles}
        peers = "  ".join(f"{key} {value}" for key, value in rate.items() if key not in tried)
        ours = "  ".join(f"[{label(t)}] {rate.get(label(t))}" for t in ranked[:5])
        goal = rate[label(ranked[0])] / rate["bare"] if ranked and rate.get("bare") else 0
        print(
            f"{tuple(job[:3])} {job[3]}{' kept' * job[4]}{' +res' * job[5]}: {peers} | {ours} | best/bare {goal:.3f}",
            flush=True,
        )
        for name, error in row["failed"].items():
            print("  failed:", name, error)
    if options.quick:
        rows.extend(pointwise(device, 0.002))
        save()
    if pool is not None:
        pool.terminate()
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()

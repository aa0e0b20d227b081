"""The effect of launch parameters on the speed of the layer norm, from which the tables in `norms/tables.py` were
chosen.

    python benchmarks/kernels/norm_variants.py [--out benchmarks/results/h200/norm_variants.json] [--sizes 512 1024]

Figures are TB/s of the bytes that must move, for 2^27 elements in bfloat16. Kernels are called without autograd. For
comparison, torch's copy and its sum of two tensors of the same size are timed, too. For each size, the file keeps the
five best variants, and the best backward for each number of stages (rows fetched ahead). Rows with an odd number of
elements are loaded here without the kernels for unaligned rows. Kernels are compiled first, by one process per core.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from rooftop.hardware import measure
from rooftop.kernels.norms import launches, plans, tables
from rooftop.kernels.norms.tables import BackwardConfig, ForwardConfig
from rooftop.whole_files import write_json

SIZES = (128, 256, 512, 768, 1024, 2048, 2601, 4096, 5120, 8192, 11008, 16384, 32768, 50257)
ELEMENTS = 1 << 27
Variant = ForwardConfig | BackwardConfig | None  # None: the kernels that take rows of any length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="other sizes N")
    parser.add_argument("--compile-only", metavar="I/N", help="only compile every N-th variant from the I-th on")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    tables.SHIFTED_FROM = 1 << 30
    if options.compile_only:
        index, count = map(int, options.compile_only.split("/"))
        for columns in options.sizes:
            problem = Problem(64, columns)
            for variant in itertools.islice(kernels(columns), index, None, count):
                run(problem, variant)
        return
    compile_ahead(options.sizes)
    plain = measure_plain()
    rows = [row for columns in options.sizes for row in measure_size(columns)]
    if options.out:
        found = {"device": torch.cuda.get_device_name(), "dtype": "bfloat16", "unit": "TB/s", **plain, "variants": rows}
        write_json(options.out, found)


def variants(columns: int) -> Iterator[Variant]:
    """The launch parameters with a sensible number of elements per thread."""
    width = 1 << (columns - 1).bit_length()
    blocks = [block for block in (width, width // 2, width // 4, width // 8) if block >= 64]
    for rows, block, warps in itertools.product((1, 2, 4, 8, 16), blocks, (1, 2, 4, 8, 16, 32)):
        held = rows * -(-columns // block) * block / warps / 32  # elements a thread
        if held < 8 or rows * block / warps / 32 < 2 or rows * width > max(4096, width):
            continue
        if held <= 128:
            yield ForwardConfig(columns, rows, block, warps)
        if held > 64 or columns > 16384:
            continue
        for stages, programs, hold in itertools.product((1, 3, 4), (1, 2, 3, 4, 6, 8, 12, 16), (False, True)):
            if 12 <= programs * warps <= 32:
                yield BackwardConfig(columns, rows, block, warps, programs, stages, hold)
                if width >= 8192 and stages == 1:
                    yield BackwardConfig(columns, rows, block, warps, programs, stages, hold, again=True)
    yield None


def kernels(columns: int) -> list[Variant]:
    """One variant for each kernel to compile. Variants that differ only in the number of programs share a kernel."""
    found = list(variants(columns))
    alike = {replace(v, programs_per_sm=1) if isinstance(v, BackwardConfig) else v: v for v in found}
    return list(alike.values())


class Problem:
    """Inputs of both directions."""

    def __init__(self, rows: int, columns: int) -> None:
        self.x, self.dy = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.weight, self.bias = (torch.randn(columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.mean = self.x.float().mean(1)
        self.rstd = 1 / self.x.float().std(1)


def run(problem: Problem, variant: Variant) -> Callable[[], object] | None:
    """A call with these launch parameters, after a first run; None if the kernel does not fit on the GPU."""
    p = problem

    def forward() -> object:
        return launches.forward(p.x, None, None, p.weight, p.bias, 1e-5, rms=False, dtype=p.x.dtype)

    def backward() -> object:
        gradients = torch.empty_like(p.weight), torch.empty_like(p.bias)
        return launches.backward(p.dy, None, p.x, p.weight, p.mean, p.rstd, *gradients)

    table = () if variant is None else (variant,)
    if isinstance(variant, ForwardConfig):
        call, tables.FORWARD = forward, table  # type: ignore[assignment]
    else:
        call, tables.BACKWARD = backward, table  # type: ignore[assignment]
    plans.forget()
    try:
        call()
    except OutOfResources:
        return None
    return call


def compile_ahead(sizes: list[int]) -> None:
    count = os.cpu_count() or 1
    command = [sys.executable, __file__, "--sizes", *map(str, sizes), "--compile-only"]
    workers = [subprocess.Popen([*command, f"{index}/{count}"]) for index in range(count)]
    if sum(worker.wait() for worker in workers):
        raise SystemExit("a variant could not be compiled: see above")


def measure_plain() -> dict[str, float]:
    a, b, out = (torch.randn(ELEMENTS, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = {"copy": rate(lambda: out.copy_(a), 2), "add": rate(lambda: torch.add(a, b, out=out), 3)}
    print("  ".join(f"{name} {tb:.2f} TB/s" for name, tb in found.items()))
    return found


def measure_size(columns: int) -> list[dict[str, Any]]:
    problem = Problem(ELEMENTS // columns, columns)
    found: dict[str, list[dict[str, Any]]] = {"forward": [], "backward": []}
    for variant in variants(columns):
        call = run(problem, variant)
        if call is None:
            continue
        direction, tensors = ("forward", 2) if isinstance(variant, ForwardConfig) else ("backward", 3)
        parameters = {"any_length": True} if variant is None else asdict(variant) | {"columns": columns}
        found[direction].append({"columns": columns, "direction": direction, **parameters, "rate": rate(call, tensors)})
    best = [row for rows in found.values() for row in best_of(rows)]
    for row in best:
        parameters = {k: v for k, v in row.items() if k not in ("columns", "direction", "rate") and v is not False}
        print(f"N={columns} {row['direction']} {row['rate']:.2f}", *(f"{k} {v}" for k, v in parameters.items()))
    return best


def best_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The five fastest variants, and the fastest one for each number of stages."""
    ranked = sorted(rows, key=lambda row: -row["rate"])
    by_stages = {row.get("stages"): row for row in reversed(ranked)}
    return [row for index, row in enumerate(ranked) if index < 5 or row is by_stages[row.get("stages")]]


def rate(call: Callable[[], object], tensors: int) -> float:
    """TB/s of a call that moves this many tensors of ELEMENTS bfloat16 numbers."""
    timing = measure(call, device="cuda", seconds=0.01, warm_up_seconds=0.003)
    return tensors * 2 * ELEMENTS / timing.median_ms / 1e9


if __name__ == "__main__":
    main()

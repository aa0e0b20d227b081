"""Measure all ladders of docs/ladder.md, and compare each rung with the roof.

    python benchmarks/ladder.py [--out benchmarks/results/h200/ladder.json] [--chart ladder.html]

Each ladder has its own size. Every rung's result is compared with the reference. Then all rungs are timed interleaved.
They are replayed from a CUDA graph, except rungs that run on the CPU or transfer data. The roof follows from the work's
own cost and the ceilings measured in the same run. The file is written after each ladder. `--quick` uses small sizes,
and also runs without a GPU. Without a GPU nothing is timed, and Triton's rungs are checked only with
TRITON_INTERPRET=1. The exit status is 1 if a rung is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console

from rooftop.hardware import Ceilings, measure_ceilings
from rooftop.ladder import LADDERS, Climb, Ladder, build, climb
from rooftop.ladder.chart import page
from rooftop.ladder.rungs import kernel, source
from rooftop.ladder.table import heading, table
from rooftop.launch import cuda
from rooftop.whole_files import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--chart", type=Path, help="draw the figures as a chart (HTML)")
    parser.add_argument(
        "--ladders", nargs="+", choices=LADDERS, default=list(LADDERS), help="measure only these ladders"
    )
    parser.add_argument("--seconds", type=float, default=0.05, help="about how long to time each rung")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = measure_ceilings(device) if device.type == "cuda" else None
    climbs: list[Climb] = []
    failures: list[str] = []
    console = Console(width=150, highlight=False)
    for name in options.ladders:
        began = time.perf_counter()
        try:
            ladder = build(name, LADDERS[name].small if options.quick else None, device)
            compile_all(ladder, device)
            climbs.append(climb(ladder, ceilings, seconds=options.seconds))
        except Exception as error:  # a failed ladder does not stop the others
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
            continue
        console.print(heading(climbs[-1]))
        console.print(table(climbs[-1]))
        for remark in climbs[-1].remarks:
            console.print(remark, markup=False)
        console.print(f"took {time.perf_counter() - began:.1f} s\n")
        del ladder
        if options.out is not None:
            save(options.out, climbs, ceilings)
        if options.chart is not None and ceilings is not None:
            options.chart.write_text(page(climbs), encoding="utf-8")
    failures += [
        f"{found.ladder}: {rung.name}, {rung.tool}: {rung.note}" for found in climbs for rung in found.failures
    ]
    if failures:
        sys.exit("\n".join(["what failed:", *failures]))


def compile_all(ladder: Ladder, device: torch.device) -> None:
    """Compile the ladder's CUDA C++ kernels in parallel. `climb` reports kernels that do not compile."""
    names = dict.fromkeys(name for rung in ladder.rungs for name in rung.kernels)

    def one(name: str) -> None:
        try:
            if device.type == "cuda":
                kernel(ladder.source, name, device)
            else:
                cuda.compile(source(ladder.source), name, arch="sm_90")
        except (RuntimeError, ImportError):
            return

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, names))


def save(path: Path, climbs: list[Climb], ceilings: Ceilings | None) -> None:
    """Save all measurements so far."""
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)} if ceilings is not None else {}
    found = {"environment": environment, "ladders": [each.to_dict() for each in climbs]}
    write_json(path, found)


if __name__ == "__main__":
    main()

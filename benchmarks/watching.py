"""The cost of an open recording for those steps of a loop that it only times, or that it no longer watches.

    python benchmarks/watching.py [--out benchmarks/results/h200/watching.json] [--rounds 20] [--quick]

The host-bound loop of a small model runs in turn in three ways: plainly, with only the detection of steps
(`StepFinder`), and inside `rooftop.recording`, after the watched steps. The order changes from round to round, so other
work on the host affects all three. `by_tens_us` has, for each series of ten steps after the watched steps, the median
over rounds. `--quick` tests the script on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rooftop
from rooftop.analysis.stages import Calls
from rooftop.analysis.step_finding import StepFinder
from rooftop.hardware import devices, measure_ceilings
from rooftop.hardware.sequences import synchronize
from rooftop.whole_files import write_json

WATCHED, TIMED = 12, 60  # steps that a recording watches, and steps after them


class Nobody:
    """A listener that ignores the ends of steps."""

    in_charge = True

    def work_begins(self, compiled: bool) -> None: ...

    def work_goes_on(self) -> None: ...

    def leader_changes(self) -> None: ...

    def step_ends(self, calls: Calls, whole: bool) -> None: ...

    def compiles(self) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/watching.json"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="run only three rounds, on the CPU, to test the script")
    options = parser.parse_args()
    device = torch.device("cpu" if options.quick else "cuda")
    step, ceilings = training(device), measure_ceilings(device)
    around: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "steps found": lambda: StepFinder(Nobody()),
        "recorded": lambda: rooftop.recording(ceilings=ceilings, device=device, find_steps=True),
    }
    times: dict[str, list[list[float]]] = {name: [] for name in around}
    for number in range(3 if options.quick else options.rounds):
        names = list(around)
        for name in names[number % 3 :] + names[: number % 3]:
            with around[name]():
                times[name].append(steps_us(step, device))
    rows = {name: row_of(rounds) for name, rounds in times.items()}
    for name, row in rows.items():
        more, tens = row["tenth_us"] / rows["plain"]["tenth_us"] - 1, [round(us) for us in row["by_tens_us"]]
        print(f"{name:12} median {row['median_us']:.0f} us, lower tenth {row['tenth_us']:.0f} us ({more:+.1%}): {tens}")
    here = next(each for each in devices() if each.kind == device.type)
    result = {"device": here.to_dict(), "torch": torch.__version__, "results": rows}
    write_json(options.out, result)
    return 0


def training(device: torch.device) -> Callable[[], None]:
    layers = [each for _ in range(8) for each in (nn.Linear(64, 64), nn.ReLU())]
    model, x = nn.Sequential(*layers).to(device), torch.randn(32, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def steps_us(step: Callable[[], None], device: torch.device) -> list[float]:
    """Step times by the host's clock, each the mean of ten steps in a row, after the steps that may be watched."""
    for _ in range(WATCHED):
        step()
    times = []
    for _ in range(TIMED // 10):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(10):
            step()
        synchronize(device)
        times.append(1e6 * (time.perf_counter() - began) / 10)
    return times


def row_of(rounds: list[list[float]]) -> dict[str, Any]:
    times = sorted(us for each in rounds for us in each)
    by_tens = [statistics.median(tens) for tens in zip(*rounds, strict=True)]
    return {"median_us": statistics.median(times), "tenth_us": times[len(times) // 10], "by_tens_us": by_tens}


if __name__ == "__main__":
    sys.exit(main())

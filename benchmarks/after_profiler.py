"""How much an ended profiler slows a program: steps timed while CUPTI is still attached, and after it is detached.

    python benchmarks/after_profiler.py [--out benchmarks/results/h200/after_profiler.json] [--rounds 30] [--quick]

PyTorch's profiler leaves CUPTI attached; Rooftop's `Trace` detaches it. In each of many rounds, PyTorch's profiler
records one step. Then the step is timed, CUPTI is detached, and the step is timed again. So other work on the host
affects both times alike. `fresh_us` is measured before the process's first profiler, possibly minutes earlier.
`--quick` tests the script on a CPU, without CUPTI.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile

from rooftop.hardware import cupti, devices
from rooftop.hardware.sequences import synchronize
from rooftop.whole_files import write_json

WINDOW_S, IN_A_ROW = 0.15, 5


@dataclass(frozen=True)
class Row:
    """The median and the 10th percentile of the step time, in us."""

    step: str
    fresh_us: float
    attached_us: float
    detached_us: float
    attached_tenth_us: float
    detached_tenth_us: float

    @property
    def slower(self) -> float:
        return self.attached_us / self.detached_us - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/after_profiler.json"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="run only two rounds, on the CPU, to test the script")
    options = parser.parse_args()
    device = torch.device("cpu" if options.quick else "cuda")
    steps = {"inference of 16 layers": inference(device), "training of 16 layers": training(device)}
    rows = [measured(name, step, device, 2 if options.quick else options.rounds) for name, step in steps.items()]
    for row in rows:
        print(
            f"{row.step:24} fresh {row.fresh_us:7.0f} us, after a profiler {row.attached_us:7.0f}, detached "
            f"{row.detached_us:7.0f}: {row.slower:+.0%}"
        )
    here = next(each for each in devices() if each.kind == device.type)
    result = {"device": here.to_dict(), "torch": torch.__version__, "results": [asdict(row) for row in rows]}
    write_json(options.out, result)
    return 0


def layers(device: torch.device) -> nn.Module:
    """A chain of small layers, whose speed is limited by the host."""
    return nn.Sequential(*[each for _ in range(16) for each in (nn.Linear(64, 64), nn.ReLU())]).to(device)


def inference(device: torch.device) -> Callable[[], object]:
    model, x = layers(device), torch.randn(32, 64, device=device)
    return torch.no_grad()(lambda: model(x))


def training(device: torch.device) -> Callable[[], object]:
    model, x = layers(device), torch.randn(32, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(name: str, step: Callable[[], object], device: torch.device, rounds: int) -> Row:
    cupti.detach()
    for _ in range(20):
        step()
    fresh = [us for _ in range(3) for us in window(step, device)]
    attached, detached = list[float](), list[float]()
    for _ in range(rounds):
        with profile(acc_events=True):
            step()
            synchronize(device)
        attached += window(step, device)
        cupti.detach()
        detached += window(step, device)
    return Row(name, *map(statistics.median, (fresh, attached, detached)), *map(lower_tenth, (attached, detached)))


def window(step: Callable[[], object], device: torch.device) -> list[float]:
    """Times of a step, each the mean of a few in a row."""
    times = []
    synchronize(device)
    began = time.perf_counter()
    while time.perf_counter() - began < WINDOW_S:
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            step()
        synchronize(device)
        times.append(1e6 * (time.perf_counter() - start) / IN_A_ROW)
    return times


def lower_tenth(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


if __name__ == "__main__":
    sys.exit(main())

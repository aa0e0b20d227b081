"""Check that repeated reports of a CPU agree, on a quiet machine and next to busy loops of other programs.

    python benchmarks/trust_cpu.py [--out benchmarks/results/cpu/trust.json] [--repeats 10]

Five models are analyzed repeatedly, each time in a separate process. In the first runs, nothing else runs on the
machine. Processes are started in two ways: as usual, and so that they keep freed memory. (With the usual start, the
state of the heap decides how many pages a step allocates again.) In the next runs, as many busy loops as cores run at
the same time. These runs take long, so there are only a third as many. A report must be within 5% of the median of the
undisturbed reports that were started in the same way, or say that it was disturbed. At the end, the ceilings are
measured again next to the loops. This must not change any percent of roof.

The speed of a shared machine changes from minute to minute. So each process also times its step plainly before and
after the report, in series of ten steps by the host's clock. If these series vary, reports cannot agree. Then a
report's wall time must be within 5% of the range of these series.

The script exits with 1 if a report misses its limit. Other programs on the machine may disturb the first reports, too,
which then say so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rooftop
from rooftop.hardware import devices, measure_ceilings
from rooftop.hardware.page_faults import KEEP_MEMORY
from rooftop.models import resnet18, swin_t
from rooftop.whole_files import write_json

TOLERANCE = 0.05
LEAST_PLAIN = 3
PLAIN_STEPS, PLAIN_SECONDS = 10, 2.0  # steps per series, and seconds of timing before and after a report
LOOP = "while True: pass"
HOWS = ("memory kept", "as usual", "beside loops", "refresh")
KEPT = dict(word.split("=") for word in KEEP_MEMORY.split() if "=" in word)


class UNet(nn.Module):
    """Four levels of two convolutions each, down and up."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(4)]
        self.down = nn.ModuleList(_pair(before, after) for before, after in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_pair(3 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for block, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        head: Tensor = self.head(x)
        return head


def _pair(before: int, after: int) -> nn.Sequential:
    layers = (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
    return nn.Sequential(*layers, nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "U-Net 2x128x128": (UNet, (2, 3, 128, 128), False),
    "ResNet-18 4x224x224": (resnet18, (4, 3, 224, 224), False),
    "ResNet-18 4x96x96 training": (resnet18, (4, 3, 96, 96), True),
    "Swin-T 1x224x224": (swin_t, (1, 3, 224, 224), False),
    "transformer encoder 4x128": (encoder, (4, 128, 256), False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu/trust.json"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--how",
        nargs="+",
        choices=HOWS,
        default=list(HOWS),
        help="which kinds of processes to run, and whether to refresh the ceilings",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(report_of(options.worker)))
        return 0
    measure_ceilings("cpu")
    rows = [
        analyzed(name, options.repeats, kept) for name in CASES for kept in (True, False) if how(kept) in options.how
    ]
    if "beside loops" in options.how:
        with busy_loops():
            rows += [analyzed(name, max(2, options.repeats // 3), kept=True, beside=True) for name in CASES]
    name = next(iter(CASES))
    refreshed = {"case": name, "before": 1.0, "after": 1.0}
    if "refresh" in options.how:
        refreshed["before"] = percent(name)
        with busy_loops():
            measure_ceilings("cpu", refresh=True)
        refreshed["after"] = percent(name)
    machine = next(d for d in devices() if d.kind == "cpu").to_dict()
    result = {"machine": machine, "torch": torch.__version__, "repeats": rows, "refreshed_beside_loops": refreshed}
    write_json(options.out, result)
    missed = list(problems(rows, refreshed))
    for problem in missed:
        print("MISSED", problem)
    return 1 if missed else 0


def how(kept: bool, beside: bool = False) -> str:
    return "beside loops" if beside else "memory kept" if kept else "as usual"


def analyzed(name: str, repeats: int, kept: bool, beside: bool = False) -> dict[str, Any]:
    """Analyze the same model several times, in processes that keep freed memory or are started as usual."""
    reports = [fresh_report(name, kept) for _ in range(repeats)]
    row: dict[str, Any] = {"case": name, "memory_kept": kept, "beside_loops": beside}
    row |= {figure: [report[figure] for report in reports] for figure in reports[0]}
    percents = " ".join(
        f"{p:.1f}{'*' if d else ''}" for p, d in zip(row["percent_of_roof"], row["disturbed"], strict=True)
    )
    print(f"{name:30} {how(kept, beside):12} {percents} (* disturbed)", flush=True)
    ratios = " ".join(
        f"{wall / min(ms):.2f}/{max(ms) / min(ms):.2f}"
        for wall, ms in zip(row["wall_ms"], row["plain_ms"], strict=True)
    )
    print(f"{'':30} wall / slowest over the fastest plain ten: {ratios}", flush=True)
    return row


def fresh_report(name: str, kept: bool = True) -> dict[str, Any]:
    """Run `report_of` in a separate process."""
    words = [sys.executable, __file__, "--worker", name]
    environment = {**os.environ, **(KEPT if kept else {})}
    printed = subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def report_of(name: str) -> dict[str, Any]:
    build, shape, train = CASES[name]
    torch.manual_seed(0)
    model, x = build().train(train), torch.randn(shape)
    before = plain_ms(model, x, train)
    report = rooftop.analyze(model, x, train=train)
    return {
        "plain_ms": before + plain_ms(model, x, train),
        "wall_ms": report.summary.wall_ms,
        "percent_of_roof": report.summary.percent_of_roof,
        "launch_gap_ms": report.gaps.launch_gap_ms,
        "disturbed": report.summary.disturbed,
        "above": max((row.percent_of_roof or 0.0 for row in report.ops), default=0.0),
        "advice": [[item.title, item.gain_ms] for item in report.advice],
        "notes": list(report.notes),
    }


def plain_ms(model: nn.Module, x: Tensor, train: bool) -> list[float]:
    """The mean time of a step in each series of ten, without Rooftop."""
    found: list[float] = []
    until = time.perf_counter() + PLAIN_SECONDS
    with torch.set_grad_enabled(train):
        while len(found) < LEAST_PLAIN or time.perf_counter() < until:
            began = time.perf_counter()
            for _ in range(PLAIN_STEPS):
                y = model(x)
                if train:
                    model.zero_grad()
                    y.sum().backward()
            found.append(1e3 * (time.perf_counter() - began) / PLAIN_STEPS)
    return found[1:]  # the first series is a warm-up


def percent(name: str) -> float:
    return statistics.median(fresh_report(name)["percent_of_roof"] for _ in range(3))


@contextmanager
def busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(os.cpu_count() or 1)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def problems(rows: list[dict[str, Any]], refreshed: dict[str, Any]) -> Iterator[str]:
    for row in rows:
        name = f"{row['case']} ({how(row['memory_kept'], row['beside_loops'])})"
        for wall, ms in zip(row["wall_ms"], row["plain_ms"], strict=True):
            if not min(ms) * (1 - TOLERANCE) <= wall <= max(ms) * (1 + TOLERANCE):
                yield f"{name}: wall time is {wall:.1f} ms, plain steps took {min(ms):.1f} to {max(ms):.1f} ms"
        like = [r for r in rows if r["case"] == row["case"] and r["memory_kept"] is row["memory_kept"]]
        alone = next((r for r in like if not r["beside_loops"]), row)
        quiet, own = unmarked(alone), unmarked(row)
        if not quiet:
            if row is alone:
                yield f"{name}: no report was undisturbed"
            continue
        worst = max((abs(percent / statistics.median(quiet) - 1) for percent in own), default=0.0)
        if worst > TOLERANCE:
            yield f"{name}: an unmarked report is {100 * worst:.1f}% off"
    if abs(refreshed["after"] / refreshed["before"] - 1) > TOLERANCE:
        yield f"new ceilings next to loops changed {refreshed['before']:.1f}% of roof to {refreshed['after']:.1f}%"


def unmarked(row: dict[str, Any]) -> list[float]:
    """The percent of roof in the reports that are not marked as disturbed."""
    return [p for p, marked in zip(row["percent_of_roof"], row["disturbed"], strict=True) if not marked]


if __name__ == "__main__":
    sys.exit(main())

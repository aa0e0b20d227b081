"""An ensemble of two models on two GPUs compared with each model alone.

    python benchmarks/ensemble.py [--out benchmarks/results/h200/ensemble.json]

Two ResNet-50 in bfloat16, channels last, run at several batch sizes. Small batches show the cost of one host thread
that launches for both GPUs. Large batches show that the GPUs run at the same time. The script exits with 1 if, at the
largest batch (256), the ensemble takes more than 1.1 times as long as its slower model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from programs import Results, resnet_step

from rooftop.hardware import Ensemble, measure, measure_ceilings

BATCHES = (1, 16, 64, 256)
BUSY_BATCH = 256
MOST_RATIO = 1.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/ensemble.json"))
    parser.add_argument("--quick", action="store_true", help="small batches on the CPU, to test the script")
    options = parser.parse_args()
    devices = ["cpu", "cpu"] if options.quick else ["cuda:0", "cuda:1"]
    results, failures = Results(options.out, measure_ceilings(devices[0])), []
    for batch in (1,) if options.quick else BATCHES:
        row = beside(batch, devices)
        results.add(row)
        if batch >= BUSY_BATCH and row["ratio"] > MOST_RATIO:
            failures.append(row)
    for row in failures:
        print(f"FAILED batch {row['batch']}: {row['ratio']:.3f}x the slower model")
    return 1 if failures else 0


def beside(batch: int, devices: list[str]) -> dict[str, Any]:
    steps = [resnet_step(batch, dtype=torch.bfloat16, channels_last=True, device=device) for device in devices]
    ensemble = Ensemble([step.model for step in steps], devices)
    (x,) = steps[0].args
    with torch.inference_mode():
        alone_ms = [measure(step.run, device=device).median_ms for step, device in zip(steps, devices, strict=True)]
        together_ms = measure(lambda: ensemble(x), device=devices[0]).median_ms
    return {
        "batch": batch,
        "alone_ms": max(alone_ms),
        "together_ms": together_ms,
        "ratio": together_ms / max(alone_ms),
        "each_alone_ms": alone_ms,
    }


if __name__ == "__main__":
    sys.exit(main())

"""The share of a compiled program's GPU time that `rooftop analyze --compile` attributes to operators.

    python benchmarks/compiled.py [--out benchmarks/results/h200/compiled.json]

The cases are ResNet-50 and GPT-2, inference and training, with torch.compile's default mode and with CUDA graphs
(reduce-overhead). For each model, the script also reports the gain that the advice about fusion predicts from the eager
run. The script exits with 1 if less than 0.9 of the GPU time is attributed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from programs import Results, Step, gpt2_step, resnet_step

import rooftop
from rooftop.hardware import Ceilings, measure_ceilings

LEAST_COVERAGE = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/compiled.json"))
    parser.add_argument("--reports", type=Path, help="also write each report as JSON into this folder")
    parser.add_argument("--quick", action="store_true", help="tiny programs on the CPU, to test the script")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    ceilings = measure_ceilings(device)
    results = Results(options.out, ceilings)
    for name, build in programs(device).items():
        eager, _ = analyzed(build(), ceilings)
        for mode in ("default", "reduce-overhead"):
            report, seconds = analyzed(build(), ceilings, compile=mode)
            results.add(row_of(f"{name}, {mode}", report, eager, seconds))
            if options.reports:
                options.reports.mkdir(parents=True, exist_ok=True)
                report.to_json(options.reports / f"{name} {mode}.json".replace(" ", "-").replace(",", ""))
    missed = [row["case"] for row in results.rows if row["coverage"] < LEAST_COVERAGE]
    if missed:
        print("FAILED: less than", LEAST_COVERAGE, "of the GPU time is attributed:", "; ".join(missed))
    return 1 if missed else 0


def programs(device: str) -> dict[str, Callable[[], Step]]:
    batch, tokens, size, dtype = (32, 512, 224, torch.bfloat16) if device == "cuda" else (2, 16, 32, torch.float32)
    image = {"dtype": dtype, "channels_last": True, "device": device, "size": size}
    text = {"tokens": tokens, "dtype": dtype, "device": device}
    return {
        f"ResNet-50 inference batch {batch}": lambda: resnet_step(batch, **image),
        f"ResNet-50 training batch {batch}": lambda: resnet_step(batch, train=True, **image),
        f"GPT-2 inference batch 4, {tokens} tokens": lambda: gpt2_step(4, **text),
        f"GPT-2 training batch 4, {tokens} tokens": lambda: gpt2_step(4, train=True, **text),
    }


def analyzed(step: Step, ceilings: Ceilings, **options: Any) -> tuple[rooftop.Report, float]:
    """The report, and the seconds that it took, including compilation."""
    began = time.perf_counter()
    report = rooftop.analyze(step.model, *step.args, ceilings=ceilings, **step.kwargs, **step.training, **options)
    seconds = time.perf_counter() - began
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return report, seconds


def row_of(name: str, report: rooftop.Report, eager: rooftop.Report, seconds: float) -> dict[str, Any]:
    fusion = [item.gain_ms for item in eager.advice if "Fuse" in item.title]
    return {
        "case": name,
        "coverage": report.coverage,
        "wall_ms": report.summary.wall_ms,
        "busy_ms": report.summary.busy_ms,
        "operators_ms": sum(row.measured_ms for row in report.ops),
        "op_roof_ms": report.summary.op_roof_ms,
        "fused_roof_ms": report.summary.fused_roof_ms,
        "kernels": report.summary.kernels,
        "eager_wall_ms": eager.summary.wall_ms,
        "eager_busy_ms": eager.summary.busy_ms,
        "eager_kernels": eager.summary.kernels,
        "fusion_predicted_ms": fusion[0] if fusion else 0.0,
        "busy_gain_ms": eager.summary.busy_ms - report.summary.busy_ms,
        "analysis_s": seconds,
        "uncovered": [(row.name, row.measured_ms, row.uncovered) for row in report.uncovered],
        "flagged": [(row.name, row.shapes, row.percent_of_roof, row.measured_ms) for row in report.ops if row.flagged],
    }


if __name__ == "__main__":
    sys.exit(main())

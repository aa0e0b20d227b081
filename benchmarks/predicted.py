"""Roofs that are predicted from fake tensors, compared with the roofs of real analyses; and the cost of an analysis.

    python benchmarks/predicted.py [--out benchmarks/results/h200/predicted.json]

For ResNet-50 and GPT-2, inference and training, the script predicts the op roof and the fused roof. It uses the
ceilings measured in this run, and the H200's ceilings that Rooftop includes. The time of an analysis is compared with
ten steps under PyTorch's profiler, including its summary. The script exits with 1 if a prediction with the same
ceilings is off by more than 5%, or if an analysis takes longer than 3 times the profiler's time plus 5 s.
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
from torch.profiler import ProfilerActivity, profile

import rooftop
from rooftop.hardware import Ceilings, ceilings_of, measure_ceilings

TOLERANCE = 0.05
PROFILED_STEPS = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/predicted.json"))
    parser.add_argument("--quick", action="store_true", help="tiny programs on the CPU, to test the script")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    ceilings = measure_ceilings(device)
    results, failures = Results(options.out, ceilings), []
    for name, build in programs(device).items():
        row = {"case": name, **beside(build, ceilings, device)}
        results.add(row)
        off = max(abs(row[f"predicted_{kind}_ms"] / row[f"{kind}_ms"] - 1) for kind in ("op_roof", "fused_roof"))
        if device == "cuda" and off > TOLERANCE:
            failures.append(f"{name}: a predicted roof is off by {off:.1%}")
        if row["analysis_s"] > 3 * row["profiled_s"] + 5:
            failures.append(f"{name}: analyzed in {row['analysis_s']:.1f} s, profiled in {row['profiled_s']:.1f} s")
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


def programs(device: str) -> dict[str, Callable[[], Step]]:
    large, small, tokens, size = (256, 64, 512, 224) if device == "cuda" else (2, 2, 16, 64)
    return {
        f"ResNet-50 inference batch {large}": lambda: resnet_step(large, device=device, size=size),
        f"ResNet-50 training batch {small}": lambda: resnet_step(small, train=True, device=device, size=size),
        f"GPT-2 inference batch 8, {tokens} tokens": lambda: gpt2_step(8, tokens, device=device),
        f"GPT-2 training batch 8, {tokens} tokens": lambda: gpt2_step(8, tokens, train=True, device=device),
    }


def beside(build: Callable[[], Step], ceilings: Ceilings, device: str) -> dict[str, Any]:
    step = build()
    began = time.perf_counter()
    report = rooftop.analyze(step.model, *step.args, ceilings=ceilings, **step.kwargs, **step.training)
    analysis_s = time.perf_counter() - began
    profiled_s = _profiled_s(step, device)
    step.model.cpu()
    began = time.perf_counter()
    same = rooftop.predict(step.model, *step.args, ceilings=ceilings, **step.kwargs, **step.training)
    predicted_s = time.perf_counter() - began
    known = rooftop.predict(step.model, *step.args, ceilings=ceilings_of("h200"), **step.kwargs, **step.training)
    return {
        "op_roof_ms": report.summary.op_roof_ms,
        "predicted_op_roof_ms": same.summary.op_roof_ms,
        "known_machine_op_roof_ms": known.summary.op_roof_ms,
        "fused_roof_ms": report.summary.fused_roof_ms,
        "predicted_fused_roof_ms": same.summary.fused_roof_ms,
        "known_machine_fused_roof_ms": known.summary.fused_roof_ms,
        "predicted_s": predicted_s,
        "analysis_s": analysis_s,
        "profiled_s": profiled_s,
        "wall_ms": report.summary.wall_ms,
        "coverage": report.coverage,
        "flagged": [(row.name, row.shapes, row.percent_of_roof, row.measured_ms) for row in report.ops if row.flagged],
    }


def _profiled_s(step: Step, device: str) -> float:
    """Seconds that PyTorch's profiler takes for a few steps and its table, as the usual alternative to an analysis."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    began = time.perf_counter()
    seen = {"record_shapes": True, "profile_memory": True, "with_flops": True, "acc_events": True}
    with profile(activities=activities, **seen) as profiler:
        for _ in range(PROFILED_STEPS):
            step.run()
        if device == "cuda":
            torch.cuda.synchronize()
    profiler.key_averages(group_by_input_shape=True).table(sort_by="self_cpu_time_total", row_limit=20)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())

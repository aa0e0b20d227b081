"""The reports of `rooftop analyze` about ResNet-50 on this GPU, and checks that their parts add up.

    python benchmarks/analyze.py [--out benchmarks/results/h200/analyze.json] [--reports FOLDER]

The cases combine batch sizes 256 and 1, inference and training, float32 (TF32 convolutions, PyTorch's default) and
bfloat16, contiguous and channels last. The figures are wall time, busy time, roof, coverage and the three gaps. Rows
also list the flagged operators, which seem faster than their roofs. The script exits with 1 if the operators' times do
not add up to the device's busy time in the profiler within 3%, or if coverage is below 98%.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import rooftop
from rooftop.hardware import measure_ceilings
from rooftop.models import resnet50
from rooftop.whole_files import write_json


@dataclass(frozen=True)
class Case:
    batch: int
    train: bool
    dtype: torch.dtype
    channels_last: bool

    @property
    def name(self) -> str:
        layout = "channels_last" if self.channels_last else "contiguous"
        mode = "training" if self.train else "inference"
        return f"resnet50 {mode} batch {self.batch} {str(self.dtype).removeprefix('torch.')} {layout}"


CASES = [
    Case(batch, train, dtype, channels_last)
    for batch in (256, 1)
    for train in (False, True)
    for dtype, channels_last in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/analyze.json"))
    parser.add_argument("--reports", type=Path, help="also write each report as JSON into this folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small batches, to test the script on a CPU")
    options = parser.parse_args()
    ceilings = measure_ceilings(options.device)
    results, failures = [], []
    for case in CASES:
        if options.quick:
            case = Case(min(case.batch, 2), case.train, case.dtype, case.channels_last)
        report = analyze_case(case, options.device, ceilings)
        if options.reports:
            options.reports.mkdir(parents=True, exist_ok=True)
            report.to_json(options.reports / f"{case.name.replace(' ', '-')}.json")
        result = summarize(case, report)
        results.append(result)
        failures += [f"{case.name}: {problem}" for problem in problems(result)]
        print(
            f"{case.name:52} wall {result['wall_ms']:8.3f} ms  busy {result['busy_ms']:8.3f}  "
            f"roof {result['fused_roof_ms']:7.3f}  {result['percent_of_roof']:5.1f}%  "
            f"operators/busy {result['operators_over_busy']:.4f}  coverage {result['coverage']:.4f}  "
            f"flagged {len(result['flagged'])}",
            flush=True,
        )
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions), "measured_at": ceilings.measured_at}
    write_json(options.out, {"environment": environment, "results": results})
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


def analyze_case(case: Case, device: str, ceilings: Any) -> rooftop.Report:
    memory_format = torch.channels_last if case.channels_last else torch.contiguous_format
    model = resnet50().to(device=device, dtype=case.dtype, memory_format=memory_format)
    x = torch.randn(case.batch, 3, 224, 224, device=device, dtype=case.dtype).to(memory_format=memory_format)
    labels = torch.randint(1000, (case.batch,), device=device)
    training = {
        "train": True,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
        "loss": lambda logits: cross_entropy(logits, labels),
    }
    return rooftop.analyze(model, x, **(training if case.train else {}), ceilings=ceilings, name=case.name)


def summarize(case: Case, report: rooftop.Report) -> dict[str, Any]:
    operators_ms = sum(row.measured_ms for row in report.ops)
    return {
        "case": case.name,
        **asdict(report.summary),
        "percent_of_roof": report.summary.percent_of_roof,
        **asdict(report.gaps),
        "coverage": report.coverage,
        "operators_over_busy": operators_ms / report.summary.busy_ms,
        "samples_per_s": 1e3 * case.batch / report.summary.wall_ms,
        "uncovered": sorted({row.name for row in report.uncovered}),
        "flagged": [
            {"name": row.name, "shapes": row.shapes, "percent_of_roof": row.percent_of_roof, "bound": row.bound}
            for row in report.ops
            if row.flagged
        ],
        "advice": [asdict(item) for item in report.advice],
        "notes": list(report.notes),
    }


def problems(result: dict[str, Any]) -> list[str]:
    found = []
    if abs(result["operators_over_busy"] - 1) > 0.03:
        found.append(f"operators add up to {result['operators_over_busy']:.3f} of the busy time")
    if result["coverage"] < 0.98:
        found.append(f"coverage {result['coverage']:.3f}, without a formula: {result['uncovered']}")
    return found


if __name__ == "__main__":
    sys.exit(main())

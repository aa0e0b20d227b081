"""Rules about the formats of numbers and images: bfloat16 in place of float32, channels last in place of first."""

from __future__ import annotations

import re
from collections import Counter

from rooftop.analysis.findings import Findings
from rooftop.analysis.report import Advice
from rooftop.cost import Cost, roof


def half_precision(findings: Findings) -> list[Advice]:
    """Each fp32 operator keeps its percent of roof; its roof becomes that of half the bytes at the bf16 peak."""
    peaks, ceilings = findings.ceilings.flops, findings.ceilings
    if "bf16" not in peaks:
        return []
    full_ms, half_ms, count = 0.0, 0.0, 0
    used: Counter[str] = Counter()  # flops by precision: matrix work decides which peak is compared
    for op in findings.operators:
        cost = op.record.cost
        if cost is None or op.record.dtype != "float32" or op.record.phase == "optimizer" or not cost.bytes:
            continue
        full_ms += op.measured_ms
        used.update(cost.flops)
        half_ms += op.measured_ms * min(
            1.0, roof(_in_bf16(cost, op.record.name), ceilings).ms / roof(cost, ceilings).ms
        )
        count += 1
    if not count:
        return []
    now = used.most_common(1)[0][0] if used else "fp32"
    return [
        Advice(
            "Run in bfloat16",
            f"{count} operators take {full_ms:.2f} ms in float32; this machine's bf16 peak is "
            f"{peaks['bf16'] / peaks[now]:.1f}x its {now} peak, and half the bytes would move",
            full_ms - half_ms,
            "with torch.autocast(device_type, dtype=torch.bfloat16): ...",
        )
    ]


MATRIX_OPERATORS = ("convolution", "mm", "attention", "linear")
"""Parts of the names of operators that run on matrix units."""


def _in_bf16(cost: Cost, name: str) -> Cost:
    flops = dict(cost.flops)
    if any(part in name for part in MATRIX_OPERATORS):
        flops = {"bf16": cost.total_flops}
    return Cost(cost.read_bytes // 2, cost.write_bytes // 2, flops)


def channels_last(findings: Findings) -> list[Advice]:
    """Kernels that turn images round for the tensor cores, and back, are not needed if they lie that way already."""
    if findings.plain is None:
        return []
    turning = [kernel for kernel in findings.plain.kernels if LAYOUT_KERNEL.search(kernel.name)]
    convolutions = sum(row.calls for row in findings.rows if "convolution" in row.name)
    if not turning or not convolutions:
        return []
    return [
        Advice(
            "Lay images out channels last",
            f"{len(turning)} kernels turn images and weights of {convolutions} convolutions from channels first to "
            "channels last and back",
            sum(kernel.ms for kernel in turning),
            "model = model.to(memory_format=torch.channels_last); x = x.to(memory_format=torch.channels_last)",
        )
    ]


LAYOUT_KERNEL = re.compile(r"nchwToNhwc|nhwcToNchw", re.IGNORECASE)
"""cuDNN's kernels between the two layouts."""

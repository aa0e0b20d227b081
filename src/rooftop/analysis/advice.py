"""What would make the step faster, and by how much: computed from what was measured, never canned.

Each rule looks at the measured operators (those about the host are in `host_advice`), predicts a gain in ms and names
its evidence. Gains are predicted one at a
time; two that save the same time (fusion and a faster kernel) do not add up.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable

from rooftop.analysis.findings import Findings
from rooftop.analysis.host_advice import HOST_RULES
from rooftop.analysis.report import Advice, OperatorRow
from rooftop.cost import Cost, roof

LEAST_GAIN = 0.01
"""Advice that would gain less than this fraction of the wall time is left out."""


def advise(findings: Findings) -> list[Advice]:
    """All advice worth giving, by falling gain."""
    advice = [item for rule in RULES for item in rule(findings)]
    worth_it = [item for item in advice if item.gain_ms >= LEAST_GAIN * findings.summary.wall_ms]
    return sorted(worth_it, key=lambda item: -item.gain_ms)


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


POINTWISE_OPERATORS = {
    *("add", "sub", "mul", "div", "neg", "exp", "clamp", "where", "native_dropout", "native_dropout_backward"),
    *("relu", "gelu", "silu", "sigmoid", "tanh", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid"),
    *("threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward"),
    *("hardtanh_backward", "_native_batch_norm_legit_no_training"),
}
"""Operators that a compiler folds into their neighbours (batch norm in inference is a scale and a shift)."""


def pointwise_fusion(findings: Findings) -> list[Advice]:
    """Folded into the operator before it, a pointwise operator still reads its second operand, and nothing else."""
    now_ms, left_ms, count = 0.0, 0.0, 0
    for op in findings.operators:
        cost = op.record.cost
        plain = op.record.name.removeprefix("aten::").removesuffix("_")
        inference_norm = plain in ("native_batch_norm", "cudnn_batch_norm") and not findings.training
        if cost is None or op.record.phase == "optimizer" or not (plain in POINTWISE_OPERATORS or inference_norm):
            continue
        second_operand = max(0, cost.read_bytes - cost.write_bytes)
        now_ms += op.measured_ms
        left_ms += min(op.measured_ms, 1e3 * second_operand / findings.ceilings.rate(cost.bytes))
        count += 1
    return [
        Advice(
            "Fuse pointwise operators into their neighbours",
            f"{count} activations, sums and norms take {now_ms:.2f} ms to move what the operators beside them have in "
            f"registers already",
            now_ms - left_ms,
            "torch.compile(model)",
        )
    ]


def uneven_kernels(findings: Findings) -> list[Advice]:
    """Shapes of one operator that are further from the roof than its better half (by time) is in this very run."""
    families: dict[tuple[str, str], list[OperatorRow]] = defaultdict(list)
    for row in findings.rows:
        if row.percent_of_roof is not None and not row.flagged and row.bound != "launch":
            families[row.name, row.phase].append(row)
    advice = []
    for (name, phase), rows in families.items():
        if len(rows) < 3:
            continue
        attainable = sorted(row.percent_of_roof or 0.0 for row in rows)[int(0.75 * len(rows))]
        slow = [row for row in rows if (row.percent_of_roof or 0.0) < attainable]
        time_ms = sum(row.measured_ms for row in slow)
        gain_ms = time_ms - sum(100 * row.roof_ms / attainable for row in slow)
        if not slow:
            continue
        advice.append(
            Advice(
                f"Speed up {name.split('::')[-1]} ({phase})",
                f"{sum(row.calls for row in slow)} calls take {time_ms:.2f} ms at "
                f"{100 * sum(row.roof_ms for row in slow) / time_ms:.0f}% of roof; a quarter of its shapes reach "
                f"{attainable:.0f}% in this run",
                gain_ms,
            )
        )
    return advice


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


def layer_norms(findings: Findings) -> list[Advice]:
    """Rooftop's layer norm, timed here and now on the shapes that the step has."""
    if findings.ceilings.kind != "cuda" or findings.plain is None:
        return []
    rows = [row for row in findings.rows if row.name in LAYER_NORMS and row.measured_ms > 0]
    if sum(row.measured_ms for row in rows) < LEAST_GAIN * findings.summary.wall_ms:
        return []
    from rooftop.analysis.alternatives import layer_norm_ms

    now_ms = sum(row.measured_ms for row in rows)
    ours_ms = sum(min(row.measured_ms, row.calls * layer_norm_ms(row)) for row in rows)
    roof_ms = sum(row.roof_ms for row in rows)
    return [
        Advice(
            "Use rooftop.kernels.layer_norm",
            f"{sum(row.calls for row in rows)} layer norms take {now_ms:.2f} ms at {100 * roof_ms / now_ms:.0f}% of "
            f"roof; rooftop.kernels.layer_norm, timed on these shapes here, reaches {100 * roof_ms / ours_ms:.0f}%",
            now_ms - ours_ms,
            "from rooftop.kernels import layer_norm",
        )
    ]


LAYER_NORMS = ("aten::native_layer_norm", "aten::native_layer_norm_backward")

RULES: tuple[Callable[[Findings], list[Advice]], ...] = (
    *HOST_RULES,
    half_precision,
    channels_last,
    pointwise_fusion,
    layer_norms,
    uneven_kernels,
)

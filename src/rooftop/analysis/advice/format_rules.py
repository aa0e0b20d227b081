"""Rules about the formats of numbers and images: bfloat16 instead of float32, channels last instead of first.

The decisive operators, matrix work and norms, are timed in the other format with their own shapes, on the machine of
the step (`alternatives`). The gain depends on the libraries' kernels, and no model of the hardware predicts it. All
other operators are assumed to reach the same percent of their roof as before.
"""

from __future__ import annotations

import torch

from rooftop.analysis.advice.alternatives import repeated_ratios
from rooftop.analysis.advice.autocast import Recast, cast_host_ms, under_autocast
from rooftop.analysis.findings import LEAST_GAIN, Findings
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.repeating import Form
from rooftop.analysis.report_contents import Advice
from rooftop.cost import Cost, roof
from rooftop.words import counted


def half_precision(findings: Findings) -> list[Advice]:
    """Advise autocast to bfloat16. The time of the casts that autocast adds is subtracted from the gain."""
    ceilings = findings.ceilings
    recasts = under_autocast((op.record for op in findings.operators), ceilings.kind)
    changed = [
        (op, recast)
        for op, recast in zip(findings.operators, recasts, strict=True)
        if recast.bytes_ratio < 1 and op.record.cost is not None and op.record.cost.bytes
    ]
    if "bf16" not in ceilings.flops or not changed:
        return []
    timed = (
        repeated_ratios([op for op, _ in changed], Form(torch.bfloat16), findings.device) if findings.repeatable else {}
    )
    now_ms = after_ms = timed_ms = 0.0
    ratios: dict[int, float] = {}  # by operator
    for op, recast in changed:
        ratio = timed.get(op.record.spec)
        ratios[id(op)] = _roof_ratio(op, recast, findings) if ratio is None else ratio
        now_ms += op.measured_ms
        timed_ms += op.measured_ms if ratio is not None else 0.0
        after_ms += op.measured_ms * ratios[id(op)]
    casts = sum(len(recast.casts) for recast in recasts) * (2 if findings.training else 1)
    casts_ms = [_casts_ms(recast, findings) for recast in recasts]
    host_ms = casts * cast_host_ms(ceilings.kind, findings.training) if findings.repeatable and findings.on_gpu else 0.0
    with_casts_ms = [
        op.measured_ms * ratios.get(id(op), 1.0) + cast_ms
        for op, cast_ms in zip(findings.operators, casts_ms, strict=True)
    ]
    return [
        Advice(
            "Run in bfloat16",
            f"{counted(len(changed), 'operator')} of {now_ms:.2f} ms in float32 would take {after_ms:.2f} ms"
            + (
                f" ({100 * timed_ms / now_ms:.0f}% of that time was measured here on their shapes)"
                if timed_ms
                else " at their present percent of roof"
            )
            + (f"; {counted(casts, 'added cast')} would take {sum(casts_ms):.2f} ms" if casts else ""),
            findings.saved_by_ms(with_casts_ms, host_ms),
            f'with torch.autocast("{ceilings.kind}", dtype=torch.bfloat16): ...',
        )
    ]


def _casts_ms(recast: Recast, findings: Findings) -> float:
    """Time in ms of an operator's casts; in training, also of the backward casts of their gradients."""
    each = sum(roof(Cost(4 * elements, 2 * elements), findings.ceilings).ms for elements in recast.casts)
    return 2 * each if findings.training else each


def _roof_ratio(op: MeasuredOperator, recast: Recast, findings: Findings) -> float:
    """An operator's roof time under autocast divided by its present roof time, at most 1."""
    cost = op.record.cost
    if cost is None or not cost.bytes:
        return 1.0
    flops = {"bf16": cost.total_flops} if recast.matrix and cost.total_flops else cost.flops
    recast_cost = Cost(round(cost.read_bytes * recast.bytes_ratio), round(cost.write_bytes * recast.bytes_ratio), flops)
    return min(1.0, roof(recast_cost, findings.ceilings).ms / roof(cost, findings.ceilings).ms)


IMAGE_OPERATORS = ("convolution", "batch_norm", "group_norm", "pool2d", "upsample_")
"""Parts of the names of operators whose time depends on the image layout. In channels last, some of these operators
have special kernels; others take longer or copy their input.
"""


def channels_last(findings: Findings) -> list[Advice]:
    """Advise channels last, with the step's image operators timed in that layout."""
    after = channels_last_ms(findings)
    if not after:
        return []
    now_ms, after_ms = sum(op.measured_ms for op in findings.operators if id(op) in after), sum(after.values())
    return [
        Advice(
            "Lay images out channels last",
            f"{counted(len(after), 'operator')} on images take {now_ms:.2f} ms; timed here on their shapes, channels "
            f"last, they take {after_ms:.2f} ms",
            findings.saved_by_ms([after.get(id(op), op.measured_ms) for op in findings.operators]),
            "model = model.to(memory_format=torch.channels_last); x = x.to(memory_format=torch.channels_last)",
        )
    ]


def channels_last_ms(findings: Findings) -> dict[int, float]:
    """Time in ms of each image operator in channels last, by `id` of the operator.

    The result is empty if convolutions on channels-first images take at most half of the time of all convolutions, if
    the image operators are too near their roof to gain much, or if the step did not run on this machine.
    """
    if "channels last" not in findings.timed:
        findings.timed["channels last"] = _timed_channels_last(findings)
    found: dict[int, float] = findings.timed["channels last"]
    return found


def _timed_channels_last(findings: Findings) -> dict[int, float]:
    images = [
        op
        for op in findings.operators
        if op.record.spec is not None and any(part in op.record.name for part in IMAGE_OPERATORS) and _on_image(op)
    ]
    convolutions = [op for op in images if "convolution" in op.record.name]
    first = [op for op in convolutions if not any(t.channels_last for t in op.record.inputs)]
    gap_ms = sum(op.measured_ms - roof(op.record.cost, findings.ceilings).ms for op in images if op.record.cost)
    worth_it = gap_ms >= LEAST_GAIN * findings.summary.wall_ms
    if not findings.repeatable or not worth_it or 2 * _total(first) <= _total(convolutions):
        return {}
    timed = repeated_ratios(images, Form(channels_last=True), findings.device)
    return {id(op): op.measured_ms * timed[op.record.spec] for op in images if op.record.spec in timed}


def _on_image(op: MeasuredOperator) -> bool:
    """Whether the operator works on images (N, C, H, W), not on sequences or volumes."""
    return bool(op.record.inputs) and len(op.record.inputs[0].shape) == 4


def _total(operators: list[MeasuredOperator]) -> float:
    return sum(op.measured_ms for op in operators)

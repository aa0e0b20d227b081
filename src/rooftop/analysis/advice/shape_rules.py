"""Rules about shapes: matrix products whose rows are not aligned to 16 bytes.

The fast cuBLAS kernels load 16 bytes at a time, and need each row of a matrix to begin at a multiple of 16 bytes. In
half precision, rows of 50,257 elements (the vocabulary of GPT-2) are not aligned, so cuBLAS uses a slower kernel.
Padding each row to 50,304 elements adds a little arithmetic and allows the fast kernel.
"""

from __future__ import annotations

from rooftop.analysis.findings import LEAST_GAIN, Findings
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.repeating import Form, times_again
from rooftop.analysis.report_contents import Advice
from rooftop.cost import roof
from rooftop.words import counted

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
VECTOR_BYTES = 16
PADDED_TO = 64
NEAR_ROOF = 0.7  # a product that reaches this share of the roof gets no advice
MOST_SHAPES = 8


def padded_products(findings: Findings) -> list[Advice]:
    """Advise padding of matrix products in which a row or a column of an operand is not a multiple of 16 bytes long.
    The gain is measured on this machine."""
    after = padded_ms(findings)
    if not after:
        return []
    changed = [op for op in findings.operators if id(op) in after]
    now_ms, after_ms = sum(op.measured_ms for op in changed), sum(after.values())
    sides = sorted({side for op in changed for side in _odd_sides(op)})
    named = ", ".join(f"{side:,}" for side in sides[:3]) + (", ..." if len(sides) > 3 else "")
    return [
        Advice(
            f"Pad the sides of matrices to multiples of {PADDED_TO}",
            f"{counted(len(changed), 'matrix product')} with a side of {named} take {now_ms:.2f} ms; timed here, with "
            f"sides padded to multiples of {PADDED_TO}, {after_ms:.2f} ms",
            findings.saved_by_ms([after.get(id(op), op.measured_ms) for op in findings.operators]),
            f"{sides[-1]} -> {_padded(sides[-1])} where the model is built; a vocabulary's extra entries are not used",
        )
    ]


def padded_ms(findings: Findings) -> dict[int, float]:
    """Time in ms, with padding, of the matrix products that padding makes faster, by `id` of the operator."""
    if "padded" not in findings.timed:
        findings.timed["padded"] = _timed_padded(findings)
    found: dict[int, float] = findings.timed["padded"]
    return found


def _timed_padded(findings: Findings) -> dict[int, float]:
    if not (findings.repeatable and findings.on_gpu):
        return {}
    slow = [op for op in findings.operators if _odd_sides(op) and not _is_near_roof(op, findings)]
    if sum(op.measured_ms for op in slow) < LEAST_GAIN * findings.summary.wall_ms:
        return {}
    specs = list(dict.fromkeys(op.record.spec for op in sorted(slow, key=lambda op: -op.measured_ms)))[:MOST_SHAPES]
    times = times_again([(spec, Form(multiple=PADDED_TO)) for spec in specs if spec is not None], findings.device)
    timed = {spec: found.median_ms for spec, found in zip(specs, times, strict=True) if found is not None}
    return {
        id(op): timed[op.record.spec]
        for op in slow
        if op.record.spec in timed and timed[op.record.spec] < op.measured_ms
    }


def _odd_sides(op: MeasuredOperator) -> set[int]:
    """Lengths, in elements, of rows and columns of a product's floating-point operands that are not a multiple of 16
    bytes; empty for other operators."""
    record = op.record
    if record.name not in PRODUCTS or record.spec is None:
        return set()
    matrices = [t for t in record.inputs if len(t.shape) > 1 and t.dtype.is_floating_point]
    return {side for t in matrices for side in t.shape[-2:] if side * t.dtype.itemsize % VECTOR_BYTES}


def _is_near_roof(op: MeasuredOperator, findings: Findings) -> bool:
    cost = op.record.cost
    return cost is None or roof(cost, findings.ceilings).ms >= NEAR_ROOF * op.measured_ms


def _padded(side: int) -> int:
    return -(-side // PADDED_TO) * PADDED_TO

"""Whether torch.compile lays the images of a program out channels last, by the rule of its own.

In training it does unless some convolution is grouped with several channels a group, or narrows to half of its
channels or fewer with a kernel wider than one, or all have at most 64 channels. In inference it weighs the operations
of these classes by what it has seen the layout gain or lose (PyTorch, torch/_inductor/graph.py, decide_layout_opt).
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftop.analysis.instruments import MeasuredOperator
from rooftop.cost import Record

TIME_CHANNELS_LAST = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}
"""Relative to channels first, as torch.compile takes it."""
FEW = 300  # nodes of a graph for each convolution, from which on it leaves the layout


def compiler_lays_out_channels_last(operators: Sequence[MeasuredOperator]) -> bool:
    """Whether it does, of a step of these operators."""
    forward = [op.record for op in operators if op.record.phase == "forward"]
    convolutions = [r for r in forward if r.name == "aten::convolution" and r.spec is not None]
    if not convolutions or len(forward) >= FEW * len(convolutions):
        return False
    kinds = [_kind(record) for record in convolutions]
    if any(op.record.phase == "backward" for op in operators):
        return not {"grouped", "narrowing"} & set(kinds) and set(kinds) != {"small"}
    flops = [record.cost.total_flops if record.cost is not None else 0 for record in convolutions]
    weighed = sum(TIME_CHANNELS_LAST[kind] * count for kind, count in zip(kinds, flops, strict=True))
    return weighed <= sum(flops)


def _kind(record: Record) -> str:
    assert record.spec is not None
    out_channels, in_channels, *kernel = record.inputs[1].shape
    if record.spec["groups"] > 1 and in_channels > 1:
        return "grouped"
    if out_channels <= 64 and in_channels <= 64:
        return "small"
    if 2 * out_channels <= in_channels and kernel[0] > 1:
        return "narrowing"
    return "other"

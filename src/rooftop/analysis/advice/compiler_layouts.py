"""Predict whether torch.compile stores a program's images channels last. The compiler decides by this rule (PyTorch,
torch/_inductor/graph.py, decide_layout_opt):

- CPU with oneDNN: yes, if the program has a convolution. Without oneDNN, and on a GPU, the following rules hold.
- No, if the program has no convolution, or 300 or more graph nodes for each convolution.
- Training: no, if a convolution is grouped, if one is narrowing, or if all are small. Otherwise yes.
- Inference: each class of convolutions has a relative time for channels last, from PyTorch's benchmarks. The answer is
  yes if the program's flops, weighted with these times, do not exceed the unweighted flops.

A grouped convolution has several groups, each with several input channels. The weight of a small convolution has at
most 64 input channels and at most 64 output channels. The weight of a narrowing convolution has at most half as many
output channels as input channels, and its first kernel dimension (the height in 2-D) is larger than 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rooftop.analysis.instruments import MeasuredOperator
from rooftop.cost import Record

TIME_CHANNELS_LAST = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}
"""For each class of convolutions, the time in channels last divided by the time in channels first, as torch.compile
assumes.
"""
FEW = 300  # at this many graph nodes per convolution, or more, the compiler does not change the layout of images


def compiler_lays_out_channels_last(operators: Sequence[MeasuredOperator], on_gpu: bool) -> bool:
    """Whether torch.compile would store the images of a step with these operators channels last."""
    forward = [op.record for op in operators if op.record.phase == "forward"]
    convolutions = [r for r in forward if r.name == "aten::convolution" and r.spec is not None]
    if convolutions and not on_gpu and torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available():
        return True
    if not convolutions or len(forward) >= FEW * len(convolutions):
        return False
    if any(op.record.phase == "backward" for op in operators):
        refused = any(_is_grouped(record) or _narrows(record) for record in convolutions)
        return not refused and not all(_is_small(record) for record in convolutions)
    kinds = [_kind(record) for record in convolutions]
    flops = [record.cost.total_flops if record.cost is not None else 0 for record in convolutions]
    weighed = sum(TIME_CHANNELS_LAST[kind] * count for kind, count in zip(kinds, flops, strict=True))
    return weighed <= sum(flops)


def _kind(record: Record) -> str:
    """The first key of `TIME_CHANNELS_LAST` that fits the convolution. The module's docstring defines the keys."""
    if _is_grouped(record):
        return "grouped"
    if _is_small(record):
        return "small"
    return "narrowing" if _narrows(record) else "other"


def _is_grouped(record: Record) -> bool:
    assert record.spec is not None
    return bool(record.spec["groups"] > 1) and record.inputs[1].shape[1] > 1


def _is_small(record: Record) -> bool:
    return max(record.inputs[1].shape[:2]) <= 64


def _narrows(record: Record) -> bool:
    out_channels, in_channels, *kernel = record.inputs[1].shape
    return 2 * out_channels <= in_channels and kernel[0] > 1

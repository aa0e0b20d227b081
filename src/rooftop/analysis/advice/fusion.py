"""Predict which operators a compiler would fuse into one kernel, and the memory traffic that remains after fusion.

Elementwise operators, copies and reductions along rows are joined with their neighbours in the data flow. A value that
one operator of a kernel writes and another operator of the same kernel reads stays in registers. Matrix products,
convolutions and attention stay separate kernels, which read their inputs from memory and write their results there. So
fusing an activation between two matrix products saves nothing, but fusing it with a norm or a sum saves a write and a
read.

For a GPU a compiler also writes the kernels of norms, sums and copies that have no neighbour to join. Many of PyTorch's
own kernels stay far below the memory's rate, because they are written for every shape. The compiler's kernels are
written for one shape. On a CPU PyTorch's own kernels are as fast as the compiler's.

A kernel of joined operators reads each input once, and writes the results that other kernels read or the program keeps.
A backward kernel may compute a value of the forward pass again instead of reading it, if that moves less memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.kernel_join import is_transfer
from rooftop.cost.roofs import roof
from rooftop.hardware.ceilings import Ceilings

ROW_REDUCTIONS = {
    *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("nll_loss_forward", "nll_loss_backward", "mse_loss", "mse_loss_backward"),
    *("native_group_norm", "native_group_norm_backward"),
    *("native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "batch_norm_with_update"),
    *("batch_norm_backward",),
}
"""Operators that first reduce parts of a tensor, and then combine the results with all elements of the tensor."""
SUMS_OVER_ROWS = {
    *("native_layer_norm_backward", "_fused_rms_norm_backward", "native_batch_norm_backward", "batch_norm_backward"),
    *("cudnn_batch_norm_backward", "native_group_norm_backward"),
}
"""Operators of `ROW_REDUCTIONS` that also add up all rows (one sum for each column or channel). The sums take a second
pass over the kernel's input.
"""
BATCH_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "batch_norm_with_update"}
"""Operators of `ROW_REDUCTIONS` that add up all rows only in training."""
LONGEST_ROW_BYTES = 64 * 1024  # bytes of a row that one block keeps on the chip; longer rows are read twice
REDUCTIONS_OF_CHOICE = {"sum", "mean", "amax", "amin", "var", "var_mean"}
"""Reductions that a compiler fuses with neighbouring operators if the reduction is along rows. A reduction over columns
gets a separate kernel.
"""
USUAL_SHARE = 0.85  # share of the roof that elementwise kernels usually reach
SUMMING = 0.85
"""Bandwidth of a compiled kernel that also adds up all rows, as a share of an elementwise kernel's bandwidth."""
OTHERS_ON_ELEMENTS = {
    *("_to_copy", "copy_", "clone", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros"),
    *("native_dropout", "native_dropout_backward", "bernoulli_", "masked_fill_", "constant_pad_nd"),
    *("cat", "stack"),
}
"""Elementwise operators that PyTorch does not tag as pointwise."""
COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "constant_pad_nd"}
"""Operators that only copy elements, without arithmetic."""


@dataclass
class Fused:
    """The operators of a step that a compiler would fuse.

    Attributes:
        operators: number of these operators.
        kernels: number of kernels that the compiler would make of them.
        now_ms: total time of the operators.
        after_ms: predicted total time of the fused kernels.
    """

    operators: int = 0
    kernels: int = 0
    now_ms: float = 0.0
    after_ms: float = 0.0


Value = tuple[int, int]
"""A value in the data flow: (index of the operator that wrote it, number that identifies its memory). The index is -1
if the value existed before the step.
"""


@dataclass
class _Node:
    """One operator of the step, as a node of the data flow.

    Attributes:
        reads, writes: the values that the operator reads and writes, each with its bytes.
        joins: whether a compiler can fuse the operator with its neighbours in the data flow.
        alone: whether the compiler writes a separate kernel for this operator.
        elements: number of elements of the operator's largest tensor.
        level: the largest number of earlier operators that do not join, on any path of the data flow to this operator.
    """

    reads: dict[Value, int] = field(default_factory=dict)
    writes: dict[Value, int] = field(default_factory=dict)
    joins: bool = False
    alone: bool = False
    elements: int = 0
    level: int = 0


def fused(operators: Sequence[MeasuredOperator], ceilings: Ceilings) -> Fused:
    """Count the operators that a compiler would fuse, and predict their time. A group of operators that would become
    one kernel is left out if this kernel would not be faster.

    Args:
        operators: the operators of a step, in order of execution. Operators without a record of their tensors (in the
            optimizer, in compiled code) are not fused.
    """
    nodes = _flow(operators)
    groups = _groups(nodes)
    traffic = _Traffic(operators, nodes, groups)
    share = _share_of_roof(operators, nodes, ceilings)
    found, on_gpu = Fused(), ceilings.kind == "cuda"
    for group, members in groups.items():
        moved = traffic.of(group)
        now_ms = sum(operators[place].measured_ms for place in members)
        roof_ms = max(1e3 * moved / ceilings.rate(moved) if moved else 0.0, ceilings.kernel_floor_ms)
        after_ms = roof_ms / (share * (SUMMING if traffic.sums_over_rows(group) else 1.0))
        alone = len(members) == 1
        if after_ms >= now_ms or (alone and not (on_gpu and _gains_alone(operators[members[0]]))):
            continue
        found.operators += len(members)
        found.kernels += 1
        found.now_ms += now_ms
        found.after_ms += after_ms
    return found


def _flow(operators: Sequence[MeasuredOperator]) -> list[_Node]:
    """The data flow of a step: a node for each operator, with the tensors that it reads and writes. A view of a tensor
    counts as that tensor's memory, and the operator that makes the view moves nothing."""
    writers: dict[int, int] = {}
    nodes: list[_Node] = []
    for place, op in enumerate(operators):
        record, node = op.record, _Node()
        nodes.append(node)
        if record.cost is not None and not record.cost.bytes:
            continue
        for spec in record.inputs:
            if spec.memory:
                value = (writers.get(spec.memory, -1), spec.memory)
                node.reads[value] = max(node.reads.get(value, 0), spec.bytes)
        for spec in record.outputs:
            if spec.memory:
                writers[spec.memory] = place
                node.writes[place, spec.memory] = spec.bytes
        node.joins = record.cost is not None and _joins(op)
        node.alone = record.cost is not None and not node.joins and _is_sum_over_columns(op)
        node.elements = max((prod(s.shape) for s in (*record.inputs, *record.outputs)), default=0)
        node.level = max(
            (nodes[writer].level + (not nodes[writer].joins) for writer, _ in node.reads if writer >= 0), default=0
        )
    return nodes


def _gains_alone(op: MeasuredOperator) -> bool:
    """Whether a compiled kernel for this operator alone may be faster than PyTorch's kernel.

    PyTorch's elementwise kernels already move each byte only once.
    """
    return _plain(op) in ROW_REDUCTIONS | REDUCTIONS_OF_CHOICE | COPIES


def _is_sum_over_columns(op: MeasuredOperator) -> bool:
    return op.record.spec is not None and bool(op.record.inputs) and _plain(op) in REDUCTIONS_OF_CHOICE


def _joins(op: MeasuredOperator) -> bool:
    spec, record = op.record.spec, op.record
    if spec is None or not record.inputs or record.phase == "optimizer" or _crosses(op):
        return False
    name = _plain(op)
    if name in REDUCTIONS_OF_CHOICE:
        return _along_rows(op)
    on_elements = torch.Tag.pointwise in spec.func.tags or name in OTHERS_ON_ELEMENTS
    return on_elements or name in ROW_REDUCTIONS


def _crosses(op: MeasuredOperator) -> bool:
    """Whether an operator copies between host and GPU memory. A compiler cannot make such a copy part of a kernel."""
    return any(map(is_transfer, op.kernels))


def _plain(op: MeasuredOperator) -> str:
    name = op.record.name.removeprefix("aten::")
    return name if name in OTHERS_ON_ELEMENTS else name.removesuffix("_")


def _along_rows(op: MeasuredOperator) -> bool:
    """Whether the dimensions that an operator, such as a sum, reduces include the tensor's last dimension."""
    spec, rank = op.record.spec, len(op.record.inputs[0].shape)
    assert spec is not None
    dims = spec["dim"] if "dim" in spec else None  # noqa: SIM401 (a CallSpec has no `get`)
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return True
    return any(dim % max(1, rank) == rank - 1 for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def _groups(nodes: Sequence[_Node]) -> dict[int, list[int]]:
    """The groups of operators that a compiler turns into one kernel each. The result is a dict from the position of a
    group's first operator in `nodes`, which is the group's key, to the positions of all operators of the group.

    The operators of a group pass values to one another and work on the same number of elements. No path between two of
    them leads through a separate kernel (a matrix product).
    """
    first = list(range(len(nodes)))

    def root(place: int) -> int:
        while first[place] != place:
            first[place] = first[first[place]]
            place = first[place]
        return place

    for place, node in enumerate(nodes):
        for writer, _ in node.reads:
            other = nodes[writer] if writer >= 0 else None
            if other is None or not (node.joins and other.joins):
                continue
            if node.level == other.level and node.elements == other.elements:
                one, another = sorted((root(writer), root(place)))
                first[another] = one
    groups: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(nodes):
        if node.joins or node.alone:
            groups[root(place)].append(place)
    return groups


class _Traffic:
    """Memory traffic in bytes of each group of operators that a compiler turns into one kernel (see `_groups`)."""

    def __init__(
        self, operators: Sequence[MeasuredOperator], nodes: Sequence[_Node], groups: Mapping[int, list[int]]
    ) -> None:
        self._operators, self._nodes, self._groups = operators, nodes, groups
        self._group_of = {place: number for number, members in groups.items() for place in members}
        self._readers: dict[Value, list[int]] = defaultdict(list)
        for place, node in enumerate(nodes):
            for value in node.reads:
                self._readers[value].append(place)
        self._again: dict[tuple[int, int], bool] = {}

    def of(self, group: int) -> int:
        """The bytes that the kernel of a group of operators moves. It reads each input once, and writes each result
        that is needed outside the group once. `group` is the group's key.
        """
        read = dict[Value, int]()
        for value, size in self._read(group).items():
            source = self._group_of.get(value[0])
            again = source is not None and self._computed_again(source, group)
            read |= self._read(source) if source is not None and again else {value: size}
        written = sum(
            size
            for place in self._groups[group]
            for value, size in self._nodes[place].writes.items()
            if self._is_kept(value, group)
        )
        moved = sum(read.values()) + written
        if self.sums_over_rows(group) or any(self._has_long_rows(place) for place in self._groups[group]):
            moved += sum(size for size in read.values() if size >= self._nodes[group].elements)
        return moved

    def _read(self, group: int) -> dict[Value, int]:
        """The values that a group's operators read and operators outside the group wrote, each with its bytes."""
        read = dict[Value, int]()
        for place in self._groups[group]:
            for value, size in self._nodes[place].reads.items():
                if self._group_of.get(value[0]) != group:
                    read[value] = max(size, read.get(value, 0))
        return read

    def _is_kept(self, value: Value, group: int) -> bool:
        """Whether the kernel of `group` must write a value to memory: another kernel reads the value instead of
        computing it again, or no operator reads it, so the program keeps it.
        """
        readers = [self._group_of.get(place) for place in self._readers[value]]
        return not readers or any(
            reader is None or (reader != group and not self._computed_again(group, reader)) for reader in readers
        )

    def _computed_again(self, forward: int, backward: int) -> bool:
        """Whether a fused kernel of the backward pass computes the values of a fused kernel of the forward pass again,
        from the forward kernel's inputs, because this moves less memory than reading the values. `forward` and
        `backward` are the keys of the two groups of operators (see `_groups`)."""
        if self._operators[forward].record.phase != "forward" or self._operators[backward].record.phase != "backward":
            return False
        known = self._again.get((forward, backward))
        if known is None:
            read, sources = self._read(backward), self._read(forward)
            more = sum(size for value, size in sources.items() if value not in read)
            saved = 0
            for value, size in read.items():
                if self._group_of.get(value[0]) == forward:
                    in_memory_anyway = any(place not in self._group_of for place in self._readers[value])
                    saved += size if in_memory_anyway else 2 * size
            known = self._again[forward, backward] = more < saved
        return known

    def sums_over_rows(self, group: int) -> bool:
        """Whether an operator of a group adds up the rows of its input (one sum for each column or channel), and so
        reads its input twice."""
        members = [self._operators[place] for place in self._groups[group]]
        return any(_plain(op) in SUMS_OVER_ROWS or (_plain(op) in BATCH_STATISTICS and _trains(op)) for op in members)

    def _has_long_rows(self, place: int) -> bool:
        """Whether the operator at position `place` reduces rows that are too long for one thread block to keep on the
        chip. A kernel reads such rows twice."""
        op = self._operators[place]
        first = op.record.inputs[0]
        row_bytes = (first.shape[-1:] or (1,))[0] * first.dtype.itemsize
        return _plain(op) in ROW_REDUCTIONS and row_bytes > LONGEST_ROW_BYTES


def _trains(op: MeasuredOperator) -> bool:
    spec = op.record.spec
    assert spec is not None
    name = next((each for each in ("training", "train") if each in spec), None)
    return name is None or bool(spec[name])


def _share_of_roof(operators: Sequence[MeasuredOperator], nodes: Sequence[_Node], ceilings: Ceilings) -> float:
    """The share of the roof that this step's best elementwise operators reach. Operators are taken from the highest
    share down until they make up a quarter of all elementwise roof time; the lowest share taken is returned.

    `USUAL_SHARE` if the step has no elementwise operators. Compiled kernels are assumed to reach this share as well.
    Eager kernels with lower shares do not count: arithmetic (powers in bfloat16) or index computations limit them.
    """
    seen = []
    for op, node in zip(operators, nodes, strict=True):
        if not node.joins or op.record.cost is None or _plain(op) in ROW_REDUCTIONS | REDUCTIONS_OF_CHOICE:
            continue
        roof_ms = roof(op.record.cost, ceilings).ms
        if op.measured_ms > 0 and roof_ms > 0:
            seen.append((min(1.0, roof_ms / op.measured_ms), roof_ms))
    left_ms = sum(roof_ms for _, roof_ms in seen) / 4
    for share, roof_ms in sorted(seen, reverse=True):
        left_ms -= roof_ms
        if left_ms <= 0:
            return share
    return USUAL_SHARE

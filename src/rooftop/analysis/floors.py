"""Compare each operator and each module with its roofs. A module has two roofs:

    op roof     sum of the roofs of the module's operators
    fused roof  the module as one kernel: inputs, parameters and outputs moved once, and all flops

In training the backward pass also moves each tensor once: it reads the output's gradient, the inputs and the
parameters, and writes gradients of inputs and parameters. A fused roof is never above the op roof: if the op roof is
lower (all data in L2, or a table with few used rows), the fused roof is set to the op roof.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rooftop.analysis.attribution import OPTIMIZER, ModuleTracker, ModuleTraffic
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.report_contents import ModuleNode, OperatorRow
from rooftop.cost import FREE, Cost, Record, roof
from rooftop.hardware.ceilings import Ceilings


def comparable(record: Record, ceilings: Ceilings) -> Record:
    """The record, marked as uncovered if it has flops in a precision for which the machine's rate is unknown."""
    unknown = [precision for precision in (record.cost or FREE).flops if precision not in ceilings.flops]
    if not unknown:
        return record
    return replace(record, cost=None, uncovered=f"the {unknown[0]} rate of {ceilings.device} is unknown")


def operator_rows(operators: Sequence[MeasuredOperator], ceilings: Ceilings) -> list[OperatorRow]:
    """Group executions of one operator with the same phase, shapes and dtype into rows, the longest time first."""
    groups: dict[tuple[object, ...], list[MeasuredOperator]] = defaultdict(list)
    for op in operators:
        r = op.record
        groups[r.shown_name, r.phase, r.shapes, r.dtype, r.cost is None].append(op)
    rows = [_row(group, ceilings) for group in groups.values()]
    return sorted(rows, key=lambda row: -row.measured_ms)


def _row(group: list[MeasuredOperator], ceilings: Ceilings) -> OperatorRow:
    first = group[0].record
    costs = [op.record.cost for op in group if op.record.cost is not None]
    roofs = [roof(cost, ceilings) for cost in costs]
    total = sum(costs, FREE)
    return OperatorRow(
        name=first.shown_name,
        phase=first.phase,
        shapes=first.shapes,
        dtype=first.dtype,
        calls=len(group),
        flops=total.total_flops,
        flops_by_precision=dict(total.flops),
        bytes=total.bytes,
        roof_ms=sum(r.ms for r in roofs),
        measured_ms=sum(op.measured_ms for op in group),
        bound=max(roofs, key=lambda r: r.ms).bound if roofs else "uncovered",
        modules=tuple(dict.fromkeys(op.record.scope for op in group)),
        kernels=tuple(dict.fromkeys(kernel for op in group for kernel in op.kernels)),
        uncovered=first.uncovered,
    )


@dataclass
class _Node:
    """A module, with its own operators and its child modules, from which `_finish` makes a node of the report."""

    name: str
    own: list[MeasuredOperator] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)

    def everything(self) -> Iterable[MeasuredOperator]:
        yield from self.own
        for child in self.children.values():
            yield from child.everything()


def module_tree(
    operators: Sequence[MeasuredOperator], tracker: ModuleTracker, ceilings: Ceilings, root_type: str
) -> ModuleNode:
    """The step as a tree of modules. Work outside all modules (loss, optimizer) has nodes in brackets under the
    root."""
    root = _Node("")
    for scope in tracker.traffic:
        _descend(root, scope)
    for op in operators:
        _descend(root, op.record.scope).own.append(op)
    return _finish(root, "", tracker, ceilings, root_type).node


def _descend(root: _Node, scope: str) -> _Node:
    node = root
    for part in scope.split(".") if scope else ():
        node = node.children.setdefault(part, _Node(part))
    return node


@dataclass(frozen=True)
class _Finished:
    """A node of the report, with values that its parent's node needs. `fused`: the cost of the node's work as one
    kernel. `parameters`: the number of elements of each parameter, by the parameter's id.
    """

    node: ModuleNode
    fused: Cost
    parameters: Mapping[int, int]


def _finish(node: _Node, scope: str, tracker: ModuleTracker, ceilings: Ceilings, default_type: str) -> _Finished:
    finished = [
        _finish(child, f"{scope}.{name}" if scope else name, tracker, ceilings, "")
        for name, child in node.children.items()
    ]
    everything = list(node.everything())
    total = sum((op.record.cost for op in everything if op.record.cost is not None), FREE)
    traffic = tracker.traffic.get(scope)
    if scope == OPTIMIZER:
        optimizers = tracker.optimizer_traffic()
        fused = Cost(optimizers.read, optimizers.written, total.flops)
    elif traffic is not None:
        moved = _module_traffic(traffic, any(op.record.phase == "backward" for op in everything))
        outside = [child.fused for child in finished if child.node.name.startswith("(")]
        fused = sum(outside, Cost(*moved))
        fused = Cost(fused.read_bytes, fused.write_bytes, total.flops)
    else:
        own = [op.record.cost for op in node.own if op.record.cost is not None]
        fused = sum([*own, *(child.fused for child in finished)], FREE)
    own_roof_ms = sum(roof(op.record.cost, ceilings).ms for op in node.own if op.record.cost is not None)
    op_roof_ms = own_roof_ms + sum(child.node.op_roof_ms for child in finished)
    parameters = dict(traffic.parameters) if traffic is not None else {}
    if traffic is None:
        for child in finished:
            parameters |= child.parameters
    finished_node = ModuleNode(
        name=node.name,
        type=traffic.type if traffic is not None else default_type,
        calls=traffic.calls if traffic is not None else 1,
        parameters=sum(parameters.values()),
        flops=total.total_flops,
        bytes=total.bytes,
        measured_ms=sum(op.measured_ms for op in everything),
        op_roof_ms=op_roof_ms,
        fused_roof_ms=min(op_roof_ms, roof(fused, ceilings).ms),
        children=tuple(child.node for child in finished),
    )
    return _Finished(finished_node, fused, parameters)


def _module_traffic(traffic: ModuleTraffic, backward: bool) -> tuple[int, int]:
    """(read, written) bytes of a module if it ran as one kernel."""
    read = traffic.input_bytes + traffic.parameter_bytes
    written = traffic.output_bytes
    if backward:
        read += traffic.output_bytes + traffic.input_bytes + traffic.parameter_bytes
        written += traffic.grad_input_bytes + traffic.trainable_bytes
    return read, written

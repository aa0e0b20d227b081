"""Turn the profile of a compiled step into operators: events of the host with their kernels, cost and module.

The profiler's events nest: a run of a compiled graph contains the launches of its kernels and the operators that it
calls. From the outside in, the first event that has a cost becomes an operator:

    a kernel of a compiled graph      the work of its nodes in the graph (see `kernel_work`)
    an operator with a formula        its call, repeated on meta tensors (see `reconstruction`)
    an operator without a formula     listed as uncovered

A replayed CUDA graph is one event with all the graph's kernels. Rooftop matches these kernels, in order, with the
compiled graph's list of kernels. The names of generated kernels serve as anchors.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rooftop.analysis.attribution import AUTOGRAD, LOSS, OPTIMIZER
from rooftop.analysis.compiled.dynamic_sizes import named_sizes
from rooftop.analysis.compiled.graphs import GRAPH_KEY, CompiledGraph, recorded_graph
from rooftop.analysis.compiled.kernel_work import GENERATED, KernelWork, is_generated, plain_name
from rooftop.analysis.compiled.reconstruction import (
    NotReconstructedError,
    RecordedTensors,
    has_formula,
    reconstructed,
    tensors_of,
)
from rooftop.analysis.kernel_join import Kernel, device_kernels
from rooftop.cost import FREE, Cost, Record
from rooftop.cost.accounting import counted_for, tensor_bytes, tensors_in
from rooftop.cost.counting import counted, dtype_name, leading_of, title_of

COMPILED_REGION = "## Call CompiledFxGraph"
"""Prefix of the names of events that contain a run of a compiled graph."""
COMPILED_BEFORE = "compiled before the analysis: the operators fused into it are unknown"


@dataclass
class JoinedOperator:
    """One operator of a profiled step, with the time of its event on the host and its kernels on the device."""

    record: Record
    host_ms: float
    kernels: list[Kernel] = field(default_factory=list)


@dataclass
class _Event:
    """An event that the profiler recorded on the host, and the events inside it (`children`)."""

    source: Any
    name: str
    start_ns: int
    end_ns: int
    children: list[_Event] = field(default_factory=list)


def join_compiled(
    events: Sequence[Any],
    graphs: Mapping[str, CompiledGraph],
    device: str,
    known: RecordedTensors = MappingProxyType({}),
) -> tuple[list[JoinedOperator], list[Kernel]]:
    """Return the operators of a compiled step in order of execution, and the kernels that belong to no operator.

    Args:
        events: all events that the profiler recorded, with the shapes of operators' inputs.
        graphs: the compiled graphs, by the key that the names of their events contain.
        device: the device of the step, which the operators' records name.
        known: the tensors that operators received, by event (see `reconstruction.recorded_tensors`). An operator with a
            list of tensors is uncovered if its event is missing in `known`.
    """
    host = [e for e in events if e.device_type().name != "CUDA"]
    walk = _Walk(graphs, device, known)
    for roots in _trees(host).values():
        for event in roots:
            walk.visit(event, "forward", AUTOGRAD)
    orphans = walk.assign(device_kernels(events), host)
    return [operator for _, operator in sorted(walk.operators, key=lambda pair: pair[0])], orphans


def _trees(host: Iterable[Any]) -> dict[int, list[_Event]]:
    """The outermost events of each thread, with the events inside them as children. The keys are the threads' ids.

    Only events of operators, labels and generated kernels are kept. An event is inside another event of its thread if
    its time is within the other event's time.
    """
    threads: dict[int, list[_Event]] = defaultdict(list)
    for e in host:
        if "::" in e.name() or e.name().startswith(("##", "Optimizer.step", "autograd::")) or GENERATED.match(e.name()):
            start_ns = e.start_ns()
            threads[e.start_thread_id()].append(_Event(e, e.name(), start_ns, start_ns + e.duration_ns()))
    for events in threads.values():
        events.sort(key=lambda event: (event.start_ns, -event.end_ns))
    return {thread: _nested(events) for thread, events in threads.items()}


def _nested(events: list[_Event]) -> list[_Event]:
    roots: list[_Event] = []
    open_events: list[_Event] = []
    for event in events:
        while open_events and open_events[-1].end_ns < event.end_ns:
            open_events.pop()
        (open_events[-1].children if open_events else roots).append(event)
        open_events.append(event)
    return roots


@dataclass
class _Region:
    """One run of a compiled graph: its event on the host, the work of its kernels, and the kernels that CUDA graphs
    replayed in this run."""

    event: _Event
    graph: CompiledGraph
    works: _Matcher
    replayed: list[Kernel] = field(default_factory=list)

    def contains(self, at_ns: int) -> bool:
        return self.event.start_ns <= at_ns <= self.event.end_ns


class _Walk:
    """Walks through the trees of profiler events (see `_trees`): `visit` collects the operators of a tree. Then
    `assign` assigns each kernel of the profile to the operator that launched it."""

    def __init__(self, graphs: Mapping[str, CompiledGraph], device: str, known: RecordedTensors) -> None:
        self.operators: list[tuple[int, JoinedOperator]] = []  # (start time, operator)
        self._graphs = graphs
        self._device = device
        self._known = known
        self._owners: dict[int, JoinedOperator] = {}  # correlation id of an event -> the event's operator
        self._regions: list[_Region] = []

    def visit(self, event: _Event, phase: str, scope: str) -> None:
        if event.name.startswith("autograd::engine::evaluate_function"):
            phase, scope = "backward", AUTOGRAD
        elif event.name.startswith("Optimizer.step"):
            phase, scope = "optimizer", OPTIMIZER
        graph = self._graph(event)
        if graph is not None:
            graph = graph.at(next((sizes for child in event.children if (sizes := named_sizes(child.name))), None))
            works = _Matcher(graph.works)
            self._regions.append(_Region(event, graph, works))
            for child in event.children:
                self._visit_in_graph(child, works, "backward" if graph.backward else "forward", graph.problem)
        elif GENERATED.match(event.name) or self._is_operator(event):
            self._add(event, self._reconstructed(event, phase, scope if phase != "forward" else LOSS))
        else:
            before = len(self.operators)
            for child in event.children:
                self.visit(child, phase, scope)
            if event.name.startswith(COMPILED_REGION) and self._device == "cpu":
                self._add_unseen(event, self.operators[before:], phase)

    def _add_unseen(self, event: _Event, seen: Sequence[tuple[int, JoinedOperator]], phase: str) -> None:
        """Add an operator for a run of a compiled graph on a CPU, if the profile does not show the graph's kernels
        because it was compiled before the analysis. The operator's time is the time of `event` without the operators
        `seen` that were found inside this event."""
        if any(operator.record.uncovered == COMPILED_BEFORE for _, operator in seen):
            return
        record = self._record("inductor::graph", (), "", "", phase, None, COMPILED_BEFORE)
        inside_ms = sum(operator.host_ms for _, operator in seen)
        host_ms = max(0.0, (event.end_ns - event.start_ns) / 1e6 - inside_ms)
        self.operators.append((event.start_ns, JoinedOperator(record, host_ms)))

    def _graph(self, event: _Event) -> CompiledGraph | None:
        found = re.search(rf"{GRAPH_KEY}\d+", event.name)
        return (self._graphs.get(found[0]) or recorded_graph(found[0])) if found else None

    def _visit_in_graph(self, event: _Event, works: _Matcher, phase: str, problem: str) -> None:
        work = works.next(event.name)
        cost = _cost_of_launch(work, event, self._known) if work is not None else None
        if work is not None and cost is not None:
            name = _shown(event.name)
            self._add(event, self._record(name, work.shapes, work.dtype, work.scope, phase, cost, "", work.title))
        elif work is not None:
            reason = f"no formula for {', '.join(work.uncovered)}" if work.uncovered else "its nodes are unknown"
            self._add(event, self._record(_shown(event.name), work.shapes, work.dtype, work.scope, phase, None, reason))
        elif GENERATED.match(event.name) or self._is_operator(event):
            self._add(event, self._reconstructed(event, phase, "", problem))
        else:
            for child in event.children:
                self._visit_in_graph(child, works, phase, problem)

    def _is_operator(self, event: _Event) -> bool:
        """Whether an event counts as an operator of PyTorch: there is a formula for its cost, or it contains no other
        event."""
        if "::" not in event.name or event.name.startswith("autograd::"):
            return False
        return has_formula(event.name) or not event.children

    def _reconstructed(self, event: _Event, phase: str, scope: str, problem: str = "") -> Record:
        if GENERATED.match(event.name):
            return self._record(_shown(event.name), (), "", scope, phase, None, problem or COMPILED_BEFORE)
        try:
            call = reconstructed(event.source, self._known)
        except NotReconstructedError as error:
            return self._record(event.name, (), "", scope, phase, None, f"not reconstructed: {error}")
        with counted_for(self._device.partition(":")[0]):
            cost, uncovered = counted(call)
        tensors = call.read_tensors or list(tensors_in(call.out))
        shapes, dtype = tuple(tuple(t.shape) for t in call.read_tensors), dtype_name(leading_of(tensors))
        return self._record(event.name, shapes, dtype, scope, phase, cost, uncovered, title_of(call))

    def _record(
        self,
        name: str,
        shapes: Any,
        dtype: str,
        scope: str,
        phase: str,
        cost: Cost | None,
        uncovered: str,
        title: str = "",
    ) -> Record:
        return Record(name, shapes, dtype, self._device, scope, phase, cost, uncovered, title=title)

    def _add(self, event: _Event, record: Record) -> None:
        operator = JoinedOperator(record, (event.end_ns - event.start_ns) / 1e6)
        self.operators.append((event.start_ns, operator))
        for part in _everything(event):
            self._owners[part.source.correlation_id()] = operator

    def assign(self, kernels: Sequence[Kernel], host: Sequence[Any]) -> list[Kernel]:
        """Assign each kernel to the operator that launched it, and return the kernels without an operator. Kernels that
        a CUDA graph replayed are assigned to new operators, made from the compiled graph's `KernelWork`s.
        """
        replays = {e.correlation_id(): e for e in host if e.name().startswith("cudaGraphLaunch")}
        launches = {e.correlation_id(): e.start_ns() for e in host if e.name().startswith("cu")}
        # (start, end, operator) by time, over all threads
        spans = sorted((start, start + (op.host_ms * 1e6), op) for start, op in self.operators)
        starts = [start for start, _, _ in spans]
        replayed: dict[int, list[Kernel]] = defaultdict(list)
        orphans = []
        for kernel in kernels:
            owner = self._owners.get(kernel.linked_correlation_id) if kernel.linked_correlation_id else None
            if owner is None and kernel.correlation_id in replays:
                replayed[kernel.correlation_id].append(kernel)
                continue
            if owner is None and kernel.correlation_id in launches:
                at = launches[kernel.correlation_id]
                position = bisect_right(starts, at) - 1
                if position >= 0 and at <= spans[position][1]:
                    owner = spans[position][2]
            if owner is None:
                orphans.append(kernel)
            else:
                owner.kernels.append(kernel)
        for correlation, members in replayed.items():
            at_ns = replays[correlation].start_ns()
            region = next((region for region in self._regions if region.contains(at_ns)), None)
            if region is None:
                orphans += members
            else:
                region.replayed.extend(members)
        for region in self._regions:
            orphans += self._replayed(region)
        return orphans

    def _replayed(self, region: _Region) -> list[Kernel]:
        """Add operators for the kernels that CUDA graphs replayed in one run of a compiled graph. Return the kernels
        that match no work of the compiled graph."""
        if not region.replayed:
            return []
        at_ns, graph = region.event.start_ns, region.graph
        phase, orphans = ("backward" if graph.backward else "forward"), []
        if graph.problem:
            record = self._record("inductor::graph", (), "", "", phase, None, graph.problem)
            self.operators.append((at_ns, JoinedOperator(record, 0.0, region.replayed)))
            return []
        for number, (works, members) in enumerate(aligned(region.works.left(), region.replayed)):
            costs = [work.cost for work in works if work.cost is not None]
            if not works:
                orphans += members
                continue
            if not members:  # these work items' kernels are in no CUDA graph, so they have their own events
                continue
            known = len(costs) == len(works)
            names = dict.fromkeys(_shown(work.name) for work in works)
            record = self._record(
                " + ".join(names),
                works[0].shapes,
                works[0].dtype,
                works[0].scope,
                phase,
                sum(costs, FREE) if known else None,
                "" if known else "no formula for some of its kernels",
            )
            self.operators.append((at_ns + number, JoinedOperator(record, 0.0, list(members))))
        return orphans


def _cost_of_launch(work: KernelWork, event: _Event, known: RecordedTensors) -> Cost | None:
    """The cost of one launch of a kernel; None if unknown. The kernel's memory traffic is at most the size of the
    tensors to which its arguments point.

    If a kernel only copies an operand into the layout that a library needs, its cost is the size of these tensors.
    """
    pointers = _pointer_bytes(event.source, known) if is_generated(work.name) else None
    if pointers is None or work.uncovered:
        return work.cost
    if work.lays_out:
        return Cost(*pointers)
    if work.cost is None:
        return None
    return work.cost if work.cost.bytes <= sum(pointers) else Cost(*pointers, work.cost.flops)


def _pointer_bytes(event: Any, known: RecordedTensors) -> tuple[int, int] | None:
    """The bytes that a Triton kernel reads and the bytes that it writes; None if unknown. The names of its pointers
    show which tensors it writes. `event` is the kernel's launch on the host."""
    file = dict(event.kwinputs() or {}).get("kernel_file") if hasattr(event, "kwinputs") else None
    names = _pointer_names(str(file)) if file else ()
    tensors = dict(tensors_of(event, known))
    if not names or sorted(tensors) != list(range(len(names))):
        return None
    read = sum(tensor_bytes(tensors[i]) for i, name in enumerate(names) if name.startswith("in_"))
    written = sum(tensor_bytes(tensors[i]) for i, name in enumerate(names) if name.startswith(("out_", "in_out_")))
    return read, written


@lru_cache(maxsize=4096)
def _pointer_names(file: str) -> tuple[str, ...]:
    """The names of a generated kernel's pointer arguments, such as "in_ptr0", "out_ptr0" and "in_out_ptr0". `file` is
    the path of the kernel's source; () if it cannot be read."""
    try:
        source = Path(file).read_text(encoding="utf-8")
    except OSError:
        return ()
    found = re.search(r"^def triton_\w+\(([^)]*)\)", source, re.MULTILINE)
    return tuple(name.strip() for name in found[1].split(",") if "_ptr" in name) if found else ()


def aligned(works: Sequence[KernelWork], kernels: Sequence[Kernel]) -> Iterator[tuple[list[KernelWork], list[Kernel]]]:
    """Match the work items of a compiled graph (one for each of its kernels and library calls) with the kernels that
    ran. Yield the matched lists. Both are matched in order; generated kernels are found by their names.

    Between two generated kernels are library calls. These calls are matched one by one with the kernels that ran there
    if there are as many calls as kernels. Otherwise, all these calls are matched with all these kernels as one group.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start_ns)
    between: list[KernelWork] = []
    position = 0
    for work in works:
        match = GENERATED.match(work.name)
        found = None
        if match is not None:
            found = next((i for i in range(position, len(ordered)) if ordered[i].name == work.name), None)
        if found is None:
            between.append(work)
            continue
        yield from _one_by_one(between, ordered[position:found])
        yield [work], [ordered[found]]
        between, position = [], found + 1
    yield from _one_by_one(between, ordered[position:])


def _one_by_one(works: list[KernelWork], kernels: list[Kernel]) -> Iterator[tuple[list[KernelWork], list[Kernel]]]:
    if len(works) == len(kernels):
        for work, kernel in zip(works, kernels, strict=True):
            yield [work], [kernel]
    elif works or kernels:
        yield works, kernels


class _Matcher:
    """Finds the work item of each host event in one run of a compiled graph. The graph has a work item for each of its
    kernels and library calls. The work items and the events are in the order of the launches.

    A generated kernel is found by its name. A library call among the events (a copy of an input) may have no work item.
    So the search for the item of a library call ends at the next generated kernel's item.
    """

    def __init__(self, works: Sequence[KernelWork]) -> None:
        self._works = works
        self._next = 0
        self._found: set[int] = set()

    def next(self, name: str) -> KernelWork | None:
        plain, anchor = plain_name(name), GENERATED.match(name)
        for position in range(self._next, len(self._works)):
            work = self._works[position]
            if plain_name(work.name) == plain:
                self._next = position + 1
                self._found.add(position)
                return work
            if anchor is None and is_generated(work.name):
                return None
        return None

    def left(self) -> list[KernelWork]:
        """The work items of the graph for which no host event was found."""
        return [work for position, work in enumerate(self._works) if position not in self._found]


def _shown(name: str) -> str:
    """The name that a report shows for an event or kernel called `name`. The name of a generated kernel loses its
    number, and a library call gets the name of PyTorch's operator.
    """
    generated = GENERATED.match(name)
    if generated:
        return "inductor::" + re.sub(r"^(?:triton|cpp)_(?:poi_|per_|red_|for_|tem_)?|_\d+$", "", generated[1])
    return name if "::" in name else f"aten::{plain_name(name)}"


def _everything(event: _Event) -> Iterator[_Event]:
    yield event
    for child in event.children:
        yield from _everything(child)

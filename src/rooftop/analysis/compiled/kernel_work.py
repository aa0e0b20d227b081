"""Bytes and flops of a compiled graph's kernel, from the graph nodes that inductor fused into the kernel.

    read    each value from outside the kernel, once: the part that the kernel's operators use
    write   each value that is used outside the kernel, once
    flops   of every operator in the kernel, even if another kernel computes that operator again

Inductor splits large reductions into two kernels with the same nodes. The second kernel only combines the first
kernel's partial results. Partial results are not necessary work. So the first kernel counts as writing only as many
bytes as the result has, and the second kernel's reads do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from rooftop.analysis.compiled.dynamic_sizes import with_known_sizes
from rooftop.cost.accounting import FREE, Call, Cost, distinct_bytes, distinct_elements, tensor_bytes, tensors_in
from rooftop.cost.counting import dtype_name, leading_of, title_of
from rooftop.cost.lookup import formula_for, later_cost
from rooftop.hardware.interruptions import pass_on

REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "var", "max", "min", "prod", "argmax", "argmin", "any", "all"}
"""Operators that inductor may split into two kernels."""
SCATTERS = {
    *("scatter", "scatter_add", "scatter_reduce", "index_add", "index_put", "_unsafe_index_put"),
    *("_unsafe_masked_index_put_accumulate", "as_strided_scatter", "slice_scatter", "select_scatter"),
}
"""Operators that inductor may split into two kernels: one fills memory, the other adds to it."""


@dataclass(frozen=True)
class KernelWork:
    """The work of one kernel of a compiled graph.

    Attributes:
        name: the kernel's name in the generated code: "triton_poi_fused_add_relu_3", "extern_kernels.mm".
        cost: None if an operator of the kernel has no formula, or if the kernel writes none of its nodes' values.
        uncovered: operators in the kernel without a formula.
        shapes: shapes of the tensors that the kernel reads and other kernels or the program wrote.
        dtype: dtype of the first floating-point or complex value that it reads or writes; of the first value if there
            is none.
        scope: path of the module that its nodes share.
        lays_out: whether the kernel only changes the layout of operands of library calls. The graph does not say which
            operands, so the cost is one read and one write of the smallest operand of each call, summed over the calls.
        title: name in reports, for a library's call whose own name is ambiguous; "" for all other kernels.
    """

    name: str
    cost: Cost | None
    uncovered: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    scope: str
    lays_out: bool = False
    title: str = ""


def _laying_out(name: str, served: Sequence[fx.Node]) -> KernelWork:
    """Work of a kernel that copies operands of library calls into the layout that the library needs."""
    operands = [
        min((v for n in node.all_input_nodes for v in _values(n) if v.dim() > 1), key=tensor_bytes, default=None)
        for node in served
    ]
    copied = [tensor for tensor in operands if tensor is not None]
    size = distinct_bytes(copied)
    return KernelWork(
        name=name,
        cost=Cost(size, size),
        uncovered=(),
        shapes=tuple(tuple(tensor.shape) for tensor in copied),
        dtype=dtype_name(copied[0] if copied else None),
        scope=_shared_scope(served),
        lays_out=True,
    )


def _calls(name: str, group: list[fx.Node]) -> list[fx.Node]:
    """Return those nodes of `group` that call the library kernel `name`. If no node does, return all nodes.

    `group` has the nodes that inductor lists for this kernel. Some of them only change the layout of the call's
    operands.
    """
    plain = plain_name(name)
    return [node for node in group if plain_name(_operator(node)) == plain] or group


def _without(group: list[fx.Node], called: Mapping[fx.Node, int], done: set[fx.Node]) -> list[fx.Node]:
    """The group without its library calls, and without the operands of these calls that earlier kernels have computed.

    Operands that earlier kernels have computed are already in memory; this kernel only changes their layout. This
    kernel computes the other operands, in the needed layout.
    """
    operands = {_source(value) for node in group if node in called for value in node.all_input_nodes}
    return [node for node in group if node not in called and not (node in operands and node in done)]


GENERATED = re.compile(r"^(?:graph_\d+_)?((?:triton|cpp)_\S+)$")
"""Matches the names of kernels that inductor wrote, in its code and in a profile."""


def plain_name(name: str) -> str:
    """ "mm" for "aten::mm", "extern_kernels.mm" and "torch.ops.aten.mm.default". For a generated kernel, return the
    kernel's own name."""
    generated = GENERATED.match(name)
    if generated:
        return generated[1]
    parts = name.split(".")
    if "::" in name:
        plain = name.rpartition("::")[2]
    elif name.startswith("torch.ops.") and len(parts) > 3:
        plain = parts[3]
    elif name.startswith("aten."):
        plain = parts[1]
    else:
        plain = parts[-1].removeprefix("bias_")
    return plain.removesuffix("_")


def is_generated(name: str) -> bool:
    """Whether inductor wrote the kernel; others are library calls."""
    return name.startswith(("triton_", "cpp_"))


def kernel_works(
    graph: fx.Graph, kernels: Sequence[tuple[str, Sequence[str]]], sizes: Mapping[Any, int] | None = None
) -> list[KernelWork]:
    """The work of each kernel of a compiled graph, in the order of `kernels`.

    Args:
        graph: graph of aten operators, with fake tensors as `meta["val"]`.
        kernels: (name, names of the nodes fused into it), in the order in which the generated code launches them.
        sizes: values of the symbols of a graph with dynamic sizes; None: the values for which the graph was compiled.

    Raises:
        ValueError: the graph's sizes depend on data, or on symbols that `sizes` lacks.
    """
    graph = with_known_sizes(graph, sizes)
    by_name = {node.name: node for node in graph.nodes}
    groups = [[by_name[name] for name in names if name in by_name] for _, names in kernels]
    # Inductor may list the node of a library call, such as a convolution, for several kernels: the library's kernel,
    # which computes the call, and generated kernels that add the call's bias or change the layout of its operands. Only
    # the library's kernel counts the call. `_calls` keeps only the call in the group of the library's kernel. Below,
    # `_without` removes the call from the groups of generated kernels.
    groups = [
        group if is_generated(name) else _calls(name, group) for (name, _), group in zip(kernels, groups, strict=True)
    ]
    called = {
        node: number
        for number, ((name, _), group) in enumerate(zip(kernels, groups, strict=True))
        if not is_generated(name)
        for node in group
    }
    fills = _take_fills_out(groups)
    after = _last_calls(graph, called)
    done: set[fx.Node] = set()
    for number, (name, _) in enumerate(kernels):
        if is_generated(name):
            groups[number] = _without(_ready(number, name, groups[number], called, after), called, done)
            done.update(groups[number])
    _drop_what_is_read([is_generated(name) for name, _ in kernels], groups)
    kernels_of: dict[fx.Node, list[int]] = {}
    for number, group in enumerate(groups):
        for node in group:
            kernels_of.setdefault(node, []).append(number)
    begun: set[fx.Node] = set()  # reductions whose first stage an earlier kernel has run
    works = []
    for number, ((name, nodes), group) in enumerate(zip(kernels, groups, strict=True)):
        served = [by_name[node] for node in nodes if by_name.get(node) in called]
        kernel = _Kernel(number, group, kernels_of, begun, fills)
        works.append(_laying_out(name, served) if served and not kernel.stored() else kernel.work(name))
        begun.update(node for node in group if _is_reduction(node))
    return works


def _last_calls(graph: fx.Graph, called: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """For each node, the number of the last library kernel that must run before the node; -1 if there is no such
    kernel.
    """
    after: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = (max(after[value], called.get(value, -1)) for value in node.all_input_nodes)
        after[node] = max(before, default=-1)
    return after


def _ready(
    number: int, name: str, group: list[fx.Node], called: Mapping[fx.Node, int], after: Mapping[fx.Node, int]
) -> list[fx.Node]:
    """Those graph nodes of a kernel's group that the kernel can compute.

    For a kernel that copies an operand into a library's layout, inductor lists all nodes that lead to the library's
    call. But the kernel cannot compute a node that waits for a later call, and a pointwise kernel computes no
    reductions.
    """
    members = set(group)
    pointwise = name.startswith("triton_poi_") and not members.isdisjoint(called)
    ready = {
        node for node in group if node in called or (after[node] < number and not (pointwise and _is_reduction(node)))
    }
    ends = [node for node in ready if node in called or members.isdisjoint(node.users)]
    return _leading_to(ends, group, ready)


def _leading_to(ends: Iterable[fx.Node], group: list[fx.Node], allowed: set[fx.Node]) -> list[fx.Node]:
    """The `ends`, and the nodes of the group on which the ends depend. A node outside `allowed` is left out, and its
    inputs are not searched.
    """
    found: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node in allowed and node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return [node for node in group if node in found]


def _take_fills_out(groups: list[list[fx.Node]]) -> dict[fx.Node, int]:
    """If several kernels share a scatter, keep the scatter only in the last of these kernels, which adds to the memory.

    Return each such scatter with the number of the first of these kernels. That kernel fills the memory and keeps its
    other work.
    """
    sharing: dict[fx.Node, list[int]] = {}
    for number, group in enumerate(groups):
        for node in group:
            if _operator(node) in SCATTERS:
                sharing.setdefault(node, []).append(number)
    fills = {node: numbers[0] for node, numbers in sharing.items() if len(numbers) > 1}
    for node in fills:
        for number in sharing[node][:-1]:
            groups[number] = _without_what_leads_to(node, groups[number])
    return fills


def _without_what_leads_to(end: fx.Node, group: list[fx.Node]) -> list[fx.Node]:
    """The group without `end`, without the nodes that depend on `end`, and without nodes that only these nodes need."""
    members, after = set(group), {end}
    for node in end.graph.nodes:
        if node in members and not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    others = [node for node in group if node not in after and members.isdisjoint(node.users)]
    return _leading_to(others, group, members)


def _drop_what_is_read(generated: Sequence[bool], groups: list[list[fx.Node]]) -> None:
    """Remove from each group the values that an earlier kernel has written, because the group's kernel reads these
    values from memory.

    Inductor lists such a value for both kernels if it decided late that one kernel writes the value and the other reads
    it (the input of a pooling). The first kernel whose group has a value, but no user of the value, is the kernel that
    writes it. For a reduction in two stages, inductor may list all nodes for both kernels; the second one writes the
    results.
    """
    begun: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for number, group in enumerate(groups):
        if not generated[number]:
            continue
        groups[number] = group = [node for node in group if node not in written]
        members = set(group)
        first_stage = {node for node in group if _is_reduction(node) and node not in begun}
        begun |= first_stage
        if any(first_stage.intersection(later) for later in groups[number + 1 :]):
            continue
        ends = [node for node in group if members.isdisjoint(node.users)]
        written.update(source for source in map(_source, ends) if not _is_reduction(source))


@dataclass
class _Kernel:
    """One kernel of a graph, for which `work` computes the cost."""

    number: int
    group: list[fx.Node]
    kernels_of: dict[fx.Node, list[int]]
    begun: set[fx.Node]  # reductions whose first stage an earlier kernel has run
    fills: Mapping[fx.Node, int]  # scatter -> number of the kernel that fills the memory to which the scatter adds
    # source -> what the kernel reads of it: the tensors that it reads whole, and the bytes that it reads of others
    reads: dict[fx.Node, list[Tensor | int]] = field(default_factory=dict)

    def stored(self) -> list[fx.Node]:
        """The graph nodes whose values the kernel writes to memory."""
        return [node for node in self.group if not _is_view(node) and self._is_stored(node)]

    def work(self, name: str) -> KernelWork:
        members = set(self.group)
        stored = self.stored()
        flops, uncovered = FREE, []
        needed = self._needed(stored, members)
        demand = self._demand(needed, stored)
        for node in needed:
            cost = _cost(node)
            if cost is None:
                uncovered.append(str(node.target))
                continue
            share = demand.get(node, 1.0)
            flops = flops + Cost(flops={precision: int(share * count) for precision, count in cost.flops.items()})
            self._note_reads(node, cost, members, share)
            if node.op == "placeholder":  # an input of the graph, copied into the layout that a library needs
                self.reads.setdefault(node, []).extend(_values(node))
        read = sum(self._read_bytes(source, parts) for source, parts in self.reads.items())
        filled = [node for node, number in self.fills.items() if number == self.number]
        written = [tensor for node in (*stored, *filled) for tensor in self._stored_tensors(node)]
        known = bool(stored or filled) and not uncovered
        values = [*(value for source in self.reads for value in _values(source)), *written]
        return KernelWork(
            name=name,
            cost=Cost(read, distinct_bytes(written) - self._untouched_bytes(stored), flops.flops) if known else None,
            uncovered=tuple(dict.fromkeys(uncovered)),
            shapes=tuple(tuple(v.shape) for source in self.reads for v in _values(source)[:1]),
            dtype=dtype_name(leading_of(values)),
            scope=_shared_scope(self.group),
            title=next((title for node in self.group if (title := _title(node))), "") if "triton_" not in name else "",
        )

    def _untouched_bytes(self, stored: Iterable[fx.Node]) -> int:
        """Bytes that scatters leave unchanged in memory that another kernel has filled."""
        untouched = 0
        for node in stored:
            if node in self.fills:
                (target,) = _values(node)
                sources = [t.numel() for n in node.all_input_nodes if n is not node.args[0] for t in _values(n)]
                untouched += max(0, target.numel() - max(sources, default=0)) * target.element_size()
        return untouched

    def _is_stored(self, node: fx.Node) -> bool:
        """Whether the value of a graph node is used outside the kernel, and no earlier kernel can have written it."""
        if node.target in _MUTATIONS:
            return True
        first, *later = self.kernels_of[node]
        if first != self.number and not (node in self.begun and self.kernels_of[node][-1] == self.number):
            return False
        # these are the partial results for the reduction's second stage
        if later and first == self.number and _is_reduction(node):
            return True
        return node in self.fills or any(self._uses_from_memory(user, node) for user in node.users)

    def _uses_from_memory(self, user: fx.Node, node: fx.Node) -> bool:
        if user.op == "output":
            return True
        kernels = self.kernels_of.get(user, [])
        if _is_view(user):
            return any(self._uses_from_memory(later, node) for later in user.users)
        return any(number not in self.kernels_of[node] for number in kernels) or not kernels

    def _stored_tensors(self, node: fx.Node) -> list[Tensor]:
        """The tensors that the kernel writes for a node: of an operator with several results, only the results that
        other kernels or the graph's output use; of a value that is read only in parts, only these parts.
        """
        picked = [user for user in node.users if _is_getitem(user)]
        if isinstance(node.meta.get("val"), Tensor) or not picked:
            views = [user for user in node.users if self._uses_from_memory(user, node)]
            if views and all(_is_view(view) for view in views):
                parts = [tensor for view in views for tensor in _values(view)]
                return parts if distinct_bytes(parts) < distinct_bytes(_values(node)) else _values(node)
            return _values(node)
        return [v for user in picked if any(self._uses_from_memory(u, node) for u in user.users) for v in _values(user)]

    def _needed(self, stored: Iterable[fx.Node], members: set[fx.Node]) -> list[fx.Node]:
        """The nodes that this kernel really computes: the stored nodes, and the nodes of the group on which they
        depend. Views, and reductions that an earlier kernel began, are left out; so is what only these reductions
        need."""
        needed: dict[fx.Node, None] = {}
        waiting = list(stored)
        while waiting:
            node = waiting.pop()
            if node in needed or node not in members or node in self.begun:
                continue
            if not _is_view(node):
                needed[node] = None
            waiting.extend(node.all_input_nodes)
        return list(needed)

    def _demand(self, needed: Sequence[fx.Node], stored: Sequence[fx.Node]) -> dict[fx.Node, float]:
        """For each needed node, the share (0 to 1) of its elements on which the stored values depend. Before a slice or
        a gather, the kernel computes only these elements."""
        position = {node: number for number, node in enumerate(self.group[0].graph.nodes)} if self.group else {}
        elements: dict[fx.Node, float] = {}
        for node in stored:
            elements[node] = sum(distinct_elements(tensor) for tensor in self._stored_tensors(node))
        for node in sorted(needed, key=position.__getitem__, reverse=True):
            size = sum(tensor.numel() for tensor in _values(node)) or 1
            asked = min(1.0, elements.get(node, size) / size)
            for value in node.all_input_nodes:
                whole = sum(tensor.numel() for tensor in _values(value))
                picks = _is_gather(node) and value is node.args[0]
                share = asked * size if picks or whole <= size else whole
                source = _source(value)
                elements[source] = max(elements.get(source, 0.0), min(share, whole))
        sizes = {node: sum(tensor.numel() for tensor in _values(node)) for node in needed}
        return {node: min(1.0, elements.get(node, size) / size) if size else 1.0 for node, size in sizes.items()}

    def _note_reads(self, node: fx.Node, cost: Cost, members: set[fx.Node], share: float) -> None:
        size = sum(tensor.numel() for tensor in _values(node))
        for value in node.all_input_nodes:
            source = _source(value)
            if source in members and source not in self.begun:
                continue
            if node.target in _MUTATIONS and value is node.args[0]:
                continue
            for tensor in _values(value):
                whole = tensor_bytes(tensor)
                # `least` is what the operator reads of this input, for the share `share` of the result that is used. Of
                # a gather's table and of an input larger than the result, the cost formula tells. Of any other input,
                # the operator reads one element per element of the result.
                if _is_gather(node) and value is node.args[0]:
                    others = (t for v in node.all_input_nodes if v is not value for t in _values(v))
                    least = int(share * (cost.read_bytes - distinct_bytes(others)))
                elif tensor.numel() > size:
                    least = cost.read_bytes
                else:
                    least = int(share * size) * tensor.element_size()
                self.reads.setdefault(source, []).append(tensor if least >= whole else least)

    def _read_bytes(self, source: fx.Node, parts: list[Tensor | int]) -> int:
        limit = sum(tensor_bytes(tensor) for tensor in _values(source))
        counted = sum(part for part in parts if isinstance(part, int))
        counted += distinct_bytes([part for part in parts if isinstance(part, Tensor)])
        return min(counted, limit) if limit else counted


def _cost(node: fx.Node) -> Cost | None:
    if node.op == "call_function" and isinstance(node.meta.get("val"), (int, float)):
        return FREE  # arithmetic on sizes
    if not isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return FREE if node.op != "call_function" or _is_getitem(node) else None
    try:
        call = _call_of(node)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            later = later_cost(node.target, call.args, call.out)
            return later() if later is not None else None
        formula = formula_for(node.target)
        return None if formula is None else formula(call)
    except Exception as error:  # listed as uncovered
        pass_on(error)
        return None


def _title(node: fx.Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload) or "convolution" not in node.target._schema.name:
        return ""
    return title_of(_call_of(node))


def _call_of(node: fx.Node) -> Call:
    """The call of an operator that a graph node stands for, with the fake tensors of the node's inputs as arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return Call(node.target, tuple(args), kwargs, node.meta.get("val"))  # type: ignore[arg-type]


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


_MUTATIONS = {torch.ops.aten.copy_.default}
_ALLOCATIONS = ("empty", "full", "arange", "iota", "zeros", "ones", "scalar_tensor")


def _is_view(node: fx.Node) -> bool:
    """Whether the value of a graph node is a view of the memory of the node's first argument."""
    if node.op != "call_function" or not node.args:
        return False
    if _is_getitem(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = _operator(node)
    # a view costs nothing; so does any operator on 0 elements, which this does not make a view
    free = _cost(node) == FREE and any(value.numel() for value in _values(node))
    return not name.startswith(_ALLOCATIONS) and (free or name in ("reshape", "contiguous"))


def _operator(node: fx.Node) -> str:
    """ "mm" for a node that calls aten::mm; "" for a node that does not call an operator."""
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_gather(node: fx.Node) -> bool:
    return _operator(node) in GATHERS


GATHERS = {"gather", "index", "index_select", "embedding", "_unsafe_index"}


def _is_reduction(node: fx.Node) -> bool:
    return _operator(node) in REDUCTIONS


def _source(node: fx.Node) -> fx.Node:
    while _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _values(node: fx.Node) -> list[Tensor]:
    return list(tensors_in(node.meta.get("val")))


def _shared_scope(nodes: Sequence[fx.Node]) -> str:
    """The path of the innermost module that contains all nodes ("layer1.0"); "" if no module does."""
    paths = [path for node in nodes if not _is_view(node) and (path := _path(node)) is not None]
    if not paths:
        return ""
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _path(node: fx.Node) -> str | None:
    """The path of the module that ran the node; "" for the outermost module, which dynamo does not name; None for nodes
    without source code: constants, sums of gradients, and the copies at the end of a graph."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        return module_path(str(list(stack.values())[-1][0]))
    written = node.op == "call_function" and node.meta.get("seq_nr") is not None and "is_gradient_acc" not in node.meta
    return "" if written and node.target not in _MUTATIONS and node.all_input_nodes else None


def module_path(source: str) -> str:
    """ "layer1.0.conv1" from dynamo's "L['self'].layer1.0.conv1" or "L['self']._modules['layer1']..."."""
    path = source.partition("].")[2] if source.startswith("L[") else source
    path = path.replace("_modules['", "").replace("']", "").replace("_orig_mod.", "").removesuffix("_orig_mod")
    return path.replace("getattr_", "").strip(".")

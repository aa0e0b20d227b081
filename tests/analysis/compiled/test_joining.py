"""Kernels of a profile are matched with nodes of compiled graphs, and those without a match are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from rooftop.analysis.attribution import LOSS, OPTIMIZER
from rooftop.analysis.compiled.dynamic_sizes import size_sources
from rooftop.analysis.compiled.graphs import GRAPH_KEY, SIZES_UNKNOWN, CompiledGraph, DynamicGraph
from rooftop.analysis.compiled.joining import JoinedOperator, aligned, join_compiled
from rooftop.analysis.compiled.kernel_work import KernelWork, kernel_works
from rooftop.analysis.compiled.reconstruction import RecordedTensor
from rooftop.analysis.kernel_join import Kernel
from rooftop.cost import Cost

KEY = f"{GRAPH_KEY}900001"
RUN = f"## Call CompiledFxGraph {KEY} ##"


@dataclass
class Event:
    """One event with the interface of the profiler's; times in ns."""

    label: str
    start: int
    duration: int
    correlation: int = 0
    linked: int = 0
    device: str = "CPU"
    thread: int = 1
    kinds: Sequence[str] = ()
    sizes: Sequence[Any] = ()
    values: Sequence[Any] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.device)

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked

    def start_thread_id(self) -> int:
        return self.thread

    def is_user_annotation(self) -> bool:
        return False

    def dtypes(self) -> list[str]:
        return list(self.kinds)

    def structured_input_shapes(self) -> list[Any]:
        return list(self.sizes)

    def structured_input_strides(self) -> list[Any]:
        return [[] for _ in self.sizes]

    def concrete_inputs(self) -> list[Any]:
        return list(self.values)

    def kwinputs(self) -> dict[str, Any]:
        return self.keywords


def mm(start: int, duration: int, correlation: int = 0) -> Event:
    return Event("aten::mm", start, duration, correlation, kinds=["float", "float"], sizes=[[2, 3], [3, 4]])


def ran(name: str, start: int, **ids: int) -> Event:
    """A kernel on the device, 100 ns long."""
    return Event(name, start, 100, device="CUDA", **ids)


def work(name: str, bytes: int = 8, scope: str = "", uncovered: tuple[str, ...] = (), **changes: Any) -> KernelWork:
    cost = None if uncovered else Cost(bytes, bytes)
    return KernelWork(name, cost, uncovered, ((2, 3),), "float32", scope, **changes)


def joined(events: Sequence[Event], *works: KernelWork, backward: bool = False, problem: str = "") -> Any:
    return join_compiled(events, {KEY: CompiledGraph(list(works), backward, problem)}, "cuda:0")


def summary(operators: Sequence[JoinedOperator]) -> list[tuple[str, str, list[str]]]:
    return [(op.record.name, op.record.scope, [kernel.name for kernel in op.kernels]) for op in operators]


def test_kernels_of_a_graph_get_the_work_of_its_nodes_and_their_kernels() -> None:
    events = [
        Event(RUN, 0, 1000, 1),
        Event("triton_poi_fused_relu_0", 10, 50, 2),
        Event("aten::mm", 100, 50, 3),
        Event("aten::copy_", 110, 10, 4),  # inside the library's call, so it is a part of the call
        ran("triton_poi_fused_relu_0", 5000, linked=2),
        ran("gemm", 5100, linked=3),
        ran("splitk", 5200, linked=4),
    ]
    operators, orphans = joined(
        events, work("triton_poi_fused_relu_0", 24, scope="act"), work("extern_kernels.mm", 96, scope="fc")
    )
    assert summary(operators) == [
        ("inductor::fused_relu", "act", ["triton_poi_fused_relu_0"]),
        ("aten::mm", "fc", ["gemm", "splitk"]),
    ]
    assert [op.record.cost for op in operators] == [Cost(24, 24), Cost(96, 96)]
    assert [op.host_ms for op in operators] == [5e-5, 5e-5]
    assert orphans == []


def test_the_same_library_call_twice_is_taken_in_order() -> None:
    events = [Event(RUN, 0, 1000, 1), mm(10, 10, 2), mm(30, 10, 3), mm(50, 10, 4)]
    operators, _ = joined(events, *(work("extern_kernels.mm", size, scope=str(size)) for size in (1, 2, 3)))
    assert [op.record.scope for op in operators] == ["1", "2", "3"]


def test_a_library_call_that_the_graph_does_not_know_takes_nobody_elses_work() -> None:
    """An input is copied before the first kernel, but the graph has a copy only after the second kernel."""
    events = [
        Event(RUN, 0, 1000, 1),
        Event("aten::copy_", 5, 5, 2, kinds=["float", "float", "Scalar"], sizes=[[4], [4], []], values=["", "", False]),
        Event("triton_poi_fused_0", 20, 5, 3),
        Event("aten::copy_", 40, 5, 4),
    ]
    operators, _ = joined(events, work("triton_poi_fused_0"), work("extern_kernels.copy_", 999, scope="cache"))
    assert [(op.record.name, op.record.scope) for op in operators] == [
        ("aten::copy_", ""),
        ("inductor::fused", ""),
        ("aten::copy_", "cache"),
    ]
    assert [op.record.cost.bytes for op in operators if op.record.cost] == [32, 16, 2 * 999]


def test_the_phase_of_a_graphs_kernels_is_that_of_the_graph() -> None:
    events = [Event(RUN, 0, 100, 1), Event("triton_poi_fused_0", 10, 5, 2)]
    for backward in (False, True):
        (operator,), _ = joined(events, work("triton_poi_fused_0"), backward=backward)
        assert operator.record.phase == ("backward" if backward else "forward")


def test_work_without_formula_is_uncovered_and_says_of_what() -> None:
    events = [Event(RUN, 0, 100, 1), Event("triton_poi_fused_0", 10, 5, 2)]
    (operator,), _ = joined(events, work("triton_poi_fused_0", uncovered=("my.op.default",)))
    assert operator.record.cost is None
    assert operator.record.uncovered == "no formula for my.op.default"


def test_a_graph_that_could_not_be_read_says_so_at_each_of_its_kernels() -> None:
    events = [Event(RUN, 0, 100, 1), Event("triton_poi_fused_0", 10, 5, 2), mm(30, 5, 3)]
    (generated, library), _ = joined(events, problem="its sizes depend on data")
    assert generated.record.uncovered == "its sizes depend on data"
    assert library.record.cost is not None  # from the profiler's records


def test_code_compiled_before_it_was_analyzed_is_uncovered_not_dropped() -> None:
    events = [
        Event("## Call CompiledFxGraph fabc123 ##", 0, 100, 1),
        Event("triton_poi_fused_add_0", 10, 5, 2),
        ran("triton_poi_fused_add_0", 500, linked=2),
    ]
    (operator,), orphans = joined(events)
    assert operator.record.cost is None
    assert "compiled before the analysis: the operators" in operator.record.uncovered
    assert [kernel.name for kernel in operator.kernels] == ["triton_poi_fused_add_0"]
    assert orphans == []


def test_time_in_an_unknown_graph_whose_kernels_do_not_show_is_uncovered_not_dropped() -> None:
    events = [Event("## Call CompiledFxGraph fabc123 ##", 0, 1000, 1), mm(100, 400, 2)]
    operators, _ = join_compiled(events, {}, "cpu")
    assert sorted((op.record.name, op.host_ms) for op in operators) == [
        ("aten::mm", pytest.approx(4e-4)),
        ("inductor::graph", pytest.approx(6e-4)),
    ]
    assert [op.record.cost is None for op in operators] == [True, False]


def test_operators_beside_graphs_are_made_again_from_the_profile() -> None:
    events = [
        mm(0, 10, 1),
        Event("autograd::engine::evaluate_function: MmBackward0", 20, 50, 2, thread=2),
        Event("aten::mm", 30, 10, 3, thread=2, kinds=["float", "float"], sizes=[[2, 4], [4, 3]]),
        Event("Optimizer.step#SGD.step", 100, 50, 4),
        Event("aten::mul", 110, 10, 5, kinds=["float", "float"], sizes=[[4], [4]]),
        Event("aten::item", 200, 10, 6, kinds=["float"], sizes=[[]]),
    ]
    operators, _ = joined(events)
    assert [(op.record.name, op.record.phase) for op in operators] == [
        ("aten::mm", "forward"),
        ("aten::mm", "backward"),
        ("aten::mul", "optimizer"),
        ("aten::item", "forward"),
    ]
    assert [op.record.scope for op in operators[::2]] == [LOSS, OPTIMIZER]
    assert operators[0].record.cost == Cost((6 + 12) * 4, 8 * 4, {"fp32": 48})
    assert operators[0].record.shapes == ((2, 3), (3, 4))


def test_an_operator_without_formula_gives_way_to_those_inside_it() -> None:
    events = [Event("mine::block", 0, 100, 1), mm(10, 5, 2), mm(30, 5, 3), Event("mine::leaf", 200, 5, 4)]
    operators, _ = joined(events)
    assert [op.record.name for op in operators] == ["aten::mm", "aten::mm", "mine::leaf"]
    assert operators[2].record.cost is None
    assert operators[2].record.uncovered.startswith("not reconstructed")


def test_a_kernel_that_belongs_to_no_operator_is_an_orphan() -> None:
    events = [
        Event(RUN, 0, 100, 1),
        Event("triton_poi_fused_0", 10, 5, 2),
        ran("triton_poi_fused_0", 500, linked=2),
        Event("cudaMemcpyAsync", 300, 5, 77),
        ran("Memcpy HtoD", 700, correlation=77),
    ]
    operators, orphans = joined(events, work("triton_poi_fused_0"))
    assert len(operators) == 1
    assert [kernel.name for kernel in orphans] == ["Memcpy HtoD"]


def test_a_kernel_without_link_goes_to_the_operator_that_was_running_when_it_was_launched() -> None:
    events = [mm(0, 100, 1), Event("cudaLaunchKernel", 50, 5, 77), ran("gemm", 700, correlation=77)]
    (operator,), orphans = joined(events)
    assert [kernel.name for kernel in operator.kernels] == ["gemm"]
    assert orphans == []


def test_operators_that_take_lists_cost_the_types_of_these() -> None:
    lists, sizes = ["TensorList", "Scalar"], [[[4, 3], [7]], []]
    events = [
        Event("Optimizer.step#AdamW.step", 0, 50, 1),
        Event("aten::_foreach_add_", 10, 5, 2, kinds=lists, sizes=sizes, values=["", 1]),
        Event("aten::cat", 100, 5, 3, kinds=lists, sizes=[[[4, 3], [2, 3]], []], values=["", 0]),
        Event("aten::cat", 200, 5, 4, kinds=lists, sizes=[[[4, 3], [2, 3]], []], values=["", 0]),
    ]
    bf16, fp64 = torch.bfloat16, torch.float64
    added_tensors = RecordedTensor(bf16, 10, (4, 3), (3, 1)), RecordedTensor(bf16, 11, (7,), (1,))
    joined_tensors = RecordedTensor(fp64, 12, (4, 3), (3, 1)), RecordedTensor(fp64, 13, (2, 3), (3, 1))
    known = {2: [added_tensors, None], 3: [joined_tensors, None]}
    (added, joined_up, unknown), _ = join_compiled(events, {}, "cuda:0", known)
    assert [op.record.dtype for op in (added, joined_up)] == ["bfloat16", "float64"]
    assert added.record.cost is not None
    assert (added.record.cost.read_bytes, added.record.cost.write_bytes) == (19 * 2, 19 * 2)
    assert joined_up.record.cost == Cost(18 * 8, 18 * 8)
    assert unknown.record.cost is None
    assert "the tensors in a list were not recorded" in unknown.record.uncovered


# Sizes that may change.


def dynamic_graph(known: bool = True) -> CompiledGraph:
    """A fused chain over x of shape (s, 3), compiled for 5 rows."""
    x = torch.zeros(5, 3)
    graph = make_fx(lambda x: x.exp() * 2, tracing_mode="symbolic")(x).graph
    kernels = [("triton_poi_fused_0", [node.name for node in graph.nodes if node.op == "call_function"])]
    sources = size_sources(graph) if known else None
    return CompiledGraph(kernel_works(graph, kernels), False, dynamic=DynamicGraph(graph, kernels, sources))


def run_with(at: int, rows: int | None) -> list[Event]:
    named = [Event(f"## rooftop sizes {rows},3 ##", at + 1, 98, at + 1)] if rows is not None else []
    kernel = Event("triton_poi_fused_0", at + 10, 5, at + 2)
    return [Event(RUN, at, 100, at), *named, kernel, ran("triton_poi_fused_0", 5000 + at, linked=at + 2)]


def test_each_run_of_a_graph_has_the_work_of_its_sizes() -> None:
    events = [*run_with(0, 4), *run_with(1000, 5), *run_with(2000, 6), *run_with(3000, 4)]
    operators, orphans = join_compiled(events, {KEY: dynamic_graph()}, "cuda:0")
    assert [op.record.cost for op in operators] == [Cost(12 * n, 12 * n, {"fp32": 2 * 3 * n}) for n in (4, 5, 6, 4)]
    assert [op.record.shapes for op in operators] == [((n, 3),) for n in (4, 5, 6, 4)]
    assert orphans == []


def test_the_works_of_sizes_are_made_once() -> None:
    graph = dynamic_graph()
    assert graph.at((4, 3)) is graph.at((4, 3))
    assert graph.at((5, 3)).works == graph.works


@pytest.mark.parametrize(("known", "rows"), [(True, None), (False, 4), (False, None)])
def test_a_run_whose_sizes_are_not_known_is_uncovered_not_guessed(known: bool, rows: int | None) -> None:
    (operator,), orphans = join_compiled(run_with(0, rows), {KEY: dynamic_graph(known)}, "cuda:0")
    assert (operator.record.cost, operator.record.uncovered) == (None, SIZES_UNKNOWN)
    assert [kernel.name for kernel in operator.kernels] == ["triton_poi_fused_0"]
    assert orphans == []


# CUDA graphs: one call of the host launches all kernels.


def replay(*names: str) -> list[Event]:
    kernels = [ran(name, 1000 + 100 * number, correlation=50) for number, name in enumerate(names)]
    return [Event(RUN, 0, 500, 1), Event("cudaGraphLaunch", 100, 20, 50), *kernels]


def test_a_replayed_graph_finds_its_works_by_the_names_of_its_kernels() -> None:
    works = [
        work("triton_a_0", 1, scope="a"),
        work("extern_kernels.mm", 2, scope="fc"),
        work("triton_b_1", 3, scope="b"),
    ]
    operators, orphans = joined(replay("triton_a_0", "gemm", "triton_b_1"), *works)
    assert [(scope, kernels) for _, scope, kernels in summary(operators)] == [
        ("a", ["triton_a_0"]),
        ("fc", ["gemm"]),
        ("b", ["triton_b_1"]),
    ]
    assert [op.record.cost for op in operators] == [Cost(1, 1), Cost(2, 2), Cost(3, 3)]
    assert orphans == []


def test_library_calls_of_a_replay_with_more_kernels_than_calls_are_taken_together() -> None:
    works = [work("triton_a_0"), work("extern_kernels.mm", 2), work("torch.ops.aten.convolution.default", 5)]
    operators, orphans = joined(replay("triton_a_0", "gemm", "splitk", "conv"), *works)
    assert summary(operators)[1] == ("aten::mm + aten::convolution", "", ["gemm", "splitk", "conv"])
    assert operators[1].record.cost == Cost(7, 7)
    assert orphans == []


def test_together_with_a_call_without_formula_nothing_is_known() -> None:
    works = [work("extern_kernels.mm", 2), work("extern_kernels.mine", uncovered=("mine",))]
    (operator,), _ = joined(replay("gemm", "splitk", "other"), *works)
    assert operator.record.cost is None
    assert operator.record.uncovered


def test_a_replayed_kernel_beyond_the_works_is_an_orphan() -> None:
    operators, orphans = joined(replay("triton_a_0", "memset"), work("triton_a_0"))
    assert [kernel.name for kernel in orphans] == ["memset"]
    assert len(operators) == 1


def test_kernels_of_a_replay_outside_any_known_graph_are_orphans() -> None:
    events = [Event("cudaGraphLaunch", 100, 20, 50), ran("k", 1000, correlation=50)]
    operators, orphans = joined(events, work("triton_a_0"))
    assert operators == []
    assert [kernel.name for kernel in orphans] == ["k"]


def test_a_replay_of_a_graph_that_is_not_known_is_uncovered_not_dropped() -> None:
    (operator,), orphans = joined(replay("triton_a_0", "gemm"), problem="its sizes depend on data")
    assert (operator.record.cost, operator.record.uncovered) == (None, "its sizes depend on data")
    assert [kernel.name for kernel in operator.kernels] == ["triton_a_0", "gemm"]
    assert orphans == []


def test_a_replay_has_the_work_of_the_sizes_that_it_was_called_with() -> None:
    events = replay("triton_poi_fused_0")
    events.insert(1, Event("## rooftop sizes 6,3 ##", 50, 400, 2))
    (operator,), _ = join_compiled(events, {KEY: dynamic_graph()}, "cuda:0")
    assert operator.record.cost == Cost(12 * 6, 12 * 6, {"fp32": 2 * 3 * 6})


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2]], ids=["between", "before"])
def test_a_graph_replayed_in_parts_does_its_work_once(order: list[int]) -> None:
    """Inductor splits a graph at an operator that cannot be captured. The operator that cannot be captured runs between
    two replays."""
    events = [
        Event(RUN, 0, 500, 1),
        Event("cudaGraphLaunch", 100, 20, 50),
        Event("aten::mm", 200, 20, 2, kinds=["float", "float"], sizes=[[1, 1], [1, 1]]),
        Event("cudaGraphLaunch", 300, 20, 51),
        ran("triton_a_0", 1000, correlation=50),
        ran("gemm", 1100, linked=2),
        ran("triton_b_1", 1200, correlation=51),
    ]
    works = [work("triton_a_0", 1), work("extern_kernels.mm", 6), work("triton_b_1", 3)]
    operators, orphans = joined(events, *(works[number] for number in order))
    names = ("aten::mm", ["gemm"]), ("inductor::a", ["triton_a_0"]), ("inductor::b", ["triton_b_1"])
    assert sorted((name, kernels) for name, _, kernels in summary(operators)) == sorted(names)
    assert sum(op.record.cost.bytes for op in operators if op.record.cost) == 12 + 2 * (1 + 3)
    assert orphans == []


names = st.lists(st.sampled_from(["triton_a_0", "triton_b_1", "extern_kernels.mm", "gemm", "memset"]), max_size=8)


@given(names, names)
def test_alignment_loses_and_invents_nothing(works: list[str], kernels: list[str]) -> None:
    ordered = [Kernel(name, 10 * at, 10 * at + 5, 0, 0) for at, name in enumerate(kernels)]
    given_works = [work(name) for name in works]
    pairs = list(aligned(given_works, list(reversed(ordered))))
    assert [w for some, _ in pairs for w in some] == given_works
    assert [k for _, some in pairs for k in some] == ordered


@given(st.lists(st.sampled_from(["triton_a_0", "triton_b_1", "extern_kernels.mm"]), max_size=8))
def test_as_many_kernels_as_works_are_joined_one_by_one(works: list[str]) -> None:
    kernels = [Kernel(name.replace("extern_kernels.", "cublas_"), at, at + 1, 0, 0) for at, name in enumerate(works)]
    pairs = list(aligned([work(name) for name in works], kernels))
    assert [(len(some), [k.start_ns for k in found]) for some, found in pairs] == [
        (1, [at]) for at in range(len(works))
    ]


# A launch moves at most the memory behind its pointers.


CODE = """import triton
def triton_poi_fused_0(in_ptr0, {result}, xnumel, XBLOCK : tl.constexpr):
    pass
"""


@pytest.fixture
def kernel_file(tmp_path: Path) -> str:
    file = tmp_path / "kernel.py"
    file.write_text(CODE.format(result="out_ptr0"))
    return str(file)


def launch(file: str, *sizes: list[int]) -> list[Event]:
    pointers = ["c10::BFloat16"] * len(sizes)
    return [
        Event(RUN, 0, 100, 1),
        Event(
            "triton_poi_fused_0",
            10,
            5,
            2,
            kinds=[*pointers, "Scalar"],
            sizes=[*sizes, []],
            keywords={"kernel_file": file},
        ),
    ]


def test_a_kernel_moves_no_more_than_its_pointers_hold(kernel_file: str) -> None:
    (operator,), _ = joined(launch(kernel_file, [100], [10]), work("triton_poi_fused_0", 10_000))
    assert operator.record.cost == Cost(200, 20)
    (operator,), _ = joined(launch(kernel_file, [100], [10]), work("triton_poi_fused_0", 50))
    assert operator.record.cost == Cost(50, 50)


def test_what_a_kernel_changes_in_place_is_read_and_written(tmp_path: Path) -> None:
    file = tmp_path / "in_place.py"
    file.write_text(CODE.format(result="in_out_ptr0"))
    (operator,), _ = joined(launch(str(file), [100], [10]), work("triton_poi_fused_0", 10_000))
    assert operator.record.cost == Cost(220, 20)


def test_a_kernel_that_lays_out_an_operand_moves_what_its_pointers_hold(kernel_file: str) -> None:
    (operator,), _ = joined(launch(kernel_file, [100], [100]), work("triton_poi_fused_0", 8, lays_out=True))
    assert operator.record.cost == Cost(200, 200)


@pytest.mark.parametrize("sizes", [[[100]], [[100], [10], [5]]])
def test_pointers_that_do_not_fit_the_kernels_code_are_not_used(kernel_file: str, sizes: list[list[int]]) -> None:
    (operator,), _ = joined(launch(kernel_file, *sizes), work("triton_poi_fused_0", 10_000))
    assert operator.record.cost == Cost(10_000, 10_000)
    (operator,), _ = joined(launch("/nowhere/kernel.py", *sizes), work("triton_poi_fused_0", 10_000))
    assert operator.record.cost == Cost(10_000, 10_000)

"""Each call of code compiled for dynamic sizes has the cost of that call's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import rooftop
from rooftop.analysis.compiled.dynamic_sizes import (
    is_dynamic,
    kept,
    named_sizes,
    naming_its_sizes,
    size_sources,
    with_known_sizes,
)
from rooftop.analysis.compiled.graphs import SIZES_UNKNOWN, CompiledGraphs
from rooftop.analysis.compiled.kernel_work import kernel_works
from rooftop.analysis.instruments import CompiledInstrument
from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import OperatorRow
from rooftop.cost import Cost, Record
from rooftop.hardware.ceilings import Ceilings

FLOAT = 4
CPU = torch.device("cpu")

# Warnings of torch about what it compiles; none concerns the analyzed program.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def traced(function: Callable[..., Any], *inputs: Tensor, mode: str = "symbolic") -> fx.Graph:
    graph: fx.Graph = make_fx(function, tracing_mode=mode)(*inputs).graph
    return graph


def tensor_nodes(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]


def function(x: Tensor, w: Tensor) -> Tensor:
    return (x.t().exp()[1:] @ w).softmax(-1).reshape(-1)


# Graphs of symbols.


@settings(deadline=None, max_examples=4)
@given(st.integers(2, 9), st.integers(3, 9), st.integers(2, 9))
def test_a_graph_with_other_sizes_is_the_graph_traced_with_these(rows: int, columns: int, width: int) -> None:
    inputs = torch.zeros(rows, columns), torch.zeros(rows, width)
    fixed, dynamic = traced(function, *inputs, mode="fake"), traced(function, torch.zeros(5, 7), torch.zeros(5, 11))
    assert [is_dynamic(graph) for graph in (fixed, dynamic)] == [False, True]
    sources = size_sources(dynamic)
    assert sources
    sizes = {source.symbol: source.read(inputs) for source in sources}
    expected = kernel_works(fixed, [("triton_0", tensor_nodes(fixed))])
    assert kernel_works(dynamic, [("triton_0", tensor_nodes(dynamic))], sizes) == expected
    assert kernel_works(kept(dynamic), [("triton_0", tensor_nodes(dynamic))], sizes) == expected
    assert not is_dynamic(with_known_sizes(dynamic, sizes))


def test_a_graph_of_fixed_sizes_has_no_symbols() -> None:
    graph = traced(function, torch.zeros(4, 5), torch.zeros(4, 3), mode="fake")
    assert size_sources(graph) == ()
    assert with_known_sizes(graph) is graph


def test_what_is_kept_of_a_graph_does_not_hold_its_module() -> None:
    assert kept(traced(function, torch.zeros(4, 5), torch.zeros(4, 3))).owning_module is None


def test_a_symbol_of_strides_alone_is_read_from_them() -> None:
    """Rows with a stride of 7 and 5 visible elements, so no size is 7."""
    graph = traced(lambda x: x + 1, torch.zeros(4, 7)[:, :5])
    sources = size_sources(graph)
    assert sources is not None
    assert [source.read([torch.zeros(3, 11)[:, :2]]) for source in sources] == [3, 2, 11]


def test_without_an_input_that_tells_a_symbol_nothing_is_guessed() -> None:
    graph = traced(lambda x: x + 1, torch.zeros(8))
    (node, *_) = graph.nodes
    node.meta["val"] = torch.zeros(8)
    assert is_dynamic(graph)
    assert size_sources(graph) is None
    with pytest.raises(ValueError, match=r"the value of s\d+ is unknown"):
        with_known_sizes(graph, {})


# The event that names the sizes.


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1).map(tuple))
def test_sizes_are_read_back_as_they_were_named(sizes: tuple[int, ...]) -> None:
    assert named_sizes(f"## rooftop sizes {','.join(str(size) for size in sizes)} ##") == sizes


@pytest.mark.parametrize(
    "name", ["## rooftop sizes  ##", "## rooftop sizes s0,4 ##", "aten::mm", "## rooftop graph 4 ##"]
)
def test_no_other_event_names_sizes(name: str) -> None:
    assert named_sizes(name) is None


def test_calls_are_named_while_a_profiler_is_active_and_only_then() -> None:
    sources = size_sources(traced(function, torch.zeros(4, 5), torch.zeros(4, 3)))
    assert sources is not None
    reads: list[Any] = []

    class Inputs(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    running = naming_its_sizes(lambda inputs: function(*inputs.copy()), sources)
    inputs = Inputs([torch.randn(6, 7), torch.randn(6, 3)])
    plain = running(inputs)
    assert reads == []
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        assert torch.equal(running(inputs), plain)
    results: Any = profiled.profiler
    names = [event.name() for event in results.kineto_results.events()]
    assert names[0] == "## rooftop sizes 6,7,3 ##"
    assert "aten::mm" in names


# Compiled code.


class Product(nn.Module):
    """A product, and a fused kernel after it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).relu() * 3  # (N, 8) -> (N, 16)


PRODUCT, FUSED = "aten::mm", "inductor::fused_mul_relu"


def product_cost(rows: int) -> Cost:
    return Cost((rows * 8 + 8 * 16) * FLOAT, rows * 16 * FLOAT, {"fp32": 2 * rows * 8 * 16})


def fused_cost(rows: int) -> Cost:
    return Cost(rows * 16 * FLOAT, rows * 16 * FLOAT, {"fp32": 2 * rows * 16})


def forward_costs(records: list[Record], name: str) -> list[Cost | None]:
    return [record.cost for record in records if record.name == name and record.phase == "forward"]


def watched(recorded: CompiledGraphs, run: Callable[[], Any]) -> list[Record]:
    with CompiledInstrument(CPU, recorded.graphs) as instrument:
        run()
    return instrument.result.records


def test_each_call_of_a_graph_costs_its_own_sizes() -> None:
    model = Product()
    net = torch.compile(model, dynamic=True)
    inputs = [torch.randn(rows, 8) for rows in (4, 5, 6)]
    with CompiledGraphs() as recorded, torch.no_grad():
        net(inputs[1])
        records = watched(recorded, lambda: [net(x) for x in inputs])
        assert len(recorded.graphs) == 1
        assert all(torch.equal(net(x), model(x)) for x in inputs)
    assert forward_costs(records, PRODUCT) == [product_cost(rows) for rows in (4, 5, 6)]
    assert forward_costs(records, FUSED) == [fused_cost(rows) for rows in (4, 5, 6)]
    assert all(torch.equal(net(x), model(x)) for x in inputs)  # compiled code still works after the recording has ended


def test_the_backward_pass_of_each_call_costs_its_own_sizes() -> None:
    net = torch.compile(Product(), dynamic=True)
    inputs = [torch.randn(rows, 8) for rows in (4, 5, 6)]
    with CompiledGraphs() as recorded:
        net(inputs[1]).sum().backward()
        records = watched(recorded, lambda: [net(x).sum().backward() for x in inputs])
    gradients = [r.cost for r in records if r.name == PRODUCT and r.phase == "backward"]
    # The gradient of the weight: (8, N) @ (N, 16).
    assert gradients == [Cost(rows * 24 * FLOAT, 8 * 16 * FLOAT, {"fp32": 2 * rows * 8 * 16}) for rows in (4, 5, 6)]
    assert not [r.name for r in records if r.name.startswith("inductor::") and r.cost is None]


def test_code_of_an_earlier_analysis_still_names_its_sizes() -> None:
    net = torch.compile(Product(), dynamic=True)
    with CompiledGraphs(), torch.no_grad():
        net(torch.randn(5, 8))
    with CompiledGraphs() as recorded, torch.no_grad():
        records = watched(recorded, lambda: net(torch.randn(7, 8)))
        assert not recorded.graphs  # nothing was compiled
    assert forward_costs(records, FUSED) == [fused_cost(7)]


def test_a_call_whose_sizes_are_not_known_is_uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.analysis.compiled.graphs.size_sources", lambda graph: None)
    net = torch.compile(Product(), dynamic=True)
    with CompiledGraphs() as recorded, torch.no_grad():
        net(torch.randn(5, 8))
        records = watched(recorded, lambda: net(torch.randn(6, 8)))
    (fused,) = (record for record in records if record.name == FUSED)
    assert (fused.cost, fused.uncovered) == (None, SIZES_UNKNOWN)
    assert forward_costs(records, PRODUCT) == [product_cost(6)]  # from the profiler's records


def rows_of(report: Report, name: str) -> list[OperatorRow]:
    """The number of rows, from the sizes of the calls."""
    found = [row for row in report.ops if row.name == name and row.phase == "forward"]
    return sorted(found, key=lambda row: row.bytes)


def test_a_report_shows_calls_of_several_sizes(ceilings: Ceilings) -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(Product(), dynamic=True)

        def forward(self, *inputs: Tensor) -> list[Tensor]:
            return [self.inner(x) for x in inputs]

    report = rooftop.analyze(Thrice(), *(torch.randn(rows, 8) for rows in (4, 5, 6)), ceilings=ceilings)
    assert report.compilation is not None
    assert report.compilation.graphs == 1
    assert [row.bytes for row in rows_of(report, FUSED)] == [fused_cost(rows).bytes for rows in (4, 5, 6)]
    assert [row.flops for row in rows_of(report, PRODUCT)] == [product_cost(rows).total_flops for rows in (4, 5, 6)]
    assert report.coverage == pytest.approx(1)


def test_a_recorded_loop_whose_batch_size_changes_has_the_cost_of_the_step_that_it_shows(ceilings: Ceilings) -> None:
    net = torch.compile(Product(), dynamic=True)
    with torch.no_grad(), rooftop.recording(device="cpu", ceilings=ceilings) as recorded:
        for rows in range(4, 28):
            net(torch.ones(rows, 8))
            recorded.step()
    report = recorded.report
    (fused,), (product,) = rows_of(report, FUSED), rows_of(report, PRODUCT)
    rows = fused.bytes // fused_cost(1).bytes
    assert rows in range(7, 28)  # the first steps warm up and are not profiled
    assert (fused.bytes, fused.flops) == (fused_cost(rows).bytes, fused_cost(rows).total_flops)
    assert (product.bytes, product.flops) == (product_cost(rows).bytes, product_cost(rows).total_flops)
    assert any("other sizes each time" in note for note in report.notes)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["plain", "cuda-graphs"])
def test_each_call_costs_its_own_sizes_on_a_gpu(mode: str | None) -> None:
    net = torch.compile(Product().cuda(), dynamic=True, mode=mode)
    inputs = [torch.randn(rows, 8, device="cuda") for rows in (4, 5, 6)]

    def run() -> None:
        for x in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            net(x)

    with CompiledGraphs() as recorded, torch.no_grad():
        net(inputs[1])
        for _ in range(4):  # CUDA graphs are recorded at the second call of each size
            run()
        with CompiledInstrument(torch.device("cuda"), recorded.graphs) as instrument:
            run()
    costs = [replace(c, flops={}) for c in forward_costs(instrument.result.records, FUSED) if c is not None]
    assert costs == [replace(fused_cost(rows), flops={}) for rows in (4, 5, 6)]
    products = forward_costs(instrument.result.records, PRODUCT)
    assert [c.bytes for c in products if c is not None] == [product_cost(rows).bytes for rows in (4, 5, 6)]

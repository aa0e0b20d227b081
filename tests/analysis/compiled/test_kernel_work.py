"""The bytes and flops of a kernel, from the nodes fused into it, agree with counts by hand on graphs traced without
data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from rooftop.analysis.compiled.dynamic_sizes import is_dynamic
from rooftop.analysis.compiled.kernel_work import KernelWork, is_generated, kernel_works, module_path
from rooftop.analysis.compiled.kernel_work import plain_name as plain
from rooftop.cost import FREE, Cost

sizes = st.integers(0, 9)


def law(*inputs: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Property over any inputs. A trace takes a tenth of a second, so only a few inputs are tried."""
    return lambda test: settings(deadline=None, max_examples=10)(given(*inputs)(test))


FLOAT, LONG = 4, 8


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch creates the table again at each call, which takes twice as long as a trace."""
    table: dict[Any, Callable[..., Any]] = core_aten_decompositions().materialize()  # type: ignore[attr-defined]
    return table


def traced(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> fx.Graph:
    """The graph of aten operators that inductor would get, with the same decompositions."""
    graph: fx.Graph = make_fx(function, tracing_mode=mode, decomposition_table=decompositions())(*inputs).graph
    return graph


def computed(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


def fused(function: Callable[..., Any], *inputs: Tensor) -> KernelWork:
    """The work of a single kernel that computes the whole graph."""
    graph = traced(function, *inputs)
    (work,) = kernel_works(graph, [("triton_poi_fused_0", computed(graph))])
    return work


def cost(work: KernelWork) -> Cost:
    assert work.cost is not None, work.uncovered
    return work.cost


def moved(work: KernelWork) -> tuple[int, int]:
    return cost(work).read_bytes, cost(work).write_bytes


@law(sizes, sizes)
def test_a_fused_chain_reads_its_inputs_once_and_writes_its_output_once(rows: int, columns: int) -> None:
    work = fused(lambda x, y: (x * 2 + y).relu() - x, torch.zeros(rows, columns), torch.zeros(rows, columns))
    count = rows * columns
    assert moved(work) == (2 * count * FLOAT, count * FLOAT)
    assert cost(work).total_flops == 4 * count


@law(st.integers(1, 9), sizes)
def test_a_broadcast_or_expanded_input_counts_the_elements_that_it_has(rows: int, columns: int) -> None:
    row, wide = torch.zeros(columns), torch.zeros(rows, columns)
    assert moved(fused(lambda x, b: x + b, wide, row))[0] == (rows + 1) * columns * FLOAT
    expanded = fused(lambda x: x * 2, row.expand(rows, columns))
    assert moved(expanded) == (columns * FLOAT, rows * columns * FLOAT)


@law(st.integers(1, 6), st.integers(1, 6), st.integers(2, 4))
def test_a_strided_slice_reads_only_what_it_shows(rows: int, columns: int, step: int) -> None:
    x = torch.zeros(rows, columns * step)
    assert moved(fused(lambda x: x[:, ::step] + 1, x)) == (rows * columns * FLOAT, rows * columns * FLOAT)
    assert moved(fused(lambda x: x + 1, x[:, ::step])) == (rows * columns * FLOAT, rows * columns * FLOAT)


@law(st.integers(1, 6), st.integers(2, 9))
def test_a_slice_at_the_end_makes_everything_before_it_compute_no_more(rows: int, columns: int) -> None:
    work = fused(lambda x: (x * 2).exp()[:, :1] + 1, torch.zeros(rows, columns))
    assert moved(work) == (rows * FLOAT, rows * FLOAT)
    assert cost(work).total_flops == 3 * rows


def test_views_of_one_input_are_read_once() -> None:
    x = torch.zeros(6, 8)
    assert moved(fused(lambda x: x.t() + x.reshape(8, 6), x)) == (48 * FLOAT, 48 * FLOAT)
    halves = fused(lambda x: x[:, :4] * x[:, 4:], x)
    assert moved(halves) == (48 * FLOAT, 24 * FLOAT)


def test_a_view_alone_moves_nothing_and_is_no_part_of_what_is_stored() -> None:
    work = fused(lambda x: x.exp().view(3, 16).t(), torch.zeros(6, 8))
    assert moved(work) == (48 * FLOAT, 48 * FLOAT)


@law(st.integers(1, 6), st.integers(1, 9))
def test_fused_softmax_reads_once_and_writes_once(rows: int, columns: int) -> None:
    work = fused(lambda x: x.softmax(-1), torch.zeros(rows, columns))
    assert moved(work) == (rows * columns * FLOAT, rows * columns * FLOAT)
    assert cost(work).total_flops == 5 * rows * columns  # max, subtract, exp, add, divide


@law(st.integers(1, 6), st.integers(1, 9))
def test_fused_layer_norm_reads_input_weight_and_bias_and_writes_its_output(rows: int, columns: int) -> None:
    inputs = torch.zeros(rows, columns), torch.zeros(columns), torch.zeros(columns)
    work = fused(lambda x, w, b: torch.nn.functional.layer_norm(x, (columns,), w, b), *inputs)
    assert moved(work) == ((rows + 2) * columns * FLOAT, rows * columns * FLOAT)


@law(st.integers(1, 40), st.integers(1, 20), st.integers(1, 8))
def test_an_embedding_reads_the_rows_that_it_is_asked_for_and_its_indices_once(
    vocabulary: int, tokens: int, width: int
) -> None:
    table, index = torch.zeros(vocabulary, width), torch.zeros(tokens, dtype=torch.long)
    work = fused(lambda t, i: torch.nn.functional.embedding(i, t) * 2, table, index)
    assert moved(work) == (min(tokens, vocabulary) * width * FLOAT + tokens * LONG, tokens * width * FLOAT)


def test_the_loss_of_a_class_reads_one_logit_of_each_row() -> None:
    logits, target = torch.zeros(16, 100), torch.zeros(16, 1, dtype=torch.long)
    work = fused(lambda x, t: -x.gather(1, t).sum(), logits, target)
    assert moved(work) == (16 * FLOAT + 16 * LONG, FLOAT)


def test_a_gather_from_what_the_kernel_computes_itself_makes_it_compute_no_more() -> None:
    work = fused(lambda x, t: (x * 2).gather(1, t), torch.zeros(16, 100), torch.zeros(16, 1, dtype=torch.long))
    assert moved(work) == (16 * FLOAT + 16 * LONG, 16 * FLOAT)
    assert cost(work).total_flops == 16


def test_of_several_results_only_those_that_are_used_are_written() -> None:
    x = torch.zeros(6, 8)
    assert moved(fused(lambda x: x.max(1)[0], x)) == (48 * FLOAT, 6 * FLOAT)
    assert moved(fused(lambda x: x.max(1), x)) == (48 * FLOAT, 6 * (FLOAT + LONG))


def test_what_nobody_uses_is_not_counted() -> None:
    def wasteful(x: Tensor) -> Tensor:
        x.exp()
        return x + 1

    graph = traced(wasteful, torch.zeros(8))
    names = computed(graph)
    assert len(names) == 2
    (work,) = kernel_works(graph, [("triton_poi_fused_0", names)])
    assert cost(work) == Cost(8 * FLOAT, 8 * FLOAT, {"fp32": 8})


@law(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_each_cut_of_a_chain_writes_and_reads_one_more_intermediate(cuts: list[bool], dtype: torch.dtype) -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(len(cuts) + 1):
            x = x + 1
        return x

    graph = traced(chain, torch.zeros(5, 7, dtype=dtype))
    groups: list[list[str]] = [[]]
    for name, cut in zip(computed(graph), [*cuts, False], strict=True):
        groups[-1].append(name)
        if cut:
            groups.append([])
    works = kernel_works(graph, [(f"triton_poi_fused_{i}", group) for i, group in enumerate(groups)])
    total = sum((cost(work) for work in works), FREE)
    assert total.bytes == 2 * 35 * dtype.itemsize * (1 + sum(cuts))
    assert total.total_flops == 35 * (len(cuts) + 1)
    assert {work.dtype for work in works} == {str(dtype).removeprefix("torch.")}


def test_a_value_that_two_later_kernels_read_is_written_once() -> None:
    graph = traced(lambda x: ((y := x.exp()).sin(), y.cos()), torch.zeros(10))
    exp, sin, cos = computed(graph)
    works = kernel_works(graph, [("triton_a_0", [exp]), ("triton_b_1", [sin]), ("triton_c_2", [cos])])
    assert [moved(work) for work in works] == [(40, 40)] * 3


def test_what_a_later_kernel_computes_again_is_written_by_nobody() -> None:
    graph = traced(lambda x: ((y := x.exp()).sum(), y.cos()), torch.zeros(10))
    exp, total, cos = computed(graph)
    works = kernel_works(graph, [("triton_a_0", [exp, total]), ("triton_b_1", [exp, cos])])
    assert [moved(work) for work in works] == [(40, FLOAT), (40, 40)]
    assert [cost(work).total_flops for work in works] == [20, 20]


def test_a_reduction_in_two_stages_is_read_and_computed_once() -> None:
    graph = traced(lambda x: x.sum(), torch.zeros(1000))
    names = computed(graph)
    first, second = kernel_works(graph, [("triton_red_fused_sum_0", names), ("triton_per_fused_sum_1", names)])
    assert cost(first).read_bytes == 4000
    assert cost(first).total_flops == 1000
    assert cost(second) == Cost(0, FLOAT)


def test_what_follows_a_reduction_in_its_second_stage_is_counted_there() -> None:
    graph = traced(lambda x: x.sum() * 2, torch.zeros(1000))
    total, product = computed(graph)
    works = kernel_works(graph, [("triton_red_fused_sum_0", [total]), ("triton_per_fused_sum_1", [total, product])])
    assert sum(cost(work).total_flops for work in works) == 1001
    assert cost(works[1]).write_bytes >= FLOAT


def linear(x: Tensor, w: Tensor) -> Tensor:
    return (x.relu() @ w).exp()


@pytest.mark.parametrize("named_again", [False, True])
def test_what_a_kernel_writes_at_its_end_is_read_by_those_that_name_it_again(named_again: bool) -> None:
    """Inductor names the operators before a pooling as its origins, although the pooling reads their results."""
    x = torch.zeros(4, 8)
    graph = traced(lambda x: (x * 2).relu().exp(), x)
    first, last = computed(graph)[:2], computed(graph)[2:]
    works = kernel_works(
        graph, [("triton_poi_fused_0", first), ("triton_poi_fused_1", [*last, *first] if named_again else last)]
    )
    assert [moved(work) for work in works] == [(4 * 8 * FLOAT, 4 * 8 * FLOAT)] * 2
    assert [cost(work).total_flops for work in works] == [2 * 4 * 8, 4 * 8]


def test_a_scatter_of_two_kernels_fills_its_memory_and_adds_what_there_is_to_add() -> None:
    rows, columns, added = 50, 8, 3

    def gradient_of_an_embedding(gradient: Tensor, indices: Tensor) -> Tensor:
        return torch.zeros(rows, columns).index_put((indices,), gradient * 2, accumulate=True)

    graph = traced(gradient_of_an_embedding, torch.zeros(added, columns), torch.zeros(added, dtype=torch.long))
    works = kernel_works(graph, [("triton_poi_fused_0", computed(graph)), ("triton_poi_fused_1", computed(graph))])
    gradient_bytes = added * columns * FLOAT
    assert moved(works[0]) == (0, rows * columns * FLOAT)
    assert moved(works[1]) == (gradient_bytes + added * LONG, gradient_bytes)
    whole = kernel_works(graph, [("triton_poi_fused_0", computed(graph))])
    assert moved(whole[0]) == (gradient_bytes + added * LONG, rows * columns * FLOAT)


@law(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_a_library_call_does_its_own_work_and_its_neighbours_theirs(rows: int, inner: int, columns: int) -> None:
    graph = traced(linear, torch.zeros(rows, inner), torch.zeros(inner, columns))
    relu, mm, exp = computed(graph)
    works = kernel_works(graph, [("triton_a_0", [relu]), ("extern_kernels.mm", [mm]), ("triton_b_1", [mm, exp])])
    x, w, y = rows * inner * FLOAT, inner * columns * FLOAT, rows * columns * FLOAT
    assert [moved(work) for work in works] == [(x, x), (x + w, y), (y, y)]
    assert cost(works[1]).total_flops == 2 * rows * inner * columns
    assert [cost(work).total_flops for work in (works[0], works[2])] == [rows * inner, rows * columns]


def test_operands_that_a_kernel_computed_are_no_work_of_the_library_that_lists_them() -> None:
    """Inductor lists the nodes of an operand with the call too, and lists the call with the kernel that computes the
    operand."""
    graph = traced(linear, torch.zeros(4, 6), torch.zeros(6, 5))
    relu, mm, exp = computed(graph)
    listed = [("triton_a_0", [relu, mm]), ("torch.ops.aten.mm.default", [mm, relu]), ("triton_b_1", [exp])]
    apart = [("triton_a_0", [relu]), ("extern_kernels.mm", [mm]), ("triton_b_1", [exp])]
    assert [cost(w) for w in kernel_works(graph, listed)] == [cost(w) for w in kernel_works(graph, apart)]


def test_a_kernel_computes_nothing_that_waits_for_a_later_call_of_a_library() -> None:
    """One kernel may lay out the weights of several convolutions. Inductor names all sources of these convolutions as
    the kernel's origins."""
    x, first, second = torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 1, 1), torch.zeros(5, 4, 1, 1)

    def two_convolutions(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.conv2d(torch.conv2d(x, first).relu(), second)

    graph = traced(two_convolutions, x, first, second)
    layout, _, activation, _ = kernel_works(
        graph,
        [
            ("triton_poi_fused_convolution_relu_0", ["convolution", "convolution_1", "relu"]),
            ("extern_kernels.convolution", ["convolution"]),
            ("triton_poi_fused_relu_1", ["relu"]),
            ("extern_kernels.convolution", ["convolution_1"]),
        ],
    )
    assert layout.lays_out
    assert moved(layout) == (first.nbytes + second.nbytes,) * 2
    assert moved(activation) == (2 * 4 * 8 * 8 * FLOAT,) * 2


def test_a_kernel_that_lays_out_what_is_there_already_moves_the_operand_and_computes_nothing() -> None:
    graph = traced(linear, torch.zeros(4, 6), torch.zeros(6, 5))
    relu, mm, exp = computed(graph)
    works = kernel_works(
        graph,
        [
            ("triton_a_0", [relu]),
            ("triton_poi_fused_mm_1", [mm, relu]),
            ("extern_kernels.mm", [mm]),
            ("triton_b_2", [exp]),
        ],
    )
    assert [work.lays_out for work in works] == [False, True, False, False]
    assert cost(works[1]) == Cost(24 * FLOAT, 24 * FLOAT)
    assert sum(cost(w).total_flops for w in works) == 24 + 2 * 4 * 6 * 5 + 20


def test_an_input_that_is_copied_into_another_layout_is_read_and_written() -> None:
    graph = traced(lambda x, w, n: (x @ w, n.add_(1)), torch.zeros(4, 6), torch.zeros(6, 5), torch.zeros(()))
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    mm, *rest = computed(graph)
    copying, product = kernel_works(graph, [("cpp_fused_add_copy__0", [*rest, inputs[0]]), ("extern_kernels.mm", [mm])])
    assert moved(copying) == (24 * FLOAT + FLOAT, 24 * FLOAT + FLOAT)
    assert moved(product) == ((24 + 30) * FLOAT, 20 * FLOAT)


def test_writing_into_an_input_counts_as_written() -> None:
    work = fused(lambda x, y: x.copy_(y * 2), torch.zeros(8), torch.zeros(8))
    assert cost(work) == Cost(32, 32, {"fp32": 8})


@pytest.fixture(scope="module")
def unknown_operator() -> Iterator[Any]:
    library = torch.library.Library("test_kernel_work", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", torch.empty_like, "Meta")
    yield torch.ops.test_kernel_work.twice
    library._destroy()


def test_an_operator_without_formula_makes_its_kernel_uncovered(unknown_operator: Any) -> None:
    graph = traced(lambda x: unknown_operator(x) + 1, torch.zeros(8))
    (work,) = kernel_works(graph, [("triton_poi_fused_0", computed(graph))])
    assert work.cost is None
    assert work.uncovered == ("test_kernel_work.twice.default",)


def test_a_kernel_whose_nodes_are_not_in_the_graph_has_no_cost() -> None:
    graph = traced(lambda x: x + 1, torch.zeros(8))
    for nodes in ([], ["somebody"]):
        (work,) = kernel_works(graph, [("triton_poi_fused_0", nodes)])
        assert work.cost is None


@law(st.integers(2, 9), st.integers(2, 9))
def test_a_graph_of_sizes_that_may_change_counts_those_that_it_was_traced_for(rows: int, columns: int) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x.t().exp()[1:] @ w).softmax(-1)

    inputs = torch.zeros(rows, columns), torch.zeros(rows, 3)
    graphs = [traced(function, *inputs, mode=mode) for mode in ("fake", "symbolic")]
    assert [is_dynamic(graph) for graph in graphs] == [False, True]
    fixed, dynamic = (kernel_works(graph, [("triton_0", _arithmetic(graph))])[0] for graph in graphs)
    assert cost(dynamic) == cost(fixed)
    assert dynamic.shapes == fixed.shapes


def _arithmetic(graph: fx.Graph) -> Sequence[str]:
    """The nodes whose results are tensors."""
    return [n.name for n in graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]


def test_sizes_that_depend_on_data_are_refused() -> None:
    graph = traced(lambda x: x.nonzero() + 1, torch.ones(8), mode="symbolic")
    with pytest.raises(ValueError, match="depend on data"):
        kernel_works(graph, [("triton_0", _arithmetic(graph))])


def test_the_scope_is_that_of_the_innermost_module_that_all_nodes_share() -> None:
    graph = traced(lambda x: x.exp().sin().cos(), torch.zeros(8))
    names = computed(graph)
    nodes = {node.name: node for node in graph.nodes}

    def scope(*paths: str) -> str:
        for name, path in zip(names, paths, strict=True):
            nodes[name].meta["nn_module_stack"] = {"0": (f"L['self'].{path}" if path else "L['self']", object)}
        return kernel_works(graph, [("triton_0", names)])[0].scope

    assert scope("layer1.0.conv", "layer1.0.conv", "layer1.0.conv") == "layer1.0.conv"
    assert scope("layer1.0.conv", "layer1.0.bn", "layer1.0") == "layer1.0"
    assert scope("layer1.0", "layer10.0", "layer1.0") == ""
    assert scope("head", "", "head") == ""


def test_sums_of_gradients_and_final_copies_belong_to_the_modules_beside_them() -> None:
    graph = traced(lambda x, y: y.copy_(x.exp().sin() + x), torch.zeros(8), torch.zeros(8))
    exp, sin, add, copy = (node for node in graph.nodes if node.op == "call_function")
    names = [node.name for node in (exp, sin, add, copy)]
    for node in (exp, sin, add, copy):
        node.meta.update(seq_nr=1)
    for node in (exp, sin):
        node.meta["fwd_nn_module_stack"] = {"0": ("L['self'].block.norm", object)}
    (own,) = kernel_works(graph, [("triton_0", names)])
    assert own.scope == ""  # the sum belongs to the model itself
    add.meta["is_gradient_acc"] = True
    (work,) = kernel_works(graph, [("triton_0", names)])
    assert work.scope == "block.norm"


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self'].layer1.0.conv1", "layer1.0.conv1"),
        ("L['self']._modules['layer1']._modules['0'].conv1", "layer1.0.conv1"),
        ("L['self']", ""),
        ("L['net'].fc", "fc"),
        ("L['self']._orig_mod.fc", "fc"),
    ],
)
def test_module_paths_are_those_of_named_modules(source: str, path: str) -> None:
    assert module_path(source) == path


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "mm"),
        ("extern_kernels.mm", "mm"),
        ("extern_kernels.bias_addmm", "addmm"),
        ("torch.ops.aten.mm.default", "mm"),
        ("torch.ops.aten.convolution_backward.default", "convolution_backward"),
        ("aten.convolution.default", "convolution"),
        ("aten::add_", "add"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("graph_12_cpp_fused_relu_0", "cpp_fused_relu_0"),
    ],
)
def test_one_operator_has_one_name(name: str, short: str) -> None:
    assert plain(name) == short
    assert is_generated(short) == ("fused" in name)

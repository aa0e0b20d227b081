"""Networks of sparse convolutions compiled, exported, traced without data, in lower precision, on several ranks, saved,
and replayed from a CUDA graph."""

from __future__ import annotations

import copy
import io
import json
import pickle
import textwrap
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import rooftop.sparse as spconv
from rooftop.cost import CountingMode
from rooftop.sparse import SparseConvTensor, build_rulebook, geometry, table_orders

GRID = (8, 7, 6)
BOUND = 150


class Network(nn.Module):
    """Takes and returns plain tensors; the sparse tensor is created inside."""

    def __init__(self, bound: int | None) -> None:
        super().__init__()
        self.stem = spconv.SparseSequential(
            spconv.SubMConv3d(3, 4, 3, bias=False, indice_key="a"), nn.BatchNorm1d(4), nn.ReLU()
        )
        self.down = spconv.SparseSequential(
            spconv.SparseConv3d(4, 6, 3, 2, 1, indice_key="b", num_out_act_bound=bound),
            nn.BatchNorm1d(6),
            spconv.SubMConv3d(6, 6, 3),
        )
        self.up = spconv.SparseInverseConv3d(6, 4, 3, "b")
        self.last = spconv.SubMConv3d(8, 2, 3, indice_key="a")

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        skip = self.stem(SparseConvTensor(features, indices, GRID, 2))
        y = self.up(self.down(skip))
        out: Tensor = self.last(y.replace_feature(torch.cat([y.features, skip.features], 1))).features
        return out


def a_network(bound: int | None = BOUND) -> Network:
    torch.manual_seed(0)
    return Network(bound)


def inputs(count: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randperm(2 * 8 * 7 * 6, generator=generator)[:count]
    indices = torch.stack(torch.unravel_index(cells, (2, *GRID)), 1).int()
    return torch.randn(count, 3, generator=generator), indices


def learnt(network: nn.Module, features: Tensor, indices: Tensor) -> list[Tensor]:
    """The result of a training step, the gradients of features and parameters, and the buffers afterwards."""
    features = features.detach().requires_grad_()
    y = network(features, indices)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    gradients = torch.autograd.grad(y, [features, *network.parameters()], dy)
    return [y.detach(), *gradients, *(b.clone() for b in network.buffers())]


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)


# ---- compiled ----------------------------------------------------------------------------------------------------


def test_compiled_whole_for_any_number_of_sites() -> None:
    """A training step without a graph break."""
    compiled, network = torch.compile(a_network(), fullgraph=True, backend="aot_eager", dynamic=True), a_network()
    for count in (50, 33):
        assert_all_close(learnt(compiled, *inputs(count)), learnt(network, *inputs(count)))


def test_compiled_in_parts_without_a_bound() -> None:
    network = spconv.SparseSequential(
        spconv.SparseConv3d(3, 4, 3, 2, 1),
        *(spconv.SubMConv3d(4, 4, 3, indice_key="behind it") for _ in range(2)),
    )

    def run(features: Tensor, indices: Tensor) -> Tensor:
        y: Tensor = network(SparseConvTensor(features, indices, GRID, 2)).features
        return y.relu()

    with torch.no_grad():  # torch warns where a graph ends at a tensor with a gradient
        for dynamic in (None, True):  # sizes dynamic as torch decides, or all dynamic
            compiled = torch.compile(run, backend="eager", dynamic=dynamic)
            for count in (50, 33):
                torch.testing.assert_close(compiled(*inputs(count)), run(*inputs(count)))


def test_exported_with_a_bound() -> None:
    network = a_network().eval()
    sites = torch.export.Dim("sites", max=2**31 - 1)
    exported = torch.export.export(network, inputs(), dynamic_shapes={"features": {0: sites}, "indices": {0: sites}})
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, torch.export.load(file)):
        for count in (50, 33):
            torch.testing.assert_close(program.module()(*inputs(count)), network(*inputs(count)))


# ---- without data --------------------------------------------------------------------------------------------------


def test_an_order_of_as_many_rows_as_only_a_run_knows() -> None:
    """Exported programs without a bound on outputs contain orders of an unknown number of rows."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = env.create_unbacked_symint()
        torch._check(rows >= 0)
        order = table_orders.row_order(torch.empty(rows, 27, dtype=torch.int32))
        lists, counts = table_orders.row_blocks(order, 27)
    assert order.shape == (29, rows)
    assert (lists.shape[0], *counts.shape) == (27, 27)


def test_fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        features, indices = (mode.from_tensor(each) for each in inputs())
        y = a_network()(features, indices)
        assert y.shape == (50, 2)
        y.sum().backward()


@pytest.mark.parametrize("bound", [None, 40])
@pytest.mark.parametrize("kind", ["submanifold", "strided", "transposed"])
def test_the_rulebook_s_operator(kind: str, bound: int | None) -> None:
    """The operator passes checks of its schema and of its fake shapes. A size that depends on data is unknown."""
    _, indices = inputs(20)
    steps = {"submanifold": (3, 1, 1), "strided": (3, 2, 1), "transposed": (1, 2, 0)}[kind]
    shape = geometry(2, GRID, *steps, subm=kind == "submanifold", transpose=kind == "transposed")
    sizes = (shape.in_shape, shape.out_shape, shape.ksize, shape.stride, shape.padding, shape.dilation)
    bounds = 120 if bound and kind == "strided" else bound
    arguments = (indices, 2, *map(list, sizes), shape.subm, shape.transpose, bounds)
    operator = torch.ops.rooftop.sparse_rulebook.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    real = operator(*arguments)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = operator(mode.from_tensor(indices), *arguments[1:])
    known = bound is not None or kind == "submanifold"
    for each, other in zip(fake, real, strict=True):
        assert each.dtype == other.dtype
        assert each.shape[1:] == other.shape[1:]
        assert isinstance(each.shape[0], int) or not known or each.shape[0] == other.shape[0]
    assert isinstance(fake[1].shape[0], torch.SymInt) != known or kind == "submanifold"


def test_operators_of_tables_without_data() -> None:
    def tables_of(table: Tensor) -> list[Tensor]:
        order = ops.sparse_row_order(table)
        return [order, *ops.sparse_row_pairs(table, 15), *ops.sparse_row_blocks(order, table.shape[1])]

    table = build_rulebook(inputs(20)[1], geometry(2, GRID, 3, subm=True)).neighbours
    ops = torch.ops.rooftop
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(table)
        made = tables_of(fake)
    real = tables_of(table)
    for each, other in zip(made, real, strict=True):
        assert (each.shape, each.dtype) == (other.shape, other.dtype)
    assert int(real[2].sum()) == int(((table >= 0) & (table < 15)).sum())


def test_a_network_costs_what_its_rulebooks_and_products_are() -> None:
    features, indices = inputs()
    with CountingMode() as counted:
        a_network().eval()(features, indices)
    costs: dict[str, list[Any]] = {}
    for record in counted.records:
        costs.setdefault(record.name, []).append(record.cost)
    assert len(costs["rooftop::sparse_conv"]) == 5
    assert len(costs["rooftop::sparse_rulebook"]) == 3
    first, down, _ = costs["rooftop::sparse_rulebook"]
    assert (first.read_bytes, first.write_bytes) == (indices.numel() * 4, 50 * 27 * 4 + 3 * 4)
    assert down.write_bytes == BOUND * 4 * 4 + BOUND * 27 * 4 + 50 * 27 * 4 + 3 * 4
    assert not first.flops


# ---- in lower precision, saved, on ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [None, BOUND])
def test_autocast(bound: int | None) -> None:
    network, (features, indices) = a_network(bound).eval(), inputs()
    exact = network(features, indices)
    with torch.autocast("cpu", torch.bfloat16):
        found = learnt(network, features, indices)
    assert found[0].dtype == torch.bfloat16
    assert all(each.dtype == torch.float32 for each in found[1 : 2 + len(list(network.parameters()))])
    error = (found[0].float() - exact).norm() / exact.norm()
    assert 1e-4 < error < 2e-2


def test_networks_and_tensors_are_saved() -> None:
    network, (features, indices) = a_network().eval(), inputs()
    expected = network(features, indices)
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    for other in (
        pickle.loads(pickle.dumps(network)),
        copy.deepcopy(network),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(other(features, indices), expected)
    y = network.stem(SparseConvTensor(features, indices, GRID, 2))
    again = pickle.loads(pickle.dumps(y))
    assert torch.equal(network.up(network.down(again)).features, network.up(network.down(y)).features)
    assert again.indice_dict["a"].in_indices is again.indices  # so layers still share the rulebook
    again.check()


RANK = """
import json, os, sys
import torch
import torch.distributed as dist
import rooftop.sparse as spconv
from rooftop.sparse import SparseConvTensor

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(rank)
network = spconv.SparseSequential(
    spconv.SubMConv2d(2, 3, 3, indice_key="a"), torch.nn.ReLU(), spconv.SparseConv2d(3, 2, 3, 2, 1, indice_key="b"),
    spconv.SparseInverseConv2d(2, 1, 3, "b"),
).double()
parallel = torch.nn.parallel.DistributedDataParallel(network)
count = (0, 9)[rank]  # one rank has no sites
indices = torch.stack(torch.unravel_index(torch.arange(count), (1, 5, 5)), 1)
features = torch.arange(2.0 * count, dtype=torch.float64).view(count, 2)
for _ in range(2):
    parallel(SparseConvTensor(features, indices, (5, 5), 1)).features.square().sum().backward()
total = [p.grad.tolist() for p in network.parameters()]
network.zero_grad()
for _ in range(2):
    network(SparseConvTensor(features, indices, (5, 5), 1)).features.square().sum().backward()
own = [p.grad.tolist() for p in network.parameters()]
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump([total, own], file)
dist.destroy_process_group()
"""


def test_data_parallel_ranks_average_their_gradients(tmp_path: Path, fork: Callable[..., BaseProcess]) -> None:
    """Both ranks have the first rank's parameters and the mean of the gradients; one rank's gradients are zero."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    served = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2"}
    served |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    places = {"folder": tmp_path, "output": tmp_path / "output", "errors": tmp_path / "errors"}
    ranks = [{**served, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [fork(textwrap.dedent(RANK), str(tmp_path), environment=each, **places) for each in ranks]
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "errors").read_text()
    (total, own), (other_total, others) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert total == other_total
    for mean, none, some in zip(total, own, others, strict=True):
        assert not torch.tensor(none).any()
        torch.testing.assert_close(torch.tensor(mean), torch.tensor(some) / 2)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    features, indices = inputs(count, seed)
    return features.cuda(), indices.cuda()


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    compiled, network = torch.compile(a_network().cuda(), fullgraph=True), a_network().cuda()
    assert_all_close(learnt(compiled, *on_gpu(50)), learnt(network, *on_gpu(50)))


@pytest.mark.gpu
def test_a_graph_replays_a_bounded_network_on_other_sites() -> None:
    """Forward and backward are captured once; then sites, features and (by rows of -1) the number of sites change."""
    torch.manual_seed(0)
    layers = (
        spconv.SubMConv3d(3, 16, 3, indice_key="a"),
        spconv.SparseBatchNorm(16),
        spconv.SparseReLU(),
        spconv.SparseConv3d(16, 32, 3, 2, 1, indice_key="b", num_out_act_bound=BOUND),
        spconv.SparseBatchNorm(32),
        spconv.SparseInverseConv3d(32, 16, 3, "b"),
        spconv.SubMConv3d(16, 4, 3, indice_key="a"),
    )
    network = spconv.SparseSequential(*layers).cuda()
    rows = 60
    features = torch.zeros(rows, 3, device="cuda", requires_grad=True)
    indices = torch.full((rows, 4), -1, dtype=torch.int32, device="cuda")
    dy = torch.randn(rows, 4, device="cuda")

    def step() -> list[Tensor]:
        x = SparseConvTensor(features, indices, GRID, 2, padded=True)
        y = network(x).features * (indices[:, :1] >= 0)
        return [y.detach(), *torch.autograd.grad(y, [features, *network.parameters()], dy)]

    def fill(count: int, seed: int) -> None:
        values, sites = on_gpu(count, seed)
        with torch.no_grad():
            features.zero_()[:count] = values
            indices.fill_(-1)[:count] = sites

    fill(60, 0)
    state = copy.deepcopy(network.state_dict())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    for count, seed in ((60, 0), (41, 1), (0, 2), (57, 3)):
        fill(count, seed)
        network.load_state_dict(state)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [each.clone() for each in found]
        network.load_state_dict(state)
        assert_all_close(replayed, step())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_on_a_gpu(dtype: torch.dtype) -> None:
    network, (features, indices) = a_network().cuda().eval(), on_gpu(300)
    network.down[0].num_out_act_bound = 500
    exact = network(features, indices)
    with torch.autocast("cuda", dtype):
        found = learnt(network, features, indices)
    assert found[0].dtype == dtype
    assert (found[0].float() - exact).norm() < 2e-2 * exact.norm()

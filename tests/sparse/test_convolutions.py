"""Modules of sparse convolutions equal torch's convolutions of the dense grid at the active sites, and share
rulebooks."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftop.sparse as spconv
from rooftop.kernels.sites import tables
from rooftop.launch import count_launches
from rooftop.sparse import SparseConvTensor, functional, table_orders
from rooftop.sparse.functional import by_group
from rooftop.sparse.rulebook import build_rulebook
from rooftop.testing import no_waiting_for_gpu

CONVS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
GRID = (7, 6, 8)


def random_sites(count: int, batch_size: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Different sites (count, 1 + dims), int32, in random order."""
    cells = torch.randperm(batch_size * math.prod(shape), generator=torch.Generator().manual_seed(seed))[:count]
    return torch.stack(torch.unravel_index(cells, (batch_size, *shape)), 1).int()


def a_tensor(
    channels: int,
    count: int = 60,
    batch_size: int = 2,
    shape: tuple[int, ...] = GRID,
    dtype: torch.dtype = torch.float64,
) -> SparseConvTensor:
    torch.manual_seed(count)
    features = torch.randn(count, channels, dtype=dtype, requires_grad=True)
    return SparseConvTensor(features, random_sites(count, batch_size, shape), shape, batch_size)


@dataclass(frozen=True)
class Case:
    """A convolution, the same in each dimension of a grid."""

    kind: str
    kernel: int
    stride: int
    padding: int
    dilation: int
    channels: int
    out_channels: int
    batch: int
    dims: int = 3

    @property
    def grid(self) -> tuple[int, ...]:
        span = self.dilation * (self.kernel - 1) + 1
        return tuple(span + more for more in (3, 1, 2)[: self.dims])

    def module(self, **options: Any) -> spconv.SparseConvolution:
        sizes: dict[str, Any] = {"dilation": self.dilation, "dtype": torch.float64}
        if self.kind != "SubMConv":
            sizes |= {"stride": self.stride, "padding": self.padding}
        made = getattr(spconv, f"{self.kind}{self.dims}d")(
            self.channels, self.out_channels, self.kernel, **sizes, **options
        )
        assert isinstance(made, spconv.SparseConvolution)
        return made


CASES = [
    Case("SubMConv", 1, 1, 0, 1, 3, 16, 1),
    Case("SubMConv", 3, 1, 1, 1, 16, 18, 2),
    Case("SubMConv", 3, 1, 1, 2, 3, 1, 4),
    Case("SubMConv", 5, 1, 2, 1, 1, 3, 1),
    Case("SubMConv", 3, 1, 1, 3, 130, 3, 1, 2),
    Case("SubMConv", 3, 1, 1, 1, 3, 5, 2, 1),
    Case("SparseConv", 1, 1, 0, 1, 48, 3, 1),
    Case("SparseConv", 1, 2, 1, 1, 3, 4, 2),
    Case("SparseConv", 2, 2, 0, 1, 32, 48, 1),
    Case("SparseConv", 3, 2, 1, 1, 18, 16, 2),
    Case("SparseConv", 3, 1, 1, 2, 3, 3, 3),
    Case("SparseConv", 4, 3, 2, 1, 1, 64, 1),
    Case("SparseConv", 5, 2, 2, 1, 3, 1, 1),
    Case("SparseConv", 3, 3, 0, 3, 64, 130, 2, 2),
    Case("SparseConv", 2, 1, 1, 1, 5, 3, 2, 1),
    Case("SparseConvTranspose", 2, 2, 0, 1, 16, 8, 1),
    Case("SparseConvTranspose", 3, 2, 1, 1, 3, 18, 2),
    Case("SparseConvTranspose", 3, 1, 1, 2, 3, 4, 1),
    Case("SparseConvTranspose", 4, 3, 2, 1, 1, 3, 2, 2),
    Case("SparseConvTranspose", 3, 2, 0, 1, 4, 3, 1, 1),
]


def dense(case: Case, conv: spconv.SparseConvolution, x: SparseConvTensor) -> tuple[Tensor, Tensor]:
    """torch's convolution of the whole grid (B, C, *grid), and which of its cells are reached by an input (B,
    *grid)."""
    weight = conv.weight.movedim(-1, 1)  # (out, in, *kernel)
    active = x.replace_feature(torch.ones_like(x.features[:, :1])).dense()
    counts = torch.ones(1, 1, *weight.shape[2:], dtype=active.dtype)
    steps = (case.stride, case.padding)
    if case.kind == "SparseConvTranspose":
        function = TRANSPOSED[case.dims - 1]
        y = function(x.dense(), weight.transpose(0, 1), conv.bias, *steps, dilation=case.dilation)
        return y, function(active, counts, None, *steps, dilation=case.dilation)[:, 0] > 0
    function = CONVS[case.dims - 1]
    if case.kind == "SubMConv":
        steps = (1, case.dilation * (case.kernel // 2))
        return function(x.dense(), weight, conv.bias, *steps, case.dilation), active[:, 0] > 0
    y = function(x.dense(), weight, conv.bias, *steps, case.dilation)
    return y, function(active, counts, None, *steps, case.dilation)[:, 0] > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_torch_on_the_dense_grid(case: Case) -> None:
    """Compares active sites, features, and all gradients."""
    cells = case.batch * math.prod(case.grid)
    x, conv = a_tensor(case.channels, max(1, min(cells // 3, 90)), case.batch, case.grid), case.module()
    y = conv(x)
    full, reached = dense(case, conv, x)
    at = (y.indices[:, 0].long(), slice(None), *y.indices[:, 1:].long().t())
    assert y.spatial_shape == list(full.shape[2:])
    assert len(y.indices) == reached.sum()
    assert bool(reached[at[0], *at[2:]].all())
    torch.testing.assert_close(y.features, full[at])
    leaves = [x.features, *conv.parameters()]
    dy = torch.randn_like(y.features)
    for found, expected in zip(
        torch.autograd.grad(y.features, leaves, dy), torch.autograd.grad(full[at], leaves, dy), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["SubMConv", "SparseConv"])
def test_four_dimensions(kind: str) -> None:
    """torch has no such convolution, so the result is compared with the definition of pairs. The kernel reads the next
    cell in each dimension."""
    shape = (4, 3, 5, 4)
    x = a_tensor(3, 100, 2, shape)
    conv = getattr(spconv, f"{kind}4d")(3, 2, 3, padding=1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        conv.weight[:, :2] = conv.weight[:, :, :2] = conv.weight[:, :, :, :2] = conv.weight[:, :, :, :, :2] = 0
    y = conv(x)
    moved = F.pad(x.dense(), (0, 1) * 4)[:, :, 1:, 1:, 1:, 1:]
    expected = torch.einsum("oc,bcwxyz->bowxyz", conv.weight[:, 2, 2, 2, 2], moved)
    at = y.indices.long()
    torch.testing.assert_close(y.features, expected[at[:, 0], :, *at[:, 1:].t()])


def test_groups() -> None:
    x = a_tensor(12)
    conv = spconv.SparseConv3d(12, 6, 3, 2, 1, groups=3, dtype=torch.float64)
    assert conv.weight.shape == (6, 3, 3, 3, 4)
    y = conv(x)
    full = F.conv3d(x.dense(), conv.weight.movedim(-1, 1), conv.bias, 2, 1, groups=3)
    at = y.indices.long()
    torch.testing.assert_close(y.features, full[at[:, 0], :, *at[:, 1:].t()])
    point = spconv.SubMConv3d(12, 6, 1, groups=3, dtype=torch.float64)
    full = F.conv3d(x.dense(), point.weight.movedim(-1, 1), point.bias, groups=3)
    at = x.indices.long()
    torch.testing.assert_close(point(x).features, full[at[:, 0], :, *at[:, 1:].t()])
    with pytest.raises(ValueError, match="numbers of channels must be at least 0, got -3 and 6"):
        spconv.SubMConv3d(-3, 6, 3)
    with pytest.raises(TypeError, match=r"in_channels must be an integer, got 2\.5"):
        spconv.SubMConv3d(2.5, 6, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups must divide 12 and 6 channels, got 5"):
        spconv.SubMConv3d(12, 6, 3, groups=5)
    with pytest.raises(ValueError, match="groups must divide 12 and 6 channels, got 4"):
        by_group(x.features, conv.weight, None, 4)


# ---- a network ---------------------------------------------------------------------------------------------------


class UNet(spconv.SparseModule):
    """A network as users of spconv write it: two levels, shared keys, an inverse convolution, concatenated features."""

    def __init__(self, channels: int = 3, width: int = 4, bound: int | None = None) -> None:
        super().__init__()
        self.stem = spconv.SparseSequential(
            spconv.SubMConv3d(channels, width, 3, padding=1, bias=False, indice_key="subm1"),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.down = spconv.SparseSequential(
            spconv.SparseConv3d(width, 6, 3, stride=2, padding=1, indice_key="spconv1", num_out_act_bound=bound),
            spconv.SparseBatchNorm(6),
            spconv.SparseReLU(),
            spconv.SubMConv3d(6, 6, 3, indice_key="subm2"),
        )
        self.up = spconv.SparseInverseConv3d(6, width, 3, indice_key="spconv1")
        self.last = spconv.SparseSequential(
            spconv.SubMConv3d(2 * width, 4, 3, indice_key="subm1"), nn.ReLU(), spconv.SubMConv3d(4, 2, 1)
        )

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        skip = self.stem(x)
        y = self.up(self.down(skip))
        y = y.replace_feature(torch.cat([y.features, skip.features], 1))
        out: SparseConvTensor = self.last(y)
        return out


@pytest.mark.parametrize("bound", [None, 70])
def test_the_gradients_of_a_network(bound: int | None) -> None:
    torch.manual_seed(0)
    network = UNet(2, 3, bound).double()
    indices = random_sites(14, 2, (4, 4, 4))

    def run(features: Tensor, *_: Tensor) -> Tensor:
        return network(SparseConvTensor(features, indices, (4, 4, 4), 2)).features

    features = torch.randn(14, 2, dtype=torch.float64, requires_grad=True)
    parameters = tuple(network.parameters())
    assert torch.autograd.gradcheck(run, (features, *parameters), fast_mode=True)
    run(features).square().sum().backward()
    assert all(p.grad is not None for p in parameters)


def test_a_bounded_network_equals_the_other() -> None:
    """The networks are also equal in training: batch norms count only sites, and the running statistics are the
    same."""
    torch.manual_seed(0)
    free, bounded = UNet().double(), UNet(bound=130).double()
    bounded.load_state_dict(free.state_dict())
    x = a_tensor(3)
    for training in (True, False):
        free.train(training)
        bounded.train(training)
        torch.testing.assert_close(bounded(x).features, free(x).features)
    for name, value in free.state_dict().items():
        torch.testing.assert_close(bounded.state_dict()[name], value)
    down = bounded.down(bounded.stem(x))
    assert len(down.indices) == 130
    assert down.padded
    assert not free.down(free.stem(x)).padded


EDGES: dict[str, tuple[Tensor, tuple[int, int, int]]] = {
    "no sites": (torch.empty(0, 4, dtype=torch.int32), GRID),
    "one site": (torch.tensor([[1, 3, 2, 1]]), GRID),
    "int64": (random_sites(40, 2, GRID).long(), GRID),
    "a batch element without sites": (random_sites(40, 1, GRID) + torch.tensor([1, 0, 0, 0], dtype=torch.int32), GRID),
    "near 2^20": (
        random_sites(40, 1, (5, 5, 5)) + torch.tensor([0, 2**20 - 5, 2**20 - 5, 2**20 - 5], dtype=torch.int32),
        (2**20, 2**20, 2**20),
    ),
}


@pytest.mark.parametrize("bound", [None, 300])
@pytest.mark.parametrize("edge", EDGES)
def test_legal_edges(edge: str, bound: int | None) -> None:
    indices, grid = EDGES[edge]
    torch.manual_seed(0)
    network = UNet(bound=bound)
    features = torch.randn(len(indices), 3, requires_grad=True)
    for training in (True, False):
        network.train(training)
        y = network(SparseConvTensor(features, indices, grid, 2))
        assert y.features.shape == (len(indices), 2)
        assert y.indices is indices
        assert bool(y.features.isfinite().all())
    y.features.sum().backward()
    assert features.grad is not None
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in network.parameters())
    assert all(bool(b.isfinite().all()) for b in network.buffers())


def test_near_the_end_of_a_wide_grid_as_near_its_start() -> None:
    network, near, far = UNet().eval(), random_sites(40, 1, (6, 6, 6)), 2**20 - 6
    features = torch.randn(40, 3)
    there = near + torch.tensor([0, far, far, far], dtype=torch.int32)
    expected = network(SparseConvTensor(features, near, (6, 6, 6), 1)).features
    found = network(SparseConvTensor(features, there, (far + 6,) * 3, 1)).features
    torch.testing.assert_close(found, expected)


def test_all_outputs_vanish() -> None:
    """With stride 2 and a kernel of 1, no output reaches these sites."""
    x = SparseConvTensor(torch.randn(2, 3, requires_grad=True), torch.tensor([[0, 1, 1], [0, 3, 1]]), (5, 5), 1)
    y = spconv.SparseConv2d(3, 4, 1, 2, indice_key="down")(x)
    assert y.features.shape == (0, 4)
    z = spconv.SparseInverseConv2d(4, 3, 1, "down", bias=False)(y)
    assert torch.equal(z.features, torch.zeros(2, 3))
    z.features.sum().backward()
    assert torch.equal(x.features.grad, torch.zeros(2, 3))


def test_permuting_the_rows_permutes_rows_and_nothing_else() -> None:
    x, network = a_tensor(3), UNet().double().eval()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    permuted = SparseConvTensor(x.features[order], x.indices[order], GRID, 2)
    torch.testing.assert_close(network(permuted).features, network(x).features[order])


def test_batch_elements_do_not_see_each_other() -> None:
    x, network = a_tensor(3), UNet().double().eval()
    whole = network(x).features
    for element in (0, 1):
        rows = x.indices[:, 0] == element
        alone = SparseConvTensor(x.features[rows], x.indices[rows], GRID, 2)
        torch.testing.assert_close(network(alone).features, whole[rows])


def test_an_inverse_convolution_restores_the_sites() -> None:
    x = a_tensor(3)
    down = spconv.SparseConv3d(3, 5, 3, 2, 1, bias=False, indice_key="down", dtype=torch.float64)
    up = spconv.SparseInverseConv3d(5, 3, 3, "down", bias=False, dtype=torch.float64)
    y = up(down(x))
    assert y.indices is x.indices
    assert y.spatial_shape == x.spatial_shape
    with torch.no_grad():  # the inverse with the same weight is the adjoint
        up.weight.copy_(down.weight.transpose(0, -1))
    dy = torch.randn(len(down(x).indices), 5, dtype=torch.float64)
    (adjoint,) = torch.autograd.grad(down(x).features, x.features, dy)
    torch.testing.assert_close(up(down(x).replace_feature(dy)).features, adjoint)


# ---- sharing -------------------------------------------------------------------------------------------------------


def launches_of(network: nn.Module, x: SparseConvTensor) -> dict[str, int]:
    with count_launches() as launches:
        network(x)
    return dict(launches)


def test_layers_with_a_key_in_common_share_one_rulebook() -> None:
    found = launches_of(UNet().double(), a_tensor(3))
    assert found["pair_submanifold"] == 2  # one kernel for each level
    assert found["reach_outputs"] == 1  # one kernel for the way down and up


def test_a_layer_does_not_change_its_input() -> None:
    x, conv = a_tensor(3), spconv.SubMConv3d(3, 4, 3, indice_key="a", dtype=torch.float64)
    y = conv(x)
    assert x.indice_dict == {}
    assert set(y.indice_dict) == {"a"}
    z = spconv.SubMConv3d(4, 4, 3, indice_key="b", dtype=torch.float64)(y)
    assert z.indice_dict["a"] is y.indice_dict["a"]
    assert launches_of(spconv.SubMConv3d(4, 4, 3, indice_key="b", dtype=torch.float64), z) == {}


def test_a_kernel_of_one_needs_no_rulebook() -> None:
    x = a_tensor(3)
    for conv in (spconv.SubMConv3d(3, 4, 1, dtype=torch.float64), spconv.SparseConv3d(3, 4, 1, dtype=torch.float64)):
        assert launches_of(conv, x) == {}
    assert launches_of(spconv.SparseConv3d(3, 4, 1, padding=1, dtype=torch.float64), x) != {}


def test_a_kernel_of_one_has_as_many_outputs_as_its_bound() -> None:
    x = a_tensor(3)
    conv = spconv.SparseConv3d(3, 4, 1, num_out_act_bound=70, record_voxel_count=True, dtype=torch.float64)
    y = conv(x)
    assert y.features.shape == (70, 4)
    assert y.padded
    torch.testing.assert_close(y.dense(), F.conv3d(x.dense(), conv.weight.movedim(-1, 1), conv.bias) * occupied(x))
    with pytest.raises(ValueError, match="more outputs than num_out_act_bound 59"):
        spconv.SparseConv3d(3, 4, 1, num_out_act_bound=59, dtype=torch.float64)(x)
    plain = spconv.SparseConv3d(3, 4, 1, record_voxel_count=True, dtype=torch.float64)
    plain(x)
    assert conv.get_max_num_voxels().tolist() == plain.get_max_num_voxels().tolist() == [60]


def occupied(x: SparseConvTensor) -> Tensor:
    """1 at the cells that are sites, (B, 1, *grid)."""
    return x.replace_feature(torch.ones(len(x.indices), 1, dtype=x.features.dtype)).dense()


def test_orders_and_pairs_are_made_once_and_where_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU functions create the orders and pairs in place of kernels, and the test counts their calls."""
    made: list[str] = []

    def counting(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            made.append(name)
            return make(*arguments)

        return call

    for module in (table_orders, functional):
        monkeypatch.setattr(module, "by_kernels", lambda table: True)
    for least in ("SORTED_FROM", "LISTED_FROM"):
        monkeypatch.setattr(tables, least, 1)
    for name in ("row_order", "row_pairs", "row_blocks"):
        monkeypatch.setattr(table_orders, name, counting(name, getattr(table_orders, name)))
    network, x = UNet(), a_tensor(3, dtype=torch.float32)
    with torch.no_grad():
        network(x)
    assert made == ["row_order"] * 4  # an order for each level, and for both directions between levels
    made.clear()
    network(x).features.sum().backward()
    assert sorted(made) == ["row_blocks"] * 4 + ["row_order"] * 4
    made.clear()
    network.requires_grad_(False)(x)
    assert made == ["row_order"] * 4
    made.clear()
    monkeypatch.setattr(tables, "TABLES_SORTED", False)
    network.requires_grad_()(x).features.sum().backward()
    assert sorted(made) == ["row_order"] * 4 + ["row_pairs"] * 4
    made.clear()
    for least in ("SORTED_FROM", "LISTED_FROM"):
        monkeypatch.setattr(tables, least, 1000)
    network.requires_grad_()(x)
    assert made == []  # with so few rows, no order is computed


def test_what_inference_mode_made_serves_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd saves the rulebook's orders, and refuses tensors created in inference mode."""
    for module in (table_orders, functional):
        monkeypatch.setattr(module, "by_kernels", lambda table: True)
    for least in ("SORTED_FROM", "LISTED_FROM"):
        monkeypatch.setattr(tables, least, 1)
    for with_tables in (True, False):
        monkeypatch.setattr(tables, "TABLES_SORTED", with_tables)
        first = spconv.SparseConv3d(3, 4, 3, 2, 1, indice_key="down")
        back = spconv.SparseInverseConv3d(4, 3, 3, "down")
        y = first(a_tensor(3, dtype=torch.float32).replace_feature(torch.randn(60, 3)))
        y.indice_dict["down"] = rulebook = build_rulebook(a_tensor(3).indices, y.indice_dict["down"].shape)
        y.indices = rulebook.out_indices
        with torch.inference_mode():
            back(y)
            assert rulebook.table.pairs is not None
        made = [each.ordered for each in (rulebook.table, rulebook.reached)]
        assert all(each is not None and not each.is_inference() for each in made)
        assert not any(each.is_inference() for each in rulebook.table.lists)
        back(y).features.sum().backward()
        assert back.weight.grad is not None


# ---- rulebooks that do not fit -------------------------------------------------------------------------------------


def test_a_key_that_has_another_rulebook() -> None:
    x = spconv.SubMConv3d(3, 3, 3, indice_key="a", dtype=torch.float64)(a_tensor(3))
    wrong: list[tuple[spconv.SparseConvolution, str]] = [
        (
            spconv.SubMConv3d(3, 3, 5, indice_key="a"),
            r"kernel \(3, 3, 3\).*this layer is submanifold, kernel \(5, 5, 5\)",
        ),
        (spconv.SubMConv3d(3, 3, 3, dilation=2, indice_key="a"), r"this layer is.*dilation \(2, 2, 2\)"),
        (spconv.SparseConv3d(3, 3, 3, 2, 1, indice_key="a"), r"submanifold.*this layer is regular.*stride \(2, 2, 2\)"),
        (spconv.SparseInverseConv3d(3, 3, 3, "a"), "rulebook of a submanifold convolution, which keeps its sites"),
        (
            spconv.SparseInverseConv3d(3, 3, 3, "b"),
            r"no layer has stored a rulebook under indice_key 'b' \(stored keys: 'a'\)",
        ),
    ]
    for conv, message in wrong:
        with pytest.raises(ValueError, match=message):
            conv.double()(x)
    other = SparseConvTensor(x.features[1:], x.indices[1:], GRID, 2, indice_dict=x.indice_dict)
    with pytest.raises(ValueError, match=r"'a' has a rulebook of other sites, with 60 rows.*has 59.*replace_feature"):
        spconv.SubMConv3d(3, 3, 3, indice_key="a").double()(other)


def test_a_key_whose_indices_were_changed_in_place() -> None:
    conv, x = spconv.SubMConv3d(3, 3, 3, indice_key="a", dtype=torch.float64), a_tensor(3)
    y = conv(x)
    for same in (y, copy.copy(y), y.replace_feature(y.features.detach())):
        conv(same)
    x.indices.copy_(random_sites(60, 2, GRID, seed=1))
    with pytest.raises(ValueError, match="'a' has a rulebook whose indices were later changed in place: create"):
        conv(y)
    assert torch.equal(conv(x).indices, x.indices)
    with torch.no_grad():
        copied = copy.deepcopy(conv(x))  # the given tensor was not changed
    assert torch.equal(conv(copied).features, conv(conv(x)).features)


def test_an_inverse_convolution_that_does_not_fit() -> None:
    x = a_tensor(3)
    y = spconv.SparseConv3d(3, 3, 3, 2, 1, indice_key="down", dtype=torch.float64)(x)
    with pytest.raises(
        ValueError, match=r"a kernel of \(3, 3, 3\): an inverse convolution needs the same kernel, got \(2, 2, 2\)"
    ):
        spconv.SparseInverseConv3d(3, 3, 2, "down").double()(y)
    up = spconv.SparseInverseConv3d(3, 3, 3, "down").double()
    with pytest.raises(ValueError, match=r"have other sites.*starts from those outputs"):
        up(up(y))
    with pytest.raises(
        ValueError, match=f"a rulebook of {len(y.indices)} output rows; this layer's num_out_act_bound is 9"
    ):
        spconv.SparseConv3d(3, 3, 3, 2, 1, indice_key="down", num_out_act_bound=9).double()(
            SparseConvTensor(x.features, x.indices, GRID, 2, indice_dict=y.indice_dict)
        )


def test_wrong_arguments() -> None:
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: spconv.SubMConv3d(3, 4, 2), ValueError, r"kernel_size must be odd, got \(2, 2, 2\)"),
        (lambda: spconv.SubMConv3d(3, 4, 3, 2), ValueError, r"stride must be 1, got \(2, 2, 2\)"),
        (
            lambda: spconv.SparseConv3d(3, 4, (3, 3)),
            ValueError,
            r"kernel_size.*at least 1, or 3 such integers, got \(3, 3\)",
        ),
        (lambda: spconv.SparseConv3d(4, 4, 2**20), ValueError, r"kernel of \(1048576, .*: use a smaller kernel"),
        (lambda: spconv.SparseMaxPool3d(2**20), ValueError, r"kernel of \(1048576, .*: use a smaller kernel"),
        (lambda: spconv.SparseConv1d(2**40, 2**40, 1), ValueError, r"a weight of \(1099511627776, 1, .* 2\^63"),
        (lambda: spconv.SparseConv1d(2**28, 2**28, 1), MemoryError, r"a weight of .* needs 288,.*but the host has"),
        (lambda: spconv.SparseConv3d(3, 4, 3, padding=-1), ValueError, "padding must be an integer of at least 0"),
        (lambda: spconv.SparseConv3d(3, 4, 2.5), TypeError, r"kernel_size must be an integer .*, got 2\.5"),
        (lambda: spconv.SparseConv3d(3, 4, (3, 2.5, 3)), TypeError, r"kernel_size must be an integer .*, got 2\.5"),
        (lambda: spconv.SparseConv3d(3, 4, True), TypeError, "kernel_size must be an integer .*, got True"),
        (lambda: spconv.SparseConv3d(3, 4, 3, None), TypeError, "stride must be an integer .*, got None"),
        (lambda: spconv.SparseConv3d(3, 4, 3, num_out_act_bound=-1), ValueError, "at least 0, or None .* got -1"),
        (
            lambda: spconv.SparseConv3d(3, 4, 3, num_out_act_bound=1.5),
            TypeError,
            r"bound must be an integer, got 1\.5",
        ),
        (
            lambda: spconv.SubMConv3d(3, 4, 1)(a_tensor(3)),
            TypeError,
            r"features is torch\.float64, weight torch\.float32: cast one, or use autocast",
        ),
        (
            lambda: spconv.SparseConv3d(3, 4, 3, algo="Native"),
            TypeError,
            "rooftop.sparse.ConvAlgo or None, got 'Native'",
        ),
        (
            lambda: spconv.SparseInverseConv3d(3, 4, 3, 2),
            TypeError,
            "indice_key must be the key of the layer to invert, got 2",
        ),
        (lambda: spconv.SubMConv3d(3, 4, 3)(torch.zeros(3, 3)), TypeError, "takes a rooftop.sparse.SparseConvTensor"),
        (
            lambda: spconv.SubMConv2d(3, 4, 3)(a_tensor(3)),
            ValueError,
            "expects grids of 2 dimensions, got SparseConvTensor",
        ),
        (
            lambda: spconv.SubMConv3d(4, 4, 3)(a_tensor(3)),
            ValueError,
            "takes 4 channels, got SparseConvTensor.*3 channels",
        ),
        (
            lambda: spconv.SparseConv3d(3, 4, 3, output_padding=1)(a_tensor(3)),
            ValueError,
            "for transposed convolutions",
        ),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()


def test_sizes_of_numpy() -> None:
    for kernel in (np.int64(3), np.array([3, 3, 3]), torch.tensor(3)):
        conv = spconv.SparseConv3d(3, 4, kernel, np.int64(2), num_out_act_bound=np.int64(9))
        assert (conv.kernel_size, conv.stride, conv.num_out_act_bound) == ((3, 3, 3), (2, 2, 2), 9)


def test_a_bound_that_is_too_small() -> None:
    with pytest.raises(ValueError, match="more outputs than num_out_act_bound 5: pass a larger bound"):
        UNet(bound=5)(a_tensor(3, dtype=torch.float32))


def test_what_layers_found_wrong_is_raised_when_asked_for() -> None:
    """On GPUs, layers continue without waiting for a check, so `check()` raises the errors of earlier layers."""
    y = UNet(bound=130).down[0](a_tensor(4, dtype=torch.float32))
    y.check()
    (faults,) = y.faults
    later = y.replace_feature(y.features)
    later.faults = (faults._replace(flags=torch.tensor([0, 0, 1], dtype=torch.int32)),)
    with pytest.raises(ValueError, match="more outputs than num_out_act_bound 130"):
        spconv.SubMConv3d(6, 6, 3, indice_key="next")(later).check()


# ---- as spconv's ---------------------------------------------------------------------------------------------------


def test_arguments_stand_in_spconv_s_order() -> None:
    first = ["in_channels", "out_channels", "kernel_size"]
    steps = [*first, "stride", "padding", "dilation", "groups", "bias", "indice_key", "algo", "fp32_accum"]
    orders = {
        "SubMConv": [*steps, "large_kernel_fast_algo", "name"],
        "SparseConv": [*steps, "record_voxel_count", "large_kernel_fast_algo", "name"],
        "SparseConvTranspose": [*steps, "record_voxel_count", "large_kernel_fast_algo", "name"],
        "SparseInverseConv": [*first, "indice_key", "bias", "algo", "fp32_accum", "large_kernel_fast_algo", "name"],
    }
    for kind, expected in orders.items():
        for dims in (1, 2, 3, 4):
            conv = getattr(spconv, f"{kind}{dims}d")
            parameters = inspect.signature(conv).parameters.values()
            assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == expected
            assert conv.ndim == dims


def test_weights_begin_as_in_spconv() -> None:
    torch.manual_seed(0)
    conv = spconv.SparseConv3d(16, 32, (3, 3, 1), name="first")
    assert conv.weight.shape == (32, 3, 3, 1, 16)
    bound = 1 / math.sqrt(16 * 9)
    for parameter in conv.parameters():
        assert 0.85 * bound < parameter.abs().max() <= bound
        assert parameter.mean().abs() < bound / 4
    assert spconv.SubMConv3d(3, 4, 3, bias=False).bias is None
    assert conv.name == "first"


def test_what_it_prints() -> None:
    assert repr(spconv.SubMConv2d(3, 4, 3, bias=False, indice_key="a")) == (
        "SubMConv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), indice_key=a, bias=False)"
    )
    conv = spconv.SparseConv1d(4, 4, 3, 2, 1, groups=2, algo=spconv.ConvAlgo.Native, num_out_act_bound=9)
    assert repr(conv) == (
        "SparseConv1d(4, 4, kernel_size=(3,), stride=(2,), padding=(1,), groups=2, algo=ConvAlgo.Native, "
        "num_out_act_bound=9)"
    )
    assert repr(spconv.SparseInverseConv1d(4, 3, 3, "a")) == "SparseInverseConv1d(4, 3, kernel_size=(3,), indice_key=a)"


def test_all_ways_to_compute_are_the_same() -> None:
    x = a_tensor(3)
    torch.manual_seed(0)
    plain = spconv.SparseConv3d(3, 4, 3, 2, 1, dtype=torch.float64)
    for algo in spconv.ConvAlgo:
        conv = spconv.SparseConv3d(3, 4, 3, 2, 1, algo=algo, fp32_accum=False, dtype=torch.float64)
        conv.load_state_dict(plain.state_dict())
        assert torch.equal(conv(x).features, plain(x).features)


@pytest.mark.parametrize("bound", [None, 150])
def test_the_most_outputs_are_recorded(bound: int | None) -> None:
    conv = spconv.SparseConv3d(3, 4, 3, 2, 1, record_voxel_count=True, num_out_act_bound=bound).double()
    counts = [int((conv(a_tensor(3, count)).indices[:, 0] >= 0).sum()) for count in (20, 60, 40)]
    assert conv.get_max_num_voxels().tolist() == [max(counts)]
    assert "max_num_voxels_during_training" in conv.state_dict()
    conv.load_state_dict({"weight": conv.weight, "bias": conv.bias})
    assert conv.get_max_num_voxels().tolist() == [max(counts)]
    assert spconv.SubMConv3d(3, 4, 3).get_max_num_voxels() is None


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(count: int = 20_000, channels: int = 3, dtype: torch.dtype = torch.float32) -> SparseConvTensor:
    shape = (40, 60, 80)
    torch.manual_seed(0)
    features = torch.randn(count, channels, device="cuda", dtype=dtype, requires_grad=True)
    return SparseConvTensor(features, random_sites(count, 2, shape).cuda(), shape, 2)


def outcome(network: nn.Module, x: SparseConvTensor) -> list[Tensor]:
    """The result, and the gradients of features and parameters."""
    y = network(x).features
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x.features, *network.parameters()], dy)]


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [None, 60_000])
def test_ten_runs_on_a_gpu_are_bit_identical(bound: int | None) -> None:
    torch.manual_seed(0)
    network, x = UNet(3, 32, bound).cuda(), on_gpu(100_000)
    first = outcome(network, x)
    for _ in range(9):
        assert all(map(torch.equal, outcome(network, x), first))


@pytest.mark.gpu
def test_a_gpu_as_the_cpu() -> None:
    torch.manual_seed(0)
    network, x = UNet().double(), on_gpu(dtype=torch.float64)
    here = SparseConvTensor(x.features.detach().cpu().requires_grad_(), x.indices.cpu(), x.spatial_shape, 2)
    expected = outcome(network, here)
    for found, each in zip(outcome(network.cuda(), x), expected, strict=True):
        torch.testing.assert_close(found.cpu(), each)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_in_submanifold_and_bounded_layers() -> None:
    network, x = UNet(3, 16, 60_000).cuda(), on_gpu(100_000)
    outcome(network, x)
    torch.cuda.synchronize()
    with no_waiting_for_gpu():
        outcome(network, x)


@pytest.mark.gpu
def test_a_bound_that_is_too_small_on_a_gpu() -> None:
    y = UNet(bound=50).cuda().eval()(on_gpu())
    with pytest.raises(ValueError, match="more outputs than num_out_act_bound 50"):
        y.check()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # in spconv
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_equals_spconv_on_a_gpu(dtype: torch.dtype) -> None:
    """The same network with the same weights in both libraries; spconv's levels have their sites in another order."""
    other = pytest.importorskip("spconv.pytorch")
    torch.manual_seed(0)
    x = on_gpu(50_000, 16, dtype)

    def network(library: Any) -> nn.Module:
        layers = [
            library.SubMConv3d(16, 32, 3, padding=1, indice_key="a"),
            library.SparseConv3d(32, 64, 3, 2, 1, indice_key="b"),
            library.SubMConv3d(64, 64, 3, indice_key="c"),
            library.SparseInverseConv3d(64, 32, 3, indice_key="b"),
            library.SubMConv3d(32, 8, 3, indice_key="a"),
            library.SparseConv3d(8, 8, (3, 1, 1), (2, 1, 1)),
            library.ToDense(),
        ]
        return library.SparseSequential(*layers).cuda().to(dtype)

    ours, theirs = network(spconv), network(other)
    theirs.load_state_dict(ours.state_dict())
    features = x.features.detach().requires_grad_()
    expected = theirs(other.SparseConvTensor(features, x.indices, x.spatial_shape, 2))
    found = ours(x)
    dy = torch.randn_like(found)
    gradients = torch.autograd.grad(found, [x.features, *ours.parameters()], dy)
    others = torch.autograd.grad(expected, [features, *theirs.parameters()], dy)
    tolerance = 2e-2 if dtype == torch.float16 else 1e-2  # spconv multiplies float32 as TF32
    for each, reference in zip((found, *gradients), (expected, *others), strict=True):
        assert (each - reference).float().norm() <= tolerance * reference.float().norm()

"""`SparseSequential` and the modules without kernels: the inputs of each module, and batch norms over sites."""

from __future__ import annotations

import importlib
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import rooftop.sparse as spconv
from rooftop.sparse import SparseConvTensor

GRID = [4, 5]
INDICES = torch.tensor([[0, 2, 1], [1, 0, 3], [1, 2, 3], [0, 0, 0]], dtype=torch.int32)


def a_tensor(rows: int = 4, channels: int = 2, padding: int = 0) -> SparseConvTensor:
    """The sites of four samples, then rows that are not sites and contain arbitrary values."""
    torch.manual_seed(0)
    features = torch.cat([torch.randn(rows, channels), torch.full((padding, channels), 1e3)])
    indices = nn.functional.pad(INDICES[:rows], (0, 0, 0, padding), value=-1)
    return SparseConvTensor(features.requires_grad_(), indices, GRID, 2, padded=padding > 0)


class Doubled(spconv.SparseModule):
    """A subclass as a user would write it."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        return x.replace_feature(2 * x.features)


def test_plain_modules_get_features_and_sparse_ones_the_tensor() -> None:
    x, linear = a_tensor(), nn.Linear(2, 3)
    y = spconv.SparseSequential(Doubled("twice"), linear, nn.ReLU(), spconv.SparseIdentity())(x)
    assert torch.equal(y.features, linear(2 * x.features).relu())
    assert y.indices is x.indices
    assert [spconv.is_spconv_module(m) for m in (Doubled(), spconv.SparseReLU(), nn.ReLU())] == [True, True, False]
    assert Doubled("twice").name == "twice"


def test_behind_a_dense_tensor_modules_are_dense() -> None:
    x, conv = a_tensor(), nn.Conv2d(2, 3, 3)
    network = spconv.SparseSequential(spconv.SparseReLU(), spconv.RemoveGrid(), spconv.ToDense(), conv, nn.Flatten())
    assert torch.equal(network(x), conv(x.dense().relu()).flatten(1))


def test_ways_to_name_modules() -> None:
    positional = spconv.SparseSequential(Doubled(), nn.ReLU())
    ordered = spconv.SparseSequential(OrderedDict(first=Doubled(), then=nn.ReLU()))
    by_keyword = spconv.SparseSequential(first=Doubled(), then=nn.ReLU())
    mixed = spconv.SparseSequential(Doubled(), then=nn.ReLU())
    for network, names in (
        (positional, ["0", "1"]),
        (ordered, ["first", "then"]),
        (by_keyword, ["first", "then"]),
        (mixed, ["0", "then"]),
    ):
        assert [name for name, _ in network.named_children()] == names
        assert len(network) == 2
        assert isinstance(network[0], Doubled)
        assert isinstance(network[-1], nn.ReLU)
    positional.add(nn.Tanh())
    positional.add(nn.Tanh(), "last")
    assert [name for name, _ in positional.named_children()] == ["0", "1", "2", "last"]
    assert torch.equal(positional(a_tensor()).features, (2 * a_tensor().features).relu().tanh().tanh())


def test_a_slice_of_modules() -> None:
    network = spconv.SparseSequential(OrderedDict(first=Doubled(), then=nn.ReLU(), last=nn.Tanh()))
    part = network[1:]
    assert isinstance(part, spconv.SparseSequential)
    assert [name for name, _ in part.named_children()] == ["then", "last"]
    assert part[0] is network.then


def test_wrong_modules() -> None:
    network = spconv.SparseSequential(a=nn.ReLU())
    with pytest.raises(ValueError, match="already has a module 'a'"):
        network.add(nn.ReLU(), "a")
    with pytest.raises(TypeError, match="takes modules, got int as '0'"):
        spconv.SparseSequential(3)
    with pytest.raises(IndexError, match="index 1 is out of range for 1 module"):
        network[1]
    lstm = spconv.SparseSequential(nn.LSTM(2, 2))
    with pytest.raises(TypeError, match="module '0', LSTM, returned tuple for the features: derive it"):
        lstm(a_tensor())


def test_sums_on_the_same_sites() -> None:
    x = a_tensor()
    y = x + Doubled()(x)
    assert torch.equal(y.features, 3 * x.features)
    assert torch.equal((x + x.features).features, 2 * x.features)
    with pytest.raises(ValueError, match=r"have different indices.*functional\.sparse_add"):
        x + SparseConvTensor(x.features, INDICES.clone(), GRID, 2)
    with pytest.raises(AttributeError, match=r"features cannot be set: use x = x\.replace_feature"):
        x.features = y.features


# ---- batch norm ------------------------------------------------------------------------------------------------------


def test_a_batch_norm_is_torch_s_over_sites() -> None:
    x, plain = a_tensor(), nn.BatchNorm1d(2)
    for sparse in (spconv.SparseBatchNorm(2), spconv.SparseSequential(nn.BatchNorm1d(2))):
        plain.load_state_dict({name.removeprefix("0."): value for name, value in sparse.state_dict().items()})
        for training in (True, False):
            assert torch.equal(sparse.train(training)(x).features, plain.train(training)(x.features))
        assert all(map(torch.equal, sparse.state_dict().values(), plain.state_dict().values()))
    assert torch.equal(spconv.SparseBatchNorm(2)(x.features), nn.BatchNorm1d(2)(x.features))
    assert spconv.SparseBatchNorm(2, momentum=None, name="norm").name == "norm"


OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_that_are_no_sites_do_not_count(options: dict[str, bool | float | None]) -> None:
    """Results, gradients and running statistics are those of the sites alone."""
    padded, alone = spconv.SparseBatchNorm(2, **options), spconv.SparseBatchNorm(2, **options)
    for training in (True, True, False):
        x, y = a_tensor(), a_tensor(padding=3)
        expected = alone.train(training)(x).features
        found = padded.train(training)(y).features[:4]
        torch.testing.assert_close(found, expected)
        dy = torch.tensor([[1.0, -1.0], [0.5, 2.0], [3.0, 1.0], [-1.0, 0.0]])
        leaves = [*padded.parameters()], [*alone.parameters()]
        gradients = torch.autograd.grad(found, [y.features, *leaves[0]], dy)
        others = torch.autograd.grad(expected, [x.features, *leaves[1]], dy)
        torch.testing.assert_close(gradients[0][:4], others[0])
        torch.testing.assert_close(gradients[0][4:], torch.zeros(3, 2))
        torch.testing.assert_close(gradients[1:], others[1:])
    for found, expected in zip(padded.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_than_two_sites_leave_the_statistics(rows: int, padding: int) -> None:
    norm = spconv.SparseBatchNorm(2)
    norm(a_tensor())
    before = [value.clone() for value in norm.buffers()]
    x = a_tensor(rows, padding=padding)
    y = norm(x)
    torch.testing.assert_close(y.features[:rows], norm.eval()(x).features[:rows])
    assert all(map(torch.equal, norm.buffers(), before))
    y.features[:rows].sum().backward()
    assert x.features.grad is not None
    assert norm.weight.grad is not None
    without = spconv.SparseBatchNorm(2, track_running_stats=False)
    torch.testing.assert_close(without(x).features[:rows], without.bias.expand(rows, 2))


def test_a_batch_norm_across_ranks_does_not_count_rows_that_are_no_sites() -> None:
    network = spconv.SparseSequential(norm=nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match=r"module 'norm', SyncBatchNorm, would include rows .* no num_out_act_bound"):
        network(a_tensor(padding=1))
    assert network.eval()(a_tensor(padding=1)).features.shape == (5, 2)


class Sevens(nn.BatchNorm1d):
    """A subclass as in networks that sum over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 7.0)


def test_a_batch_norm_with_a_forward_of_its_own_computes_by_that() -> None:
    network = spconv.SparseSequential(norm=Sevens(2))
    assert torch.equal(network(a_tensor()).features, torch.full((4, 2), 7.0))
    with pytest.raises(ValueError, match=r"module 'norm', Sevens, would include rows"):
        network(a_tensor(padding=1))


def test_hooks_of_a_batch_norm_are_called() -> None:
    seen: list[tuple[int, ...]] = []
    norm = nn.BatchNorm1d(2)
    norm.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    spconv.SparseSequential(norm)(a_tensor())
    assert seen == [(4, 2)]


def test_a_nan_in_a_row_that_is_no_site_is_in_no_gradient() -> None:
    for layer in (nn.BatchNorm1d(2), spconv.SubMConv2d(2, 3, 1)):
        x = a_tensor(padding=2)
        features = x.features.detach().clone()
        features[4:] = torch.nan
        y = spconv.SparseSequential(layer)(x.replace_feature(features.requires_grad_()))
        y.features[:4].square().sum().backward()
        assert features.grad is not None
        assert all(bool(leaf.grad.isfinite().all()) for leaf in (features, *layer.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_site_of_half_precision_without_running_statistics(dtype: torch.dtype) -> None:
    x = a_tensor(1)
    for norm in (
        spconv.SparseBatchNorm(2, track_running_stats=False),
        spconv.SparseBatchNorm(2, track_running_stats=False, affine=False),
    ):
        y = norm(x.replace_feature(x.features.to(dtype))).features
        assert torch.equal(y, torch.zeros(1, 2, dtype=dtype))
        (gradient,) = torch.autograd.grad(y.sum(), x.features)
        assert torch.equal(gradient, torch.zeros(1, 2))  # a constant, as it is with rows of padding


def test_half_precision_has_statistics_in_float32() -> None:
    x = a_tensor(padding=2)
    half = x.replace_feature(x.features.detach().half())
    norm = spconv.SparseBatchNorm(2)
    y = norm(half)
    assert y.features.dtype == torch.float16
    assert norm.running_mean.dtype == torch.float32
    torch.testing.assert_close(y.features[:4].float(), nn.BatchNorm1d(2)(x.features[:4]), rtol=2e-3, atol=2e-3)


def test_users_import_it_as_spconv_s() -> None:
    import rooftop.sparse.pytorch as users
    from rooftop.sparse.pytorch import SparseConvTensor as Imported
    from rooftop.sparse.pytorch import functional, ops

    for name in ("conv", "core", "functional", "modules", "ops", "pool", "utils"):
        assert importlib.import_module(f"rooftop.sparse.pytorch.{name}") is getattr(users, name)
    assert users.Identity is spconv.SparseIdentity
    assert Imported is SparseConvTensor
    assert users.SubMConv3d is spconv.SubMConv3d
    assert users.conv.SparseConvolution is spconv.SparseConvolution
    assert users.modules.SparseModule is spconv.SparseModule
    assert users.core.SparseConvTensor is SparseConvTensor
    assert ops.get_indice_pairs is spconv.get_indice_pairs
    assert callable(functional.sparse_add)
    assert set(spconv.__all__) <= set(users.__all__)


@pytest.mark.gpu
def test_rows_that_are_no_sites_do_not_count_on_a_gpu() -> None:
    norm = spconv.SparseBatchNorm(2).cuda()
    expected = spconv.SparseBatchNorm(2)(a_tensor(padding=3)).features
    x = a_tensor(padding=3)
    on_gpu: Tensor = norm(SparseConvTensor(x.features.cuda(), x.indices.cuda(), GRID, 2, padded=True)).features
    torch.testing.assert_close(on_gpu[:4].cpu(), expected[:4])

"""Pooling modules return what PyTorch returns on the dense grid, at the sites of the rulebook."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.sparse import SparseConvTensor, SparseInverseConv3d, SparseSequential, SubMConv3d
from rooftop.sparse.pooling import (
    SparseAvgPool,
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
    SparseMaxPool,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
    SparsePool,
)

GRIDS = {1: (40,), 2: (9, 8), 3: (6, 5, 4), 4: (4, 3, 4, 3)}
MAXIMA = [SparseMaxPool1d, SparseMaxPool2d, SparseMaxPool3d, SparseMaxPool4d]
MEANS = [SparseAvgPool1d, SparseAvgPool2d, SparseAvgPool3d]


def a_tensor(dims: int = 3, channels: int = 4, batch_size: int = 2, device: str = "cpu") -> SparseConvTensor:
    torch.manual_seed(dims)
    indices = (torch.rand(batch_size, *GRIDS[dims]) < 0.3).nonzero().int()
    indices = indices[torch.randperm(len(indices))].to(device)
    features = torch.randn(len(indices), channels, dtype=torch.float64).to(device) - 1
    return SparseConvTensor(features.requires_grad_(), indices, GRIDS[dims], batch_size)


def windows(grid: Tensor, pool: SparsePool, otherwise: float) -> Tensor:
    """From (B, C, *grid) to (B, C, *outputs, kernel volume): the values in each window of the dense grid."""
    grid = F.pad(grid, [side for p in reversed(pool.padding) for side in (p, p)], value=otherwise)
    for dim, (size, step, spread) in enumerate(zip(pool.kernel_size, pool.stride, pool.dilation, strict=True), 2):
        grid = grid.unfold(dim, spread * (size - 1) + 1, step)[..., ::spread]
    return grid.flatten(2 + pool.ndim)


def assert_dense(pool: SparsePool, x: SparseConvTensor) -> None:
    """The result and the gradient; numbers are all different."""
    y = pool(x)
    active = x.replace_feature(torch.ones_like(x.features)).dense()
    counts = windows(active, pool, 0).sum(-1)
    if pool.average:
        expected = windows(x.dense(), pool, 0).sum(-1) / counts
    else:
        expected = windows(x.dense().where(active > 0, -torch.inf), pool, -torch.inf).amax(-1)
    sites = (counts[:, 0] > 0).nonzero()
    assert y.spatial_shape == list(counts.shape[2:])
    assert y.indices.tolist() == (x.indices if pool.subm else sites).tolist()
    expected = expected.movedim(1, -1)[tuple(y.indices.long().t())]
    torch.testing.assert_close(y.features, expected, rtol=1e-12, atol=1e-12)
    slopes = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    gradients = [torch.autograd.grad(each, x.features, slopes)[0] for each in (y.features, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [*MAXIMA, *MEANS])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 1, "dilation": 2},
        {"kernel_size": 3, "subm": True},
    ],
    ids=str,
)
def test_as_on_the_dense_grid(kind: type[Any], options: dict[str, Any]) -> None:
    pool = kind(**options)
    if pool.subm:
        pool.padding = tuple(size // 2 for size in pool.kernel_size)  # the windows' places
    assert_dense(pool, a_tensor(pool.ndim))


def test_sizes_of_each_dimension() -> None:
    pool = SparseMaxPool3d([3, 2, 1], (2, 2, 1), padding=[1, 0, 0], dilation=[1, 2, 1])
    assert (pool.kernel_size, pool.stride, pool.padding, pool.dilation) == ((3, 2, 1), (2, 2, 1), (1, 0, 0), (1, 2, 1))
    assert_dense(pool, a_tensor())


def test_strides_are_those_of_spconv_where_none_is_given() -> None:
    """spconv's default is the window's size, or 1 for layers that keep the sites. Classes whose window covers whole
    dimensions are left out."""
    assert SparseMaxPool3d([3, 2, 1]).stride == (3, 2, 1)
    assert SparseAvgPool2d(3).stride == (3, 3)
    assert SparseMaxPool(3).stride == SparseAvgPool(3).stride == (1, 1, 1)
    assert SparseMaxPool(3, 2, None).stride == (2, 2, 2)
    for dimensions in (0, 5):
        with pytest.raises(ValueError, match=f"ndim must be from 1 to 4, got {dimensions}"):
            SparseMaxPool(dimensions)
    assert SparseMaxPool3d(3, subm=True).stride == (1, 1, 1)


def test_arguments_in_the_order_of_spconv() -> None:
    pool = SparseMaxPool2d(2, 2, 1, 1, "key", None, True, "name")
    assert (pool.padding, pool.indice_key, pool.record_voxel_count, pool.name) == ((1, 1), "key", True, "name")
    pool = SparseAvgPool(2, 2, 2, 1, 1, "key", False, None, True, "name")
    assert (pool.padding, pool.indice_key, pool.record_voxel_count, pool.name) == ((1, 1), "key", True, "name")
    assert str(pool) == "SparseAvgPool(kernel_size=(2, 2), stride=(2, 2), padding=(1, 1), indice_key=key)"


def test_an_inverse_convolution_leads_back() -> None:
    x = a_tensor()
    network = SparseSequential(
        SubMConv3d(4, 8, 3, indice_key="first"),
        SparseMaxPool3d(2, indice_key="down"),
        nn.ReLU(),
        SparseInverseConv3d(8, 4, 2, indice_key="down"),
        SparseMaxPool3d(3, subm=True, indice_key="first"),
    ).double()
    y = network(x)
    assert y.indices is x.indices
    assert y.spatial_shape == x.spatial_shape
    torch.autograd.grad(y.features.sum(), x.features)
    again = SparseMaxPool3d(2, indice_key="down")
    with pytest.raises(ValueError, match="indice_key 'down' has the rulebook of another layer"):
        again(again(x))


def test_a_fixed_number_of_outputs() -> None:
    x = a_tensor()
    plain = SparseMaxPool3d(2)(x)
    many = len(plain.indices) + 5
    for pool in (SparseMaxPool3d, SparseAvgPool3d):
        y = pool(2, num_out_act_bound=many)(x)
        assert y.features.shape == (many, 4)
        assert not y.features[-5:].any()
        assert (y.indices[-5:] == -1).all()
        torch.testing.assert_close(y.features[:-5], pool(2)(x).features)
        for whole in (SparseGlobalMaxPool(), SparseGlobalAvgPool()):
            torch.testing.assert_close(whole(y), whole(pool(2)(x)))


def test_the_most_outputs_are_recorded_and_saved() -> None:
    pool, plain = SparseMaxPool3d(2, record_voxel_count=True), SparseMaxPool3d(2)
    assert plain.get_max_num_voxels() is None
    for batch_size in (2, 3, 1):
        pool(a_tensor(batch_size=batch_size))
    most = len(plain(a_tensor(batch_size=3)).indices)
    assert pool.state_dict()["max_num_voxels_during_training"].tolist() == [most]
    count = pickle.loads(pickle.dumps(pool)).get_max_num_voxels()
    assert (count.tolist(), count.dtype) == ([most], torch.int32)


def test_batch_elements_as_a_whole() -> None:
    x = a_tensor(batch_size=4)
    x.indices[x.indices[:, 0] == 2, 0] = 3  # no site in one batch element
    for pool in (SparseGlobalMaxPool(), SparseGlobalAvgPool()):
        rows = [x.features[x.indices[:, 0] == element] for element in (0, 1, 3)]
        found = [r.amax(0) if isinstance(pool, SparseGlobalMaxPool) else r.mean(0) for r in rows]
        torch.testing.assert_close(pool(x), torch.stack([*found[:2], torch.zeros_like(found[0]), found[2]]))
    head = SparseSequential(SparseGlobalAvgPool(), nn.Linear(4, 2).double())
    assert head(x).shape == (4, 2)


@pytest.mark.parametrize("pool", [SparseMaxPool3d(2), SparseAvgPool3d(3, 2, 1), SparseMaxPool3d(3, subm=True)])
def test_no_sites(pool: SparsePool) -> None:
    x = SparseConvTensor(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.int32), (6, 5, 4), 2)
    y = pool(x)
    assert (y.features.shape, y.indices.shape) == ((0, 4), (0, 4))
    for whole in (SparseGlobalMaxPool(), SparseGlobalAvgPool()):
        assert torch.equal(whole(x), torch.zeros(2, 4))


@pytest.mark.parametrize("pool", [SparseMaxPool3d(2), SparseAvgPool3d(2), SparseGlobalMaxPool(), SparseGlobalAvgPool()])
def test_what_is_no_such_tensor(pool: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(pool).__name__} takes a rooftop.sparse.SparseConvTensor, got Tensor"):
        pool(torch.zeros(3, 4))
    if isinstance(pool, SparsePool):
        with pytest.raises(ValueError, match="expects grids of 3 dimensions, got SparseConvTensor"):
            pool(a_tensor(2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel_size": 0}, ValueError, "kernel_size must be an integer of at least 1, or 3 such integers, got 0"),
        ({"kernel_size": [2, 2]}, ValueError, "kernel_size must be an integer of at least 1, or 3 such integers"),
        ({"kernel_size": 2, "stride": 0}, ValueError, "stride must be"),
        ({"kernel_size": 2, "padding": -1}, ValueError, "padding must be"),
        ({"kernel_size": 2, "dilation": 0}, ValueError, "dilation must be"),
        ({"kernel_size": 2, "subm": True}, ValueError, r"kernel_size must be odd, got \(2, 2, 2\)"),
        ({"kernel_size": 3, "stride": 2, "subm": True}, ValueError, r"stride must be 1, got \(2, 2, 2\)"),
        ({"kernel_size": 2.5}, TypeError, r"kernel_size must be an integer .*, got 2\.5"),
        ({"kernel_size": 2, "num_out_act_bound": -1}, ValueError, "num_out_act_bound must be at least 0"),
        ({"kernel_size": 2, "algo": "fast"}, TypeError, "algo must be a rooftop.sparse.ConvAlgo or None, got 'fast'"),
    ],
)
def test_sizes_that_there_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for kind in (SparseMaxPool3d, SparseAvgPool3d):
        with pytest.raises(error, match=message):
            kind(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*MAXIMA, *MEANS])
def test_a_gpu_gives_the_same(kind: type[Any]) -> None:
    for options in ({"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 3, "subm": True}):
        pool = kind(**options)
        for dtype in (torch.float32, torch.float16):
            found = []
            for device in ("cpu", "cuda"):
                x = a_tensor(pool.ndim, device=device)
                x = x.replace_feature(x.features.detach().to(dtype).requires_grad_())
                y = pool(x)
                slopes = torch.linspace(-1, 1, y.features.numel()).to(dtype).view_as(y.features.cpu()).to(device)
                found.append([y.indices, y.features, torch.autograd.grad(y.features, x.features, slopes)[0]])
            torch.testing.assert_close([t.cpu() for t in found[1]], found[0])

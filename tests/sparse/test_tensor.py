"""`SparseConvTensor`: its contents, conversion to dense and back, merged sites, and refused arguments."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftop import sparse
from rooftop.sparse import SparseConvTensor, build_rulebook, geometry

INDICES = torch.tensor([[0, 2, 1], [1, 0, 3], [1, 2, 3]], dtype=torch.int32)
GRID = [3, 4]


def a_tensor(channels: int = 2, dtype: torch.dtype = torch.float32, indices: Tensor = INDICES) -> SparseConvTensor:
    features = torch.arange(1, len(indices) * channels + 1, dtype=dtype).view(-1, channels)
    return SparseConvTensor(features, indices, GRID, 3)


def test_it_has_what_spconv_s_has() -> None:
    x = a_tensor()
    assert x.features.shape == (3, 2)
    assert x.indices is INDICES
    assert (x.spatial_shape, x.batch_size, x.spatial_size) == ([3, 4], 3, 12)
    assert x.sparity == pytest.approx(3 / 36)
    assert x.indice_dict == {}
    assert repr(x) == "SparseConvTensor(3 sites, 2 channels, grid 3 x 4, batch of 3)"


def test_other_features_on_the_same_sites_share_the_rulebooks() -> None:
    x = a_tensor()
    y = x.replace_feature(x.features.sum(1, keepdim=True))
    rulebook = build_rulebook(x.indices, geometry(3, GRID, 3, subm=True))
    y.indice_dict["first"] = rulebook
    assert y.features.shape == (3, 1)
    assert y.indices is x.indices
    assert x.find_indice_pair("first") is rulebook
    assert x.find_indice_pair("second") is None
    assert x.find_indice_pair(None) is None
    assert a_tensor().indice_dict == {}


@pytest.mark.parametrize("grid", [(5,), (3, 4), (2, 3, 4), (2, 3, 2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_to_dense_and_back(grid: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    full = torch.randint(1, 9, (2, *grid, 3)).to(dtype) * (torch.rand(2, *grid, 1) < 0.4)
    x = SparseConvTensor.from_dense(full)
    assert x.features.dtype == dtype
    assert x.indices.dtype == torch.int32
    assert 0 < len(x.indices) == (full != 0).any(-1).sum()
    assert torch.equal(x.dense(channels_first=False), full)
    assert torch.equal(x.dense(), full.movedim(-1, 1))
    assert x.dense().is_contiguous()


def test_dense_puts_each_site_where_it_is() -> None:
    x = a_tensor()
    dense = x.dense()
    assert dense.shape == (3, 2, 3, 4)
    assert dense.count_nonzero() == x.features.numel()
    for (b, row, column), features in zip(INDICES.tolist(), x.features, strict=True):
        assert torch.equal(dense[b, :, row, column], features)


def test_rows_of_padding_are_in_no_cell() -> None:
    padded = torch.nn.functional.pad(INDICES, (0, 0, 0, 2), value=-1)
    assert torch.equal(a_tensor(indices=padded).dense(), a_tensor().dense())


def test_dense_and_coalesce_are_differentiable() -> None:
    features = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    twice = torch.tensor([[0, 2, 1], [1, 0, 3], [0, 2, 1]])

    def dense(features: Tensor) -> Tensor:
        return SparseConvTensor(features, INDICES, GRID, 3).dense()

    def merged(features: Tensor) -> Tensor:
        return SparseConvTensor(features, twice, GRID, 3).coalesce("mean").dense()

    def from_dense(full: Tensor) -> Tensor:
        return SparseConvTensor.from_dense(full).features

    assert torch.autograd.gradcheck(dense, features)
    assert torch.autograd.gradcheck(merged, features)
    assert torch.autograd.gradcheck(from_dense, torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("sum", [3.0, 12.0, 6.0]), ("mean", [3.0, 4.0, 6.0]), ("max", [3.0, 5.0, 6.0]), ("min", [3.0, 3.0, 6.0])],
)
def test_coalesce_merges_the_rows_of_a_site(reduce: str, expected: list[float]) -> None:
    indices = torch.tensor([[1, 0, 3], [0, 0, 1], [1, 0, 3], [-1, -1, -1], [1, 0, 3], [1, 2, 0]], dtype=torch.int32)
    features = torch.tensor([[3.0], [3.0], [4.0], [9.0], [5.0], [6.0]])
    merged = SparseConvTensor(features, indices, GRID, 3).coalesce(reduce)
    assert merged.indices.tolist() == [[0, 0, 1], [1, 0, 3], [1, 2, 0]]
    assert merged.indices.dtype == torch.int32
    assert merged.features.squeeze(1).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_coalesce_adds_up_in_float32(dtype: torch.dtype) -> None:
    many = SparseConvTensor(torch.ones(5000, 1, dtype=dtype), torch.zeros(5000, 2, dtype=torch.int32), [1], 1)
    assert many.coalesce("mean").features.tolist() == [[1.0]]
    assert many.coalesce("sum").features.tolist() == [[torch.tensor(5000.0).to(dtype).item()]]


def test_what_networks_for_spconv_name() -> None:
    x = a_tensor()
    again = SparseConvTensor(x.features, x.indices, GRID, 3, x.grid, x.voxel_num, x.indice_dict)
    assert again.indice_dict is x.indice_dict
    copied = x.shadow_copy()
    assert copied is not x
    assert copied.features is x.features
    assert torch.equal(x.minus().features, -x.features)
    some = x.select_by_index(torch.tensor([2, 0]))
    assert torch.equal(some.features, x.features[[2, 0]])
    assert torch.equal(some.indices, x.indices[[2, 0]])
    x.indice_dict["down"] = "a rulebook of all sites"
    assert x.select_by_index(torch.tensor([True, False, True])).indice_dict == {}
    assert torch.equal((x.features + x).features, 2 * x.features)


def test_sizes_of_any_kind_of_whole_number() -> None:
    features = torch.zeros(3, 2)
    for shape in (np.asarray(GRID), np.asarray(GRID, float), torch.tensor(GRID), torch.Size(GRID), tuple(GRID)):
        assert SparseConvTensor(features, INDICES, shape, 3).spatial_shape == GRID
    for three in (np.int64(3), torch.tensor(3), 3.0):
        found = SparseConvTensor(features, INDICES, GRID, three).batch_size
        assert (found, type(found)) == (3, int)


def test_empty() -> None:
    x = SparseConvTensor(torch.empty(0, 5), torch.empty(0, 4, dtype=torch.int64), [2, 3, 4], 2)
    assert x.sparity == 0
    assert torch.equal(x.dense(), torch.zeros(2, 5, 2, 3, 4))
    assert x.coalesce().features.shape == (0, 5)
    assert SparseConvTensor.from_dense(torch.zeros(2, 3, 4, 6)).features.shape == (0, 6)


def test_it_pickles_with_its_rulebooks() -> None:
    x = a_tensor()
    x.indice_dict["down"] = build_rulebook(x.indices, geometry(3, GRID, 3, 2, 1))
    y = pickle.loads(pickle.dumps(x))
    assert torch.equal(y.dense(), x.dense())
    assert torch.equal(y.indice_dict["down"].neighbours, x.indice_dict["down"].neighbours)
    assert y.spatial_shape == GRID


def test_sites_out_of_range() -> None:
    for wrong in ([0, 3, 0], [0, 0, -1], [3, 0, 0]):
        with pytest.raises(ValueError, match=r"row 1 of indices is .*at least 0 and below \(3, 3, 4\)"):
            a_tensor(indices=torch.tensor([[0, 0, 0], wrong]))


def test_a_site_that_is_there_twice() -> None:
    x = a_tensor(indices=torch.tensor([[0, 1, 1], [0, 2, 2], [0, 1, 1]]))
    with pytest.raises(ValueError, match=r"rows 0 and 2 of indices are the same site \[0, 1, 1\].*coalesce\(\) merges"):
        x.dense()
    assert x.coalesce().dense().count_nonzero() == 4


def test_which_layers_find_repeated_sites() -> None:
    """Those that build a rulebook, as docs/sparse-layers.md says."""
    x = SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, 1], [0, 1]]), [4], 1)
    for layer in (
        *(sparse.SubMConv1d(1, 1, 3), sparse.SparseConv1d(1, 1, 2), sparse.SparseConvTranspose1d(1, 1, 2)),
        *(sparse.SparseConv1d(1, 1, 1, stride=2), sparse.SparseConv1d(1, 1, 1, padding=1)),
        *(sparse.SparseConv1d(1, 1, 1, num_out_act_bound=2), sparse.SparseMaxPool1d(1), sparse.SparseAvgPool1d(2)),
        sparse.ToDense(),
    ):
        with pytest.raises(ValueError, match="rows 0 and 1 of indices are the same site"):
            layer(x)
    for layer in (
        *(sparse.SubMConv1d(1, 1, 1), sparse.SparseConv1d(1, 1, 1), sparse.SparseConvTranspose1d(1, 1, 1)),
        *(sparse.SparseBatchNorm(1), sparse.SparseReLU()),
    ):
        assert len(layer(x).indices) == 2
    assert sparse.SparseGlobalAvgPool()(x).tolist() == [[1.0]]
    assert sparse.functional.sparse_add(x, x).features.tolist() == [[4.0]]


def test_rows_of_padding_do_not_count_as_sites() -> None:
    indices = torch.tensor([[0, 1], [-1, -1], [-1, -1]])
    x = SparseConvTensor(torch.ones(3, 1), indices, [4], 1, padded=True)
    assert x.sparity == 0.25
    assert repr(x) == "SparseConvTensor(3 rows, some of them padding, 1 channels, grid 4, batch of 1)"


def test_grids_that_no_memory_can_hold() -> None:
    site = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=r"dense\(\): a tensor of \(1, 4611686018427387904, 1\) needs .* 2\^63"):
        SparseConvTensor(torch.ones(1, 1), site, [2**62], 1).dense()
    with pytest.raises(MemoryError, match=r"\(1, 288230376151711744, 1\) needs 1,152,.* bytes, but the host has"):
        SparseConvTensor(torch.ones(1, 1), site, [2**58], 1).dense()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"features": torch.zeros(2, 2)}, ValueError, r"for each of the 3 rows of indices, got \(2, 2\)"),
    ({"features": torch.zeros(3)}, ValueError, r"features must be \(N, C\).*got \(3,\)"),
    ({"features": [[1.0]] * 3}, TypeError, "features must be a tensor, got list"),
    ({"features": torch.zeros(3, 2, device="meta")}, ValueError, "features are on meta, indices on cpu"),
    ({"indices": INDICES.float()}, TypeError, r"torch\.int32 or torch\.int64, got torch\.float32"),
    ({"spatial_shape": [3, 4, 5]}, ValueError, r"indices must be \(N, 4\).*got \(3, 3\)"),
    ({"spatial_shape": [0, 4]}, ValueError, "spatial_shape must be at least 1"),
    ({"spatial_shape": [3.7, 4]}, TypeError, r"spatial_shape must be an integer in each dimension, got 3\.7"),
    ({"spatial_shape": "34"}, TypeError, "spatial_shape must be an integer in each dimension, got '3'"),
    ({"spatial_shape": [2**31, 2**31]}, ValueError, r"times batch_size 3 is 2\^63 cells or more"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
    ({"batch_size": 2.5}, TypeError, r"batch_size must be an integer, got 2\.5"),
    ({"batch_size": None}, TypeError, "batch_size must be an integer, got None"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    right: dict[str, Any] = {"features": torch.zeros(3, 2), "indices": INDICES, "spatial_shape": GRID, "batch_size": 3}
    with pytest.raises(error, match=message):
        SparseConvTensor(**{**right, **wrong})


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match=r"for each of the 3 rows of indices, got \(4, 2\)"):
        a_tensor().replace_feature(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="one of sum, mean, max, min, got 'median'"):
        a_tensor().coalesce("median")
    with pytest.raises(TypeError, match=r"needs floating-point features, got torch\.int64: convert with"):
        a_tensor().replace_feature(torch.ones(3, 1, dtype=torch.int64)).coalesce()
    with pytest.raises(ValueError, match=r"\(batch, 1 to 4 dimensions, channels\), got \(3, 4\)"):
        SparseConvTensor.from_dense(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"\(1, 2147483649\) exceeds 2\^31, the range of int32 indices: split"):
        SparseConvTensor.from_dense(torch.zeros(1, 1, 1).expand(1, 2**31 + 1, 1))


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = torch.randint(0, 8, (5000, 4), generator=torch.Generator().manual_seed(0))
    features = torch.randn(5000, 16, dtype=torch.float64)
    merged = SparseConvTensor(features, indices, [8] * 3, 8).coalesce()
    on_gpu = SparseConvTensor(features.cuda(), indices.cuda(), [8] * 3, 8).coalesce()
    assert torch.equal(on_gpu.indices.cpu(), merged.indices)
    torch.testing.assert_close(on_gpu.dense().cpu(), merged.dense())
    outside = SparseConvTensor(features[:2].cuda(), torch.tensor([[0, 1, 1], [0, 9, 9]]).cuda(), [4, 4], 1)
    assert outside.dense().count_nonzero() == 16  # nothing is written outside of the grid
    monkeypatch.setenv("ROOFTOP_CHECK", "1")
    with pytest.raises(ValueError, match="row 1 of indices"):
        SparseConvTensor(outside.features, outside.indices, [4, 4], 1)

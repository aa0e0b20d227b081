"""Sparse convolutions of plain tensors are those of the modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rooftop.sparse as spconv
from rooftop.sparse import SparseConvTensor, functional

GRID = (5, 6)


def a_tensor(seed: int = 0) -> SparseConvTensor:
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randperm(60, generator=generator)[:20]
    indices = torch.stack(torch.unravel_index(cells, (2, *GRID)), 1).int()
    features = torch.randn(20, 4, dtype=torch.float64, generator=generator)
    return SparseConvTensor(features.requires_grad_(), indices, GRID, 2)


@pytest.mark.parametrize("bound", [None, 50])
def test_functions_are_what_the_modules_compute(bound: int | None) -> None:
    x, on_grid = a_tensor(), {"spatial_shape": GRID, "batch_size": 2}
    subm = spconv.SubMConv2d(4, 6, 3, dilation=2, groups=2, dtype=torch.float64)
    y = functional.subm_conv(x.features, x.indices, subm.weight, subm.bias, **on_grid, dilation=2, groups=2)
    assert torch.equal(y, subm(x).features)
    steps: dict[str, Any] = {"stride": 2, "padding": 1, "num_out_act_bound": bound}
    for function, kind, more in (
        (functional.strided_conv, spconv.SparseConv2d, {}),
        (functional.transposed_conv, spconv.SparseConvTranspose2d, {"output_padding": 1}),
    ):
        conv = kind(4, 6, 3, **{**steps, "num_out_act_bound": bound and 4 * bound}, **more, dtype=torch.float64)
        options = {**steps, "num_out_act_bound": bound and 4 * bound}
        features, indices, shape = function(x.features, x.indices, conv.weight, conv.bias, **on_grid, **options, **more)
        expected = conv(x)
        assert torch.equal(features, expected.features)
        assert torch.equal(indices, expected.indices)
        assert list(shape) == expected.spatial_shape


def test_functions_of_pairs_are_what_the_modules_compute() -> None:
    x, down = a_tensor(), spconv.SparseConv2d(4, 6, 3, 2, 1, indice_key="down", dtype=torch.float64)
    up = spconv.SparseInverseConv2d(6, 4, 3, "down", dtype=torch.float64)
    subm = spconv.SubMConv2d(4, 6, 3, dtype=torch.float64)
    out, *pairs = spconv.get_indice_pairs(x.indices, 2, GRID, 3, 2, 1, 1, 0, False, False)
    _, *within = spconv.get_indice_pairs(x.indices, 2, GRID, 3, 1, 1, 1, 0, True, False)
    middle = functional.indice_conv(x.features, down.weight, *pairs, len(out), down.bias)
    cases = [
        (middle, down(x).features, down.weight),
        (functional.indice_inverse_conv(middle, up.weight, *pairs, 20, up.bias), up(down(x)).features, up.weight),
        (functional.indice_subm_conv(x.features, subm.weight, *within, 20, subm.bias), subm(x).features, subm.weight),
    ]
    for found, expected, weight in cases:
        torch.testing.assert_close(found, expected)
        for each, other in zip(*(gradients(y, x.features, weight) for y in (found, expected)), strict=True):
            torch.testing.assert_close(each, other)
    with pytest.raises(ValueError, match="num_activate_out must be 20, got 19"):
        functional.indice_subm_conv(x.features, subm.weight, *within, 19)


def gradients(y: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(0), retain_graph=True)


def test_features_of_other_rows_than_the_rulebook() -> None:
    indices = torch.tensor([[0, 0], [0, 2]], dtype=torch.int32)
    for rows in (1, 3):
        with pytest.raises(ValueError, match=rf"one row for each of the rulebook's 2 inputs, got \({rows}, 1\)"):
            functional.subm_conv(torch.ones(rows, 1), indices, torch.ones(1, 3, 1), spatial_shape=[3], batch_size=1)


def test_sums_of_different_sites() -> None:
    x, y = a_tensor(), a_tensor(1)
    total = functional.sparse_add(x, y, x)
    torch.testing.assert_close(total.dense(), 2 * x.dense() + y.dense())
    assert 20 < len(total.indices) < 40
    with pytest.raises(TypeError, match=r"rooftop\.sparse\.SparseConvTensors, got Tensor"):
        functional.sparse_add(x, x.features)
    for wrong, message in (
        ((), "at least one tensor"),
        ((x, x.replace_feature(x.features[:, :3])), "the same number of channels"),
        ((x, SparseConvTensor(x.features, x.indices, (6, 6), 2)), "the same grid and batch size, got .*5 x 6.*6 x 6"),
    ):
        with pytest.raises(ValueError, match=message):
            functional.sparse_add(*wrong)

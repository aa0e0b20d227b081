"""Layers of one geometry share a rulebook, whether their geometries are the same object or equal ones."""

from __future__ import annotations

import pytest
import torch

from rooftop.launch import count_launches
from rooftop.sparse import SparseConvTensor, SubMConv3d, rulebook_cache

pytest.importorskip("warp")


def a_tensor() -> SparseConvTensor:
    sites = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 2, 1, 2]], dtype=torch.int32)
    return SparseConvTensor(torch.randn(3, 4), sites, [4, 4, 4], 1)


@pytest.mark.parametrize("forgotten", [False, True])
def test_equal_geometries_share_a_rulebook(forgotten: bool) -> None:
    y = SubMConv3d(4, 4, 3, indice_key="a")(a_tensor())
    if forgotten:
        rulebook_cache._remembered.cache_clear()
    with count_launches() as launches:
        z = SubMConv3d(4, 4, 3, indice_key="a")(y)
    assert launches == {}
    assert z.indice_dict["a"] is y.indice_dict["a"]


def test_a_geometry_that_is_remembered_is_not_compared_size_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    y = SubMConv3d(4, 4, 3, indice_key="a")(a_tensor())
    compared: list[object] = []
    monkeypatch.setattr(rulebook_cache, "_same", lambda *shapes: compared.append(shapes) or True)
    SubMConv3d(4, 4, 3, indice_key="a")(y)
    assert compared == []


@pytest.mark.parametrize("dilation", [1, 2])
def test_another_geometry_is_refused(dilation: int) -> None:
    y = SubMConv3d(4, 4, 3, dilation=dilation, indice_key="a")(a_tensor())
    with pytest.raises(ValueError, match="has the rulebook of another layer"):
        SubMConv3d(4, 4, 3, dilation=3 - dilation, indice_key="a")(y)

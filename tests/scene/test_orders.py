"""The order of faces along Morton's curve."""

from __future__ import annotations

import numpy as np
import pytest

from rooftop.scene.building import orders
from rooftop.scene.building.orders import BITS, morton_codes, ordering
from rooftop.scene.building.workers import Workers, shared


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("spread", ["even", "lonely", "one place"])
def test_faces_are_sorted_by_the_codes_of_their_first_corners(
    spread: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faces with equal codes keep their order, and the number of pieces does not matter."""
    monkeypatch.setattr(orders, "CHUNK", 300)
    random = np.random.default_rng(0)
    points = random.integers(0, 1 << 12, (2000, 3)).astype(np.int32)
    if spread == "lonely":
        points[-1] = 1 << 24  # one distant point, so that all other faces are in one part of the curve
    if spread == "one place":
        points[:] = 7
    faces = random.integers(0, 2000, (5000, 3)).astype(np.uint32)
    ordered = shared(faces.shape, np.uint32)
    *before, (end, scratch) = ordering(points, faces, ordered)
    assert len(before[-1][1]) > 10
    Workers(workers).run(end, scratch, before=before)
    assert not any(each.any() for each in scratch)
    codes = morton_codes(points)[faces[:, 0]] >> np.uint64(3 * BITS - 30)
    assert (ordered == faces[np.argsort(codes, kind="stable")]).all()
    assert len(np.unique(codes)) < len(codes)


def test_there_are_never_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "CHUNK", 10)
    faces = np.zeros((5000, 3), np.uint32)
    assert len(ordering(np.zeros((1, 3), np.int32), faces, faces)[-2][1]) <= orders.MOST_PIECES

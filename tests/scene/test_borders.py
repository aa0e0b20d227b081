"""Facts about a mesh that depend on several batches of triangles."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from rooftop.scene.building.borders import components


@pytest.mark.parametrize("pairs_of_each", [0.0, 0.4, 0.8, 2.0])
def test_parts_are_those_of_scipy_in_the_order_of_their_first_things(pairs_of_each: float) -> None:
    random = np.random.default_rng(0)
    several = 0
    for count in (0, 1, 2, 3, 17, 300, 5000):
        pairs = random.integers(0, max(count, 1), (2, int(pairs_of_each * count)))
        parts, of = components(*pairs, count)
        graph = coo_matrix((np.ones(pairs.shape[1]), pairs), (count, count)).tocsr()
        expected, of_each = connected_components(graph, directed=False) if count else (0, np.zeros(0))
        assert parts == expected
        assert (of == of_each).all()
        several += 1 < parts < count
    assert several or pairs_of_each == 0


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_long_chain_is_one_part(shuffled: bool) -> None:
    things = np.arange(20_000)
    if shuffled:
        things = np.random.default_rng(1).permutation(things)
    parts, of = components(things[:-1], things[1:], len(things))
    assert parts == 1
    assert not of.any()

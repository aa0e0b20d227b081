"""Clusters that grow triangle by triangle: their laws, for meshes of any shape."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rooftop.scene import layouts
from rooftop.scene.building import growing
from rooftop.scene.building.growing import grown
from rooftop.scene.building.ragged import numbered_by_row

LEAST = 96


def square(side: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """A flat grid of 2 side^2 triangles."""
    x, y = np.meshgrid(np.arange(side + 1), np.arange(side + 1))
    points = np.stack([x.ravel(), y.ravel(), np.zeros(x.size)], 1).astype(np.float32)
    corner = (np.arange(side)[:, None] * (side + 1) + np.arange(side)).ravel()
    below = corner + side + 1
    corners = np.concatenate([np.stack([corner, corner + 1, below], 1), np.stack([corner + 1, below + 1, below], 1)])
    return corners.astype(np.uint32), points


def soup(count: int, random: np.random.Generator) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Triangles of random vertices, some of which no triangle uses."""
    points = random.normal(size=(count + 3, 3)).astype(np.float32)
    corners = np.array([random.permutation(count + 3)[:3] for _ in range(count)], np.uint32).reshape(-1, 3)
    return corners, points


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.booleans(), st.integers(0, 700)), min_size=1, max_size=4))
def test_every_triangle_is_in_one_cluster_of_its_piece(seed: int, kinds: list[tuple[bool, int]]) -> None:
    random = np.random.default_rng(seed)
    pieces = [square(round((size / 2) ** 0.5)) if is_square else soup(size, random) for is_square, size in kinds]
    corners, points = (np.concatenate([each[part] for each in pieces]) for part in range(2))
    starts, firsts = (np.cumsum([0, *(len(each[part]) for each in pieces)]) for part in range(2))
    splits = random.choice([0.0, 2.0], len(pieces))
    piece, triangles, members, owned, own_corners = grown(corners, points, starts, firsts, LEAST, splits)

    assert triangles.min(initial=1) >= 1
    assert triangles.max(initial=0) <= layouts.MAX_TRIANGLES
    assert members.max(initial=0) <= layouts.MAX_VERTICES
    assert (np.diff(piece) >= 0).all()
    assert (np.bincount(piece, triangles, len(pieces)) == np.diff(starts)).all()
    first = np.cumsum([0, *members])
    ends = np.cumsum(triangles)
    for cluster, (a, b) in enumerate(zip(ends - triangles, ends, strict=True)):
        assert set(own_corners[a:b].ravel().tolist()) == set(range(members[cluster]))  # every vertex is used
        own = owned[first[cluster] : first[cluster + 1]]
        assert len(set(own.tolist())) == len(own)
    of_triangle = np.repeat(np.arange(len(triangles)), triangles)
    given_corners = corners + np.repeat(firsts[:-1], np.diff(starts))[:, None]
    found = owned[own_corners + first[of_triangle][:, None]]
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, given_corners.tolist()))


def test_clusters_of_a_surface_are_full_and_round() -> None:
    corners, points = square(90)
    count = len(corners)
    _, triangles, members, _, _ = grown(
        corners, points, np.array([0, count]), np.array([0, len(points)]), LEAST, np.zeros(1)
    )
    assert triangles.mean() > 0.97 * layouts.MAX_TRIANGLES
    assert members.mean() < 92  # 81 for squares of 8 x 8; 130 for strips


@pytest.mark.parametrize(("split", "sizes"), [(2.0, [98, 18]), (0.0, [116])])
def test_a_cluster_ends_where_the_next_triangle_is_far(split: float, sizes: list[int]) -> None:
    (large, near), (small, far) = square(7), square(3)
    corners, points = np.concatenate([large, small + np.uint32(len(near))]), np.concatenate([near, far + 100])
    found = grown(
        corners, points.astype(np.float32), np.array([0, len(corners)]), np.array([0, len(points)]), LEAST,
        np.array([split]),
    )  # fmt: skip
    assert found[1].tolist() == sizes


def test_the_tree_finds_the_nearest_triangle_that_is_left() -> None:
    random = np.random.default_rng(0)
    middles = np.round(random.normal(size=(500, 3)), 1)  # with equal coordinates
    emitted = random.random(500) < 0.3
    order, leaf_of, counts, bounds, axes, planes = growing._tree(middles, emitted)
    while not emitted.all():
        x, y, z = random.normal(size=3)
        best, distance = growing._nearest(middles, emitted, order, counts, bounds, axes, planes, x, y, z)
        assert not emitted[best]
        assert distance == growing._nearest_of_all(middles, emitted, x, y, z)[1]
        emitted[best] = True
        node = leaf_of[best]
        while node:
            counts[node] -= 1
            node >>= 1
    assert not counts.any()


@given(st.lists(st.lists(st.integers(0, 999), max_size=30), min_size=1, max_size=5))
def test_values_are_numbered_within_their_rows(rows: list[list[int]]) -> None:
    values = np.array([value for row in rows for value in row], np.uint32)
    starts = np.cumsum([0, *map(len, rows)])
    distinct, firsts, index = numbered_by_row(values, starts, 1000)
    assert firsts.tolist() == np.cumsum([0, *(len(set(row)) for row in rows)]).tolist()
    for number, row in enumerate(rows):
        own = distinct[firsts[number] : firsts[number + 1]].tolist()
        assert own == sorted(set(row))
        assert [own[at] for at in index[starts[number] : starts[number + 1]]] == row


def test_a_missing_compiler_is_named_with_its_remedy() -> None:
    program = "import sys; sys.modules['numba'] = None; from rooftop import scene; scene.build"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'MissingExtraError: building a scene needs Numba: pip install "rooftop[scene]"' in done.stderr

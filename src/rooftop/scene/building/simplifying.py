"""Simplify each group of clusters to about half its triangles, without a change at its border with other groups.

If several groups use a place (vertex position), the place is locked: all vertices at that place stay, unmoved. The
remaining triangles use vertices of the mesh, except in small parts that grew (see `thinning`): these parts use moved
copies of vertices. Errors are in steps of the grid.

Several methods are tried until a group shrinks:

1. with attributes; small parts inside the group become fewer and larger, if this has a smaller error (see `thinning`);
2. with the attributes of a place merged into one vertex, if seams block everything, as in a mesh in which every face
   has its own vertices;
3. by merging the vertices in each cell of a grid, which ignores topology and materials.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building import meshopt
from rooftop.scene.building.clustering import local_points, localized
from rooftop.scene.building.meshes import Mesh, Vertices
from rooftop.scene.building.normals import from_octahedral
from rooftop.scene.building.parts import Added
from rooftop.scene.building.ragged import starts_of
from rooftop.scene.building.thinning import MISSING, LooseParts, Pairs, Thinned
from rooftop.scene.building.welding import repeats, without_repetition

Ints = npt.NDArray[np.int64]
Corners = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

# meshoptimizer's error is a mean over the planes around a vertex, so single points can be farther from the given mesh
# than this error. Each cluster's largest distance from the given mesh was sampled for all levels of balls, noise,
# bumps, terrain and tori. The distance was at most 2.2 times the error for 99 of 100 clusters, below 1.3 times the
# error for half of the clusters, and 2.6 times the error for the worst cluster.
SAFETY = 2.0
# A group counts as simplified if at most this share of its triangles remains, or if the remaining triangles fit into
# one cluster.
SHRUNK = 0.85
# weight of normals: changing a unit normal by a vector of length 1 counts as much as moving a vertex by this many mean
# edge lengths
NORMAL_EDGES = 0.5
CELL_SEARCH = 10  # steps of the binary search for the cell size
# `_target` plans full clusters with this share of the 255 allowed vertices: less than 1, because triangles share fewer
# vertices after simplification
VERTICES_USED = 0.9
# weight of colours: black instead of white counts as much as moving a vertex by this many mean edge lengths
COLOR_EDGES = 0.5
# weight of uv: shifting the texture along the surface by the mean edge length counts as much as moving a vertex by this
# many mean edge lengths
UV_EDGES = 0.25


@dataclass(frozen=True)
class Simplified:
    """The triangles that remain in each group after simplification.

    Attributes:
        corners: (T, 3) corners of the triangles of all groups, group by group. A group whose number of triangles did
            not shrink enough has none.
        counts: (G,) number of remaining triangles of each group.
        errors: (G,) float64, the distance of the simplified surface from the group's surface before, in steps of the
            grid.
        added: vertices that are not in the mesh; in `corners` they have indices from V on.
    """

    corners: Corners
    counts: Ints
    errors: npt.NDArray[np.float64]
    added: Added


def simplify(mesh: Mesh, corners: Corners, counts: Ints, locked: npt.NDArray[np.bool_]) -> Simplified:
    """Simplify G groups of clusters to about half of their triangles each.

    Args:
        mesh: the mesh whose vertices the triangles use.
        corners: (T, 3) corners of the triangles of all groups, group by group.
        counts: (G,) number of triangles of each group.
        locked: (V,) whether a vertex must be neither moved nor removed.
    """
    left: list[Corners] = []
    added: list[Added] = []
    more = 0
    errors = np.zeros(len(counts))
    starts = starts_of(counts)
    found = _attempt(mesh, corners, counts, locked)
    for group, (kept, error) in enumerate(found):
        count = int(counts[group])
        own = corners[starts[group] : starts[group + 1]]
        if mesh.vertices.parts is not None:
            parts = LooseParts(mesh.vertices, own, locked)
            if len(parts) > 1:
                thinned = _thinned(mesh, own, locked, parts, kept, error)
                kept, error = thinned.corners, thinned.error
                if _shrunk(kept, count):
                    new = kept >= len(mesh.vertices.grid)
                    kept[new] += more
                    more += len(thinned.added.sources)
                    added.append(thinned.added)
        if not _shrunk(kept, count):
            merged = without_flat(mesh.vertices, mesh.vertices.merged[own])
            if (merged != own[: len(merged)]).any() or len(merged) < len(own):
                kept, error = _attempt(mesh, merged, np.array([len(merged)]), locked)[0]
            if not _shrunk(kept, count):
                kept, error = _by_cells(mesh.vertices, merged, locked)
        ok = _shrunk(kept, count)
        left.append(kept if ok else kept[:0])
        errors[group] = error
    return Simplified(
        np.concatenate(left), np.array([len(each) for each in left]), errors, Added.joined(added or [Added.none()])
    )


def _thinned(
    mesh: Mesh, corners: Corners, locked: npt.NDArray[np.bool_], parts: LooseParts, kept: Corners, error: float
) -> Thinned:
    """For a group with several loose parts, choose its simplification, or a version in which some parts are removed and
    their neighbours grow (see `thinning`), whichever has the smaller error.

    Args:
        mesh, locked: as for `simplify`.
        corners: (T, 3) corners of the group's triangles.
        parts: the group's loose parts.
        kept, error: the triangles that remain after simplification, and the error of simplification.
    """
    count = len(corners)
    missing = parts.missing(kept)
    whole = _shrunk(kept, count) and missing < MISSING
    if whole and not missing and parts.are_large(error):
        return Thinned(kept, error, Added.none())
    target = _target(count, len(np.unique(corners)))
    pairs = parts.pairs(count - target)
    if whole and error <= pairs.error:
        return parts.thinned(kept, error, Pairs.none())
    stay = parts.without(corners, pairs)
    fewer, fewer_error = stay, 0.0
    if len(stay) > target:
        fewer, fewer_error = _attempt(mesh, stay, np.array([len(stay)]), locked, np.array([target]))[0]
    if whole and error <= fewer_error:
        return parts.thinned(kept, error, Pairs.none() if missing else parts.pairs(count - target, error))
    if not parts.remain(fewer):
        fewer, fewer_error = stay, 0.0
    return parts.thinned(fewer, fewer_error, pairs)


def without_flat(vertices: Vertices, corners: Corners) -> Corners:
    """Keep only triangles whose three corners have different positions."""
    return corners[~repeats(vertices.place[corners])]


def _target(triangles: int, vertices: int) -> int:
    """Choose the number of triangles of a group to keep: half, rounded to the nearest number of full clusters, at least
    one. A full cluster has 128 triangles, or fewer if triangles share few vertices."""
    full = min(layouts.MAX_TRIANGLES, int(VERTICES_USED * layouts.MAX_VERTICES * triangles / vertices))
    return max(1, round(triangles / (2 * full))) * full


def _shrunk(kept: Corners, before: int) -> bool:
    """Whether simplification succeeded: a group with `before` triangles has at most the share SHRUNK of them left, or
    no more than fit into one cluster. `kept` are the remaining triangles."""
    if 0 < len(kept) <= SHRUNK * before:
        return True
    fits = 0 < len(kept) <= layouts.MAX_TRIANGLES
    return fits and len(np.unique(kept)) <= layouts.MAX_VERTICES


def _attempt(
    mesh: Mesh, corners: Corners, counts: Ints, locked: npt.NDArray[np.bool_], targets: Ints | None = None
) -> list[tuple[Corners, float]]:
    """Simplify each group with meshoptimizer; return the remaining triangles and the error of each group.

    Args:
        mesh, corners, counts, locked: as for `simplify`.
        targets: (G,) approximate number of triangles to keep; by default half.
    """
    vertices = mesh.vertices
    local = localized(corners, counts)
    points = local_points(vertices, local)
    attributes, weights = _attributes(mesh, local.vertices, points, local.starts, counts)
    locks = locked[local.vertices].astype(np.uint8)
    out = np.empty_like(local.corners)
    error = ctypes.c_float()
    library = meshopt.library()
    starts, firsts = starts_of(counts).tolist(), local.starts.tolist()
    found = []
    for group in range(len(counts)):
        a, b, c, d = starts[group], starts[group + 1], firsts[group], firsts[group + 1]
        target = _target(b - a, d - c) if targets is None else int(targets[group])
        count = library.meshopt_simplifyWithAttributes(
            meshopt.address(out[a:b]), meshopt.address(local.corners[a:b]), 3 * (b - a),
            meshopt.address(points[c:d]), d - c, 12,
            meshopt.address(attributes[c:d]), 4 * attributes.shape[1], meshopt.address(weights[group]),
            attributes.shape[1], meshopt.address(locks[c:d]), 3 * target, meshopt.NO_LIMIT, meshopt.ABSOLUTE,
            ctypes.addressof(error),
        )  # fmt: skip
        kept = out[a : a + count // 3]
        found.append(
            (without_flat(vertices, local.vertices[c + kept.astype(np.int64)].astype(np.uint32)), SAFETY * error.value)
        )
    return found


def _attributes(mesh: Mesh, used: Ints, points: Floats, starts: Ints, counts: Ints) -> tuple[Floats, Floats]:
    """Collect normals, colours and uv of vertices (N, A), and their weights for each group (G, A).

    meshoptimizer divides positions by the group's extent, so weights convert differences of attributes to that unit.
    """
    vertices = mesh.vertices
    columns: list[npt.NDArray[Any]] = [np.zeros((len(used), 0))]
    weights: list[npt.NDArray[Any]] = [np.zeros((len(counts), 0))]
    low, high = np.minimum.reduceat(points, starts[:-1]), np.maximum.reduceat(points, starts[:-1])
    extents = np.maximum((high - low).max(1, keepdims=True), 1.0)
    if vertices.normals is not None:
        columns.append(from_octahedral(vertices.normals[used]))
        weights.append(np.repeat(NORMAL_EDGES / np.sqrt(counts)[:, None], 3, axis=1))
    if vertices.colors is not None:
        columns.append(vertices.colors[used] / 255)
        weights.append(np.repeat(COLOR_EDGES / np.sqrt(counts)[:, None], 3, axis=1))
    if vertices.uv is not None:
        columns.append(vertices.uv[used] * mesh.uv_length)
        weights.append(np.repeat(UV_EDGES / extents, 2, axis=1))
    return _together(columns), _together(weights)


def _together(columns: list[npt.NDArray[Any]]) -> Floats:
    """Concatenate columns to a float32 array in C order, for meshoptimizer."""
    return np.ascontiguousarray(np.concatenate(columns, axis=1), np.float32)


def _by_cells(vertices: Vertices, corners: Corners, locked: npt.NDArray[np.bool_]) -> tuple[Corners, float]:
    """Merge the vertices in each grid cell into the cell's first vertex, except for locked vertices. The merge ignores
    topology.

    A binary search finds the smallest cells that leave at most `_target` triangles. The error is the largest distance
    that a vertex moves. No point of the surface moves farther than a corner of its triangle, so the error needs no
    SAFETY.
    """
    places, at = np.unique(vertices.place[corners], return_inverse=True)
    at = at.reshape(-1, 3)
    sample = np.empty(len(places), np.int64)  # one vertex for each place
    sample[at[:, ::-1]] = corners[:, ::-1]
    grid = vertices.grid[sample].astype(np.float64)
    grid -= grid.min(0)
    stays = np.flatnonzero(locked[sample])
    kept, moved = corners, np.inf
    finest, coarsest = 0.0, math.log2(max(float(grid.max()), 2.0)) + 1
    for _ in range(CELL_SEARCH):
        cell = (finest + coarsest) / 2
        number = np.unique(np.floor(grid / 2**cell), axis=0, return_inverse=True)[1].ravel()
        number[stays] = len(places) + np.arange(len(stays))  # a locked vertex has its own cell
        _, first, of = np.unique(number, return_index=True, return_inverse=True)
        target = first[of]
        mapped = target[at]
        left = ~repeats(mapped)
        if not left.any():
            coarsest = cell
            continue
        distances = grid - grid[target]
        # Corners that must stay keep their vertex. All other corners at a place get the same vertex.
        replaced = without_repetition(np.where(locked[corners], corners, sample[mapped])[left].astype(np.uint32))
        if len(replaced) <= _target(len(corners), len(places)):
            kept, moved, coarsest = replaced, float(np.sqrt(np.einsum("ij,ij->i", distances, distances).max())), cell
        else:
            finest = cell
    return kept, moved

"""Check and repair the source mesh, round it to its grid, and merge equal vertices.

Invalid input raises an error (a coordinate that is not a number, an index out of range). Harmless input is dropped and
counted (faces without area on the grid, duplicate faces, unused vertices). Non-manifold edges are kept and counted.
Vertices are rounded only here, because all levels use the vertices of this mesh. The exceptions are the new vertices of
small parts, such as leaves, that `thinning` enlarges in coarser levels: `thinning` rounds them itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.arguments import host_array
from rooftop.scene.building import meshopt
from rooftop.scene.building.normals import from_octahedral, octahedral, smooth_normals, unit_vectors
from rooftop.scene.building.welding import weld
from rooftop.scene.building.workers import ALONE, SHORT, Workers, chunks

Floats = npt.NDArray[np.float64]

STEPS_PER_EDGE = 64  # least number of grid steps in the mean edge
# least number of grid steps in the mesh's extent; a step is a quarter of a pixel if the mesh fills a picture
# 4096 pixels wide
STEPS = 1 << 14
# maximum number of grid steps along an axis; renderers compute in float32, which represents integers up to this exactly
MOST_STEPS = 1 << 24
# least number of grid steps in the shortest edge of a face that would have no area on a coarser grid; 5% of such faces
# may have fewer
STEPS_PER_SMALL_EDGE = 16
NEEDLE = 0.01  # a face may be removed if its height divided by its longest edge is less than this
UV_STEPS_PER_EDGE = 8  # least number of uv steps in the mean edge; if edges span many texels, UV_STEP requires more
UV_STEP = 2.0**-13  # largest step of uv: half a texel of a texture 4096 wide
MOST_UV_STEPS = (1 << 30) - 1  # limit of uv in steps, so that the difference of two values fits into 31 bits
# limits of a mesh's extent and of its grid's step, so that squares of lengths stay far from float32's limits
LARGEST, SMALLEST = 2.0**60, 2.0**-60
MOST_MATERIALS = 1 << layouts.MATERIAL_BITS


@dataclass(frozen=True)
class Vertices:
    """The vertices for encoding clusters. A vertex is a place (a distinct position) with attributes; along seams, a
    place has several vertices.

    Attributes:
        grid: (V, 3) int32, in steps of the grid from the origin.
        place: (V,) uint32, equal for vertices at the same place.
        normals: (V, 2) uint16, octahedral, or None.
        uv: (V, 2) int32, in steps of a separate grid, or None.
        colors: (V, 3) uint8, or None.
        materials: (V,) uint16, or None if all are 0.
        merged: (V,) uint32: the vertex that represents all vertices at this place with this material.
        parts: (V,) uint32, equal for vertices that faces connect; None if all vertices are connected.
        exponent, uv_exponent: log2 of the step of positions and of uv.
    """

    grid: npt.NDArray[np.int32]
    place: npt.NDArray[np.uint32]
    normals: npt.NDArray[np.uint16] | None
    uv: npt.NDArray[np.int32] | None
    colors: npt.NDArray[np.uint8] | None
    materials: npt.NDArray[np.uint16] | None
    merged: npt.NDArray[np.uint32]
    exponent: int
    uv_exponent: int
    parts: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class Repairs:
    """The repairs made to the mesh before the build, as counts of faces, vertices or edges.

    Attributes:
        degenerate_faces: faces with almost no area, dropped because two of their corners are at the same place of the
            grid.
        small_faces: faces with an area, dropped because two of their corners are at the same place of the grid.
        duplicate_faces: faces dropped because the same face exists already.
        unused_vertices: vertices dropped because no face uses them.
        equal_vertices: vertices merged with an equal vertex.
        non_manifold_edges: edges that more than two faces share; they are kept.
        coarser_grid: whether the grid is coarser than the edges require, because the mesh's extent allows no finer
            grid.
    """

    degenerate_faces: int = 0
    small_faces: int = 0
    duplicate_faces: int = 0
    unused_vertices: int = 0
    equal_vertices: int = 0
    non_manifold_edges: int = 0
    coarser_grid: bool = False


@dataclass(frozen=True)
class Mesh:
    """A mesh on its grid.

    Attributes:
        vertices: all vertices, including those that represent a seam's vertices at one place (see `Vertices.merged`).
        faces: (F, 3) uint32.
        origin: offset subtracted from all positions, in object units; it is a point of the grid.
        uv_length: mean length on the surface that corresponds to one step of uv, in steps of the grid.
    """

    vertices: Vertices
    faces: npt.NDArray[np.uint32]
    origin: Floats
    repairs: Repairs = field(default_factory=Repairs)
    uv_length: float = 0.0


def checked_mesh(
    positions: npt.ArrayLike,
    faces: npt.ArrayLike,
    normals: npt.ArrayLike | Literal["smooth"] | None = None,
    uv: npt.ArrayLike | None = None,
    materials: npt.ArrayLike | None = None,
    precision: float | None = None,
    colors: npt.ArrayLike | None = None,
    workers: Workers = ALONE,
) -> Mesh:
    """Check, repair and round a mesh.

    Args:
        positions: (V, 3) numbers.
        faces: (F, 3) integers.
        normals: (V, 3), or "smooth": the mean of the normals of the faces around a vertex, weighted by their angles.
        uv: (V, 2).
        materials: (F,) integers, 0 to 65535.
        precision: the largest step of the grid, in object units. By default, the step is at most 1/64 of the mean edge
            and 1/16384 of the extent. If that grid would remove faces that are not needles, the step is also at most
            1/16 of the 5th percentile of these faces' shortest edges.
        colors: (V, 3), 0 to 1, or uint8.
        workers: the processes and threads that share the work.

    Raises:
        TypeError: the dtype of an array is not numeric, or not an integer dtype where integers are needed.
        ValueError: a shape, index or number is invalid.
    """
    points = _numbers("vertices", positions, 3)
    given = triangles = _integers("faces", faces, (None, 3))
    if not len(triangles):
        raise ValueError(f"the mesh has {len(points):,} vertices but no faces; there is nothing to build")
    if triangles.min() < 0 or triangles.max() >= len(points):
        face = int(np.flatnonzero(((triangles < 0) | (triangles >= len(points))).any(1))[0])
        raise ValueError(
            f"face {face} is {triangles[face].tolist()}, but the mesh has {len(points):,} vertices "
            f"(0 to {len(points) - 1})"
        )
    if len(triangles) >= 1 << 30 or len(points) >= 1 << 31:
        raise ValueError(
            f"the mesh has {len(triangles):,} faces and {len(points):,} vertices: expected fewer than 2^30 faces and "
            "fewer than 2^31 vertices; split it into several"
        )
    used = np.zeros(len(points), bool)

    def use(rows: slice) -> None:
        used[triangles[rows]] = True

    workers.threads(use, chunks(len(triangles), SHORT))
    _refuse_non_finite("vertex", points, used, workers)

    directions = None
    if isinstance(normals, str):
        if normals != "smooth":
            raise ValueError(f"normals is {normals!r}: expected an array, 'smooth' or None")
        directions = smooth_normals(points, triangles, workers)
    elif normals is not None:
        directions = _numbers("normals", normals, 3, len(points))
        _refuse_non_finite("normal", directions, used, workers)
    texture = None
    if uv is not None:
        texture = _numbers("uv", uv, 2, len(points))
        _refuse_non_finite("uv", texture, used, workers)
    shades = None if colors is None else _colors(colors, used)
    ids = None
    if materials is not None:
        ids = _integers("materials", materials, (len(triangles),))
        if ids.min() < 0 or ids.max() >= MOST_MATERIALS:
            raise ValueError(f"materials are 0 to {MOST_MATERIALS - 1}, not {ids.min()} to {ids.max()}")

    meant = points if used.all() else points[used]
    low, high = column_bounds(meant, workers)
    exponent, coarser = _grid_exponent(points, triangles, high - low, precision)
    step = math.ldexp(1.0, exponent)
    origin = np.rint((low + (high - low) / 2) / step) * step
    grid = _rounded(points, origin, step, used, workers)

    attributes: list[npt.NDArray[np.int32]] = []
    uv_exponent = 0
    if directions is not None:
        attributes.append(_octahedral(directions, used, workers))
        directions = None
    if texture is not None:
        uv_exponent = _uv_exponent(texture, triangles, used)
        attributes.append(_rounded(texture, np.zeros(2), math.ldexp(1.0, uv_exponent), used, workers))
    if shades is not None:
        attributes.append(shades)
    if ids is not None and ids.any():
        triangles, source, of_vertex = _split_by_material(triangles, ids, len(points))
        grid, attributes = grid[source], [*(each[source] for each in attributes), of_vertex[:, None]]

    rows = np.concatenate([grid, *attributes], axis=1) if attributes else None
    welded = weld(grid, rows, triangles, workers)
    flat = welded.flat
    small = _edges_of_small(points, given[flat]) if flat.any() else np.empty(0)
    if len(small) and precision is None:
        finer = _finer_exponent(small, float((high - low).max()))
        if finer is not None and finer < exponent:
            return checked_mesh(positions, faces, normals, uv, materials, math.ldexp(1.0, finer), colors, workers)
    if flat.all():
        raise ValueError(
            f"none of the mesh's {len(flat):,} faces has an area on its grid; if these faces are intended, pass a "
            "finer precision"
        )
    repairs = Repairs(
        degenerate_faces=int(flat.sum()) - len(small),
        small_faces=len(small),
        duplicate_faces=welded.duplicate_faces,
        unused_vertices=welded.unused_vertices,
        equal_vertices=welded.equal_vertices,
        coarser_grid=coarser,
    )
    if len(welded.kept) < len(grid):  # if all vertices are used, no row moves, so none is copied
        grid, *attributes = (np.take(each, welded.kept, axis=0) for each in (grid, *attributes))
    columns = iter(attributes)
    vertices = Vertices(
        grid=grid,
        place=welded.places,
        normals=next(columns).astype(np.uint16) if normals is not None else None,
        uv=np.ascontiguousarray(next(columns)) if texture is not None else None,
        colors=next(columns).astype(np.uint8) if shades is not None else None,
        materials=last[:, 0].astype(np.uint16) if (last := next(columns, None)) is not None else None,
        merged=np.arange(len(grid), dtype=np.uint32),
        exponent=exponent,
        uv_exponent=uv_exponent,
    )
    uv_length = 0.0
    if vertices.uv is not None:
        uv_length = _mean_edge(grid, welded.faces) / (_mean_edge(vertices.uv, welded.faces) or 1.0)
    return Mesh(_with_merged(vertices), welded.faces, origin, repairs, uv_length)


def column_bounds(values: npt.NDArray[Any], workers: Workers = ALONE) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Minimum and maximum of each column of (V, K) numbers, V > 0."""

    def of(rows: slice) -> list[tuple[Any, Any]]:
        return [(column.min(), column.max()) for column in values[rows].T]

    found = np.array(workers.threads(of, chunks(len(values), SHORT)), values.dtype)  # (chunks, K, 2)
    return found[..., 0].min(0), found[..., 1].max(0)


def _rounded(
    values: Floats, origin: Floats, step: float, used: npt.NDArray[np.bool_], workers: Workers
) -> npt.NDArray[np.int32]:
    """Convert values (V, K) to their distances from the origin in steps, rounded to integers; unused vertices become
    0."""
    found = np.zeros(values.shape, np.int32)

    def round_to(rows: slice) -> None:
        steps = (values[rows] - origin) / step
        np.rint(steps, out=found[rows], casting="unsafe", where=used[rows, None])

    workers.threads(round_to, chunks(len(values), SHORT))
    return found


def _octahedral(directions: Floats, used: npt.NDArray[np.bool_], workers: Workers) -> npt.NDArray[np.int32]:
    """Encode directions of any length as points (V, 2) on an unfolded octahedron. Directions of unused vertices, which
    may be NaN, count as (1, 1, 1)."""
    found = np.empty((len(directions), 2), np.int32)

    def turn(rows: slice) -> None:
        found[rows] = octahedral(unit_vectors(np.where(used[rows, None], directions[rows], 1.0)))

    workers.threads(turn, chunks(len(directions), SHORT))
    return found


def _numbers(name: str, values: npt.ArrayLike, width: int, count: int | None = None) -> Floats:
    array = host_array(values)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be numbers, not {array.dtype}")
    if array.ndim != 2 or array.shape[1] != width or count not in (None, len(array)):
        expected = f"({'V' if count is None else f'{count:,}'}, {width})"
        raise ValueError(f"{name} must have shape {expected}, one row for each vertex, not {array.shape}")
    return array.astype(np.float64, copy=False)


def _colors(values: npt.ArrayLike, used: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Convert vertex colours, floats from 0 to 1 or uint8, to int32 (V, 3) from 0 to 255."""
    array = host_array(values)
    colors = _numbers("colors", array, 3, len(used))
    if array.dtype == np.uint8:
        return array.astype(np.int32)
    _refuse_non_finite("color", colors, used)
    low, high = float(colors[used].min()), float(colors[used].max())
    if low < 0 or high > 1:
        raise ValueError(f"colors must be numbers from 0 to 1, or uint8; these ({array.dtype}) are {low} to {high}")
    found = np.zeros(colors.shape, np.int32)
    np.rint(255 * colors, out=found, casting="unsafe", where=used[:, None])
    return found


def _integers(name: str, values: npt.ArrayLike, shape: tuple[int | None, ...]) -> npt.NDArray[np.int64]:
    array = host_array(values)
    if array.size == 0 and array.ndim == 1 and len(shape) == 2:
        array = np.empty((0, 3), np.int64)  # the caller passed an empty list
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    if array.ndim != len(shape) or any(b not in (None, a) for a, b in zip(array.shape, shape, strict=True)):
        expected = "(F, 3)" if len(shape) == 2 else f"({shape[0]:,},), one for each face"
        raise ValueError(f"{name} must have shape {expected}, not {array.shape}")
    return array.astype(np.int64, copy=False)


def _refuse_non_finite(name: str, values: Floats, used: npt.NDArray[np.bool_], workers: Workers = ALONE) -> None:
    def of(rows: slice) -> npt.NDArray[np.int64]:
        finite = np.ones(rows.stop - rows.start, bool)
        for column in values[rows].T:
            finite &= np.isfinite(column)
        return np.flatnonzero(used[rows] & ~finite) + rows.start

    wrong = np.concatenate([np.zeros(0, np.int64), *workers.threads(of, chunks(len(values), SHORT))])
    if len(wrong):
        others = f"; others like it: {len(wrong) - 1:,}" if len(wrong) > 1 else ""
        raise ValueError(f"{name} {wrong[0]} is not finite ({values[wrong[0]].tolist()}), and faces use it{others}")


def _mean_edge(points: npt.NDArray[Any], faces: npt.NDArray[Any]) -> float:
    """The mean length of edges that are longer than 0, over every n-th face: at most 2^17 faces."""
    corners = points[faces[:: (len(faces) >> 17) + 1]].astype(np.float64)
    edges = corners - np.roll(corners, 1, axis=1)
    scale = float(np.abs(edges).max())
    if scale == 0:
        return 0.0
    lengths = np.sqrt(((edges / scale) ** 2).sum(2))
    return float(lengths[lengths > 0].mean()) * scale


def _grid_exponent(
    points: Floats, faces: npt.NDArray[np.int64], extent: Floats, precision: float | None
) -> tuple[int, bool]:
    """Choose the exponent of the grid's step; also return whether the mesh's extent makes the step coarser than the
    mesh's edges need."""
    largest = float(extent.max())
    if not math.isfinite(largest) or largest > LARGEST:
        raise ValueError(f"the mesh is {largest:.3g} units long; float32 allows at most {LARGEST:.3g}: scale it")
    if largest == 0:
        raise ValueError("all vertices that faces use are at the same place; there is nothing to build")
    if largest < SMALLEST * STEPS:
        raise ValueError(f"the mesh is only {largest:.3g} units long; float32 needs {SMALLEST * STEPS:.3g}: scale it")
    least = max(math.ceil(math.log2(largest / MOST_STEPS)), math.ceil(math.log2(SMALLEST)))
    if precision is None:
        edge = _mean_edge(points, faces) or largest  # a mesh without any area is detected when faces are welded
        wanted = math.floor(math.log2(min(edge / STEPS_PER_EDGE, largest / STEPS)))
        return max(wanted, least), wanted < least
    if not (math.isfinite(precision) and precision > 0):
        raise ValueError(
            f"precision, the greatest step of the grid in object units, must be finite and more than 0, not {precision}"
        )
    wanted = math.floor(math.log2(precision))
    if wanted < least:
        raise ValueError(
            f"precision {precision:g} is too fine for a mesh {largest:g} units long: expected "
            f"{math.ldexp(1.0, least):g} or more"
        )
    if math.ldexp(1.0, wanted) > largest:
        raise ValueError(f"precision {precision:g} exceeds the length of the whole mesh ({largest:g} units)")
    return wanted, False


def _edges_of_small(points: Floats, faces: npt.NDArray[np.int64]) -> Floats:
    """Return the length of the shortest edge of each of these faces. Faces that are needles (see NEEDLE) are left
    out."""
    corners = points[faces]
    edges = np.roll(corners, -1, 1) - corners
    lengths = np.linalg.norm(edges, axis=2)
    longest = lengths.max(1)
    height = np.linalg.norm(np.cross(edges[:, 0], edges[:, 1]), axis=1) / np.maximum(longest, SMALLEST)
    found: Floats = lengths.min(1)[height > NEEDLE * longest]
    return found


def _finer_exponent(small: Floats, largest: float) -> int | None:
    """Choose an exponent of the grid's step at which most small faces do not collapse. `small` has the shortest edge of
    each small face. The mesh's largest extent `largest` limits how fine the step may be; None if even the finest step
    keeps none of these faces."""
    least = max(math.ceil(math.log2(largest / MOST_STEPS)), math.ceil(math.log2(SMALLEST)))
    kept = small[small > 2 * math.ldexp(1.0, least)]
    if not len(kept):
        return None
    return max(least, math.floor(math.log2(float(np.quantile(kept, 0.05)) / STEPS_PER_SMALL_EDGE)))


def _uv_exponent(uv: Floats, faces: npt.NDArray[np.int64], used: npt.NDArray[np.bool_]) -> int:
    largest = float(np.abs(uv[used]).max())
    if largest > LARGEST:
        raise ValueError(f"uv reaches {largest:.3g}; float32 allows at most {LARGEST:.3g}: scale it")
    least = math.ceil(math.log2(max(largest / MOST_UV_STEPS, SMALLEST)))
    return max(math.floor(math.log2(min(_mean_edge(uv, faces) / UV_STEPS_PER_EDGE or UV_STEP, UV_STEP))), least)


def _split_by_material(
    faces: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], vertices: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Split vertices so that each has one material: return the new faces, and for each vertex its original vertex
    and its material."""
    material = np.zeros(vertices, np.int64)
    material[faces] = ids[:, None]
    other = material[faces] != ids[:, None]  # corners whose vertex already has another material
    pairs = faces[other] * MOST_MATERIALS + np.broadcast_to(ids[:, None], faces.shape)[other]
    added, number = np.unique(pairs, return_inverse=True)
    faces = faces.copy()
    faces[other] = vertices + number
    source = np.concatenate([np.arange(vertices), added // MOST_MATERIALS])
    return faces, source, np.concatenate([material, added % MOST_MATERIALS]).astype(np.int32)


def _with_merged(vertices: Vertices) -> Vertices:
    """Add a vertex at each position that has several vertices of one material. The added vertex has the mean normal and
    colour of these vertices, and the uv of the first.
    """
    if int(vertices.place.max()) + 1 == len(vertices.place):
        return vertices
    keys = vertices.place[:, None].astype(np.int32)
    if vertices.materials is not None:
        keys = np.column_stack([keys, vertices.materials.astype(np.int32)])
    count, number = meshopt.same_rows(np.ascontiguousarray(keys))
    if count == len(keys):
        return vertices
    several = np.bincount(number, minlength=count) > 1
    target = np.cumsum(several) - 1 + len(keys)  # the added vertex of each key
    merged = np.where(several[number], target[number], np.arange(len(keys))).astype(np.uint32)
    first = np.full(count, len(keys))
    np.minimum.at(first, number, np.arange(len(keys)))
    source = first[several]
    normals, colors = vertices.normals, vertices.colors

    def sums(columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.column_stack([np.bincount(number, column, count) for column in columns.T])[several]

    if normals is not None:
        normals = np.concatenate([normals, octahedral(unit_vectors(sums(from_octahedral(normals))))])
    if colors is not None:
        means = sums(colors) / np.bincount(number, minlength=count)[several][:, None]
        colors = np.concatenate([colors, np.rint(means).astype(np.uint8)])
    return replace(
        vertices,
        grid=np.concatenate([vertices.grid, vertices.grid[source]]),
        place=np.concatenate([vertices.place, vertices.place[source]]),
        normals=normals,
        uv=None if vertices.uv is None else np.concatenate([vertices.uv, vertices.uv[source]]),
        colors=colors,
        materials=None
        if vertices.materials is None
        else np.concatenate([vertices.materials, vertices.materials[source]]),
        merged=np.concatenate([merged, np.arange(len(keys), len(keys) + len(source), dtype=np.uint32)]),
    )

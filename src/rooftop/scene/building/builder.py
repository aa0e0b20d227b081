"""`build` and `build_file` write a mesh as a geometry file, and return a report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rooftop.errors import InputError
from rooftop.scene import layouts
from rooftop.scene.arguments import host_array, short
from rooftop.scene.building.levels import Hierarchy, build_levels
from rooftop.scene.building.meshes import Mesh, Repairs, checked_mesh, column_bounds
from rooftop.scene.building.reading import read_mesh
from rooftop.scene.building.workers import Workers
from rooftop.scene.building.writing import checked_target, renamed_when_done, write, write_pages
from rooftop.scene.material_sections import material_sections
from rooftop.scene.materials import IMAGES, Material, checked_materials
from rooftop.user_paths import user_path

# by default, each worker gets at least this many faces: building this many takes as long as forking two processes
FACES_OF_A_WORKER = 20_000


@dataclass(frozen=True)
class LevelCount:
    """Number of clusters and triangles of a level, and the largest error of its clusters in object units."""

    clusters: int
    triangles: int
    error: float


@dataclass(frozen=True)
class BuildReport:
    """The result of a build.

    Attributes:
        path: path of the file.
        triangles: number of triangles of the mesh, after repairs.
        levels: counts of each level, from the finest to the coarsest.
        fill: how full the clusters are: their triangles, as a share of the maximum number of triangles.
        size_bytes: size of the file.
        image_bytes: bytes of the textures in the file.
        bytes_per_triangle: bytes of the file without textures, divided by the number of the mesh's triangles.
        precision: step of the grid to which positions are rounded, in object units.
        roots: number of clusters without a coarser replacement.
        why_several: the reason if there are several roots, or None.
        repairs: the repairs made to the mesh.
        seconds: the build time.
    """

    path: Path
    triangles: int
    levels: tuple[LevelCount, ...]
    fill: float
    size_bytes: int
    bytes_per_triangle: float
    precision: float
    roots: int
    why_several: str | None
    repairs: Repairs
    seconds: float
    image_bytes: int = 0


def build(
    vertices: npt.ArrayLike,
    faces: npt.ArrayLike,
    path: str | Path,
    normals: npt.ArrayLike | Literal["smooth"] | None = None,
    uv: npt.ArrayLike | None = None,
    materials: npt.ArrayLike | None = None,
    *,
    colors: npt.ArrayLike | None = None,
    material_table: Sequence[Material] | None = None,
    precision: float | None = None,
    progress: Callable[[str, float], None] | None = None,
    workers: int | None = None,
    lock_borders: bool = False,
) -> BuildReport:
    """Write a mesh as a geometry file, with all its levels of detail. The arrays may also be tensors on any device.

    Args:
        vertices: (V, 3) positions, in object units.
        faces: (F, 3) vertex indices of each triangle.
        path: the output file; by convention its name ends in .rtg.
        normals: (V, 3), or "smooth" to compute normals. None stores no normals, so that a renderer uses the faces'
            normals.
        uv: (V, 2) texture coordinates.
        materials: (F,) the material number of each face, from 0 to 65535.
        colors: (V, 3) red, green and blue as displayed (sRGB), from 0 to 1 or uint8; stored with 8 bits each.
        material_table: a `Material` for each number of `materials` from 0 on. The table is stored in the file, with its
            images in their original encoding. Textures are looked up at `uv`.
        precision: positions are rounded to a grid whose step is the largest power of two up to this value. By default,
            this value is the smaller of 1/64 of the mean edge and 1/16384 of the mesh's extent. If faces have no area
            on that grid, this value is smaller: 1/16 of the length that the shortest edge of 95% of these faces
            exceeds. The step is at least 2^-24 of the extent.
        progress: called with the current activity and the fraction done.
        workers: number of processes, by default one per CPU, and fewer for a mesh of less than 20,000 faces per CPU.
            The file is the same for any number of processes.
        lock_borders: whether vertices of edges with a single face stay in place in all levels. Tiles of a scan that
            meet at such edges then meet in all levels, if the positions at the edges are equal and all tiles have the
            same grid step (see `precision`).

    Raises:
        FileNotFoundError: the folder for the file does not exist.
        TypeError, ValueError: the mesh is invalid; the message gives the reason.
        MissingExtraError: meshoptimizer is not installed.
        BuildError: a worker was killed.
    """
    arrays = (vertices, faces, normals, uv, materials, colors)
    return _build(arrays, path, material_table, False, precision, progress, workers, lock_borders)


def _build(
    arrays: tuple[Any, Any, Any, Any, Any, Any],
    path: str | Path,
    material_table: Sequence[Material] | None,
    linear_colors: bool,
    precision: float | None,
    progress: Callable[[str, float], None] | None,
    workers: int | None,
    lock_borders: bool,
) -> BuildReport:
    """Like `build`. `arrays` are vertices, faces, normals, uv, materials and colors. `linear_colors` says whether the
    colors are in linear light."""
    vertices, faces, normals, uv, materials, colors = arrays
    began = time.perf_counter()
    pool = Workers.of(workers)
    target = checked_target(path)
    show = progress or (lambda what, fraction: None)
    show("checking the mesh", 0.0)
    sections = _sections(material_table, materials, uv is not None)
    mesh = checked_mesh(vertices, faces, normals, uv, materials, precision, colors, pool)
    if workers is None:
        pool = Workers(max(1, min(pool.count, len(mesh.faces) // FACES_OF_A_WORKER)))
    step = math.ldexp(1.0, mesh.vertices.exponent)
    with pool.team([write_pages]) as team:
        hierarchy = build_levels(mesh, show, team, lock_borders)
        mesh = replace(mesh, repairs=replace(mesh.repairs, non_manifold_edges=hierarchy.non_manifold_edges))
        show(f"writing {target.name}", 1.0)
        levels = _levels(hierarchy)
        fill = sum(level.triangles for level in levels) / (layouts.MAX_TRIANGLES * len(hierarchy.levels))
        roots = hierarchy.roots
        why = (
            None if roots == 1 else f"{hierarchy.unshrunk:,} clusters were in no group that could be simplified further"
        )
        if why and lock_borders:
            why += ": borders are locked"
        meta = _meta(mesh, hierarchy, levels, why) | ({"linear_colors": True} if linear_colors else {})
        with renamed_when_done(target) as file:
            written = write(file, hierarchy, step, meta, sections, team)
    size, images = written["bytes"], sum(len(content) for name, content in sections if name == IMAGES.encode())
    return BuildReport(
        path=target, triangles=len(mesh.faces), levels=levels, fill=fill, size_bytes=size,
        bytes_per_triangle=(size - images) / len(mesh.faces), precision=step, roots=roots, why_several=why,
        repairs=mesh.repairs, seconds=time.perf_counter() - began, image_bytes=images,
    )  # fmt: skip


def build_file(
    mesh: str | Path,
    path: str | Path | None = None,
    *,
    normals: Literal["file", "smooth", "flat"] = "file",
    precision: float | None = None,
    progress: Callable[[str, float], None] | None = None,
    workers: int | None = None,
    lock_borders: bool = False,
    textures: bool = True,
) -> BuildReport:
    """Write a mesh file as a geometry file.

    Parts of a scene are combined at their positions; each part has its own material number. Texture coordinates are
    kept if all parts have them, or if any textured part has them. Vertex colours are kept if any part has them; parts
    without colours become white. For glTF and OBJ, base colours and their textures are stored too.

    Args:
        mesh: any file that trimesh reads: .glb, .gltf, .obj, .ply, .stl and more.
        path: path of the new file; by default that of the mesh, with its suffix replaced by .rtg.
        normals: "file" reads normals from the file if all its parts have normals, and otherwise stores none. "smooth"
            computes normals. "flat" stores none, so that a renderer uses the faces' normals.
        precision, progress, workers, lock_borders: as for `build`.
        textures: whether images of materials are stored; if False, only the materials' colours are stored.

    Raises:
        FileNotFoundError, InputError: the file is missing, cannot be read or has no triangles; or an image that it
            names is missing, damaged or too large.
        ValueError: the output would overwrite the mesh file, nothing can be built from the mesh, or another argument is
            invalid.
        MissingExtraError: trimesh or meshoptimizer is not installed.
    """
    if not isinstance(normals, str) or normals not in ("file", "smooth", "flat"):
        raise ValueError(f"normals={short(normals)}: expected 'file', 'smooth' or 'flat'")
    Workers.of(workers)  # a wrong number raises before the mesh is read
    source = user_path(mesh)
    target = source.with_suffix(".rtg") if path is None else user_path(path)
    if target.resolve() == source.resolve():
        raise InputError(f"{target} would overwrite the mesh that it is built from: choose another output")
    if source.is_file():
        checked_target(target)
    if progress is not None:
        progress(f"reading {source.name}", 0.0)
    found = read_mesh(source, textures)
    chosen = {"file": found.normals, "smooth": "smooth", "flat": None}[normals]
    materials = found.materials if found.materials.any() else None
    arrays = (found.vertices, found.faces, chosen, found.uv, materials, found.colors)
    linear = found.colors is not None and found.linear_colors
    return _build(arrays, target, found.table, linear, precision, progress, workers, lock_borders)


def _sections(
    table: Sequence[Material] | None, materials: npt.ArrayLike | None, has_uv: bool
) -> list[tuple[bytes, bytes]]:
    """The material sections of a geometry file. All images are decoded, to make sure that none is damaged."""
    if table is None:
        return []
    given = np.zeros(0) if materials is None else host_array(materials)
    # for other dtypes, `checked_mesh` raises later
    numbers = int(given.max()) + 1 if given.dtype.kind in "iu" and given.size else 1
    checked = checked_materials(table, numbers, "the mesh")
    for each in checked:
        if each.texture is not None:
            if not has_uv:
                raise ValueError(
                    f"material {each.name!r} has a texture, but the mesh has no texture coordinates: pass uv="
                )
            each.texture.texels()
    return material_sections(checked)


def _levels(hierarchy: Hierarchy) -> tuple[LevelCount, ...]:
    count = int(hierarchy.levels.max()) + 1
    triangles = (hierarchy.heads[:, layouts.CLUSTER_COUNTS] & 255).astype(np.int64) + 1
    errors = np.zeros(count, np.float32)
    np.maximum.at(errors, hierarchy.levels, hierarchy.heads.view(np.float32)[:, layouts.CLUSTER_ERROR])
    clusters = np.bincount(hierarchy.levels, minlength=count).tolist()
    totals = np.bincount(hierarchy.levels, triangles, count).astype(np.int64).tolist()
    return tuple(LevelCount(*each) for each in zip(clusters, totals, errors.tolist(), strict=True))


def _meta(mesh: Mesh, hierarchy: Hierarchy, levels: tuple[LevelCount, ...], why: str | None) -> dict[str, Any]:
    """Build the file's metadata. Lengths are in object units; `bounds` are relative to the mesh's `origin`. `why` is
    the reason for several root clusters, or None."""
    vertices = mesh.vertices
    step = math.ldexp(1.0, vertices.exponent)
    low, high = column_bounds(vertices.grid)
    return {
        "origin": mesh.origin.tolist(),
        "grid_exponent": vertices.exponent,
        "uv_exponent": vertices.uv_exponent,
        "has_normals": vertices.normals is not None,
        "has_uv": vertices.uv is not None,
        "has_colors": vertices.colors is not None,
        "materials": 1 if vertices.materials is None else int(vertices.materials.max()) + 1,
        "triangles": len(mesh.faces),
        "clusters": len(hierarchy.levels),
        "groups": len(hierarchy.errors),
        "levels": [asdict(level) for level in levels],
        "bounds": [(low * step).tolist(), (high * step).tolist()],
        "roots": hierarchy.roots,
        "why_several_roots": why,
        "repairs": asdict(mesh.repairs),
    }

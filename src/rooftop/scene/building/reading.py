"""Meshes from files, through trimesh: all parts of a scene put together at their places."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.errors import InputError, MissingExtraError
from rooftop.scene.building.gltf_meshes import plain_gltf
from rooftop.scene.building.meshes import MOST_MATERIALS
from rooftop.scene.building.normals import unit_vectors
from rooftop.scene.building.obj_texts import has_colors, plain_obj, utf8

Floats = npt.NDArray[np.float64]
HEAD_BYTES = 1 << 16  # in which a PLY file's head is looked for


@dataclass(frozen=True)
class MeshFile:
    """What is in a mesh file.

    Attributes:
        vertices: (V, 3); faces: (F, 3).
        normals: (V, 3) where all parts have them, or None; uv: (V, 2), the same.
        colors: (V, 3) uint8 where any part has them, white elsewhere; or None.
        materials: (F,) the part that a face is of: parts that are placed several times count once.
        parts: how many placed parts.
    """

    vertices: Floats
    faces: npt.NDArray[np.int64]
    normals: Floats | None
    uv: Floats | None
    colors: npt.NDArray[np.uint8] | None
    materials: npt.NDArray[np.int64]
    parts: int


def read_mesh(path: Path) -> MeshFile:
    """Read any file that trimesh reads: .glb, .gltf, .obj, .ply, .stl, .off, .3mf and more.

    Raises:
        FileNotFoundError: there is none.
        InputError: it is of a format that trimesh does not read, damaged, or without triangles.
        MissingExtraError: trimesh is not installed, or a package that it needs for this format.
    """
    trimesh = _load_trimesh()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        scene = _loaded(trimesh, path)
    except InputError:
        raise
    except ImportError as error:
        raise MissingExtraError(f"reading {path} needs another package: {error}") from error
    except NotImplementedError as error:
        raise InputError(
            f"{path} is in no format that can be read here ({error}); try .glb, .obj, .ply or .stl"
        ) from error
    except Exception as error:  # whatever a reader meets in a damaged file
        raise InputError(f"{path} cannot be read ({type(error).__name__}: {error}); it may be damaged") from error
    placed = []
    for node in scene.graph.nodes_geometry:
        transform, name = scene.graph[node]
        if isinstance(scene.geometry[name], trimesh.Trimesh) and len(scene.geometry[name].faces):
            placed.append((name, np.asarray(transform, np.float64), scene.geometry[name]))
    if not placed:
        raise InputError(f"{path} has no triangles; a mesh is needed, not points or curves")
    number = {name: index for index, name in enumerate(dict.fromkeys(name for name, _, _ in placed))}
    if len(number) > MOST_MATERIALS:
        raise InputError(
            f"{path} has {len(number):,} parts, and a mesh has at most {MOST_MATERIALS:,} materials: join some"
        )

    counts = [len(part.vertices) for _, _, part in placed]
    first = np.cumsum([0, *counts])[:-1]
    has_normals = all("vertex_normals" in part._cache for _, _, part in placed)
    has_uv = all(_uv(part) is not None for _, _, part in placed)
    try:
        colors = [_colors(part) for _, _, part in placed]
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if any(part.visual.kind == "face" for _, _, part in placed):
        warnings.warn(f"{path}: colours of its faces are left out; those of vertices are read", stacklevel=2)
    if path.suffix.lower() == ".ply" and (kind := _wide_colors(path)):
        warnings.warn(
            f"{path}: its colours are of type {kind} and are left out; uchar and float are read", stacklevel=2
        )
        colors = [None] * len(placed)
    if path.suffix.lower() == ".obj" and all(each is None for each in colors) and has_colors(path.read_bytes()):
        warnings.warn(
            f"{path}: colours of its vertices are left out: they are read if all have one and none has uv", stacklevel=2
        )
    if any(each is not None and (each[:, 3:] < 255).any() for each in colors):
        warnings.warn(
            f"{path}: alpha of the colours of vertices is left out; nothing is transparent here", stacklevel=2
        )
    white = [np.full((count, 3), 255, np.uint8) for count in counts]
    colored = any(each is not None for each in colors)
    return MeshFile(
        vertices=np.concatenate([part.vertices @ at[:3, :3].T + at[:3, 3] for _, at, part in placed]),
        faces=np.concatenate([_faces(at, part) + start for start, (_, at, part) in zip(first, placed, strict=True)]),
        normals=np.concatenate([_normals(at, part) for _, at, part in placed]) if has_normals else None,
        uv=np.concatenate([_uv(part) for _, _, part in placed]) if has_uv else None,
        colors=np.concatenate([a[:, :3] if a is not None else b for a, b in zip(colors, white, strict=True)])
        if colored
        else None,
        materials=np.repeat([number[name] for name, _, _ in placed], [len(part.faces) for _, _, part in placed]),
        parts=len(placed),
    )


def _load_trimesh() -> ModuleType:
    try:
        import trimesh
    except ImportError as error:
        raise MissingExtraError('reading mesh files needs trimesh: pip install "rooftop[scene]"') from error
    return trimesh


def _loaded(trimesh: ModuleType, path: Path) -> Any:
    """Its scene. OBJ files, their materials and glTF files are made plain first."""
    suffix = path.suffix.lower()
    if suffix in (".glb", ".gltf") and (plain := plain_gltf(path)) is not None:
        beside = trimesh.resolvers.FilePathResolver(str(path))
        return trimesh.load_scene(io.BytesIO(plain), file_type="glb", resolver=beside, process=False)
    if suffix != ".obj":
        return trimesh.load_scene(str(path), process=False)

    class Beside(trimesh.resolvers.FilePathResolver):  # type: ignore[misc, name-defined]
        """Files of the same folder."""

        def get(self, name: str) -> bytes:
            content: bytes = super().get(name)
            return utf8(content) if name.lower().endswith(".mtl") else content

    text = io.BytesIO(plain_obj(path.read_bytes(), str(path)))
    return trimesh.load_scene(text, file_type="obj", resolver=Beside(str(path)), process=False)


def _faces(at: Floats, part: Any) -> npt.NDArray[np.int64]:
    """A mirrored part shows its back: its faces are turned round."""
    faces: npt.NDArray[np.int64] = np.asarray(part.faces, np.int64)
    return faces[:, ::-1] if np.linalg.det(at[:3, :3]) < 0 else faces


def _normals(at: Floats, part: Any) -> Floats:
    """Normals turn with the transposed inverse; a part that is squashed flat keeps its own."""
    normals = np.asarray(part.vertex_normals, np.float64)
    linear = at[:3, :3]
    if abs(np.linalg.det(linear)) < np.finfo(np.float64).tiny:
        return normals
    return unit_vectors(normals @ np.linalg.inv(linear))


def _uv(part: Any) -> Floats | None:
    uv = getattr(part.visual, "uv", None)
    return None if uv is None or len(uv) != len(part.vertices) else np.asarray(uv, np.float64)[:, :2]


def _wide_colors(path: Path) -> str | None:
    """The type of a PLY file's colours if it is wider than 8 bits, else None. trimesh would drop the high bits."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES).partition(b"end_header")[0]
    found = re.search(rb"property\s+(u?short|u?int|u?int16|u?int32)\s+(?:diffuse_)?red\b", head)
    return found[1].decode() if found else None


def _colors(part: Any) -> npt.NDArray[np.uint8] | None:
    """(V, 3) or (V, 4) uint8: the colours of its vertices, or None.

    Raises:
        InputError: they have another shape, or are not finite.
    """
    if part.visual.kind == "vertex":
        found = part.visual.vertex_colors
    else:
        found = getattr(part.visual, "vertex_attributes", {}).get("color")
    if found is None or len(found) != len(part.vertices):
        return None
    found = np.asarray(found)
    if found.ndim != 2 or found.shape[1] not in (3, 4):
        raise InputError(f"colours of vertices have 3 or 4 numbers each, not an array of shape {found.shape}")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise InputError("colours of vertices are not all finite")
    if found.dtype.kind == "f":
        found = np.rint(255 * np.clip(found, 0, 1))
    elif found.dtype.itemsize > 1:
        found = np.rint(found / (np.iinfo(found.dtype).max / 255))
    return found.astype(np.uint8)

"""Read meshes from files through trimesh, and combine all parts of a scene at their positions."""

from __future__ import annotations

import io
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
from rooftop.scene.building.mtl_texts import materials_of_obj
from rooftop.scene.building.normals import unit_vectors
from rooftop.scene.building.obj_texts import brightest, plain_obj
from rooftop.scene.building.off_texts import read_off
from rooftop.scene.building.part_materials import PartMaterial
from rooftop.scene.building.ply_files import PlainMesh, read_ply
from rooftop.scene.materials import Material

Floats = npt.NDArray[np.float64]
STL_HEAD_BYTES, STL_TRIANGLE_BYTES = 84, 50  # in a binary file, the head is 80 bytes of any text and a count


@dataclass(frozen=True)
class MeshFile:
    """The contents of a mesh file.

    Attributes:
        vertices: (V, 3).
        faces: (F, 3).
        normals: (V, 3) if all parts have normals; None if not.
        uv: (V, 2) if all parts have texture coordinates, or if any textured part has them (other parts get 0); None if
            not.
        colors: (V, 3) uint8 if any part has colours (other parts are white); None if not.
        materials: (F,) the part of each face. A part that is placed several times has one number.
        parts: the number of placed parts; a part that is placed twice counts twice.
        table: the material of each part, by its number in `materials`; None if no part has a colour or a texture.
        linear_colors: True if `colors` are in linear light, as in glTF; False if they are displayed values (sRGB).
    """

    vertices: Floats
    faces: npt.NDArray[np.int64]
    normals: Floats | None
    uv: Floats | None
    colors: npt.NDArray[np.uint8] | None
    materials: npt.NDArray[np.int64]
    parts: int
    table: tuple[Material, ...] | None = None
    linear_colors: bool = False


def read_mesh(path: Path, textures: bool = True) -> MeshFile:
    """Read any file that trimesh reads: .glb, .gltf, .obj, .ply, .stl, .off, .3mf and more.

    Args:
        textures: whether images of materials are read. The materials' colours are always read, for glTF and OBJ.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: trimesh does not support the file's format, the file is damaged or has no triangles, or an image of
            a material is missing, damaged or too large.
        MissingExtraError: trimesh, or a package that trimesh needs for this format, is not installed.
    """
    trimesh = _load_trimesh()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        scene, looks = _loaded(trimesh, path, textures)
    except InputError:
        raise
    except ImportError as error:
        raise MissingExtraError(f"reading {path} needs another package: {error}") from error
    except NotImplementedError as error:
        raise InputError(f"{path} is not in a supported format ({error}); try .glb, .obj, .ply or .stl") from error
    except Exception as error:  # a reader may raise any exception for a damaged file
        raise InputError(f"{path} cannot be read ({type(error).__name__}: {error}); it may be damaged") from error
    placed = []
    for node in scene.graph.nodes_geometry:
        transform, name = scene.graph[node]
        if isinstance(scene.geometry[name], trimesh.Trimesh) and len(scene.geometry[name].faces):
            placed.append((name, np.asarray(transform, np.float64), scene.geometry[name]))
    if not placed:
        raise InputError(f"{path} has no triangles; a mesh is needed, not points or curves")
    names, places, parts = zip(*placed, strict=True)
    wrong = next((part.vertices.shape for part in parts if part.vertices.shape[1:] != (3,)), None)
    if wrong is not None:
        raise InputError(f"{path} has vertices of shape {wrong}: expected three numbers for each vertex")
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    if len(number) > MOST_MATERIALS:
        raise InputError(
            f"{path} has {len(number):,} parts, but a mesh has at most {MOST_MATERIALS:,} materials: join some parts"
        )

    counts = [len(part.vertices) for part in parts]
    first = np.cumsum([0, *counts])[:-1]
    has_normals = all("vertex_normals" in part._cache for part in parts)
    named = [looks.get(_material_name(part), PartMaterial()) for part in parts]
    uv = [_uv(part, look) for part, look in zip(parts, named, strict=True)]
    textured = [each is not None and look.material.texture is not None for each, look in zip(uv, named, strict=True)]
    has_uv = all(each is not None for each in uv) or any(textured)
    table: dict[int, Material] = {}
    for name, look, has_image in zip(names, named, textured, strict=True):
        material = look.material
        if material.texture is not None and not has_image:
            warnings.warn(
                f"{path}: material {material.name or number[name]} has a texture, but part {name} has no texture "
                "coordinates for it, so it is drawn in the material's colour",
                stacklevel=2,
            )
            material = Material(material.color, name=material.name)
        table[number[name]] = material
    if see_through := sorted({look.see_through for look in named if look.see_through}):
        more = f" and {len(see_through) - 1} more" if len(see_through) > 1 else ""
        warnings.warn(
            f"{path}: {see_through[0]}{more}: transparency is not supported, so it is drawn opaque", stacklevel=2
        )
    try:
        colors = [_colors(part) for part in parts]
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if any(part.visual.kind == "face" for part in parts):
        warnings.warn(f"{path}: its face colours are ignored; only vertex colours are read", stacklevel=2)
    if path.suffix.lower() == ".obj" and (most := brightest(path.read_bytes())) is not None:
        if all(each is None for each in colors):
            warnings.warn(
                f"{path}: vertex colours are ignored, because they are used only if every vertex has a colour and no "
                "vertex has texture coordinates (uv)",
                stacklevel=2,
            )
        elif not most <= 1:  # trimesh would make such colours white
            raise InputError(
                f"{path}: its vertex colours go up to {most:g}, but in an OBJ file colours are from 0 to 1: divide "
                f"them by {255 if most > 2 else most:g}, or remove them"
            )
    if any(each is not None and (each[:, 3:] < 255).any() for each in colors):
        warnings.warn(
            f"{path}: alpha of vertex colours is ignored, because transparency is not supported", stacklevel=2
        )
    has_colors, white = any(each is not None for each in colors), np.full((max(counts), 3), 255, np.uint8)
    return MeshFile(
        vertices=np.concatenate(
            [part.vertices @ at[:3, :3].T + at[:3, 3] for at, part in zip(places, parts, strict=True)]
        ),
        faces=np.concatenate([_faces(*each) + start for start, *each in zip(first, places, parts, strict=True)]),
        normals=np.concatenate([_normals(*each) for each in zip(places, parts, strict=True)]) if has_normals else None,
        uv=np.concatenate([np.zeros((n, 2)) if of is None else of for n, of in zip(counts, uv, strict=True)])
        if has_uv
        else None,
        colors=np.concatenate([white[:n] if of is None else of[:, :3] for n, of in zip(counts, colors, strict=True)])
        if has_colors
        else None,
        materials=np.repeat([number[name] for name in names], [len(part.faces) for part in parts]),
        parts=len(parts),
        table=None if all(each.is_plain for each in table.values()) else tuple(table[k] for k in sorted(table)),
        linear_colors=path.suffix.lower() in (".glb", ".gltf"),
    )


def _load_trimesh() -> ModuleType:
    try:
        import trimesh
    except ImportError as error:
        raise MissingExtraError('reading mesh files needs trimesh: pip install "rooftop[scene]"') from error
    return trimesh


def _loaded(trimesh: ModuleType, path: Path, textures: bool) -> tuple[Any, dict[str, PartMaterial]]:
    """Load the scene of a file, and its materials by their names in the scene. OBJ files and glTF files are converted
    to their simple form first. Rooftop reads PLY and OFF files itself, and also the materials of OBJ and glTF files.
    trimesh only reports the material name of each part.
    """
    suffix = path.suffix.lower()
    if suffix in (".glb", ".gltf"):
        plain, materials = plain_gltf(path, textures)
        looks = {str(number): each for number, each in enumerate(materials)}
        if plain is None:
            return trimesh.load_scene(str(path), process=False), looks
        beside = trimesh.resolvers.FilePathResolver(str(path))
        return trimesh.load_scene(io.BytesIO(plain), file_type="glb", resolver=beside, process=False), looks
    if suffix in (".ply", ".off"):
        return _of_arrays(trimesh, read_ply(path) if suffix == ".ply" else read_off(path)), {}
    if suffix == ".stl":
        return trimesh.load_scene(io.BytesIO(_whole_stl(path)), file_type="stl", process=False), {}
    if suffix != ".obj":
        return trimesh.load_scene(str(path), process=False), {}
    text = plain_obj(path.read_bytes(), str(path))
    found = materials_of_obj(text, path, textures)

    class Names(trimesh.resolvers.FilePathResolver):  # type: ignore[misc, name-defined]
        """Replaces each .mtl file that trimesh asks for by a text that contains only the names of the materials."""

        def get(self, name: str) -> bytes:
            if found is None:
                raise FileNotFoundError(name)
            return "".join(f"newmtl {each}\n" for each in found).encode()

    scene = trimesh.load_scene(io.BytesIO(text), file_type="obj", resolver=Names(str(path)), process=False)
    return scene, found or {}


def _whole_stl(path: Path) -> bytes:
    """The content of an STL file, without what follows the triangles of a binary file.

    Raises:
        InputError: a binary file ends before its last triangle.
    """
    content = path.read_bytes()
    if b"\0" not in content[:STL_HEAD_BYTES]:  # a text
        return content
    count = int.from_bytes(content[80:STL_HEAD_BYTES], "little")
    size_bytes = STL_HEAD_BYTES + STL_TRIANGLE_BYTES * count
    if len(content) < max(size_bytes, STL_HEAD_BYTES):
        raise InputError(
            f"{path} has {len(content):,} bytes, but a binary STL file of {count:,} triangles has {size_bytes:,}; it "
            "may be damaged"
        )
    return content[:size_bytes]


def _of_arrays(trimesh: ModuleType, mesh: PlainMesh) -> Any:
    part = trimesh.Trimesh(mesh.vertices, mesh.faces, vertex_normals=mesh.normals, process=False)
    if mesh.uv is not None:
        part.visual = trimesh.visual.TextureVisuals(uv=mesh.uv)
        if mesh.colors is not None:
            part.visual.vertex_attributes["color"] = mesh.colors
    elif mesh.colors is not None:
        part.visual = trimesh.visual.ColorVisuals(vertex_colors=mesh.colors)
    return trimesh.Scene({"part": part})


def _material_name(part: Any) -> str:
    return getattr(getattr(part.visual, "material", None), "name", None) or ""


def _faces(at: Floats, part: Any) -> npt.NDArray[np.int64]:
    """Return the corners of a scene part's faces. If the transform `at` mirrors the part, the order of corners is
    reversed, because otherwise the faces would show their backs."""
    faces: npt.NDArray[np.int64] = np.asarray(part.faces, np.int64)
    return faces[:, ::-1] if np.linalg.det(at[:3, :3]) < 0 else faces


def _normals(at: Floats, part: Any) -> Floats:
    """Transform a scene part's normals by the inverse transpose of `at`. If `at` flattens the part, there is no
    inverse, and the normals stay unchanged."""
    normals = np.asarray(part.vertex_normals, np.float64)
    linear = at[:3, :3]
    if abs(np.linalg.det(linear)) < np.finfo(np.float64).tiny:
        return normals
    return unit_vectors(normals @ np.linalg.inv(linear))


def _uv(part: Any, look: PartMaterial) -> Floats | None:
    uv = getattr(part.visual, "uv", None)
    return None if uv is None or len(uv) != len(part.vertices) else look.placed(np.asarray(uv, np.float64)[:, :2])


def _colors(part: Any) -> npt.NDArray[np.uint8] | None:
    """The vertex colours of a part, (V, 3) or (V, 4) uint8, or None.

    Raises:
        InputError: the colours have another shape, or are not finite.
    """
    if part.visual.kind == "vertex":
        found = part.visual.vertex_colors
    else:
        found = getattr(part.visual, "vertex_attributes", {}).get("color")
    if found is None or len(found) != len(part.vertices):
        return None
    found = np.asarray(found)
    if found.ndim != 2 or found.shape[1] not in (3, 4):
        raise InputError(f"vertex colours must have shape (V, 3) or (V, 4), not {found.shape}")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise InputError("some vertex colours are not finite")
    if found.dtype.kind == "f":
        found = np.rint(255 * np.clip(found, 0, 1))
    elif found.dtype.itemsize > 1:
        found = np.rint(found / (np.iinfo(found.dtype).max / 255))
    return found.astype(np.uint8)

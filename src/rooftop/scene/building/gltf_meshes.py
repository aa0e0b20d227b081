"""Convert the geometry of glTF to a simple form, for a reader that supports only part of glTF. An unsupported feature
raises an error that names it.

The simple form has triangles whose positions, normals and texture coordinates are plain float32 arrays. glTF also
allows integers that represent -1..1 (quantized meshes), arrays that replace some values of other arrays (sparse
accessors), strips and fans of triangles, trees of nodes, skins and morph targets. All these forms are converted here,
and the new arrays are written after the original bytes. Points and lines are not surfaces, so they are ignored with a
warning. Meshes compressed by Draco or meshoptimizer, and EXT_mesh_gpu_instancing, raise an error. A reader that does
not support these extensions would misread the file silently.

Source: the glTF 2.0 specification of the Khronos Group, and its registry of extensions.
"""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.errors import InputError
from rooftop.scene.building.gltf_materials import GltfMaterials
from rooftop.scene.building.gltf_nodes import PlacedMesh, is_flat, placed_meshes, posed
from rooftop.scene.building.gltf_uris import content_of, has_escapes
from rooftop.scene.building.part_materials import PartMaterial

Array = npt.NDArray[Any]
Document = dict[str, Any]

_GLB, _JSON, _BINARY = 0x46546C67, 0x4E4F534A, 0x004E4942
_DTYPES = {5120: "i1", 5121: "u1", 5122: "<i2", 5123: "<u2", 5125: "<u4", 5126: "<f4"}
_FLOAT32, _UINT32 = 5126, 5125
_WIDTHS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT2": 4, "MAT3": 9, "MAT4": 16}
_TRIANGLES, _STRIP, _FAN = 4, 5, 6
_KINDS = {0: "points", 1: "lines", 2: "a closed line", 3: "a line"}
_READ = ("POSITION", "NORMAL", "TEXCOORD_0", "COLOR_0")
_OF_NO_GEOMETRY = ("KHR_materials_", "KHR_texture_", "EXT_texture_", "MSFT_texture_", "KHR_lights_", "KHR_xmp")
_UNDERSTOOD = {"KHR_mesh_quantization", "KHR_node_visibility", "KHR_animation_pointer", "MSFT_lod"}
_REFUSED = {
    "KHR_draco_mesh_compression": "gltf-transform copy, or gltf-pipeline -d",
    "EXT_meshopt_compression": "gltf-transform copy",
    "KHR_meshopt_compression": "gltf-transform copy",
    "EXT_mesh_gpu_instancing": "gltf-transform with its function `uninstance`",
}


def plain_gltf(path: Path, textures: bool = True) -> tuple[bytes | None, list[PartMaterial]]:
    """Convert a file to a GLB that has only simple meshes, and read its materials.

    Args:
        textures: whether images are read.

    Returns:
        (GLB, materials). The GLB is None if the file is simple already and has no materials. Each material in the GLB
        is named by its index in `materials`; images are removed.

    Raises:
        InputError: the file is damaged, or has geometry in an unsupported form.
    """
    try:
        document, binary = _parts(path)
        _refuse_version(document.get("asset", {}).get("version", "2.0"), path)
        _refuse_extensions(document, path)
        plain = _Plain(document, binary, path)
        materials = plain.take_materials(textures)
        plain.take_nodes()
        return plain.made(), materials
    except InputError:
        raise
    except (AttributeError, KeyError, IndexError, OverflowError, TypeError, ValueError, struct.error) as error:
        raise InputError(f"{path} is a damaged glTF file ({type(error).__name__}: {error})") from error


def _parts(path: Path) -> tuple[Document, tuple[int, int]]:
    """Read the JSON of a glTF file. Return it with the offset and length in bytes of a GLB's binary chunk, which is not
    read; (0, 0) if there is none."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
        if len(head) < 12 or struct.unpack_from("<I", head)[0] != _GLB:
            return dict(json.loads((head + file.read()).decode("utf-8-sig"))), (0, 0)
        _refuse_version(str(struct.unpack_from("<I", head, 4)[0]), path)
        document: Document = {}
        binary, place = (0, 0), 12
        while place + 8 <= size_bytes:
            file.seek(place)
            size, kind = struct.unpack("<II", file.read(8))
            if place + 8 + size > size_bytes:
                raise ValueError(f"it is {place + 8 + size - size_bytes:,} bytes too short")
            if kind == _JSON:
                document = dict(json.loads(file.read(size)))
            elif kind == _BINARY and binary == (0, 0):
                binary = (place + 8, size)
            place += 8 + size
        return document, binary


def _refuse_version(version: str, path: Path) -> None:
    if version.partition(".")[0] != "2":
        raise InputError(
            f"{path} is a file of glTF {version}, but only glTF 2 is supported: convert it, for example with "
            "gltf-pipeline"
        )


def _refuse_extensions(document: Document, path: Path) -> None:
    for name in (*document.get("extensionsRequired", ()), *document.get("extensionsUsed", ())):
        if name in _REFUSED:
            raise InputError(
                f"{path} has meshes in {name}, which is not supported: convert it, for example with {_REFUSED[name]}"
            )
    for name in document.get("extensionsRequired", ()):
        if name not in _UNDERSTOOD and not name.startswith(_OF_NO_GEOMETRY):
            raise InputError(f"{path} requires {name}, which is not supported: export it without that extension")


class _Plain:
    """A glTF document, which the methods convert step by step to the simple form that the module describes."""

    def __init__(self, document: Document, binary: tuple[int, int], path: Path) -> None:
        self._document, self._binary, self._path = document, binary, path
        self._buffers: list[bytes] | None = None
        self._added: list[bytes] = []  # new arrays, written after the buffers; each has a buffer view
        self._made: dict[tuple[int, bool], int] = {}  # (accessor, whether it holds indices) -> the converted accessor
        self._changed = False
        self._scenes = len(document.get("scenes", ()))

    def take_materials(self, textures: bool) -> list[PartMaterial]:
        """Read the materials, and remove them from the document, which keeps only their numbers. The texture
        coordinates that a material uses become TEXCOORD_0."""
        document = self._document
        if not document.get("materials"):
            return []
        read = GltfMaterials(document, self._view_bytes, self._path, textures)
        for mesh in document.get("meshes", ()):
            for primitive in mesh["primitives"]:
                uv_set = read.uv_sets[primitive["material"]] if "material" in primitive else 0
                if uv_set and f"TEXCOORD_{uv_set}" in primitive["attributes"]:
                    primitive["attributes"]["TEXCOORD_0"] = primitive["attributes"][f"TEXCOORD_{uv_set}"]
                elif uv_set:
                    primitive["attributes"].pop("TEXCOORD_0", None)
        document["materials"] = [{"name": str(number)} for number in range(len(read.found))]
        for name in ("textures", "images", "samplers"):
            document.pop(name, None)
        self._changed = True
        return read.found

    def take_nodes(self) -> None:
        """Replace the tree of nodes by a list: one node for each visible node with a mesh, with its transform to the
        scene. A mesh with a skin or with morph targets is replaced by a mesh in the pose that the document states."""
        document = self._document
        if is_flat(document):
            return
        meshes, numbers = list[Document](), dict[int, int]()
        nodes = []
        for placed in placed_meshes(document):
            if placed.weights or placed.joints is not None:
                meshes.append(self._posed(placed))
                number = len(meshes) - 1
            else:
                number = numbers.setdefault(placed.mesh, len(meshes))
                meshes += [document["meshes"][placed.mesh]] if number == len(meshes) else []
            nodes.append({"mesh": number, "matrix": placed.matrix.T.reshape(-1).tolist()})
        document |= {"meshes": meshes, "nodes": nodes, "scene": 0, "scenes": [{"nodes": list(range(len(nodes)))}]}
        for name in ("cameras", "skins", "animations"):
            document.pop(name, None)
        self._changed = True

    def _posed(self, placed: PlacedMesh) -> Document:
        """Copy a mesh, and give the copy's vertices the pose of its skin and of its morph targets."""
        mesh, inverse_bind = self._document["meshes"][placed.mesh], None
        if placed.skin is not None and "inverseBindMatrices" in self._document["skins"][placed.skin]:
            accessor = self._accessor(self._document["skins"][placed.skin]["inverseBindMatrices"])
            inverse_bind = self._values(accessor).astype(np.float64).reshape(-1, 4, 4).swapaxes(1, 2)
        primitives = []
        for primitive in mesh["primitives"]:
            attributes = dict(primitive["attributes"])
            for name, values in posed(primitive, placed, inverse_bind, self._numbers, _READ).items():
                of = self._accessor(attributes[name])["type"]
                attributes[name] = self._add(values.astype("<f4"), of, _FLOAT32)
            primitives.append(primitive | {"attributes": attributes})
        return mesh | {"primitives": primitives}

    def made(self) -> bytes | None:
        """Convert all meshes, and return the whole document as the bytes of a GLB; None if the original file can be
        read unchanged. Points, lines and scenes that are ignored cause a warning."""
        if self._scenes > 1:
            warnings.warn(f"{self._path}: only the default one of its {self._scenes} scenes is read", stacklevel=4)
        left_out: dict[str, int] = {}
        for mesh in self._document.get("meshes", ()):
            for primitive in mesh["primitives"]:
                kind = _KINDS.get(primitive.get("mode", _TRIANGLES))
                if kind is not None:
                    left_out[kind] = left_out.get(kind, 0) + 1
                else:
                    self._make_plain(primitive)
        if left_out:
            counted = ", ".join(f"{count} of {kind}" for kind, count in left_out.items())
            warnings.warn(f"{self._path}: parts that are not surfaces are ignored ({counted})", stacklevel=4)
        # a reader that does not know of escapes would look for a file named `a%20b.bin`
        escaped = any(has_escapes(str(buffer.get("uri", ""))) for buffer in self._document.get("buffers", ()))
        return self._glb() if self._changed or escaped else None

    def _make_plain(self, primitive: Document) -> None:
        attributes = primitive["attributes"]
        for name in _READ:
            if name in attributes and self._is_other(self._accessor(attributes[name]), (_FLOAT32,)):
                attributes[name] = self._plain(attributes[name], is_index=False)
        if "TEXCOORD_0" in attributes and "material" not in primitive:  # without a material, readers ignore `uv`
            self._document.setdefault("materials", []).append({})
            primitive["material"], self._changed = len(self._document["materials"]) - 1, True
        mode, indices = primitive.get("mode", _TRIANGLES), primitive.get("indices")
        if mode in (_STRIP, _FAN):
            count = self._accessor(attributes["POSITION"])["count"]
            order = np.arange(count) if indices is None else self._values(self._accessor(indices)).reshape(-1)
            primitive["indices"] = self._add(_triangles(order.astype(np.int64), mode).astype("<u4"), "SCALAR", _UINT32)
            primitive["mode"] = _TRIANGLES
        elif mode != _TRIANGLES:
            raise ValueError(f"a primitive of the unknown mode {mode}")
        elif indices is not None and self._is_other(self._accessor(indices), (5121, 5123, _UINT32)):
            primitive["indices"] = self._plain(indices, is_index=True)

    def _accessor(self, number: int) -> Document:
        found: Document = self._document["accessors"][number]
        return found

    def _is_other(self, accessor: Document, plain: tuple[int, ...]) -> bool:
        """Whether an accessor is sparse, has no stored values, or has a component type that is not in `plain`."""
        return "sparse" in accessor or "bufferView" not in accessor or accessor["componentType"] not in plain

    def _plain(self, number: int, is_index: bool) -> int:
        """Convert an accessor to a new one, of uint32 for indices and otherwise of float32; return its number."""
        key = (number, is_index)
        if key not in self._made:
            accessor = self._accessor(number)
            values = self._values(accessor) if is_index else self._numbers(number)
            dtype, kind = ("<u4", _UINT32) if is_index else ("<f4", _FLOAT32)
            self._made[key] = self._add(values.astype(dtype), accessor["type"], kind)
        return self._made[key]

    def _add(self, values: Array, of: str, kind: int) -> int:
        """Add an accessor of the type `of` and the component type `kind` for new values; return its number."""
        views, accessors = self._document.setdefault("bufferViews", []), self._document["accessors"]
        self._added.append(values.tobytes())
        views.append({"buffer": -len(self._added), "byteLength": values.nbytes})
        rows = values.reshape(-1, _WIDTHS[of])
        accessors.append({"bufferView": len(views) - 1, "componentType": kind, "count": len(rows), "type": of})
        if of == "VEC3" and len(rows):
            accessors[-1].update(min=rows.min(0).tolist(), max=rows.max(0).tolist())
        self._changed = True
        return len(accessors) - 1

    # ---- values

    def _numbers(self, number: int) -> Array:
        """Return the values (count, width) of accessor `number`. Normalized integers become fractions of the greatest
        integer."""
        accessor = self._accessor(number)
        return _floats(self._values(accessor), bool(accessor.get("normalized")))

    def _values(self, accessor: Document) -> Array:
        """Read an accessor's values (count, width) as stored, with the replacements of a sparse accessor."""
        count, width, dtype = accessor["count"], _WIDTHS[accessor["type"]], np.dtype(_DTYPES[accessor["componentType"]])
        values = np.zeros((count, width), dtype)
        if "bufferView" in accessor:
            values[:] = self._viewed(accessor["bufferView"], accessor.get("byteOffset", 0), count, width, dtype)
        sparse = accessor.get("sparse")
        if sparse is not None:
            some, at = sparse["count"], sparse["indices"]
            places = self._viewed(at["bufferView"], at.get("byteOffset", 0), some, 1, _DTYPES[at["componentType"]])
            new = sparse["values"]
            values[places.reshape(-1)] = self._viewed(new["bufferView"], new.get("byteOffset", 0), some, width, dtype)
        return values

    def _viewed(self, number: int, offset: int, count: int, width: int, dtype: Any) -> Array:
        view, item = self._document["bufferViews"][number], np.dtype(dtype)
        content = self._content(view["buffer"])
        stride = view.get("byteStride", width * item.itemsize)
        begin, end = view.get("byteOffset", 0) + offset, view.get("byteOffset", 0) + view["byteLength"]
        needed = begin + (stride * (count - 1) + width * item.itemsize if count else 0)
        if needed > min(end, len(content)):
            raise ValueError(f"view {number} is too short for {count:,} values of an accessor")
        return np.ndarray((count, width), item, content, begin, (stride, item.itemsize))

    def _view_bytes(self, number: int) -> bytes:
        """All bytes of a buffer view, such as an image."""
        view = self._document["bufferViews"][number]
        begin, content = view.get("byteOffset", 0), self._content(view["buffer"])
        if begin + view["byteLength"] > len(content):
            raise ValueError(f"view {number} ends beyond its buffer")
        return content[begin : begin + view["byteLength"]]

    def _content(self, number: int) -> bytes:
        if self._buffers is None:
            self._buffers = [self._buffer(each) for each in self._document.get("buffers", ())]
        return self._buffers[number]

    def _buffer(self, described: Document) -> bytes:
        uri = described.get("uri")
        if uri is None:
            begin, size = self._binary
            with self._path.open("rb") as whole:
                whole.seek(begin)
                return whole.read(size)
        return content_of(uri, self._path, f"{self._path} names")

    def _glb(self) -> bytes:
        """Build a GLB with a single buffer: all original buffers, then the new values."""
        pieces, starts, size = list[bytes](), list[int](), 0
        if self._document.get("buffers"):
            self._content(0)
        for content in [*(self._buffers or []), *self._added]:
            starts.append(size)
            pieces.append(content + bytes(-len(content) % 4))
            size += len(pieces[-1])
        own = len(self._buffers or [])
        for view in self._document.get("bufferViews", ()):
            number = view["buffer"] if view["buffer"] >= 0 else own - view["buffer"] - 1
            view["byteOffset"] = view.get("byteOffset", 0) + starts[number]
            view["buffer"] = 0
        self._document["buffers"] = [{"byteLength": size}]
        text = json.dumps(self._document).encode()
        text += b" " * (-len(text) % 4)
        head = struct.pack("<III", _GLB, 2, 12 + 8 + len(text) + 8 + size)
        return b"".join([head, struct.pack("<II", len(text), _JSON), text, struct.pack("<II", size, _BINARY), *pieces])


def _floats(values: Array, normalized: bool) -> Array:
    """Convert integers to the numbers that they represent: the integers themselves or, if `normalized`, fractions of
    the greatest integer."""
    if not normalized or values.dtype.kind == "f":
        return values.astype(np.float32)
    found: Array = np.maximum(values.astype(np.float64) / np.iinfo(values.dtype).max, -1.0)
    return found


def _triangles(order: Array, mode: int) -> Array:
    """Convert a strip or a fan of vertices to triangles (3 T,); in a strip, every other triangle is reversed."""
    if len(order) < 3:
        return order[:0]
    if mode == _FAN:
        corners = [np.broadcast_to(order[0], len(order) - 2), order[1:-1], order[2:]]
    else:
        turned = np.arange(len(order) - 2) % 2 == 1
        corners = [order[:-2], np.where(turned, order[2:], order[1:-1]), np.where(turned, order[1:-1], order[2:])]
    found: Array = np.stack(corners, 1).reshape(-1)
    return found

"""Read PLY files: text and binary of both byte orders, polygons of any number of corners, strips of triangles, and
elements in any order.

Texture coordinates belong to vertices (u and v, s and t, or texture_u and texture_v), or to corners of faces (the list
`texcoord`). A vertex whose corners have different texture coordinates becomes several vertices. Elements and
properties with other names are skipped.

Source: Turk, "The PLY Polygon File Format" (1994); for the names of properties, the files of Stanford's scans, MeshLab,
Blender and CloudCompare.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.errors import InputError
from rooftop.scene.building.compiled import INT, array, loop, output
from rooftop.scene.building.polygons import cut_polygons

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

_TYPES = {
    **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("uchar", "uint8"), "u1"),
    **dict.fromkeys(("short", "int16"), "i2"),
    **dict.fromkeys(("ushort", "uint16"), "u2"),
    **dict.fromkeys(("int", "int32"), "i4"),
    **dict.fromkeys(("uint", "uint32"), "u4"),
    **dict.fromkeys(("float", "float32"), "f4"),
    **dict.fromkeys(("double", "float64"), "f8"),
}
_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
_CORNERS = ("vertex_indices", "vertex_index")
_UV = (("texture_u", "texture_v"), ("u", "v"), ("s", "t"))
_COLORS = (("red", "green", "blue"), ("diffuse_red", "diffuse_green", "diffuse_blue"))
MOST_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class PlainMesh:
    """The mesh of a file that has a single part.

    Attributes:
        vertices: (V, 3).
        faces: (F, 3), empty if the file has only points.
        normals: (V, 3), or None.
        uv: (V, 2), or None.
        colors: (V, 3) or (V, 4) uint8 or floats from 0 to 1, or None.
    """

    vertices: Array
    faces: Ints
    normals: Array | None
    uv: Array | None
    colors: Array | None


@dataclass(frozen=True)
class _Property:
    name: str
    dtype: np.dtype[Any]
    count: np.dtype[Any] | None  # dtype of a list's length; None for a property that is no list


@dataclass(frozen=True)
class _Lists:
    counts: Ints  # (rows,)
    values: Array  # the values of all rows, one row after another


@dataclass
class _Element:
    name: str
    rows: int
    properties: list[_Property]


def read_ply(path: Path) -> PlainMesh:
    """Read a PLY file. Colours and textures that cannot be used cause a warning.

    Raises:
        InputError: the file is damaged.
    """
    found, image = _values(path)
    if image is not None:
        warnings.warn(
            f"{path}: its texture {image} is ignored; only textures of glTF and OBJ are read: save the mesh as one "
            "of these",
            stacklevel=4,
        )
    return _mesh(found, path)


def read_ply_points(path: Path) -> Array:
    """Read only the positions of a PLY file's vertices, (V, 3) float64, in the order of the file.

    Raises:
        InputError: the file is damaged.
    """
    found, _ = _values(path)
    return _positions(found, path)


def _values(path: Path) -> tuple[Values, str | None]:
    """Read a PLY file: return the values of its elements, and the name of its texture image, or None."""
    data = np.fromfile(path, np.uint8)
    order, elements, image, begin = _header(data[:MOST_HEADER_BYTES].tobytes(), path)
    is_text = not order
    found = _text(data[begin:].tobytes(), elements, path) if is_text else _binary(data, begin, order, elements, path)
    return found, image


def _header(head: bytes, path: Path) -> tuple[str, list[_Element], str | None, int]:
    """The byte order ("" for text), the elements, the named texture, and where the values begin, in bytes."""
    end = re.search(rb"(?:^|[\r\n])end_header[ \t]*(\r\n|\r|\n|$)", head)
    if not head.startswith(b"ply") or end is None:
        raise InputError(f"{path} cannot be read as a PLY file: it has no header from `ply` to `end_header`")
    begin = end.end()
    if end[1] == b"\r\n" and b"\r\n" not in head[: end.start() + 1]:
        begin -= 1  # lines end with a carriage return, and the values begin with a byte that looks like a line feed
    order, image, elements = None, None, list[_Element]()
    for line in head[: end.start()].decode("utf-8", "replace").splitlines():
        words = line.split()
        try:
            if words[:1] == ["format"]:
                order = _ORDERS[words[1]]
            elif words[:2] == ["comment", "TextureFile"]:
                image = line.split("TextureFile", 1)[1].strip()
            elif words[:1] == ["element"]:
                elements.append(_Element(words[1], int(words[2]), []))
                if elements[-1].rows < 0:
                    raise ValueError
            elif words[:2] == ["property", "list"]:
                count = np.dtype((order or "") + _TYPES[words[2]])
                if count.kind == "f":
                    raise ValueError
                elements[-1].properties.append(_Property(words[4], np.dtype((order or "") + _TYPES[words[3]]), count))
            elif words[:1] == ["property"]:
                elements[-1].properties.append(_Property(words[2], np.dtype((order or "") + _TYPES[words[1]]), None))
        except (IndexError, KeyError, ValueError) as error:
            raise InputError(
                f"{path} has the line {line.strip()!r} in its header, which PLY does not define"
            ) from error
    if order is None:
        raise InputError(f"{path} has a header without its format: expected {', '.join(_ORDERS)}")
    return order, elements, image, begin


# ---- values ----------------------------------------------------------------------------------------------------------

Values = dict[str, dict[str, Any]]  # for each element and each of its properties, an array (rows,) or `_Lists`


def _binary(data: Array, begin: int, order: str, elements: list[_Element], path: Path) -> Values:
    found: Values = {}
    for element in elements:
        rows, properties = element.rows, element.properties
        lengths = _lengths(data, begin, element)
        packed = _packed(properties, lengths)
        end = begin + rows * packed.itemsize
        if end <= len(data):
            table = np.frombuffer(data, packed, rows, begin)
            counted = [table[f"count {k}"] == n for k, n in enumerate(lengths) if properties[k].count is not None]
            if all(bool(each.all()) for each in counted):
                found[element.name] = {
                    each.name: table[f"{k}"]
                    if each.count is None
                    else _Lists(np.full(rows, lengths[k]), table[f"{k}"].reshape(-1))
                    for k, each in enumerate(properties)
                }
                begin = end
                continue
        starts, counts = (np.zeros((rows, len(properties)), np.int64) for _ in range(2))
        sizes = np.array([[e.count.itemsize if e.count else 0, e.dtype.itemsize] for e in properties]).reshape(-1, 2)
        begin = _walk(data, begin, sizes.astype(np.int64), order == ">", starts, counts)
        if begin < 0:
            raise _too_short(path, element, -1 - begin)
        found[element.name] = {}
        for k, each in enumerate(properties):
            size = each.dtype.itemsize
            copied = np.empty(int(counts[:, k].sum()) * size, np.uint8)
            _copy(data, starts[:, k].copy(), counts[:, k] * size, copied)
            values = copied.view(each.dtype)
            found[element.name][each.name] = values if each.count is None else _Lists(counts[:, k], values)
    return found


def _too_short(path: Path, element: _Element, row: int) -> InputError:
    return InputError(f"{path} ends in row {row:,} of {element.rows:,} of element {element.name}; it may be damaged")


def _lengths(data: Array, begin: int, element: _Element) -> list[int]:
    """Return how many values each property has in the first row of an element: the length of a list, and 1 for other
    properties and beyond the end of the file."""
    found = []
    for each in element.properties:
        count = 1
        if each.count is not None and begin + each.count.itemsize <= len(data) and element.rows:
            count = int(np.frombuffer(data, each.count, 1, begin)[0])
            begin += each.count.itemsize
        found.append(max(0, count) if begin + count * each.dtype.itemsize <= len(data) else 1)
        begin += found[-1] * each.dtype.itemsize
    return found


def _packed(properties: list[_Property], lengths: list[int]) -> np.dtype[Any]:
    """The dtype of a row of an element, if each property has this number of values in every row."""
    fields: list[tuple[Any, ...]] = []
    for k, (each, length) in enumerate(zip(properties, lengths, strict=True)):
        fields += [] if each.count is None else [(f"count {k}", each.count)]
        fields.append((f"{k}", each.dtype) if each.count is None else (f"{k}", each.dtype, (length,)))
    return np.dtype(fields)


@loop(array("uint8"), INT, array("int64", 2), INT, output("int64", 2), output("int64", 2), result=INT)
def _walk(data: Any, at: Any, sizes: Any, is_big: Any, starts: Any, counts: Any) -> Any:
    """For each row of an element and each property, find where the values begin and how many there are. Return where
    the element ends, or -1 - row if the file ends before the end of this row."""
    for row in range(starts.shape[0]):
        for k in range(sizes.shape[0]):
            number, size = 1, sizes[k, 0]
            if at + size > len(data):
                return -1 - row
            if size > 0:
                number = 0
                for byte in range(size):
                    number = 256 * number + data[at + byte if is_big else at + size - 1 - byte]
            at += size
            starts[row, k], counts[row, k] = at, number
            at += number * sizes[k, 1]
            if at > len(data):
                return -1 - row
    return at


@loop(array("uint8"), array("int64"), array("int64"), output("uint8"))
def _copy(data: Any, starts: Any, lengths: Any, copied: Any) -> None:
    at = 0
    for row in range(len(starts)):
        for byte in range(lengths[row]):
            copied[at + byte] = data[starts[row] + byte]
        at += lengths[row]


def _text(text: bytes, elements: list[_Element], path: Path) -> Values:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # otherwise, NumPy only warns of words that are not numbers
        try:
            numbers: Array = np.fromstring(text, np.float64, sep=" ") if text.strip() else np.empty(0)
        except (DeprecationWarning, ValueError) as error:
            raise InputError(f"{path} has words that are not numbers after its header; it may be damaged") from error
    found: Values = {}
    begin = 0
    for element in elements:
        rows, properties = element.rows, element.properties
        starts, counts = (np.zeros((rows, len(properties)), np.int64) for _ in range(2))
        has_count = np.array([each.count is not None for each in properties], np.int64)
        begin = _walk_numbers(numbers, begin, has_count, starts, counts)
        if begin < 0:
            raise _too_short(path, element, -1 - begin)
        found[element.name] = {}
        for k, each in enumerate(properties):
            values = _typed(numbers, starts[:, k], counts[:, k], each, path)
            found[element.name][each.name] = values if each.count is None else _Lists(counts[:, k], values)
    return found


@loop(array("float64"), INT, array("int64"), output("int64", 2), output("int64", 2), result=INT)
def _walk_numbers(numbers: Any, at: Any, has_count: Any, starts: Any, counts: Any) -> Any:
    """Like `_walk`, but for the numbers of a text file. `has_count` says which properties are lists."""
    for row in range(starts.shape[0]):
        for k in range(len(has_count)):
            number = 1
            if has_count[k] > 0:
                if at >= len(numbers) or not 0 <= numbers[at] <= len(numbers):
                    return -1 - row
                number = int(numbers[at])
                at += 1
            starts[row, k], counts[row, k] = at, number
            at += number
            if at > len(numbers):
                return -1 - row
    return at


def _typed(numbers: Array, starts: Ints, counts: Ints, described: _Property, path: Path) -> Array:
    """Select the values of a property from all numbers of a text file. Values of an integer property are checked, and
    converted to its dtype."""
    before = np.cumsum(counts) - counts
    values = numbers[np.repeat(starts - before, counts) + np.arange(counts.sum())]
    if described.dtype.kind == "f":
        return values
    limits = np.iinfo(described.dtype)
    wrong = ~((values >= limits.min) & (values <= limits.max))
    if wrong.any():
        raise InputError(
            f"{path} has the number {values[wrong][0]:g} for its property {described.name}, which is from "
            f"{limits.min} to {limits.max}"
        )
    return values.astype(described.dtype)


# ---- the mesh --------------------------------------------------------------------------------------------------------


def _mesh(found: Values, path: Path) -> PlainMesh:
    vertex, face = found.get("vertex", {}), found.get("face", {})
    vertices = _positions(found, path)
    normals = _columns(vertex, ("nx", "ny", "nz")) if _has(vertex, ("nx", "ny", "nz")) else None
    colors = _colors(vertex, path)
    if colors is None and any(_has(face, names) for names in _COLORS):
        warnings.warn(f"{path}: its face colours are ignored; only vertex colours are read", stacklevel=5)
    uv = next((_columns(vertex, names) for names in _UV if _has(vertex, names)), None)

    polygons = next((face[name] for name in _CORNERS if isinstance(face.get(name), _Lists)), None)
    strips = next((lists for lists in found.get("tristrips", {}).values() if isinstance(lists, _Lists)), None)
    if polygons is None or not len(polygons.counts):
        corners = np.empty(0, np.int64) if strips is None else _of_strips(strips)
        polygons = _Lists(np.full(len(corners) // 3, 3), corners)
    corners = polygons.values.astype(np.int64)
    wrong = (corners < 0) | (corners >= len(vertices))
    if wrong.any():
        raise InputError(
            f"{path} has a face with vertex {corners[wrong][0]}, but its {len(vertices):,} vertices are 0 to "
            f"{len(vertices) - 1}"
        )
    triangles = cut_polygons(vertices, polygons.counts, corners)
    of_corners = face.get("texcoord")
    if isinstance(of_corners, _Lists) and len(triangles):
        if (of_corners.counts != 2 * polygons.counts).any():
            warnings.warn(
                f"{path}: texture coordinates of its faces are ignored, because some corners have none", stacklevel=5
            )
            return PlainMesh(vertices, corners[triangles], normals, uv, colors)
        rows = np.empty(len(corners), [("vertex", "<i8"), ("u", "<f8"), ("v", "<f8")])
        rows["vertex"], rows["u"], rows["v"] = corners, *of_corners.values.reshape(-1, 2).T
        distinct, corners = np.unique(rows, return_inverse=True)
        kept = distinct["vertex"]
        vertices, uv = vertices[kept], np.stack([distinct["u"], distinct["v"]], 1)
        normals, colors = (None if each is None else each[kept] for each in (normals, colors))
    return PlainMesh(vertices, corners[triangles], normals, uv, colors)


def _positions(found: Values, path: Path) -> Array:
    vertex = found.get("vertex", {})
    if any(isinstance(vertex.get(axis), _Lists | None) for axis in "xyz"):
        raise InputError(f"{path} has no vertices with x, y and z")
    return _columns(vertex, "xyz")


def _has(element: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return all(isinstance(element.get(name), np.ndarray) for name in names)


def _columns(element: Mapping[str, Array], names: Any) -> Array:
    return np.stack([element[name].astype(np.float64) for name in names], 1)


def _colors(vertex: Mapping[str, Any], path: Path) -> Array | None:
    names = next((names for names in _COLORS if _has(vertex, names)), None)
    if names is None:
        return None
    more = next((name for name in ("alpha", "diffuse_alpha") if _has(vertex, (name,))), None)
    columns = [vertex[name] for name in (*names, *((more,) if more else ()))]
    if all(each.dtype == np.uint8 for each in columns):
        return np.stack(columns, 1)
    if not all(each.dtype.kind == "f" for each in columns):
        others = [each.dtype.newbyteorder("=") for each in columns if each.dtype != np.uint8 and each.dtype.kind != "f"]
        said = next(
            (name for name, of in _TYPES.items() if others and others[0] == of), "uchar for some, float for others"
        )
        warnings.warn(
            f"{path}: its vertex colours have type {said} and are ignored; only uchar and float are read", stacklevel=6
        )
        return None
    found = np.stack(columns, 1).astype(np.float64)
    if (most := float(found.max(initial=0))) > 1:
        raise InputError(
            f"{path}: its vertex colours are floats up to {most:g}, but floats are from 0 to 1: divide them by "
            f"{255 if most > 2 else most:g}, or save them as uchar"
        )
    return found


def _of_strips(strips: _Lists) -> Ints:
    """Return the corners of the T triangles of strips, (3 T,). In the input, -1 ends a strip. The input winds every
    other triangle of a strip in reverse; the result winds all triangles alike."""
    ends = np.zeros(len(strips.counts), np.int64) - 1
    order = np.insert(strips.values.astype(np.int64), np.cumsum(strips.counts), ends)
    at = np.arange(len(order))
    begin = np.maximum.accumulate(np.where(np.insert(order[:-1] < 0, 0, True), at, 0))
    first = at[:-2][(order[:-2] >= 0) & (order[1:-1] >= 0) & (order[2:] >= 0)]
    turned = (first - begin[first]) % 2
    return np.stack([order[first], order[first + 1 + turned], order[first + 2 - turned]], 1).reshape(-1)

"""Read and write the material sections of a geometry file: a table in JSON, and images in their original encoding.
docs/scene-format.md describes the material sections."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

from rooftop.errors import GeometryFileError
from rooftop.scene.images import MOST_SIDE, MOST_TEXELS, Texture
from rooftop.scene.materials import IMAGES, TABLE, Material


def material_sections(materials: Sequence[Material]) -> list[tuple[bytes, bytes]]:
    """Encode materials as sections, each a name and its content: the table and, if there are textures, the images.
    Equal images are stored once."""
    images: dict[bytes, dict[str, Any]] = {}
    length, rows = 0, []
    for material in materials:
        row: dict[str, Any] = {"name": material.name, "color": list(material.color)}
        if material.texture is not None:
            encoded = material.texture.encoded()
            if encoded not in images:
                size = {"width": material.texture.width, "height": material.texture.height}
                place = {"offset": length, "length": len(encoded), "crc": zlib.crc32(encoded)}
                images[encoded] = {"number": len(images)} | size | place
                length += len(encoded)
            row |= {"image": images[encoded]["number"], "wrap": list(material.wrap), "magnified": material.magnified}
        rows.append(row)
    listed = [{name: value for name, value in image.items() if name != "number"} for image in images.values()]
    table = json.dumps({"materials": rows, "images": listed}).encode()
    found = [(TABLE.encode(), table)]
    return [*found, (IMAGES.encode(), b"".join(images))] if images else found


def read_materials(
    path: Path, data: mmap, sections: Mapping[str, tuple[int, int]], numbers: object
) -> tuple[Material, ...]:
    """Read the materials of a file that has a table of materials. Images are read later, on request.

    Args:
        sections: offset and length of each section of the file, by name.
        numbers: the mesh's highest material number plus 1.

    Raises:
        GeometryFileError: the table is invalid.
    """
    start, length = sections[TABLE]
    try:
        table = json.loads(data[start : start + length])
        textures = [_texture(path, data, sections, number, each) for number, each in enumerate(table["images"])]
        found = tuple(_material(row, textures) for row in table["materials"])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"section {TABLE} has impossible contents ({type(error).__name__}: {error})"
        raise GeometryFileError(path, what, start) from error
    if not isinstance(numbers, int) or len(found) < numbers:
        what = f"section {TABLE} has {len(found)} materials, but faces use {numbers}"
        raise GeometryFileError(path, what, start)
    return found


def _material(row: Mapping[str, Any], textures: Sequence[Texture]) -> Material:
    if "image" not in row:
        return Material(row["color"], name=str(row.get("name", "")))
    if not 0 <= row["image"] < len(textures):
        raise ValueError(f"a material names image {row['image']}, but there are {len(textures)} images")
    wrap, magnified = row.get("wrap", "repeat"), row.get("magnified", "linear")
    return Material(row["color"], textures[row["image"]], wrap, magnified, str(row.get("name", "")))


def _texture(
    path: Path, data: mmap, sections: Mapping[str, tuple[int, int]], number: int, image: Mapping[str, Any]
) -> Texture:
    start, length = sections[IMAGES]
    offset, size, crc = int(image["offset"]), int(image["length"]), int(image["crc"])
    width, height = int(image["width"]), int(image["height"])
    if offset < 0 or size < 1 or offset + size > length:
        raise ValueError(f"image {number} lies outside section {IMAGES}")
    if min(width, height) < 1 or max(width, height) > MOST_SIDE or width * height > MOST_TEXELS:
        raise ValueError(
            f"image {number} has {width} x {height} pixels: expected sides from 1 to {MOST_SIDE}, and at most "
            f"{MOST_TEXELS:,} pixels"
        )

    def encoded() -> bytes:
        content = data[start + offset : start + offset + size]
        if zlib.crc32(content) != crc:
            raise GeometryFileError(path, f"the checksum of image {number} does not match", start + offset)
        return content

    return Texture(f"image {number} of {path}", (width, height), encoded, None)

"""Read the materials of a glTF document: base colours and their images.

In glTF a factor is in linear light, and an image contains displayed values (sRGB); here both are stored as displayed
values. The reader supports these properties of a texture: its sampler (how the texture repeats, and whether
magnification takes the nearest texel), KHR_texture_transform, its set of coordinates, and its image. The image may be
in the glTF file, in another file in the glTF file's folder or below it, or in a `data:` URI, including images of
EXT_texture_webp and MSFT_texture_dds. An image in KHR_texture_basisu raises an error that names this extension. From
the older KHR_materials_pbrSpecularGlossiness, only the diffuse colour and its texture are read.

Source: the glTF 2.0 specification of the Khronos Group (3.8 and 3.9), and its registry of extensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rooftop.errors import InputError
from rooftop.scene.arguments import short
from rooftop.scene.building.gltf_uris import content_of
from rooftop.scene.building.part_materials import AS_IT_IS, PartMaterial
from rooftop.scene.images import Texture
from rooftop.scene.materials import Material, to_displayed

Document = dict[str, Any]

_WRAPS = {10497: "repeat", 33071: "clamp", 33648: "mirror"}
_NEAREST = 9728
_SOURCES = ("EXT_texture_webp", "MSFT_texture_dds")  # extensions whose images can be read
WITHOUT = "give textures=False (--no-textures) to leave textures out"


class GltfMaterials:
    """The materials of a document.

    Args:
        document: the document; it is not changed.
        view: returns the bytes of a buffer view, given its number.
        path: path of the file.
        textures: whether images are read.

    Attributes:
        found: the colour and texture of each material of the document.
        uv_sets: for each material, n if its texture uses the coordinates TEXCOORD_n.

    Raises:
        InputError: an image is missing, damaged, too large, or in an unsupported format.
    """

    def __init__(self, document: Document, view: Callable[[int], bytes], path: Path, textures: bool) -> None:
        self._document, self._view, self._path = document, view, path
        self._textures = textures
        self._images: dict[int, Texture] = {}
        self.uv_sets: list[int] = []
        self.found = [self._material(number, each) for number, each in enumerate(document.get("materials", ()))]

    def _material(self, number: int, described: Document) -> PartMaterial:
        name = str(described.get("name", ""))
        called = f"material {number}" + (f" ({name})" if name else "")
        factor, info = _base_color(described)
        color = to_displayed([min(max(float(part), 0.0), 1.0) for part in factor[:3]]).tolist()
        mode = described.get("alphaMode", "OPAQUE")
        see_through = "" if mode == "OPAQUE" else f"alphaMode {mode} of {called}"
        if info is None or not self._textures:
            self.uv_sets.append(0)
            return PartMaterial(Material(color, name=name), AS_IT_IS, see_through)
        transform = info.get("extensions", {}).get("KHR_texture_transform", {})
        self.uv_sets.append(int(transform.get("texCoord", info.get("texCoord", 0))))
        texture = self._document["textures"][info["index"]]
        sampler = self._document["samplers"][texture["sampler"]] if "sampler" in texture else {}
        material = Material(
            color,
            self._image(texture, called),
            tuple(_WRAPS[sampler.get(which, 10497)] for which in ("wrapS", "wrapT")),
            "nearest" if sampler.get("magFilter") == _NEAREST else "linear",
            name,
        )
        return PartMaterial(material, _placing(transform), see_through)

    def _image(self, texture: Document, called: str) -> Texture:
        extensions = texture.get("extensions", {})
        number = next((extensions[each]["source"] for each in _SOURCES if each in extensions), texture.get("source"))
        if number is None:
            if not extensions:
                raise InputError(
                    f"{self._path}: the texture of {called} names no image: give it a source, or {WITHOUT}"
                )
            raise InputError(
                f"{self._path}: the texture of {called} is in {', '.join(extensions)}, which is not supported: convert "
                f"it to PNG or JPEG, or {WITHOUT}"
            )
        if number not in self._images:
            image = self._document["images"][number]
            content, name = self._content(image, called)
            try:
                self._images[number] = Texture.of_bytes(content, name)
                self._images[number].texels()
            except InputError as error:
                raise InputError(f"{self._path}: {called}: {error}; or {WITHOUT}") from error
        return self._images[number]

    def _content(self, image: Document, called: str) -> tuple[bytes, str]:
        """Return the encoded bytes of an image, and its name in messages."""
        uri = image.get("uri")
        if uri is None:
            return self._view(image["bufferView"]), f"image {image.get('name', '')}".rstrip()
        try:
            return content_of(uri, self._path, f"{self._path}: {called} names the image"), short(uri)
        except InputError as error:
            raise InputError(f"{error}, or {WITHOUT}") from None


def _base_color(described: Document) -> tuple[list[float], Document | None]:
    """Return the base colour factor of a glTF material, and the JSON object that names its base colour texture, or None
    without a texture."""
    older = described.get("extensions", {}).get("KHR_materials_pbrSpecularGlossiness")
    if older is not None:
        return older.get("diffuseFactor", [1.0] * 4), older.get("diffuseTexture")
    of = described.get("pbrMetallicRoughness", {})
    return of.get("baseColorFactor", [1.0] * 4), of.get("baseColorTexture")


def _placing(transform: Document) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Compute the matrix `PartMaterial.placing` from KHR_texture_transform, which is offset * rotation * scale with v
    downwards."""
    if not transform:
        return AS_IT_IS
    (x, y), (wide, high) = transform.get("offset", (0.0, 0.0)), transform.get("scale", (1.0, 1.0))
    angle = transform.get("rotation", 0.0)
    if not all(math.isfinite(each) for each in (x, y, wide, high, angle)):
        raise InputError(
            f"KHR_texture_transform has numbers that are not finite: {short(transform)}: correct them, or {WITHOUT}"
        )
    cosine, sine = math.cos(angle), math.sin(angle)
    # u' = cosine wide u + sine high w + x and w' = -sine wide u + cosine high w + y, with w = 1 - v and w' = 1 - v'
    return (
        (cosine * wide, -sine * high, sine * high + x),
        (sine * wide, cosine * high, 1.0 - cosine * high - y),
    )

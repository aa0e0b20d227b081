"""Upload the materials of a scene: a row for each material, and the texels of all mip levels of all images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.scene.geometry import Geometry
from rooftop.scene.images import Texture
from rooftop.scene.materials import MAGNIFIED, WRAPS, Material, to_linear
from rooftop.scene.rendering.mip_chains import LINEAR, levels_of, mip_chain
from rooftop.scene.rendering.texturing import ROW_NUMBERS, Surfaces
from rooftop.scene.rendering.uploads import Uploaded, uploaded

MOST_TEXELS_OF_ALL = 2**31 - 1  # maximum number of elements of a Warp array: 8 GiB


def uploaded_surfaces(
    meshes: Sequence[Geometry], materials: Sequence[tuple[Material, ...] | None], device: torch.device
) -> Uploaded:
    """Upload `texturing.Surfaces` of a scene. Equal images are stored once.

    Args:
        materials: materials of each mesh; None for a mesh without a table of materials.

    Raises:
        InputError: an image is damaged, or all images together have too many texels.
        GeometryFileError: an image of a geometry file does not match its checksum.
    """
    images: dict[bytes, int] = {}  # index of each image, by a hash of its content
    textures: list[Texture] = []
    numbers: dict[int, int] = {}  # index of each image, by the identity of its texture object
    rows: list[list[int]] = []
    factors: list[list[float]] = []
    mesh_rows: list[list[int]] = []
    for mesh, of_mesh in zip(meshes, materials, strict=True):
        mesh_rows.append([len(rows), len(of_mesh or ()), int(mesh.meta.get("linear_colors") is True)])
        for material in of_mesh or ():
            image = -1
            if material.texture is not None:
                if id(material.texture) not in numbers:
                    key = hashlib.sha256(_content(material.texture)).digest()
                    if key not in images:
                        images[key] = len(textures)
                        textures.append(material.texture)
                    numbers[id(material.texture)] = images[key]
                image = numbers[id(material.texture)]
            wraps = [WRAPS.index(each) for each in material.wrap]
            rows.append([image, *wraps, MAGNIFIED.index(material.magnified)])
            factors.append(to_linear(material.color).tolist())
    sizes = [levels_of(each.width, each.height) for each in textures]
    texels, starts, level_rows = _all_texels(textures, sizes, device)
    tensors = {
        "mesh_rows": uploaded(device, np.array(mesh_rows, np.int32).reshape(-1, 3)),
        "rows": uploaded(device, np.array(rows, np.int32).reshape(-1, ROW_NUMBERS)),
        "factors": uploaded(device, np.array(factors, np.float32).reshape(-1, 3)),
        "images": uploaded(device, np.array(starts, np.int32).reshape(-1, 2)),
        "levels": uploaded(device, np.array(level_rows, np.int32).reshape(-1, 3)),
        "texels": texels,
        "linear": uploaded(device, LINEAR),
    }
    return Uploaded.into(Surfaces(), tensors)


def _content(texture: Texture) -> Any:
    """Bytes that are equal for equal images: the bytes of the original file, or the texels without encoding."""
    return texture.encoded() if texture.is_file else texture.texels().tobytes()


def _all_texels(
    textures: Sequence[Texture], sizes: Sequence[list[tuple[int, int]]], device: torch.device
) -> tuple[Tensor, list[list[int]], list[list[int]]]:
    """Return the texels (N,) int32, with red in the lowest 8 bits; for each image, its first level and its number of
    levels; and for each level, its first texel, width and height."""
    total = sum(width * height for of_image in sizes for width, height in of_image)
    if total > MOST_TEXELS_OF_ALL:
        raise InputError(
            f"the textures of the scene have {total:,} texels, including all mip levels, and at most "
            f"{MOST_TEXELS_OF_ALL:,} can be addressed: make some textures smaller"
        )
    texels = torch.empty(total, dtype=torch.int32, device=device)
    starts: list[list[int]] = []
    levels: list[list[int]] = []
    at = 0
    for texture, of_image in zip(textures, sizes, strict=True):
        starts.append([len(levels), len(of_image)])
        for level, (width, height) in zip(mip_chain(texture.texels()), of_image, strict=True):
            words = np.zeros((height, width, 4), np.uint8)
            words[:, :, :3] = level
            texels[at : at + width * height] = torch.from_numpy(words.view("<i4").reshape(-1))
            levels.append([at, width, height])
            at += width * height
    return texels, starts, levels

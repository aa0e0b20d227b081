"""Read OFF texts: vertices with normals, colours and texture coordinates (NOFF, COFF, STOFF), and polygons of any
number of corners.

Source: the manual of Geomview, "OFF Files". The binary form and other dimensions than three are refused.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.errors import InputError
from rooftop.scene.building.obj_texts import utf8
from rooftop.scene.building.ply_files import PlainMesh
from rooftop.scene.building.polygons import cut_polygons

_HEADER = re.compile(r"(ST)?(C)?(N)?(4)?(n)?OFF\b[ \t]*(BINARY)?", re.IGNORECASE)


def read_off(path: Path) -> PlainMesh:
    """Read an OFF file. Colours of faces cause a warning, because only colours of vertices are read.

    Raises:
        InputError: the file is damaged, or has another form than text in three dimensions.
    """
    text = re.sub(r"#[^\r\n]*", "", utf8(path.read_bytes()).decode()).strip()
    head = _HEADER.match(text)
    if head is not None and any(head.group(4, 5, 6)):
        raise InputError(f"{path} is a file of {head[0].strip()}; only OFF as text, in three dimensions, is supported")
    has_uv, has_colors, has_normals = (bool(each) for each in (head.group(1, 2, 3) if head else (None,) * 3))
    lines = [line.split() for line in text[head.end() if head else 0 :].splitlines() if line.strip()]
    try:
        vertex_count, face_count = (int(word) for word in lines[0][:2])
        if len(lines) < 1 + vertex_count + face_count or min(vertex_count, face_count) < 0:
            raise ValueError(f"it has {len(lines) - 1:,} lines for {vertex_count:,} vertices and {face_count:,} faces")
        values = np.array(lines[1 : 1 + vertex_count], np.float64).reshape(vertex_count, -1)
        faces = lines[1 + vertex_count : 1 + vertex_count + face_count]
        counts = np.array([int(words[0]) for words in faces], np.int64)
        left = np.array([len(words) for words in faces], np.int64) - 1 - counts
        if (left < 0).any() or (counts < 0).any():
            raise ValueError("a face states a wrong number of corners")
        corners = np.array([word for words in faces for word in words[1 : 1 + int(words[0])]], np.int64)
        wrong = (corners < 0) | (corners >= vertex_count)
        if wrong.any():
            raise ValueError(f"a face names vertex {corners[wrong][0]}, but there are {vertex_count:,}")
        least = 3 + 3 * has_normals + 3 * has_colors + 2 * has_uv
        if vertex_count and values.shape[1] < least:
            raise ValueError(f"a vertex has {values.shape[1]} numbers, but {least} are needed")
    except (IndexError, ValueError) as error:
        raise InputError(f"{path} cannot be read as an OFF file ({error}); it may be damaged") from error
    if (left > 0).any():
        warnings.warn(f"{path}: its face colours are ignored; only vertex colours are read", stacklevel=4)
    begin = 3 + 3 * has_normals
    end = values.shape[1] - 2 * has_uv
    return PlainMesh(
        values[:, :3],
        corners[cut_polygons(values[:, :3], counts, corners)],
        values[:, 3:6] if has_normals else None,
        values[:, end:] if has_uv else None,
        _colors(values[:, begin : min(end, begin + 4)]) if has_colors else None,
    )


def _colors(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert colours to uint8 if any value exceeds 1; otherwise they are from 0 to 1, and stay unchanged."""
    return np.rint(values.clip(0, 255)).astype(np.uint8) if values.max(initial=0) > 1 else values

"""The viewer's modes: the shaded surface, and false colours for the renderer's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.scene.gbuffers import GBuffer
from rooftop.scene.layouts import MAX_TRIANGLES
from rooftop.scene.pictures import LEVELS, MOST_OVERDRAW, colored
from rooftop.scene.scenes import Scene


@dataclass(frozen=True)
class Mode:
    """A way to show a frame.

    Attributes:
        label: the mode's label on the page.
        meaning: one sentence that explains the mode on the page.
        outputs: the renderer's outputs that the mode needs.
        needs: the entry of a geometry file's metadata that says whether a mesh has the data for the mode; "" if all
            meshes have it.
        numbers: a function that returns the values (H, W[, C]) to show in colours. None: the values are the output with
            the mode's name.
    """

    label: str
    meaning: str
    outputs: tuple[str, ...]
    needs: str = ""
    numbers: Callable[[GBuffer, Pages], Tensor] | None = None


class Pages:
    """Finds the page of geometry from which each pixel is drawn. Pages are numbered over all meshes of a scene.

    Attributes:
        count: the number of pages.
    """

    def __init__(self, world: Scene, device: torch.device) -> None:
        firsts = [(number << 32) + mesh.first_clusters() for number, mesh in enumerate(world.meshes)]
        self.count = sum(map(len, firsts))
        # key of each page's first cluster, mesh << 32 | cluster, ascending
        self._firsts = torch.from_numpy(np.concatenate(firsts)).to(device)
        self._mesh_of = torch.from_numpy(world.instances()[0]).to(device)

    def of(self, frame: GBuffer) -> Tensor:
        """The index of the page that contains the cluster at each pixel, (H, W) int64; -1 for background. The frame
        must have the outputs "instance" and "cluster"."""
        instance, cluster = frame["instance"][0], frame["cluster"][0]
        key = (self._mesh_of[instance.clamp(min=0)].long() << 32) + cluster
        page = torch.searchsorted(self._firsts, key, right=True) - 1
        return torch.where(instance >= 0, page, -1)


def _triangles(frame: GBuffer, _: Pages) -> Tensor:
    """A number for the triangle at each pixel, unique within its mesh; -1 for background."""
    return torch.where(frame["cluster"][0] >= 0, frame["cluster"][0].long() * MAX_TRIANGLES + frame["triangle"][0], -1)


MODES = {
    "color": Mode("shaded", "Lit by one distant light, which you can move.", ("color",)),
    "normal": Mode("normals", "In the world: x is red, y green, z blue.", ("normal",)),
    "depth": Mode("depth", "The nearest point of the picture is light, the farthest is dark.", ("depth",)),
    "instance": Mode("instances", "A colour for each instance.", ("instance",)),
    "cluster": Mode("clusters", "A colour for each cluster of up to 128 triangles.", ("cluster",)),
    "triangle": Mode("triangles", "A colour for each triangle.", ("cluster", "triangle"), numbers=_triangles),
    "level": Mode("levels of detail", "The level of each cluster; 0 is the original mesh.", ("level",)),
    "overdraw": Mode("overdraw", "How many of the drawn triangles cover the pixel.", ("overdraw",)),
    "page": Mode(
        "pages",
        "A colour for each page of up to 128 KB that the pixel is drawn from.",
        ("instance", "cluster"),
        numbers=lambda frame, pages: pages.of(frame),
    ),
    "material": Mode("materials", "A colour for each material.", ("material",)),
    "base_color": Mode("base colours", "Colours, textures and vertex colours, not lit.", ("base_color",)),
    "vertex_color": Mode("vertex colours", "The mesh's own vertex colours, not lit.", ("vertex_color",), "has_colors"),
    "uv": Mode("texture coordinates", "u is red, v is green.", ("uv",), "has_uv"),
}


def modes_of(world: Scene) -> list[str]:
    """The names of the display modes whose data at least one mesh has."""
    metas = [mesh.meta for mesh in world.meshes]
    return [name for name, mode in MODES.items() if not mode.needs or any(meta[mode.needs] for meta in metas)]


def image_of(frame: GBuffer, name: str, pages: Pages) -> Tensor:
    """Colour a frame by a mode: picture (H, W, 3) uint8, on the frame's device. The frame must have the mode's
    outputs."""
    numbers = MODES[name].numbers
    return colored(_PAINTED_AS.get(name, name), frame[name][0] if numbers is None else numbers(frame, pages))


_PAINTED_AS = {"page": "cluster"}  # the output whose colours the mode uses


def legend_of(name: str) -> list[dict[str, Any]]:
    """The legend of a display mode: {"color": "#rrggbb", "label": text} for each colour; empty if the mode has no
    legend."""
    if name == "level":
        labels = [*map(str, range(LEVELS - 1)), f"{LEVELS - 1}+"]
        return _entries(_hexes("level", range(LEVELS), torch.int32), labels)
    if name == "overdraw":
        times = [1, 2, 4, 8, 16, MOST_OVERDRAW]
        return _entries(_hexes("overdraw", times, torch.int32), [*map(str, times[:-1]), f"{MOST_OVERDRAW}+"])
    if name == "depth":
        return _entries(_hexes("depth", (0, 1, 2, 3, 4), torch.float32), ["near", "", "", "", "far"])
    return []


def _entries(colors: Sequence[str], labels: Sequence[str]) -> list[dict[str, Any]]:
    return [{"color": color, "label": label} for color, label in zip(colors, labels, strict=True)]


def _hexes(name: str, values: Sequence[int], dtype: torch.dtype) -> list[str]:
    rows = colored(name, torch.tensor([list(values)], dtype=dtype))[0].tolist()
    return ["#" + "".join(f"{part:02x}" for part in row) for row in rows]

"""Meshes too large for a rasterizer: built once into levels of detail, then rendered at the cost of the pixels.

    from rooftop import scene

    scene.build_file("scan.ply", "scan.rtg")      # once; or scene.build(vertices, faces, "scan.rtg")

    world = scene.Scene()
    world.add_instance(world.add_mesh("scan.rtg"))
    camera = scene.Camera.look_at((3, 0, 1), (0, 0, 0))
    frame = scene.Renderer(world).render(camera, outputs=("depth", "normal"))

Names are loaded when they are first used. Needs meshoptimizer, trimesh and Warp: `pip install "rooftop[scene]"`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftop.scene.building.builder import BuildReport, build, build_file
    from rooftop.scene.cameras import Camera
    from rooftop.scene.gbuffers import FrameStats, GBuffer, StreamingStats
    from rooftop.scene.geometry import Geometry
    from rooftop.scene.layouts import PAGE_BYTES
    from rooftop.scene.lights import DirectionalLight, PointLight, SpotLight
    from rooftop.scene.materials import Material
    from rooftop.scene.pictures import Points, picture, points
    from rooftop.scene.rendering.renderer import Renderer
    from rooftop.scene.scenes import Scene

__all__ = [
    "PAGE_BYTES",
    "BuildReport",
    "Camera",
    "DirectionalLight",
    "FrameStats",
    "GBuffer",
    "Geometry",
    "Material",
    "PointLight",
    "Points",
    "Renderer",
    "Scene",
    "SpotLight",
    "StreamingStats",
    "build",
    "build_file",
    "picture",
    "points",
]

_NAMES = {
    "building.builder": "BuildReport build build_file",
    "cameras": "Camera",
    "gbuffers": "FrameStats GBuffer StreamingStats",
    "geometry": "Geometry",
    "layouts": "PAGE_BYTES",
    "lights": "DirectionalLight PointLight SpotLight",
    "materials": "Material",
    "pictures": "Points picture points",
    "rendering.renderer": "Renderer",
    "scenes": "Scene",
}
_HOME = {name: f"{__name__}.{file}" for file, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

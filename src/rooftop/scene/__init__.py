"""Render meshes that are too large for a rasterizer. Each mesh is built once into levels of detail. After that, the
cost of a frame depends on the number of pixels, not on the number of triangles.

    from rooftop import scene

    scene.build_file("scan.ply", "scan.rtg")      # once; or scene.build(vertices, faces, "scan.rtg")

    world = scene.Scene()
    world.add_instance(world.add_mesh("scan.rtg"))
    camera = scene.Camera.look_at((3, 0, 1), (0, 0, 0))
    frame = scene.Renderer(world).render(camera, outputs=("depth", "normal"))

Names are loaded when they are first used. Needs meshoptimizer, Numba, trimesh and Warp: `pip install "rooftop[scene]"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.first_use import on_first_use

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

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        ".building.builder": "BuildReport build build_file",
        ".cameras": "Camera",
        ".gbuffers": "FrameStats GBuffer StreamingStats",
        ".geometry": "Geometry",
        ".layouts": "PAGE_BYTES",
        ".lights": "DirectionalLight PointLight SpotLight",
        ".materials": "Material",
        ".pictures": "Points picture points",
        ".rendering.renderer": "Renderer",
        ".scenes": "Scene",
    },
)

"""The base pass in CUDA C++, for scenes without lights and materials: `base_pixels.cu`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from rooftop.scene.rendering.cuda_sources import compiled, with_pieces
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.uploads import Uploaded

OUTPUTS = (
    *("depth", "normal", "instance", "material", "material_depth", "velocity", "color", "coverage", "triangle"),
    *("uv", "vertex_color", "cluster", "level"),
)
THREADS = 256  # 16 x 16 pixels


@cache
def source() -> str:
    """The CUDA C++ source of the base pass."""
    return with_pieces(__file__, "records.cu")


def draw(
    scene: Uploaded,
    now: Uploaded,
    then: Uploaded,
    memory: FrameMemory,
    pictures: Mapping[str, Tensor],
    light: Any,
    attributes: bool,
) -> None:
    """Write the requested outputs, all of which must be in OUTPUTS. `attributes` says whether any mesh has vertex
    attributes."""
    of = memory.tensors
    kernel = compiled(source(), f"base_pass<{'true' if attributes else 'false'}>", memory.device)
    meshes = ("words", "page_at", "mesh", "mesh_steps")
    kernel.launch(
        memory.canvas.tiled_texels // THREADS, THREADS, *(scene.tensors[name] for name in meshes), of["drawn"],
        scene.tensors["instance_normals"], now.tensors["lens"], then.tensors["lens"], now.tensors["from_world"],
        now.tensors["pictures"], of["to_view"], of["before"], of["records"], of["pixels"],
        *(pictures.get(name) for name in OUTPUTS), *map(float, light),
    )  # fmt: skip

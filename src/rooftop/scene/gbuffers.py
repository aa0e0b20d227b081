"""The results of a frame."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from torch import Tensor

OUTPUTS = (
    "depth",
    "normal",
    "instance",
    "cluster",
    "triangle",
    "level",
    "uv",
    "velocity",
    "material",
    "coverage",
    "material_depth",
    "color",
    "base_color",
    "vertex_color",
    "overdraw",
    "shadow",
)


@dataclass(frozen=True)
class StreamingStats:
    """The pages of a frame, for a renderer with `pool_bytes`. `loaded` and `evicted` count since the previous frame.

    Attributes:
        wanted: pages that the frame would draw from if all were resident; `missing`: wanted pages that were absent.
        resident: pages in the pool that a frame can draw from.
        loaded, loaded_bytes: pages that were read, and their bytes; evicted: pages that were removed for others.
        resident_bytes, pool_bytes: bytes of the slots that hold resident pages, and of all slots.
        error_pixels: the possible error of the picture in pixels. It is `pixel_error` if nothing is missing, else
            larger.
    """

    wanted: int
    missing: int
    resident: int
    loaded: int
    evicted: int
    loaded_bytes: int
    resident_bytes: int
    pool_bytes: int
    error_pixels: float


@dataclass(frozen=True)
class FrameStats:
    """The work of a frame.

    Attributes:
        clusters, triangles: numbers drawn, over all views. Shadow maps are not counted, here and in `levels`.
        levels: drawn levels of detail, 0 is the finest.
        occluded: number of instances, nodes, groups and clusters that the first pass considered hidden and the second
            pass tested again.
        second_pass_clusters: those of `clusters` that only the second pass found visible.
        large_triangles: number of triangles that were drawn in tiles, including those of shadow maps.
        shadow_maps: number of shadow maps drawn for this frame; the others are from earlier frames.
        stage_ms: milliseconds of each stage, if requested.
        streaming: statistics of the pages, if the renderer has a pool.
        nodes: nodes of all instances' trees whose children culling visited.
        groups: groups that culling visited. Their clusters are the candidates, and `clusters` counts those that remain.
    """

    clusters: int
    triangles: int
    levels: tuple[int, ...]
    occluded: int
    second_pass_clusters: int
    large_triangles: int
    shadow_maps: int = 0
    stage_ms: dict[str, float] = field(default_factory=dict)
    streaming: StreamingStats | None = None
    nodes: int = 0
    groups: int = 0


@dataclass(frozen=True)
class GBuffer:
    """Pictures of (views, height, width[, C]); None for outputs that were not requested.

    Attributes:
        depth: float32, world units along the view's axis; inf is background.
        normal: float32 (..., 3), in the world, of length 1; 0 is background.
        instance: int32, in the order in which they were added; -1 is background, here and below.
        cluster: int32, its number in the mesh's file.
        triangle: int32, its number in the cluster, 0 to 127.
        level: int32, of detail; 0 is the finest.
        uv: float32 (..., 2); nan for background, and for meshes without uv.
        velocity: float32 (..., 2), pixels to the right and down since the renderer's previous frame. 0 is background;
            nan means that the point was behind the camera in that frame.
        material: int32.
        coverage: bool, whether a surface covers the pixel's centre. It serves as a stencil, and as a mask for other
            outputs.
        material_depth: float32, exactly (material + 1) / 65536: a depth value that is unique to the material; 0 is
            background.
        color: float32 (..., 3), 0 to 1, shaded, as displayed (sRGB); 0 is background.
        base_color: float32 (..., 3), 0 to 1, not shaded, in linear light: the material's colour times its texture times
            the vertices' colour; for meshes without materials, the colour that `color` shades. nan is background.
        vertex_color: float32 (..., 3), 0 to 1, as stored in the mesh; nan for background and for meshes without.
        overdraw: int32, the number of drawn triangles that covered the pixel; 0 is background.
        shadow: float32 (..., lights), the share of each light that reaches the surface, in the order in which lights
            were added: 1 is full light, 0 none, as on surfaces that face away; nan is background.
    """

    stats: FrameStats
    depth: Tensor | None = None
    normal: Tensor | None = None
    instance: Tensor | None = None
    cluster: Tensor | None = None
    triangle: Tensor | None = None
    level: Tensor | None = None
    uv: Tensor | None = None
    velocity: Tensor | None = None
    material: Tensor | None = None
    coverage: Tensor | None = None
    material_depth: Tensor | None = None
    color: Tensor | None = None
    base_color: Tensor | None = None
    vertex_color: Tensor | None = None
    overdraw: Tensor | None = None
    shadow: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        """An output by name.

        Raises:
            KeyError: the name is unknown, or the output was not requested.
        """
        value = getattr(self, name) if name in OUTPUTS else None
        if value is None:
            there = ", ".join(each.name for each in fields(self)[1:] if getattr(self, each.name) is not None)
            raise KeyError(f"{name!r} was not rendered (outputs= selects what is rendered); available: {there}")
        assert isinstance(value, Tensor)
        return value

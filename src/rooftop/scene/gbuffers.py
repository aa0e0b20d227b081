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
    """Statistics of a frame's pages, for a renderer with `pool_bytes`. `loaded` and `evicted` count pages since the
    previous frame.

    Attributes:
        wanted: number of pages that the frame would draw from if all pages were resident.
        missing: number of wanted pages that were not resident.
        resident: number of pages in the pool that a frame can draw from.
        loaded, loaded_bytes: number of pages that were read, and their size.
        evicted: number of pages that were removed to make room.
        resident_bytes, pool_bytes: total size of the slots of resident pages, and of all slots.
        error_pixels: upper bound of the picture's error in pixels: `pixel_error` if no page is missing, and larger
            if pages are missing.
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
    """Counts and times of the work of a frame.

    Attributes:
        clusters, triangles: number of clusters and of triangles drawn in all views. `clusters`, `triangles` and
            `levels` do not include shadow maps.
        levels: the levels of detail that were drawn; 0 is the finest, and levels from 32 on appear modulo 32.
        occluded: number of instances, nodes, groups and clusters that the first pass found hidden, so that the second
            pass tested them again.
        second_pass_clusters: how many of `clusters` only the second pass found visible.
        large_triangles: number of triangles that were drawn in tiles, including triangles in shadow maps.
        shadow_maps: number of shadow maps drawn for this frame; other maps are reused from earlier frames.
        stage_ms: milliseconds of each stage, if requested.
        streaming: statistics of the pages, if the renderer has a pool.
        nodes: number of tree nodes, over all views and instances, whose children were visited by culling.
        groups: number of groups whose clusters were tested by culling; `clusters` counts only the clusters that passed.
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
    """The outputs of a frame, as tensors (views, height, width[, C]). Outputs that were not requested are None.

    Attributes:
        depth: float32, world units along the view's axis; inf is background.
        normal: float32 (..., 3), in world coordinates, of length 1; 0 is background.
        instance: int32, the instance's number, in the order of addition; -1 is background, as in all other integer
            outputs except `overdraw`.
        cluster: int32, the cluster's number in the mesh's file.
        triangle: int32, the triangle's number in the cluster, 0 to 127.
        level: int32, level of detail; 0 is the finest.
        uv: float32 (..., 2); nan for background, and on meshes without uv.
        velocity: float32 (..., 2), pixels to the right and down since the renderer's previous frame. 0 is background;
            nan means that the point was behind the camera or nearer than its near plane in that frame.
        material: int32, the surface's material number.
        coverage: bool, whether a surface covers the pixel's centre. Use `coverage` as a stencil, or as a mask for other
            outputs.
        material_depth: float32, exactly (material + 1) / 65536: a depth value that is unique to the material; 0 is
            background.
        color: float32 (..., 3), 0 to 1, shaded, as displayed (sRGB); 0 is background.
        base_color: float32 (..., 3), 0 to 1, unshaded, in linear light: the product of the material's colour, its
            texture and the vertices' colour. On meshes without materials, it is the colour that `color` shades. nan is
            background.
        vertex_color: float32 (..., 3), 0 to 1, as stored in the mesh; nan for background, and on meshes without vertex
            colours.
        overdraw: int32, the number of drawn triangles that covered the pixel; 0 is background.
        shadow: float32 (..., lights), the share of each light that reaches the surface, in the order in which lights
            were added. 1 is full light, and 0 is no light, as on surfaces that face away from it. nan is background.
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
            raise KeyError(f"{name!r} was not rendered: request it with outputs=; available: {there}")
        assert isinstance(value, Tensor)
        return value

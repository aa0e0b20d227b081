"""Stage 4: compute depth, ids, material and motion of each pixel from the visibility buffer."""

import warp as wp

from rooftop.scene.rendering.buffers import (
    DEPTH_SHIFT,
    LENS_CX,
    LENS_CY,
    LENS_FX,
    LENS_FY,
    LENS_NEAR,
    LENS_ORTHOGRAPHIC,
    MESH_FIRST_PAGE,
    RANK_MASK,
    TRIANGLE_SHIFT,
    TRIANGLES,
    Frame,
    Resident,
    Targets,
    Views,
)
from rooftop.scene.rendering.clusters import (
    PAGE_FIRST_CLUSTER,
    Cluster,
    head_of,
    level_of,
    material_of,
    position_of,
    vertex_color_of,
    word_at,
)
from rooftop.scene.rendering.instance_cull import pair_of, what_of
from rooftop.scene.rendering.level_cull import CLUSTER_INDEX_BITS, CLUSTER_INDEX_MASK
from rooftop.scene.rendering.projections import pixel_at, place_at, transformed
from rooftop.scene.rendering.rasterize import on_screen
from rooftop.scene.rendering.records import Recorded, corners_of, read_record

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

MATERIAL_STEP = wp.constant(1.0 / 65536.0)  # step of material depth from one material to the next: exact in float32


@wp.struct
class Hit:
    """The triangle that is seen at a pixel, and the point on the triangle at the pixel."""

    rank: wp.int32
    pair: wp.int32
    instance: wp.int32
    mesh: wp.int32
    triangle: wp.int32
    cluster: Cluster
    corners: wp.vec3i
    a: wp.vec3  # the triangle's corners, in the mesh's units
    b: wp.vec3
    c: wp.vec3
    parts: wp.vec3  # barycentric weights of a, b and c at the point; the point lies within the triangle


@wp.func
def ray(views: Views, place: wp.vec3i):
    """The ray through a pixel (view, row, column), in view coordinates: the vector from the eye to the ray's point at
    depth 1."""
    view = place[0]
    return wp.vec3(
        (wp.float32(place[2]) - views.lens[view, LENS_CX]) / views.lens[view, LENS_FX],
        (wp.float32(place[1]) - views.lens[view, LENS_CY]) / views.lens[view, LENS_FY],
        1.0,
    )


@wp.func
def longest_side(a: wp.vec3, b: wp.vec3, c: wp.vec3):
    """Approximate length of the longer of the two sides of a triangle that meet at `a`. Division by this length keeps
    products of four lengths within the range of float32."""
    return wp.max(wp.max(wp.abs(b - a)), wp.max(wp.abs(c - a)))


@wp.func
def shortened(vector: wp.vec3, longest: wp.float32):
    """Divide a vector by the length `longest`, which is first rounded down to a power of two, so that the division is
    exact."""
    exponent = (wp.cast(longest, wp.int32) >> 23) & 255
    return wp.cast(wp.max(254 - exponent, 1) << 23, wp.float32) * vector


@wp.func
def parts_of(views: Views, place: wp.vec3i, a: wp.vec3, b: wp.vec3, c: wp.vec3):
    """Barycentric coordinates of the point at which a pixel's ray meets the plane of a triangle, clamped to the
    triangle. The corners `a`, `b` and `c` are in the coordinates of the view; `place` is the pixel's view, row and
    column.

    The computation uses positions relative to the first corner. So the differences between the corners stay accurate,
    even if the triangle is small and far away.
    """
    direction = ray(views, place)
    longest = longest_side(a, b, c)
    if longest == 0.0:
        return wp.vec3(1.0, 0.0, 0.0)
    u = shortened(b - a, longest)
    v = shortened(c - a, longest)
    normal = wp.cross(u, v)
    from_a = wp.vec3()
    if views.lens[place[0], LENS_ORTHOGRAPHIC] > 0.0:
        from_a = wp.vec3(direction[0] - a[0], direction[1] - a[1], 0.0)
        # Move the point along the axis onto the plane, unless the triangle is seen edge-on.
        if normal[2] != 0.0:
            from_a[2] = -(normal[0] * from_a[0] + normal[1] * from_a[1]) / normal[2]
    else:
        along = wp.dot(normal, direction)
        depth = a[2]
        if along != 0.0:
            depth = wp.dot(normal, a) / along
        from_a = depth * direction - a
    from_a = shortened(from_a, longest)
    square = wp.dot(normal, normal)
    of_b = wp.float32(0.0)
    of_c = wp.float32(0.0)
    if square > 0.0:
        of_b = wp.clamp(wp.dot(wp.cross(from_a, v), normal) / square, 0.0, 1.0)
        of_c = wp.clamp(wp.dot(wp.cross(u, from_a), normal) / square, 0.0, 1.0)
    total = wp.max(of_b + of_c, 1.0)
    of_b = of_b / total
    of_c = of_c / total
    return wp.vec3(1.0 - of_b - of_c, of_b, of_c)


@wp.func
def rank_of(pixel: wp.int64):
    """The rank of the cluster at a covered pixel: the cluster's index in `Frame.drawn` and in `Frame.records`. `pixel`
    is the pixel's value in the visibility buffer."""
    return wp.int32(pixel >> TRIANGLE_SHIFT) & RANK_MASK


@wp.func
def covering(pixel: wp.int64, recorded: Recorded):
    """Find the triangle at a covered pixel. The fields of the triangle's corners and of the point on it stay unset.
    `pixel` is the pixel's value in the visibility buffer, and `recorded` is the record of the triangle's cluster."""
    hit = Hit()
    hit.triangle = wp.int32(pixel) & (TRIANGLES - 1)
    hit.rank = rank_of(pixel)
    hit.pair = recorded.pair
    hit.instance = recorded.instance
    hit.mesh = recorded.mesh
    hit.cluster = recorded.cluster
    return hit


@wp.func
def hit_of(resident: Resident, views: Views, frame: Frame, pixel: wp.int64, place: wp.vec3i):
    """Find the triangle at a covered pixel, and the point on the triangle. `pixel` is the pixel's value in the
    visibility buffer, and `place` its view, row and column."""
    recorded = read_record(resident, frame.records, rank_of(pixel))
    hit = covering(pixel, recorded)
    hit.corners = corners_of(resident, recorded, hit.triangle)
    step = recorded.step
    hit.a = position_of(resident, hit.cluster, hit.corners[0], step)
    hit.b = position_of(resident, hit.cluster, hit.corners[1], step)
    hit.c = position_of(resident, hit.cluster, hit.corners[2], step)
    a = transformed(frame.to_view, hit.pair, hit.a)
    b = transformed(frame.to_view, hit.pair, hit.b)
    c = transformed(frame.to_view, hit.pair, hit.c)
    hit.parts = parts_of(views, place, a, b, c)
    return hit


@wp.func
def point_on(hit: Hit):
    """The surface point that is seen at the pixel. The point lies on the triangle `hit`; its coordinates are in the
    mesh's units, relative to the mesh's origin."""
    return hit.parts[0] * hit.a + hit.parts[1] * hit.b + hit.parts[2] * hit.c


@wp.func
def vertex_color_at(resident: Resident, hit: Hit):
    """The vertex colour at the pixel, interpolated between the triangle's corners: red, green and blue from 0 to 1.
    Only for meshes with colours."""
    return (
        hit.parts[0] * vertex_color_of(resident, hit.cluster, hit.corners[0])
        + hit.parts[1] * vertex_color_of(resident, hit.cluster, hit.corners[1])
        + hit.parts[2] * vertex_color_of(resident, hit.cluster, hit.corners[2])
    )


@wp.func
def emit_velocity(
    views: Views,
    views_before: Views,
    frame: Frame,
    targets: Targets,
    texel: wp.int32,
    view: wp.int32,
    hit: Hit,
):
    """Write the motion in pixels of the surface point at the pixel, from the previous frame's picture to this frame's
    picture. NaN if the point was nearer than the previous frame's near plane."""
    point = point_on(hit)
    now = on_screen(views, view, transformed(frame.to_view, hit.pair, point))
    was = transformed(frame.before, hit.pair, point)
    then = on_screen(views_before, view, was)
    if was[2] < views_before.lens[view, LENS_NEAR]:  # the point was nearer than the near plane
        then = wp.vec2(wp.nan, wp.nan)
    targets.velocity[texel, 0] = now[0] - then[0]
    targets.velocity[texel, 1] = now[1] - then[1]


@wp.func
def emit_pixel(views: Views, targets: Targets, texel: wp.int32, view: wp.int32, pixel: wp.int64):
    """Write the targets that need only the pixel's value in the visibility buffer: depth, coverage and triangle."""
    if targets.depth.shape[0] > 0:
        near = wp.cast(wp.int32(pixel >> DEPTH_SHIFT), wp.float32)
        targets.depth[texel] = views.lens[view, LENS_NEAR] / near
    if targets.coverage.shape[0] > 0:
        targets.coverage[texel] = True
    if targets.triangle.shape[0] > 0:
        targets.triangle[texel] = wp.int32(pixel) & (TRIANGLES - 1)


@wp.func
def number_and_level(resident: Resident, frame: Frame, hit: Hit):
    """The index of a pixel's cluster in its mesh, and the cluster's level of detail. The cluster's record contains
    neither the number nor the level, so both are read from the page."""
    item = frame.drawn[hit.rank]
    page = what_of(item) >> CLUSTER_INDEX_BITS
    index = what_of(item) & CLUSTER_INDEX_MASK
    at = resident.page_at[resident.mesh[hit.mesh, MESH_FIRST_PAGE] + page]
    number = word_at(resident.words, at + wp.int64(PAGE_FIRST_CLUSTER)) + index
    return wp.vec2i(number, level_of(resident, head_of(resident, hit.mesh, page, index)))


@wp.func
def emit_cluster(resident: Resident, frame: Frame, targets: Targets, texel: wp.int32, hit: Hit):
    """Write the targets that need the cluster at the pixel: cluster, level, material, and material depth, a depth value
    that encodes the material (`GBuffer.material_depth`)."""
    if targets.cluster.shape[0] + targets.level.shape[0] > 0:
        both = number_and_level(resident, frame, hit)
        if targets.cluster.shape[0] > 0:
            targets.cluster[texel] = both[0]
        if targets.level.shape[0] > 0:
            targets.level[texel] = both[1]
    if targets.material.shape[0] + targets.material_depth.shape[0] > 0:
        material = material_of(resident, hit.cluster, hit.triangle)
        if targets.material.shape[0] > 0:
            targets.material[texel] = material
        if targets.material_depth.shape[0] > 0:
            targets.material_depth[texel] = MATERIAL_STEP * wp.float32(material + 1)


@wp.func
def emit_background(targets: Targets, texel: wp.int32):
    """Write the background's values (see `BACKGROUND` in `targets.py`) to a texel that no triangle covers. `shadows.py`
    and `base_colors.py` write the background of their own targets."""
    if targets.depth.shape[0] > 0:
        targets.depth[texel] = wp.inf
    if targets.coverage.shape[0] > 0:
        targets.coverage[texel] = False
    if targets.triangle.shape[0] > 0:
        targets.triangle[texel] = -1
    if targets.instance.shape[0] > 0:
        targets.instance[texel] = -1
    if targets.cluster.shape[0] > 0:
        targets.cluster[texel] = -1
    if targets.level.shape[0] > 0:
        targets.level[texel] = -1
    if targets.material.shape[0] > 0:
        targets.material[texel] = -1
    if targets.material_depth.shape[0] > 0:
        targets.material_depth[texel] = 0.0
    if targets.velocity.shape[0] > 0:
        for axis in range(2):
            targets.velocity[texel, axis] = 0.0
    if targets.normal.shape[0] > 0:
        for axis in range(3):
            targets.normal[texel, axis] = 0.0
    if targets.uv.shape[0] > 0:
        for axis in range(2):
            targets.uv[texel, axis] = wp.nan
    if targets.vertex_color.shape[0] > 0:
        for axis in range(3):
            targets.vertex_color[texel, axis] = wp.nan
    if targets.color.shape[0] > 0:
        for axis in range(3):
            targets.color[texel, axis] = 0.0


@wp.kernel
def emit_depth_targets(
    resident: Resident,
    views: Views,
    views_before: Views,
    frame: Frame,
    targets: Targets,
    texels: wp.int32,
    stride: wp.int32,
):
    """Write depth, coverage, ids, material depth and motion of all pixels. The kernel runs only in frames without stage
    5 (`base_pass.py`), which would write these targets too. Each thread processes every `stride`-th of the `texels`
    pixels, and writes only targets whose arrays are not empty."""
    for thread in range(wp.tid(), texels, stride):
        at = pixel_at(views, thread)
        i = at[0]
        pixel = wp.int64(0)
        if i >= 0:
            pixel = frame.pixels[i]
        if pixel == wp.int64(0):
            if i >= 0:
                emit_background(targets, i)
        else:
            if targets.depth.shape[0] + targets.coverage.shape[0] + targets.triangle.shape[0] > 0:
                emit_pixel(views, targets, i, place_at(views, at)[0], pixel)
            if targets.instance.shape[0] > 0:
                item = frame.drawn[rank_of(pixel)]
                targets.instance[i] = pair_of(item) % frame.instances
            of_cluster = targets.cluster.shape[0] + targets.level.shape[0]
            if of_cluster + targets.material.shape[0] + targets.material_depth.shape[0] > 0:
                recorded = read_record(resident, frame.records, rank_of(pixel))
                emit_cluster(resident, frame, targets, i, covering(pixel, recorded))
            if targets.velocity.shape[0] > 0:
                place = place_at(views, at)
                hit = hit_of(resident, views, frame, pixel, place)
                emit_velocity(views, views_before, frame, targets, i, place[0], hit)

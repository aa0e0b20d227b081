"""Stage 6: compute how much of each light reaches the surface at a pixel, from the shadow maps drawn by earlier stages.

Before the look-up, a point is moved along its normal: by the reach of the filter times the surface's slope in the map,
plus the errors of the levels of detail in the map and in the picture. So a surface does not shadow itself.
"""

import warp as wp

from rooftop.scene.rendering.base_pass import to_world, toward_camera, upright
from rooftop.scene.rendering.buffers import (
    DEPTH_SHIFT,
    DIRECTIONAL,
    LENS_CX,
    LENS_CY,
    LENS_FX,
    LENS_FY,
    LENS_NEAR,
    LENS_ORTHOGRAPHIC,
    PICTURE_AT,
    PICTURE_HEIGHT,
    PICTURE_WIDTH,
    POINT,
    Frame,
    Lights,
    Resident,
    Targets,
    Views,
)
from rooftop.scene.rendering.emit_depth_targets import hit_of, point_on
from rooftop.scene.rendering.lighting import point_of, toward_light
from rooftop.scene.rendering.projections import pixel_at, place_at

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

REACH = wp.constant(1.5)  # reach of the filter in texels: the diagonal of a texel, plus rounding
INSIDE = wp.constant(1.0)  # points nearer than this many texels to a map's edge use the next cascade


@wp.kernel
def keep_depths(
    views: Views,
    frame: Frame,
    which: wp.array(dtype=wp.int32),
    texel_at: wp.array(dtype=wp.int64),
    depths: wp.array(dtype=wp.float32),
    stride: wp.int32,
):
    """Store the nearest depths of newly drawn shadow maps: the k-th view after the cameras' views becomes map number
    which[k]."""
    begin = wp.int32(0)
    for number in range(which.shape[0]):
        view = frame.cameras + number
        texels = views.pictures[view, PICTURE_WIDTH] * views.pictures[view, PICTURE_HEIGHT]
        for texel in range((wp.tid() + stride - begin) % stride, texels, stride):
            pixel = frame.pixels[views.pictures[view, PICTURE_AT] + texel]
            depth = wp.float32(wp.inf)
            if pixel != wp.int64(0):
                depth = views.lens[view, LENS_NEAR] / wp.cast(wp.int32(pixel >> DEPTH_SHIFT), wp.float32)
            depths[texel_at[which[number]] + wp.int64(texel)] = depth
        begin = (begin + texels % stride) % stride


@wp.func
def seen_from(lights: Lights, number: wp.int32, point: wp.vec3d):
    """Transform a point of the world to a map's view, accurately even far from the world's origin."""
    found = wp.vec3()
    for axis in range(3):
        total = lights.from_world[number, 4 * axis + 3]
        for inner in range(3):
            total += lights.from_world[number, 4 * axis + inner] * point[inner]
        found[axis] = wp.float32(total)
    return found


@wp.func
def on_map(lights: Lights, number: wp.int32, at: wp.vec3):
    """The column and row of a point on the map, in texels."""
    over = wp.where(lights.lens[number, LENS_ORTHOGRAPHIC] > 0.0, 1.0, at[2])
    return wp.vec2(
        lights.lens[number, LENS_FX] * at[0] / over + lights.lens[number, LENS_CX],
        lights.lens[number, LENS_FY] * at[1] / over + lights.lens[number, LENS_CY],
    )


@wp.func
def texel_size(lights: Lights, number: wp.int32, at: wp.vec3):
    """Size of a texel of a map, in world units, at the depth of a point in the map's view."""
    over = wp.where(lights.lens[number, LENS_ORTHOGRAPHIC] > 0.0, 1.0, at[2])
    return over / wp.min(lights.lens[number, LENS_FX], lights.lens[number, LENS_FY])


@wp.func
def slope_of(lights: Lights, number: wp.int32, normal: wp.vec3):
    """The slope of a plane on a map: the sine of the angle between its normal and the map's axis. If a point of the
    plane moves by 1 unit at right angles to this axis, its distance from the plane becomes at most this slope."""
    along = wp.float32(0.0)
    for axis in range(3):
        along += wp.float32(lights.from_world[number, 8 + axis]) * normal[axis]
    return wp.sqrt(wp.max(1.0 - along * along, 0.0))


@wp.func
def holds(lights: Lights, light: wp.int32, number: wp.int32, at: wp.vec3):
    """Whether a map shows a point, at least INSIDE texels from the map's edge."""
    if at[2] < lights.lens[number, LENS_NEAR]:
        return False
    place = on_map(lights, number, at)
    last = wp.float32(lights.maps[light, 2] - 1) - INSIDE
    return place[0] >= INSIDE and place[1] >= INSIDE and place[0] <= last and place[1] <= last


@wp.func
def map_of(lights: Lights, light: wp.int32, view: wp.int32, point: wp.vec3d):
    """The finest map that shows a point; -1 if no map does, so that the point is unshadowed."""
    first = lights.maps[light, 0]
    count = lights.maps[light, 1]
    if lights.kind[light] == DIRECTIONAL:
        first += view * count
    if lights.kind[light] == POINT:
        away = wp.vec3d()
        for axis in range(3):
            away[axis] = point[axis] - lights.vector[light, axis]
        axis = wp.int32(0)
        if wp.abs(away[1]) > wp.abs(away[axis]):
            axis = wp.int32(1)
        if wp.abs(away[2]) > wp.abs(away[axis]):
            axis = wp.int32(2)
        first += 2 * axis + wp.where(away[axis] < wp.float64(0.0), 1, 0)
        count = wp.int32(1)
    for number in range(first, first + count):
        if holds(lights, light, number, seen_from(lights, number, point)):
            return number
    return wp.int32(-1)


@wp.func
def is_free(lights: Lights, light: wp.int32, number: wp.int32, x: wp.int32, y: wp.int32, depth: wp.float32):
    """1 if no surface in a texel is nearer to the light than `depth`; else 0."""
    size = lights.maps[light, 2]
    column = wp.clamp(x, 0, size - 1)
    row = wp.clamp(y, 0, size - 1)
    return wp.where(lights.depths[lights.texel_at[number] + wp.int64(row * size + column)] >= depth, 1.0, 0.0)


@wp.func
def share_of(lights: Lights, light: wp.int32, number: wp.int32, point: wp.vec3d):
    """The share (0 to 1) of a light that reaches a point, interpolated between the four nearest texels of shadow map
    `number`."""
    at = seen_from(lights, number, point)
    place = on_map(lights, number, at)
    x = wp.int32(wp.floor(place[0]))
    y = wp.int32(wp.floor(place[1]))
    right = place[0] - wp.float32(x)
    down = place[1] - wp.float32(y)
    above = (1.0 - right) * is_free(lights, light, number, x, y, at[2])
    above += right * is_free(lights, light, number, x + 1, y, at[2])
    below = (1.0 - right) * is_free(lights, light, number, x, y + 1, at[2])
    below += right * is_free(lights, light, number, x + 1, y + 1, at[2])
    return (1.0 - down) * above + down * below


@wp.kernel
def shadows(
    resident: Resident,
    views: Views,
    frame: Frame,
    targets: Targets,
    lights: Lights,
    texels: wp.int32,
    stride: wp.int32,
):
    """Compute `targets.shadow` of each pixel."""
    for thread in range(wp.tid(), texels, stride):
        at = pixel_at(views, thread)
        i = at[0]
        pixel = wp.int64(0)
        if i >= 0:
            pixel = frame.pixels[i]
        if pixel == wp.int64(0):
            if i >= 0:
                for light in range(lights.kind.shape[0]):
                    targets.shadow[i, light] = wp.nan
        else:
            place = place_at(views, at)
            view = place[0]
            hit = hit_of(resident, views, frame, pixel, place)
            near = wp.cast(wp.int32(pixel >> DEPTH_SHIFT), wp.float32)
            depth = views.lens[view, LENS_NEAR] / near
            point = point_of(resident, hit.instance, point_on(hit))
            toward = toward_camera(views, place)
            normal = to_world(resident, hit.instance, upright(hit.a, hit.b, hit.c))
            if wp.dot(normal, normal) == 0.0:
                normal = toward
            if wp.dot(normal, toward) < 0.0:
                normal = -normal
            over = wp.where(views.lens[view, LENS_ORTHOGRAPHIC] > 0.0, 1.0, depth)
            in_picture = over / wp.min(views.lens[view, LENS_FX], views.lens[view, LENS_FY])
            for light in range(lights.kind.shape[0]):
                to_light = toward_light(lights, light, point)
                facing = wp.dot(normal, to_light)
                share = wp.float32(0.0)
                if facing > 0.0:  # a surface that faces away from the light is in its own shadow
                    share = wp.float32(1.0)
                    number = map_of(lights, light, view, point)
                    if number >= 0:
                        texel = texel_size(lights, number, seen_from(lights, number, point))
                        slope = slope_of(lights, number, normal)
                        off = REACH * texel * (slope + 0.05) + frame.pixel_error * (texel + in_picture)
                        moved = wp.vec3d()
                        for axis in range(3):
                            moved[axis] = point[axis] + wp.float64(off * normal[axis])
                        share = share_of(lights, light, number, moved)
                targets.shadow[i, light] = share

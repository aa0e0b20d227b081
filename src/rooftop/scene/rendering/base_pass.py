"""Stage 5: compute the normal, the texture coordinates and a simple shaded colour of the surface at each pixel. This
stage also writes everything that stage 4 would write.

In Nanite each material has its own program. So Nanite runs this stage once for each range of materials, and finds the
range's pixels by material depth. Here all materials are rows of one table that one kernel reads. A launch for each
range would read the visibility buffer repeatedly without any gain. `base_colors` looks up textures before this stage.
"""

import warp as wp

from rooftop.scene.rendering.buffers import (
    HAS_UV,
    LENS_ORTHOGRAPHIC,
    MESH_ATTRIBUTES,
    Frame,
    Lights,
    Resident,
    Targets,
    Views,
)
from rooftop.scene.rendering.clusters import material_of, normal_of, uv_of
from rooftop.scene.rendering.emit_depth_targets import (
    Hit,
    emit_background,
    emit_cluster,
    emit_pixel,
    emit_velocity,
    hit_of,
    longest_side,
    point_on,
    ray,
    shortened,
    vertex_color_at,
)
from rooftop.scene.rendering.lighting import point_of, strength, toward_light
from rooftop.scene.rendering.projections import pixel_at, place_at
from rooftop.scene.rendering.texturing import Surfaces, displayed, row_of

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

AMBIENT = wp.constant(0.25)


@wp.func
def to_world(resident: Resident, instance: wp.int32, normal: wp.vec3):
    """Transform a normal of the mesh to the world, and normalize it."""
    turned = wp.vec3()
    for axis in range(3):
        for inner in range(3):
            turned[axis] += resident.instance_normals[instance, 3 * axis + inner] * normal[inner]
    return wp.normalize(turned)


@wp.func
def upright(a: wp.vec3, b: wp.vec3, c: wp.vec3):
    """A normal vector of a triangle, not scaled to length 1; 0 if the triangle has no area."""
    longest = longest_side(a, b, c)
    if longest == 0.0:
        return wp.vec3()
    return wp.cross(shortened(b - a, longest), shortened(c - a, longest))


@wp.func
def surface_normal(resident: Resident, hit: Hit, flat: wp.vec3):
    """The unit normal of the surface in the world: interpolated from the mesh's normals or, on meshes without normals,
    the normal of the triangle.
    """
    if not hit.cluster.has_normals:
        return flat
    return to_world(
        resident,
        hit.instance,
        hit.parts[0] * normal_of(resident, hit.cluster, hit.corners[0])
        + hit.parts[1] * normal_of(resident, hit.cluster, hit.corners[1])
        + hit.parts[2] * normal_of(resident, hit.cluster, hit.corners[2]),
    )


@wp.func
def palette(number: wp.int32):
    """Return a pale colour for a number. From number to number, the hue turns by the golden ratio of a circle; the
    colour of 0 is nearly white."""
    if number == 0:
        return wp.vec3(0.86, 0.85, 0.82)
    hue = 6.0 * wp.frac(0.6180339887 * wp.float32(number))
    return wp.vec3(
        0.35 + 0.6 * wp.clamp(wp.abs(hue - 3.0) - 1.0, 0.0, 1.0),
        0.35 + 0.6 * wp.clamp(2.0 - wp.abs(hue - 2.0), 0.0, 1.0),
        0.35 + 0.6 * wp.clamp(2.0 - wp.abs(hue - 4.0), 0.0, 1.0),
    )


@wp.func
def own_color(resident: Resident, hit: Hit):
    """The interpolated vertex colour, or, on meshes without vertex colours, the palette's colour of the material."""
    if hit.cluster.color_bits == 0:
        return palette(material_of(resident, hit.cluster, hit.triangle))
    return vertex_color_at(resident, hit)


@wp.func
def toward_camera(views: Views, place: wp.vec3i):
    """The direction from the surface at a pixel (view, row, column) to the camera, in the world, with length 1."""
    view = place[0]
    direction = -ray(views, place)
    if views.lens[view, LENS_ORTHOGRAPHIC] > 0.0:
        direction = wp.vec3(0.0, 0.0, -1.0)
    turned = wp.vec3()
    for axis in range(3):
        for inner in range(3):
            turned[axis] += wp.float32(views.from_world[view, 4 * inner + axis]) * direction[inner]
    return wp.normalize(turned)


@wp.func
def light_on(resident: Resident, lights: Lights, targets: Targets, texel: wp.int32, hit: Hit, n: wp.vec3):
    """The light (red, green and blue) that all lights, with their shadows, cast on the surface seen at a pixel."""
    total = wp.vec3()
    point = point_of(resident, hit.instance, point_on(hit))
    for light in range(lights.kind.shape[0]):
        toward = toward_light(lights, light, point)
        share = wp.max(wp.dot(n, toward), 0.0) * targets.shadow[texel, light]
        share *= strength(lights, light, point, toward)
        for axis in range(3):
            total[axis] += share * lights.color[light, axis]
    return total


@wp.kernel
def base_pass(
    resident: Resident,
    views: Views,
    views_before: Views,
    frame: Frame,
    targets: Targets,
    lights: Lights,
    surfaces: Surfaces,
    light: wp.vec3,
    texels: wp.int32,
    stride: wp.int32,
):
    """Write the base pass's targets for each pixel. In a scene without lights, `light` is the unit vector in the world
    towards the default light. The targets of `emit_depth_targets` are written too, so that the surface at a pixel is
    computed only once."""
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
            place = place_at(views, at)
            hit = hit_of(resident, views, frame, pixel, place)
            emit_pixel(views, targets, i, place[0], pixel)
            if targets.instance.shape[0] > 0:
                targets.instance[i] = hit.instance
            emit_cluster(resident, frame, targets, i, hit)
            if targets.velocity.shape[0] > 0:
                emit_velocity(views, views_before, frame, targets, i, place[0], hit)
            flat = to_world(resident, hit.instance, upright(hit.a, hit.b, hit.c))
            toward = toward_camera(views, place)
            normal = surface_normal(resident, hit, flat)
            if wp.dot(normal, normal) == 0.0:  # a sliver that has an area on the screen, but none in the world
                normal = toward
            if targets.normal.shape[0] > 0:
                for axis in range(3):
                    targets.normal[i, axis] = normal[axis]
            if targets.uv.shape[0] > 0:
                uv = wp.vec2(wp.nan, wp.nan)
                if resident.mesh[hit.mesh, MESH_ATTRIBUTES] & HAS_UV != 0:
                    step = resident.mesh_steps[hit.mesh, 1]
                    uv = (
                        hit.parts[0] * uv_of(resident, hit.cluster, hit.corners[0], step)
                        + hit.parts[1] * uv_of(resident, hit.cluster, hit.corners[1], step)
                        + hit.parts[2] * uv_of(resident, hit.cluster, hit.corners[2], step)
                    )
                targets.uv[i, 0] = uv[0]
                targets.uv[i, 1] = uv[1]
            if targets.vertex_color.shape[0] > 0:
                own = wp.vec3(wp.nan, wp.nan, wp.nan)
                if hit.cluster.color_bits > 0:
                    own = own_color(resident, hit)
                for axis in range(3):
                    targets.vertex_color[i, axis] = own[axis]
            if targets.color.shape[0] > 0:
                if wp.dot(flat, toward) < 0.0:  # the back of a surface is lit like its front
                    normal = -normal
                ambient = 0.5 + 0.5 * wp.max(wp.dot(normal, toward), 0.0)
                shone = wp.vec3(1.0, 1.0, 1.0) * wp.max(wp.dot(normal, light), 0.0)
                if lights.kind.shape[0] > 0:
                    shone = light_on(resident, lights, targets, i, hit, normal)
                color = own_color(resident, hit)
                if row_of(resident, surfaces, hit) >= 0:
                    for axis in range(3):
                        color[axis] = displayed(targets.base_color[i, axis])
                for axis in range(3):
                    lit = AMBIENT * ambient + (1.0 - AMBIENT) * shone[axis]
                    targets.color[i, axis] = color[axis] * wp.min(lit, 1.0)

"""Compute the strength of a light at a point, without shadows."""

import warp as wp

from rooftop.scene.rendering.buffers import DIRECTIONAL, SPOT, Lights, Resident

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.func
def point_of(resident: Resident, instance: wp.int32, point: wp.vec3):
    """Transform a point, relative to its mesh's origin, to the world."""
    found = wp.vec3d()
    for axis in range(3):
        total = resident.instance_to_world[instance, 4 * axis + 3]
        for inner in range(3):
            total += resident.instance_to_world[instance, 4 * axis + inner] * wp.float64(point[inner])
        found[axis] = total
    return found


@wp.func
def toward_light(lights: Lights, light: wp.int32, point: wp.vec3d):
    """The direction from a point to a light, with length 1."""
    found = wp.vec3()
    if lights.kind[light] == DIRECTIONAL:
        for axis in range(3):
            found[axis] = wp.float32(lights.vector[light, axis])
    else:
        for axis in range(3):
            found[axis] = wp.float32(lights.vector[light, axis] - point[axis])
    return wp.normalize(found)


@wp.func
def strength(lights: Lights, light: wp.int32, point: wp.vec3d, toward: wp.vec3):
    """The strength of an unobstructed light at a point: a factor for the light's colour."""
    if lights.kind[light] == DIRECTIONAL:
        return wp.float32(1.0)
    away = wp.vec3()
    for axis in range(3):
        away[axis] = wp.float32(point[axis] - lights.vector[light, axis])
    distance = wp.length(away)
    over = distance / lights.reach[light, 0]
    faded = wp.clamp(1.0 - over * over * over * over, 0.0, 1.0) / wp.max(distance * distance, 1.0e-12)
    if lights.kind[light] == SPOT:
        along = wp.float32(0.0)
        for axis in range(3):
            along -= toward[axis] * lights.axis[light, axis]
        begin = lights.reach[light, 1]
        full = lights.reach[light, 2]
        if along <= begin:
            return wp.float32(0.0)
        faded *= wp.clamp((along - begin) / wp.max(full - begin, 1.0e-6), 0.0, 1.0)
    return faded

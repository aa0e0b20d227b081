"""Before stage 5: compute the base colour of each pixel, if "base_color" is requested, or "color" in a scene with
materials.

Texture filtering is in this separate kernel because, compiled for sm_90, it needs 32 bytes of stack. The base pass,
which also draws scenes without materials, needs none.
"""

import warp as wp

from rooftop.scene.rendering.base_pass import own_color
from rooftop.scene.rendering.buffers import Frame, Resident, Targets, Views
from rooftop.scene.rendering.emit_depth_targets import hit_of
from rooftop.scene.rendering.projections import pixel_at, place_at
from rooftop.scene.rendering.texturing import Surfaces, base_color_of, in_linear_light, row_of

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.kernel
def base_colors(
    resident: Resident,
    views: Views,
    frame: Frame,
    targets: Targets,
    surfaces: Surfaces,
    texels: wp.int32,
    stride: wp.int32,
):
    """Compute `targets.base_color` of each pixel, in linear light."""
    for thread in range(wp.tid(), texels, stride):
        at = pixel_at(views, thread)
        i = at[0]
        pixel = wp.int64(0)
        if i >= 0:
            pixel = frame.pixels[i]
        color = wp.vec3(wp.nan, wp.nan, wp.nan)
        if pixel != wp.int64(0):
            place = place_at(views, at)
            hit = hit_of(resident, views, frame, pixel, place)
            row = row_of(resident, surfaces, hit)
            if row >= 0:
                color = base_color_of(resident, surfaces, views, frame, place, hit, row)
            else:
                shown = own_color(resident, hit)
                color = wp.vec3(in_linear_light(shown[0]), in_linear_light(shown[1]), in_linear_light(shown[2]))
        if i >= 0:
            for axis in range(3):
                targets.base_color[i, axis] = color[axis]

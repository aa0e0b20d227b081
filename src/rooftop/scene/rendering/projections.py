"""Project from a mesh's units to pixels: transforms, the error on the screen, and tests for invisible boxes.

Views look along z, with x to the right and y down; the centre of pixel (column, row) has the coordinates (column, row).
"""

import warp as wp

from rooftop.scene.rendering.buffers import (
    LENS_CX,
    LENS_CY,
    LENS_FX,
    LENS_FY,
    LENS_NEAR,
    LENS_ORTHOGRAPHIC,
    LENS_TANGENT,
    PICTURE_AT,
    PICTURE_HEIGHT,
    PICTURE_LEVELS,
    PICTURE_WIDTH,
    Views,
)

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

# Rounding error of a float32 transform, relative to the sum of its terms' absolute values: four terms, three roundings
# each.
ROUNDING = wp.constant(1e-6)


@wp.func
def view_at(views: Views, texel: wp.int32):
    """The view that contains a pixel. If all cameras have the same size, the pixel must belong to a camera, not to
    a shadow map."""
    if views.same > 0:
        return texel // views.same
    low = wp.int32(0)
    high = views.pictures.shape[0] - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if views.pictures[middle, PICTURE_AT] <= texel:
            low = middle
        else:
            high = middle - 1
    return low


@wp.func
def place_of(views: Views, texel: wp.int32):
    """View, row and column of a camera's pixel."""
    view = view_at(views, texel)
    width = views.pictures[view, PICTURE_WIDTH]
    inside = texel - views.pictures[view, PICTURE_AT]
    row = inside // width
    return wp.vec3i(view, row, inside - row * width)


@wp.func
def pixel_at(views: Views, thread: wp.int32):
    """Assign a texel to a thread. Return (texel, view, row, column); the texel is -1 outside the picture.

    If all cameras have the same size, a warp has 8 x 4 pixels, and 8 warps have 16 x 16, so that nearby threads read
    the same clusters.
    If sizes differ, threads have texels in order, and `place_at` computes view, row and column, which are 0 here.
    """
    if views.same == 0:
        return wp.vec4i(thread, 0, 0, 0)
    width = views.pictures[0, PICTURE_WIDTH]
    height = views.pictures[0, PICTURE_HEIGHT]
    across = (width + 15) >> 4
    squares = across * ((height + 15) >> 4)
    square = thread >> 8
    view = square // squares
    square -= view * squares
    y = square // across
    x = 16 * (square - y * across) + ((thread >> 5) & 1) * 8 + (thread & 7)
    y = 16 * y + ((thread >> 6) & 3) * 4 + ((thread >> 3) & 3)
    texel = wp.int32(-1)
    if x < width and y < height:
        texel = view * views.same + y * width + x
    return wp.vec4i(texel, view, y, x)


@wp.func
def place_at(views: Views, at: wp.vec4i):
    """View, row and column of a texel, from the result of `pixel_at`."""
    if views.same == 0:
        return place_of(views, at[0])
    return wp.vec3i(at[1], at[2], at[3])


@wp.func
def transformed(matrices: wp.array2d(dtype=wp.float32), row: wp.int32, point: wp.vec3):
    """Transform a point by matrix `row` of matrices (N, 12), each 3 x 4."""
    moved = wp.vec3()
    for axis in range(3):
        first = 4 * axis
        moved[axis] = (
            matrices[row, first] * point[0]
            + matrices[row, first + 1] * point[1]
            + matrices[row, first + 2] * point[2]
            + matrices[row, first + 3]
        )
    return moved


@wp.func
def half_sizes(matrices: wp.array2d(dtype=wp.float32), row: wp.int32, center: wp.vec3, half: wp.vec3):
    """Half sizes of a mesh's box along the axes of the view, enlarged by the rounding error."""
    sizes = wp.vec3()
    for axis in range(3):
        first = 4 * axis
        size = wp.float32(0.0)
        terms = wp.abs(matrices[row, first + 3])
        for other in range(3):
            size += wp.abs(matrices[row, first + other]) * half[other]
            terms += wp.abs(matrices[row, first + other]) * (wp.abs(center[other]) + half[other])
        sizes[axis] = size + ROUNDING * terms
    return sizes


@wp.func
def error_on_screen(
    views: Views, view: wp.int32, center: wp.vec3, radius: wp.float32, error: wp.float32, scale: wp.float32
):
    """An upper bound of the error, in pixels, of the visible surface within a sphere; `center` is in the view's
    coordinates.

    With the focal length f in pixels, an error e at depth z moves a point on the screen by at most f e / (z cos(angle))
    pixels, where `angle` is between the ray to the point and the axis. The least depth and the largest angle of points
    in the sphere give an upper bound.
    """
    focal = wp.max(views.lens[view, LENS_FX], views.lens[view, LENS_FY])
    reach = radius * scale
    if views.lens[view, LENS_ORTHOGRAPHIC] > 0.0:
        return focal * error * scale
    depth = wp.max(center[2] - reach, views.lens[view, LENS_NEAR])
    aside = (wp.sqrt(center[0] * center[0] + center[1] * center[1]) + reach) / depth
    aside = wp.min(aside, views.lens[view, LENS_TANGENT])
    return focal * error * scale * wp.sqrt(1.0 + aside * aside) / depth


@wp.func
def is_outside(views: Views, view: wp.int32, center: wp.vec3, half: wp.vec3):
    """Whether a box that is parallel to the view's axes is completely outside the volume that the view shows."""
    right = wp.float32(views.pictures[view, PICTURE_WIDTH]) - 0.5 - views.lens[view, LENS_CX]
    left = -0.5 - views.lens[view, LENS_CX]
    bottom = wp.float32(views.pictures[view, PICTURE_HEIGHT]) - 0.5 - views.lens[view, LENS_CY]
    top = -0.5 - views.lens[view, LENS_CY]
    fx = views.lens[view, LENS_FX]
    fy = views.lens[view, LENS_FY]
    if center[2] + half[2] < views.lens[view, LENS_NEAR]:
        return True
    if views.lens[view, LENS_ORTHOGRAPHIC] > 0.0:
        x = fx * center[0]
        y = fy * center[1]
        return (
            x + fx * half[0] < left or x - fx * half[0] > right or y + fy * half[1] < top or y - fy * half[1] > bottom
        )
    outside = fx * center[0] - left * center[2] + fx * half[0] + wp.abs(left) * half[2] < 0.0
    outside = outside or right * center[2] - fx * center[0] + fx * half[0] + wp.abs(right) * half[2] < 0.0
    outside = outside or fy * center[1] - top * center[2] + fy * half[1] + wp.abs(top) * half[2] < 0.0
    return outside or bottom * center[2] - fy * center[1] + fy * half[1] + wp.abs(bottom) * half[2] < 0.0


@wp.func
def is_hidden(
    views: Views,
    view: wp.int32,
    center: wp.vec3,
    half: wp.vec3,
    hzb: wp.array(dtype=wp.float32),
    hzb_at: wp.array2d(dtype=wp.int32),
):
    """Whether a box that is parallel to the view's axes is hidden: all pixels that could show the box have nearer
    surfaces."""
    near = views.lens[view, LENS_NEAR]
    nearest = center[2] - half[2]
    if nearest < near:
        return False
    farthest = center[2] + half[2]
    # The picture's x of the box's left side is computed at depth `over_left`; likewise for the other sides.
    over_left = nearest
    over_right = nearest
    over_top = nearest
    over_bottom = nearest
    if views.lens[view, LENS_ORTHOGRAPHIC] > 0.0:
        over_left = 1.0
        over_right = 1.0
        over_top = 1.0
        over_bottom = 1.0
    else:
        over_left = wp.where(center[0] - half[0] < 0.0, nearest, farthest)
        over_right = wp.where(center[0] + half[0] > 0.0, nearest, farthest)
        over_top = wp.where(center[1] - half[1] < 0.0, nearest, farthest)
        over_bottom = wp.where(center[1] + half[1] > 0.0, nearest, farthest)
    fx = views.lens[view, LENS_FX]
    fy = views.lens[view, LENS_FY]
    left = fx * (center[0] - half[0]) / over_left + views.lens[view, LENS_CX]
    right = fx * (center[0] + half[0]) / over_right + views.lens[view, LENS_CX]
    top = fy * (center[1] - half[1]) / over_top + views.lens[view, LENS_CY]
    bottom = fy * (center[1] + half[1]) / over_bottom + views.lens[view, LENS_CY]
    # Add one pixel on each side, because corners are rounded to 1/256 pixel, and these operations round too.
    last_x = views.pictures[view, PICTURE_WIDTH] - 1
    last_y = views.pictures[view, PICTURE_HEIGHT] - 1
    levels = views.pictures[view, PICTURE_LEVELS]
    x0 = wp.int32(wp.clamp(wp.floor(left - 1.0), 0.0, wp.float32(last_x)))
    x1 = wp.int32(wp.clamp(wp.ceil(right + 1.0), 0.0, wp.float32(last_x)))
    y0 = wp.int32(wp.clamp(wp.floor(top - 1.0), 0.0, wp.float32(last_y)))
    y1 = wp.int32(wp.clamp(wp.ceil(bottom + 1.0), 0.0, wp.float32(last_y)))
    level = wp.int32(1)
    while ((x1 >> level) - (x0 >> level) > 2 or (y1 >> level) - (y0 >> level) > 2) and level + 1 < levels:
        level += 1
    if level >= levels:  # the picture is a single pixel, and has no levels
        return False
    columns = (last_x >> level) + 1
    in_front = near / nearest * (1.0 + ROUNDING)
    for y in range(y0 >> level, (y1 >> level) + 1):
        for x in range(x0 >> level, (x1 >> level) + 1):
            if hzb[hzb_at[view, level] + y * columns + x] <= in_front:
                return False
    return True

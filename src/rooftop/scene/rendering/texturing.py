"""Compute the base colour of a pixel's surface: the product of the colours of material, texture and vertices.

A pixel's footprint on the texture is a parallelogram. Its sides are the changes of the texture coordinates from this
pixel to the next; they are computed exactly from the plane of the triangle, not from neighbouring pixels. The ellipse
inside the parallelogram is cut into `ACROSS` pieces along its short axis, and along its long axis into at most
`MOST_ALONG` pieces, as many as make the pieces square. Each piece is one trilinear lookup, at the mip level whose
texels are as wide as the piece's longer side. This is anisotropic filtering with samples along a line, as in McCormack
et al. 1999, "Feline". All computation is in linear light.
"""

import warp as wp

from rooftop.scene.rendering.buffers import (
    HAS_UV,
    LENS_FX,
    LENS_FY,
    LENS_ORTHOGRAPHIC,
    MESH_ATTRIBUTES,
    Frame,
    Resident,
    Views,
)
from rooftop.scene.rendering.clusters import material_of, uv_of
from rooftop.scene.rendering.emit_depth_targets import Hit, ray, vertex_color_at
from rooftop.scene.rendering.projections import transformed

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.struct
class Surfaces:
    """The materials of a scene, written by surfaces.py."""

    # (meshes, 3): the mesh's first row, its number of rows, and 1 if its vertex colours are linear
    mesh_rows: wp.array2d(dtype=wp.int32)
    rows: wp.array2d(dtype=wp.int32)  # (rows, 4), columns ROW_IMAGE ...
    factors: wp.array2d(dtype=wp.float32)  # (rows, 3), colours in linear light
    images: wp.array2d(dtype=wp.int32)  # (images, 2): the first level, and the number of levels
    levels: wp.array2d(dtype=wp.int32)  # (levels, 3): the first texel, width, height
    # sRGB, 8 bits per channel: red in the lowest byte, then green and blue; the top row comes first
    texels: wp.array(dtype=wp.int32)
    linear: wp.array(dtype=wp.float32)  # (256,) linear light of each 8-bit value


ROW_NUMBERS = 4
# ROW_IMAGE is -1 without an image. The wrap modes of u and v are at ROW_WRAP and the next column.
ROW_IMAGE, ROW_WRAP, ROW_MAGNIFIED = wp.constant(0), wp.constant(1), wp.constant(3)
REPEAT, CLAMP, MIRROR = wp.constant(0), wp.constant(1), wp.constant(2)  # as materials.WRAPS
NEAREST = wp.constant(1)  # as materials.MAGNIFIED

# A pixel's footprint is cut into pieces, with one tap in each: two pieces across the footprint, and along it as many as
# make the pieces square. The error was measured against 31 x 31 samples per pixel, for noise, photographs and chequers
# seen from above, from the side and along the surface. It is 1/8 to 1/33 of the error without filtering. (With one tap
# across the footprint it is 1/3 to 1/48 of the error without filtering, with three taps 1/10 to 1/40.)
ACROSS = wp.constant(2)
MOST_ALONG = wp.constant(16)
# a footprint of up to this many texels needs one lookup, so that texels as large as pixels keep their values
ONE_TEXEL = wp.constant(1.01)


@wp.struct
class Slopes:
    """Change of texture coordinates from a pixel to the pixel on its right, and to the pixel below it."""

    right: wp.vec2
    down: wp.vec2


@wp.func
def displayed(light: wp.float32):
    """Convert linear light to a displayed value (sRGB)."""
    if light <= 0.0031308:
        return 12.92 * light
    return 1.055 * wp.pow(light, 1.0 / 2.4) - 0.055


@wp.func
def in_linear_light(value: wp.float32):
    """Convert a displayed value (sRGB) to linear light."""
    if value <= 0.04045:
        return value / 12.92
    return wp.pow((value + 0.055) / 1.055, 2.4)


@wp.func
def parts_in_plane(step: wp.vec3, u: wp.vec3, v: wp.vec3, normal: wp.vec3):
    """The change of the barycentric weights of a triangle's second and third corner, for a step in the triangle's
    plane."""
    square = wp.dot(normal, normal)
    return wp.vec2(wp.dot(wp.cross(step, v), normal) / square, wp.dot(wp.cross(u, step), normal) / square)


@wp.func
def slopes_of(views: Views, frame: Frame, place: wp.vec3i, hit: Hit, a: wp.vec2, b: wp.vec2, c: wp.vec2):
    """Compute by how much a value changes from a pixel to its neighbours, given the values a, b, c at the corners of
    the pixel's triangle. The changes are infinite or NaN if the surface is seen edge-on, and 0 if the triangle has no
    area."""
    slopes = Slopes()
    at = transformed(frame.to_view, hit.pair, hit.a)
    to_b = transformed(frame.to_view, hit.pair, hit.b) - at
    to_c = transformed(frame.to_view, hit.pair, hit.c) - at
    longest = wp.max(wp.max(wp.abs(to_b)), wp.max(wp.abs(to_c)))
    if longest == 0.0:
        return slopes
    u = to_b / longest
    v = to_c / longest
    normal = wp.cross(u, v)
    if wp.dot(normal, normal) == 0.0:
        return slopes
    looking = ray(views, place)
    view = place[0]
    right = wp.vec3(1.0 / views.lens[view, LENS_FX], 0.0, 0.0)
    down = wp.vec3(0.0, 1.0 / views.lens[view, LENS_FY], 0.0)
    if views.lens[view, LENS_ORTHOGRAPHIC] > 0.0:
        right[2] = -normal[0] * right[0] / normal[2]
        down[2] = -normal[1] * down[1] / normal[2]
    else:
        # A point of the plane is depth * looking, and the depth changes with the direction `looking`.
        along = wp.dot(normal, looking)
        depth = wp.dot(normal, at) / along
        right = depth * (right - looking * (wp.dot(normal, right) / along))
        down = depth * (down - looking * (wp.dot(normal, down) / along))
    by_right = parts_in_plane(right / longest, u, v, normal)
    by_down = parts_in_plane(down / longest, u, v, normal)
    slopes.right = by_right[0] * (b - a) + by_right[1] * (c - a)
    slopes.down = by_down[0] * (b - a) + by_down[1] * (c - a)
    return slopes


@wp.func
def within(place: wp.float32, wrap: wp.int32):
    """Wrap a texture coordinate into 0..1: repeat, mirror or clamp it, as `wrap` says."""
    if wrap == REPEAT:
        return place - wp.floor(place)
    if wrap == MIRROR:
        place = place - 2.0 * wp.floor(0.5 * place)
        return wp.min(place, 2.0 - place)
    return wp.clamp(place, 0.0, 1.0)


@wp.func
def neighbour(index: wp.int32, size: wp.int32, wrap: wp.int32):
    """Wrap the index of a texel that is at most one texel beyond the image's edge. Beyond the edge, a mirrored image
    repeats its last texel.
    """
    if wrap == REPEAT:
        if index < 0:
            return index + size
        if index >= size:
            return index - size
    return wp.clamp(index, 0, size - 1)


@wp.func
def texel_at(surfaces: Surfaces, at: wp.int32):
    """The colour of a texel, in linear light."""
    word = surfaces.texels[at]
    return wp.vec3(surfaces.linear[word & 255], surfaces.linear[(word >> 8) & 255], surfaces.linear[(word >> 16) & 255])


@wp.func
def in_level(surfaces: Surfaces, row: wp.int32, level: wp.int32, place: wp.vec2, nearest: wp.bool):
    """Interpolate a mip level of an image at a position: the colour in linear light. The position's coordinates are
    from 0 to 1, the second from the top."""
    first = surfaces.levels[level, 0]
    width = surfaces.levels[level, 1]
    height = surfaces.levels[level, 2]
    wrap_x = surfaces.rows[row, ROW_WRAP]
    wrap_y = surfaces.rows[row, ROW_WRAP + 1]
    x = place[0] * wp.float32(width)
    y = place[1] * wp.float32(height)
    if nearest:
        column = neighbour(wp.int32(wp.floor(x)), width, wrap_x)
        return texel_at(surfaces, first + neighbour(wp.int32(wp.floor(y)), height, wrap_y) * width + column)
    x = x - 0.5
    y = y - 0.5
    left = wp.int32(wp.floor(x))
    above = wp.int32(wp.floor(y))
    of_right = x - wp.floor(x)
    of_below = y - wp.floor(y)
    right = neighbour(left + 1, width, wrap_x)
    left = neighbour(left, width, wrap_x)
    upper = first + neighbour(above, height, wrap_y) * width
    lower = first + neighbour(above + 1, height, wrap_y) * width
    top = (1.0 - of_right) * texel_at(surfaces, upper + left) + of_right * texel_at(surfaces, upper + right)
    bottom = (1.0 - of_right) * texel_at(surfaces, lower + left) + of_right * texel_at(surfaces, lower + right)
    return (1.0 - of_below) * top + of_below * bottom


@wp.func
def filtered(surfaces: Surfaces, row: wp.int32, uv: wp.vec2, slopes: Slopes):
    """The mean colour of a material's image over the footprint of a pixel, in linear light. `row` is the material's row
    in `surfaces`."""
    image = surfaces.rows[row, ROW_IMAGE]
    first = surfaces.images[image, 0]
    last = surfaces.images[image, 1] - 1
    size = wp.vec2(wp.float32(surfaces.levels[first, 1]), wp.float32(surfaces.levels[first, 2]))
    right = wp.cw_mul(slopes.right, size)  # in texels of the image
    down = wp.cw_mul(slopes.down, size)
    # The axes of the ellipse that a one-pixel circle becomes: singular values of the matrix (right, down).
    p = wp.dot(right, right)
    q = wp.dot(down, down)
    r = wp.dot(right, down)
    root = wp.sqrt((p - q) * (p - q) + 4.0 * r * r)
    longer = wp.sqrt(0.5 * (p + q + root))
    level = wp.float32(last)
    along = wp.int32(1)
    across = wp.int32(1)
    axis = wp.vec2()
    other_axis = wp.vec2()
    if longer < 1.0e9:  # if it is larger or nan, the surface is seen edge-on: take the mean of the image
        shorter = wp.sqrt(wp.max(0.5 * (p + q - root), 0.0))
        angle = 0.5 * wp.atan2(2.0 * r, p - q)
        axis = wp.cw_div(wp.cos(angle) * right + wp.sin(angle) * down, size)
        other_axis = wp.cw_div(wp.cos(angle) * down - wp.sin(angle) * right, size)
        if longer > ONE_TEXEL:
            pieces = wp.ceil(wp.float32(ACROSS) * longer / wp.max(shorter, 1.0))
            along = wp.int32(wp.min(pieces, wp.float32(MOST_ALONG)))
        if shorter > ONE_TEXEL:
            across = ACROSS
        piece = wp.max(longer / wp.float32(along), shorter / wp.float32(across))
        level = wp.clamp(wp.log2(wp.max(piece, 1.0e-9)), 0.0, wp.float32(last))
    finer = wp.int32(wp.floor(level))
    coarser = wp.min(finer + 1, last)
    share = level - wp.float32(finer)
    nearest = surfaces.rows[row, ROW_MAGNIFIED] == NEAREST and level == 0.0
    total = wp.vec3()
    for tap in range(along * across):
        of_axis = (wp.float32(tap // across) + 0.5) / wp.float32(along) - 0.5
        of_other = (wp.float32(tap % across) + 0.5) / wp.float32(across) - 0.5
        place = uv + of_axis * axis + of_other * other_axis
        place = wp.vec2(
            within(place[0], surfaces.rows[row, ROW_WRAP]), within(1.0 - place[1], surfaces.rows[row, ROW_WRAP + 1])
        )
        found = in_level(surfaces, row, first + finer, place, nearest)
        if share > 0.0:
            found = (1.0 - share) * found + share * in_level(surfaces, row, first + coarser, place, False)
        total += found
    return total / wp.float32(along * across)


@wp.func
def row_of(resident: Resident, surfaces: Surfaces, hit: Hit):
    """Index of the material's row in `surfaces.rows` for a pixel's surface; -1 if the mesh has no materials."""
    if surfaces.mesh_rows.shape[0] == 0:
        return wp.int32(-1)
    count = surfaces.mesh_rows[hit.mesh, 1]
    if count == 0:
        return wp.int32(-1)
    number = material_of(resident, hit.cluster, hit.triangle)
    return surfaces.mesh_rows[hit.mesh, 0] + wp.clamp(number, 0, count - 1)  # a damaged page may contain anything


@wp.func
def base_color_of(
    resident: Resident, surfaces: Surfaces, views: Views, frame: Frame, place: wp.vec3i,
    hit: Hit, row: wp.int32
):  # fmt: skip
    """The base colour of a pixel's surface, in linear light. `row` is the row of the surface's material in
    `surfaces`."""
    color = wp.vec3(surfaces.factors[row, 0], surfaces.factors[row, 1], surfaces.factors[row, 2])
    if hit.cluster.color_bits > 0:
        own = vertex_color_at(resident, hit)
        if surfaces.mesh_rows[hit.mesh, 2] == 0:
            own = wp.vec3(in_linear_light(own[0]), in_linear_light(own[1]), in_linear_light(own[2]))
        color = wp.cw_mul(color, own)
    if surfaces.rows[row, ROW_IMAGE] >= 0:
        if resident.mesh[hit.mesh, MESH_ATTRIBUTES] & HAS_UV != 0:
            step = resident.mesh_steps[hit.mesh, 1]
            a = uv_of(resident, hit.cluster, hit.corners[0], step)
            b = uv_of(resident, hit.cluster, hit.corners[1], step)
            c = uv_of(resident, hit.cluster, hit.corners[2], step)
            uv = hit.parts[0] * a + hit.parts[1] * b + hit.parts[2] * c
            slopes = slopes_of(views, frame, place, hit, a, b, c)
            color = wp.cw_mul(color, filtered(surfaces, row, uv, slopes))
    return color

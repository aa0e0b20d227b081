"""Stage 3, continued: draw the triangles of visible clusters into the visibility buffer.

A pixel is one int64: from the highest bits, nearness, cluster and triangle. The largest value wins, so the order of
threads has no effect. Corners are rounded to 1/256 of a pixel and edges are evaluated in integers. So each pixel on an
edge that two triangles share belongs to exactly one of the two, even if different kernels draw them. A small triangle
is drawn by the thread that reads it. A large triangle, or one that is too near, is clipped, cut into tiles, and drawn
by one thread per row of a tile. These two methods replace the hardware's rasterizer, which kernels cannot use.
"""

import warp as wp

from rooftop.scene.rendering.buffers import (
    DEPTH_SHIFT,
    DRAWN_CLUSTERS,
    DRAWN_LEVELS,
    DRAWN_TRIANGLES,
    LARGE,
    LENS_CX,
    LENS_CY,
    LENS_FX,
    LENS_FY,
    LENS_NEAR,
    LENS_ORTHOGRAPHIC,
    PASS,
    PICTURE_AT,
    PICTURE_HEIGHT,
    PICTURE_WIDTH,
    PIECES,
    RANK_MASK,
    TILES,
    TRIANGLE_BITS,
    TRIANGLE_SHIFT,
    TRIANGLES,
    VISIBLE,
    Frame,
    Resident,
    Views,
)
from rooftop.scene.rendering.clusters import head_of, level_of, position_of, triangles_of
from rooftop.scene.rendering.instance_cull import append, pair_of, what_of
from rooftop.scene.rendering.level_cull import CLUSTER_INDEX_BITS, CLUSTER_INDEX_MASK
from rooftop.scene.rendering.projections import transformed
from rooftop.scene.rendering.records import corners_of, read_record, write_record

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

SUBPIXEL_BITS, SUBPIXEL_SHIFT = wp.constant(8), wp.constant(wp.int64(8))
SUBPIXELS = wp.constant(256.0)
# largest extent of a small triangle, in 1/256 pixel: products of two such numbers fit into int32
SMALL_EXTENT = wp.constant(64 << 8)
SMALL_PIXELS = wp.constant(256)  # maximum number of pixels in the box of a small triangle
# largest coordinate of a triangle's corner, in pixels, so that products of coordinates fit into int64
GUARD = wp.constant(float(1 << 20))
TILE_BITS = wp.constant(5)
TILE = wp.constant(32)
# side of a tile, and distance from the first to the last pixel of a tile, both in 1/256 pixel
TILE_SIDE, TILE_REACH = wp.constant(32 << 8), wp.constant(31 << 8)
TILE_LANES = wp.constant(64)  # threads that search the tiles of one piece


@wp.struct
class Triangle:
    """A triangle of a visible cluster, in view coordinates."""

    there: wp.bool
    view: wp.int32
    mirrored: wp.bool
    a: wp.vec3
    b: wp.vec3
    c: wp.vec3


@wp.func
def read_triangle(resident: Resident, frame: Frame, rank: wp.int32, number: wp.int32):
    """Read a triangle of the cluster with this rank, in view coordinates. If the cluster has no triangle of this
    number, the result is marked absent."""
    recorded = read_record(resident, frame.records, rank)
    cluster = recorded.cluster
    pair = recorded.pair
    triangle = Triangle()
    triangle.there = number < cluster.triangles
    triangle.view = recorded.view
    triangle.mirrored = resident.instance_scale[recorded.instance] < 0.0
    if triangle.there:
        corners = corners_of(resident, recorded, number)
        step = recorded.step
        triangle.a = transformed(frame.to_view, pair, position_of(resident, cluster, corners[0], step))
        triangle.b = transformed(frame.to_view, pair, position_of(resident, cluster, corners[1], step))
        triangle.c = transformed(frame.to_view, pair, position_of(resident, cluster, corners[2], step))
    return triangle


@wp.func
def on_screen(views: Views, view: wp.int32, point: wp.vec3):
    """The column and row of a point, in pixels."""
    over = wp.where(views.lens[view, LENS_ORTHOGRAPHIC] > 0.0, 1.0, point[2])
    return wp.vec2(
        views.lens[view, LENS_FX] * point[0] / over + views.lens[view, LENS_CX],
        views.lens[view, LENS_FY] * point[1] / over + views.lens[view, LENS_CY],
    )


@wp.func
def fixed(pixels: wp.float32):
    """Convert pixels to fixed point: integers in steps of 1/256 pixel."""
    return wp.int32(wp.rint(pixels * SUBPIXELS))


@wp.func
def linear_depth(views: Views, view: wp.int32, point: wp.vec3):
    """A value that changes linearly across a triangle on the screen: near / z, or z itself for parallel rays, where z
    is the point's depth."""
    if views.lens[view, LENS_ORTHOGRAPHIC] > 0.0:
        return point[2]
    return views.lens[view, LENS_NEAR] / point[2]


@wp.func
def nearness(views: Views, view: wp.int32, linear: wp.float32):
    """The distance of the near plane divided by the depth, at most 1, from a value of `linear_depth`."""
    if views.lens[view, LENS_ORTHOGRAPHIC] > 0.0:
        return wp.min(views.lens[view, LENS_NEAR] / linear, 1.0)
    return wp.min(linear, 1.0)


@wp.func
def put(frame: Frame, texel: wp.int32, near: wp.float32, low: wp.int64):
    """Write a pixel that a triangle covers to the visibility buffer. `near` is the pixel's `nearness`; `low` has the
    rank of the cluster and the index of the triangle. The nearest surface wins; among equally near surfaces, the last
    in the order of clusters and triangles wins."""
    value = (wp.int64(wp.cast(near, wp.int32)) << DEPTH_SHIFT) | low
    if value > frame.pixels[texel]:
        wp.atomic_max(frame.pixels, texel, value)
    if texel < frame.fragments.shape[0]:
        wp.atomic_add(frame.fragments, texel, 1)


@wp.func
def tie(dx: wp.int32, dy: wp.int32):
    """Tie-breaking rule of an edge: 0 if pixels exactly on the edge belong to this triangle, -1 if they belong to the
    triangle on the other side."""
    if dy > 0 or (dy == 0 and dx < 0):
        return 0
    return -1


@wp.func
def draw_small(
    views: Views,
    frame: Frame,
    view: wp.int32,
    a: wp.vec2i,
    b: wp.vec2i,
    c: wp.vec2i,
    depth_a: wp.float32,
    depth_b: wp.float32,
    depth_c: wp.float32,
    low: wp.int64,
    box: wp.vec4i,
):
    """Draw the pixels of a box (first column, last column, first row, last row) whose centres are in a triangle of
    positive area."""
    area = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
    tie_a = tie(c[0] - b[0], c[1] - b[1])
    tie_b = tie(a[0] - c[0], a[1] - c[1])
    tie_c = tie(b[0] - a[0], b[1] - a[1])
    nearest = wp.max(depth_a, wp.max(depth_b, depth_c))
    farthest = wp.min(depth_a, wp.min(depth_b, depth_c))
    over_area = 1.0 / wp.float32(area)
    for y in range(box[2], box[3] + 1):
        row = views.pictures[view, PICTURE_AT] + y * views.pictures[view, PICTURE_WIDTH]
        py = y << SUBPIXEL_BITS
        for x in range(box[0], box[1] + 1):
            px = x << SUBPIXEL_BITS
            of_a = (c[0] - b[0]) * (py - b[1]) - (c[1] - b[1]) * (px - b[0])
            of_b = (a[0] - c[0]) * (py - c[1]) - (a[1] - c[1]) * (px - c[0])
            of_c = (b[0] - a[0]) * (py - a[1]) - (b[1] - a[1]) * (px - a[0])
            if of_a + tie_a >= 0 and of_b + tie_b >= 0 and of_c + tie_c >= 0:
                # All terms have the same sign, so there is no cancellation, even if corners are far apart.
                sum = wp.float32(of_a) * depth_a + wp.float32(of_b) * depth_b + wp.float32(of_c) * depth_c
                depth = wp.clamp(sum * over_area, farthest, nearest)
                put(frame, row + x, nearness(views, view, depth), low)


@wp.func
def append_large(frame: Frame, second: wp.int32, at: wp.int32, number: wp.int32):
    """Append triangle `number` of a visible cluster to the list of large triangles. `at` is the cluster's index among
    the visible clusters of this pass, not its rank."""
    item = (wp.int64(at) << TRIANGLE_SHIFT) | wp.int64(number)
    append(frame.large, frame.counters, second * PASS + LARGE, item)


@wp.kernel
def rasterize(resident: Resident, views: Views, frame: Frame, second: wp.int32, one_sided: wp.int32, stride: wp.int32):
    """Draw the visible clusters of a pass, with a thread for each triangle."""
    count = wp.min(frame.counters[second * PASS + VISIBLE], frame.visible.shape[1])
    for i in range(wp.tid(), TRIANGLES * count, stride):
        at = i >> TRIANGLE_BITS
        number = i & (TRIANGLES - 1)
        rank = frame.ranks[second, at]
        triangle = read_triangle(resident, frame, rank, number)
        if triangle.there:
            view = triangle.view
            near = views.lens[view, LENS_NEAR]
            p = on_screen(views, view, triangle.a)
            q = on_screen(views, view, triangle.b)
            r = on_screen(views, view, triangle.c)
            low = wp.min(p, wp.min(q, r))
            high = wp.max(p, wp.max(q, r))
            farthest = wp.max(wp.max(-low[0], high[0]), wp.max(-low[1], high[1]))
            before = wp.min(triangle.a[2], wp.min(triangle.b[2], triangle.c[2])) < near
            if before or farthest >= GUARD:
                if wp.max(triangle.a[2], wp.max(triangle.b[2], triangle.c[2])) >= near:
                    append_large(frame, second, at, number)
            else:
                a = wp.vec2i(fixed(p[0]), fixed(p[1]))
                b = wp.vec2i(fixed(q[0]), fixed(q[1]))
                c = wp.vec2i(fixed(r[0]), fixed(r[1]))
                first = wp.min(a, wp.min(b, c))
                last = wp.max(a, wp.max(b, c))
                box = wp.vec4i(
                    wp.max((first[0] + 255) >> SUBPIXEL_BITS, 0),
                    wp.min(last[0] >> SUBPIXEL_BITS, views.pictures[view, PICTURE_WIDTH] - 1),
                    wp.max((first[1] + 255) >> SUBPIXEL_BITS, 0),
                    wp.min(last[1] >> SUBPIXEL_BITS, views.pictures[view, PICTURE_HEIGHT] - 1),
                )
                if box[0] <= box[1] and box[2] <= box[3]:
                    fits = last[0] - first[0] <= SMALL_EXTENT and last[1] - first[1] <= SMALL_EXTENT
                    if fits and (box[1] - box[0] + 1) * (box[3] - box[2] + 1) <= SMALL_PIXELS:
                        area = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
                        away = area > 0
                        if triangle.mirrored:
                            away = area < 0
                        if area != 0 and not (away and one_sided != 0):
                            payload = (wp.int64(rank) << TRIANGLE_SHIFT) | wp.int64(number)
                            depth_a = linear_depth(views, view, triangle.a)
                            depth_b = linear_depth(views, view, triangle.b)
                            depth_c = linear_depth(views, view, triangle.c)
                            if area > 0:
                                draw_small(views, frame, view, a, b, c, depth_a, depth_b, depth_c, payload, box)
                            else:
                                draw_small(views, frame, view, a, c, b, depth_a, depth_c, depth_b, payload, box)
                    else:
                        append_large(frame, second, at, number)


# ---- large triangles -------------------------------------------------------------------------------------------------


@wp.func
def clip(
    polygon: wp.array(dtype=wp.vec3d),
    kept: wp.array(dtype=wp.vec3d),
    count: wp.int32,
    plane: wp.vec3d,
    offset: wp.float64,
):
    """Clip a polygon to plane . p + offset >= 0, and return the number of corners of the result.

    A new corner is computed from the inner to the outer end of an edge, so two triangles that share the edge get the
    same corner. The computation is in float64, so that a corner that is far away does not shift the new corner on the
    near plane.
    """
    found = wp.int32(0)
    zero = wp.float64(0.0)
    for i in range(count):
        p = polygon[i]
        q = polygon[(i + 1) % count]
        at_p = wp.dot(plane, p) + offset
        at_q = wp.dot(plane, q) + offset
        if at_p >= zero:
            kept[found] = p
            found += 1
            if at_q < zero:
                kept[found] = p + at_p / (at_p - at_q) * (q - p)
                found += 1
        elif at_q >= zero:
            kept[found] = q + at_q / (at_q - at_p) * (p - q)
            found += 1
    for i in range(found):
        polygon[i] = kept[i]
    return found


@wp.func
def wide(point: wp.vec3):
    """Convert a vector to float64."""
    return wp.vec3d(wp.float64(point[0]), wp.float64(point[1]), wp.float64(point[2]))


@wp.func
def narrow(point: wp.vec3d):
    """Convert a vector to float32."""
    return wp.vec3(wp.float32(point[0]), wp.float32(point[1]), wp.float32(point[2]))


@wp.kernel
def clip_large(resident: Resident, views: Views, frame: Frame, second: wp.int32, one_sided: wp.int32, stride: wp.int32):
    """Clip large triangles at the near plane and GUARD pixels away from the view's axis, and append the resulting
    triangles to the list of pieces."""
    count = wp.min(frame.counters[second * PASS + LARGE], frame.large.shape[0])
    for i in range(wp.tid(), count, stride):
        at = wp.int32(frame.large[i] >> TRIANGLE_SHIFT)
        number = wp.int32(frame.large[i]) & (TRIANGLES - 1)
        rank = frame.ranks[second, at]
        triangle = read_triangle(resident, frame, rank, number)
        view = triangle.view
        polygon = wp.zeros(shape=9, dtype=wp.vec3d)
        kept = wp.zeros(shape=9, dtype=wp.vec3d)
        polygon[0] = wide(triangle.a)
        polygon[1] = wide(triangle.b)
        polygon[2] = wide(triangle.c)
        none = wp.float64(0.0)
        near = wp.float64(views.lens[view, LENS_NEAR])
        corners = clip(polygon, kept, 3, wp.vec3d(none, none, wp.float64(1.0)), -near)
        # At depth d, the view is `over` * d + `constant` wide, in units of the picture's width at depth 1.
        over = wp.float64(1.0)
        constant = wp.float64(0.0)
        if views.lens[view, LENS_ORTHOGRAPHIC] > 0.0:
            over = wp.float64(0.0)
            constant = wp.float64(1.0)
        fx = wp.float64(views.lens[view, LENS_FX] / GUARD)
        fy = wp.float64(views.lens[view, LENS_FY] / GUARD)
        corners = clip(polygon, kept, corners, wp.vec3d(fx, none, over), constant)
        corners = clip(polygon, kept, corners, wp.vec3d(-fx, none, over), constant)
        corners = clip(polygon, kept, corners, wp.vec3d(none, fy, over), constant)
        corners = clip(polygon, kept, corners, wp.vec3d(none, -fy, over), constant)
        payload = (wp.int64(rank) << TRIANGLE_SHIFT) | wp.int64(number)
        for k in range(1, corners - 1):
            a = narrow(polygon[0])
            b = narrow(polygon[k])
            c = narrow(polygon[k + 1])
            add_piece(views, frame, second, view, a, b, c, payload, triangle.mirrored, one_sided)


@wp.func
def add_piece(
    views: Views,
    frame: Frame,
    second: wp.int32,
    view: wp.int32,
    a: wp.vec3,
    b: wp.vec3,
    c: wp.vec3,
    payload: wp.int64,
    mirrored: wp.bool,
    one_sided: wp.int32,
):
    """Append a clipped triangle of the view to the pieces, oriented so that its area is positive. Pieces without area
    are dropped; if only one side is drawn, back sides are dropped too."""
    p = on_screen(views, view, a)
    q = on_screen(views, view, b)
    r = on_screen(views, view, c)
    ax = wp.int64(fixed(p[0]))
    ay = wp.int64(fixed(p[1]))
    bx = wp.int64(fixed(q[0]))
    by = wp.int64(fixed(q[1]))
    cx = wp.int64(fixed(r[0]))
    cy = wp.int64(fixed(r[1]))
    area = (bx - ax) * (cy - ay) - (by - ay) * (cx - ax)
    zero = wp.int64(0)
    away = area > zero
    if mirrored:
        away = area < zero
    if area != zero and not (away and one_sided != 0):
        at = wp.atomic_add(frame.counters, second * PASS + PIECES, 1)
        if at < frame.pieces.shape[0]:
            second_corner = wp.where(area > zero, 1, 2)
            third_corner = 3 - second_corner
            frame.pieces[at, 0] = ax
            frame.pieces[at, 1] = ay
            frame.pieces[at, 2 * second_corner] = bx
            frame.pieces[at, 2 * second_corner + 1] = by
            frame.pieces[at, 2 * third_corner] = cx
            frame.pieces[at, 2 * third_corner + 1] = cy
            frame.pieces[at, 6] = wp.int64(view)
            frame.pieces[at, 7] = payload
            frame.piece_depths[at, 0] = linear_depth(views, view, a)
            frame.piece_depths[at, second_corner] = linear_depth(views, view, b)
            frame.piece_depths[at, third_corner] = linear_depth(views, view, c)


@wp.func
def edge(frame: Frame, piece: wp.int32, start: wp.int32, end: wp.int32, px: wp.int64, py: wp.int64):
    """Twice the signed area of the triangle between a piece's edge and a point; a point with a value >= 0 is on the
    inner side of the edge."""
    ax = frame.pieces[piece, 2 * start]
    ay = frame.pieces[piece, 2 * start + 1]
    dx = frame.pieces[piece, 2 * end] - ax
    dy = frame.pieces[piece, 2 * end + 1] - ay
    return dx * (py - ay) - dy * (px - ax)


@wp.func
def edge_tie(frame: Frame, piece: wp.int32, start: wp.int32, end: wp.int32):
    """Apply the rule `tie` to an edge of a piece (a clipped triangle)."""
    dx = frame.pieces[piece, 2 * end] - frame.pieces[piece, 2 * start]
    dy = frame.pieces[piece, 2 * end + 1] - frame.pieces[piece, 2 * start + 1]
    return wp.int64(tie(wp.int32(dx), wp.int32(dy)))


@wp.func
def misses(frame: Frame, piece: wp.int32, x: wp.int64, y: wp.int64, side: wp.int64):
    """Whether a square with its lowest corner at (x, y) is completely on the outer side of at least one edge of a
    piece. `x`, `y` and `side` are fixed point, like a piece's corners."""
    for start in range(3):
        end = (start + 1) % 3
        best = wp.max(
            wp.max(edge(frame, piece, start, end, x, y), edge(frame, piece, start, end, x + side, y)),
            wp.max(edge(frame, piece, start, end, x, y + side), edge(frame, piece, start, end, x + side, y + side)),
        )
        if best < wp.int64(0):
            return True
    return False


@wp.kernel
def find_tiles(views: Views, frame: Frame, second: wp.int32, stride: wp.int32):
    """List the tiles of the picture that each piece (clipped large triangle) may touch."""
    count = wp.min(frame.counters[second * PASS + PIECES], frame.pieces.shape[0])
    for i in range(wp.tid(), TILE_LANES * count, stride):
        piece = i // TILE_LANES
        x0 = wp.min(frame.pieces[piece, 0], wp.min(frame.pieces[piece, 2], frame.pieces[piece, 4])) + wp.int64(255)
        x1 = wp.max(frame.pieces[piece, 0], wp.max(frame.pieces[piece, 2], frame.pieces[piece, 4]))
        y0 = wp.min(frame.pieces[piece, 1], wp.min(frame.pieces[piece, 3], frame.pieces[piece, 5])) + wp.int64(255)
        y1 = wp.max(frame.pieces[piece, 1], wp.max(frame.pieces[piece, 3], frame.pieces[piece, 5]))
        view = wp.int32(frame.pieces[piece, 6])
        first_x = wp.max(wp.int32(x0 >> SUBPIXEL_SHIFT), 0)
        last_x = wp.min(wp.int32(x1 >> SUBPIXEL_SHIFT), views.pictures[view, PICTURE_WIDTH] - 1)
        first_y = wp.max(wp.int32(y0 >> SUBPIXEL_SHIFT), 0)
        last_y = wp.min(wp.int32(y1 >> SUBPIXEL_SHIFT), views.pictures[view, PICTURE_HEIGHT] - 1)
        if first_x <= last_x and first_y <= last_y:
            columns = (last_x >> TILE_BITS) - (first_x >> TILE_BITS) + 1
            rows = (last_y >> TILE_BITS) - (first_y >> TILE_BITS) + 1
            for k in range(i % TILE_LANES, columns * rows, TILE_LANES):
                column = (first_x >> TILE_BITS) + k % columns
                row = (first_y >> TILE_BITS) + k // columns
                x = wp.int64(column * TILE_SIDE)
                y = wp.int64(row * TILE_SIDE)
                if not misses(frame, piece, x, y, wp.int64(TILE_REACH)):
                    item = (wp.int64(piece) << wp.int64(32)) | wp.int64((row << 16) | column)
                    append(frame.tiles, frame.counters, second * PASS + TILES, item)


@wp.kernel
def draw_tiles(views: Views, frame: Frame, second: wp.int32, stride: wp.int32):
    """Draw the pieces (clipped large triangles) in the tiles that `find_tiles` listed, with a thread for each row of a
    tile."""
    count = wp.min(frame.counters[second * PASS + TILES], frame.tiles.shape[0])
    for i in range(wp.tid(), TILE * count, stride):
        tile = frame.tiles[i >> TILE_BITS]
        piece = pair_of(tile)
        y = ((what_of(tile) >> 16) << TILE_BITS) + (i & (TILE - 1))
        view = wp.int32(frame.pieces[piece, 6])
        if y < views.pictures[view, PICTURE_HEIGHT]:
            x0 = (what_of(tile) & 0xFFFF) << TILE_BITS
            width = views.pictures[view, PICTURE_WIDTH]
            row = views.pictures[view, PICTURE_AT] + y * width
            payload = frame.pieces[piece, 7]
            depth_a = frame.piece_depths[piece, 0]
            depth_b = frame.piece_depths[piece, 1]
            depth_c = frame.piece_depths[piece, 2]
            nearest = wp.max(depth_a, wp.max(depth_b, depth_c))
            farthest = wp.min(depth_a, wp.min(depth_b, depth_c))
            px = wp.int64(x0 << SUBPIXEL_BITS)
            py = wp.int64(y << SUBPIXEL_BITS)
            of_a = edge(frame, piece, 1, 2, px, py)
            of_b = edge(frame, piece, 2, 0, px, py)
            of_c = edge(frame, piece, 0, 1, px, py)
            area = wp.float32(of_a + of_b + of_c)
            zero = wp.int64(0)
            tie_a = edge_tie(frame, piece, 1, 2)
            tie_b = edge_tie(frame, piece, 2, 0)
            tie_c = edge_tie(frame, piece, 0, 1)
            by_a = (frame.pieces[piece, 5] - frame.pieces[piece, 3]) << SUBPIXEL_SHIFT
            by_b = (frame.pieces[piece, 1] - frame.pieces[piece, 5]) << SUBPIXEL_SHIFT
            by_c = (frame.pieces[piece, 3] - frame.pieces[piece, 1]) << SUBPIXEL_SHIFT
            for x in range(x0, wp.min(x0 + TILE, width)):
                if of_a + tie_a >= zero and of_b + tie_b >= zero and of_c + tie_c >= zero:
                    sum = wp.float32(of_a) * depth_a + wp.float32(of_b) * depth_b + wp.float32(of_c) * depth_c
                    depth = wp.clamp(sum / area, farthest, nearest)
                    put(frame, row + x, nearness(views, view, depth), payload)
                of_a -= by_a
                of_b -= by_b
                of_c -= by_c


# ---- the order of clusters -------------------------------------------------------------------------------------------


@wp.func
def smaller(frame: Frame, which: wp.int32, item: wp.int64):
    """Count the visible clusters of pass `which`, a sorted list, that precede the cluster `item` of the other pass."""
    low = wp.int32(0)
    high = wp.min(frame.counters[which * PASS + VISIBLE], frame.visible.shape[1])
    while low < high:
        middle = (low + high) >> 1
        if frame.visible[which, middle] < item:
            low = middle + 1
        else:
            high = middle
    return low


@wp.kernel
def rank_clusters(resident: Resident, frame: Frame, second: wp.int32, stride: wp.int32):
    """Rank the visible clusters and write their records. Before the first pass draws, only its own clusters are ranked;
    before the second pass draws, the clusters of both passes are ranked."""
    if second != 0 and frame.counters[PASS + VISIBLE] == 0:
        return  # clusters of the first pass keep their records
    for which in range(second + 1):
        count = wp.min(frame.counters[which * PASS + VISIBLE], frame.visible.shape[1])
        for i in range(wp.tid(), count, stride):
            item = frame.visible[which, i]
            rank = i
            if second != 0:
                rank += smaller(frame, 1 - which, item)
            frame.ranks[which, i] = rank
            frame.drawn[rank] = item
            write_record(resident, frame.records, rank, item, frame.instances)
            if which == second:
                count_cluster(resident, frame, second, item)


@wp.func
def count_cluster(resident: Resident, frame: Frame, second: wp.int32, item: wp.int64):
    """Add a cluster to the statistics, if its view is a camera: the cluster, its triangles and its level of detail."""
    if pair_of(item) // frame.instances >= frame.cameras:
        return
    mesh = resident.instance_mesh[pair_of(item) % frame.instances]
    page = what_of(item) >> CLUSTER_INDEX_BITS
    head = head_of(resident, mesh, page, what_of(item) & CLUSTER_INDEX_MASK)
    wp.atomic_add(frame.counters, second * PASS + DRAWN_CLUSTERS, 1)
    wp.atomic_add(frame.counters, second * PASS + DRAWN_TRIANGLES, triangles_of(resident, head))
    wp.atomic_or(frame.counters, second * PASS + DRAWN_LEVELS, 1 << (level_of(resident, head) & 31))


@wp.kernel
def rank_pixels(frame: Frame, texels: wp.int32, stride: wp.int32):
    """In the cameras' pixels that the first pass drew, replace the ranks among the first pass's clusters by ranks among
    the clusters of both passes, so that equal depths are resolved as in a single pass."""
    if frame.counters[PASS + VISIBLE] > 0:
        for i in range(wp.tid(), texels, stride):
            pixel = frame.pixels[i]
            if pixel != wp.int64(0):
                high = pixel >> DEPTH_SHIFT
                rank = wp.int32(pixel >> TRIANGLE_SHIFT) & RANK_MASK
                triangle = pixel & wp.int64(TRIANGLES - 1)
                low = (wp.int64(frame.ranks[0, rank]) << TRIANGLE_SHIFT) | triangle
                frame.pixels[i] = (high << DEPTH_SHIFT) | low

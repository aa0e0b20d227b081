"""Stage 3, after each pass: compute hierarchical z, the farthest depth in squares of pixels of growing size."""

import warp as wp

from rooftop.scene.rendering.buffers import (
    DEPTH_SHIFT,
    PICTURE_AT,
    PICTURE_HEIGHT,
    PICTURE_LEVELS,
    PICTURE_WIDTH,
    Frame,
    Views,
)

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.func
def farthest_below(views: Views, frame: Frame, view: wp.int32, level: wp.int32, y: wp.int32, x: wp.int32):
    """The farthest depth within texel (y, x) of a level: over the up to 2 x 2 texels of the next finer level that the
    texel covers. For level 1, these are pixels."""
    columns = ((views.pictures[view, PICTURE_WIDTH] - 1) >> (level - 1)) + 1
    rows = ((views.pictures[view, PICTURE_HEIGHT] - 1) >> (level - 1)) + 1
    farthest = wp.float32(1.0)
    for v in range(2 * y, wp.min(2 * y + 2, rows)):
        for u in range(2 * x, wp.min(2 * x + 2, columns)):
            if level == 1:
                pixel = frame.pixels[views.pictures[view, PICTURE_AT] + v * columns + u]
                farthest = wp.min(farthest, wp.cast(wp.int32(pixel >> DEPTH_SHIFT), wp.float32))
            else:
                farthest = wp.min(farthest, frame.hzb[frame.hzb_at[view, level - 1] + v * columns + u])
    return farthest


@wp.kernel
def reduce_depths(views: Views, frame: Frame, level: wp.int32, upper: wp.int32, stride: wp.int32):
    """Compute a level of hierarchical z from the next finer level. If `upper` is the next level, compute `upper` too,
    which halves the number of launches. A thread computes a texel of `upper`; the texels of all views are numbered
    consecutively."""
    begin = wp.int32(0)
    for view in range(frame.cameras):
        last_x = views.pictures[view, PICTURE_WIDTH] - 1
        last_y = views.pictures[view, PICTURE_HEIGHT] - 1
        top = wp.min(upper, views.pictures[view, PICTURE_LEVELS] - 1)
        top_columns = (last_x >> top) + 1
        texels = wp.where(level <= top, top_columns * ((last_y >> top) + 1), 0)
        columns = (last_x >> level) + 1
        rows = (last_y >> level) + 1
        side = 1 << wp.max(top - level, 0)
        for texel in range((wp.tid() + stride - begin) % stride, texels, stride):
            x = texel % top_columns
            y = texel // top_columns
            farthest = wp.float32(1.0)
            for v in range(side * y, wp.min(side * y + side, rows)):
                for u in range(side * x, wp.min(side * x + side, columns)):
                    depth = farthest_below(views, frame, view, level, v, u)
                    frame.hzb[frame.hzb_at[view, level] + v * columns + u] = depth
                    farthest = wp.min(farthest, depth)
            if top > level:
                frame.hzb[frame.hzb_at[view, top] + y * top_columns + x] = farthest
        begin = (begin + texels % stride) % stride

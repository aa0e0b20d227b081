"""Stage 3, between the passes and after them: the farthest depth of ever larger squares of pixels (hierarchical z)."""

import warp as wp

from rooftop.scene.rendering.buffers import DEPTH_SHIFT, Frame, Views

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.func
def farthest_below(views: Views, frame: Frame, view: wp.int32, level: wp.int32, y: wp.int32, x: wp.int32):
    """Of the (up to) 2 x 2 texels that a texel covers one level below; of level 1, of pixels."""
    columns = ((views.width - 1) >> (level - 1)) + 1
    rows = ((views.height - 1) >> (level - 1)) + 1
    farthest = wp.float32(1.0)
    for v in range(2 * y, wp.min(2 * y + 2, rows)):
        for u in range(2 * x, wp.min(2 * x + 2, columns)):
            if level == 1:
                near = wp.cast(wp.int32(frame.pixels[view, v, u] >> DEPTH_SHIFT), wp.float32)
                farthest = wp.min(farthest, near)
            else:
                farthest = wp.min(farthest, frame.hzb[view, frame.hzb_at[level - 1] + v * columns + u])
    return farthest


@wp.kernel
def reduce_depths(views: Views, frame: Frame, level: wp.int32, top: wp.int32, texels: wp.int32, stride: wp.int32):
    """A level from the one below it, and with it the next one, if that is `top`: half as many launches. A thread has a
    texel of `top`."""
    columns = ((views.width - 1) >> level) + 1
    rows = ((views.height - 1) >> level) + 1
    top_columns = ((views.width - 1) >> top) + 1
    top_rows = ((views.height - 1) >> top) + 1
    side = 1 << (top - level)
    for i in range(wp.tid(), texels, stride):
        x = i % top_columns
        y = (i // top_columns) % top_rows
        view = i // (top_columns * top_rows)
        farthest = wp.float32(1.0)
        for v in range(side * y, wp.min(side * y + side, rows)):
            for u in range(side * x, wp.min(side * x + side, columns)):
                depth = farthest_below(views, frame, view, level, v, u)
                frame.hzb[view, frame.hzb_at[level] + v * columns + u] = depth
                farthest = wp.min(farthest, depth)
        if top > level:
            frame.hzb[view, frame.hzb_at[top] + y * top_columns + x] = farthest

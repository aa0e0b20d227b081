"""Stage 3, between the passes and after them: the farthest depth of ever larger squares of pixels (hierarchical z)."""

import warp as wp

from rooftop.scene.rendering.buffers import DEPTH_SHIFT, Frame, Views

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.kernel
def reduce_depths(views: Views, frame: Frame, level: wp.int32, texels: wp.int32, stride: wp.int32):
    """A level from the one below it; of level 1, from the pixels."""
    columns = ((views.width - 1) >> level) + 1
    rows = ((views.height - 1) >> level) + 1
    below_columns = ((views.width - 1) >> (level - 1)) + 1
    below_rows = ((views.height - 1) >> (level - 1)) + 1
    for i in range(wp.tid(), texels, stride):
        x = i % columns
        y = (i // columns) % rows
        view = i // (columns * rows)
        farthest = wp.float32(1.0)
        for v in range(2 * y, wp.min(2 * y + 2, below_rows)):
            for u in range(2 * x, wp.min(2 * x + 2, below_columns)):
                if level == 1:
                    near = wp.cast(wp.int32(frame.pixels[view, v, u] >> DEPTH_SHIFT), wp.float32)
                    farthest = wp.min(farthest, near)
                else:
                    farthest = wp.min(farthest, frame.hzb[view, frame.hzb_at[level - 1] + v * below_columns + u])
        frame.hzb[view, frame.hzb_at[level] + y * columns + x] = farthest

"""Stage 1: the counters are emptied, and each instance gets its transform to each view."""

import warp as wp

from rooftop.scene.rendering.buffers import Frame, Resident, Views

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.func
def composed(
    first: wp.array2d(dtype=wp.float64),
    i: wp.int32,
    second: wp.array2d(dtype=wp.float64),
    j: wp.int32,
    matrices: wp.array2d(dtype=wp.float32),
    row: wp.int32,
):
    """matrices[row] = second[j] after first[i]: products in float64, so that what is far from the world's origin, and
    near the camera, is exact."""
    for axis in range(3):
        at = 4 * axis
        for column in range(4):
            total = wp.float64(0.0)
            for inner in range(3):
                total += second[j, at + inner] * first[i, 4 * inner + column]
            if column == 3:
                total += second[j, at + 3]
            matrices[row, at + column] = wp.float32(total)


@wp.kernel
def place_instances(
    resident: Resident, views: Views, views_before: Views, frame: Frame, pairs: wp.int32, stride: wp.int32
):
    """`frame.to_view` and `frame.before` of each pair."""
    for pair in range(wp.tid(), pairs, stride):
        view = pair // frame.instances
        instance = pair - view * frame.instances
        composed(resident.instance_to_world, instance, views.from_world, view, frame.to_view, pair)
        composed(resident.instance_before, instance, views_before.from_world, view, frame.before, pair)

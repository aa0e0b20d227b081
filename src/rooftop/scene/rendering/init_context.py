"""Stage 1: write changed instances to the device, clear the counters, and compute each instance's transform to each
view."""

import warp as wp

from rooftop.scene.rendering.buffers import LENS_FRAME, Frame, Resident, Views

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

SENT = 14  # columns of a changed instance: its number, its mesh, and its 3 x 4 transform from object to world
Place = wp.types.vector(length=12, dtype=wp.float64)  # a 3 x 4 transform, row by row
SLACK = wp.constant(wp.float64(1.0 + 1e-6))  # factor by which a scale is rounded up


@wp.func
def most_stretch(linear: wp.mat33d):
    """The largest singular value of a linear map A: the square root of the largest eigenvalue of A^T A, which is the
    largest zero of a cubic polynomial."""
    squared = wp.transpose(linear) * linear
    mean = wp.trace(squared) / wp.float64(3.0)
    rest = squared - mean * wp.identity(n=3, dtype=wp.float64)
    spread = wp.sqrt(wp.ddot(rest, rest) / wp.float64(6.0))
    if spread == wp.float64(0.0):
        return wp.sqrt(mean)
    rest = rest / spread
    cosine = wp.clamp(wp.determinant(rest) / wp.float64(2.0), wp.float64(-1.0), wp.float64(1.0))
    return wp.sqrt(mean + wp.float64(2.0) * spread * wp.cos(wp.acos(cosine) / wp.float64(3.0)))


# Columns of the first sent row: the number of rows that follow, the number of the frame, and the number of instances in
# the previous frame. An instance whose number is at least this count is new.
COUNT, FRAME, FRAMED = (wp.constant(column) for column in range(3))


@wp.func
def keep_place(resident: Resident, frame: wp.int32, framed: wp.int32, row: wp.int32):
    """Store the current transform of the instance `row` as its previous one, unless an earlier update for this frame
    did so. If `row` is `framed` (the number of instances in the previous frame) or higher, the instance is new and gets
    no previous transform."""
    if row >= framed:
        resident.instance_moved[row] = -1
    elif resident.instance_moved[row] != frame:
        place = Place()
        for k in range(12):
            place[k] = resident.instance_to_world[row, k]
        resident.instance_moved[row] = frame
        for k in range(12):
            resident.instance_before[row, k] = place[k]


@wp.func
def put(resident: Resident, origins: wp.array2d(dtype=wp.float64), sent: wp.array2d(dtype=wp.float64), i: wp.int32):
    """Copy the changed instance that row `i` of `sent` describes to the tensors of `resident`. All loads come before
    the first store: `sent` may be host memory, and loads between stores would wait for each other."""
    frame = wp.int32(sent[0, FRAME])
    framed = wp.int32(sent[0, FRAMED])
    row = wp.int32(sent[i, 0])
    mesh = wp.int32(sent[i, 1])
    linear = wp.mat33d()
    shift = wp.vec3d()
    for axis in range(3):
        for inner in range(3):
            linear[axis, inner] = sent[i, 2 + 4 * axis + inner]
        shift[axis] = sent[i, 2 + 4 * axis + 3]
    resident.instance_mesh[row] = mesh
    if mesh >= 0:
        keep_place(resident, frame, framed, row)
        for axis in range(3):
            moved = shift[axis]
            for inner in range(3):
                moved += linear[axis, inner] * origins[mesh, inner]
                resident.instance_to_world[row, 4 * axis + inner] = linear[axis, inner]
            resident.instance_to_world[row, 4 * axis + 3] = moved
        stretch = most_stretch(linear) * SLACK
        normals = stretch * wp.transpose(wp.inverse(linear))
        for axis in range(3):
            for inner in range(3):
                resident.instance_normals[row, 3 * axis + inner] = wp.float32(normals[axis, inner])
        resident.instance_scale[row] = wp.float32(wp.where(wp.determinant(linear) < wp.float64(0.0), -stretch, stretch))


@wp.kernel
def put_instances(
    resident: Resident, origins: wp.array2d(dtype=wp.float64), sent: wp.array2d(dtype=wp.float64), stride: wp.int32
):
    """Copy the changed instances from the rows of `sent` to the tensors of `resident`. `origins` has the origin of each
    mesh, to which the positions of the mesh's vertices are relative."""
    for i in range(wp.tid(), wp.int32(sent[0, COUNT]), stride):
        put(resident, origins, sent, i + 1)


@wp.func
def composed(
    first: wp.array2d(dtype=wp.float64),
    i: wp.int32,
    second: wp.array2d(dtype=wp.float64),
    j: wp.int32,
    element: wp.int32,
):
    """Compute one element (0 to 11) of the 3 x 4 matrix product second[j] first[i]. The sum is computed in float64, so
    that the result is accurate for objects that are far from the world's origin and near the camera."""
    at = element & 12  # the first element of the same row
    column = element & 3
    total = wp.float64(0.0)
    for inner in range(3):
        total += second[j, at + inner] * first[i, 4 * inner + column]
    if column == 3:
        total += second[j, at + 3]
    return wp.float32(total)


@wp.kernel
def place_instances(
    resident: Resident, views: Views, views_before: Views, frame: Frame, pairs: wp.int32, stride: wp.int32
):
    """Compute `frame.to_view` and `frame.before` of each pair. A thread computes the same one of the 12 elements of
    every matrix that it processes, so that neighbouring threads access the same cache lines. `stride` is a multiple of
    12."""
    element = wp.tid() % 12
    for pair in range(wp.tid() // 12, pairs, stride // 12):
        view = pair // frame.instances
        instance = pair - view * frame.instances
        world, before = resident.instance_to_world, resident.instance_before
        frame.to_view[pair, element] = composed(world, instance, views.from_world, view, element)
        if resident.instance_moved[instance] == wp.cast(views.lens[view, LENS_FRAME], wp.int32):
            frame.before[pair, element] = composed(before, instance, views_before.from_world, view, element)
        else:
            frame.before[pair, element] = composed(world, instance, views_before.from_world, view, element)

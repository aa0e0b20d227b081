"""Stage 2: find the instances that a view may show, and append the roots of their meshes' trees to the list of nodes.

The first pass tests instances against the depths of the previous frame, with that frame's transforms. The second pass
tests only the instances that the first pass found hidden, against the picture of the first pass.
"""

import warp as wp

from rooftop.scene.rendering.buffers import (
    HIDDEN_INSTANCES,
    LEVEL,
    PASS,
    Frame,
    Resident,
    Views,
)
from rooftop.scene.rendering.projections import half_sizes, is_hidden, is_outside, transformed

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.func
def append(items: wp.array(dtype=wp.int64), counters: wp.array(dtype=wp.int32), counter: wp.int32, item: wp.int64):
    """Append an item to the list `items`, whose length is `counters[counter]`. If the list is full, the length grows,
    but the item is not stored."""
    at = wp.atomic_add(counters, counter, 1)
    if at < items.shape[0]:
        items[at] = item


@wp.func
def append_node(frame: Frame, second: wp.int32, level: wp.int32, item: wp.int64):
    """Append an entry to the list of nodes of a tree level. Lists of even levels are in row 0 of `frame.nodes`, lists
    of odd levels in row 1."""
    at = wp.atomic_add(frame.counters, second * PASS + LEVEL + level, 1)
    if at < frame.nodes.shape[1]:
        frame.nodes[level & 1, at] = item


@wp.func
def entry(pair: wp.int32, what: wp.int32):
    """Make an entry of a list of the culling kernels: pair << 32 | what. The pair is a view and an instance; `what` is
    a node, a child, or a page and a cluster."""
    return (wp.int64(pair) << wp.int64(32)) | wp.int64(what)


@wp.func
def pair_of(item: wp.int64):
    """The pair (view and instance) of a list entry that `entry` made."""
    return wp.int32(item >> wp.int64(32))


@wp.func
def what_of(item: wp.int64):
    """What a list entry that `entry` made refers to: a node, a child, or a page and a cluster."""
    return wp.int32(item & wp.int64(0xFFFFFFFF))


@wp.func
def hidden_before(views_before: Views, frame: Frame, pair: wp.int32, center: wp.vec3, half: wp.vec3):
    """Whether the bounding box of a mesh, or of a part of it, was behind surfaces in the previous frame, where the
    instance was in that frame. False in a shadow map, which has no previous frame."""
    if pair // frame.instances >= frame.cameras:
        return False
    at = transformed(frame.before, pair, center)
    sizes = half_sizes(frame.before, pair, center, half)
    return is_hidden(views_before, pair // frame.instances, at, sizes, frame.hzb_before, frame.hzb_at)


@wp.func
def hidden_now(views: Views, frame: Frame, pair: wp.int32, center: wp.vec3, half: wp.vec3):
    """Whether a box around a mesh or a part of it, in the instance's current position, is behind surfaces that this
    frame's first pass has drawn."""
    at = transformed(frame.to_view, pair, center)
    sizes = half_sizes(frame.to_view, pair, center, half)
    return is_hidden(views, pair // frame.instances, at, sizes, frame.hzb, frame.hzb_at)


@wp.func
def mesh_center(resident: Resident, mesh: wp.int32):
    """The middle of a mesh's box, in the mesh's units, relative to the mesh's origin."""
    return wp.vec3(resident.mesh_box[mesh, 0], resident.mesh_box[mesh, 1], resident.mesh_box[mesh, 2])


@wp.func
def mesh_half(resident: Resident, mesh: wp.int32):
    """Half the size of a mesh's box along each axis, in the mesh's units."""
    return wp.vec3(resident.mesh_box[mesh, 3], resident.mesh_box[mesh, 4], resident.mesh_box[mesh, 5])


@wp.kernel
def cull_instances(
    resident: Resident,
    views: Views,
    views_before: Views,
    frame: Frame,
    history: wp.int32,
    pairs: wp.int32,
    stride: wp.int32,
):
    """Test instances in the first pass: whether a view may show them. `history` is not 0 if there is a previous frame,
    against whose depths instances are tested."""
    for pair in range(wp.tid(), pairs, stride):
        view = pair // frame.instances
        mesh = resident.instance_mesh[pair - view * frame.instances]
        if mesh < 0:
            continue
        center = mesh_center(resident, mesh)
        half = mesh_half(resident, mesh)
        at = transformed(frame.to_view, pair, center)
        if not is_outside(views, view, at, half_sizes(frame.to_view, pair, center, half)):
            hidden = False
            if history != 0:
                hidden = hidden_before(views_before, frame, pair, center, half)
            if hidden:
                append(frame.hidden_instances, frame.counters, HIDDEN_INSTANCES, entry(pair, 0))
            else:
                append_node(frame, 0, 0, entry(pair, 0))


@wp.func
def ask_instances_again(resident: Resident, views: Views, frame: Frame, thread: wp.int32, stride: wp.int32):
    """Test again, in the second pass, the instances that the first pass found hidden. Visible instances add the root of
    their mesh's tree to the nodes of the second pass. `level_cull.ask_again` calls this."""
    count = wp.min(frame.counters[HIDDEN_INSTANCES], frame.hidden_instances.shape[0])
    for i in range(thread, count, stride):
        pair = pair_of(frame.hidden_instances[i])
        mesh = resident.instance_mesh[pair % frame.instances]
        if not hidden_now(views, frame, pair, mesh_center(resident, mesh), mesh_half(resident, mesh)):
            append_node(frame, 1, 0, entry(pair, 0))

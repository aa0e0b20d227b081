"""Stage 3: find the clusters to draw, with one launch for each level of the trees, without synchronization with the
host.

A cluster is drawn if its own error is small enough and its parent error (the error of the coarser clusters that replace
it) is too large. So every part of the surface is drawn at exactly one level. The traversal of the tree finds the groups
whose parent error is too large. The first pass sets aside items that are behind the surfaces of the previous frame, and
the second pass tests these items again.
"""

import warp as wp

from rooftop.scene import layouts
from rooftop.scene.rendering.buffers import (
    GROUPS,
    HIDDEN_CHILDREN,
    HIDDEN_CLUSTERS,
    LEVEL,
    MESH_FIRST_NODE,
    PASS,
    VISIBLE,
    Frame,
    Resident,
    Views,
)
from rooftop.scene.rendering.clusters import (
    CLUSTER_BASE,
    CLUSTER_ERROR,
    CLUSTER_SPHERE,
    HEAD_BASE,
    HEAD_ERROR,
    HEAD_SPHERE,
    Head,
    extent_of,
    head_of,
    head_word,
    real,
)
from rooftop.scene.rendering.instance_cull import (
    append,
    append_node,
    ask_instances_again,
    entry,
    hidden_before,
    hidden_now,
    pair_of,
    what_of,
)
from rooftop.scene.rendering.projections import error_on_screen, half_sizes, is_outside, transformed

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

CHILD_CENTER, CHILD_HALF = wp.constant(layouts.CHILD_CENTER), wp.constant(layouts.CHILD_HALF)
CHILD_SPHERE, CHILD_ERROR = wp.constant(layouts.CHILD_SPHERE), wp.constant(layouts.CHILD_ERROR)
CHILD_KIND, CHILD_AT = wp.constant(layouts.CHILD_KIND), wp.constant(layouts.CHILD_AT)
CHILD_FIRST, INNER = wp.constant(layouts.CHILD_FIRST), wp.constant(layouts.INNER)
CLUSTER_INDEX_BITS = wp.constant(11)  # a page has at most layouts.MOST_CLUSTERS, which is 2^11 - 1
CLUSTER_INDEX_MASK = wp.constant((1 << 11) - 1)
LANES = wp.constant(32)  # threads that share the clusters of a group

SHOWN, HIDDEN, UNSEEN = wp.constant(0), wp.constant(1), wp.constant(2)


@wp.func
def three(nodes: wp.array3d(dtype=wp.int32), node: wp.int32, slot: wp.int32, first: wp.int32):
    """Read three consecutive float32 values of an entry of the tree over the groups of clusters: child `slot` of node
    `node`, from the child's word `first` on."""
    return wp.vec3(
        real(nodes[node, slot, first]), real(nodes[node, slot, first + 1]), real(nodes[node, slot, first + 2])
    )


@wp.func
def pixels_off(
    resident: Resident,
    views: Views,
    frame: Frame,
    pair: wp.int32,
    center: wp.vec3,
    radius: wp.float32,
    error: wp.float32,
):
    """Convert an error in the mesh's units to pixels, for a surface that lies in the given sphere (also in the
    mesh's units)."""
    scale = wp.abs(resident.instance_scale[pair % frame.instances])
    at = transformed(frame.to_view, pair, center)
    return error_on_screen(views, pair // frame.instances, at, radius, error, scale)


@wp.func
def too_coarse(
    resident: Resident,
    views: Views,
    frame: Frame,
    pair: wp.int32,
    center: wp.vec3,
    radius: wp.float32,
    error: wp.float32,
):
    """Whether an error of the surface in the mesh's units exceeds the allowed error in pixels (see `pixels_off`)."""
    return pixels_off(resident, views, frame, pair, center, radius, error) > frame.pixel_error


@wp.func
def box_state(
    views: Views, views_before: Views, frame: Frame, history: wp.int32, pair: wp.int32, center: wp.vec3, half: wp.vec3
):
    """Classify a box as SHOWN, UNSEEN (outside the picture) or, if `history` is not 0, HIDDEN (behind surfaces of the
    previous frame)."""
    at = transformed(frame.to_view, pair, center)
    if is_outside(views, pair // frame.instances, at, half_sizes(frame.to_view, pair, center, half)):
        return UNSEEN
    if history != 0:
        if hidden_before(views_before, frame, pair, center, half):
            return HIDDEN
    return SHOWN


@wp.func
def follow(
    resident: Resident, frame: Frame, second: wp.int32, level: wp.int32, pair: wp.int32, node: wp.int32, slot: wp.int32
):
    """Append child `slot` of a tree node to a list: to the nodes of tree level `level` if the child is a node, else to
    the list of groups of clusters."""
    mesh = resident.instance_mesh[pair % frame.instances]
    row = resident.mesh[mesh, MESH_FIRST_NODE] + node
    if resident.nodes[row, slot, CHILD_KIND] == INNER:
        append_node(frame, second, level, entry(pair, resident.nodes[row, slot, CHILD_AT]))
    else:
        append(frame.groups, frame.counters, second * PASS + GROUPS, entry(pair, node * 8 + slot))


@wp.kernel
def cull_nodes(
    resident: Resident,
    views: Views,
    views_before: Views,
    frame: Frame,
    history: wp.int32,
    second: wp.int32,
    level: wp.int32,
    stride: wp.int32,
):
    """Test the children of the nodes in the list of tree level `level`. A child passes if the clusters that replace its
    clusters are too coarse, and its box is in the picture and not hidden. A child that passes joins the nodes of the
    next level if it is a node, else the groups. Hidden children are kept for the second pass."""
    count = wp.min(frame.counters[second * PASS + LEVEL + level], frame.nodes.shape[1])
    for i in range(wp.tid(), 8 * count, stride):
        item = frame.nodes[level & 1, i >> 3]
        pair = pair_of(item)
        node = what_of(item)
        slot = i & 7
        mesh = resident.instance_mesh[pair % frame.instances]
        row = resident.mesh[mesh, MESH_FIRST_NODE] + node
        if resident.nodes[row, slot, CHILD_KIND] != 0:
            sphere = three(resident.nodes, row, slot, CHILD_SPHERE)
            radius = real(resident.nodes[row, slot, CHILD_SPHERE + 3])
            error = real(resident.nodes[row, slot, CHILD_ERROR])
            if too_coarse(resident, views, frame, pair, sphere, radius, error):
                center = three(resident.nodes, row, slot, CHILD_CENTER)
                half = three(resident.nodes, row, slot, CHILD_HALF)
                state = box_state(views, views_before, frame, history, pair, center, half)
                if state == SHOWN:
                    follow(resident, frame, second, level + 1, pair, node, slot)
                if state == HIDDEN:
                    append(frame.hidden_children, frame.counters, HIDDEN_CHILDREN, entry(pair, node * 8 + slot))


@wp.func
def ask_children_again(resident: Resident, views: Views, frame: Frame, thread: wp.int32, stride: wp.int32):
    """Test again, in the second pass, the children of tree nodes that the first pass found hidden. Visible children
    that are nodes join the list of nodes from which the second pass starts."""
    count = wp.min(frame.counters[HIDDEN_CHILDREN], frame.hidden_children.shape[0])
    for i in range(thread, count, stride):
        pair = pair_of(frame.hidden_children[i])
        child = what_of(frame.hidden_children[i])
        mesh = resident.instance_mesh[pair % frame.instances]
        row = resident.mesh[mesh, MESH_FIRST_NODE] + (child >> 3)
        center = three(resident.nodes, row, child & 7, CHILD_CENTER)
        half = three(resident.nodes, row, child & 7, CHILD_HALF)
        if not hidden_now(views, frame, pair, center, half):
            follow(resident, frame, 1, 0, pair, child >> 3, child & 7)


@wp.func
def low_corner(resident: Resident, head: Head, step: wp.float32):
    """The lowest corner of a cluster's box, in the mesh's units, relative to the mesh's origin."""
    return step * wp.vec3(
        wp.float32(head_word(resident, head, CLUSTER_BASE, HEAD_BASE)),
        wp.float32(head_word(resident, head, CLUSTER_BASE + 1, HEAD_BASE + 1)),
        wp.float32(head_word(resident, head, CLUSTER_BASE + 2, HEAD_BASE + 2)),
    )


@wp.func
def half_extent(resident: Resident, head: Head, step: wp.float32):
    """Half the size of a cluster's box along each axis, in the mesh's units."""
    return (
        0.5
        * step
        * wp.vec3(
            wp.float32(extent_of(resident, head, 0)),
            wp.float32(extent_of(resident, head, 1)),
            wp.float32(extent_of(resident, head, 2)),
        )
    )


@wp.func
def cluster_too_coarse(resident: Resident, views: Views, frame: Frame, pair: wp.int32, head: Head):
    """Whether the cluster's error is too large, so that the finer clusters that it replaces must be drawn instead of
    it. A cluster whose head stores no error belongs to the finest level, and is never too coarse."""
    if not head.replaces:
        return False
    center = wp.vec3(
        real(head_word(resident, head, CLUSTER_SPHERE, HEAD_SPHERE)),
        real(head_word(resident, head, CLUSTER_SPHERE + 1, HEAD_SPHERE + 1)),
        real(head_word(resident, head, CLUSTER_SPHERE + 2, HEAD_SPHERE + 2)),
    )
    radius = real(head_word(resident, head, CLUSTER_SPHERE + 3, HEAD_SPHERE + 3))
    error = real(head_word(resident, head, CLUSTER_ERROR, HEAD_ERROR))
    return too_coarse(resident, views, frame, pair, center, radius, error)


@wp.func
def list_cluster(
    resident: Resident,
    views: Views,
    views_before: Views,
    frame: Frame,
    history: wp.int32,
    second: wp.int32,
    item: wp.int64,
    head: Head,
):
    """Append a cluster of the right level to the visible or the hidden clusters, or to neither if it is outside the
    picture."""
    pair = pair_of(item)
    step = resident.mesh_steps[resident.instance_mesh[pair % frame.instances], 0]
    half = half_extent(resident, head, step)
    center = low_corner(resident, head, step) + half
    state = box_state(views, views_before, frame, history, pair, center, half)
    if state == SHOWN:
        append(frame.found, frame.counters, second * PASS + VISIBLE, item)
    if state == HIDDEN:
        append(frame.hidden_clusters, frame.counters, HIDDEN_CLUSTERS, item)


@wp.kernel
def cull_clusters(
    resident: Resident,
    views: Views,
    views_before: Views,
    frame: Frame,
    history: wp.int32,
    second: wp.int32,
    stride: wp.int32,
):
    """Of all groups in the list, choose the clusters that should be drawn, and append each one to the list of visible
    clusters or of hidden clusters; clusters outside the picture are dropped. If pages may be absent, the kernel of
    `streaming/streamed_cull.py` is launched instead."""
    count = wp.min(frame.counters[second * PASS + GROUPS], frame.groups.shape[0])
    for i in range(wp.tid(), LANES * count, stride):
        pair = pair_of(frame.groups[i // LANES])
        child = what_of(frame.groups[i // LANES])
        mesh = resident.instance_mesh[pair % frame.instances]
        row = resident.mesh[mesh, MESH_FIRST_NODE] + (child >> 3)
        page = resident.nodes[row, child & 7, CHILD_AT]
        first = resident.nodes[row, child & 7, CHILD_FIRST]
        for k in range(i % LANES, resident.nodes[row, child & 7, CHILD_KIND], LANES):
            head = head_of(resident, mesh, page, first + k)
            if not cluster_too_coarse(resident, views, frame, pair, head):
                item = entry(pair, (page << CLUSTER_INDEX_BITS) | (first + k))
                list_cluster(resident, views, views_before, frame, history, second, item, head)


@wp.func
def ask_clusters_again(resident: Resident, views: Views, frame: Frame, thread: wp.int32, stride: wp.int32):
    """Test again the clusters that the first pass found hidden behind surfaces of the previous frame."""
    count = wp.min(frame.counters[HIDDEN_CLUSTERS], frame.hidden_clusters.shape[0])
    for i in range(thread, count, stride):
        item = frame.hidden_clusters[i]
        pair = pair_of(item)
        mesh = resident.instance_mesh[pair % frame.instances]
        page = what_of(item) >> CLUSTER_INDEX_BITS
        head = head_of(resident, mesh, page, what_of(item) & CLUSTER_INDEX_MASK)
        step = resident.mesh_steps[mesh, 0]
        half = half_extent(resident, head, step)
        if not hidden_now(views, frame, pair, low_corner(resident, head, step) + half, half):
            append(frame.found, frame.counters, PASS + VISIBLE, item)


@wp.kernel
def ask_again(resident: Resident, views: Views, frame: Frame, stride: wp.int32):
    """Begin the second pass: test again all instances, children of tree nodes and clusters that the first pass found
    hidden. One launch suffices, because these three lists do not depend on one another."""
    ask_instances_again(resident, views, frame, wp.tid(), stride)
    ask_children_again(resident, views, frame, wp.tid(), stride)
    ask_clusters_again(resident, views, frame, wp.tid(), stride)

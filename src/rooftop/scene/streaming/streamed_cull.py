"""The variant of `cull_clusters`, the last step of `level_cull.py`, for scenes whose pages may be absent.
`cull_groups<true>` does the same in CUDA C++.

A cluster is drawn if it is fine enough, or if the page of the finer clusters that it replaces is absent. Every group
that would be drawn if all pages were resident requests its page, present or absent, with the error in pixels of the
group's coarser replacement. So a frame's requests do not depend on the resident pages.
"""

import warp as wp

from rooftop.scene.rendering.buffers import GROUPS, MESH_FIRST_NODE, MESH_FIRST_PAGE, PASS, Frame, Resident, Views
from rooftop.scene.rendering.clusters import Head, head_of, real, source_of
from rooftop.scene.rendering.instance_cull import entry, pair_of, what_of
from rooftop.scene.rendering.level_cull import (
    CHILD_AT,
    CHILD_ERROR,
    CHILD_FIRST,
    CHILD_KIND,
    CHILD_SPHERE,
    CLUSTER_INDEX_BITS,
    LANES,
    cluster_too_coarse,
    list_cluster,
    pixels_off,
    three,
)
from rooftop.scene.streaming.requests import Requests

wp.set_module_options({"enable_backward": False, "fuse_fp": False})


@wp.func
def ask_for(
    resident: Resident,
    views: Views,
    frame: Frame,
    requests: Requests,
    pair: wp.int32,
    row: wp.int32,
    slot: wp.int32,
    page: wp.int32,
):
    """Request `page`, the page of the group that is child `slot` of the tree node in `row`."""
    sphere = three(resident.nodes, row, slot, CHILD_SPHERE)
    radius = real(resident.nodes[row, slot, CHILD_SPHERE + 3])
    error = real(resident.nodes[row, slot, CHILD_ERROR])
    pixels = wp.cast(pixels_off(resident, views, frame, pair, sphere, radius, error), wp.int32)
    # compared as integers: floats >= 0 have the same order as their bits
    if requests.wanted[page] < pixels:
        wp.atomic_max(requests.wanted, page, pixels)


@wp.func
def finer_is_there(resident: Resident, requests: Requests, mesh: wp.int32, head: Head):
    """Whether a cluster replaces a group of finer clusters whose page is resident. False if it replaces none."""
    source = source_of(resident, head)
    if source < 0:
        return False
    return resident.page_at[requests.group_page[requests.first_group[mesh] + source]] >= wp.int64(0)


@wp.kernel
def cull_clusters(
    resident: Resident,
    views: Views,
    views_before: Views,
    frame: Frame,
    history: wp.int32,
    second: wp.int32,
    requests: Requests,
    stride: wp.int32,
):
    """Request the page of each group. Of each group whose page is resident, choose the clusters that should be drawn,
    and append each one to the list of visible clusters or of hidden clusters; clusters outside the picture are dropped.
    """
    count = wp.min(frame.counters[second * PASS + GROUPS], frame.groups.shape[0])
    for i in range(wp.tid(), LANES * count, stride):
        pair = pair_of(frame.groups[i // LANES])
        child = what_of(frame.groups[i // LANES])
        mesh = resident.instance_mesh[pair % frame.instances]
        row = resident.mesh[mesh, MESH_FIRST_NODE] + (child >> 3)
        page = resident.nodes[row, child & 7, CHILD_AT]
        of_all = resident.mesh[mesh, MESH_FIRST_PAGE] + page
        if i % LANES == 0:
            ask_for(resident, views, frame, requests, pair, row, child & 7, of_all)
        if resident.page_at[of_all] >= wp.int64(0):
            first = resident.nodes[row, child & 7, CHILD_FIRST]
            for k in range(i % LANES, resident.nodes[row, child & 7, CHILD_KIND], LANES):
                head = head_of(resident, mesh, page, first + k)
                drawn = not cluster_too_coarse(resident, views, frame, pair, head)
                if not drawn:
                    drawn = not finer_is_there(resident, requests, mesh, head)
                if drawn:
                    item = entry(pair, (page << CLUSTER_INDEX_BITS) | (first + k))
                    list_cluster(resident, views, views_before, frame, history, second, item, head)

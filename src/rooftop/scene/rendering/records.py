"""Records of the visible clusters: the parts of a cluster's head that drawing needs, decoded into 64 bytes.

Reading a head from its page takes seven dependent loads. One thread per cluster reads the head once, so that later
stages load only the record.

    word  0      pair
          1, 2   index of the first word of the cluster's streams
          3      triangles - 1 (7 bits), vertices - 1 (8), kind (2), number of words from the attribute fields of the
                 cluster's head to the streams (15)
          4      number of vertices before triangles 32, 64 and 96 (8 bits each), bits of a reference (8)
          5      number of references before triangles 32, 64 and 96 (10 bits each), whether the instance mirrors (1)
          6      bits of a position (6 for each axis), words from the streams to the positions (13)
          7      step of the grid
          8..10  grid coordinates of the lowest corner of the cluster's box
          11     view
          12     instance
          13     words from the positions to the attributes
          14     material
          15     mesh
"""

import warp as wp

from rooftop.scene.rendering.buffers import Resident
from rooftop.scene.rendering.clusters import (
    FANS_AND_EXPLICIT,
    HEAD_WORDS,
    NEW_WORDS,
    REPLACED_WORDS,
    SEPARATE,
    Cluster,
    head_of,
    mask_bit,
    mask_words,
    read_attributes,
    read_cluster,
    reference,
    word_at,
)
from rooftop.scene.rendering.instance_cull import pair_of, what_of
from rooftop.scene.rendering.level_cull import CLUSTER_INDEX_BITS, CLUSTER_INDEX_MASK

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

WORDS = 16  # number of words of a record


@wp.struct
class Recorded:
    """The data of a visible cluster, which `read_record` unpacks from the cluster's record."""

    cluster: Cluster
    pair: wp.int32
    view: wp.int32
    instance: wp.int32
    mesh: wp.int32
    step: wp.float32
    vertices_before: wp.int32
    references_before: wp.int32


@wp.func_native("""
const int* row = records.data + 16 * static_cast<long long>(at) + 4 * part;
#if defined(__CUDA_ARCH__)
const int4 all = *reinterpret_cast<const int4*>(row);
return wp::vec_t<4, int>(all.x, all.y, all.z, all.w);
#else
return wp::vec_t<4, int>(row[0], row[1], row[2], row[3]);
#endif
""")
def quarter(records: wp.array2d(dtype=wp.int32), at: wp.int32, part: wp.int32) -> wp.vec4i:
    """Load four words of the record in row `at` at once: words 4 * `part` and following."""


@wp.func
def write_record(
    resident: Resident, records: wp.array2d(dtype=wp.int32), rank: wp.int32, item: wp.int64, instances: wp.int32
):
    """Write the record of a visible cluster to row `rank` of `records`. `item` is the cluster's list entry."""
    pair = pair_of(item)
    view = pair // instances
    instance = pair - view * instances
    mesh = resident.instance_mesh[instance]
    page = what_of(item) >> CLUSTER_INDEX_BITS
    index = what_of(item) & CLUSTER_INDEX_MASK
    head = head_of(resident, mesh, page, index)
    cluster = read_cluster(resident, mesh, page, head)
    attributes_head = head.at
    if head.words != 0:
        attributes_head += wp.int64(HEAD_WORDS)
        if head.replaces:
            attributes_head += wp.int64(REPLACED_WORDS)
    vertices = wp.int32(0)
    references = wp.int32(0)
    vertices_before = cluster.reference_bits << 24
    references_before = wp.where(resident.instance_scale[instance] < 0.0, 1 << 30, 0)
    for word in range(3):
        shift = 8 * word
        ten = 10 * word
        at = wp.int64(word + 0)
        low = wp.uint32(word_at(resident.words, cluster.masks + at))
        high = wp.uint32(word_at(resident.words, cluster.masks + wp.int64(4) + at))
        ones = wp.int32(wp.bit_count(low))
        both = wp.int32(wp.bit_count(low & high))
        explicit = wp.int32(0)
        if cluster.kind == FANS_AND_EXPLICIT:
            third = word_at(resident.words, cluster.masks + wp.int64(NEW_WORDS) + at)
            explicit = wp.int32(wp.bit_count(wp.uint32(third)))
        vertices += ones + 2 * wp.int32(wp.bit_count(high)) - 3 * explicit
        references += 32 + ones - 2 * both + 3 * explicit
        vertices_before |= (vertices & 255) << shift
        references_before |= (references & 1023) << ten
    records[rank, 0] = pair
    records[rank, 1] = wp.int32(cluster.masks & wp.int64(0xFFFFFFFF))
    records[rank, 2] = wp.int32(cluster.masks >> wp.int64(32))
    counts = (cluster.triangles - 1) & 127 | (cluster.vertices - 1) << 7 | cluster.kind << 15
    records[rank, 3] = counts | wp.int32(cluster.masks - attributes_head) << 17
    records[rank, 4] = vertices_before
    records[rank, 5] = references_before
    widths = cluster.position_bits[0] | cluster.position_bits[1] << 6 | cluster.position_bits[2] << 12
    records[rank, 6] = widths | wp.int32(cluster.positions - cluster.masks) << 18
    records[rank, 7] = wp.cast(resident.mesh_steps[mesh, 0], wp.int32)
    for axis in range(3):
        records[rank, 8 + axis] = cluster.base[axis]
    records[rank, 11] = view
    records[rank, 12] = instance
    records[rank, 13] = wp.int32(cluster.attributes - cluster.positions)
    records[rank, 14] = cluster.material
    records[rank, 15] = mesh


@wp.func
def read_record(resident: Resident, records: wp.array2d(dtype=wp.int32), rank: wp.int32):
    """Read the record of a visible cluster, given its rank."""
    first = quarter(records, rank, 0)
    second = quarter(records, rank, 1)
    third = quarter(records, rank, 2)
    last = quarter(records, rank, 3)
    cluster = Cluster()
    cluster.masks = wp.int64(wp.uint32(first[1])) | wp.int64(first[2]) << wp.int64(32)
    cluster.triangles = (first[3] & 127) + 1
    cluster.vertices = ((first[3] >> 7) & 255) + 1
    cluster.kind = (first[3] >> 15) & 3
    cluster.reference_bits = (second[0] >> 24) & 255
    cluster.references = cluster.masks + wp.int64(mask_words(cluster.kind))
    cluster.positions = cluster.masks + wp.int64((second[2] >> 18) & 8191)
    cluster.attributes = cluster.positions + wp.int64(last[1])
    for axis in range(3):
        cluster.position_bits[axis] = (second[2] >> (6 * axis)) & 63
        cluster.base[axis] = third[axis]
    cluster.material = last[2]
    recorded = Recorded()
    recorded.pair = first[0]
    recorded.view = third[3]
    recorded.instance = last[0]
    recorded.mesh = last[3]
    recorded.step = wp.cast(second[3], wp.float32)
    recorded.vertices_before = second[0]
    recorded.references_before = second[1]
    recorded.cluster = read_attributes(
        resident, recorded.mesh, cluster, cluster.masks - wp.int64((first[3] >> 17) & 32767)
    )
    return recorded


@wp.func
def corners_of(resident: Resident, recorded: Recorded, triangle: wp.int32):
    """Decode the vertices of a triangle, by the table in layouts.py. The triangle's first new vertex has as its index
    the number of new vertices of all earlier triangles; its first reference, the number of their references. Only
    triangles in the same word of the masks are counted here; the record contains both numbers for all earlier words."""
    words = resident.words
    cluster = recorded.cluster
    own = triangle >> 5
    n = wp.int32(0)
    first = triangle & 31
    if own > 0:
        n = (recorded.vertices_before >> (8 * own - 8)) & 255
        first += (recorded.references_before >> (10 * own - 10)) & 1023
    third = cluster.masks + wp.int64(NEW_WORDS)
    low = wp.uint32(word_at(words, cluster.masks + wp.int64(own)))
    high = wp.uint32(word_at(words, cluster.masks + wp.int64(4) + wp.int64(own)))
    explicit = wp.uint32(0)
    if cluster.kind == FANS_AND_EXPLICIT:
        explicit = wp.uint32(word_at(words, third + wp.int64(own)))
    bit = wp.uint32(triangle & 31)
    below = (wp.uint32(1) << bit) - wp.uint32(1)
    ones = wp.int32(wp.bit_count(low & below))
    earlier = wp.int32(wp.bit_count(explicit & below))
    n += ones + 2 * wp.int32(wp.bit_count(high & below)) - 3 * earlier
    first += ones - 2 * wp.int32(wp.bit_count(low & high & below)) + 3 * earlier
    new = wp.int32((low >> bit) & wp.uint32(1)) + 2 * wp.int32((high >> bit) & wp.uint32(1))
    if ((explicit >> bit) & wp.uint32(1)) != wp.uint32(0):
        new = -1
    if cluster.kind == SEPARATE:
        first = 3 * triangle - n
    corners = wp.vec3i()
    if new > 0 or cluster.kind == SEPARATE:
        for corner in range(3):
            if corner < 3 - new:
                corners[corner] = n - 1 - reference(resident, cluster, first + corner)
            else:
                corners[corner] = n + corner + new - 3
    elif new == 0:
        corners[0] = n - 1
        corners[1] = n - 2
        previous = wp.max(triangle - 1, 0)
        after_new = mask_bit(words, cluster.masks + wp.int64(4), previous) != 0
        if after_new and cluster.kind == FANS_AND_EXPLICIT:
            after_new = mask_bit(words, third, previous) == 0
        if not after_new:  # else the second corner is the vertex before the newest
            corners[1] = n - 2 - reference(resident, cluster, first - 1)
        corners[2] = n - 2 - reference(resident, cluster, first)
    else:
        corners[0] = n - 1 - reference(resident, cluster, first)
        corners[1] = n - 2 - reference(resident, cluster, first + 1)
        corners[2] = n - 2 - reference(resident, cluster, first + 2)
    for corner in range(3):
        corners[corner] = wp.clamp(corners[corner], 0, cluster.vertices - 1)  # a damaged page may contain anything
    return corners

"""Read clusters, triangles and vertices from the pages of a scene, on the device. A page is a sequence of 32-bit words,
which `layouts.py` describes.
"""

import warp as wp

from rooftop.scene import layouts
from rooftop.scene.rendering.buffers import HAS_COLORS, HAS_NORMALS, HAS_UV, MESH_ATTRIBUTES, MESH_FIRST_PAGE, Resident

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

PAGE_WORDS, PAGE_GROUPS = wp.constant(layouts.PAGE_WORDS), wp.constant(layouts.PAGE_GROUPS)
PAGE_FIRST_CLUSTER = wp.constant(layouts.PAGE_FIRST_CLUSTER)
PAGE_GROUP_BITS, PAGE_GROUP_MASK = wp.constant(layouts.PAGE_GROUP_BITS), wp.constant((1 << layouts.PAGE_GROUP_BITS) - 1)
PAGE_HEAD_MASK, PAGE_REPLACES = wp.constant((1 << layouts.PAGE_HEAD_BITS) - 1), wp.constant(layouts.PAGE_REPLACES)
GROUP_WORDS, GROUP_SPHERE = wp.constant(layouts.GROUP_WORDS), wp.constant(layouts.GROUP_SPHERE)
GROUP_ERROR = wp.constant(layouts.GROUP_ERROR)
CLUSTER_WORDS, CLUSTER_SPHERE = wp.constant(layouts.CLUSTER_WORDS), wp.constant(layouts.CLUSTER_SPHERE)
CLUSTER_ERROR, CLUSTER_BASE = wp.constant(layouts.CLUSTER_ERROR), wp.constant(layouts.CLUSTER_BASE)
CLUSTER_EXTENT, CLUSTER_COUNTS = wp.constant(layouts.CLUSTER_EXTENT), wp.constant(layouts.CLUSTER_COUNTS)
CLUSTER_STREAMS, CLUSTER_MATERIAL = wp.constant(layouts.CLUSTER_STREAMS), wp.constant(layouts.CLUSTER_MATERIAL)
CLUSTER_SOURCE = wp.constant(layouts.CLUSTER_SOURCE)
CLUSTER_UV_BASE, CLUSTER_UV_EXTENT = wp.constant(layouts.CLUSTER_UV_BASE), wp.constant(layouts.CLUSTER_UV_EXTENT)
HEAD_WORDS, REPLACED_WORDS = wp.constant(layouts.HEAD_WORDS), wp.constant(layouts.REPLACED_WORDS)
HEAD_NORMAL_WORDS, HEAD_UV_WORDS = wp.constant(layouts.NORMAL_WORDS), wp.constant(layouts.UV_WORDS)
HEAD_BASE, HEAD_COUNTS = wp.constant(layouts.HEAD_BASE), wp.constant(layouts.HEAD_COUNTS)
HEAD_BOX, HEAD_STREAMS = wp.constant(layouts.HEAD_BOX), wp.constant(layouts.HEAD_STREAMS)
HEAD_SPHERE, HEAD_ERROR = wp.constant(layouts.HEAD_SPHERE), wp.constant(layouts.HEAD_ERROR)
HEAD_SOURCE, BOX_BITS = wp.constant(layouts.HEAD_SOURCE), wp.constant(layouts.BOX_BITS)
LENGTH_BITS, MANTISSA_BITS = wp.constant(layouts.BOX_BITS - layouts.MANTISSA_BITS), wp.constant(layouts.MANTISSA_BITS)
HEAD_REFERENCE_AT, HEAD_EXPLICIT_AT = wp.constant(layouts.HEAD_REFERENCE_AT), wp.constant(layouts.HEAD_EXPLICIT_AT)
NORMAL_WIDTH_BITS, UV_WIDTH_BITS = wp.constant(layouts.NORMAL_WIDTH_BITS), wp.constant(layouts.UV_WIDTH_BITS)
SEPARATE, FANS = wp.constant(layouts.SEPARATE), wp.constant(layouts.FANS)
FANS_AND_EXPLICIT = wp.constant(layouts.FANS_AND_EXPLICIT)
NEW_WORDS, NORMAL_BITS = wp.constant(layouts.NEW_WORDS), wp.constant(layouts.NORMAL_BITS)
EXPLICIT_WORDS = wp.constant(layouts.EXPLICIT_WORDS)
NORMAL_MIDDLE = wp.constant(layouts.NORMAL_MIDDLE)
COLOR_BITS = wp.constant(layouts.COLOR_BITS)
MATERIAL_BITS, MIXED = wp.constant(layouts.MATERIAL_BITS), wp.constant(layouts.MIXED)


@wp.func
def real(word: wp.int32):
    """Reinterpret the bits of an int32 as float32."""
    return wp.cast(word, wp.float32)


@wp.func_native("return static_cast<const int*>(words.data)[at];")
def word_at(words: wp.array(dtype=wp.int32), at: wp.int64) -> wp.int32:
    """Read word `at` of `Resident.words`, which holds all pages. `words[at]` would convert the index to int32, but
    there may be 2^31 words (8 GiB) or more."""


@wp.func
def bits(words: wp.array(dtype=wp.int32), at: wp.int64, bit: wp.int32, count: wp.int32):
    """Read a number of `count` bits (at most 32) from `words`. It begins `bit` bits after the start of word `at`."""
    word = at + wp.int64(bit >> 5)
    both = wp.uint64(wp.uint32(word_at(words, word))) | (
        wp.uint64(wp.uint32(word_at(words, word + wp.int64(1)))) << wp.uint64(32)
    )
    mask = (wp.uint64(1) << wp.uint64(count)) - wp.uint64(1)
    return wp.int32((both >> wp.uint64(bit & 31)) & mask)


@wp.func
def bit_length(number: wp.int32):
    """The number of significant bits of an unsigned number; 0 for 0."""
    if number < 0:
        return 32
    left = number
    length = wp.int32(0)
    for step in range(5):
        half = wp.int32(16) >> step
        if left >= (1 << half):
            left = left >> half
            length += half
    return length + left


@wp.struct
class Head:
    """Where the head (the description) of a cluster is, and which form it has: short, or old (before version 4)."""

    at: wp.int64  # index of the head's first word in `Resident.words`
    words: wp.int32  # number of words of a short head; 0 in a page before version 4
    replaces: wp.bool  # whether the head states which group the cluster replaces


@wp.struct
class Cluster:
    """The contents of a cluster's head, and the positions of its streams. `read_cluster` and then `read_attributes`
    fill the fields."""

    triangles: wp.int32
    vertices: wp.int32
    kind: wp.int32  # how corners are stored: SEPARATE, FANS, FANS_AND_EXPLICIT
    reference_bits: wp.int32
    reference_count: wp.int32
    material: wp.int32
    base: wp.vec3i
    position_bits: wp.vec3i
    has_normals: wp.bool
    normal_base: wp.vec2i
    normal_bits: wp.vec2i
    uv_base: wp.vec2i
    uv_bits: wp.vec2i
    color_bits: wp.int32  # bits of a vertex's colour; 0 if the mesh has no colours
    # The index of each stream's first word in `Resident.words`.
    masks: wp.int64
    references: wp.int64
    positions: wp.int64
    attributes: wp.int64
    materials: wp.int64


@wp.func
def whole_words(bit_count: wp.int32):
    """The number of 32-bit words needed for `bit_count` bits."""
    return wp.int64((bit_count + 31) >> 5)


@wp.func
def attribute_bit(cluster: Cluster, vertex: wp.int32):
    """The number of bits before a vertex in a cluster's stream of attributes. `vertex` counts the cluster's
    vertices."""
    width = cluster.normal_bits[0] + cluster.normal_bits[1] + cluster.uv_bits[0] + cluster.uv_bits[1]
    return vertex * (width + cluster.color_bits)


@wp.func
def head_of(resident: Resident, mesh: wp.int32, page: wp.int32, index: wp.int32):
    """Locate the head of a cluster. `page` counts the mesh's pages, and `index` the page's clusters, both from 0."""
    at = resident.page_at[resident.mesh[mesh, MESH_FIRST_PAGE] + page]
    word = word_at(resident.words, at + wp.int64(PAGE_GROUPS))
    head = Head()
    head.words = (word >> PAGE_GROUP_BITS) & PAGE_HEAD_MASK
    head.replaces = head.words == 0 or (word & PAGE_REPLACES) != 0
    words = wp.where(head.words == 0, CLUSTER_WORDS, head.words)
    head.at = at + wp.int64(PAGE_WORDS + (word & PAGE_GROUP_MASK) * GROUP_WORDS + index * words)
    return head


@wp.func
def head_word(resident: Resident, head: Head, old: wp.int32, short: wp.int32):
    """Read one word of a head. `old` is the word's index in a head from before version 4, and `short` the word's index
    in a short head."""
    return word_at(resident.words, head.at + wp.int64(wp.where(head.words == 0, old, short)))


@wp.func
def triangles_of(resident: Resident, head: Head):
    """The number of triangles of a cluster."""
    counts = head_word(resident, head, CLUSTER_COUNTS, HEAD_COUNTS)
    return (counts & wp.where(head.words == 0, 255, 127)) + 1


@wp.func
def level_of(resident: Resident, head: Head):
    """The level of detail of a cluster."""
    counts = head_word(resident, head, CLUSTER_COUNTS, HEAD_COUNTS)
    return (counts >> wp.where(head.words == 0, 24, 15)) & 255


@wp.func
def source_of(resident: Resident, head: Head):
    """The index of the group that a cluster replaces, counted within the mesh; -1 if it replaces none."""
    source = wp.int32(-1)
    if head.replaces:
        source = head_word(resident, head, CLUSTER_SOURCE, HEAD_SOURCE)
    return source


@wp.func
def box_length(box: wp.int32, axis: wp.int32):
    """The number of bits of a vertex's coordinate along an axis. `box` is the word HEAD_BOX of a short head."""
    return (box >> (axis * BOX_BITS)) & ((1 << LENGTH_BITS) - 1)


@wp.func
def extent_of(resident: Resident, head: Head, axis: wp.int32):
    """The width of the box around a cluster along an axis, in steps of the grid."""
    if head.words == 0:
        return word_at(resident.words, head.at + wp.int64(CLUSTER_EXTENT + axis))
    box = word_at(resident.words, head.at + wp.int64(HEAD_BOX))
    length = box_length(box, axis)
    extent = wp.int32(0)
    if length > 0:
        mantissa = (box >> (axis * BOX_BITS + LENGTH_BITS)) & ((1 << MANTISSA_BITS) - 1)
        below = wp.max(length - 1 - MANTISSA_BITS, 0)
        extent = (1 << (length - 1)) + (((mantissa + 1) << below) - 1)
    return extent


@wp.func
def read_old_head(resident: Resident, head: Head, page: wp.int64):
    """Read a cluster's head of the form before version 4. `page` is the index of the page's first word."""
    words = resident.words
    cluster = Cluster()
    counts = word_at(words, head.at + wp.int64(CLUSTER_COUNTS))
    cluster.triangles = (counts & 255) + 1
    cluster.vertices = ((counts >> 8) & 255) + 1
    cluster.reference_bits = (counts >> 16) & 255
    cluster.reference_count = 3 * cluster.triangles - cluster.vertices
    cluster.kind = SEPARATE
    cluster.material = word_at(words, head.at + wp.int64(CLUSTER_MATERIAL))
    for axis in range(3):
        cluster.base[axis] = word_at(words, head.at + wp.int64(CLUSTER_BASE + axis))
        cluster.position_bits[axis] = bit_length(word_at(words, head.at + wp.int64(CLUSTER_EXTENT + axis)))
    cluster.masks = page + wp.int64(word_at(words, head.at + wp.int64(CLUSTER_STREAMS)))
    return cluster


@wp.func
def read_short_head(resident: Resident, head: Head, page: wp.int64):
    """Read a cluster's head of the short form. `page` is the index of the page's first word."""
    words = resident.words
    cluster = Cluster()
    counts = word_at(words, head.at + wp.int64(HEAD_COUNTS))
    cluster.triangles = (counts & 127) + 1
    cluster.vertices = ((counts >> 7) & 255) + 1
    cluster.reference_count = (counts >> 23) & 511
    box = word_at(words, head.at + wp.int64(HEAD_BOX))
    for axis in range(3):
        cluster.base[axis] = word_at(words, head.at + wp.int64(HEAD_BASE + axis))
        cluster.position_bits[axis] = box_length(box, axis)
    cluster.reference_bits = ((box >> HEAD_REFERENCE_AT) & 7) + 1
    cluster.kind = FANS + ((box >> HEAD_EXPLICIT_AT) & 1)
    streams = word_at(words, head.at + wp.int64(HEAD_STREAMS))
    cluster.material = wp.where((streams >> 15) & 1 != 0, MIXED, (streams >> 16) & 65535)
    cluster.masks = page + wp.int64(streams & 32767)
    return cluster


@wp.func
def read_head(resident: Resident, head: Head, page: wp.int64):
    """Read a cluster's head of either form, and set the position of the cluster's first stream (the masks), but not of
    the other streams. `page` is the index of the page's first word."""
    if head.words == 0:
        return read_old_head(resident, head, page)
    return read_short_head(resident, head, page)


@wp.func
def read_attributes(resident: Resident, mesh: wp.int32, cluster: Cluster, at: wp.int64):
    """Read the attribute fields of a cluster's head, and set the position of the materials, which follow the
    attributes. `at` is the position at which the attribute fields begin in a short head; for an old head, it is the
    head's first word."""
    words = resident.words
    has = resident.mesh[mesh, MESH_ATTRIBUTES]
    cluster.has_normals = (has & HAS_NORMALS) != 0
    old = cluster.kind == SEPARATE
    if has != 0:
        word_of_uv = at
        if has & HAS_NORMALS != 0:
            if old:
                cluster.normal_bits = wp.vec2i(NORMAL_BITS, NORMAL_BITS)
            else:
                word = word_at(words, at)
                for axis in range(2):
                    cluster.normal_base[axis] = (word >> (axis * NORMAL_BITS)) & ((1 << NORMAL_BITS) - 1)
                    width = word >> (2 * NORMAL_BITS + axis * NORMAL_WIDTH_BITS)
                    cluster.normal_bits[axis] = width & ((1 << NORMAL_WIDTH_BITS) - 1)
                word_of_uv += wp.int64(HEAD_NORMAL_WORDS)
        if has & HAS_UV != 0:
            if old:
                for axis in range(2):
                    cluster.uv_base[axis] = word_at(words, at + wp.int64(CLUSTER_UV_BASE + axis))
                    cluster.uv_bits[axis] = bit_length(word_at(words, at + wp.int64(CLUSTER_UV_EXTENT + axis)))
            else:
                widths = word_at(words, word_of_uv + wp.int64(2))
                cluster.uv_base = wp.vec2i(word_at(words, word_of_uv), word_at(words, word_of_uv + wp.int64(1)))
                for axis in range(2):
                    cluster.uv_bits[axis] = (widths >> (axis * UV_WIDTH_BITS)) & ((1 << UV_WIDTH_BITS) - 1)
        if has & HAS_COLORS != 0:
            cluster.color_bits = 3 * COLOR_BITS
    cluster.materials = cluster.attributes + whole_words(attribute_bit(cluster, cluster.vertices))
    return cluster


@wp.func
def mask_words(kind: wp.int32):
    """The number of words of a cluster's masks, which depends on the cluster's kind (`Cluster.kind`)."""
    return wp.where(kind == FANS_AND_EXPLICIT, NEW_WORDS + EXPLICIT_WORDS, NEW_WORDS)


@wp.func
def read_cluster(resident: Resident, mesh: wp.int32, page: wp.int32, head: Head):
    """Read a cluster of a page, except the attribute fields of its head, which `read_attributes` reads."""
    at = resident.page_at[resident.mesh[mesh, MESH_FIRST_PAGE] + page]
    cluster = read_head(resident, head, at)
    cluster.references = cluster.masks + wp.int64(mask_words(cluster.kind))
    cluster.positions = cluster.references + whole_words(cluster.reference_count * cluster.reference_bits)
    width = cluster.position_bits[0] + cluster.position_bits[1] + cluster.position_bits[2]
    cluster.attributes = cluster.positions + whole_words(cluster.vertices * width)
    return cluster


@wp.func
def mask_bit(words: wp.array(dtype=wp.int32), mask: wp.int64, triangle: wp.int32):
    """Read a triangle's bit in a mask (see `layouts.py`). `mask` is the index of the mask's first word."""
    return (word_at(words, mask + wp.int64(triangle >> 5)) >> (triangle & 31)) & 1


@wp.func
def reference(resident: Resident, cluster: Cluster, number: wp.int32):
    """Read one reference from a cluster's stream of references; `number` counts the references from 0. A reference
    tells which earlier vertex is the corner of a triangle (see `layouts.py`)."""
    width = cluster.reference_bits
    return bits(resident.words, cluster.references, number * width, width)


@wp.func
def position_of(resident: Resident, cluster: Cluster, vertex: wp.int32, step: wp.float32):
    """The position of a vertex, in object units from the mesh's origin. The result has the same bits in every cluster
    that contains the vertex. `vertex` counts the cluster's vertices, and `step` is the distance of two grid points."""
    width = cluster.position_bits[0] + cluster.position_bits[1] + cluster.position_bits[2]
    bit = vertex * width
    position = wp.vec3()
    for axis in range(3):
        above = bits(resident.words, cluster.positions, bit, cluster.position_bits[axis])
        position[axis] = step * wp.float32(cluster.base[axis] + above)
        bit += cluster.position_bits[axis]
    return position


@wp.func
def normal_of(resident: Resident, cluster: Cluster, vertex: wp.int32):
    """The unit normal of a vertex. It is stored as two numbers, the coordinates of a point on an unfolded octahedron.
    Only for meshes with normals."""
    bit = attribute_bit(cluster, vertex)
    numbers = wp.vec2()
    for axis in range(2):
        number = cluster.normal_base[axis] + bits(resident.words, cluster.attributes, bit, cluster.normal_bits[axis])
        numbers[axis] = wp.float32(number - NORMAL_MIDDLE) / wp.float32(NORMAL_MIDDLE)
        bit += cluster.normal_bits[axis]
    x = numbers[0]
    y = numbers[1]
    z = 1.0 - wp.abs(x) - wp.abs(y)
    if z < 0.0:
        folded = (1.0 - wp.abs(y)) * wp.where(x < 0.0, -1.0, 1.0)
        y = (1.0 - wp.abs(x)) * wp.where(y < 0.0, -1.0, 1.0)
        x = folded
    return wp.normalize(wp.vec3(x, y, z))


@wp.func
def uv_of(resident: Resident, cluster: Cluster, vertex: wp.int32, step: wp.float32):
    """The texture coordinates (u, v) of a vertex; only for meshes with texture coordinates. `step` is the
    distance of two points of the mesh's grid of texture coordinates."""
    bit = attribute_bit(cluster, vertex) + cluster.normal_bits[0] + cluster.normal_bits[1]
    u = bits(resident.words, cluster.attributes, bit, cluster.uv_bits[0])
    v = bits(resident.words, cluster.attributes, bit + cluster.uv_bits[0], cluster.uv_bits[1])
    return wp.vec2(step * wp.float32(cluster.uv_base[0] + u), step * wp.float32(cluster.uv_base[1] + v))


@wp.func
def vertex_color_of(resident: Resident, cluster: Cluster, vertex: wp.int32):
    """The colour of a vertex: red, green and blue from 0 to 1. Only for meshes with colours."""
    bit = attribute_bit(cluster, vertex + 1) - cluster.color_bits
    packed = bits(resident.words, cluster.attributes, bit, 3 * COLOR_BITS)
    most = (1 << COLOR_BITS) - 1
    color = wp.vec3()
    for channel in range(3):
        color[channel] = wp.float32((packed >> (channel * COLOR_BITS)) & most) / wp.float32(most)
    return color


@wp.func
def material_of(resident: Resident, cluster: Cluster, triangle: wp.int32):
    """The material number of a triangle. This is the cluster's material, unless each triangle has its own (MIXED)."""
    material = cluster.material
    if material == MIXED:
        material = bits(resident.words, cluster.materials, triangle * MATERIAL_BITS, MATERIAL_BITS)
    return material

"""Reading pages: clusters, corners of triangles, vertices. The words are those of `layouts.py`."""

import warp as wp

from rooftop.scene import layouts
from rooftop.scene.rendering.buffers import HAS_COLORS, HAS_NORMALS, HAS_UV, MESH_ATTRIBUTES, MESH_FIRST_PAGE, Resident

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

PAGE_WORDS, PAGE_GROUPS = wp.constant(layouts.PAGE_WORDS), wp.constant(layouts.PAGE_GROUPS)
PAGE_FIRST_CLUSTER = wp.constant(layouts.PAGE_FIRST_CLUSTER)
GROUP_WORDS, GROUP_SPHERE = wp.constant(layouts.GROUP_WORDS), wp.constant(layouts.GROUP_SPHERE)
GROUP_ERROR = wp.constant(layouts.GROUP_ERROR)
CLUSTER_WORDS, CLUSTER_SPHERE = wp.constant(layouts.CLUSTER_WORDS), wp.constant(layouts.CLUSTER_SPHERE)
CLUSTER_ERROR, CLUSTER_BASE = wp.constant(layouts.CLUSTER_ERROR), wp.constant(layouts.CLUSTER_BASE)
CLUSTER_EXTENT, CLUSTER_COUNTS = wp.constant(layouts.CLUSTER_EXTENT), wp.constant(layouts.CLUSTER_COUNTS)
CLUSTER_STREAMS, CLUSTER_MATERIAL = wp.constant(layouts.CLUSTER_STREAMS), wp.constant(layouts.CLUSTER_MATERIAL)
CLUSTER_UV_BASE, CLUSTER_UV_EXTENT = wp.constant(layouts.CLUSTER_UV_BASE), wp.constant(layouts.CLUSTER_UV_EXTENT)
NEW_WORDS, NORMAL_BITS = wp.constant(layouts.NEW_WORDS), wp.constant(layouts.NORMAL_BITS)
NORMAL_MIDDLE = wp.constant(layouts.NORMAL_MIDDLE)
COLOR_BITS = wp.constant(layouts.COLOR_BITS)
MATERIAL_BITS, MIXED = wp.constant(layouts.MATERIAL_BITS), wp.constant(layouts.MIXED)


@wp.func
def real(word: wp.int32):
    """The float32 whose bits these are."""
    return wp.cast(word, wp.float32)


@wp.func_native("return static_cast<const int*>(words.data)[at];")
def word_at(words: wp.array(dtype=wp.int32), at: wp.int64) -> wp.int32:
    """A word of the pages. `words[at]` would make an int32 of the place: pages may take more than 8 GiB."""


@wp.func
def bits(words: wp.array(dtype=wp.int32), at: wp.int64, bit: wp.int32, count: wp.int32):
    """`count` bits (at most 32), from `bit` bits after a word on."""
    word = at + wp.int64(bit >> 5)
    both = wp.uint64(wp.uint32(word_at(words, word))) | (
        wp.uint64(wp.uint32(word_at(words, word + wp.int64(1)))) << wp.uint64(32)
    )
    mask = (wp.uint64(1) << wp.uint64(count)) - wp.uint64(1)
    return wp.int32((both >> wp.uint64(bit & 31)) & mask)


@wp.func
def bit_length(number: wp.int32):
    """How many bits an unsigned number has."""
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
class Cluster:
    """What its head says, and where its streams are."""

    triangles: wp.int32
    vertices: wp.int32
    level: wp.int32
    number: wp.int32  # within the mesh
    reference_bits: wp.int32
    material: wp.int32
    base: wp.vec3i
    position_bits: wp.vec3i
    uv_base: wp.vec2i
    uv_bits: wp.vec2i
    normal_bits: wp.int32  # of a vertex; 0 where the mesh has none
    color_bits: wp.int32
    masks: wp.int64  # where each stream begins
    positions: wp.int64
    attributes: wp.int64
    materials: wp.int64


@wp.func
def whole_words(bit_count: wp.int32):
    """Words that so many bits take."""
    return wp.int64((bit_count + 31) >> 5)


@wp.func
def attribute_bit(cluster: Cluster, vertex: wp.int32):
    """Where in the stream of attributes a vertex begins."""
    return vertex * (cluster.normal_bits + cluster.uv_bits[0] + cluster.uv_bits[1] + cluster.color_bits)


@wp.func
def head_of(resident: Resident, mesh: wp.int32, page: wp.int32, index: wp.int32):
    """Where the head of a cluster of a page is."""
    at = resident.page_at[resident.mesh[mesh, MESH_FIRST_PAGE] + page]
    groups = word_at(resident.words, at + wp.int64(PAGE_GROUPS))
    return at + wp.int64(PAGE_WORDS + groups * GROUP_WORDS + index * CLUSTER_WORDS)


@wp.func
def read_cluster(resident: Resident, mesh: wp.int32, page: wp.int32, index: wp.int32, attributes: wp.bool):
    """The cluster; with what lies behind its positions only if that is asked for."""
    words = resident.words
    at = resident.page_at[resident.mesh[mesh, MESH_FIRST_PAGE] + page]
    head = head_of(resident, mesh, page, index)
    cluster = Cluster()
    counts = word_at(words, head + wp.int64(CLUSTER_COUNTS))
    cluster.triangles = (counts & 255) + 1
    cluster.vertices = ((counts >> 8) & 255) + 1
    cluster.reference_bits = (counts >> 16) & 255
    cluster.level = (counts >> 24) & 255
    cluster.number = word_at(words, at + wp.int64(PAGE_FIRST_CLUSTER)) + index
    cluster.material = word_at(words, head + wp.int64(CLUSTER_MATERIAL))
    for axis in range(3):
        cluster.base[axis] = word_at(words, head + wp.int64(CLUSTER_BASE + axis))
        cluster.position_bits[axis] = bit_length(word_at(words, head + wp.int64(CLUSTER_EXTENT + axis)))
    cluster.masks = at + wp.int64(word_at(words, head + wp.int64(CLUSTER_STREAMS)))
    references = (3 * cluster.triangles - cluster.vertices) * cluster.reference_bits
    cluster.positions = cluster.masks + wp.int64(NEW_WORDS) + whole_words(references)
    width = cluster.position_bits[0] + cluster.position_bits[1] + cluster.position_bits[2]
    cluster.attributes = cluster.positions + whole_words(cluster.vertices * width)
    has = wp.where(attributes, resident.mesh[mesh, MESH_ATTRIBUTES], 0)
    if has & HAS_NORMALS != 0:
        cluster.normal_bits = 2 * NORMAL_BITS
    if has & HAS_COLORS != 0:
        cluster.color_bits = 3 * COLOR_BITS
    if has & HAS_UV != 0:
        for axis in range(2):
            cluster.uv_base[axis] = word_at(words, head + wp.int64(CLUSTER_UV_BASE + axis))
            cluster.uv_bits[axis] = bit_length(word_at(words, head + wp.int64(CLUSTER_UV_EXTENT + axis)))
    cluster.materials = cluster.attributes + whole_words(attribute_bit(cluster, cluster.vertices))
    return cluster


@wp.func
def corners_of(resident: Resident, cluster: Cluster, triangle: wp.int32):
    """The vertices of a triangle: those used before come first, new ones last."""
    before = wp.int32(0)
    for word in range(4):
        mask = wp.uint32(0)
        if word < (triangle >> 5):
            mask = ~wp.uint32(0)
        if word == (triangle >> 5):
            mask = (wp.uint32(1) << wp.uint32(triangle & 31)) - wp.uint32(1)
        at = cluster.masks + wp.int64(word)
        low = wp.uint32(word_at(resident.words, at))
        high = wp.uint32(word_at(resident.words, at + wp.int64(4)))
        before += wp.int32(wp.bit_count(low & mask)) + 2 * wp.int32(wp.bit_count(high & mask))
    own = wp.int64(triangle >> 5)
    low_bit = (wp.uint32(word_at(resident.words, cluster.masks + own)) >> wp.uint32(triangle & 31)) & wp.uint32(1)
    high_bit = (
        wp.uint32(word_at(resident.words, cluster.masks + own + wp.int64(4))) >> wp.uint32(triangle & 31)
    ) & wp.uint32(1)
    old = 3 - wp.int32(low_bit) - 2 * wp.int32(high_bit)
    references = cluster.masks + wp.int64(NEW_WORDS)
    width = cluster.reference_bits
    corners = wp.vec3i()
    for corner in range(3):
        if corner < old:
            back = bits(resident.words, references, (3 * triangle - before + corner) * width, width)
            corners[corner] = before - 1 - back
        else:
            corners[corner] = before + corner - old
        corners[corner] = wp.clamp(corners[corner], 0, cluster.vertices - 1)  # whatever a damaged page says
    return corners


@wp.func
def position_of(resident: Resident, cluster: Cluster, vertex: wp.int32, step: wp.float32):
    """In object units from the mesh's origin. A vertex has the same bits in every cluster."""
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
    """Of a mesh that has normals: of length 1, from two numbers on an octahedron."""
    bit = attribute_bit(cluster, vertex)
    x = wp.float32(bits(resident.words, cluster.attributes, bit, NORMAL_BITS) - NORMAL_MIDDLE) / wp.float32(
        NORMAL_MIDDLE
    )
    bit += NORMAL_BITS
    y = wp.float32(bits(resident.words, cluster.attributes, bit, NORMAL_BITS) - NORMAL_MIDDLE) / wp.float32(
        NORMAL_MIDDLE
    )
    z = 1.0 - wp.abs(x) - wp.abs(y)
    if z < 0.0:
        folded = (1.0 - wp.abs(y)) * wp.where(x < 0.0, -1.0, 1.0)
        y = (1.0 - wp.abs(x)) * wp.where(y < 0.0, -1.0, 1.0)
        x = folded
    return wp.normalize(wp.vec3(x, y, z))


@wp.func
def uv_of(resident: Resident, cluster: Cluster, vertex: wp.int32, step: wp.float32):
    """Of a mesh that has texture coordinates."""
    bit = attribute_bit(cluster, vertex) + cluster.normal_bits
    u = bits(resident.words, cluster.attributes, bit, cluster.uv_bits[0])
    v = bits(resident.words, cluster.attributes, bit + cluster.uv_bits[0], cluster.uv_bits[1])
    return wp.vec2(step * wp.float32(cluster.uv_base[0] + u), step * wp.float32(cluster.uv_base[1] + v))


@wp.func
def vertex_color_of(resident: Resident, cluster: Cluster, vertex: wp.int32):
    """Of a mesh that has colours: 0 to 1."""
    bit = attribute_bit(cluster, vertex) + cluster.normal_bits + cluster.uv_bits[0] + cluster.uv_bits[1]
    packed = bits(resident.words, cluster.attributes, bit, 3 * COLOR_BITS)
    most = (1 << COLOR_BITS) - 1
    color = wp.vec3()
    for channel in range(3):
        color[channel] = wp.float32((packed >> (channel * COLOR_BITS)) & most) / wp.float32(most)
    return color


@wp.func
def material_of(resident: Resident, cluster: Cluster, triangle: wp.int32):
    """The material of a triangle: its cluster's, or its own."""
    material = cluster.material
    if material == MIXED:
        material = bits(resident.words, cluster.materials, triangle * MATERIAL_BITS, MATERIAL_BITS)
    return material

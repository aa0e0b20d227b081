"""The layout of a geometry file, in 32-bit words, little endian. docs/scene-format.md explains it.

The builder writes these words, and the kernels read them without conversion: a page has the same bytes on disk and on
the device. Lengths and positions are in object units, and positions are relative to the mesh's origin. Grid coordinates
are integers; their step is a power of two, in object units.
"""

from __future__ import annotations

MAGIC = b"ROOFTOPG"
# readable versions: version 2 added colours, version 3 the lists of pages that a page needs, version 4 short heads and
# fans
VERSIONS = (1, 2, 3, 4)
VERSION = 4  # the version that is written
PAGE_BYTES = 128 << 10  # maximum size of a page

# Fields are as in docs/scene-format.md. HEADER: magic, version, number of sections, length of the file, CRC-32 of the
# section table, zero. SECTION: name, offset, length, CRC-32, zero. PAGE_ENTRY: offset, length and CRC-32 of a page. The
# section "needs" lists the pages that each page needs: pages + 1 uint32 with the start of each list and the end of the
# last list, counted in entries from the first list; then all lists, with a uint32 for each entry.
HEADER, HEADER_BYTES = "<8sIIQII", 32
SECTION, SECTION_BYTES = "<8sQQII", 32
PAGE_ENTRY = [("offset", "<u8"), ("length", "<u4"), ("crc", "<u4")]

# The attributes of a file's pages, as bits: its vertex attributes, and whether its heads are short (version 4).
HAS_NORMALS, HAS_UV, HAS_COLORS, SHORT_HEADS = 1, 2, 4, 8

MAX_TRIANGLES = 128  # maximum number of triangles of a cluster
MAX_VERTICES = 255
NEVER = 3.4028234663852886e38  # the parent error of clusters without a replacement: the largest float32

# ---- a page: its head, the records of its groups, the heads of its clusters, their streams, one word of zeros ------

PAGE_WORDS = 4  # words of a page's head
# PAGE_FIRST_CLUSTER is the number of clusters in earlier pages.
PAGE_CLUSTERS, PAGE_GROUPS, PAGE_FIRST_CLUSTER, PAGE_LENGTH = range(PAGE_WORDS)
# The word PAGE_GROUPS has, from the lowest bit: the number of groups, the number of words of a cluster's head (0 in a
# page before version 4), and whether these heads include fields about replaced groups.
PAGE_GROUP_BITS, PAGE_HEAD_BITS = 16, 8
PAGE_REPLACES = 1 << PAGE_GROUP_BITS + PAGE_HEAD_BITS
MOST_CLUSTERS = (1 << 11) - 1  # maximum number of clusters of a page

GROUP_WORDS = 8
GROUP_SPHERE = 0  # 4 float32: centre and radius of the sphere that decides when the group's clusters are too fine
GROUP_ERROR = 4  # float32: error of the clusters that replace the group's clusters, or NEVER
GROUP_FIRST, GROUP_COUNT = 5, 6  # index in the page of the group's first cluster; how many clusters the group has
GROUP_NUMBER = 7  # index of the group, counted over all pages

# The head of a cluster. Pages store a short form (see HEAD_WORDS), which readers unpack to a row of CLUSTER_COLUMNS.
# The first CLUSTER_WORDS of a row are the head as in pages before version 4.
CLUSTER_WORDS = 21
# 4 float32: the sphere of the group that the cluster replaces; zeros if the page does not store such spheres
CLUSTER_SPHERE = 0
# float32: error of the group that the cluster replaces (docs/scene-format.md), in object units; 0 at the finest level
CLUSTER_ERROR = 4
CLUSTER_BASE = 5  # 3 int32: grid coordinates of the lowest corner of the cluster's box
CLUSTER_EXTENT = 8  # 3 uint32: size of the box; a stored coordinate has as many bits as the size along the same axis
CLUSTER_EDGE = 11  # before version 4, float32: the cluster's longest edge, in object units
CLUSTER_COUNTS = 12  # triangles - 1 (8 bits), vertices - 1 (8), bits of a reference (8), level (8), from the lowest bit
CLUSTER_STREAMS = 13  # the start of the cluster's streams, in words from the page's beginning
CLUSTER_GROUP = 14  # before version 4: index in the page of the cluster's group
CLUSTER_MATERIAL = 15  # the cluster's material; MIXED: each triangle has its own
CLUSTER_SOURCE = 16  # index of the group that the cluster replaces, over all pages; -1 at the finest level
# for u and v: 2 int32 (the lowest values) and 2 uint32 (the ranges above these values)
CLUSTER_UV_BASE, CLUSTER_UV_EXTENT = 17, 19
CLUSTER_REFERENCES = 21  # number of values in the cluster's stream of references
CLUSTER_MASKS = 22  # how corners are stored: SEPARATE before version 4, FANS or FANS_AND_EXPLICIT from then on
# for normals, 2 words each: the lowest values (BASE), and the ranges above these values (EXTENT)
CLUSTER_NORMAL_BASE, CLUSTER_NORMAL_EXTENT = 23, 25
CLUSTER_COLUMNS = 27
MIXED = -1
SEPARATE, FANS, FANS_AND_EXPLICIT = 0, 1, 2

# A short head. The first HEAD_WORDS words of a short head are always present. In pages with PAGE_REPLACES,
# REPLACED_WORDS words follow. Then NORMAL_WORDS words follow if the mesh has normals, and UV_WORDS words if it has uv.
HEAD_WORDS, REPLACED_WORDS, NORMAL_WORDS, UV_WORDS = 6, 6, 1, 3
HEAD_BASE = 0  # same as CLUSTER_BASE
HEAD_COUNTS = 3  # triangles - 1 (7 bits), vertices - 1 (8), level (8), references (9)
HEAD_BOX = 4  # for each axis, BOX_BITS: bit length of the extent (5), and the MANTISSA_BITS after its leading bit
BOX_BITS, MANTISSA_BITS = 9, 4  # 4 bits of mantissa: a box is at most 1/16 wider than its cluster
# further bits of HEAD_BOX: bits of a reference - 1 (3), whether the stream "new" has a third mask (1)
HEAD_REFERENCE_AT, HEAD_EXPLICIT_AT = 27, 30
HEAD_STREAMS = 5  # same as CLUSTER_STREAMS (15 bits), whether the cluster is MIXED (1), the cluster's material (16)
HEAD_SPHERE, HEAD_ERROR, HEAD_SOURCE = 6, 10, 11  # same as CLUSTER_SPHERE, ...; only in pages with PAGE_REPLACES
# Normals take one word: the lowest value of each of the two numbers (NORMAL_BITS each), and the bit widths of the
# offsets from these values (4 each). Texture coordinates take three words: the lowest u and v, and the bit widths of
# the offsets from these values (5 each).
NORMAL_WIDTH_BITS, UV_WIDTH_BITS = 4, 5

# ---- the streams of a cluster, each beginning at a word --------------------------------------------------------------
#
# new         two masks of 128 bits: bit t of the masks is the low and the high bit of the number of new vertices of
#             triangle t; with FANS_AND_EXPLICIT a third mask
# references  for corners that are not new: the distance back from the newest vertex so far
# positions   for each vertex, x, y, z above the base
# attributes  for each vertex, the normal's two numbers, u, v, and red, green and blue (COLOR_BITS each);
#             attributes that the mesh lacks take no bits
# materials   16 bits for each triangle, if MIXED
#
# How a triangle gets its corners: n is the number of vertices before the triangle; each r is the next reference of the
# stream.
#
#   new   SEPARATE                            FANS
#   0     n - 1 - r, n - 1 - r, n - 1 - r     n - 1, the last old corner of the triangle before, n - 2 - r
#   1     n - 1 - r, n - 1 - r, n             as SEPARATE
#   2     n - 1 - r, n, n + 1                 as SEPARATE
#   3     n, n + 1, n + 2                     as SEPARATE; but if the triangle's bit in the third mask is set, no corner
#                                             is new: n - 1 - r, n - 2 - r, n - 2 - r
NEW_WORDS = 8
EXPLICIT_WORDS = 4  # the third mask
MOST_REFERENCE_BITS = 8  # a cluster has at most 255 vertices
NORMAL_BITS = 10
NORMAL_MIDDLE = 511  # the code of 0; code q represents (q - 511) / 511, so the axes are exact
COLOR_BITS = 8
MATERIAL_BITS = 16

# ---- a node of the tree over the groups: eight children --------------------------------------------------------------

NODE_CHILDREN = 8
MAX_DEPTH = 48  # maximum number of nodes on the path from the root to a group
CHILD_WORDS = 16
CHILD_CENTER, CHILD_HALF = 0, 3  # float32: the box around all clusters below this child
# float32: sphere around the spheres of all groups below this child, and the largest error of these groups
CHILD_SPHERE, CHILD_ERROR = 6, 10
CHILD_KIND = 11  # INNER for a node; for a group, its number of clusters; 0 for no child
CHILD_AT = 12  # index of the child node, or of the group's page
CHILD_FIRST = 13  # index of the group's first cluster in the page
CHILD_GROUP = 14  # the group's number
INNER = -1

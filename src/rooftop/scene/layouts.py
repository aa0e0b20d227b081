"""Where everything stands in a geometry file: counted in 32-bit words, little endian. docs/scene-format.md explains it.

The builder writes these words, and the kernels read them as they are: a page is the same bytes on disk and on the
device. Lengths are in object units, relative to the mesh's origin; grid coordinates are integers, a power of two of
object units apart.
"""

from __future__ import annotations

MAGIC = b"ROOFTOPG"
VERSIONS = (1, 2, 3)  # that are read: 2 has colours, 3 says which pages a page needs
VERSION = 3  # that is written
PAGE_BYTES = 128 << 10  # at most

# As docs/scene-format.md lists them: magic, version, sections, length of the file, CRC-32 of the table, zero;
# name, offset, length, CRC-32, zero; offset, length, CRC-32 of a page. The section "needs" has pages + 1 uint32, where
# the list of each page begins and the last one ends, and behind them all lists: the pages that a page needs.
HEADER, HEADER_BYTES = "<8sIIQII", 32
SECTION, SECTION_BYTES = "<8sQQII", 32
PAGE_ENTRY = [("offset", "<u8"), ("length", "<u4"), ("crc", "<u4")]

MAX_TRIANGLES = 128  # of a cluster
MAX_VERTICES = 255
NEVER = 3.4028234663852886e38  # the parent error of what nothing replaces: the largest float32

# ---- a page: its head, the records of its groups, the heads of its clusters, their streams, one word of zeros ------

PAGE_WORDS = 4  # of the head
PAGE_CLUSTERS, PAGE_GROUPS, PAGE_FIRST_CLUSTER, PAGE_LENGTH = range(PAGE_WORDS)  # the third counts over all pages

GROUP_WORDS = 8
GROUP_SPHERE = 0  # 4 float32: centre and radius of what decides when the group's clusters are too fine
GROUP_ERROR = 4  # float32: of the clusters that replace them, or NEVER
GROUP_FIRST, GROUP_COUNT = 5, 6  # its clusters, within the page
GROUP_NUMBER = 7  # over all pages

CLUSTER_WORDS = 21
CLUSTER_SPHERE = 0  # 4 float32: the sphere of the group that it replaces; of the finest level its own
CLUSTER_ERROR = 4  # float32: how far it is from the surface, or how wide parts in it are; 0 at the finest level
CLUSTER_BASE = 5  # 3 int32: grid coordinates of the lowest corner
CLUSTER_EXTENT = 8  # 3 uint32: those of the highest, less the lowest; as many bits has a position along that axis
CLUSTER_EDGE = 11  # float32: the longest edge
CLUSTER_COUNTS = 12  # triangles - 1 (8 bits), vertices - 1 (8), bits of a reference (8), level (8), from the lowest bit
CLUSTER_STREAMS = 13  # where its streams begin, in words from the page's beginning
CLUSTER_GROUP = 14  # its group, within the page
CLUSTER_MATERIAL = 15  # or MIXED: then each triangle has its own
CLUSTER_SOURCE = 16  # the number of the group that it replaces, over all pages; -1 at the finest level
CLUSTER_UV_BASE, CLUSTER_UV_EXTENT = 17, 19  # 2 int32 and 2 uint32, as for positions
MIXED = -1

# ---- the streams of a cluster, each beginning at a word --------------------------------------------------------------
#
# new         two masks of 128 bits: the low and the high bit of how many vertices triangle t is the first to use
# references  for each other corner: how far before the newest vertex so far
# positions   for each vertex, x, y, z above the base
# attributes  for each vertex, the normal (two numbers of NORMAL_BITS), u, v, and red, green and blue (COLOR_BITS each);
#             what the mesh does not have takes no bits
# materials   16 bits for each triangle, if MIXED
NEW_WORDS = 8
NORMAL_BITS = 10
NORMAL_MIDDLE = 511  # which means 0, so that the axes are exact: a number q is (q - 511) / 511
COLOR_BITS = 8
MATERIAL_BITS = 16

# ---- a node of the tree over the groups: eight children --------------------------------------------------------------

NODE_CHILDREN = 8
MAX_DEPTH = 48  # nodes from the root to a group
CHILD_WORDS = 16
CHILD_CENTER, CHILD_HALF = 0, 3  # float32: the box around all that is drawn below
CHILD_SPHERE, CHILD_ERROR = 6, 10  # float32: at least as large as those of all groups below
CHILD_KIND = 11  # how many clusters the group has; INNER: another node; 0: there is no child
CHILD_AT = 12  # the node, or the page
CHILD_FIRST = 13  # of the clusters, within the page
CHILD_GROUP = 14  # the group's number
INNER = -1

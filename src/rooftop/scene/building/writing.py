"""Write clusters and groups into pages, and pages into a file, as docs/scene-format.md specifies."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rooftop.errors import InputError
from rooftop.scene import layouts
from rooftop.scene.building.levels import Hierarchy
from rooftop.scene.building.orders import morton_codes
from rooftop.scene.building.ragged import starts_of, taken
from rooftop.scene.building.trees import set_box, tree
from rooftop.scene.building.workers import ALONE, Team, chunks, write_all
from rooftop.scene.dependencies import PageNeeds
from rooftop.scene.heads import head_words, packed
from rooftop.user_paths import user_path
from rooftop.whole_files import whole_file

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

ALIGNMENT = 16
PAGES_AT_ONCE = 8  # pages per item of a worker: a megabyte


def write(
    file: BinaryIO,
    hierarchy: Hierarchy,
    step: float,
    meta: dict[str, Any],
    more: Sequence[tuple[bytes, bytes]] = (),
    team: Team | None = None,
) -> dict[str, Any]:
    """Write a geometry file; return `meta`, completed with values that only the writer knows.

    Args:
        file: the output file, written from its beginning. Workers also open this file, by its name.
        hierarchy: the clusters and groups to write. Two things change in-place: a cluster's source (the group that it
            replaces) becomes the group's number in the file, and `streams` is emptied.
        step: step of the grid, in object units.
        meta: the file's metadata.
        more: additional sections.
        team: workers that know `write_pages`; by default the calling process writes all pages.
    """
    has = (meta["has_normals"], meta["has_uv"])
    order, group_counts, pages = _page_plan(hierarchy, *has)
    sources = hierarchy.heads.view(np.int32)[:, layouts.CLUSTER_SOURCE]
    replaces = sources >= 0
    sources[replaces] = order.ranks[sources[replaces]]
    page_of_group = np.repeat(np.arange(len(pages)), [b - a for a, b in pages])

    first_page = layouts.HEADER_BYTES + (5 + len(more)) * layouts.SECTION_BYTES
    table = _write_pages(file, hierarchy, order, group_counts, pages, has, first_page, team or ALONE.team([]))
    pages_end = file.seek(0, os.SEEK_END)

    needs = PageNeeds.between(
        len(pages), page_of_group[sources[replaces]], page_of_group[order.ranks[hierarchy.groups[replaces]]]
    )
    nodes, depth = _nodes(hierarchy, order, group_counts, page_of_group, pages, step)
    meta |= {"depth": depth, "pages": len(pages), "nodes": len(nodes)}
    sections = [(b"pages", first_page, pages_end - first_page, 0)]
    for name, data in (
        (b"nodes", nodes.astype("<u4").tobytes()),
        (b"pagetab", table.tobytes()),
        (b"needs", np.concatenate([needs.starts, needs.pages]).astype("<u4").tobytes()),
        (b"meta", json.dumps(meta).encode()),
        *more,
    ):
        sections.append((name, file.tell(), len(data), zlib.crc32(data)))
        file.write(data + bytes(-len(data) % ALIGNMENT))
    length = file.tell()
    listed = b"".join(struct.pack(layouts.SECTION, *section, 0) for section in sections)
    file.seek(0)
    header = (layouts.MAGIC, layouts.VERSION, len(sections), length, zlib.crc32(listed), 0)
    file.write(struct.pack(layouts.HEADER, *header) + listed)
    return meta | {"bytes": length}


class _Order:
    """The order of groups and clusters in the file: groups from the coarsest level to the finest, along Morton's curve
    within a level; clusters group by group.

    Attributes:
        levels: (G,) the coarsest level among each group's clusters.
        groups: (G,) the groups in this order.
        ranks: (G,) the index of each group in `groups`.
        clusters: (C,) the clusters in this order.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        count = len(hierarchy.errors)
        self.levels = np.zeros(count, np.int64)
        np.maximum.at(self.levels, hierarchy.groups, hierarchy.levels)
        codes = morton_codes(hierarchy.spheres[:, :3])
        self.groups = np.lexsort([codes, -self.levels])
        self.ranks = np.empty(count, np.int64)
        self.ranks[self.groups] = np.arange(count)
        self.clusters = np.argsort(self.ranks[hierarchy.groups], kind="stable")


def _page_plan(hierarchy: Hierarchy, normals: bool, uv: bool) -> tuple[_Order, Ints, list[tuple[int, int]]]:
    """Assign groups to pages: return the order of groups, the number of clusters of each group in that order, and the
    groups (first, end) of each page."""
    order = _Order(hierarchy)
    counts = np.bincount(hierarchy.groups, minlength=len(order.groups))[order.groups]
    starts = starts_of(counts)[:-1]
    words = np.add.reduceat(hierarchy.lengths[order.clusters], starts) + layouts.GROUP_WORDS
    replaces = np.logical_or.reduceat(_replaces(hierarchy.heads)[order.clusters], starts)
    empty = layouts.PAGE_WORDS + 1  # including the word of zeros at the end
    pages, first, held, clusters, any_replaces = [], 0, empty, 0, False
    for group, (size, count, its) in enumerate(zip(words.tolist(), counts.tolist(), replaces.tolist(), strict=True)):
        whole = held + size + (clusters + count) * head_words(any_replaces or its, normals, uv)
        if group > first and (4 * whole > layouts.PAGE_BYTES or clusters + count > layouts.MOST_CLUSTERS):
            pages.append((first, group))
            first, held, clusters, any_replaces = group, empty, 0, False
        held, clusters, any_replaces = held + size, clusters + count, any_replaces or its
    pages.append((first, len(words)))
    return order, counts, pages


def _replaces(heads: Words) -> npt.NDArray[np.bool_]:
    """Whether each cluster replaces a group of finer clusters, (C,)."""
    return heads.view(np.int32)[:, layouts.CLUSTER_SOURCE] >= 0


@dataclass(frozen=True)
class _Pages:
    """The plan of all pages.

    Attributes:
        path: path of the output file.
        hierarchy: clusters and groups.
        streams: words of the streams of all clusters, in order of the clusters' creation.
        stream_starts: (C + 1,) index in `streams` of each cluster's first word, then the number of words.
        order: order of groups and clusters.
        counts: number of clusters of each group, in the order of `order.groups`.
        group_starts: (G + 1,) index in `order.clusters` of each group's first cluster, then the number of clusters.
        pages: the groups (first, end) of each page, as indices of `order.groups`.
        places: the byte of the file at which each page begins, then the end of the last page with its padding.
        words: number of 32-bit words of each page.
        has: whether the mesh has normals, and whether it has uv.
    """

    path: str
    hierarchy: Hierarchy
    streams: Words
    stream_starts: Ints
    order: _Order
    counts: Ints
    group_starts: Ints
    pages: list[tuple[int, int]]
    places: Ints
    words: Ints
    has: tuple[bool, bool]


def _write_pages(
    file: BinaryIO,
    hierarchy: Hierarchy,
    order: _Order,
    counts: Ints,
    pages: list[tuple[int, int]],
    has: tuple[bool, bool],
    at: int,
    team: Team,
) -> npt.NDArray[np.void]:
    """Write all pages to the file, starting at byte `at`. Return the table of pages, with a row of layouts.PAGE_ENTRY
    (offset, length, checksum) for each. `has` is as in `_page`.
    """
    streams = np.concatenate(hierarchy.streams)
    hierarchy.streams.clear()
    group_starts = starts_of(counts)
    page_groups = starts_of([b - a for a, b in pages])
    cluster_starts = group_starts[page_groups]
    heads = np.array([head_words(bool(each), *has) for each in (False, True)])
    replaces = np.logical_or.reduceat(_replaces(hierarchy.heads)[order.clusters], cluster_starts[:-1])
    words = np.add.reduceat(hierarchy.lengths[order.clusters], cluster_starts[:-1]) + layouts.PAGE_WORDS + 1
    words += layouts.GROUP_WORDS * np.diff(page_groups) + heads[replaces.astype(np.int64)] * np.diff(cluster_starts)
    places = at + starts_of(-(-4 * words // ALIGNMENT) * ALIGNMENT)
    plan = _Pages(
        file.name, hierarchy, streams, starts_of(hierarchy.lengths), order, counts, group_starts, pages, places, words,
        has,
    )  # fmt: skip
    found = team.run(write_pages, chunks(len(pages), PAGES_AT_ONCE), plan, "writing pages")
    table = np.zeros(len(pages), layouts.PAGE_ENTRY)
    table["offset"], table["length"], table["crc"] = places[:-1], 4 * words, np.concatenate(found)
    return table


def write_pages(plan: _Pages, run: slice) -> list[int]:
    """Write consecutive pages, in a worker; return their checksums."""
    made, sums = bytearray(), []
    for page in range(run.start, run.stop):
        a, b = plan.pages[page]
        first, end = int(plan.group_starts[a]), int(plan.group_starts[b])
        clusters = plan.order.clusters[first:end]
        of_page = _page(plan.hierarchy, plan.order.groups[a:b], plan.counts[a:b], a, clusters, first, plan.has)
        lengths = plan.hierarchy.lengths[clusters]
        of_page[-1 - int(lengths.sum()) : -1] = plan.streams[taken(plan.stream_starts[clusters], lengths)]
        data = of_page.astype("<u4").tobytes()
        assert len(data) == 4 * plan.words[page]
        sums.append(zlib.crc32(data))
        made += data + bytes(-len(data) % ALIGNMENT)
    with open(plan.path, "r+b", buffering=0) as file:
        write_all(file.fileno(), made, int(plan.places[run.start]))
    return sums


def _page(
    hierarchy: Hierarchy, groups: Ints, counts: Ints, first_group: int, clusters: Ints, first_cluster: int,
    has: tuple[bool, bool],
) -> Words:  # fmt: skip
    """Build a page as 32-bit words. The words of the clusters' streams stay 0. `has` says whether the mesh has normals,
    and whether it has uv."""
    lengths = hierarchy.lengths[clusters]
    rows = hierarchy.heads[clusters]
    replaces = bool(_replaces(rows).any())
    a_head = head_words(replaces, *has)
    before = layouts.PAGE_WORDS + layouts.GROUP_WORDS * len(groups) + a_head * len(clusters)
    words = np.zeros(before + int(lengths.sum()) + 1, np.uint32)
    group_word = len(groups) | a_head << layouts.PAGE_GROUP_BITS | layouts.PAGE_REPLACES * replaces
    words[: layouts.PAGE_WORDS] = len(clusters), group_word, first_cluster, len(words)
    heads_at = layouts.PAGE_WORDS + layouts.GROUP_WORDS * len(groups)
    records = words[layouts.PAGE_WORDS : heads_at].reshape(-1, layouts.GROUP_WORDS)
    reals = records.view(np.float32)
    reals[:, layouts.GROUP_SPHERE : layouts.GROUP_SPHERE + 4] = hierarchy.spheres[groups]
    reals[:, layouts.GROUP_ERROR] = hierarchy.errors[groups]
    records[:, layouts.GROUP_FIRST] = starts_of(counts)[:-1]
    records[:, layouts.GROUP_COUNT] = counts
    records[:, layouts.GROUP_NUMBER] = np.arange(len(groups)) + first_group
    rows[:, layouts.CLUSTER_STREAMS] = starts_of(lengths)[:-1] + before
    words[heads_at:before] = packed(rows, replaces, *has).ravel()
    return words


def _nodes(
    hierarchy: Hierarchy, order: _Order, counts: Ints, page_of_group: Ints, pages: list[tuple[int, int]], step: float
) -> tuple[Words, int]:
    """Build the tree over the groups of clusters: return its nodes, and the number of nodes on the longest path from
    the root."""
    starts = starts_of(counts)[:-1]
    heads = hierarchy.heads[order.clusters]
    base = heads.view(np.int32)[:, layouts.CLUSTER_BASE : layouts.CLUSTER_BASE + 3].astype(np.float64)
    extent = heads[:, layouts.CLUSTER_EXTENT : layouts.CLUSTER_EXTENT + 3]
    leaves = np.zeros((len(counts), layouts.CHILD_WORDS), np.uint32)
    set_box(leaves, np.minimum.reduceat(base, starts) * step, np.maximum.reduceat(base + extent, starts) * step)
    reals = leaves.view(np.float32)
    reals[:, layouts.CHILD_SPHERE : layouts.CHILD_SPHERE + 4] = hierarchy.spheres[order.groups]
    reals[:, layouts.CHILD_ERROR] = hierarchy.errors[order.groups]
    leaves[:, layouts.CHILD_KIND] = counts
    leaves[:, layouts.CHILD_AT] = page_of_group
    leaves[:, layouts.CHILD_FIRST] = starts - starts[np.array([first for first, _ in pages])[page_of_group]]
    leaves[:, layouts.CHILD_GROUP] = np.arange(len(counts))
    return tree(leaves, order.levels[order.groups])


def checked_target(path: str | Path) -> Path:
    """Check, before the work begins, that a geometry file can be written. A link is followed.

    Raises:
        FileNotFoundError: the folder for the file does not exist.
        InputError: the path is a folder, a device or a pipe, or the folder is not writable.
    """
    target = user_path(path)
    target = target.resolve() if target.is_symlink() else target
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into: create it")
    if target.is_dir():
        raise InputError(f"{target} is a folder: expected the name of a file, such as {target / 'mesh.rtg'}")
    if target.exists() and not target.is_file():
        raise InputError(f"{target} is a device or a pipe: expected the name of a file, because readers map the file")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{target} cannot be written, because its folder is not writable: give another folder")
    return target


@contextmanager
def renamed_when_done(path: Path) -> Iterator[BinaryIO]:
    """Create a file that gets its name only when it is complete and on disk. After an exception, no file is left."""
    with whole_file(path) as temporary, temporary.open("w+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())

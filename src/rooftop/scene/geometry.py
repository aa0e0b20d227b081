"""Open geometry files. Opening a file reads and checks everything except the pages. Each page is read and checked on
request.

`Geometry.decode` decodes clusters in plain NumPy and float64. A renderer's kernels must decode the same words to the
same values, up to the rounding of float32.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import struct
import sys
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.errors import GeometryFileError, InputError
from rooftop.scene import layouts
from rooftop.scene.dependencies import PageNeeds
from rooftop.scene.materials import IMAGES, TABLE, Material
from rooftop.scene.pages import groups_of, heads_of, wrong_in_page
from rooftop.user_paths import user_path

Words = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

LEVEL = ("clusters", "triangles", "error")  # keys of the metadata of a level of detail
_NEEDED: dict[str, type | tuple[type, ...]] = {
    "origin": list,
    "bounds": list,
    "levels": list,
    "grid_exponent": int,
    "uv_exponent": int,
    "has_normals": bool,
    "has_uv": bool,
    "has_colors": bool,
    "depth": int,
    "clusters": int,
    "groups": int,
    "triangles": int,
}


@dataclass(frozen=True)
class DecodedCluster:
    """The decoded contents of a cluster.

    Attributes:
        grid: (V, 3) int64, positions in steps of the grid.
        positions: (V, 3) float64, in object units, relative to the object's own origin.
        triangles: (T, 3) int64, the three vertices of each triangle, as rows of `positions`.
        normals: (V, 3) float64 of length 1, or None.
        uv: (V, 2) float64, or None.
        colors: (V, 3) float64 from 0 to 1, or None.
        materials: (T,) int64.
    """

    grid: npt.NDArray[np.int64]
    positions: Floats
    triangles: npt.NDArray[np.int64]
    normals: Floats | None
    uv: Floats | None
    colors: Floats | None
    materials: npt.NDArray[np.int64]


class Geometry:
    """A geometry file, memory-mapped. To replace the file, rename another file over it. If the file is truncated
    in-place, the system kills every process that reads the removed part.

    Attributes:
        path: path of the file.
        meta: the file's metadata (docs/scene-format.md).
        materials: each material by its number; None if the file has no materials.
        nodes: (N, NODE_CHILDREN, CHILD_WORDS) int32, the tree.
        nodes_offset: start of the tree in the file, in bytes.
        tree_depth: number of levels of the tree, counted when the file is opened, because `meta` may be wrong.
        pages: number of pages.
        page_offsets, page_lengths: (pages,) int64, where each page starts in the file, and its length, both in bytes.
        page_reach: number of clusters of each page, according to the tree.
        checksums: (pages,) uint32, CRC-32 of each page.
        version: version of the file's format.
        size_bytes: size of the file.
        image_bytes: bytes of the textures in the file.
        identity: device, inode, size and modification time of the file when it was opened.
    """

    def __init__(self, path: Path, data: mmap.mmap, identity: tuple[int, ...]) -> None:
        self.path = path
        self.size_bytes = len(data)
        self.identity = identity
        self._data = data
        self.version, sections = _sections(path, data)
        self.meta: dict[str, Any] = _meta(path, data, *sections["meta"])
        table = np.frombuffer(data, layouts.PAGE_ENTRY, sections["pagetab"][1] // 16, sections["pagetab"][0])
        self.page_offsets = table["offset"].astype(np.int64)
        self.page_lengths = table["length"].astype(np.int64)
        self.checksums = table["crc"].copy()
        self.pages = len(table)
        self._check_table(*sections["pages"], sections["pagetab"][0])
        start, length = sections["nodes"]
        shape = (-1, layouts.NODE_CHILDREN, layouts.CHILD_WORDS)
        self.nodes_offset = start
        self.nodes: Words = np.frombuffer(data, "<i4", length // 4, start).reshape(shape)
        self._check_nodes(start)
        self.materials: tuple[Material, ...] | None = None
        self.image_bytes = sections[IMAGES][1] if IMAGES in sections else 0
        if TABLE in sections:
            from rooftop.scene.material_sections import read_materials  # imports Pillow

            self.materials = read_materials(path, data, sections, self.meta.get("materials", 0))
        self._stored_needs = self._read_needs(*sections["needs"]) if "needs" in sections else None

    @classmethod
    def open(cls, path: str | Path) -> Geometry:
        """Open a file.

        Raises:
            FileNotFoundError: the file does not exist.
            GeometryFileError: the file is damaged, or is not a geometry file.
        """
        path = user_path(path)
        with path.open("rb") as file:
            if path.stat().st_size < layouts.HEADER_BYTES:
                raise GeometryFileError(path, "it is shorter than the header of a geometry file", path.stat().st_size)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return cls(path, data, identity_of(file.fileno()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the path and a checksum of all pages. Unpickling opens the file again, on this machine or
        another.

        Raises (during unpickling):
            FileNotFoundError, GeometryFileError: as in `open`.
            InputError: the file's pages have changed since the object was pickled.
        """
        return _opened_again, (self.path.absolute(), self._content)

    @property
    def _content(self) -> int:
        """A checksum over the checksums of all pages, equal for files with the same pages."""
        return zlib.crc32(self.checksums.tobytes())

    def __deepcopy__(self, memo: dict[int, Any]) -> Geometry:
        """Return this object itself, since it never changes."""
        return self

    def page(self, page: int) -> Words:
        """The words (N,) int32 of a page, memory-mapped.

        Raises:
            IndexError: there is no such page.
            GeometryFileError: the page's checksum or structure is wrong.
        """
        if not 0 <= page < self.pages:
            raise IndexError(f"page {page} does not exist: {self.path} has {self.pages} (0 to {self.pages - 1})")
        start, length = int(self.page_offsets[page]), int(self.page_lengths[page])
        words: Words = np.frombuffer(self._data, "<i4", length // 4, start)
        self.check_page(page, words)
        return words

    def check_page(self, page: int, words: Words) -> None:
        """Check the words of a page that the caller has read from the file.

        Raises:
            GeometryFileError: the checksum or the structure is wrong. The message names the page and its offset.
        """
        self.check_sum(page, words)
        start = int(self.page_offsets[page])
        wrong = wrong_in_page(words, self.attributes, self.meta["groups"])
        if not wrong and words[layouts.PAGE_CLUSTERS] < self.page_reach[page]:
            wrong = "the tree names clusters that do not exist"
        if wrong:
            raise GeometryFileError(self.path, f"page {page}: {wrong}", start)

    def check_sum(self, page: int, words: Words) -> None:
        """Check only the checksum of a page, not its structure.

        Raises:
            GeometryFileError: the checksum is wrong.
        """
        if zlib.crc32(words.data) != self.checksums[page]:
            at = int(self.page_offsets[page])
            raise GeometryFileError(self.path, f"the checksum of page {page} does not match", at)

    @cached_property
    def needs(self) -> PageNeeds:
        """The pages that each page needs directly. Files before version 3 do not store this table, so all pages are
        read once to compute it."""
        if self._stored_needs is not None:
            return self._stored_needs
        fine, coarse = [], []
        for page in range(self.pages):
            sources = self._heads(page)[:, layouts.CLUSTER_SOURCE]
            replaced = self.group_pages[sources[sources >= 0]]
            fine.append(replaced)
            coarse.append(np.full(len(replaced), page))
        needs = PageNeeds.between(self.pages, np.concatenate(fine), np.concatenate(coarse))
        wrong = needs.wrong_at()
        if wrong is not None:
            at = int(self.page_offsets[wrong])
            raise GeometryFileError(self.path, f"page {wrong} needs a later page: expected an earlier one", at)
        return needs

    @cached_property
    def group_pages(self) -> npt.NDArray[np.int64]:
        """The page of each group, (groups,), according to the tree."""
        leaf = self.nodes[:, :, layouts.CHILD_KIND] > 0
        found = np.full(self.meta["groups"], -1)
        found[self.nodes[:, :, layouts.CHILD_GROUP][leaf]] = self.nodes[:, :, layouts.CHILD_AT][leaf]
        if (found < 0).any():
            what = f"the tree does not name group {int(np.argmax(found < 0))}"
            raise GeometryFileError(self.path, what, self.nodes_offset)
        return found

    @cached_property
    def root_pages(self) -> npt.NDArray[np.int64]:
        """The pages that every complete picture needs, in ascending order: the pages of clusters without a replacement,
        and all pages that those pages need."""
        children = self.nodes.reshape(-1, layouts.CHILD_WORDS)
        never = children[:, layouts.CHILD_ERROR].view(np.float32) == np.float32(layouts.NEVER)
        last = children[never & (children[:, layouts.CHILD_KIND] > 0), layouts.CHILD_AT]
        found, new = set(last.tolist()), sorted(set(last.tolist()))
        while new:
            new = sorted(set(np.concatenate([self.needs.of(page) for page in new]).tolist()) - found)
            found.update(new)
        return np.array(sorted(found), np.int64)

    def groups(self) -> npt.NDArray[np.uint32]:
        """The records (G, GROUP_WORDS) of all groups, in order."""
        return np.concatenate([groups_of(self.page(page)).view(np.uint32) for page in range(self.pages)])

    def clusters(self) -> npt.NDArray[np.uint32]:
        """The heads (records) of all clusters, in order, unpacked to the columns of `layouts.py`: (C,
        CLUSTER_COLUMNS)."""
        return np.concatenate([self._heads(page).view(np.uint32) for page in range(self.pages)])

    def place(self, cluster: int) -> tuple[int, int]:
        """The page of a cluster, and the cluster's index in the page."""
        if not 0 <= cluster < self.meta["clusters"]:
            raise IndexError(f"cluster {cluster} does not exist: {self.path} has {self.meta['clusters']} clusters")
        first = self.first_clusters()
        page = int(np.searchsorted(first, cluster, side="right")) - 1
        return page, cluster - int(first[page])

    def first_clusters(self) -> npt.NDArray[np.int64]:
        """For each page, the number of clusters in all earlier pages, (pages,)."""
        return np.array([self._first_cluster(page) for page in range(self.pages)], dtype=np.int64)

    def decode(self, cluster: int) -> DecodedCluster:
        """Decode the triangles and vertices of a cluster, given its number over all pages."""
        page, index = self.place(cluster)
        words = self.page(page)
        head = heads_of(words, self.attributes)[index]
        counts = int(head[layouts.CLUSTER_COUNTS])
        triangles, vertices, reference_bits = (counts & 255) + 1, (counts >> 8 & 255) + 1, counts >> 16 & 255
        at = int(head[layouts.CLUSTER_STREAMS])
        bits = np.unpackbits(words[at:].view(np.uint8), bitorder="little")

        kind = int(head[layouts.CLUSTER_MASKS])
        masks = 3 if kind == layouts.FANS_AND_EXPLICIT else 2
        start = 128 * masks
        new, explicit = bits[:256].reshape(2, -1)[:, :triangles].astype(np.int64), np.zeros(triangles, np.int64)
        new = new[0] + 2 * new[1]
        if masks == 3:
            explicit = bits[256:384][:triangles].astype(np.int64)
        references, start = _values(bits, start, int(head[layouts.CLUSTER_REFERENCES]), [reference_bits])
        corners = _corners(new - 3 * explicit, explicit > 0, references[:, 0].tolist(), kind == layouts.SEPARATE)

        extent = head[layouts.CLUSTER_EXTENT : layouts.CLUSTER_EXTENT + 3].view(np.uint32).tolist()
        above, start = _values(bits, start, vertices, [each.bit_length() for each in extent])
        grid = above + head[layouts.CLUSTER_BASE : layouts.CLUSTER_BASE + 3]
        widths: list[int] = []
        if self.meta["has_normals"]:
            extent = head[layouts.CLUSTER_NORMAL_EXTENT : layouts.CLUSTER_NORMAL_EXTENT + 2].tolist()
            widths += [each.bit_length() for each in extent]
        if self.meta["has_uv"]:
            uv_extent = head[layouts.CLUSTER_UV_EXTENT : layouts.CLUSTER_UV_EXTENT + 2].view(np.uint32).tolist()
            widths += [each.bit_length() for each in uv_extent]
        uv_at = len(widths) - 2
        widths += [layouts.COLOR_BITS] * 3 if self.meta["has_colors"] else []
        attributes, start = _values(bits, start, vertices, widths)
        normals, uv = None, None
        if self.meta["has_normals"]:
            base = head[layouts.CLUSTER_NORMAL_BASE : layouts.CLUSTER_NORMAL_BASE + 2]
            normals = _normals(attributes[:, :2] + base)
        if self.meta["has_uv"]:
            steps = attributes[:, uv_at : uv_at + 2] + head[layouts.CLUSTER_UV_BASE : layouts.CLUSTER_UV_BASE + 2]
            uv = steps * math.ldexp(1.0, self.meta["uv_exponent"])
        material = int(head[layouts.CLUSTER_MATERIAL])
        materials = np.full(triangles, material, np.int64)
        if material == layouts.MIXED:
            materials = _values(bits, start, triangles, [layouts.MATERIAL_BITS])[0][:, 0]
        return DecodedCluster(
            grid=grid,
            positions=grid * math.ldexp(1.0, self.meta["grid_exponent"]) + np.array(self.meta["origin"]),
            triangles=corners,
            normals=normals,
            uv=uv,
            colors=attributes[:, -3:] / 255 if self.meta["has_colors"] else None,
            materials=materials,
        )

    @cached_property
    def attributes(self) -> int:
        """The attributes of the file's pages, as bits: `HAS_NORMALS` and others of `layouts.py`."""
        has = {
            "has_normals": layouts.HAS_NORMALS,
            "has_uv": layouts.HAS_UV,
            "has_colors": layouts.HAS_COLORS,
        }
        short = layouts.SHORT_HEADS if self.version >= 4 else 0
        return short | sum(bit for name, bit in has.items() if self.meta[name])

    def _heads(self, page: int) -> Words:
        return heads_of(self.page(page), self.attributes)

    def _first_cluster(self, page: int) -> int:
        at = int(self.page_offsets[page]) + 4 * layouts.PAGE_FIRST_CLUSTER
        return int(struct.unpack_from("<i", self._data, at)[0])

    def _check_table(self, start: int, length: int, table: int) -> None:
        """Check the offsets and lengths in the page table: pages are aligned, have a possible length, and follow one
        another in the section without overlap."""
        ends = np.append(start, self.page_offsets + self.page_lengths)
        least = 4 * (layouts.PAGE_WORDS + layouts.GROUP_WORDS + layouts.HEAD_WORDS + layouts.NEW_WORDS + 1)
        fits = (self.page_offsets % 16 == 0) & (self.page_offsets >= ends[:-1]) & (ends[1:] <= start + length)
        fits &= (self.page_lengths % 4 == 0) & (self.page_lengths >= least)
        fits &= self.page_lengths <= layouts.PAGE_BYTES
        if not self.pages or not fits.all():
            wrong = int(np.argmin(fits)) if self.pages else 0
            raise GeometryFileError(
                self.path, f"the page table has impossible values for page {wrong}", table + 16 * wrong
            )

    def _read_needs(self, start: int, length: int) -> PageNeeds:
        numbers = np.frombuffer(self._data, "<u4", length // 4, start).astype(np.int64)
        if len(numbers) <= self.pages or length % 4:
            raise GeometryFileError(self.path, "section 'needs' has a wrong length", start)
        needs = PageNeeds(numbers[: self.pages + 1], numbers[self.pages + 1 :])
        wrong = needs.wrong_at()
        if wrong is not None:
            raise GeometryFileError(
                self.path, f"section 'needs' has impossible values for page {wrong}", start + 4 * wrong
            )
        return needs

    def _check_nodes(self, start: int) -> None:
        """Check the nodes of the tree. Child nodes must come after their parents, so that a traversal ends. The page of
        each leaf must exist."""
        kind, at = self.nodes[:, :, layouts.CHILD_KIND], self.nodes[:, :, layouts.CHILD_AT]
        inner = kind == layouts.INNER
        own = np.arange(len(self.nodes))[:, None]
        group = self.nodes[:, :, layouts.CHILD_GROUP]
        fits = np.where(inner, (at > own) & (at < len(self.nodes)), (kind == 0) | ((at >= 0) & (at < self.pages)))
        fits &= inner | (kind == 0) | ((kind > 0) & (group >= 0) & (group < self.meta["groups"]))
        fits &= inner | (kind == 0) | (self.nodes[:, :, layouts.CHILD_FIRST] >= 0)
        fits &= (kind == 0) | np.isfinite(self.nodes[:, :, : layouts.CHILD_KIND].view(np.float32)).all(2)
        if not len(self.nodes) or not fits.all():
            node = int(np.argmin(fits.all(1))) if len(self.nodes) else 0
            size = 4 * layouts.NODE_CHILDREN * layouts.CHILD_WORDS
            raise GeometryFileError(
                self.path,
                f"node {node} of the tree has a child with impossible values, such as a node, page or group that does "
                "not exist, or bounds that are not finite",
                start + size * node,
            )
        leaf = kind > 0
        self.page_reach = np.zeros(self.pages, np.int64)
        ends = self.nodes[:, :, layouts.CHILD_FIRST].astype(np.int64) + kind
        np.maximum.at(self.page_reach, at[leaf], ends[leaf])
        level, self.tree_depth = np.zeros(1, np.int64), 0
        while len(level):  # children come after their parents, so this loop ends
            self.tree_depth += 1
            level = at[level][inner[level]]


def _opened_again(path: Path, content: int) -> Geometry:
    found = Geometry.open(path)
    if found._content != content:
        raise InputError(f"{path} has changed since the object was pickled: pickle the object again")
    return found


def identity_of(descriptor: int) -> tuple[int, ...]:
    """The identity of an open file. The identity changes if the file is replaced or written to."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _sections(path: Path, data: mmap.mmap) -> tuple[int, dict[str, tuple[int, int]]]:
    """Read the version, and the offset and length of each section. Pages and images are checked later, when they are
    read."""
    magic, version, count, length, checksum, zero = struct.unpack_from(layouts.HEADER, data, 0)
    if magic != layouts.MAGIC:
        what = "it is not a geometry file: its first bytes are wrong"
        raise GeometryFileError(path, what, 0, f"`rooftop scene build {path}` builds one if it is a mesh")
    if version not in layouts.VERSIONS:
        raise GeometryFileError(
            path, f"it has version {version}, but this program reads only versions 1 to {layouts.VERSIONS[-1]}", 8
        )
    if length != len(data):
        raise GeometryFileError(path, f"it should have {length:,} bytes, but has {len(data):,}", min(length, len(data)))
    table_end = layouts.HEADER_BYTES + count * layouts.SECTION_BYTES
    if not 4 <= count <= 64 or table_end > length or zero:
        raise GeometryFileError(path, f"its header is damaged ({count} sections)", 12)
    table = data[layouts.HEADER_BYTES : table_end]
    if zlib.crc32(table) != checksum:
        raise GeometryFileError(path, "the checksum of the section table does not match", layouts.HEADER_BYTES)
    sections = {}
    for number in range(count):
        at = layouts.HEADER_BYTES + number * layouts.SECTION_BYTES
        name, start, size, crc, _ = struct.unpack_from(layouts.SECTION, data, at)
        text = name.rstrip(b"\0").decode("ascii", "replace")
        if start < table_end or start % 16 or start + size > length:
            raise GeometryFileError(path, f"section {text} lies outside the file", at)
        if text not in ("pages", IMAGES) and zlib.crc32(memoryview(data)[start : start + size]) != crc:
            raise GeometryFileError(path, f"the checksum of section {text} does not match", start)
        sections[text] = (start, size)
    if ("needs" in sections) != (version >= 3):
        must, has = ("must have", "none") if version >= 3 else ("must not have", "one")
        raise GeometryFileError(path, f"version {version} {must} a section 'needs', but the file has {has}", 8)
    for text, unit in (
        ("meta", 1),
        ("nodes", 4 * layouts.NODE_CHILDREN * layouts.CHILD_WORDS),
        ("pagetab", 16),
        ("pages", 1),
    ):
        if text not in sections or not sections[text][1] or sections[text][1] % unit:
            raise GeometryFileError(path, f"section {text} is missing or has a wrong length", layouts.HEADER_BYTES)
    return version, sections


def _meta(path: Path, data: mmap.mmap, start: int, length: int) -> dict[str, Any]:
    try:
        meta = json.loads(data[start : start + length])
    except (ValueError, RecursionError) as error:
        raise GeometryFileError(path, f"its metadata is not JSON ({error})", start) from None
    if isinstance(meta, dict):
        meta.setdefault("has_colors", False)  # older files lack this entry
    for name, kind in _NEEDED.items():
        if not isinstance(meta, dict) or not isinstance(meta.get(name), kind):
            raise GeometryFileError(path, f"its metadata lacks {name}", start)
    for name, shape in (("origin", (3,)), ("bounds", (2, 3))):
        if not _are_numbers(meta[name], shape):
            raise GeometryFileError(path, f"its metadata has no {name} of shape {shape}", start)
    most = len(data) // 4  # limit of a count: each item has at least one word
    for name, low, high in (
        ("grid_exponent", -126, 100),
        ("uv_exponent", -126, 100),
        ("depth", 1, layouts.MAX_DEPTH),
        ("clusters", 1, most),
        ("groups", 1, most),
        ("triangles", 1, 2**62),
    ):
        if not low <= meta[name] <= high:
            raise GeometryFileError(path, f"its metadata has {name} {meta[name]}, expected {low} to {high}", start)
    if not meta["levels"] or not all(_is_level(level) for level in meta["levels"]):
        raise GeometryFileError(path, f"its metadata lacks {', '.join(LEVEL)} of each level", start)
    found: dict[str, Any] = meta
    return found


def _is_level(level: object) -> bool:
    """Whether a value from the file is valid metadata of one level of detail."""
    if not isinstance(level, dict) or not _are_numbers([level.get(name) for name in LEVEL], (len(LEVEL),)):
        return False
    return all(isinstance(level[name], int) and level[name] > 0 for name in ("clusters", "triangles"))


def _are_numbers(values: object, shape: tuple[int, ...]) -> bool:
    """Whether a value is a nested list of this shape, of numbers that a float can represent."""
    if not shape:
        return isinstance(values, int | float) and abs(values) <= sys.float_info.max
    return isinstance(values, list) and len(values) == shape[0] and all(_are_numbers(v, shape[1:]) for v in values)


def _corners(
    new: npt.NDArray[np.int64], explicit: npt.NDArray[np.bool_], references: list[int], separate: bool
) -> npt.NDArray[np.int64]:
    """Decode the corners (T, 3) of triangles by the table in `layouts.py`. For each triangle,
    `new` is the number of its corners whose vertex no earlier triangle has."""
    left, count, before = iter(references), 0, [0, 0, 0]
    found: list[list[int]] = []
    for its, is_explicit in zip(new.tolist(), explicit.tolist(), strict=True):
        n = count
        if separate or its > 0:
            corners = [n - 1 - next(left) for _ in range(3 - its)] + list(range(n, n + its))
        elif is_explicit:
            corners = [n - 1 - next(left), n - 2 - next(left), n - 2 - next(left)]
        else:
            corners = [n - 1, before[2] if before[2] != n - 1 else before[1], n - 2 - next(left)]
        count += its
        before = corners
        found.append(corners)
    return np.array(found, np.int64)


def _values(
    bits: npt.NDArray[np.uint8], start: int, count: int, widths: list[int]
) -> tuple[npt.NDArray[np.int64], int]:
    """Decode rows of values whose columns have the bit widths `widths`. Also return the start of the next stream, in
    bits."""
    end = start + count * sum(widths)
    rows = bits[start:end].reshape(count, sum(widths)).astype(np.int64)
    ends = np.cumsum([0, *widths])
    columns = [rows[:, a:b] @ (1 << np.arange(b - a)) for a, b in itertools.pairwise(ends)]
    return np.stack(columns, 1) if columns else np.zeros((count, 0), np.int64), end + -end % 32


def _normals(numbers: npt.NDArray[np.int64]) -> Floats:
    """Decode unit vectors from two numbers on an octahedron."""
    flat = (numbers - layouts.NORMAL_MIDDLE) / layouts.NORMAL_MIDDLE
    z = 1 - np.abs(flat).sum(1)
    folded = (1 - np.abs(flat[:, ::-1])) * np.where(flat < 0, -1.0, 1.0)
    directions = np.column_stack([np.where(z[:, None] < 0, folded, flat), z])
    return directions / np.sqrt((directions**2).sum(1, keepdims=True))

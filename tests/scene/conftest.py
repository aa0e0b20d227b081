"""Small meshes of every kind, built once; their renderers (on the CPU, and on a GPU if there is one); and files of
earlier versions."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene import Geometry, layouts
from rooftop.scene.building.normals import octahedral
from rooftop.scene.geometry import _normals
from rooftop.scene.heads import bit_lengths
from rooftop.scene.streaming import page_reader

OLD_FILE = Path(__file__).with_name("version_3.rtg")  # half a ball with all attributes, in file version 3

Words = NDArray[np.uint32]
Column = tuple[NDArray[np.int64], int]  # number of values, and bits of each
Arrays = tuple[NDArray[np.float64], NDArray[np.int64]]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def no_compilation() -> Iterator[None]:
    """Read pages in Python, so that no compilation runs beside other tests. Tests of streaming may choose the
    reader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_reader, "compiled", lambda: None)
        yield


class Paths:
    """The paths through the levels of a mesh, from the finest clusters to those that nothing replaces; read once."""

    def __init__(self, mesh: Geometry) -> None:
        heads, groups = mesh.clusters(), mesh.groups()
        self._first = [int(mesh.page(page)[layouts.PAGE_FIRST_CLUSTER]) for page in range(mesh.pages)]
        group_of = np.repeat(groups[:, layouts.GROUP_NUMBER].astype(np.int64), groups[:, layouts.GROUP_COUNT])
        members = {number: np.flatnonzero(group_of == number).tolist() for number in np.unique(group_of).tolist()}
        source = heads[:, layouts.CLUSTER_SOURCE].view(np.int32).tolist()
        order = np.argsort(heads[:, layouts.CLUSTER_COUNTS] >> 24, kind="stable").tolist()  # the finest first
        self._below = {cluster: members[source[cluster]] if source[cluster] >= 0 else [] for cluster in order}
        never = groups[:, layouts.GROUP_ERROR].view(np.float32) == np.float32(layouts.NEVER)
        self._ends = [cluster for number in groups[never, layouts.GROUP_NUMBER].tolist() for cluster in members[number]]

    def counts(self, renderer: scene.Renderer, frame: scene.GBuffer, instance: int) -> set[int]:
        """How many clusters of an instance a frame of one view has drawn on each path."""
        assert renderer._memory is not None
        entries = renderer._memory.tensors["drawn"][: frame.stats.clusters].tolist()
        drawn = {
            self._first[(entry & 0xFFFFFFFF) >> 11] + (entry & 2047) for entry in entries if entry >> 32 == instance
        }
        counts: dict[int, set[int]] = {}
        for cluster, below in self._below.items():
            ways = set().union(*(counts[each] for each in below)) if below else {0}
            counts[cluster] = {way + (cluster in drawn) for way in ways}
        return set().union(*(counts[cluster] for cluster in self._ends))


@pytest.fixture(scope="session")
def paths_of() -> type[Paths]:
    return Paths


def bumpy_ball(subdivisions: int) -> Arrays:
    """A closed surface around the origin, all visible from there; radius 0.75 to 1.25."""
    ball = trimesh.creation.icosphere(subdivisions)
    x, y, z = ball.vertices.T
    return ball.vertices * (1 + 0.25 * np.sin(9 * x) * np.cos(7 * y) * np.sin(5 * z))[:, None], ball.faces


def relief(picture: NDArray[np.float64]) -> Arrays:
    """A surface over -1 to 1 along x and y, whose height is the brightness of a picture (H, W)."""
    rows, columns = picture.shape
    x, y = np.meshgrid(np.linspace(-1, 1, rows), np.linspace(-1, 1, columns), indexing="ij")
    corner = (np.arange(rows - 1)[:, None] * columns + np.arange(columns - 1)).ravel()
    right, below = corner + 1, corner + columns
    faces = np.concatenate([np.stack([corner, below, right], 1), np.stack([right, below, below + 1], 1)])
    return np.stack([x, y, 0.3 * picture], -1).reshape(-1, 3), faces


@pytest.fixture(scope="session")
def built(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Callable[..., Geometry]:
    """`built("ball", vertices, faces, ...)`: the geometry, built at the first call of that name in any worker."""

    def build(name: str, vertices: NDArray[np.float64], faces: NDArray[np.int64], **options: object) -> Geometry:
        def make(folder: Path) -> None:
            scene.build(vertices, faces, folder / f"{name}.rtg", **options)  # type: ignore[arg-type]

        return Geometry.open(made_once(f"built-{name}", make) / f"{name}.rtg")

    return build


@pytest.fixture(scope="session")
def ball(built: Callable[..., Geometry]) -> Geometry:
    """20,480 triangles, closed."""
    return built("ball", *bumpy_ball(5))


@pytest.fixture(scope="session")
def cube(built: Callable[..., Geometry]) -> Geometry:
    """12 triangles, from -1 to 1."""
    box = trimesh.creation.box((2, 2, 2))
    return built("cube", box.vertices, box.faces)


@pytest.fixture(scope="session")
def log(built: Callable[..., Geometry]) -> Geometry:
    """81,920 triangles, closed, 20 times as long as wide."""
    vertices, faces = bumpy_ball(6)
    return built("log", vertices * (20, 1, 1), faces)


@pytest.fixture(scope="session")
def small_ball() -> Arrays:
    """1,280 triangles, closed."""
    return bumpy_ball(3)


@pytest.fixture(scope="session")
def photograph(built: Callable[..., Geometry]) -> Geometry:
    """The relief of a photograph, as noisy as photographs are; 33,000 triangles, open."""
    from skimage import color, data

    return built("photograph", *relief(color.rgb2gray(data.chelsea())[::2, ::4]), normals="smooth")


# ---- earlier versions ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def in_old_layout() -> Callable[..., Geometry]:
    """`in_old_layout(geometry, path, version)`: the same numbers, in the layout of version 1, 2 or 3."""
    return _in_old_layout


@pytest.fixture(scope="session")
def old_file() -> Geometry:
    """A file in version 3: half a noisy ball of 900 triangles with normals, uv, colours and mixed materials."""
    return Geometry.open(OLD_FILE)


def _in_old_layout(geometry: Geometry, path: Path, version: int = 3) -> Geometry:
    """The file in the layout of version 1, 2 or 3, written to `path`: every cluster decodes to the same numbers.

    Pages of the old layouts are longer: those of a mesh with full pages do not fit into PAGE_BYTES.
    """
    pages = _old_pages(geometry.path)
    needs = np.concatenate([geometry.needs.starts, geometry.needs.pages]).astype("<u4").tobytes()
    sections = {b"nodes": geometry.nodes.tobytes(), b"meta": json.dumps(geometry.meta).encode(), b"needs": needs}
    if version < 3:
        del sections[b"needs"]
    data = bytearray(layouts.HEADER_BYTES + layouts.SECTION_BYTES * (len(sections) + 2))
    table = np.zeros(len(pages), layouts.PAGE_ENTRY)
    begin = len(data)
    for page, words in enumerate(pages):
        table[page] = (len(data), len(words), zlib.crc32(words))
        data += words + bytes(-len(words) % 16)
    rows = [(b"pages", begin, len(data) - begin, 0)]
    for name, content in ({b"pagetab": table.tobytes()} | sections).items():
        rows.append((name, len(data), len(content), zlib.crc32(content)))
        data += content + bytes(-len(content) % 16)
    listed = b"".join(struct.pack(layouts.SECTION, *row, 0) for row in rows)
    data[layouts.HEADER_BYTES : layouts.HEADER_BYTES + len(listed)] = listed
    header = (layouts.MAGIC, version, len(rows), len(data), zlib.crc32(listed), 0)
    struct.pack_into(layouts.HEADER, data, 0, *header)
    path.write_bytes(data)
    return Geometry.open(path)


@cache
def _old_pages(path: Path) -> tuple[bytes, ...]:
    """Header fields that all three versions of a file share."""
    geometry = Geometry.open(path)
    pages = tuple(_page(geometry, page).astype("<u4").tobytes() for page in range(geometry.pages))
    assert max(map(len, pages)) <= 128 << 10
    return pages


def _page(geometry: Geometry, page: int) -> Words:
    words = geometry.page(page).view(np.uint32)
    first = int(words[layouts.PAGE_FIRST_CLUSTER])
    groups = int(words[layouts.PAGE_GROUPS]) & 0xFFFF
    records = words[layouts.PAGE_WORDS :][: groups * layouts.GROUP_WORDS]
    count = int(words[layouts.PAGE_CLUSTERS])
    heads = geometry._heads(page).view(np.uint32)[:, : layouts.CLUSTER_WORDS].copy()
    at = layouts.PAGE_WORDS + len(records) + layouts.CLUSTER_WORDS * count
    streams = []
    for index in range(count):
        own, reference_bits = _streams(geometry, heads[index], first + index)
        counts = int(heads[index, layouts.CLUSTER_COUNTS])
        heads[index, layouts.CLUSTER_COUNTS] = counts & ~(255 << 16) | reference_bits << 16
        heads[index, layouts.CLUSTER_STREAMS] = at
        at += len(own)
        streams.append(own)
    owned = records.reshape(-1, layouts.GROUP_WORDS)[:, layouts.GROUP_COUNT]
    heads[:, layouts.CLUSTER_GROUP] = np.repeat(np.arange(groups), owned)
    head = np.array([count, groups, first, at + 1], np.uint32)
    return np.concatenate([head, records, heads.ravel(), *streams, np.zeros(1, np.uint32)])


def _streams(geometry: Geometry, head: Words, number: int) -> tuple[Words, int]:
    """The streams of a cluster, and the number of bits of a reference."""
    cluster, raw = geometry.decode(number), _numbers(geometry, number)
    before, new, references = 0, [], []
    for corners in cluster.triangles.tolist():
        fresh = [corner for corner in corners if corner >= before]
        assert corners[3 - len(fresh) :] == list(range(before, before + len(fresh)))
        new.append(len(fresh))
        references += [before - 1 - corner for corner in corners[: 3 - len(fresh)]]
        before += len(fresh)
    bits = int(bit_lengths(np.array([max(references, default=0)]))[0])
    masks = sum((its & 1) << t | (its >> 1) << 128 + t for t, its in enumerate(new))
    base = head[layouts.CLUSTER_BASE : layouts.CLUSTER_BASE + 3].view(np.int32)
    widths = bit_lengths(head[layouts.CLUSTER_EXTENT : layouts.CLUSTER_EXTENT + 3]).tolist()
    attributes: list[Column] = []
    if cluster.normals is not None:
        attributes += [(raw["normals"][:, axis], layouts.NORMAL_BITS) for axis in range(2)]
    if cluster.uv is not None:
        uv_base = head[layouts.CLUSTER_UV_BASE : layouts.CLUSTER_UV_BASE + 2].view(np.int32)
        uv_widths = bit_lengths(head[layouts.CLUSTER_UV_EXTENT : layouts.CLUSTER_UV_EXTENT + 2]).tolist()
        attributes += [(raw["uv"][:, axis] - uv_base[axis], uv_widths[axis]) for axis in range(2)]
    if cluster.colors is not None:
        attributes += [(raw["colors"][:, channel], layouts.COLOR_BITS) for channel in range(3)]
    streams = [
        np.frombuffer(masks.to_bytes(32, "little"), np.uint32),
        _packed([(np.array(references, np.int64), bits)]),
        _packed([(cluster.grid[:, axis] - int(base[axis]), widths[axis]) for axis in range(3)]),
        _packed(attributes),
    ]
    if int(head[layouts.CLUSTER_MATERIAL]) == layouts.MIXED & 0xFFFFFFFF:
        streams.append(_packed([(cluster.materials, layouts.MATERIAL_BITS)]))
    return np.concatenate(streams), bits


def _numbers(geometry: Geometry, number: int) -> dict[str, Any]:
    """Attributes in their stored form, as whole numbers."""
    cluster = geometry.decode(number)
    found: dict[str, Any] = {}
    if cluster.normals is not None:
        found["normals"] = octahedral(cluster.normals).astype(np.int64)
        assert (_normals(found["normals"]) == cluster.normals).all()
    if cluster.uv is not None:
        found["uv"] = np.rint(np.ldexp(cluster.uv, -geometry.meta["uv_exponent"])).astype(np.int64)
    if cluster.colors is not None:
        found["colors"] = np.rint(cluster.colors * 255).astype(np.int64)
    return found


def _packed(columns: list[Column]) -> Words:
    """Interleaved values, starting at the lowest bit of a word."""
    if not columns:
        return np.zeros(0, np.uint32)
    assert all((values >= 0).all() and (values >> bits == 0).all() for values, bits in columns)
    rows = np.concatenate([values[:, None] >> np.arange(bits) & 1 for values, bits in columns], 1)
    packed = np.packbits(rows.astype(np.uint8), bitorder="little").tobytes()
    return np.frombuffer(packed + bytes(-len(packed) % 4), np.uint32)

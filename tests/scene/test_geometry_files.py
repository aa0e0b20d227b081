"""Files are read back bit for bit, and damaged files are refused."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import trimesh
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rooftop import scene
from rooftop.errors import GeometryFileError, InputError, RooftopError
from rooftop.scene import DirectionalLight, Geometry, Scene, layouts
from rooftop.scene.building.encoding import encode
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.normals import from_octahedral, octahedral, unit_vectors
from rooftop.scene.heads import bit_lengths, packed, unpacked

Ints = NDArray[np.int64]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a sphere with every kind of data, on several pages."""
    ball = trimesh.creation.icosphere(5)
    path = tmp_path_factory.mktemp("files") / "ball.rtg"
    materials = (ball.triangles_center[:, 2] > 0.3) * 300 + (ball.triangles_center[:, 0] > 0) * 4
    scene.build(
        ball.vertices + np.array([1000, 0, -7]), ball.faces, path, ball.vertices, ball.vertices[:, :2] * 5, materials
    )
    return path


def finest(geometry: Geometry) -> list[int]:
    heads = geometry.clusters()
    return np.flatnonzero(heads[:, layouts.CLUSTER_COUNTS] >> 24 == 0).tolist()


def test_vertices_come_back_with_their_attributes(path: Path) -> None:
    """The test sphere's normals, uv and materials follow from the positions of its vertices."""
    geometry = Geometry.open(path)
    step, uv_step = 2.0 ** geometry.meta["grid_exponent"], 2.0 ** geometry.meta["uv_exponent"]
    kinds = set()
    for number in finest(geometry):
        cluster = geometry.decode(number)
        assert cluster.normals is not None
        assert cluster.uv is not None
        points = cluster.positions - np.array([1000, 0, -7])
        assert np.abs(np.linalg.norm(points, axis=1) - 1).max() <= step
        assert np.abs(cluster.normals - points).max() <= 0.004  # 10 bits: 511 steps from the middle to the edge
        assert np.abs(cluster.uv - points[:, :2] * 5).max() <= 5 * step + uv_step
        centers = points[cluster.triangles].mean(1)
        clear = (np.abs(centers[:, 2] - 0.3) > 0.001) & (np.abs(centers[:, 0]) > 0.001)
        wanted = (centers[:, 2] > 0.3) * 300 + (centers[:, 0] > 0) * 4
        assert (cluster.materials[clear] == wanted[clear]).all()
        kinds |= set(cluster.materials.tolist())
        across = np.cross(*np.diff(points[cluster.triangles], axis=1).transpose(1, 0, 2))
        assert (np.einsum("ij,ij->i", across, centers) > 0).all()  # not mirrored
    assert kinds == {0, 4, 300, 304}


def test_clusters_with_several_materials_and_with_one(path: Path) -> None:
    materials = Geometry.open(path).clusters().view(np.int32)[:, layouts.CLUSTER_MATERIAL]
    assert (materials == layouts.MIXED).any()
    assert {0, 4, 300, 304} & set(materials.tolist())


def test_vertices_are_numbered_by_first_use_and_new_corners_are_last(path: Path) -> None:
    geometry = Geometry.open(path)
    for number in range(0, geometry.meta["clusters"], 7):
        triangles = geometry.decode(number).triangles
        seen = -1
        for corners in triangles.tolist():
            new = [corner for corner in corners if corner > seen]
            assert corners[3 - len(new) :] == list(range(seen + 1, seen + 1 + len(new)))
            seen += len(new)


def test_a_place_has_the_same_coordinates_in_every_cluster(path: Path) -> None:
    """Every level has only coordinates that the mesh has."""
    geometry = Geometry.open(path)
    mesh = {tuple(point) for number in finest(geometry) for point in geometry.decode(number).grid.tolist()}
    assert len(mesh) == 10242
    for number in range(geometry.meta["clusters"]):
        assert {tuple(point) for point in geometry.decode(number).grid.tolist()} <= mesh


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_clusters_survive_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """Random clusters: coordinates of all sizes, any attributes, triangles of any vertices."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    counts = np.array(data.draw(st.lists(st.integers(1, layouts.MAX_TRIANGLES), min_size=1, max_size=4)))
    vertices, corners, members = [], [], []
    for count in counts:
        pool = int(random.integers(3, min(3 * count, layouts.MAX_VERTICES) + 1))
        chosen = np.array([random.permutation(pool)[:3] for _ in range(count)])
        used, local = np.unique(chosen, return_inverse=True)
        corners.append(local.reshape(-1, 3))
        members.append(len(used))
        span = 2 ** int(random.integers(0, 25))
        vertices.append(random.integers(-span, span, (len(used), 3)))
    grid = np.concatenate(vertices).astype(np.int32)
    has_normals, has_uv, has_colors, has_materials = (data.draw(st.booleans()) for _ in range(4))
    # for normals, from 0 to all 10 bits
    wide, low = 2 ** int(random.integers(0, 11)) - 1, int(random.integers(0, 1023))
    uv_span = 2 ** int(random.integers(0, 31))
    table = Vertices(
        grid=grid,
        place=np.arange(len(grid), dtype=np.uint32),
        normals=np.minimum(low + random.integers(0, wide + 1, (len(grid), 2)), 1022).astype(np.uint16)
        if has_normals
        else None,
        uv=random.integers(-uv_span, uv_span, (len(grid), 2)).astype(np.int32) if has_uv else None,
        colors=random.integers(0, 256, (len(grid), 3)).astype(np.uint8) if has_colors else None,
        materials=random.integers(0, 65536, len(grid)).astype(np.uint16) if has_materials else None,
        merged=np.arange(len(grid), dtype=np.uint32),
        exponent=-3,
        uv_exponent=-5,
    )
    encoded = encode(
        table, counts, np.array(members), np.concatenate(corners).astype(np.uint8),
        np.arange(len(grid), dtype=np.uint32), np.arange(len(counts)),
    )  # fmt: skip
    page = np.concatenate([encoded.streams, [0]]).astype(np.uint32).view(np.int32)
    starts = np.cumsum([0, *encoded.counts[:-1]])
    encoded.heads[:, layouts.CLUSTER_STREAMS] = starts
    replaces = data.draw(st.booleans())
    encoded.heads[:, layouts.CLUSTER_SOURCE] = np.arange(len(counts)) - 1 if replaces else 0xFFFFFFFF
    heads = unpacked(packed(encoded.heads, replaces, has_normals, has_uv), replaces, has_normals, has_uv)
    exact = [layouts.CLUSTER_COUNTS, layouts.CLUSTER_STREAMS, layouts.CLUSTER_MATERIAL, layouts.CLUSTER_SOURCE]
    exact += [layouts.CLUSTER_REFERENCES, layouts.CLUSTER_MASKS, *range(layouts.CLUSTER_BASE, layouts.CLUSTER_BASE + 3)]
    assert (heads[:, exact] == encoded.heads[:, exact]).all()

    reader = object.__new__(Geometry)
    reader.version = layouts.VERSION
    reader.meta = {
        "has_normals": has_normals,
        "has_uv": has_uv,
        "has_colors": has_colors,
        "grid_exponent": -3,
        "uv_exponent": -5,
        "origin": [0] * 3,
    }
    monkeypatch.setattr(Geometry, "place", lambda self, cluster: (0, cluster))
    monkeypatch.setattr(Geometry, "page", lambda self, page_number: page)
    monkeypatch.setattr("rooftop.scene.geometry.heads_of", lambda *_: heads.view(np.int32))
    first = 0
    for number, local in enumerate(corners):
        found = reader.decode(number)
        wanted = np.arange(first, first + members[number])[local]  # (T, 3)
        order = np.full(members[number], -1)  # the vertex of each number
        for mine, theirs in zip(found.triangles.tolist(), wanted.tolist(), strict=True):
            turned = next(
                turn for turn in (theirs, theirs[1:] + theirs[:1], theirs[2:] + theirs[:2])
                if all(order[a] in (-1, b) for a, b in zip(mine, turn, strict=True))
                and not any(order[a] == -1 and b in order for a, b in zip(mine, turn, strict=True))
            )  # fmt: skip
            order[mine] = turned
        assert sorted(order) == list(range(first, first + members[number]))
        assert (found.grid == grid[order]).all()
        assert (found.positions == grid[order] / 8).all()
        if table.normals is not None:
            assert found.normals is not None
            assert np.abs(found.normals - from_octahedral(table.normals[order])).max() < 1e-12
        if table.uv is not None:
            assert found.uv is not None
            assert (found.uv == table.uv[order] / 32).all()
        if table.colors is not None:
            assert found.colors is not None
            assert (found.colors == table.colors[order] / 255).all()
        if table.materials is not None:
            owner = table.materials[wanted]
            assert (found.materials[:, None] == owner).any(1).all()
        first += members[number]


def test_triangles_in_fans_need_few_references(path: Path) -> None:
    """A smooth mesh needs 1.6 references for a triangle. A reference for each corner that is not new would need 2.3."""
    heads = Geometry.open(path).clusters().astype(np.int64)
    counts = heads[:, layouts.CLUSTER_COUNTS]
    triangles, vertices = (counts & 255) + 1, (counts >> 8 & 255) + 1
    assert heads[:, layouts.CLUSTER_REFERENCES].sum() / triangles.sum() < 1.75
    assert (3 * triangles - vertices).sum() / triangles.sum() > 2.2
    assert (heads[:, layouts.CLUSTER_MASKS] == layouts.FANS).mean() > 0.5


@given(st.integers(0, 2**31 - 1))
def test_boxes_are_at_most_a_sixteenth_wider_than_clusters(extent: int) -> None:
    rows = np.zeros((1, layouts.CLUSTER_COLUMNS), np.uint32)
    rows[0, layouts.CLUSTER_COUNTS] = 1 << 16
    rows[0, layouts.CLUSTER_EXTENT] = extent
    found = int(unpacked(packed(rows, False, False, False), False, False, False)[0, layouts.CLUSTER_EXTENT])
    assert extent <= found <= extent + extent / 16
    assert found.bit_length() == extent.bit_length()


@given(st.lists(st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 5), min_size=3, max_size=40))
def test_values_lie_at_their_bits(rows: list[tuple[int, ...]]) -> None:
    """A fan around vertex 0: its columns need up to 32 bits each."""
    columns = np.array(rows, np.int32)
    count = len(rows)
    numbers = np.arange(count, dtype=np.uint32)
    table = Vertices(
        grid=columns[:, :3].copy(), place=numbers, normals=None, uv=columns[:, 3:].copy(), colors=None, materials=None,
        merged=numbers, exponent=0, uv_exponent=0,
    )  # fmt: skip
    fan = np.column_stack([np.zeros(count - 2), numbers[1:-1], numbers[2:]]).astype(np.uint8)
    encoded = encode(table, np.array([count - 2]), np.array([count]), fan, numbers, np.array([0]))
    above = columns.astype(np.int64) - columns.min(0)
    widths = bit_lengths(above.max(0))
    assert widths.tolist() == [int(most).bit_length() for most in above.max(0)]
    positions, uv = (
        sum(int(value) << at for value, at in zip(values.ravel(), np.cumsum([0, *bits]).tolist(), strict=False))
        for values, bits in ((above[:, :3], widths[:3].tolist() * count), (above[:, 3:], widths[3:].tolist() * count))
    )
    ends = [32 * -(-int(bits.sum()) * count // 32) for bits in (widths[:3], widths[3:])]
    whole = int.from_bytes(encoded.streams.astype("<u4").tobytes(), "little")
    assert whole >> 32 * int(encoded.counts[0]) - sum(ends) == positions | uv << ends[0]


def test_normals_are_within_their_steps_and_axes_exact() -> None:
    directions = unit_vectors(np.random.default_rng(0).normal(size=(20000, 3)))
    back = from_octahedral(octahedral(directions))
    assert np.arccos(np.clip((directions * back).sum(1), -1, 1)).max() < np.radians(0.25)
    axes = np.concatenate([np.eye(3), -np.eye(3)])
    assert (from_octahedral(octahedral(axes)) == axes).all()
    assert octahedral(directions).max() < 1 << layouts.NORMAL_BITS
    numbers = np.stack(np.meshgrid(np.arange(1023), np.arange(1023)), -1).reshape(-1, 2)
    again = octahedral(from_octahedral(numbers))
    inside = (np.abs(numbers - 511) < 511).all(1)  # without normals on the edge, where two numbers mean the same normal
    assert (again[inside] == numbers[inside]).all()


# ---- damage ----------------------------------------------------------------------------------------------------------


def sections(data: bytes) -> dict[str, tuple[int, int]]:
    count = struct.unpack_from(layouts.HEADER, data)[2]
    rows = [struct.unpack_from(layouts.SECTION, data, layouts.HEADER_BYTES + 32 * row) for row in range(count)]
    return {name.rstrip(b"\0").decode(): (start, length) for name, start, length, _, _ in rows}


def damaged(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "damaged.rtg"
    path.write_bytes(data)
    return path


def test_a_file_that_is_cut_off_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    ends = {0, 1, 7, 31, 32, 33, 100, len(data) - 1}
    ends |= {start + extra for start, length in sections(data).values() for extra in (0, 1, length // 2, length - 1)}
    for end in sorted(ends):
        with pytest.raises(GeometryFileError) as caught:
            Geometry.open(damaged(tmp_path, data[:end]))
        assert 0 <= caught.value.offset <= end
        assert "damaged.rtg" in str(caught.value)
    with pytest.raises(GeometryFileError, match="should have"):
        Geometry.open(damaged(tmp_path, data + b"\0"))


def test_a_changed_byte_in_header_or_table_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    for at in range(layouts.HEADER_BYTES + 5 * layouts.SECTION_BYTES):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        with pytest.raises(GeometryFileError) as caught:
            Geometry.open(damaged(tmp_path, bytes(changed)))
        assert caught.value.offset <= len(data)


@pytest.mark.parametrize("name", ["meta", "nodes", "pagetab", "needs"])
def test_a_changed_byte_in_a_section_is_refused_with_its_place(path: Path, tmp_path: Path, name: str) -> None:
    data = bytearray(path.read_bytes())
    start, length = sections(bytes(data))[name]
    data[start + length // 3] ^= 16
    with pytest.raises(GeometryFileError, match=f"checksum of section {name}") as caught:
        Geometry.open(damaged(tmp_path, bytes(data)))
    assert caught.value.offset == start


def test_a_changed_page_is_found_when_it_is_read_and_the_others_serve(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    geometry = Geometry.open(path)
    assert geometry.pages > 1
    data[int(geometry.page_offsets[1]) + 4000] ^= 1
    changed = Geometry.open(damaged(tmp_path, bytes(data)))
    assert (changed.page(0) == geometry.page(0)).all()
    with pytest.raises(GeometryFileError, match="checksum of page 1") as caught:
        changed.page(1)
    assert caught.value.offset == geometry.page_offsets[1]
    last = geometry.meta["clusters"] - 1
    with pytest.raises(GeometryFileError):
        changed.clusters()
    assert changed.decode(0).triangles.size
    assert geometry.decode(last).triangles.size
    with pytest.raises(IndexError, match=f"{last + 1}"):
        geometry.decode(last + 1)
    with pytest.raises(IndexError):
        geometry.page(geometry.pages)


def resealed(data: bytearray, name: str, page: int | None = None) -> bytes:
    """The file with recomputed checksums of the changed sections and page, so that only an examination of the contents
    finds the damage."""
    found = sections(bytes(data))
    if page is not None:
        start = found["pagetab"][0] + 16 * page
        offset, length = struct.unpack_from("<QI", data, start)
        struct.pack_into("<I", data, start + 12, zlib.crc32(data[offset : offset + length]))
        name = "pagetab"
    start, length = found[name]
    row = layouts.HEADER_BYTES + layouts.SECTION_BYTES * list(found).index(name)
    struct.pack_into("<I", data, row + 24, zlib.crc32(data[start : start + length]))
    table = bytes(data[layouts.HEADER_BYTES : layouts.HEADER_BYTES + layouts.SECTION_BYTES * len(found)])
    struct.pack_into("<I", data, 24, zlib.crc32(table))
    return bytes(data)


@pytest.mark.parametrize("value", [0, 1 << 20, -5])  # the root is its own child, an endless loop
def test_a_tree_that_leads_nowhere_is_refused(path: Path, tmp_path: Path, value: int) -> None:
    data = bytearray(path.read_bytes())
    inner = int(np.flatnonzero(Geometry.open(path).nodes[0, :, layouts.CHILD_KIND] == layouts.INNER)[0])
    at = sections(bytes(data))["nodes"][0] + 4 * (inner * layouts.CHILD_WORDS + layouts.CHILD_AT)
    struct.pack_into("<i", data, at, value)
    with pytest.raises(GeometryFileError, match="node 0"):
        Geometry.open(damaged(tmp_path, resealed(data, "nodes")))


def first_head(page: NDArray[np.int32]) -> int:
    """The position of the head of a page's first cluster."""
    groups = int(page[layouts.PAGE_GROUPS]) & (1 << layouts.PAGE_GROUP_BITS) - 1
    return layouts.PAGE_WORDS + layouts.GROUP_WORDS * groups


@pytest.mark.parametrize(
    ("word", "value", "match"),
    [
        (layouts.PAGE_CLUSTERS, 1 << 20, "head"),
        (layouts.PAGE_CLUSTERS, -1, "head"),
        (layouts.PAGE_GROUPS, 1 << 24, "head"),
        (layouts.PAGE_GROUPS, 1, "head"),  # like a page before version 4
        (layouts.PAGE_GROUPS, 1 | 15 << layouts.PAGE_GROUP_BITS | layouts.PAGE_REPLACES, "head"),  # one word too short
        (layouts.PAGE_LENGTH, 7, "head"),
        (layouts.PAGE_WORDS + layouts.GROUP_COUNT, 1000, "group"),
        (layouts.PAGE_WORDS + layouts.GROUP_FIRST, -1, "group"),
        (0, 0, ""),
    ],
)
def test_pages_that_point_outside_of_themselves_are_refused(
    path: Path, tmp_path: Path, word: int, value: int, match: str
) -> None:
    data = bytearray(path.read_bytes())
    geometry = Geometry.open(path)
    page = geometry.page(0)
    if not match:  # the first cluster's streams
        word, value, match = first_head(page) + layouts.HEAD_STREAMS, len(page) - 20, "streams"
    struct.pack_into("<i", data, int(geometry.page_offsets[0]) + 4 * word, value)
    opened = Geometry.open(damaged(tmp_path, resealed(data, "pagetab", 0)))
    with pytest.raises(GeometryFileError, match=match):
        opened.page(0)


def test_masks_that_count_other_vertices_than_the_head_are_refused(path: Path, tmp_path: Path) -> None:
    data, geometry = bytearray(path.read_bytes()), Geometry.open(path)
    page = geometry.page(1)
    streams = int(page[first_head(page) + layouts.HEAD_STREAMS]) & 0x7FFF
    offset = int(geometry.page_offsets[1])
    data[offset + 4 * streams] ^= 1
    opened = Geometry.open(damaged(tmp_path, resealed(data, "pagetab", 1)))
    with pytest.raises(GeometryFileError, match="masks of a cluster") as caught:
        opened.page(1)
    assert caught.value.offset == offset


def test_a_tree_that_names_clusters_outside_of_a_page_is_found_with_the_page(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    nodes = Geometry.open(path).nodes
    node, child = np.argwhere(nodes[:, :, layouts.CHILD_KIND] > 0)[-1].tolist()
    at = (node * layouts.NODE_CHILDREN + child) * layouts.CHILD_WORDS + layouts.CHILD_FIRST
    struct.pack_into("<i", data, sections(bytes(data))["nodes"][0] + 4 * at, 100000)
    opened = Geometry.open(damaged(tmp_path, resealed(data, "nodes")))
    with pytest.raises(GeometryFileError, match="clusters that do not exist"):
        opened.page(int(nodes[node, child, layouts.CHILD_AT]))


@pytest.mark.parametrize(
    "change",
    [
        {"origin": None},
        {"has_uv": 1.5},
        {"clusters": "many"},
        {"origin": [1, 2]},
        {"bounds": []},
        {"grid_exponent": 500},
        {"depth": 100_000},
        {"depth": 0},
        {"groups": 10**12},
        {"triangles": 0},
        {"clusters": -1},
        {"levels": [5]},
        {"levels": []},
        {"origin": [float("inf"), 0, 0]},
    ],
)
def test_a_description_that_lacks_something_is_refused(path: Path, tmp_path: Path, change: dict[str, object]) -> None:
    data = bytearray(path.read_bytes())
    start, length = sections(bytes(data))["meta"]
    meta = json.dumps(json.loads(data[start : start + length]) | change).encode()
    data[start : start + length] = meta.ljust(length)[:length]
    with pytest.raises(GeometryFileError, match=r"its metadata"):
        Geometry.open(damaged(tmp_path, resealed(data, "meta")))


def test_other_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ball.stl").write_bytes(b"solid ball" * 20)
    with pytest.raises(GeometryFileError, match="is not a geometry file"):
        Geometry.open(tmp_path / "ball.stl")
    with pytest.raises(FileNotFoundError):
        Geometry.open(tmp_path / "none.rtg")
    assert issubclass(GeometryFileError, RooftopError)
    assert issubclass(GeometryFileError, ValueError)


def test_a_newer_version_is_named(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, 5)
    with pytest.raises(GeometryFileError, match="version 5") as caught:
        Geometry.open(damaged(tmp_path, bytes(data)))
    assert caught.value.offset == 8


def test_a_scene_is_pickled_as_the_paths_of_its_files(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(path, "mesh.rtg")
    world = Scene()
    world.add_instances(world.add_mesh("mesh.rtg"), np.tile(np.eye(4), (3, 1, 1)))
    world.add_light(DirectionalLight((0, 0, -1)))
    world.remove(1)
    pickled = pickle.dumps(world)
    assert len(pickled) < 10_000
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)
    assert len(again) == 2
    assert again.lights == world.lights
    np.testing.assert_array_equal(again.bounds(), world.bounds())
    np.testing.assert_array_equal(again.meshes[0].page(0), world.meshes[0].page(0))
    assert copy.deepcopy(world).meshes[0] is world.meshes[0]


def test_a_file_that_is_another_than_the_pickled_one_is_refused(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "mesh.rtg"
    shutil.copy(path, target)
    pickled = pickle.dumps(Geometry.open(target))
    scene.build(np.eye(3), np.array([[0, 1, 2]]), target)
    with pytest.raises(InputError, match=r"mesh.rtg has changed since the object was pickled"):
        pickle.loads(pickled)
    target.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(pickled)

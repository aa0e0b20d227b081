"""Laws of frames for any scene and camera. Each test asserts that its case occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
import warp as wp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.scene.conftest import bumpy_ball
from torch import Tensor

from rooftop.errors import GeometryFileError
from rooftop.scene import Camera, GBuffer, Geometry, Renderer, Scene, layouts
from rooftop.scene.gbuffers import OUTPUTS
from rooftop.scene.rendering import memory, sort_clusters
from rooftop.scene.rendering.stages import MOST_GRAPHS, Stages

Floats = NDArray[np.float64]
SIZE = {"width": 160, "height": 120}
ALL = tuple(OUTPUTS)
IN_CUDA_CPP = {
    *("persistent_cull", "cull_groups", "sort_tiles", "merge_tiles", "rasterize_clusters"),
    *("reduce_tiles", "reduce_rest"),
}


def moved(*shift: float, scale: float = 1.0) -> Floats:
    matrix = np.diag([scale, scale, scale, 1.0])
    matrix[:3, 3] = shift
    return matrix


def row_of(mesh: Geometry, distances: Sequence[float]) -> Scene:
    """Instances at increasing distances from a camera at the origin that looks along x. No instance hides another."""
    scene = Scene()
    number = scene.add_mesh(mesh)
    for i, distance in enumerate(distances):
        angle = 0.9 * (i - (len(distances) - 1) / 2)
        scene.add_instance(number, moved(distance, np.sin(angle) * distance / 2, 0.0))
    return scene


WIDE = Camera.look_at((1, 0, 0), (0, 0, 0), width=16384, height=10923)  # 10922 rows are fewer than 2^31 / 12 pixels
AHEAD = Camera.look_at((0, 0, 0), (1, 0, 0), fov_y_degrees=70, **SIZE)


def same(a: GBuffer, b: GBuffer, names: Sequence[str]) -> bool:
    return all(torch.equal(a[name].nan_to_num(-7.0), b[name].nan_to_num(-7.0)) for name in names)


# ---- one cut, without holes ------------------------------------------------------------------------------------------


def test_on_every_path_one_cluster_is_drawn(ball: Geometry, paths_of: Callable[[Geometry], Any], device: str) -> None:
    """At every distance, the whole surface is drawn, and no part of it at two levels."""
    scene = row_of(ball, [2.5, 6.0, 15.0, 60.0])
    renderer = Renderer(scene, device, occlusion=False)
    frame = renderer.render(AHEAD)
    assert len(frame.stats.levels) >= 3
    paths = paths_of(ball)
    for instance in range(1, len(scene)):  # the first instance is not completely in the picture
        assert paths.counts(renderer, frame, instance) == {1}


def test_every_ray_leaves_a_closed_surface_as_often_as_it_enters(ball: Geometry, device: str) -> None:
    """Levels that meet within one surface leave neither a gap nor an overlap, not even of a pixel."""
    scene = Scene()
    scene.add_instance(scene.add_mesh(ball), moved(0, 0, 0, scale=8.0))
    levels: set[int] = set()
    for k, distance in enumerate([11.0, 14.0, 40.0, 300.0]):
        eye = distance * np.array([np.cos(k), np.sin(k) * 0.8, 0.6])
        camera = Camera.look_at(eye, (0, 0, 0), fov_y_degrees=60, **SIZE)
        frame = Renderer(scene, device, occlusion=False, pixel_error=1.5).render(camera, ALL)
        covered = frame["overdraw"]
        fine = Renderer(scene, device, occlusion=False, pixel_error=0.01).render(camera, ("overdraw",))["overdraw"] > 0
        assert fine.sum() >= 20
        assert ((covered > 0) != fine).sum() <= 0.02 * fine.sum()
        assert (covered % 2 == 0).all()
        assert (frame["depth"].isfinite() == (covered > 0)).all()
        levels.update(frame.stats.levels)
        background = frame["depth"][0].isinf().cpu().numpy()
        label, parts = scipy.ndimage.label(background)
        assert all((label[[0, -1]] == part).any() or (label[:, [0, -1]] == part).any() for part in range(1, parts + 1))
    assert len(levels) >= 4


def test_levels_mix_within_one_surface_without_gaps(log: Geometry, device: str) -> None:
    """Along the surface, levels become coarser from near to far."""
    scene = Scene()
    scene.add_instance(scene.add_mesh(log))
    for eye in [(21, 2, 2), (26, -1.5, 1), (23, 0, 0)]:
        camera = Camera.look_at(eye, (0, 0, 0), fov_y_degrees=90, **SIZE)
        frame = Renderer(scene, device, occlusion=False, pixel_error=0.3).render(camera, ("depth", "overdraw"))
        assert len(frame.stats.levels) >= 3
        assert (frame["overdraw"] > 0).sum() > 200
        assert (frame["overdraw"] % 2 == 0).all()


def test_a_camera_within_a_cube_sees_large_triangles_on_all_sides(cube: Geometry, device: str) -> None:
    scene = Scene()
    scene.add_instance(scene.add_mesh(cube))
    for target in [(1, 0.2, 0.1), (-1, 0.3, 1), (0, -1, 0.5), (0.5, 0.5, 1)]:
        camera = Camera.look_at((0.3, -0.2, 0.1), target, up=(0.1, 0.2, 1), fov_y_degrees=110, **SIZE)
        frame = Renderer(scene, device).render(camera, ("depth", "overdraw"))
        assert frame.stats.large_triangles > 0
        assert (frame["overdraw"] == 1).all()
        assert torch.allclose(frame["depth"][0].cpu().double(), depth_in_cube(camera), rtol=1e-4)


@pytest.mark.parametrize(("reach", "near"), [(1e3, 1e-6), (1e4, 1e-4), (1e5, 0.01), (1e6, 0.01)])
def test_a_vast_floor_passes_under_the_camera(
    built: Callable[..., Geometry], reach: float, near: float, device: str
) -> None:
    """Two triangles whose corners are far away or behind the camera. Clipping changes neither places nor depths."""
    corners = reach * np.array([[-1, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0]])
    scene = Scene()
    scene.add_instance(scene.add_mesh(built(f"floor{reach}", corners, np.array([[0, 1, 2], [0, 2, 3]]))))
    random, right = np.random.default_rng(0), []
    for _ in range(8):
        eye = random.uniform(-0.9, 0.9, 3) + np.array((0, 0, 1))
        camera = Camera.look_at(eye, eye + random.normal(size=3), (0.1, 0.2, 1), 70, 64, 48, near=near)
        frame = Renderer(scene, device).render(camera, ("depth",))
        x, y = np.meshgrid(np.arange(64), np.arange(48))
        rays = np.stack([(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy, np.ones_like(x, float)], -1)
        directions = rays @ camera.world_to_camera[:3, :3]
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = -eye[2] / directions[..., 2]
            on = (depth > near) & (abs(eye[:2] + depth[..., None] * directions[..., :2]) < reach).all(-1)
        ours = frame["depth"][0].cpu().numpy()
        assert (np.isfinite(ours) == on).mean() > 0.99
        both = on & np.isfinite(ours)
        # Corners are float32 in view space. If the floor is seen at a flat angle, 1/256 of a pixel makes a large
        # difference in depth.
        right += [np.isclose(ours, depth, rtol=0.03 + 4e-7 * reach)[both]]
    assert np.concatenate(right).sum() > 3000
    assert np.concatenate(right).mean() > 0.97


def depth_in_cube(camera: Camera) -> Tensor:
    """The depth of the cube from -1 to 1 around a camera: the first face along each ray."""
    x, y = np.meshgrid(np.arange(camera.width), np.arange(camera.height))
    rays = np.stack([(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy, np.ones_like(x, float)], -1)
    directions = rays @ camera.world_to_camera[:3, :3]
    with np.errstate(divide="ignore"):
        reach = np.where(directions > 0, 1 - camera.position, -1 - camera.position) / directions
    return torch.from_numpy(reach.min(-1))


# ---- culling changes nothing but the cost ----------------------------------------------------------------------------


def crowd(ball: Geometry, cube: Geometry) -> Scene:
    """Balls behind a wall of cubes with a gap."""
    scene = Scene()
    a_ball, a_cube = scene.add_mesh(ball), scene.add_mesh(cube)
    for y in range(-3, 4):
        scene.add_instance(a_ball, moved(9.0 + abs(y), 2.2 * y, 0.3 * y))
        if y != 1:
            scene.add_instance(a_cube, moved(5.0, 2.0 * y, 0.0) @ np.diag([0.2, 1.0, 1.5, 1.0]))
    return scene


def flight(frames: int) -> list[Camera]:
    return [Camera.look_at((0, 0.7 * k - 2, 0.2 * k), (9, 0.4 * k, 0), fov_y_degrees=65, **SIZE) for k in range(frames)]


def test_leaving_out_what_is_hidden_changes_no_bit(ball: Geometry, cube: Geometry, device: str) -> None:
    scene = crowd(ball, cube)
    leaves_out, draws_all = Renderer(scene, device), Renderer(scene, device, occlusion=False)
    occluded = second_pass = saved = 0
    for k, camera in enumerate(flight(7)):
        scene.move(2, moved(9.0, 2.2 * -2 + 0.5 * k, 0.0))
        ours, whole = leaves_out.render(camera, ALL), draws_all.render(camera, ALL)
        assert same(ours, whole, [name for name in ALL if name != "overdraw"])
        occluded += ours.stats.occluded
        second_pass += ours.stats.second_pass_clusters
        saved += whole.stats.clusters - ours.stats.clusters
    assert occluded > 0
    assert second_pass > 0
    assert saved > 0


def test_random_scenes_seen_from_anywhere(
    ball: Geometry, cube: Geometry, log: Geometry, photograph: Geometry, device: str
) -> None:
    """Objects are stretched, rotated, mirrored and inside each other, with the camera among them. Pictures are equal
    bit for bit with culling on and off, and with two orders of threads."""
    met = Counter[str]()

    @settings(max_examples=15, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def hold(seed: int) -> None:
        random = np.random.default_rng(seed)
        scene = Scene()
        meshes = [scene.add_mesh(mesh) for mesh in (ball, cube, log, photograph)]
        for _ in range(random.integers(1, 12)):
            matrix = moved(*random.uniform(-6, 6, 3))
            matrix[:3, :3] = random.normal(size=(3, 3)) @ np.diag(random.uniform(0.2, 1.5, 3))
            if np.linalg.cond(matrix[:3, :3]) < 1e3:
                scene.add_instance(int(random.choice(meshes)), matrix)
        renderers = [Renderer(scene, device), Renderer(scene, device), Renderer(scene, device, occlusion=False)]
        renderers[1]._threads = 29
        eye, target = random.uniform(-9, 9, 3), random.uniform(-3, 3, 3)
        make = Camera.look_at if random.integers(2) else Camera.parallel
        for _ in range(3):
            eye, target = eye + random.normal(0, 0.4, 3), target + random.normal(0, 0.3, 3)
            size = {"view_height": 9.0} if make == Camera.parallel else {}
            camera = make(eye, target, (0.1, 0.2, 1), width=73, height=59, **size)
            frames = [renderer.render(camera, ALL) for renderer in renderers]
            assert same(frames[0], frames[1], [name for name in ALL if name != "overdraw"])
            assert same(frames[0], frames[2], [name for name in ALL if name != "overdraw"])
            met["occluded"] += frames[0].stats.occluded
            met["second pass"] += frames[0].stats.second_pass_clusters
            met["large"] += frames[0].stats.large_triangles
            met["levels"] = max(met["levels"], len(frames[0].stats.levels))

    hold()
    assert min(met["occluded"], met["second pass"], met["large"]) > 0
    assert met["levels"] >= 3


def test_a_cut_to_another_place_shows_nothing_of_the_frame_before(ball: Geometry, cube: Geometry, device: str) -> None:
    scene = crowd(ball, cube)
    renderer = Renderer(scene, device)
    for eye in [(0, 0, 0), (18, 3, 2), (5, 0, 0.1), (9, 0, 30)]:
        camera = Camera.look_at(eye, (9, 1, 0), **SIZE)
        assert same(
            renderer.render(camera), Renderer(scene, device, occlusion=False).render(camera), ("depth", "instance")
        )


def test_the_order_of_threads_does_not_show(ball: Geometry, cube: Geometry, device: str) -> None:
    scene = crowd(ball, cube)
    _, transforms = scene.instances()
    seen = 9  # beside the wall
    again = scene.add_instance(0, transforms[seen])  # in the same place, so that every depth occurs twice
    renderers = [Renderer(scene, device) for _ in range(3)]
    for renderer, threads in zip(renderers, [renderers[0]._threads, 7, 333], strict=True):
        renderer._threads = threads
    for camera in flight(3):
        first, *others = [renderer.render(camera, ALL) for renderer in renderers]
        assert all(same(first, other, [name for name in ALL if name != "overdraw"]) for other in others)
        assert first.stats.clusters == others[0].stats.clusters
        assert (first["instance"] == again).any()
        assert not (first["instance"] == seen).any()  # among equal depths, the last one stays


def test_cuda_cpp_draws_what_warp_draws(
    ball: Geometry, cube: Geometry, cuda_on_cpu: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA C++ kernels, with threads in random order, give the same bits, even if lists must grow."""
    draws_what_warp_draws("cpu", crowd(ball, cube))
    assert set(cuda_on_cpu) == IN_CUDA_CPP
    assert min(cuda_on_cpu.values()) >= 7
    monkeypatch.setattr("rooftop.scene.rendering.chains.ROOM", dict.fromkeys(memory.ROOM, 2))
    draws_what_warp_draws("cpu", crowd(ball, cube), frames=2)
    monkeypatch.setattr(sort_clusters, "MOST", 0)  # torch sorts the clusters of the first pass
    cuda_on_cpu.clear()
    draws_what_warp_draws("cpu", crowd(ball, cube), frames=2)
    assert 0 < cuda_on_cpu["merge_tiles"] < cuda_on_cpu["persistent_cull"]


@pytest.mark.gpu
def test_cuda_cpp_draws_what_warp_draws_on_a_gpu(
    ball: Geometry, cube: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws_what_warp_draws("cuda", crowd(ball, cube))
    # torch's sort is used for more clusters, at first only in the first pass
    monkeypatch.setattr(sort_clusters, "MOST", 0)
    draws_what_warp_draws("cuda", crowd(ball, cube))
    monkeypatch.setattr(sort_clusters, "MOST_OF_SECOND", 0)
    draws_what_warp_draws("cuda", crowd(ball, cube))


def draws_what_warp_draws(device: str, scene: Scene, frames: int = 5) -> None:
    for one_sided in (False, True):
        cuda, warp = (
            Renderer(scene, device, one_sided=one_sided, pixel_error=0.5 + one_sided, kernels=kernels)
            for kernels in ("cuda", "warp")
        )
        second_pass = large = 0
        for camera in [*flight(frames), *odd_views()][: frames + 3]:
            ours, theirs = cuda.render(camera, ALL), warp.render(camera, ALL)
            assert same(ours, theirs, ALL)
            assert ours.stats == theirs.stats
            hzbs = [renderer._memory.tensors["hzb_before"] for renderer in (cuda, warp) if renderer._memory]
            assert torch.equal(*hzbs)
            second_pass += ours.stats.second_pass_clusters
            large += ours.stats.large_triangles
        assert (second_pass > 0 and large > 0) or frames < 5


def odd_views() -> list[Camera]:
    """Cameras inside a mesh, so that triangles reach behind them; parallel cameras; and one of a single pixel."""
    return [
        Camera.look_at((5, 0, 0), (9, 1, 0), **SIZE),
        Camera.parallel((-4, 0, 2), (5, 0, 0), view_height=8.0, **SIZE),
        Camera.look_at((0, 0, 0), (9, 1, 0), width=1, height=1),
    ]


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 1), (7, 33), (64, 64), (65, 130)])
def test_farthest_depths_of_ever_larger_squares(ball: Geometry, width: int, height: int, device: str) -> None:
    renderer = Renderer(row_of(ball, [3.0]), device)
    camera = Camera.look_at((0, 0, 0), (1, 0.2, 0), fov_y_degrees=90, width=width, height=height)
    depth = renderer.render([camera, camera], ("depth",))["depth"]
    assert renderer._memory is not None
    found, starts = renderer._memory.tensors["hzb_before"].cpu(), renderer._memory.tensors["hzb_at"].tolist()
    expected = (camera.near / depth).cpu()  # (views, H, W), 0 for background
    for level in range(1, max(width - 1, height - 1).bit_length() + 1):
        padded = torch.nn.functional.pad(expected, (0, expected.shape[2] % 2, 0, expected.shape[1] % 2), value=1.0)
        expected = padded.unfold(1, 2, 2).unfold(2, 2, 2).amin((-1, -2))
        texels = expected[0].numel()
        for view, of_view in enumerate(expected):
            start = starts[view][level]
            assert torch.allclose(found[start : start + texels], of_view.flatten(), rtol=1e-6)
    assert expected.shape[1:] == (1, 1)


def test_lists_without_enough_room_grow(
    ball: Geometry, cube: Geometry, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = crowd(ball, cube)
    cameras = [*flight(4), Camera.look_at((5, 0, 0), (9, 1, 0), **SIZE)]
    roomy = Renderer(scene, device)
    expected = [roomy.render(camera, ALL) for camera in cameras]
    monkeypatch.setattr("rooftop.scene.rendering.chains.ROOM", dict.fromkeys(memory.ROOM, 1))
    tight = Renderer(scene, device)
    assert all(same(tight.render(camera, ALL), frame, ALL) for camera, frame in zip(cameras, expected, strict=True))
    assert tight._memory is not None
    assert min(tight._memory.room.values()) > 1


def test_what_is_too_much_for_a_frame_is_said(ball: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_THREADS", 128 * 20)
    with pytest.raises(ValueError, match="more than 20 entries in its list 'visible': render fewer views at a time"):
        Renderer(row_of(ball, [3.0, 4.0]), "cpu").render(AHEAD)


def test_a_batch_is_its_cameras_one_by_one(ball: Geometry, cube: Geometry, device: str) -> None:
    scene, cameras = crowd(ball, cube), flight(3)
    batch = Renderer(scene, device)
    alone = [Renderer(scene, device) for _ in cameras]
    for shift in (0.0, 0.4):
        views = [
            Camera.look_at(camera.position + np.array((0, shift, 0)), (9, 0, 0), fov_y_degrees=65, **SIZE)
            for camera in cameras
        ]
        together = batch.render(views, ALL)
        for k, (renderer, view) in enumerate(zip(alone, views, strict=True)):
            single = renderer.render(view, ALL)
            assert all(
                torch.equal(together[name][k].nan_to_num(-7), single[name][0].nan_to_num(-7))
                for name in ALL
                if name != "overdraw"
            )


@pytest.mark.gpu
def test_the_cpu_and_a_gpu_agree(ball: Geometry, cube: Geometry) -> None:
    scene = crowd(ball, cube)
    here, there = Renderer(scene, "cpu"), Renderer(scene, "cuda")
    for camera in flight(4):
        ours, theirs = here.render(camera, ALL), there.render(camera, ALL)
        for name in ("instance", "cluster", "triangle", "level"):
            assert (ours[name] != theirs[name].cpu()).float().mean() <= 1e-3, name
        agree = ours["triangle"] == theirs["triangle"].cpu()
        assert torch.allclose(ours["depth"][agree], theirs["depth"].cpu()[agree], rtol=1e-5)


# ---- compared with a plain rasterizer of the whole mesh --------------------------------------------------------------


def plain_depth(triangles: Floats, camera: Camera) -> Floats:
    """(H, W) depths of triangles (T, 3, 3) in the world, all in front of the camera, computed for each pixel of each
    triangle's box."""
    view = triangles @ camera.world_to_camera[:3, :3].T + camera.world_to_camera[:3, 3]
    z = view[..., 2]
    over = np.ones_like(z) if camera.orthographic else z
    u = camera.fx * view[..., 0] / over + camera.cx
    v = camera.fy * view[..., 1] / over + camera.cy
    linear = z if camera.orthographic else 1 / z
    depth = np.full((camera.height, camera.width), np.inf)
    left, top = np.ceil(u.min(1)).astype(int), np.ceil(v.min(1)).astype(int)
    wide, high = (np.floor(u.max(1)) - left).max(initial=0) + 1, (np.floor(v.max(1)) - top).max(initial=0) + 1
    for dy in range(int(high)):
        for dx in range(int(wide)):
            x, y = left + dx, top + dy
            edges = [
                (u[:, b] - u[:, a]) * (y - v[:, a]) - (v[:, b] - v[:, a]) * (x - u[:, a])
                for a, b in ((1, 2), (2, 0), (0, 1))
            ]
            parts = np.stack(edges, 1)
            area = parts.sum(1)
            inside = (parts * np.sign(area)[:, None] >= 0).all(1) & (area != 0)
            inside &= (x >= 0) & (x < camera.width) & (y >= 0) & (y < camera.height)
            at = (parts[inside] * linear[inside]).sum(1) / area[inside]
            np.minimum.at(depth, (y[inside], x[inside]), at if camera.orthographic else 1 / at)
    return depth


def all_triangles(mesh: Geometry, transform: Floats) -> Floats:
    """The triangles (T, 3, 3) of the finest level, in the world."""
    finest = np.flatnonzero(mesh.clusters()[:, layouts.CLUSTER_COUNTS] >> 24 == 0)
    corners = [decoded.positions[decoded.triangles] for decoded in map(mesh.decode, finest.tolist())]
    return np.concatenate(corners) @ transform[:3, :3].T + transform[:3, 3]


CAMERAS = {
    "perspective": Camera.look_at((3, 0.4, 0.8), (0, 0, 0), fov_y_degrees=50, **SIZE),
    "far": Camera.look_at((-9, 3, 5), (0, 0.5, 0), up=(1, 1, 0), fov_y_degrees=20, **SIZE),
    "parallel": Camera.parallel((2, 2, 3), (0, 0, 0), view_height=2.9, **SIZE),
    "OpenCV's": Camera.from_intrinsics(
        [[150.0, 0, 70.3], [0, 170.0, 66.6], [0, 0, 1]], Camera.look_at((0, 3, 1), (0, 0, 0)).world_to_camera, 160, 120
    ),
}


@pytest.mark.parametrize("kind", CAMERAS)
def test_every_triangle_of_the_mesh_where_no_error_is_allowed(ball: Geometry, kind: str, device: str) -> None:
    camera = CAMERAS[kind]
    scene = Scene()
    scene.add_instance(scene.add_mesh(ball))
    frame = Renderer(scene, device, pixel_error=0).render(camera, ("depth", "level"))
    assert frame.stats.levels == (0,)
    ours = frame["depth"][0].cpu().numpy()
    plain = plain_depth(all_triangles(ball, np.eye(4)), camera)
    assert np.isfinite(plain).sum() > 2000
    close = np.isclose(ours, plain, rtol=2e-4)  # corners are rounded to 1/256 pixel
    assert close.mean() > 0.995  # the other pixels are on an edge of a nearer object
    assert (np.isfinite(ours) != np.isfinite(plain)).mean() < 0.002


@wp.kernel
def distances(mesh: wp.uint64, points: wp.array(dtype=wp.vec3), found: wp.array(dtype=wp.float32)):  # type: ignore[valid-type]
    i = wp.tid()
    query = wp.mesh_query_point_no_sign(mesh, points[i], 10.0)
    found[i] = wp.length(points[i] - wp.mesh_eval_position(mesh, query.face, query.u, query.v))


def distances_to(triangles: Floats, points: Floats) -> Floats:
    """Distances of points (N, 3) to the nearest of the triangles (T, 3, 3)."""
    corners = wp.array(triangles.reshape(-1, 3), dtype=wp.vec3, device="cpu")
    mesh = wp.Mesh(corners, wp.array(np.arange(3 * len(triangles)), dtype=wp.int32, device="cpu"))
    found = wp.zeros(len(points), dtype=wp.float32, device="cpu")
    wp.launch(distances, len(points), [mesh.id, wp.array(points, dtype=wp.vec3, device="cpu"), found], device="cpu")
    return np.asarray(found.numpy(), dtype=np.float64)


@pytest.mark.parametrize("kind", CAMERAS)
def test_within_a_pixel_of_the_whole_mesh(ball: Geometry, kind: str, device: str) -> None:
    """Each pixel shows a point of the mesh, to within the width of a pixel there, and nothing is missing."""
    camera = CAMERAS[kind]
    scene = Scene()
    scene.add_instance(scene.add_mesh(ball))
    frame = Renderer(scene, device).render(camera, ("depth", "level"))
    assert max(frame.stats.levels) >= 1
    depth = frame["depth"][0].cpu().numpy().astype(float)
    triangles = all_triangles(ball, np.eye(4))
    covered, plain = np.isfinite(depth), np.isfinite(plain_depth(triangles, camera))
    assert not (covered & ~scipy.ndimage.maximum_filter(plain, 3)).any()
    assert not (plain & ~scipy.ndimage.maximum_filter(covered, 3)).any()
    y, x = np.nonzero(covered)
    z = depth[covered]
    # the sideways distance of each pixel's ray for each unit of depth
    pixel = np.ones_like(z) if camera.orthographic else z
    aside = np.stack([(x - camera.cx) / camera.fx * pixel, (y - camera.cy) / camera.fy * pixel, z], 1)
    points = (aside - camera.world_to_camera[:3, 3]) @ camera.world_to_camera[:3, :3]
    off = distances_to(triangles, points) * max(camera.fx, camera.fy) / pixel  # pixels
    assert off.max() <= 1.01  # corners are rounded to 1/256 pixel
    assert off.max() > 0.05


triangle_soups = st.integers(1, 40).flatmap(
    lambda count: st.tuples(st.just(count), st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.4, 3.0]))
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(soup=triangle_soups)
def test_loose_triangles_as_a_plain_rasterizer_has_them(
    built: Callable[..., Geometry], soup: tuple[int, int, float]
) -> None:
    count, seed, size = soup
    random = np.random.default_rng(seed)
    corners = random.uniform(-1, 1, (count, 1, 3)) + size * random.uniform(-1, 1, (count, 3, 3))
    mesh = built(f"soup{count}-{seed}-{size}", corners.reshape(-1, 3), np.arange(3 * count).reshape(-1, 3))
    scene = Scene()
    scene.add_instance(scene.add_mesh(mesh))
    eye = random.normal(size=3)
    camera = Camera.look_at(9 * eye / np.linalg.norm(eye), (0, 0, 0), (0.3, 0.5, 1), 50, 61, 47)
    frame = Renderer(scene, "cpu", pixel_error=0).render(camera, ("depth",))
    ours = frame["depth"][0].numpy()
    plain = plain_depth(all_triangles(mesh, np.eye(4)), camera)
    flat = np.isfinite(ours) != np.isfinite(plain)
    assert flat.mean() < 0.01
    assert np.isclose(ours, plain, rtol=1e-3).mean() > 0.97


# ---- outputs of a pixel ----------------------------------------------------------------------------------------------


def test_a_square_says_what_it_is(built: Callable[..., Geometry], device: str) -> None:
    """Depth, normal, uv, material and ids of a square in the plane x = 0, seen along -x from x = 4."""
    corners = np.array([[0, -1, -1], [0, 1, -1], [0, 1, 1], [0, -1, 1]], dtype=float)
    mesh = built(
        "square",
        corners,
        np.array([[0, 1, 2], [0, 2, 3]]),
        normals=np.tile([1.0, 0, 0], (4, 1)),
        uv=np.array([[0, 0], [1, 0], [1, 1], [0, 1.0]]),
        materials=np.array([3, 700]),
    )
    scene = Scene()
    number = scene.add_mesh(mesh)
    scene.add_instance(number, moved(-100, 0, 0))
    scene.add_instance(number)
    camera = Camera.look_at((4, 0, 0), (0, 0, 0), fov_y_degrees=90, width=81, height=81)
    frame = Renderer(scene, device).render(camera, ALL)
    # Half of the picture's height is 4 world units, 40.5 pixels; y grows to the right, z up.
    row, column = 40 - 5, 40 + 7
    y, z = 7 * 4 / 40.5, 5 * 4 / 40.5
    at = (0, row, column)
    assert frame["instance"][at] == 1
    assert frame["depth"][at].item() == pytest.approx(4.0, rel=1e-6)
    assert frame["normal"][at].tolist() == pytest.approx([1, 0, 0], abs=1e-3)
    assert frame["uv"][at].tolist() == pytest.approx([(y + 1) / 2, (z + 1) / 2], abs=2e-3)
    assert {frame["material"][0, 40 + 4, 40 + 6].item(), frame["material"][0, 40 - 6, 40 - 4].item()} == {3, 700}
    assert frame["velocity"][at].tolist() == [0, 0]
    assert frame["cluster"][at] == 0
    assert frame["level"][at] == 0
    corner = (0, 0, 0)
    assert (frame["depth"][corner], frame["instance"][corner], frame["material"][corner]) == (torch.inf, -1, -1)
    assert frame["uv"][corner].isnan().all()
    assert frame["color"][corner].sum() == 0
    behind = frame["instance"] == 0
    assert torch.allclose(frame["depth"][behind], torch.tensor(104.0, device=frame["depth"].device), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-11, 1.0, 1e10])
def test_attributes_at_any_size(built: Callable[..., Geometry], scale: float, device: str) -> None:
    """The uv of a square is the point where a pixel meets it, whatever the units."""
    x, y = np.meshgrid(np.linspace(0, 1, 9), np.linspace(0, 1, 9), indexing="ij")
    corner = (np.arange(8)[:, None] * 9 + np.arange(8)).ravel()
    faces = np.concatenate(
        [np.stack([corner, corner + 9, corner + 1], 1), np.stack([corner + 1, corner + 9, corner + 10], 1)]
    )
    places = np.stack([x, y, 0 * x], -1).reshape(-1, 3)
    scene = Scene()
    scene.add_instance(scene.add_mesh(built("grid", places, faces, uv=places[:, :2])), moved(0, 0, 0, scale=scale))
    eye = scale * np.array((0.5, 0.5, 1))
    camera = Camera.look_at(eye, eye * (1, 1, 0), (0, 1, 0), 45, 40, 40, near=0.01 * scale)
    frame = Renderer(scene, device).render(camera, ("uv", "normal"))
    row, column = np.mgrid[:40, :40]
    expected = np.stack([0.5 + (column - 19.5) / camera.fx, 0.5 - (row - 19.5) / camera.fy], -1)
    assert np.abs(frame["uv"][0].cpu().numpy() - expected).max() < 2e-3
    assert (frame["normal"][..., 2] > 0.999).all()


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_face_normals_of_meshes_of_any_units(
    built: Callable[..., Geometry], small_ball: tuple[Floats, NDArray[np.int64]], size: float, device: str
) -> None:
    vertices, faces = small_ball
    scene = Scene()
    scene.add_instance(scene.add_mesh(built(f"ball{size}", size * vertices, faces)))
    camera = Camera.look_at(size * np.array((3, 1, 1)), (0, 0, 0), width=40, height=30, near=0.01 * size)
    frame = Renderer(scene, device).render(camera, ("depth", "normal"))
    shown = frame["depth"].isfinite()
    assert shown.sum() > 100
    assert torch.allclose(frame["normal"][shown].norm(dim=1), torch.ones(1, device=shown.device), atol=1e-5)


def test_velocity_is_how_far_the_point_has_come(cube: Geometry, device: str) -> None:
    scene = Scene()
    number = scene.add_mesh(cube)
    scene.add_instance(number)
    scene.add_instance(number, moved(0, 5, 0))
    renderer = Renderer(scene, device)
    first, second = (Camera.look_at((9, k, 1), (0, 1, 0), **SIZE) for k in (0.0, 0.5))
    still = renderer.render(first, ("velocity",))
    assert not still["velocity"].any()
    scene.move(1, moved(0, 4.5, 0.25))
    frame = renderer.render(second, ("depth", "velocity", "instance"))
    y, x = np.mgrid[:120, :160]
    for instance, shift in ((0, np.zeros(3)), (1, np.array([0, -0.5, 0.25]))):
        shown = (frame["instance"][0] == instance).cpu().numpy()
        assert shown.sum() > 50
        depth = frame["depth"][0].cpu().numpy()[shown].astype(float)
        rays = np.stack(
            [(x[shown] - second.cx) / second.fx, (y[shown] - second.cy) / second.fy, np.ones(shown.sum())], 1
        )
        world = (rays * depth[:, None] - second.world_to_camera[:3, 3]) @ second.world_to_camera[:3, :3]
        then = (world - shift) @ first.world_to_camera[:3, :3].T + first.world_to_camera[:3, 3]
        before = np.stack(
            [first.fx * then[:, 0] / then[:, 2] + first.cx, first.fy * then[:, 1] / then[:, 2] + first.cy], 1
        )
        expected = np.stack([x[shown], y[shown]], 1) - before
        assert np.abs(frame["velocity"][0].cpu().numpy()[shown] - expected).max() < 0.02


def test_what_was_behind_the_camera_has_come_from_nowhere(cube: Geometry, device: str) -> None:
    scene = Scene()
    scene.add_instance(scene.add_mesh(cube))
    renderer = Renderer(scene, device)
    renderer.render(Camera.look_at((0, 0, 0.2), (5, 0, 0.2), **SIZE), ("velocity",))
    frame = renderer.render(Camera.look_at((0, 0, 0.2), (-5, 0, 0.2), **SIZE), ("velocity",))
    assert frame["velocity"].isnan().all()


def test_a_camera_stays_as_it_was_made(cube: Geometry) -> None:
    pose = Camera.look_at((9, 0, 0), (0, 0, 0)).world_to_camera.copy()
    camera = Camera.from_intrinsics([[100, 0, 80], [0, 100, 60], [0, 0, 1]], pose, **SIZE)
    pose[0, 3] += 1
    assert camera.world_to_camera[0, 3] == pose[0, 3] - 1
    with pytest.raises(ValueError, match="read-only"):
        camera.world_to_camera[0, 3] = 5
    assert camera in [camera]
    assert len({camera, camera}) == 1
    wide = Camera.look_at((9, 0, 0), (0, 0, 0), width=np.int64(160), height=np.int32(120))
    assert isinstance(wide.width, int)


def test_normals_follow_their_instances(ball: Geometry, cube: Geometry, device: str) -> None:
    """The normal of a stretched, rotated or mirrored face remains perpendicular to the face."""
    turn, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))
    for signs in ((1, 1, 1), (-1, 1, 1)):
        matrix = np.eye(4)
        matrix[:3, :3] = turn @ np.diag([1.5, 0.5, 0.8]) @ np.diag(signs)
        scene = Scene()
        scene.add_instance(scene.add_mesh(cube), matrix)
        camera = Camera.look_at((4, 3, 2), (0, 0, 0), **SIZE)
        frame = Renderer(scene, device, one_sided=True).render(camera, ("normal", "overdraw"))
        assert set(frame["overdraw"].unique().tolist()) == {0, 1}  # a convex body, seen once
        normals = frame["normal"][frame["overdraw"] > 0].cpu().double().numpy()
        sides = np.linalg.inv(matrix[:3, :3]).T @ np.concatenate([np.eye(3), -np.eye(3)]).T
        sides /= np.linalg.norm(sides, axis=0)
        assert (normals @ sides).max(1).min() > 1 - 1e-5


def test_a_surface_is_lit_from_the_side_that_is_seen(built: Callable[..., Geometry], device: str) -> None:
    """A visible surface is lit even if its normals point away from the camera, as happens along a silhouette."""
    corners = np.array([[-2, -2, 0], [2, -2, 0], [0, 2, 0]], dtype=float)
    leaning = np.tile([0.0, 0.1, 1.0], (3, 1))
    scene = Scene()
    scene.add_instance(scene.add_mesh(built("leaning", corners, np.array([[0, 1, 2]]), normals=leaning)))
    for height, dark in ((0.2, False), (-0.2, True)):  # light comes from above
        camera = Camera.look_at((0, -8, height), (0, 0, 0), width=41, height=41, fov_y_degrees=20)
        frame = Renderer(scene, device).render(camera, ("color", "normal", "depth"))
        shown = frame["depth"].isfinite()
        assert shown.any()
        assert ((frame["color"][shown].amax(1) < 0.3) == dark).all()
        assert (frame["normal"][shown][:, 2] > 0.9).all()


def test_light_comes_from_where_it_is_said_to(ball: Geometry, device: str) -> None:
    """The light's direction may be set again before each frame. The length of the vector has no effect."""
    scene, camera = Scene(), Camera.look_at((0, -6, 0), (0, 0, 0), width=64, height=64)
    scene.add_instance(scene.add_mesh(ball))
    renderer = Renderer(scene, device, light=(-1e30, 0, 0))
    left = renderer.render(camera, ("color",))["color"]
    renderer.light = (1e-30, 0.0, 0.0)
    right = renderer.render(camera, ("color",))["color"]
    assert left[:, :, :32].sum() > 1.2 * left[:, :, 32:].sum()
    assert right[:, :, 32:].sum() > 1.2 * right[:, :, :32].sum()
    usual, again = (Renderer(scene, device, light=light) for light in ((0.4, 0.3, 0.85), (4.0, 3.0, 8.5)))
    colors = [each.render(camera, ("color",))["color"] for each in (Renderer(scene, device), usual, again)]
    assert torch.equal(colors[0], colors[1])
    assert torch.allclose(colors[0], colors[2], atol=1e-6)


def test_statistics_count_what_culling_asked(ball: Geometry, device: str) -> None:
    renderer = Renderer(row_of(ball, [3.0, 9.0]), device)
    for _ in range(2):
        stats = renderer.render(AHEAD).stats
        assert stats.nodes >= 2  # the root of each of the two instances
        assert 0 < stats.clusters <= 32 * stats.groups
    assert renderer.render(Camera.look_at((0, 0, 0), (-1, 0, 0), **SIZE)).stats.groups == 0  # behind


def test_far_from_the_origin_is_as_near_it(ball: Geometry, device: str) -> None:
    far = np.array([3e7, -1e7, 2e6])
    frames = []
    for shift in (np.zeros(3), far):
        scene = Scene()
        scene.add_instance(scene.add_mesh(ball), moved(*shift))
        camera = Camera.look_at(shift + np.array((3, 1, 1)), shift, **SIZE)
        frames.append(Renderer(scene, device).render(camera, ("depth", "triangle")))
    assert (frames[0]["triangle"] == frames[1]["triangle"]).float().mean() > 0.999
    near, away = (frame["depth"].nan_to_num(posinf=0) for frame in frames)
    assert ((near - away).abs() > 1e-5).float().mean() < 1e-3


# ---- missing data and wrong arguments --------------------------------------------------------------------------------


def test_nothing_to_see(ball: Geometry, device: str) -> None:
    scene = Scene()
    empty = Renderer(scene, device).render(AHEAD, ALL)
    number = scene.add_mesh(ball)
    scene.add_instance(number, moved(-50, 0, 0))  # behind
    scene.add_instance(number, moved(50, 500, 0))  # beside
    frame = Renderer(scene, device).render(AHEAD, ALL)
    assert same(empty, frame, ALL)
    assert frame["depth"].isinf().all()
    assert frame.stats.clusters == 0
    assert frame["velocity"].shape == (1, 120, 160, 2)


def test_a_picture_of_one_pixel(ball: Geometry, device: str) -> None:
    scene = row_of(ball, [4.0])
    renderer = Renderer(scene, device)
    for _ in range(2):
        frame = renderer.render(Camera.look_at((0, 0, 0), (1, 0, 0), width=1, height=1, fov_y_degrees=5), ("depth",))
        assert 2.5 < frame["depth"].item() < 3.5


def test_outputs_that_were_not_asked_for_are_named(ball: Geometry) -> None:
    frame = Renderer(row_of(ball, [4.0]), "cpu").render(AHEAD, ("depth", "uv"))
    assert frame.normal is None
    assert Renderer(row_of(ball, [4.0]), "cpu").render(AHEAD, iter(["depth"])).depth is not None  # type: ignore[arg-type]
    assert frame["uv"].isnan().all()  # the mesh has none
    with pytest.raises(KeyError, match=r"'normal' was not rendered.*available: depth, uv"):
        frame["normal"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Camera.look_at((0, 0, 0), (0, 0, 0)), "the same point"),
        (lambda: Camera.look_at((0, 0, 0), (0, 0, 2)), "points along the view"),
        (lambda: Camera.look_at((0, 0, np.nan), (0, 0, 2)), "eye=.*three finite numbers"),
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 0), fov_y_degrees=180), "fov_y_degrees=180"),
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 0), width=0), "width=0: expected an integer number of pixels from 1"),
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 0), near=0), "near=0: expected a number from 1e-30"),
        (lambda: Camera.from_intrinsics(np.eye(4), np.eye(4), 3, 3), "K must be"),
        (lambda: Camera.from_intrinsics([[9, 1, 0], [0, 9, 0], [0, 0, 1]], np.eye(4), 3, 3), "without skew"),
        (lambda: Camera.from_intrinsics(np.eye(3), 2 * np.eye(3), 3, 3), "shape \\(3, 3\\)"),
        (lambda: Camera.from_intrinsics(np.eye(3), np.diag([2, 2, 2, 1]), 3, 3), "a rotation and a shift"),
        (lambda: Camera.parallel((1, 0, 0), (0, 0, 0), view_height=-1), "view_height=-1"),
        (lambda: Scene().add_instance(0), "mesh=0: the scene has no mesh yet: add_mesh adds one"),
        (lambda: Scene().bounds(), "no instances"),
        (lambda: Renderer(Scene(), "cpu").render([]), "no cameras"),
        (lambda: Renderer(Scene(), "cpu").render([AHEAD, Camera.look_at((1, 0, 0), (0, 0, 0))]), "same size"),
        (lambda: Renderer(Scene(), "cpu").render(AHEAD, "depth"), "expected a list of depth, normal"),
        (lambda: Renderer(Scene(), "cpu").render(AHEAD, ["deep"]), "expected a list of depth, normal"),
        (lambda: Renderer(Scene(), "mps"), "expected 'cuda' or 'cpu'"),
        (lambda: Renderer(Scene(), "cpu", pixel_error=-1), "pixel_error=-1"),
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 0), near=1e-44), "near=1e-44: expected a number from 1e-30"),
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 0), near="1"), "near='1': expected a number"),
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 0), width=True), "width=True"),
        (lambda: Camera.look_at((1e-200, 0, 0), (0, 0, 0)), "the same point"),
        (lambda: Camera.look_at("eye", (0, 0, 0)), "eye='eye': expected three"),
        (lambda: Camera.from_intrinsics([[9, 0, 1e6], [0, 9, 0], [0, 0, 1]], np.eye(4), 3, 3), "cx=1000000.0"),
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 1j)), "target=.*expected three"),
        (lambda: Scene().add_instances(False, np.eye(4)[None]), "mesh=False"),
        (lambda: Renderer("x.rtg", "cpu"), "scene='x.rtg': expected a scene.Scene"),  # type: ignore[arg-type]
        (lambda: Renderer(Scene(), "tpu"), "device='tpu': expected 'cuda' or 'cpu'"),
        (lambda: Camera.from_intrinsics("K", np.eye(4), 3, 3), "K='K': expected \\(3, 3\\) numbers"),
        (lambda: Camera.look_at(np.zeros((9, 99)), (0, 0, 0)), "eye=ndarray of shape \\(9, 99\\): expected three"),
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 0), near=np.True_), "near="),
        (lambda: Renderer(Scene(), "cpu", pixel_error=1e39), "pixel_error=1e\\+39"),
        (lambda: Renderer(Scene(), "cpu", light=(0, 0, 0)), "light=\\(0, 0, 0\\): expected a direction"),
        (lambda: Renderer(Scene(), "cpu", light=(1, 0)), "light=\\(1, 0\\): expected a direction"),
        (lambda: Renderer(Scene(), "cpu", light=(1, 0, np.nan)), "three finite numbers that are not all 0"),
        (lambda: Renderer(Scene(), "cpu", light="up"), "light='up': expected three numbers"),  # type: ignore[arg-type]
        (lambda: Renderer(Scene(), "cpu", pixel_error=np.ones(2)), "pixel_error=ndarray of shape"),  # type: ignore[arg-type]
        (lambda: Camera.look_at((1, 0, 0), (0, 0, 0), fov_y_degrees=np.ones(2)), "fov_y_degrees=ndarray of shape"),  # type: ignore[arg-type]
        (lambda: Renderer(Scene(), "cpu").render([WIDE] * 7), "at most 2\\^30 pixels"),
        (lambda: Renderer(Scene(), "cpu").render(None), "cameras=None: expected a scene.Camera"),  # type: ignore[arg-type]
        (lambda: Renderer(Scene(), "cpu").render(["cam"]), "cameras has 'cam'"),  # type: ignore[list-item]
        (lambda: Renderer(Scene(), "cpu").render(AHEAD, None), "outputs=None: expected a list"),  # type: ignore[arg-type]
        (lambda: Renderer(Scene(), "cpu", kernels="triton"), "expected 'warp' or 'cuda', or None"),
        (lambda: Renderer(Scene(), "cpu", kernels="cuda"), "kernels='cuda' needs a GPU, but the device is cpu"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device='cuda:2': expected cuda:0 to cuda:1"):
        Renderer(Scene(), "cuda:2")


def test_a_renderer_says_which_kernels_draw(device: str) -> None:
    assert Renderer(Scene(), device).kernels == ("cuda" if device == "cuda" else "warp")
    assert Renderer(Scene(), device, kernels="warp").kernels == "warp"


def test_a_pixel_error_that_is_set_later_is_checked(ball: Geometry) -> None:
    renderer = Renderer(row_of(ball, [3.0]), "cpu")
    renderer.pixel_error = np.nan
    with pytest.raises(ValueError, match="pixel_error=nan"):
        renderer.render(AHEAD)


def test_more_pages_than_an_array_of_warp_holds_are_drawn(
    ball: Geometry, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read beyond the end of the array that Warp knows. (streaming/test_streamed_frames has a pool of 9 GB.)"""
    expected = Renderer(row_of(ball, [3.0]), device).render(AHEAD, ALL)
    monkeypatch.setattr("rooftop.scene.rendering.uploads.MOST_WORDS", 1000)
    assert same(Renderer(row_of(ball, [3.0]), device).render(AHEAD, ALL), expected, ALL)


def test_up_of_any_length(ball: Geometry) -> None:
    views = [Camera.look_at((1, 2, 3), (0, 0, 0), up=(0, 0, length)) for length in (1.0, 1e-200, 1e29)]
    assert all((view.world_to_camera == views[0].world_to_camera).all() for view in views)


def test_frames_within_inference_mode_and_without(ball: Geometry, device: str) -> None:
    """Memory created in inference mode is used outside of it, and vice versa. Results can be written to."""
    scene = row_of(ball, [3.0, 9.0])
    renderer, plain = Renderer(scene, device), Renderer(scene, device)
    for k, camera in enumerate(flight(4)):
        with torch.inference_mode(k % 2 == 0):
            frame = renderer.render(camera, ALL)
        assert same(frame, plain.render(camera, ALL), ALL)
        frame["depth"].add_(1.0)


def test_another_default_device_changes_nothing(ball: Geometry, device: str) -> None:
    scene = row_of(ball, [3.0, 9.0])
    expected = Renderer(scene, device).render(AHEAD, ALL)
    with torch.device("meta"):
        frame = Renderer(scene, device).render(AHEAD, ALL)
    assert same(frame, expected, ALL)


def test_a_frame_that_failed_leaves_no_trace(
    ball: Geometry, cube: Geometry, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed frame has another size and therefore other memory. The next frame uses the depths of the frame before
    the failed one."""
    scene = crowd(ball, cube)
    renderer, undisturbed = Renderer(scene, device), Renderer(scene, device)
    first, second = flight(2)
    for each in (renderer, undisturbed):
        each.render(first, ALL)
    with monkeypatch.context() as less:
        less.setattr(memory, "MOST_THREADS", 128)
        with pytest.raises(ValueError, match="a frame needs more than"):
            renderer.render(Camera.look_at((0, 0, 0), (9, 1, 0), width=90, height=70), ALL)
    ours, theirs = renderer.render(second, ALL), undisturbed.render(second, ALL)
    assert same(ours, theirs, ALL)
    assert ours.stats == theirs.stats
    assert theirs.stats.occluded > 0


@pytest.mark.gpu
def test_replayed_frames_are_those_that_are_launched(
    ball: Geometry, cube: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are replayed from graphs with and without timings, and with more different pixel errors than the renderer
    keeps graphs."""
    scene = crowd(ball, cube)
    replayed, launched = Renderer(scene, "cuda"), Renderer(scene, "cuda")
    for k, camera in enumerate(flight(24)):
        renderers = [replayed, launched]
        for renderer in renderers:
            renderer.pixel_error = 1.0 + k // 8
        ours = replayed.render(camera, ALL, timings=k % 2 == 0)
        with monkeypatch.context() as without:
            without.setattr(Stages, "draw_captured", Stages.draw)
            theirs = launched.render(camera, ALL)
        assert same(ours, theirs, ALL)
        assert replace(ours.stats, stage_ms={}) == theirs.stats
        assert (sum(ours.stats.stage_ms.values()) > 0) == (k % 2 == 0)
        assert replayed._memory is not None
        assert len(replayed._memory.graphs) <= MOST_GRAPHS
        assert any(replayed._memory.graphs.values()) or k < 4


@pytest.mark.gpu
def test_a_renderer_on_a_gpu_that_is_not_the_current_one(ball: Geometry, cube: Geometry) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    scene = crowd(ball, cube)
    here, there = Renderer(scene, "cuda:0"), Renderer(scene, "cuda:1")
    for camera in flight(5):
        ours, theirs = there.render(camera, ALL), here.render(camera, ALL)
        assert all(torch.equal(ours[name].cpu().nan_to_num(-7.0), theirs[name].cpu().nan_to_num(-7.0)) for name in ALL)
        assert ours["depth"].device.index == 1


def test_a_tree_that_is_deeper_than_it_says_is_refused(ball: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ball.meta, "depth", 1)
    with pytest.raises(GeometryFileError, match=r"its tree has \d levels, but its metadata states 1"):
        Renderer(row_of(ball, [3.0]), "cpu").render(AHEAD)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (np.full((4, 4), np.nan), "not finite"),
        (np.eye(4) * 1j, "expected \\(4, 4\\) numbers|expected \\(N, 4, 4\\)"),
        (np.eye(4)[:2], "expected \\(4, 4\\)"),
        (np.diag([1, 1, 0, 1]), "makes the mesh flat"),
        (np.diag([1e200, 1e200, 1e200, 1]), "beyond -1e\\+15\\.\\.1e\\+15"),
        (np.diag([1e-200, 1e-200, 1e-200, 1]), "makes the mesh flat"),
        (np.eye(4) + np.eye(4)[[3, 0, 1, 2]], "the last row"),
    ],
)
def test_transforms_that_are_none(ball: Geometry, transform: Floats, words: str) -> None:
    scene = Scene()
    number = scene.add_mesh(ball)
    with pytest.raises(ValueError, match=words):
        scene.add_instance(number, transform)
    assert len(scene) == 0
    scene.add_instance(number)
    with pytest.raises(ValueError, match=words):
        scene.move(0, transform)
    with pytest.raises(ValueError, match="instance=1: expected 0 to 0"):
        scene.move(1, np.eye(4))
    with pytest.raises(ValueError, match="expected 1 integers"):
        scene.move_all([0, 0], np.eye(4)[None])


def test_pixels_in_cuda_cpp_are_those_of_warp(
    ball: Geometry,
    cube: Geometry,
    photograph: Geometry,
    old_file: Geometry,
    built: Callable[..., Geometry],
    cuda_on_cpu: Counter[str],
) -> None:
    names = [name for name in OUTPUTS if name not in ("shadow", "base_color")]
    whole, faces = bumpy_ball(4)
    full = built(
        *("full ball", whole, faces),
        normals="smooth",
        uv=np.stack([np.arctan2(whole[:, 1], whole[:, 0]), whole[:, 2]], 1),
        colors=(127 + 100 * np.sin(5 * whole)).astype(np.uint8),
        materials=np.arange(len(faces)) // 300 % 7,
    )
    plain, mixed = crowd(ball, cube), crowd(full, photograph)
    mixed.add_instance(mixed.add_mesh(old_file), moved(3, 0.5, 0))
    mixed.add_instance(2, moved(3, -0.5, 0) @ np.diag([-1.0, 1.0, 1.0, 1.0]))
    for scene in (plain, mixed):
        cuda, warp = (Renderer(scene, "cpu", kernels=kernels) for kernels in ("cuda", "warp"))
        for camera in [*flight(2), *odd_views(), [replace(camera, width=37, height=29) for camera in flight(3)]]:
            for outputs in (names, ("normal", "instance"), ("velocity", "color"), ("uv", "depth")):
                assert same(cuda.render(camera, outputs), warp.render(camera, outputs), outputs)
    assert cuda_on_cpu["base_pass"] >= 40

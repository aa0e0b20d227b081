"""Laws of frames whose pages are loaded and evicted. Each test asserts that its case occurs."""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rooftop.errors import GeometryFileError, InputError
from rooftop.scene import Camera, GBuffer, Geometry, Renderer, Scene, layouts
from rooftop.scene.gbuffers import OUTPUTS
from rooftop.scene.rendering.stages import Stages
from rooftop.scene.streaming import answers, loading
from rooftop.scene.streaming import pool as pool_module
from rooftop.scene.streaming.loading import Arrivals, Loader
from rooftop.scene.streaming.slots import LOADING, RESIDENT, Slots

SIZE = {"width": 120, "height": 90}
SLOT = layouts.PAGE_BYTES
SHOWN = tuple(name for name in OUTPUTS if name != "overdraw")  # with culling, hidden clusters may be drawn or not


def slots_for(geometry: Geometry, share: float) -> int:
    """The bytes of slots for a share of the pages."""
    return int(share * geometry.pages) * SLOT


def moved(*shift: float) -> NDArray[np.float64]:
    matrix = np.eye(4)
    matrix[:3, 3] = shift
    return matrix


def alone(geometry: Geometry) -> Scene:
    scene = Scene()
    scene.add_instance(scene.add_mesh(geometry))
    return scene


def crowd(*meshes: Geometry) -> Scene:
    """Several instances of each mesh, one behind another, from near to far."""
    scene = Scene()
    for at, mesh in enumerate(meshes):
        number = scene.add_mesh(mesh)
        for k in range(4):
            scene.add_instance(number, moved(3.0 + 2.5 * k * k, 2.2 * at - 1 + 0.6 * k, 0.2 * k))
    return scene


def flight(frames: int) -> list[Camera]:
    return [
        Camera.look_at((0.5 * k - 1, 0.4 * k - 1, 0.2), (6, 0.3 * k, 0), fov_y_degrees=65, **SIZE)
        for k in range(frames)
    ]


def turns(frames: int) -> list[Camera]:
    """Cameras in the middle of the ball that look in all directions."""
    angles = 2 * np.pi * np.arange(frames) / frames
    return [Camera.look_at((0, 0, 0), (np.cos(a), np.sin(a), 0.5 * np.sin(3 * a)), **SIZE) for a in angles]


def within(x: float) -> Camera:
    """Cameras inside the tunnel, along its length."""
    return Camera.look_at((x, 0, 0), (x + 1, 0.1, 0.1), fov_y_degrees=80, **SIZE)


def same(a: GBuffer, b: GBuffer, names: Sequence[str] = SHOWN) -> bool:
    return all(torch.equal(a[name].nan_to_num(-7.0), b[name].nan_to_num(-7.0)) for name in names)


def watch(renderer: Renderer, camera: Camera) -> Counter[int]:
    """Render a first frame, then count how often each page is read."""
    renderer.render(camera, wait=False)
    assert renderer.pool is not None
    reads: Counter[int] = Counter()
    load = renderer.pool.loader.load

    def counted(pages: NDArray[np.int64], *rest: Any) -> None:
        reads.update(pages.tolist())
        load(pages, *rest)

    renderer.pool.loader.load = counted  # type: ignore[method-assign]
    return reads


def render_until_settled(renderer: Renderer, camera: Camera, wait: bool) -> None:
    for _ in range(40):
        renderer.render(camera, ("depth",), wait=wait)
        settle(renderer)


def settle(renderer: Renderer) -> None:
    """Wait until the pages in flight have been read; the next frame takes them."""
    assert renderer.pool is not None
    loader = renderer.pool.loader
    results = loader._reader.take(loader.in_flight)
    loader._reader = Settled(getattr(loader._reader, "reader", loader._reader), results)


class Settled:
    """A reader, and results that were taken from it early; the next call returns them."""

    def __init__(self, reader: Any, results: NDArray[np.int64]) -> None:
        self.reader, self.results = reader, results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    def arrived(self) -> NDArray[np.int64]:
        return self.take(0)

    def take(self, least: int) -> NDArray[np.int64]:
        early, self.results = self.results, self.results[:0]
        return np.concatenate([early, self.reader.take(max(least - len(early), 0))])


# ---- no hole ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [False, True])
def test_a_pool_of_5_percent_leaves_no_hole(paged_tunnel: Geometry, wait: bool, device: str) -> None:
    """The camera moves back and forth in a tunnel. Each ray from inside a closed surface leaves it one more time than
    it enters."""
    pool_bytes = slots_for(paged_tunnel, 0.05)
    renderer = Renderer(alone(paged_tunnel), device, pixel_error=2.0, occlusion=False, pool_bytes=pool_bytes)
    reads = watch(renderer, within(0.0))
    evicted, levels, missing, errors = 0, set(), 0, defaultdict[int, set[float]](set)
    for x in [0, 4, 8, 12, 16, 18, 12, 6, 0, -6, -12, -16, -18, -12, -4, 0, 6, 12, 17, 12, 4, -4, -12, -17]:
        frame = renderer.render(within(x), ("depth", "overdraw", "level"), wait=wait)
        streaming = frame.stats.streaming
        assert streaming is not None
        assert frame["depth"].isfinite().all()
        assert (frame["overdraw"] % 2 == 1).all()
        assert streaming.resident <= pool_bytes // SLOT
        evicted += streaming.evicted
        missing += streaming.missing
        errors[x].add(streaming.error_pixels)
        levels.update(frame.stats.levels)
        settle(renderer)
    assert evicted > 0
    assert missing > 0
    assert max(reads.values()) > 1  # requested again
    assert len(levels) >= 3
    assert not wait or all(len(each) == 1 for each in errors.values())  # only the camera decides which pages are wanted
    assert len(set().union(*errors.values())) > (3 if wait else 5)
    assert max(map(max, errors.values())) > 2


def test_on_every_path_one_cluster_is_drawn_while_pages_come(
    paged_ball: Geometry, paths_of: Callable[[Geometry], Any], device: str
) -> None:
    scene = Scene()
    scene.add_instance(scene.add_mesh(paged_ball), moved(3.5, 0, 0))
    camera = Camera.look_at((0, 0, 0), (1, 0, 0), fov_y_degrees=60, **SIZE)
    renderer = Renderer(scene, device, pixel_error=0.1, occlusion=False, pool_bytes=slots_for(paged_ball, 0.6))
    paths, counts, levels = paths_of(paged_ball), set(), set()
    renderer.render(camera, wait=False)
    assert renderer.pool is not None
    renderer.pool.loader = Late(renderer.pool.loader, 0)  # type: ignore[assignment]
    for _ in range(60):  # each frame loads a few pages in random order, sometimes before the pages that they need
        frame = renderer.render(camera, ("depth",), wait=False)
        counts |= paths.counts(renderer, frame, 0)
        levels.add(frame.stats.levels)
    assert counts == {1}
    assert len(levels) >= 3


class Late:
    """A loader whose pages arrive in random order and with random delays."""

    def __init__(self, loader: Loader, seed: int) -> None:
        self.loader, self.random, self.held = loader, np.random.default_rng(seed), loading.NONE
        self.load, self.close = loader.load, loader.close

    @property
    def in_flight(self) -> int:
        return self.loader.in_flight + len(self.held)

    def arrived(self) -> Arrivals:
        held = self.wait()
        held = held.chosen(self.random.permutation(len(held)))
        count = int(self.random.integers(0, 1 + min(3, len(held))))
        self.held = held.chosen(slice(count, None))
        return held.chosen(slice(count))

    def wait(self) -> Arrivals:
        held, found, self.held = self.held, self.loader.wait(), loading.NONE
        pages, sizes = ([held.pages, found.pages], [held.size_bytes, found.size_bytes])
        return Arrivals(np.concatenate(pages), np.concatenate(sizes), held.errors | found.errors)


@pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.05, 0.5), occlusion=st.booleans())
def test_any_order_and_delay_of_arrivals(
    paged_ball: Geometry, device: str, seed: int, share: float, occlusion: bool
) -> None:
    """No frame has a hole, and the final picture after `wait` does not depend on earlier frames."""
    pool_bytes = slots_for(paged_ball, share)
    options: dict[str, Any] = {"pixel_error": 0.5, "occlusion": occlusion, "pool_bytes": pool_bytes}
    renderer = Renderer(alone(paged_ball), device, **options)
    cameras = turns(5)
    renderer.render(cameras[0], wait=False)
    assert renderer.pool is not None
    renderer.pool.loader = Late(renderer.pool.loader, seed)  # type: ignore[assignment]
    delayed = 0
    for camera in [*cameras, *cameras]:
        frame = renderer.render(camera, ("depth", "overdraw"), wait=False)
        assert frame["depth"].isfinite().all()
        assert occlusion or (frame["overdraw"] % 2 == 1).all()
        delayed += renderer.pool.loader.in_flight
    assert delayed > 0
    final = renderer.render(cameras[2], SHOWN)
    names = [name for name in SHOWN if name != "velocity"]  # the time since the previous frame
    assert same(final, Renderer(alone(paged_ball), device, **options).render(cameras[2], SHOWN), names)


# ---- the same picture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("occlusion", [False, True])
def test_waited_for_a_picture_is_the_resident_one(
    paged_ball: Geometry, paged_knot: Geometry, occlusion: bool, device: str
) -> None:
    """The camera follows a path through several meshes and instances that move at the same time."""
    scene = crowd(paged_ball, paged_knot)
    pages = paged_ball.pages + paged_knot.pages
    resident = Renderer(scene, device, pixel_error=0.7, occlusion=occlusion)
    streamed = Renderer(scene, device, pixel_error=0.7, occlusion=occlusion, pool_bytes=int(0.8 * pages) * SLOT)
    loaded = occluded = 0
    for k, camera in enumerate(flight(6)):
        scene.move(1, moved(5.5, -0.4 + 0.3 * k, 0.2))
        ours, theirs = streamed.render(camera, SHOWN), resident.render(camera, SHOWN)
        assert same(ours, theirs)
        assert ours.stats.streaming is not None
        assert ours.stats.streaming.missing == 0
        assert ours.stats.streaming.error_pixels == pytest.approx(0.7)
        loaded += ours.stats.streaming.loaded
        occluded += ours.stats.occluded
    assert loaded > 10
    assert not occlusion or occluded > 0
    assert theirs.stats.streaming is None


def test_at_rest_a_picture_becomes_the_resident_one(paged_ball: Geometry, paged_knot: Geometry, device: str) -> None:
    """One render call draws several cameras without waiting for pages."""
    scene, cameras = crowd(paged_ball, paged_knot), flight(3)
    pool_bytes = (paged_ball.pages + paged_knot.pages) * SLOT
    expected = Renderer(scene, device, pixel_error=0.7).render(cameras, SHOWN)
    renderer = Renderer(scene, device, pixel_error=0.7, pool_bytes=pool_bytes)
    errors, found = [], []
    for _ in range(30):
        frame = renderer.render(cameras, SHOWN, wait=False)
        assert frame.stats.streaming is not None
        errors.append(frame.stats.streaming.error_pixels)
        found.append(same(frame, expected, [name for name in SHOWN if name != "velocity"]))
        if frame.stats.streaming.missing == 0:
            break
        settle(renderer)
    assert not found[0]
    assert found[-1]
    assert errors[0] > 5
    assert errors[-1] == pytest.approx(0.7)


def test_both_culls_ask_for_the_same_pages(
    paged_ball: Geometry, paged_knot: Geometry, cuda_on_cpu: Counter[str]
) -> None:
    """Clusters are culled from one queue and level by level, with most pages absent, and while pages arrive."""
    scene = crowd(paged_ball, paged_knot)
    pool_bytes = int(0.3 * (paged_ball.pages + paged_knot.pages)) * SLOT
    cuda, warp = (
        Renderer(scene, "cpu", pixel_error=0.7, kernels=kernels, pool_bytes=pool_bytes) for kernels in ("cuda", "warp")
    )
    wanted = second_pass = 0
    for camera in flight(6):
        ours, theirs = (each.render(camera, tuple(OUTPUTS), wait=False) for each in (cuda, warp))
        assert same(ours, theirs, OUTPUTS)
        assert ours.stats == theirs.stats
        assert cuda.pool is not None
        assert warp.pool is not None
        for name in ("wanted", "ages"):
            assert torch.equal(cuda.pool.requests.tensors[name], warp.pool.requests.tensors[name])
        wanted += int((cuda.pool.requests.tensors["wanted"] != 0).sum())
        second_pass += ours.stats.second_pass_clusters
        for each in (cuda, warp):
            settle(each)
    assert wanted > 50
    assert second_pass > 0
    assert cuda_on_cpu["persistent_cull"] >= 6


def test_what_a_frame_wants_does_not_depend_on_what_is_there(paged_ball: Geometry, device: str) -> None:
    empty, full = (
        Renderer(alone(paged_ball), device, pixel_error=0.5, occlusion=False, pool_bytes=slots_for(paged_ball, share))
        for share in (0.05, 1.0)
    )
    for camera in turns(3):
        empty.render(camera, wait=False)
        full.render(camera)
        assert empty.pool is not None
        assert full.pool is not None
        assert torch.equal(empty.pool.requests.tensors["wanted"], full.pool.requests.tensors["wanted"])


def test_an_answer_names_all_that_is_missing_however_much(
    paged_ball: Geometry, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(listed: int) -> Any:
        monkeypatch.setattr(answers, "LISTED", listed)
        renderer = Renderer(alone(paged_ball), device, pixel_error=0.1, pool_bytes=slots_for(paged_ball, 0.05))
        renderer.render(turns(1)[0], wait=False)
        assert renderer.pool is not None
        return renderer.pool.requests.read()

    few, many = missing(2), missing(1000)
    assert len(many.missing) > 2
    assert few.missing.tolist() == many.missing.tolist()
    assert few.pixels.tolist() == many.pixels.tolist()
    assert (np.diff(many.pixels) <= 0).all()


@pytest.mark.parametrize("listed", [2, 1000])
def test_pages_that_come_while_a_frame_is_drawn_were_missing_in_it(
    paged_ball: Geometry, device: str, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    monkeypatch.setattr(answers, "LISTED", listed)
    camera = turns(1)[0]
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.1, pool_bytes=slots_for(paged_ball, 1.0))
    first = renderer.render(camera, wait=False).stats.streaming
    assert renderer.pool is not None
    arrived, calls = renderer.pool.loader.arrived, []

    def late() -> Arrivals:
        calls.append(1)
        if len(calls) == 1:
            return loading.NONE
        settle(renderer)
        return arrived()

    monkeypatch.setattr(renderer.pool.loader, "arrived", late)
    second = renderer.render(camera, wait=False).stats.streaming
    assert first is not None
    assert second is not None
    assert second.resident > first.resident
    assert second.missing == first.missing > listed or listed == 1000
    assert second.error_pixels == first.error_pixels


# ---- a pool too small ------------------------------------------------------------------------------------------------


def test_in_a_pool_too_small_the_error_grows_and_no_history_shows(paged_ball: Geometry, device: str) -> None:
    camera, names = turns(7)[3], [name for name in SHOWN if name != "velocity"]
    errors = []
    for share in (1.0, 0.3, 0.15, 0.05):
        fresh, used = (
            Renderer(alone(paged_ball), device, pixel_error=0.3, pool_bytes=slots_for(paged_ball, share))
            for _ in range(2)
        )
        for k, other in enumerate(turns(5)):
            used.render(other, wait=k % 2 == 0)
        used.prefetch(turns(3))
        ours, theirs = used.render(camera, SHOWN), fresh.render(camera, SHOWN)
        assert same(ours, theirs, names)
        assert ours.stats.streaming is not None
        assert theirs.stats.streaming is not None
        assert ours.stats.streaming.error_pixels == theirs.stats.streaming.error_pixels
        errors.append(ours.stats.streaming.error_pixels)
    assert errors[0] == pytest.approx(0.3)
    assert errors == sorted(errors)
    assert errors[1] > 0.3
    assert len(set(errors)) == 4


def test_what_was_hidden_before_does_not_choose_the_pages_of_a_pool_too_small(
    paged_ball: Geometry, paged_knot: Geometry, cube: Geometry, device: str
) -> None:
    """A ball beside a wall, which hides a knot. Only a renderer that has drawn the scene before knows what is
    hidden."""
    scene, names = Scene(), [name for name in SHOWN if name != "velocity"]
    scene.add_instance(scene.add_mesh(paged_ball), moved(4, 2, 0))
    scene.add_instance(scene.add_mesh(paged_knot), moved(4, -2, 0) @ np.diag([0.8, 0.8, 0.8, 1]))
    scene.add_instance(scene.add_mesh(cube), moved(2.2, -1.8, 0) @ np.diag([0.05, 1.7, 1.7, 1]))
    camera = Camera.look_at((0, 0, 0), (1, 0, 0), fov_y_degrees=80, width=240, height=180)
    errors = []
    for slots in (8, 16, 32):
        fresh, used = (Renderer(scene, device, pixel_error=0.1, pool_bytes=slots * SLOT) for _ in range(2))
        for _ in range(3):
            occluded = used.render(camera, wait=False).stats.occluded
            settle(used)
        assert occluded > 0
        ours, theirs = used.render(camera, SHOWN), fresh.render(camera, SHOWN)
        assert ours.stats.streaming is not None
        assert ours.stats.streaming.missing > 0
        assert same(ours, theirs, names)
        errors.append(ours.stats.streaming.error_pixels)
    assert errors[0] > errors[1] > errors[2] > 0.1


def test_nothing_stays_beside_the_pages_that_are_chosen_alone(paged_ball: Geometry, device: str) -> None:
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=2**30)
    renderer.render(turns(1)[0])
    pool = renderer.pool
    assert pool is not None
    assert (pool.slots.state == RESIDENT).sum() > 20
    pool.load(pool.graph.roots, alone=True)
    assert ((pool.slots.state == RESIDENT) == pool.graph.roots).all()
    assert ((pool.page_at.cpu().numpy() >= 0) == pool.graph.roots).all()


def test_a_camera_that_rests_in_a_pool_too_small_does_not_load_for_ever(paged_ball: Geometry, device: str) -> None:
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.3, pool_bytes=slots_for(paged_ball, 0.1))
    loaded = []
    for _ in range(40):
        frame = renderer.render(turns(1)[0], ("depth",), wait=False)
        assert frame.stats.streaming is not None
        loaded.append(frame.stats.streaming.loaded)
        settle(renderer)
    assert sum(loaded[:20]) > 0
    assert sum(loaded[-10:]) == 0
    assert frame.stats.streaming.missing > 0


def test_a_pool_below_the_root_pages_is_refused_before_anything_is_allocated(
    paged_ball: Geometry, paged_knot: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    scene = crowd(paged_ball, paged_knot)
    roots = len(paged_ball.root_pages) + len(paged_knot.root_pages)
    with monkeypatch.context() as nothing:
        for name in ("Slots", "Loader", "RequestBuffers"):
            nothing.setattr(pool_module, name, refused)
        with pytest.raises(InputError, match=f"need {roots} slots of 131,072 bytes: give at least {roots * SLOT:,}"):
            Renderer(scene, "cpu", pool_bytes=roots * SLOT - 1)
    tight = Renderer(scene, "cpu", pool_bytes=roots * SLOT)
    frame = tight.render(flight(1)[0])
    assert frame.stats.streaming is not None
    assert frame.stats.streaming.resident == roots
    assert frame.stats.streaming.error_pixels > 1
    scene.add_mesh(paged_ball)  # added later: the next frame reports the mesh
    with pytest.raises(InputError, match="root pages"):
        tight.render(flight(1)[0])


@pytest.mark.parametrize("pool_bytes", [0, -5, 1.5, "2GB", True, np.array([1, 2])])
def test_a_pool_that_is_no_number_of_bytes_is_refused(paged_ball: Geometry, pool_bytes: Any) -> None:
    with pytest.raises(ValueError, match=r"pool_bytes=.*expected an integer number of bytes"):
        Renderer(alone(paged_ball), "cpu", pool_bytes=pool_bytes)


def test_a_pool_may_be_larger_than_any_memory(paged_ball: Geometry) -> None:
    renderer = Renderer(alone(paged_ball), "cpu", pool_bytes=sys.maxsize)
    assert renderer.render(flight(1)[0]).stats.streaming is not None


# ---- memory, statistics, paths ---------------------------------------------------------------------------------------


def test_memory_is_bounded_on_the_device_and_the_host(
    paged_ball: Geometry, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device needs only the slots, the host only the threads' buffers. The mapped file is not touched."""
    monkeypatch.setattr(Geometry, "page", lambda *_: pytest.fail("read through the mapped file"))
    pool_bytes = slots_for(paged_ball, 0.1)
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.3, pool_bytes=pool_bytes + 1000)
    for camera in turns(6):
        frame = renderer.render(camera, wait=False)
        assert renderer.pool is not None
        pool, streaming = renderer.pool, frame.stats.streaming
        assert streaming is not None
        assert pool.words.numel() * 4 == pool_bytes + 8
        assert streaming.pool_bytes == pool_bytes
        assert streaming.resident_bytes == streaming.resident * SLOT <= pool_bytes
        assert len(pool.slots.held()) <= pool_bytes // SLOT
        assert pool.loader.in_flight <= pool_bytes // SLOT
        assert pool.loader.host_bytes == loading.BUFFERS * SLOT
        settle(renderer)


def test_a_pool_takes_no_more_than_the_scene_has(paged_ball: Geometry, device: str) -> None:
    frame = Renderer(alone(paged_ball), device, pool_bytes=2**50).render(turns(1)[0])
    assert frame.stats.streaming is not None
    assert frame.stats.streaming.pool_bytes == paged_ball.pages * SLOT


@pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
def test_statistics_add_up(paged_ball: Geometry, device: str) -> None:
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=slots_for(paged_ball, 0.5))
    loaded = evicted = 0
    for camera in [*turns(6), *turns(6)]:
        streaming = renderer.render(camera, ("depth",)).stats.streaming
        assert streaming is not None
        loaded, evicted = loaded + streaming.loaded, evicted + streaming.evicted
        assert streaming.resident == loaded - evicted
        assert streaming.wanted >= streaming.missing
        assert 0 < streaming.loaded_bytes <= streaming.loaded * SLOT or not streaming.loaded
        assert renderer.pool is not None
        assert int((renderer.pool.page_at >= 0).sum()) == streaming.resident
    assert evicted > 0


@pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
def test_what_lies_ahead_is_there_when_it_is_drawn(paged_ball: Geometry, device: str) -> None:
    cameras = turns(8)
    plain, ahead = (
        Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=slots_for(paged_ball, 0.9)) for _ in range(2)
    )
    late = Counter[str]()
    for k, camera in enumerate(cameras):
        for name, renderer in (("plain", plain), ("ahead", ahead)):
            frame = renderer.render(camera, wait=k == 0)
            assert frame.stats.streaming is not None
            late[name] += frame.stats.streaming.missing
        ahead.prefetch(cameras[k + 1 : k + 3] or cameras[-1])
        settle(ahead)
    assert late["plain"] > 0
    assert late["ahead"] == 0


def test_looking_ahead_changes_no_picture_and_takes_nothing_from_it(paged_ball: Geometry, device: str) -> None:
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=slots_for(paged_ball, 0.45))
    here, elsewhere = turns(2)
    first = renderer.render(here, SHOWN)
    assert first.stats.streaming is not None
    assert first.stats.streaming.missing == 0
    for _ in range(4):
        renderer.prefetch([elsewhere])
        settle(renderer)
    again = renderer.render(here, SHOWN, wait=False)
    assert again.stats.streaming is not None
    assert again.stats.streaming.missing == 0
    assert again.stats.streaming.loaded > 0
    assert same(first, again)
    Renderer(alone(paged_ball), device).prefetch(here)  # without a pool there is nothing to do
    with pytest.raises(ValueError, match="cameras=5"):
        renderer.prefetch(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
def test_no_kernel_runs_while_it_could_see_an_evicted_page(
    paged_ball: Geometry, device: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=slots_for(paged_ball, 0.3))
    checked = Counter[str]()

    def checking(name: str) -> None:
        run = getattr(Stages, name)

        def checks(stages: Stages, *arguments: Any) -> None:
            pool = renderer.pool
            assert pool is not None
            visible = pool.page_at.cpu().numpy() >= 0
            assert (pool.slots.state[visible] == RESIDENT).all()
            checked[name] += 1
            run(stages, *arguments)

        monkeypatch.setattr(Stages, name, checks)

    checking("look_ahead")
    checking("draw_captured")
    cameras, evicted = turns(8), 0
    for camera, ahead in zip(cameras, cameras[3:] + cameras[:3], strict=True):
        for _ in range(3):
            frame = renderer.render(camera, wait=False)
            assert frame.stats.streaming is not None
            evicted += frame.stats.streaming.evicted
            renderer.prefetch([ahead])
            settle(renderer)
    assert evicted > 20
    assert min(checked.values()) >= 24


@pytest.mark.parametrize("fails", ["_surfaces_now", "_stages"])
def test_pages_that_arrive_for_a_frame_that_fails_are_there_in_the_next(
    paged_ball: Geometry, device: str, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    camera, names = turns(1)[0], (*SHOWN, "color")
    plain, disturbed = (
        Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=slots_for(paged_ball, 1.0)) for _ in range(2)
    )
    for renderer in (plain, disturbed):
        renderer.render(camera, names, wait=False)
        settle(renderer)
    pool = disturbed.pool
    assert pool is not None
    with monkeypatch.context() as failing:
        failing.setattr(Renderer, fails, None)
        with pytest.raises(TypeError):
            disturbed.render(camera, names, wait=False)
    for _ in range(2):
        assert same(plain.render(camera, names, wait=False), disturbed.render(camera, names, wait=False))
        told = pool.page_at.cpu().numpy() >= 0
        assert ((pool.slots.state == RESIDENT) == told).all()


@pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
def test_an_interrupt_while_pages_are_planned_loses_none(
    paged_ball: Geometry, device: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that the plan has taken so far are read; none stays in the state LOADING."""
    renderer, fresh = (
        Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=slots_for(paged_ball, 0.3)) for _ in range(2)
    )
    cameras, interrupted = turns(8), 0
    renderer.render(cameras[0])
    pool = renderer.pool
    assert pool is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    for camera in cameras[1:]:
        with monkeypatch.context() as failing:
            failing.setattr(pool.requests, "use", interrupt)
            try:
                renderer.render(camera, wait=False)
            except KeyboardInterrupt:
                interrupted += 1
        settle(renderer)
        renderer.render(camera, wait=False)
        settle(renderer)
    assert interrupted > 2
    names = [name for name in SHOWN if name != "velocity"]
    assert same(renderer.render(cameras[3], names), fresh.render(cameras[3], names), names)
    assert not (pool.slots.state == LOADING).any()


def test_an_interrupt_before_slots_are_free_loses_no_page(
    paged_ball: Geometry, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan has taken slots, but nobody reads its pages. Later frames read them."""
    renderer, fresh = (
        Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=slots_for(paged_ball, 0.3)) for _ in range(2)
    )
    cameras = turns(2)
    renderer.render(cameras[0])
    pool = renderer.pool
    assert pool is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as failing:
        failing.setattr(pool, "_wait_for_frames", interrupt)
        with pytest.raises(KeyboardInterrupt):
            renderer.render(cameras[1])
    assert not (pool.slots.state == LOADING).any()
    names = [name for name in SHOWN if name != "velocity"]
    assert same(renderer.render(cameras[1], names), fresh.render(cameras[1], names), names)


def test_a_mesh_that_is_added_joins_the_pool(paged_ball: Geometry, paged_knot: Geometry, device: str) -> None:
    scene = alone(paged_ball)
    renderer = Renderer(scene, device, pool_bytes=2**30)
    renderer.render(turns(1)[0])
    first = renderer.pool
    scene.add_instance(scene.add_mesh(paged_knot), moved(4, 0, 0))
    camera = Camera.look_at((0, -4, 0), (2, 0, 0), **SIZE)
    assert same(renderer.render(camera, SHOWN), Renderer(scene, device).render(camera, SHOWN), ["depth", "cluster"])
    assert first is not None
    assert not first.loader.close.alive
    assert renderer.pool is not first


@pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
def test_threads_end_with_their_renderer(paged_ball: Geometry, reader: str) -> None:
    def pages_threads() -> int:
        if reader == "in Python":
            return sum(thread.name == "rooftop-pages" for thread in threading.enumerate())
        return sum(name.read_text() == "rooftop-pages\n" for name in Path("/proc/self/task").glob("*/comm"))

    gc.collect()
    before, files = pages_threads(), len(os.listdir("/proc/self/fd"))
    renderer = Renderer(alone(paged_ball), "cpu", pool_bytes=2**30)
    renderer.render(turns(1)[0])
    assert pages_threads() == before + loading.THREADS
    del renderer
    gc.collect()
    assert pages_threads() == before
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.large])])
def test_slots_beyond_8_gib(paged_ball: Geometry, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The test uses the last slots of a pool of 9 GB. The system allocates only memory that is touched."""

    class FromTheEnd(Slots):
        def __init__(self, graph: Any, count: int) -> None:
            super().__init__(graph, count)
            self.free_slots = self.free_slots[::-1].copy()

    monkeypatch.setattr(pool_module, "Slots", FromTheEnd)
    monkeypatch.setattr(pool_module, "slots_of", lambda graph, pool_bytes: pool_bytes // SLOT)
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=9 * 2**30)
    for camera in turns(2):
        ours = renderer.render(camera, SHOWN)
        theirs = Renderer(alone(paged_ball), device, pixel_error=0.5).render(camera, SHOWN)
        assert same(ours, theirs, [name for name in SHOWN if name != "velocity"])
    assert renderer.pool is not None
    places = renderer.pool.page_at[renderer.pool.page_at >= 0]
    assert places.min() > 2**31


def test_many_frames_within_inference_mode_and_without(paged_ball: Geometry, device: str) -> None:
    renderer = Renderer(alone(paged_ball), device, pixel_error=0.5, pool_bytes=slots_for(paged_ball, 0.3))
    for k, camera in enumerate(turns(4)):
        with torch.inference_mode(k % 2 == 0):
            assert renderer.render(camera, wait=k > 1)["depth"].isfinite().all()
            renderer.prefetch(camera)


# ---- files -----------------------------------------------------------------------------------------------------------


def copied(geometry: Geometry, folder: Path) -> Path:
    path = folder / "copy.rtg"
    path.write_bytes(geometry.path.read_bytes())
    return path


def of_last_page(geometry: Geometry) -> int:
    return int(geometry.page_offsets[-1])


def without_needs(geometry: Geometry, folder: Path) -> Path:
    """The file without the section of needs."""
    data = bytearray(copied(geometry, folder).read_bytes())
    count = struct.unpack_from(layouts.HEADER, data)[2]
    end = layouts.HEADER_BYTES + count * layouts.SECTION_BYTES
    at = data.index(b"needs\0\0\0", 0, end)
    data[at : at + 8] = b"unused\0\0"
    struct.pack_into("<I", data, 24, zlib.crc32(data[layouts.HEADER_BYTES : end]))
    path = folder / "without.rtg"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [1, 2, 3])
def test_earlier_versions_are_streamed_with_the_same_pictures(
    paged_knot: Geometry, in_old_layout: Callable[..., Geometry], tmp_path: Path, version: int, device: str
) -> None:
    """Files up to version 2 do not store which pages a page needs, so the reader computes it."""
    old = in_old_layout(paged_knot, tmp_path / "old.rtg", version)
    assert old.version == version
    assert old.needs.starts.tolist() == paged_knot.needs.starts.tolist()
    assert old.needs.pages.tolist() == paged_knot.needs.pages.tolist()
    assert len(old.needs.pages) > old.pages
    frames = [
        Renderer(alone(mesh), device, pool_bytes=slots_for(paged_knot, 0.5)).render(turns(1)[0], SHOWN)
        for mesh in (old, paged_knot)
    ]
    assert same(*frames)


def test_a_version_without_its_section_is_refused(paged_ball: Geometry, tmp_path: Path) -> None:
    with pytest.raises(GeometryFileError, match=f"version {layouts.VERSION} must have a section 'needs', but"):
        Geometry.open(without_needs(paged_ball, tmp_path))


def test_needs_that_cannot_be_are_refused_with_their_place(paged_ball: Geometry, tmp_path: Path) -> None:
    path = copied(paged_ball, tmp_path)
    data = bytearray(path.read_bytes())
    row = data.index(b"needs\0\0\0")
    start, length = struct.unpack_from("<QQ", data, row + 8)
    struct.pack_into("<I", data, start + length - 4, paged_ball.pages)  # the last page needs a page that does not exist
    struct.pack_into("<I", data, row + 24, zlib.crc32(data[start : start + length]))
    end = layouts.HEADER_BYTES + 5 * layouts.SECTION_BYTES
    struct.pack_into("<I", data, 24, zlib.crc32(data[layouts.HEADER_BYTES : end]))
    path.write_bytes(data)
    with pytest.raises(
        GeometryFileError, match=f"section 'needs' has impossible values for page {paged_ball.pages - 1}"
    ):
        Geometry.open(path)


@pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("damage", ["changed", "cut off"])
def test_a_damaged_page_is_named_and_never_drawn(
    paged_ball: Geometry, tmp_path: Path, wait: bool, damage: str, device: str
) -> None:
    path = copied(paged_ball, tmp_path)
    renderer = Renderer(alone(Geometry.open(path)), device, pool_bytes=2**30, occlusion=False)
    far = Camera.look_at((500, 0, 0), (0, 0, 0), **SIZE)
    before = renderer.render(far, ("depth",), wait=True)
    last, offset, whole = paged_ball.pages - 1, of_last_page(paged_ball), path.read_bytes()
    with path.open("r+b") as file:
        if damage == "changed":
            file.seek(offset + 2000)
            file.write(bytes([whole[offset + 2000] ^ 1]))
        else:
            file.truncate(offset + 2000)
    renderer.pixel_error = 0.0
    says = f"checksum of page {last} does" if damage == "changed" else f"page {last} is cut off after 2,000 of"
    near = Camera.look_at((3.2, 0, 0), (0, 0, 0), fov_y_degrees=60, **SIZE)
    with pytest.raises(GeometryFileError, match=says) as caught:
        render_until_settled(renderer, near, wait)
    assert caught.value.offset == offset + (0 if damage == "changed" else 2000)
    assert caught.value.path == path
    assert renderer.pool is not None
    assert renderer.pool.slots.state[last] != RESIDENT
    assert int(renderer.pool.page_at[last]) == -1
    renderer.pixel_error = 1.0
    assert torch.equal(renderer.render(far, ("depth",))["depth"], before["depth"])  # other pages still work
    with path.open("r+b") as file:  # restored
        file.write(whole)
    renderer.pixel_error = 0.0
    expected = Renderer(alone(paged_ball), device, pixel_error=0.0).render(near, ("depth",))
    assert torch.equal(renderer.render(near, ("depth",))["depth"], expected["depth"])


def test_a_page_that_was_written_wrong_is_named_and_never_drawn(
    paged_ball: Geometry, tmp_path: Path, device: str
) -> None:
    """The page's checksum is correct, so only the device finds the fault. Later frames that do not need the page are
    drawn."""
    path, last = copied(paged_ball, tmp_path), paged_ball.pages - 1
    data = bytearray(path.read_bytes())
    start, length = of_last_page(paged_ball), int(paged_ball.page_lengths[-1])
    struct.pack_into("<i", data, start + 4 * (layouts.PAGE_WORDS + layouts.GROUP_COUNT), 1000)
    row = data.index(b"pagetab\0")
    table, size = struct.unpack_from("<QQ", data, row + 8)
    struct.pack_into("<I", data, table + 16 * last + 12, zlib.crc32(data[start : start + length]))
    struct.pack_into("<I", data, row + 24, zlib.crc32(data[table : table + size]))
    struct.pack_into("<I", data, 24, zlib.crc32(data[layouts.HEADER_BYTES : layouts.HEADER_BYTES + 160]))
    path.write_bytes(data)
    renderer = Renderer(alone(Geometry.open(path)), device, pixel_error=0.0, pool_bytes=2**30)
    near = Camera.look_at((3.2, 0, 0), (0, 0, 0), fov_y_degrees=60, **SIZE)
    with pytest.raises(
        GeometryFileError, match=f"page {last}: a group has clusters that are not in the page"
    ) as caught:
        renderer.render(near)
    assert caught.value.offset == start
    renderer.pixel_error = 20.0
    assert renderer.render(near, ("depth",))["depth"].isfinite().any()


def test_a_file_that_is_gone_or_another_is_refused_by_name(paged_ball: Geometry, tmp_path: Path) -> None:
    path = copied(paged_ball, tmp_path)
    opened = Geometry.open(path)
    other = tmp_path / "other.rtg"
    other.write_bytes(path.read_bytes())
    other.replace(path)
    with pytest.raises(GeometryFileError, match="changed or replaced since it was opened"):
        Renderer(alone(opened), "cpu", pool_bytes=2**30).render(turns(1)[0])
    path.unlink()
    with pytest.raises(GeometryFileError, match=r"copy.rtg .* no longer exists, but"):
        Renderer(alone(opened), "cpu", pool_bytes=2**30).render(turns(1)[0])


def test_a_file_that_is_removed_while_it_is_drawn_serves_on(paged_ball: Geometry, tmp_path: Path) -> None:
    path = copied(paged_ball, tmp_path)
    renderer = Renderer(alone(Geometry.open(path)), "cpu", pixel_error=0.5, pool_bytes=2**30)
    renderer.render(turns(4)[0])
    path.unlink()
    frame = renderer.render(turns(4)[2], ("depth",))
    assert frame.stats.streaming is not None
    assert frame.stats.streaming.loaded > 0


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
def test_an_interrupted_wait_loses_no_page(paged_ball: Geometry, reader: str) -> None:
    renderer = Renderer(alone(paged_ball), "cpu", pixel_error=0.5, pool_bytes=2**30)
    renderer.render(turns(1)[0], wait=False)
    assert renderer.pool is not None
    loader = renderer.pool.loader
    in_flight = loader.in_flight
    assert in_flight > 3
    loader.in_flight += 1  # which never comes
    threading.Timer(0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        loader.wait()
    loader.in_flight -= 1
    assert len(loader.wait()) == in_flight
    assert loader.in_flight == 0


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("reader", ["in Python"], indirect=True)
def test_uploads_are_pinned_and_on_streams_of_their_own(
    paged_ball: Geometry, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    uploads = []
    put = loading._Upload.put

    def watched(upload: Any, count: int, slot: int) -> None:
        uploads.append(upload)
        put(upload, count, slot)

    monkeypatch.setattr(loading._Upload, "put", watched)
    renderer = Renderer(alone(paged_ball), "cuda", pixel_error=0.5, pool_bytes=2**30)
    renderer.render(turns(1)[0])
    assert len(uploads) > 5
    streams = {upload.stream for upload in uploads}
    assert torch.cuda.current_stream() not in streams
    assert None not in streams
    assert all(upload.staged.is_pinned() for upload in uploads)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["warp", "cuda"])
def test_replayed_frames_see_pages_that_have_come(paged_ball: Geometry, kernels: str) -> None:
    """The graph of a frame contains the address of the table of pages, not its contents at the capture."""
    options: dict[str, Any] = {"pixel_error": 0.5, "kernels": kernels}
    streamed = Renderer(alone(paged_ball), "cuda", pool_bytes=slots_for(paged_ball, 0.5), **options)
    resident = Renderer(alone(paged_ball), "cuda", **options)
    for camera in [*turns(9), *turns(9)]:
        assert same(streamed.render(camera, SHOWN), resident.render(camera, SHOWN))
    assert streamed._memory is not None
    assert any(graph is not None for graph in streamed._memory.graphs.values())

"""Instances are added, moved and removed between frames. Pictures equal those of a scene that was created in the final
state."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rooftop.launch import count_launches
from rooftop.scene import Camera, DirectionalLight, Geometry, Renderer, Scene
from rooftop.scene.instances import FEW_CHANGES, Instances, first_flat, most_stretch
from rooftop.scene.rendering.placing import Placed
from rooftop.scene.world_bounds import WorldBounds

Floats = NDArray[np.float64]
SIZE = {"width": 96, "height": 72}
AHEAD = Camera.look_at((0, 0, 0.5), (9, 0, 0), fov_y_degrees=70, **SIZE)
SHOWN = ("depth", "normal", "velocity", "instance", "color")


def moved(*shift: float, scale: float = 1.0) -> Floats:
    matrix = np.diag([scale, scale, scale, 1.0])
    matrix[:3, 3] = shift
    return matrix


def random_transform(random: np.random.Generator) -> Floats:
    matrix = moved(random.uniform(3, 12), *random.uniform(-4, 4, 2))
    matrix[:3, :3] = np.linalg.qr(random.normal(size=(3, 3)))[0] * random.uniform(0.3, 1.2, 3)
    return matrix


class Model:
    """A scene, and a dictionary with the same contents."""

    def __init__(self, meshes: list[Geometry]) -> None:
        self.meshes = meshes
        self.scene = Scene()
        for mesh in meshes:
            self.scene.add_mesh(mesh)
        self.there: dict[int, tuple[int, Floats]] = {}
        self.before: dict[int, tuple[int, Floats]] = {}  # in the previous frame

    def change(self, random: np.random.Generator) -> str:
        kind = str(random.choice(["add", "move", "remove", "add many"]))
        if kind in ("move", "remove") and not self.there:
            kind = "add"
        chosen = random.permutation(sorted(self.there))[: random.integers(1, 4)].tolist()
        if kind == "move":
            to = np.stack([random_transform(random) for _ in chosen])
            self.scene.move_all(chosen, to)
            self.there |= {number: (self.there[number][0], matrix) for number, matrix in zip(chosen, to, strict=True)}
        elif kind == "remove":
            self.scene.remove_all(chosen)
            for number in chosen:
                del self.there[number]
        else:
            mesh = int(random.integers(len(self.meshes)))
            to = np.stack([random_transform(random) for _ in range(1 if kind == "add" else 5)])
            numbers = self.scene.add_instances(mesh, to)
            self.there |= {number: (mesh, matrix) for number, matrix in zip(numbers, to, strict=True)}
        return kind

    def anew(self) -> tuple[Scene, list[int], Floats]:
        """A new scene with the existing instances at their places in the previous frame; then their numbers in this
        scene, and their current places."""
        scene, numbers = Scene(), sorted(self.there)
        for mesh in self.meshes:
            scene.add_mesh(mesh)
        for number in numbers:
            scene.add_instance(*self.before.get(number, self.there[number]))
        return scene, numbers, np.array([self.there[number][1] for number in numbers]).reshape(-1, 4, 4)


def test_frames_are_those_of_a_scene_that_was_always_so(ball: Geometry, cube: Geometry, device: str) -> None:
    met = Counter[str]()

    @settings(max_examples=12, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def hold(seed: int) -> None:
        random = np.random.default_rng(seed)
        model = Model([ball, cube])
        renderer = Renderer(model.scene, device)
        for step in range(6):
            for _ in range(random.integers(0, 4)):
                met[model.change(random)] += 1
            camera = Camera.look_at((0, 0.3 * step, 0.5), (9, 0, 0), fov_y_degrees=70, **SIZE)
            before = Camera.look_at((0, 0.3 * max(step - 1, 0), 0.5), (9, 0, 0), fov_y_degrees=70, **SIZE)
            frame = renderer.render(camera, SHOWN)
            other, numbers, now = model.anew()
            again = Renderer(other, device)
            if model.before:  # after an empty or missing frame, nothing has a previous place
                again.render(before, SHOWN)
            other.move_all(range(len(numbers)), now)
            expected = again.render(camera, SHOWN)
            for name in ("depth", "normal", "velocity", "color"):
                assert torch.equal(frame[name].nan_to_num(-7.0), expected[name].nan_to_num(-7.0)), name
            table = torch.tensor([*numbers, -1], dtype=torch.int32, device=expected["instance"].device)
            assert torch.equal(frame["instance"], table[expected["instance"].long()])
            met["moved on the screen"] += int((frame["velocity"].nan_to_num(0.0).abs() > 0.5).any())
            assert len(model.scene) == len(model.there)
            mesh_of, transforms = model.scene.instances()
            assert {k: int(mesh_of[k]) for k in np.flatnonzero(mesh_of >= 0).tolist()} == {
                number: mesh for number, (mesh, _) in model.there.items()
            }
            assert all(np.array_equal(transforms[number], matrix) for number, (_, matrix) in model.there.items())
            model.before = dict(model.there)

    hold()
    assert min(met[kind] for kind in ("add", "move", "remove", "add many", "moved on the screen")) > 0


def test_the_box_around_all_is_kept_up(ball: Geometry, cube: Geometry) -> None:
    shrunk = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        model = Model([ball, cube])
        for _ in range(12):
            model.change(random)
            if not model.there:
                with pytest.raises(ValueError, match="no instances"):
                    model.scene.bounds()
                continue
            other, _, now = model.anew()
            other.move_all(range(len(now)), now)
            before, found = np.array(model.scene.bounds()), other.bounds()
            assert np.array_equal(before, found)
            shrunk += int(len(model.there) > 1)
    assert shrunk > 50


def test_renderers_in_two_threads_compute_the_box_one_after_another(
    cube: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides_of, running, most = WorldBounds._sides_of, [0], [0]

    def slow(self: WorldBounds, *rest: Any) -> Floats:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.1)
        running[0] -= 1
        return sides_of(self, *rest)

    monkeypatch.setattr(WorldBounds, "_sides_of", slow)
    scene = Scene()
    scene.add_instance(scene.add_mesh(cube))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: scene.bounds(), range(2))
    assert most == [1]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(scene)).bounds(), first)


def test_a_scene_that_was_pickled_with_cached_bounds_is_unpickled(
    cube: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first versions pickled the cached values, which do not include the lock."""
    scene = Scene()
    scene.add_instance(scene.add_mesh(cube))
    before = scene.bounds()
    del scene._bounds._lock
    monkeypatch.delattr(WorldBounds, "__reduce__")
    again = pickle.loads(pickle.dumps(scene))
    np.testing.assert_array_equal(again.bounds(), before)
    again.add_instance(0, np.diag((2.0, 2.0, 2.0, 1.0)))
    np.testing.assert_array_equal(again.bounds(), 2 * np.array(before))


def test_only_what_has_changed_is_sent(cube: Geometry, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Placed._send

    def counted(self: Placed, instances: Instances, rows: NDArray[np.int64]) -> None:
        sent.append(len(rows))
        send(self, instances, rows)

    monkeypatch.setattr(Placed, "_send", counted)
    scene = Scene()
    number = scene.add_mesh(cube)
    scene.add_instances(number, np.stack([moved(6 + k % 30, k // 30 - 8, 0, scale=0.2) for k in range(500)]))
    renderer = Renderer(scene, device)
    renderer.render(AHEAD)
    assert sent.pop() == 500
    renderer.render(AHEAD)
    assert not sent
    scene.move_all([3, 499, 7], np.stack([moved(5, k, 1) for k in range(3)]))
    scene.move(7, moved(5, 2, 1.5))
    renderer.render(AHEAD)
    assert sent.pop() == 3
    scene.move_all(range(500), scene.instances()[1])  # moves instances to their current places
    renderer.render(AHEAD)
    assert not sent
    scene.remove(10)
    renderer.render(AHEAD)
    assert sent.pop() == 1
    # one instance more than there was memory for; memory grows by more than this one
    scene.add_instance(number, moved(4, 0, 0))
    renderer.render(AHEAD)
    assert sent.pop() == 1
    memory = renderer._memory
    scene.add_instances(number, np.stack([moved(4, k, 0.5) for k in range(200)]))
    renderer.render(AHEAD)
    assert sent == [200]
    assert renderer._memory is memory
    scene.move_all(range(500, 700), np.stack([moved(4, k, 0.6) for k in range(200)]))
    renderer.prefetch([AHEAD])  # does nothing without a pool
    renderer.render(AHEAD)
    assert sent == [200, 200]


def test_two_renderers_follow_one_scene(cube: Geometry, device: str) -> None:
    scene = Scene()
    number = scene.add_mesh(cube)
    for k in range(20):
        scene.add_instance(number, moved(8, k - 10, 0, scale=0.4))
    often, seldom = Renderer(scene, device), Renderer(scene, device)
    seldom.render(AHEAD)
    random = np.random.default_rng(0)
    for step in range(400):  # more rows than are remembered
        scene.move_all(random.permutation(20)[:5], np.stack([random_transform(random) for _ in range(5)]))
        if step % 40 == 0:
            often.render(AHEAD)
    assert scene.placed.changes.since(1) is None
    frames = [renderer.render(AHEAD, ("depth", "instance")) for renderer in (often, seldom, Renderer(scene, device))]
    assert torch.equal(frames[0]["depth"], frames[2]["depth"])
    assert torch.equal(frames[1]["depth"], frames[2]["depth"])
    assert torch.equal(frames[1]["instance"], frames[2]["instance"])


def test_a_prefetch_between_frames_does_not_take_a_velocity_away(ball: Geometry, device: str) -> None:
    scene = Scene()
    scene.add_instance(scene.add_mesh(ball), moved(5, 0, 0))
    plain, streamed = Renderer(scene, device), Renderer(scene, device, pool_bytes=4 << 20)
    for renderer in (plain, streamed):
        renderer.render(AHEAD, SHOWN)
    scene.move(0, moved(5, 0.4, 0))
    scene.add_instance(0, moved(5, -2, 0))
    streamed.prefetch([AHEAD])
    scene.move_all([0, 1], np.stack([moved(5, 0.6, 0), moved(5, -2.2, 0)]))
    ours, theirs = streamed.render(AHEAD, SHOWN), plain.render(AHEAD, SHOWN)
    assert torch.equal(ours["velocity"], theirs["velocity"])
    assert ours["velocity"][theirs["instance"] == 0].abs().max() > 1
    assert not ours["velocity"][theirs["instance"] == 1].any()
    assert not streamed.render(AHEAD, SHOWN)["velocity"].any()


def test_moves_take_one_launch_and_count_for_one_frame(cube: Geometry, device: str) -> None:
    scene = Scene()
    scene.add_instances(scene.add_mesh(cube), np.stack([moved(6, k - 10, 0, scale=0.2) for k in range(20)]))
    renderer = Renderer(scene, device)

    def launched() -> int:
        with count_launches() as launches:
            frame = renderer.render(AHEAD, SHOWN)
        assert sum(count for name, count in launches.items() if name.startswith("base_pass")) == 1
        assert not launches["emit_depth_targets"]
        moves = frame["velocity"].nan_to_num(1.0).abs().amax(-1) > 0
        seen.append(set(frame["instance"][moves].tolist()))
        return launches["put_instances"]

    seen: list[set[int]] = []
    assert launched() == 1
    assert launched() == 0
    scene.move_all([8, 10], np.stack([moved(6, -2, 0.3, scale=0.2), moved(6, 0, 0.3, scale=0.2)]))
    assert launched() == 1
    scene.move_all([10, 12], np.stack([moved(6, 0, 0.6, scale=0.2), moved(6, 2, 0.3, scale=0.2)]))
    assert launched() == 1
    assert launched() == 0
    assert seen == [set(), set(), {8, 10}, {10, 12}, set()]


def test_moves_for_a_frame_that_failed_are_of_the_next(
    cube: Geometry, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene()
    scene.add_instances(scene.add_mesh(cube), np.stack([moved(5, k - 1, 0, scale=0.3) for k in range(3)]))
    disturbed, plain = Renderer(scene, device), Renderer(scene, device)

    def move(height: float, *numbers: int) -> None:
        scene.move_all(numbers, np.stack([moved(5, k - 1, height, scale=0.3) for k in numbers]))

    for heights in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)):
        for renderer in (disturbed, plain):
            renderer.render(AHEAD, SHOWN)
        move(heights[0], 0, 1)
        for renderer in (disturbed, plain):
            renderer.render(AHEAD, SHOWN)
        move(heights[1], 1, 2)
        added = scene.add_instance(0, moved(5, 2 + heights[0], 0, scale=0.2))
        with monkeypatch.context() as failing:
            failing.setattr("rooftop.scene.rendering.renderer.Stages.emit", None)
            with pytest.raises(TypeError):
                disturbed.render(AHEAD, SHOWN)
        move(heights[2], 2)
        scene.move(added, moved(5, 2 + heights[0], 0.1, scale=0.2))
        ours, theirs = disturbed.render(AHEAD, SHOWN), plain.render(AHEAD, SHOWN)
        assert torch.equal(ours["velocity"], theirs["velocity"])
        speed = [ours["velocity"][ours["instance"] == k].abs().max() for k in (1, 2)]
        assert min(speed) > 0.5
        assert not ours["velocity"][ours["instance"] == added].any()
        ours, theirs = disturbed.render(AHEAD, SHOWN), plain.render(AHEAD, SHOWN)
        assert not ours["velocity"].any()
        assert not theirs["velocity"].any()


@pytest.mark.gpu
def test_two_streams_draw_a_scene_that_changes(ball: Geometry, cube: Geometry) -> None:
    """Cached launches and graphs also work on a stream other than the first renderer's."""
    scene, random = Scene(), np.random.default_rng(0)
    for mesh in (ball, cube):
        scene.add_instances(scene.add_mesh(mesh), np.stack([random_transform(random) for _ in range(20)]))
    scene.add_light(DirectionalLight((0.3, 0.2, -1), size=128, cascades=2))
    here, there, stream = Renderer(scene, "cuda"), Renderer(scene, "cuda"), torch.cuda.Stream()
    for _ in range(8):
        scene.move_all(random.permutation(40)[:5], np.stack([random_transform(random) for _ in range(5)]))
        ours = here.render(AHEAD, SHOWN)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            theirs = there.render(AHEAD, SHOWN)
        torch.cuda.synchronize()
        for name in SHOWN:
            assert torch.equal(ours[name].nan_to_num(-7.0), theirs[name].nan_to_num(-7.0)), name


def test_shadows_follow_what_comes_and_goes(cube: Geometry, device: str) -> None:
    def drawn(scene: Scene, renderer: Renderer) -> int:
        kept = renderer.render(AHEAD, ("shadow", "instance"))
        new = Renderer(scene, device).render(AHEAD, ("shadow", "instance"))
        assert torch.equal(kept["shadow"].nan_to_num(-7.0), new["shadow"].nan_to_num(-7.0))
        return kept.stats.shadow_maps

    scene = Scene()
    number = scene.add_mesh(cube)
    scene.add_instance(number, moved(8, 0, -12, scale=10))
    # so that the box around everything, and therefore the views, stay the same
    scene.add_instance(number, moved(40, 40, 40, scale=0.1))
    scene.add_light(DirectionalLight((0.3, 0.2, -1), size=64, cascades=1))
    renderer = Renderer(scene, device)
    assert drawn(scene, renderer) == 1
    above = scene.add_instance(number, moved(8, 0, 1, scale=0.6))
    assert drawn(scene, renderer) == 1
    assert drawn(scene, renderer) == 0
    scene.remove(above)
    assert drawn(scene, renderer) == 1
    assert drawn(scene, renderer) == 0


def test_all_are_removed(cube: Geometry, device: str) -> None:
    scene = Scene()
    scene.add_instances(scene.add_mesh(cube), np.stack([moved(5, k, 0) for k in range(3)]))
    renderer = Renderer(scene, device)
    assert renderer.render(AHEAD)["depth"].isfinite().any()
    scene.remove_all([2, 0, 1])
    assert len(scene) == 0
    assert not renderer.render(AHEAD)["depth"].isfinite().any()
    assert scene.add_instance(0, moved(5, 0, 0)) == 3
    frame = renderer.render(AHEAD, SHOWN)
    assert set(frame["instance"].unique().tolist()) == {-1, 3}
    assert not frame["velocity"].any()


def test_numbers_that_are_none(cube: Geometry) -> None:
    scene = Scene()
    scene.add_instances(scene.add_mesh(cube), np.stack([moved(5, k, 0) for k in range(4)]))
    scene.remove(2)
    two = np.stack([np.eye(4)] * 2)
    for change, words in (
        (lambda: scene.remove(2), "instance=2 was removed from the scene"),
        (lambda: scene.move(2, np.eye(4)), "instance=2 was removed from the scene"),
        (lambda: scene.remove(4), "instance=4: expected 0 to 3"),
        (lambda: scene.remove(-1), "instance=-1: expected 0 to 3"),
        (lambda: scene.remove_all([1, 0, 1]), "instance=1 is given 2 times: expected each number once"),
        (lambda: scene.move_all([3, 3], two), "instance=3 is given 2 times"),
        (lambda: scene.remove_all([0.5]), "expected integers"),  # type: ignore[list-item]
        (lambda: scene.remove_all([[0]]), "expected integers"),  # type: ignore[list-item]
        (lambda: scene.remove_all(True), "expected integers"),  # type: ignore[arg-type]
        (lambda: scene.remove_all([True]), "expected integers"),
        (lambda: Scene().remove(0), "instance=0: expected none: the scene has no instances"),
    ):
        with pytest.raises(ValueError, match=words):
            change()
    assert len(scene) == 3
    scene.remove_all([])
    assert len(scene) == 3
    mesh_of, transforms = scene.instances()
    assert mesh_of.tolist() == [0, 0, -1, 0]
    transforms[0] = 0
    assert np.array_equal(scene.instances()[1][0], moved(5, 0, 0))
    assert scene.triangles == 36


def test_changes_are_told_to_each_reader_once() -> None:
    instances = Instances()
    instances.add(0, np.stack([np.eye(4)] * 5000))
    assert instances.changed(0, 0).tolist() == list(range(5000))
    version, known = instances.changes.version, instances.count
    assert not len(instances.changed(version, known))
    instances.move(np.array([7, 3]), np.stack([2 * np.eye(4)] * 2))
    instances.add(0, np.eye(4)[None])
    instances.remove(np.array([7]))
    assert instances.changed(version, known).tolist() == [3, 7, 5000]
    version = instances.changes.version
    for k in range(FEW_CHANGES):
        instances.move(np.arange(4), np.stack([(2.0 + k) * np.eye(4)] * 4))
    assert len(instances.changed(version, instances.count)) == 5001
    assert len(instances.changes._log) <= 5001 // 2 // 4


@pytest.mark.parametrize("exponent", [-14, -3, 0, 4, 14])
def test_the_most_that_a_map_stretches(exponent: int) -> None:
    random = np.random.default_rng(exponent + 20)
    maps = random.normal(size=(300, 3, 3)) * random.choice([1e-6, 1, 30], (300, 1, 3)) * 10.0**exponent
    maps[:3] = np.diag([1, 2, 3.0]), np.eye(3), np.diag([-2, 2, 2.0])
    most = np.linalg.svd(maps, compute_uv=False)
    assert most_stretch(maps) == pytest.approx(most[:, 0], rel=1e-12)
    flat = np.flatnonzero((most[:, 2] < 1e-7 * most[:, 0]) | (most[:, 0] < 1e-15))
    assert first_flat(maps, 1e-7, 1e-15) == (flat[0] if len(flat) else None)


def test_flat_maps_are_found_among_others() -> None:
    maps = np.stack([np.eye(3)] * 9)
    assert first_flat(maps, 1e-7, 1e-15) is None
    maps[6] = np.diag([1, 1, 1e-9])
    maps[8] = 0
    assert first_flat(maps, 1e-7, 1e-15) == 6
    maps[6] = np.diag([1, 1, 1e-6])
    assert first_flat(maps, 1e-7, 1e-15) == 8

"""Moves of the user's camera: what each move keeps, and what it changes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rooftop.errors import InputError
from rooftop.scene.viewing.recorded_paths import RecordedPath
from rooftop.scene.viewing.viewpoints import FARTHEST, MOST_ELEVATION_DEGREES, NEAREST, Viewpoint, checked_moves

UPS = ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (-2.0, 0.3, 1.0))
coordinates = st.floats(-1e3, 1e3)
vectors = st.tuples(coordinates, coordinates, coordinates)
degrees = st.floats(-720, 720)


@st.composite
def viewpoints(draw: st.DrawFn) -> Viewpoint:
    eye, target, up = draw(vectors), draw(vectors), draw(st.sampled_from(UPS))
    view = Viewpoint(eye, target, up, draw(st.floats(5, 120)))
    assume(view.distance > 1e-2)
    assume(abs(elevation(view)) < MOST_ELEVATION_DEGREES - 0.5)
    return view


def elevation(view: Viewpoint) -> float:
    """Angles of the eye as seen from the target, in degrees."""
    offset = np.subtract(view.eye, view.target)
    sine = offset @ np.asarray(view.up) / np.linalg.norm(offset) / np.linalg.norm(view.up)
    return math.degrees(math.asin(np.clip(sine, -1, 1)))


def forward(view: Viewpoint) -> np.ndarray:
    return np.subtract(view.target, view.eye) / view.distance


def close(a: object, b: object, view: Viewpoint) -> bool:
    return bool(np.allclose(a, b, rtol=1e-9, atol=1e-9 * (view.distance + np.abs([view.eye, view.target]).max())))


@settings(max_examples=40)
@given(viewpoints(), degrees, degrees)
def test_an_orbit_keeps_the_target_and_the_distance_and_stays_upright(
    view: Viewpoint, right: float, down: float
) -> None:
    moved = view.orbited(right, down)
    assert moved.target == view.target
    assert moved.distance == pytest.approx(view.distance, rel=1e-7)
    raised = min(max(elevation(view) + down, -MOST_ELEVATION_DEGREES), MOST_ELEVATION_DEGREES)
    assert elevation(moved) == pytest.approx(raised, abs=1e-4)
    camera = moved.camera((64, 48), 1.0)
    assert (camera.world_to_camera[:3, :3] @ moved.up)[1] < 0  # up is up in the picture


@settings(max_examples=40)
@given(viewpoints(), degrees, st.floats(-20, 20))
def test_an_orbit_is_undone_by_its_reverse(view: Viewpoint, right: float, down: float) -> None:
    assume(abs(elevation(view) + down) < MOST_ELEVATION_DEGREES - 0.5)
    back = view.orbited(right, down).orbited(-right, -down)
    assert np.allclose(back.eye, view.eye, atol=1e-5 * view.distance)


@settings(max_examples=40)
@given(viewpoints(), st.floats(-170, 170), st.floats(-20, 20))
def test_who_looks_around_stays_where_they_are(view: Viewpoint, right: float, down: float) -> None:
    moved = view.looked(right, down)
    assert moved.eye == view.eye
    assert moved.distance == pytest.approx(view.distance, rel=1e-7)


def test_a_drag_to_the_right_turns_the_near_side_to_the_right_and_looks_to_the_right() -> None:
    view = Viewpoint((0.0, -5.0, 0.0), (0.0, 0.0, 0.0))  # x is right, y is away
    np.testing.assert_allclose(view.orbited(90, 0).eye, (-5, 0, 0), atol=1e-12)
    np.testing.assert_allclose(view.orbited(0, 30).eye, (0, -5 * math.cos(math.pi / 6), 2.5), atol=1e-12)
    np.testing.assert_allclose(view.looked(90, 0).target, (5, -5, 0), atol=1e-12)
    np.testing.assert_allclose(forward(view.looked(0, 30)), (0, math.cos(math.pi / 6), -0.5), atol=1e-12)


@settings(max_examples=40)
@given(viewpoints(), st.floats(-1e3, 1e3))
def test_flying_ahead_goes_along_the_view(view: Viewpoint, far: float) -> None:
    moved = view.flown(0, 0, far)
    assert close(np.subtract(moved.eye, view.eye), far * forward(view), view)
    assert close(np.subtract(moved.target, view.target), far * forward(view), view)


@settings(max_examples=40)
@given(viewpoints(), st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_flying_aside_is_level_and_across_and_up_is_up(view: Viewpoint, right: float, up: float) -> None:
    axis = np.asarray(view.up) / np.linalg.norm(view.up)
    aside = np.subtract(view.flown(right, 0, 0).eye, view.eye)
    size = 1e3 + abs(right)
    assert abs(aside @ axis) < 1e-9 * size
    assert abs(aside @ forward(view)) < 1e-9 * size
    assert np.sign(np.cross(forward(view), axis) @ aside) == np.sign(right) or abs(right) < 1e-6
    assert close(np.subtract(view.flown(0, up, 0).eye, view.eye), up * axis, view)


@settings(max_examples=40)
@given(viewpoints(), st.floats(-0.4, 0.4), st.floats(-0.4, 0.4))
def test_what_is_at_the_target_follows_the_pointer(view: Viewpoint, right: float, down: float) -> None:
    camera = view.panned(right, down).camera((640, 480), 1.0)
    x, y, z = camera.world_to_camera[:3] @ [*view.target, 1.0]
    at = (camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy)
    assert np.allclose(at, (319.5 + 480 * right, 239.5 + 480 * down), atol=1e-3)


@settings(max_examples=40)
@given(viewpoints(), st.floats(-5, 5))
def test_zooming_goes_towards_the_target(view: Viewpoint, doublings: float) -> None:
    moved = view.zoomed(doublings, 1.0)
    assert (moved.target, moved.distance) == (view.target, pytest.approx(view.distance * 2**doublings, rel=1e-7))
    assert np.allclose(forward(moved), forward(view), atol=1e-6)


def test_zooming_ends_before_numbers_do() -> None:
    view = Viewpoint((0.0, -5.0, 0.0), (0.0, 0.0, 0.0))
    assert view.zoomed(-1e9, 10.0).distance == pytest.approx(10 * NEAREST)
    assert view.zoomed(1e9, 10.0).distance == pytest.approx(10 * FARTHEST)


@settings(max_examples=40)
@given(st.sampled_from(UPS), st.integers(16, 500), st.integers(16, 500), st.floats(5, 120), degrees, st.integers(0, 9))
def test_home_and_framed_have_the_whole_scene_in_the_picture(
    up: tuple[float, float, float], width: int, height: int, fov: float, turn: float, seed: int
) -> None:
    points = np.random.default_rng(seed).uniform((1, -6, 2), (4, 3, 2.5), (30, 3))
    home = Viewpoint.home(points, up, fov, (width, height))
    for view in (home, home.orbited(turn, turn / 9).flown(1, 2, 3).framed(points, (width, height))):
        camera = view.camera((width, height), 7.0)
        x, y, z = camera.world_to_camera[:3, :3] @ points.T + camera.world_to_camera[:3, 3:]
        assert z.min() > camera.near
        most = max(2 * camera.fx * np.abs(x / z).max() / width, 2 * camera.fy * np.abs(y / z).max() / height)
        assert most == pytest.approx(0.94, abs=1e-6)


# ---- viewpoints as JSON ----------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(viewpoints())
def test_a_view_comes_back_from_json(view: Viewpoint) -> None:
    assert Viewpoint.of_plain(json.loads(json.dumps(view.plain()))) == view


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 100), viewpoints()), min_size=1, max_size=6, unique_by=lambda each: each[0]))
def test_a_path_comes_back_from_json_and_passes_through_its_views(samples: list[tuple[float, Viewpoint]]) -> None:
    seconds, views = zip(*sorted(samples, key=lambda each: each[0]), strict=True)
    path = RecordedPath(seconds, views)
    assert RecordedPath.of_plain(json.loads(json.dumps(path.plain()))) == path
    for time, view in zip(seconds, views, strict=True):
        assert np.allclose(path.at(time).eye, view.eye, atol=1e-9)
    assert path.at(-1.0) == views[0]
    assert path.at(101.0) == views[-1]
    if len(views) > 1:
        middle = path.at((seconds[0] + seconds[1]) / 2)
        assert np.allclose(middle.eye, np.add(views[0].eye, views[1].eye) / 2, atol=1e-3)
    assert [path.evenly(3)[k].eye for k in (0, -1)] == [views[0].eye, views[-1].eye]


EYES = {"eye": [1, 2, 3], "target": [0, 0, 0]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "expected an object"),
        ({"eye": [1, 2, 3]}, "target is missing"),
        (EYES | {"zoom": 1}, "'zoom' is not known"),
        (EYES | {"eye": [1, 2]}, "camera: eye is .*: expected 3 finite numbers"),
        (EYES | {"eye": [1, 2, math.nan]}, "expected 3 finite numbers"),
        (EYES | {"eye": [1, 2, 1e300]}, "expected 3 finite numbers"),
        (EYES | {"eye": [1, 2, True]}, "expected 3 finite numbers"),
        (EYES | {"eye": [1, 2, 10**400]}, "expected 3 finite numbers"),
        (EYES | {"eye": [0, 0, 0]}, "the same point"),
        (EYES | {"eye": [0, 0, 3]}, "points along the view"),
        (EYES | {"up": [0, 0, 0]}, "points along the view"),
        (EYES | {"fov_y_degrees": 180}, "fov_y_degrees=180"),
        (EYES | {"fov_y_degrees": "50"}, "fov_y_degrees is .*: expected 1 finite numbers"),
    ],
)
def test_what_is_no_view_is_refused(content: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Viewpoint.of_plain(content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "expected an object with any of orbit_degrees"),
        ({"orbit_degres": [1, 2]}, r"'orbit_degres' is not known \(did you mean orbit_degrees\?\)"),
        ({"fly": [1, 2]}, "move: fly is .*: expected 3 finite numbers"),
        ({"zoom_doublings": [math.inf]}, "expected 1 finite numbers"),
    ],
)
def test_what_is_no_move_is_refused(content: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        checked_moves(content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "view`, with rooftop_path and views"),
        ({"views": [EYES]}, "view`, with rooftop_path and views"),
        ({"rooftop_path": 2, "views": []}, "rooftop_path is 2, expected 1"),
        ({"rooftop_path": 1, "views": []}, "expected views, a list of 1 to"),
        ({"rooftop_path": 1, "views": "ab"}, "expected views, a list"),
        ({"rooftop_path": 1, "views": [EYES]}, "view 0: expected an object with seconds"),
        ({"rooftop_path": 1, "views": [EYES | {"seconds": 1}] * 2}, "view 1: seconds is 1: expected more than in the"),
        ({"rooftop_path": 1, "views": [{"eye": [1, 2, 3], "seconds": 0}]}, "view 0: target is missing"),
    ],
)
def test_what_is_no_path_is_refused(content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        RecordedPath.of_plain(content)
    (tmp_path / "path.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"path.json: .*{words}"):
        RecordedPath.read(tmp_path / "path.json")

"""Cameras of `rooftop scene render`: from an eye or orbit angles, from a calibrated lens and pose, or from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from rooftop.errors import InputError
from rooftop.scene.cameras import Camera
from rooftop.scene.framing import NEAR, THREE_QUARTERS, around, distance_that_frames, outward
from rooftop.scene.viewing.recorded_paths import RecordedPath

Floats = NDArray[np.float64]
Numbers = tuple[float, ...]

PATH_RATE = 30  # pictures per second of a recorded path, if --frames is not given
LOOKING = {"eye", "target", "up", "fov_y_degrees", "view_height"}
CALIBRATED = {"K", "world_to_camera"}
EITHER = {"width", "height", "near"}


def numbers(*counts: int) -> Callable[[click.Context, click.Parameter, str | None], Numbers | None]:
    """Return an option callback that parses finite numbers separated by commas. `counts` lists the allowed lengths."""

    def read(context: click.Context, option: click.Parameter, text: str | None) -> Numbers | None:
        return None if text is None else _numbers(text, counts, option)

    return read


def pixels(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Option callback: parse WIDTHxHEIGHT to (width, height)."""
    if text is None:
        return None
    words = text.lower().split("x")
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        raise click.BadParameter(f"{text!r}: expected WIDTHxHEIGHT in pixels, such as 1920x1080", param=option)
    return int(words[0]), int(words[1])


def _numbers(text: str, counts: Sequence[int], option: click.Parameter | None = None) -> Numbers:
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if len(found) not in counts or not all(map(math.isfinite, found)):
        expected = " or ".join(map(str, counts))
        raise click.BadParameter(
            f"{text!r}: expected {expected} numbers separated by commas, without spaces", param=option
        )
    return found


@dataclass(frozen=True)
class Choice:
    """The camera options of the command line. Options that were not given are None."""

    eye: Numbers | None = None
    target: Numbers | None = None
    up: Numbers | None = None
    fov_y_degrees: float | None = None
    orbit: Numbers | None = None
    parallel: float | None = None
    intrinsics: str | None = None
    pose: Path | None = None
    camera: Path | None = None
    size: tuple[int, int] | None = None
    near: float | None = None
    path: Path | None = None
    frames: int | None = None


def chosen_cameras(choice: Choice, points: Floats) -> list[Camera]:
    """Return the cameras to render with: one camera, the cameras of a file, or cameras along a path.

    Args:
        points: (N, 3), points in the world that outline the scene, as `rooftop.scene.framing.outline` returns them.

    Raises:
        click.UsageError: options exclude each other, or an option needs another option that is missing.
        InputError: a file cannot be read, or the numbers do not describe a valid camera.
    """
    _check_together(choice)
    width, height = choice.size or (1920, 1080)
    bounds = np.stack([points.min(0), points.max(0)])
    near = NEAR * float(np.linalg.norm(bounds[1] - bounds[0])) if choice.near is None else choice.near
    try:
        if choice.camera is not None:
            return _of_file(choice.camera, choice.size, near)
        if choice.path is not None:
            return _along(choice.path, choice.frames, (width, height), bounds, choice.near)
        if choice.intrinsics is not None:
            assert choice.pose is not None
            matrix = _intrinsics(choice.intrinsics)
            return [Camera.from_intrinsics(matrix, _matrix(choice.pose, "world_to_camera"), width, height, near)]
        return [_looking(choice, points, bounds, width, height, near)]
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(str(error)) from None


def turned(camera: Camera, degrees: float, center: Floats, up: Numbers) -> Camera:
    """Rotate a camera around an axis through `center`, counterclockwise as seen from above."""
    axis = np.asarray(up) / np.linalg.norm(up)
    angle = math.radians(-degrees)  # moving the camera one way moves the world the other way
    cross = np.array([[0, -axis[2], axis[1]], [axis[2], 0, -axis[0]], [-axis[1], axis[0], 0]])
    turn = np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross
    world = np.eye(4)
    world[:3, :3], world[:3, 3] = turn, center - turn @ center
    return replace(camera, world_to_camera=camera.world_to_camera @ world)


def _check_together(choice: Choice) -> None:
    ways: dict[str, object] = {"--camera": choice.camera, "--path": choice.path, "--intrinsics": choice.intrinsics}
    ways |= {"--eye": choice.eye, "--orbit": choice.orbit}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} each set the camera: give only one of them")
    if (choice.intrinsics is None) != (choice.pose is None):
        raise click.UsageError("expected --intrinsics (the lens) and --pose (the position of the camera) together")
    lens = {"--fov": choice.fov_y_degrees, "--parallel": choice.parallel}
    if None not in lens.values():
        raise click.UsageError(
            "--fov is for a perspective view, --parallel for an orthographic one: give only one of them"
        )
    if given and given[0] in ("--camera", "--path", "--intrinsics"):
        rest = {**lens, "--target": choice.target, "--up": choice.up}
        if given[0] != "--camera":
            # --up may remain: it is the axis of --frames, or the up direction of the ground of --instances
            del rest["--up"]
        extra = [name for name, value in rest.items() if value is not None]
        if extra:
            raise click.UsageError(
                f"{extra[0]} does not go with {given[0]}, which sets the same value: leave {extra[0]} out"
            )


def _looking(choice: Choice, points: Floats, bounds: Floats, width: int, height: int, near: float) -> Camera:
    """The camera at --eye, or a camera on an orbit around --target. In a perspective view, an orbit without a distance
    is so wide that the whole scene is in view."""
    target = np.asarray(bounds.mean(0) if choice.target is None else choice.target)
    up = choice.up or (0.0, 0.0, 1.0)
    fov = 60.0 if choice.fov_y_degrees is None else choice.fov_y_degrees
    if choice.eye is not None:
        return _view(choice.eye, target, up, fov, choice.parallel, width, height, near)
    azimuth, elevation, *distances = choice.orbit or THREE_QUARTERS
    if not -90 <= elevation <= 90:
        raise click.BadParameter(
            f"the elevation must be from -90 to 90 degrees, got {elevation:g}", param_hint="--orbit"
        )
    if distances and distances[0] <= 0:
        raise click.BadParameter(f"the distance must be more than 0, got {distances[0]:g}", param_hint="--orbit")
    axis = around(up)[2]
    if abs(elevation) > 89.9:
        # In a view straight from above, the picture's up direction is opposite to the azimuth; straight from below, it
        # is the azimuth.
        axis = -math.copysign(1, elevation) * outward(azimuth, 0, up)
    size = float(np.linalg.norm(bounds[1] - bounds[0]))
    eye = target + size * outward(azimuth, elevation, up)
    camera = _view(eye, target, axis, fov, choice.parallel, width, height, near)
    distance = distances[0] if distances else size
    if not distances and choice.parallel is None:
        distance = distance_that_frames(camera, points - target)
    matrix = camera.world_to_camera.copy()
    matrix[:3, 3] += (0, 0, distance - size)
    return replace(camera, world_to_camera=matrix)


def _view(
    eye: Any, target: Any, up: Any, fov: float, parallel: float | None, width: int, height: int, near: float
) -> Camera:
    if parallel is not None:
        return Camera.parallel(eye, target, up, parallel, width, height, near)
    return Camera.look_at(eye, target, up, fov, width, height, near)


# ---- files -----------------------------------------------------------------------------------------------------------


def _of_file(path: Path, size: tuple[int, int] | None, near: float) -> list[Camera]:
    """Read the cameras of a JSON file, which contains one camera object or a list of camera objects."""
    content = _json(path)
    views = content if isinstance(content, list) else [content]
    if not views:
        raise InputError(f"{path} has an empty list: expected at least one camera")
    return [
        _of_object(view, f"{path}, camera {number}" if len(views) > 1 else str(path), size, near)
        for number, view in enumerate(views)
    ]


def _of_object(view: Any, where: str, size: tuple[int, int] | None, near: float) -> Camera:
    if not isinstance(view, Mapping):
        raise InputError(f"{where}: expected an object with eye and target, or K and world_to_camera")
    calibrated = "K" in view
    known, needed = (CALIBRATED, sorted(CALIBRATED)) if calibrated else (LOOKING, ["eye", "target"])
    missing, wrong = [name for name in needed if name not in view], sorted(set(view) - known - EITHER)
    if missing or wrong:
        raise InputError(
            f"{where}: {f'{missing[0]} is missing' if missing else f'{wrong[0]} is not known'}; expected eye and "
            "target (and up, fov_y_degrees or view_height), or K and world_to_camera; each form may also have width, "
            "height and near"
        )
    shape = size or (view.get("width", 1920), view.get("height", 1080))
    make: Callable[..., Camera] = Camera.from_intrinsics
    arguments = {name: view[name] for name in known if name in view}
    if not calibrated:
        make = Camera.parallel if "view_height" in view else Camera.look_at
        if "view_height" in view and "fov_y_degrees" in view:
            raise InputError(
                f"{where}: fov_y_degrees is for a perspective view, view_height for an orthographic one: give only "
                "one of them"
            )
    try:
        return make(**arguments, width=shape[0], height=shape[1], near=view.get("near", near))
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None


def _along(path: Path, frames: int | None, size: tuple[int, int], bounds: Floats, near: float | None) -> list[Camera]:
    """Read a camera path that the viewer recorded, and return cameras along it at `frames` equal time steps (None: at
    `PATH_RATE` frames per second).
    """
    recorded = RecordedPath.read(path)
    views = recorded.evenly(frames or 1 + round(recorded.duration * PATH_RATE))
    cameras = [view.camera(size, float(np.linalg.norm(bounds[1] - bounds[0]))) for view in views]
    return cameras if near is None else [replace(camera, near=near) for camera in cameras]


def _intrinsics(text: str) -> Any:
    """The intrinsic matrix K, from fx,fy,cx,cy or from a JSON file."""
    if "," not in text:
        return _matrix(Path(text), "K")
    fx, fy, cx, cy = _numbers(text, [4])
    return [[fx, 0, cx], [0, fy, cy], [0, 0, 1]]


def _matrix(path: Path, name: str) -> Any:
    """Read a matrix from a JSON file. The file contains a list of rows, or an object with such a list under `name`."""
    content = _json(path)
    if isinstance(content, Mapping):
        if name not in content:
            raise InputError(f"{path}: expected {name} as a list of rows, alone or in an object under that name")
        content = content[name]
    try:
        rows = np.asarray(content, dtype=np.float64)
    except (TypeError, ValueError):
        rows = np.zeros(0)
    if not isinstance(content, Sequence) or rows.ndim != 2:
        raise InputError(f"{path}: {name} is not a list of rows of numbers")
    return rows


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None

"""The user's viewpoint and its moves: orbit around a point, pan, zoom, and fly through the scene.

A pan or an orbit moves the scene with the pointer; looking around turns the camera in the pointer's direction.
Rotations change azimuth and elevation, but never roll the camera, so that `up` stays up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.errors import InputError
from rooftop.scene.arguments import MOST
from rooftop.scene.cameras import Camera
from rooftop.scene.framing import NEAR, THREE_QUARTERS, around, distance_that_frames, outward
from rooftop.words import did_you_mean

Floats = NDArray[np.float64]
Vector = tuple[float, float, float]

FOV_Y_DEGREES = 50.0
MOST_ELEVATION_DEGREES = 89.5  # greatest elevation; near 90 degrees, `up` would be along the view
NEAREST, FARTHEST = 1e-6, 1e6  # least and greatest distance from the target that zooming reaches, in sizes of the scene
# distance of the near plane as a share of the distance to the target; this or NEAR applies, whichever is nearer
NEAR_OF_DISTANCE = 1e-3
KEYS = ("eye", "target", "up", "fov_y_degrees")


@dataclass(frozen=True)
class Viewpoint:
    """A perspective view, without the size of its picture. Methods that move the view return a new view.

    Attributes:
        eye: the camera's position, in the world.
        target: the point that the camera looks at and orbits.
        up: the up direction, which moves do not change.
        fov_y_degrees: angle from the lower to the upper edge.
    """

    eye: Vector
    target: Vector
    up: Vector = (0.0, 0.0, 1.0)
    fov_y_degrees: float = FOV_Y_DEGREES

    @classmethod
    def home(cls, points: Floats, up: Vector, fov_y_degrees: float, size: tuple[int, int]) -> Viewpoint:
        """Make the view from the front, the right and a little above, with the whole scene in the picture.

        Args:
            points: (N, 3), points that outline the scene, in the world (`framing.outline`).
            size: width and height of the picture, in pixels.
        """
        middle = (points.min(0) + points.max(0)) / 2
        far = max(float(np.linalg.norm(np.ptp(points, axis=0))), 1e-9)
        eye = middle + far * outward(*THREE_QUARTERS, up)
        return cls(_vector(eye), _vector(middle), up, fov_y_degrees).framed(points, size)

    @property
    def distance(self) -> float:
        """The distance from the eye to the target."""
        return float(np.linalg.norm(np.subtract(self.target, self.eye)))

    def camera(self, size: tuple[int, int], scene_size: float) -> Camera:
        """The camera for the picture.

        Args:
            size: width and height in pixels.
            scene_size: size of the scene, in world units; the near plane's distance is at most a fixed share of this
                size.

        Raises:
            ValueError: the eye is at the target, the view is along `up`, or a coordinate, the angle or the size is out
                of range.
        """
        near = min(NEAR * scene_size, NEAR_OF_DISTANCE * self.distance)
        return Camera.look_at(self.eye, self.target, self.up, self.fov_y_degrees, *size, near=near)

    def framed(self, points: Floats, size: tuple[int, int]) -> Viewpoint:
        """Move the camera and its target, without a turn, so that all points (N, 3) are in the picture."""
        middle = (points.min(0) + points.max(0)) / 2
        far = max(float(np.linalg.norm(np.ptp(points, axis=0))), 1e-9)
        backward = np.subtract(self.eye, self.target) / self.distance
        moved = replace(self, eye=_vector(middle + far * backward), target=_vector(middle))
        distance = distance_that_frames(moved.camera(size, far), points - middle)
        return replace(moved, eye=_vector(middle + distance * backward))

    def orbited(self, right_degrees: float, down_degrees: float) -> Viewpoint:
        """Orbit around the target at the same distance, such that the near side of the scene moves right and down."""
        offset = np.subtract(self.eye, self.target)
        return replace(self, eye=_vector(self.target + self._turned(offset, -right_degrees, down_degrees)))

    def looked(self, right_degrees: float, down_degrees: float) -> Viewpoint:
        """Turn the camera right and down without moving it. The target moves with the direction of the view, and
        keeps its distance from the eye."""
        ahead = np.subtract(self.target, self.eye)
        return replace(self, target=_vector(self.eye + self._turned(ahead, -right_degrees, -down_degrees)))

    def panned(self, right: float, down: float) -> Viewpoint:
        """Move the camera sideways, such that the target moves right and down in the picture, by these fractions of the
        picture's height."""
        across, below, _ = self._axes()
        height = 2 * self.distance * math.tan(math.radians(self.fov_y_degrees) / 2)
        return self._shifted(-height * (right * across + down * below))

    def zoomed(self, doublings: float, scene_size: float) -> Viewpoint:
        """Move towards the target or away from it: multiply the distance by 2^doublings, but keep it from NEAREST to
        FARTHEST times the size of the scene."""
        low, high = NEAREST * scene_size, FARTHEST * scene_size
        distance = min(max(self.distance * 2.0 ** min(max(doublings, -99.0), 99.0), low), high)
        offset = np.subtract(self.eye, self.target)
        return replace(self, eye=_vector(self.target + distance / self.distance * offset))

    def flown(self, right: float, up: float, forward: float) -> Viewpoint:
        """Move through the scene by these distances in world units: `right` sideways, `up` along the up direction, and
        `forward` along the view."""
        across, _, ahead = self._axes()
        return self._shifted(right * across + up * around(self.up)[2] + forward * ahead)

    def towards(self, point: Sequence[float]) -> Viewpoint:
        """Turn the camera towards a point without moving it; the point becomes the target. The view is unchanged if the
        camera is at that point."""
        target = _vector(point)
        return self if target == self.eye else replace(self, target=target)

    def moved(self, move: Mapping[str, tuple[float, ...]], scene_size: float) -> Viewpoint:
        """Apply all moves that a page has collected since its last picture. `MOVES` lists the names of the moves.

        Raises:
            ValueError: a move leads to a view for which no camera is possible (see `camera`).
        """
        view = self
        for name, amounts in move.items():
            view = MOVES[name].apply(view, amounts, scene_size)
            view.camera((16, 16), scene_size)  # the next move needs a view with a direction
        return view

    def plain(self) -> dict[str, Any]:
        """The view as an object for JSON, which `rooftop scene render --camera` reads."""
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in KEYS}

    @classmethod
    def of_plain(cls, content: object, where: str = "camera") -> Viewpoint:
        """Read a view from a parsed JSON object.

        Raises:
            InputError: the object is not a view; the message begins with `where`.
        """
        if not isinstance(content, Mapping):
            raise InputError(f"{where}: expected an object with {', '.join(KEYS)}, not {content!r:.80}")
        missing = [name for name in ("eye", "target") if name not in content]
        extra = sorted(set(content) - set(KEYS))
        if missing or extra:
            problem = f"{missing[0]} is missing" if missing else f"{extra[0]!r} is not known"
            raise InputError(f"{where}: {problem}; expected eye and target, and optionally up and fov_y_degrees")
        x, y, z = finite_numbers(content.get("up", (0.0, 0.0, 1.0)), 3, f"{where}: up")
        (fov,) = finite_numbers([content.get("fov_y_degrees", FOV_Y_DEGREES)], 1, f"{where}: fov_y_degrees")
        eye, target = (_vector(finite_numbers(content[name], 3, f"{where}: {name}")) for name in ("eye", "target"))
        view = cls(eye, target, (x, y, z), fov)
        try:
            view.camera((16, 16), 1.0)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
        return view

    def _axes(self) -> Floats:
        """The unit vectors right, down and forward, as rows (3, 3)."""
        ahead = np.subtract(self.target, self.eye) / self.distance
        across = np.cross(ahead, around(self.up)[2])
        across /= np.linalg.norm(across)
        return np.stack([across, np.cross(ahead, across), ahead])

    def _shifted(self, by: Floats) -> Viewpoint:
        return replace(self, eye=_vector(self.eye + by), target=_vector(self.target + by))

    def _turned(self, direction: Floats, azimuth_degrees: float, elevation_degrees: float) -> Floats:
        """Turn a direction around `up` by an azimuth, then upwards by an elevation. The result has the same length, and
        at most MOST_ELEVATION_DEGREES above or below the horizon."""
        length = float(np.linalg.norm(direction))
        x, y, z = around(self.up) @ (direction / length)
        azimuth = math.degrees(math.atan2(y, x)) + azimuth_degrees
        elevation = math.degrees(math.asin(min(max(z, -1.0), 1.0))) + elevation_degrees
        elevation = min(max(elevation, -MOST_ELEVATION_DEGREES), MOST_ELEVATION_DEGREES)
        return length * outward(azimuth % 360, elevation, self.up)


@dataclass(frozen=True)
class Move:
    """A move that a page may request, such as an orbit.

    Attributes:
        amounts: the number of the move's parameters.
        apply: a function of (view, the parameters, size of the scene) that returns the new view.
    """

    amounts: int
    apply: Callable[[Viewpoint, tuple[float, ...], float], Viewpoint]


MOVES = {
    "orbit_degrees": Move(2, lambda view, by, _: view.orbited(*by)),
    "look_degrees": Move(2, lambda view, by, _: view.looked(*by)),
    "pan_heights": Move(2, lambda view, by, _: view.panned(*by)),
    "zoom_doublings": Move(1, lambda view, by, size: view.zoomed(by[0], size)),
    "fly": Move(3, lambda view, by, _: view.flown(*by)),
}
"""The moves that a page may request, by their names in JSON."""


def finite_numbers(content: object, count: int, where: str) -> tuple[float, ...]:
    """Check and return `count` numbers from JSON.

    Raises:
        InputError: the content is not a list of `count` numbers, or a number is not finite or is too large.
    """
    values = content if isinstance(content, list | tuple) else ()
    if len(values) != count or not all(type(value) in (int, float) and abs(value) <= MOST for value in values):
        raise InputError(f"{where} is {content!r:.80}: expected {count} finite numbers")
    return tuple(map(float, values))


def checked_moves(content: object) -> dict[str, tuple[float, ...]]:
    """Check and return the moves of a request, by their names.

    Raises:
        InputError: a move is unknown, or has a wrong number of parameters.
    """
    if not isinstance(content, Mapping):
        raise InputError(f"move is {content!r:.80}: expected an object with any of {', '.join(MOVES)}")
    for name in content:
        if name not in MOVES:
            raise InputError(f"move {name!r} is not known{did_you_mean(name, MOVES)}; there are {', '.join(MOVES)}")
    return {name: finite_numbers(content[name], MOVES[name].amounts, f"move: {name}") for name in content}


def _vector(values: Sequence[float] | Floats) -> Vector:
    x, y, z = map(float, values)
    return (x, y, z)

"""What lights a scene, and from where each light looks at it: the views of its shadow maps.

    scene.add_light(DirectionalLight((1, 0.5, -2)))
    scene.add_light(SpotLight((0, 0, 3), (0, 0, -1), angle_degrees=40))

A directional light has a map for each cascade of each camera: a part of what the camera sees, near ones small and so
finer. A cascade is a sphere around that part, whose size does not change as the camera moves and turns, and its map
moves by whole texels: what stands still has the same shadow in every frame. A spot light has one map, a point light
six.

Source: Zhang et al. 2006, "Parallel-Split Shadow Maps for Large-scale Virtual Environments"; Valient 2008, "Stable
Rendering of Cascaded Shadow Maps"; attenuation by distance as of glTF's KHR_lights_punctual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rooftop.scene.arguments import LEAST, MOST, number_in, real_numbers, short, whole_number, whole_pixels
from rooftop.scene.cameras import Camera

MOST_CASCADES = 8
UNIFORM = 0.2  # of the way from logarithmic borders of cascades to equal ones
NEAREST = 1 / 500  # of the distance: where the first cascade begins, if the camera's near plane is not farther
MARGIN = 2  # texels at each edge of a map that no pixel of its cascade falls on
NEAR_OF_RANGE = 1e-3  # where spot and point lights begin to cast shadows, of how far they reach

Floats = NDArray[np.float64]
Vector = Sequence[float]
"""Three numbers; anything that NumPy takes for them is kept as a tuple."""


@dataclass(frozen=True)
class DirectionalLight:
    """A light as far away as the sun.

    Attributes:
        direction: into which it shines, in the world; of any length.
        color: (3,) of what faces it, 0 or more; 1 is white.
        cascades: maps for each camera, 1 to 8.
        size: texels along each edge of a map.
        distance: how far from the camera there are shadows, in world units; None: a power of two beyond the scene's
            farthest corner.
    """

    direction: Vector
    color: Vector = (1.0, 1.0, 1.0)
    cascades: int = 4
    size: int = 2048
    distance: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", _direction("direction", self.direction))
        object.__setattr__(self, "color", _color(self.color))
        object.__setattr__(self, "cascades", whole_number("cascades", self.cascades, 1, MOST_CASCADES))
        object.__setattr__(self, "size", _map_size(self.size))
        if self.distance is not None:
            object.__setattr__(self, "distance", number_in("distance", self.distance, LEAST, MOST))

    def maps(self, cameras: Sequence[Camera], bounds: Floats) -> list[Camera]:
        """The views of its maps: the cascades of the first camera from near to far, then those of the next.

        Args:
            cameras: of the frame.
            bounds: (2, 3), a box around all that casts shadows.
        """
        return [view for camera in cameras for view in self._cascades_of(camera, bounds)]

    def _cascades_of(self, camera: Camera, bounds: Floats) -> list[Camera]:
        toward = np.asarray(self.direction)
        turn = _turn_along(toward)  # rows: right, down, along
        corners = np.array(list(itertools.product(*bounds.T)))  # (8, 3)
        along = corners @ turn[2]
        step = 2.0 ** math.ceil(math.log2(max(np.ptp(along), np.ptp(bounds, axis=0).max(), LEAST) / 64))
        begin = math.floor(along.min() / step) * step - step  # in steps: it moves rarely as casters do
        distance = self.distance
        if distance is None:
            farthest = np.linalg.norm(corners - camera.position, axis=1).max()
            distance = 2.0 ** math.ceil(math.log2(max(farthest, LEAST)))
        found = []
        for near, far in itertools.pairwise(borders(max(camera.near, NEAREST * distance), distance, self.cascades)):
            middle, radius = _sphere_of(camera, near, far)
            texel = 2 * radius / (self.size - 2 * MARGIN - 1)
            center = turn @ (camera.world_to_camera[:3, :3].T @ (middle - camera.world_to_camera[:3, 3]))
            matrix = np.eye(4)
            matrix[:3, :3] = turn
            matrix[:3, 3] = (*(-np.floor(center[:2] / texel) * texel), -begin)
            edge = (self.size - 1) / 2
            found.append(
                Camera(matrix, self.size, self.size, 1 / texel, 1 / texel, edge, edge, step / 4, orthographic=True)
            )
        return found


@dataclass(frozen=True)
class SpotLight:
    """A light that shines from a point into a cone.

    Attributes:
        position: in the world.
        direction: of the cone's axis, of any length.
        angle_degrees: of the whole cone, up to 160; beyond it there is no light.
        color: (3,) of what faces it one unit away.
        range: how far it reaches, in world units; there it has faded to nothing.
        size: texels along each edge of its map.
        soft: the outer part of the cone over which light fades, 0 to 1.
    """

    position: Vector
    direction: Vector
    angle_degrees: float = 60.0
    color: Vector = (1.0, 1.0, 1.0)
    range: float = 100.0
    size: int = 1024
    soft: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "position", _point("position", self.position))
        object.__setattr__(self, "direction", _direction("direction", self.direction))
        object.__setattr__(self, "angle_degrees", number_in("angle_degrees", self.angle_degrees, 1e-2, 160.0))
        object.__setattr__(self, "color", _color(self.color))
        object.__setattr__(self, "range", number_in("range", self.range, LEAST / NEAR_OF_RANGE, MOST))
        object.__setattr__(self, "size", _map_size(self.size))
        object.__setattr__(self, "soft", number_in("soft", self.soft, 0.0, 1.0))

    def maps(self, cameras: Sequence[Camera], bounds: Floats) -> list[Camera]:
        """As of `DirectionalLight`: one, whatever the cameras."""
        turn = _turn_along(np.asarray(self.direction))
        wide = math.tan(math.radians(self.angle_degrees) / 2)
        return [_from_point(np.asarray(self.position), turn, wide, self.size, self.range)]


@dataclass(frozen=True)
class PointLight:
    """A light that shines from a point into all directions. Attributes as of `SpotLight`; `size` is that of each of six
    maps."""

    position: Vector
    color: Vector = (1.0, 1.0, 1.0)
    range: float = 100.0
    size: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "position", _point("position", self.position))
        object.__setattr__(self, "color", _color(self.color))
        object.__setattr__(self, "range", number_in("range", self.range, LEAST / NEAR_OF_RANGE, MOST))
        object.__setattr__(self, "size", _map_size(self.size))

    def maps(self, cameras: Sequence[Camera], bounds: Floats) -> list[Camera]:
        """As of `DirectionalLight`: six, towards +x, -x, +y, -y, +z and -z, whatever the cameras."""
        turns = (_turn_along(sign * np.eye(3)[axis]) for axis in range(3) for sign in (1.0, -1.0))
        return [_from_point(np.asarray(self.position), turn, 1.0, self.size, self.range) for turn in turns]


Light = DirectionalLight | SpotLight | PointLight


def borders(near: float, far: float, count: int) -> list[float]:
    """Where `count` cascades begin and end, from near to far: between equal steps and equal factors."""
    if near >= far:
        return [near + (far if far > 0 else near) * k / count for k in range(count + 1)]
    shares = [k / count for k in range(count + 1)]
    return [(1 - UNIFORM) * near * (far / near) ** s + UNIFORM * (near + (far - near) * s) for s in shares]


def _sphere_of(camera: Camera, near: float, far: float) -> tuple[Floats, float]:
    """A sphere, in the camera's coordinates, around what it sees between two depths."""
    x = (np.array([-0.5, camera.width - 0.5]) - camera.cx) / camera.fx
    y = (np.array([-0.5, camera.height - 0.5]) - camera.cy) / camera.fy
    scale = (1.0, 1.0) if camera.orthographic else (near, far)
    corners = np.array(
        [(a * s, b * s, z) for z, s in zip((near, far), scale, strict=True) for a in x for b in y]
    )  # (8, 3)
    # On the line between both ends' middles, as far from the corners of one as of the other; within the part seen.
    first, last = corners[:4].mean(0), corners[4:].mean(0)
    between = last - first
    inner, outer = (np.linalg.norm(ends - ends.mean(0), axis=1).max() for ends in (corners[:4], corners[4:]))
    length = np.linalg.norm(between)
    share = 0.5 + (outer**2 - inner**2) / (2 * length**2) if length > 0 else 0.5
    middle = first + min(max(share, 0.0), 1.0) * between
    return middle, float(np.linalg.norm(corners - middle, axis=1).max()) * (1 + 1e-9)


def _from_point(position: Floats, turn: Floats, wide: float, size: int, reach: float) -> Camera:
    """A perspective view as wide as a tangent to each side, and `MARGIN` texels more."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = turn, -turn @ position
    focal = (size - 2 * MARGIN) / 2 / wide
    edge = (size - 1) / 2
    return Camera(matrix, size, size, focal, focal, edge, edge, NEAR_OF_RANGE * reach)


def _turn_along(direction: Floats) -> Floats:
    """A rotation whose third row is a direction of length 1."""
    other = np.eye(3)[int(np.argmin(abs(direction)))]
    right = np.cross(direction, other)
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(direction, right), direction])


def _direction(name: str, value: ArrayLike) -> tuple[float, ...]:
    vector = np.array(_point(name, value))
    length = np.linalg.norm(vector / (abs(vector).max() or 1.0))
    if length == 0:
        raise ValueError(f"{name}={short(value)}: expected a direction, not zeros")
    return tuple((vector / abs(vector).max() / length).tolist())


def _point(name: str, value: ArrayLike) -> tuple[float, ...]:
    vector = real_numbers(value, name, "three finite numbers")
    if vector.shape != (3,) or not (abs(vector) <= MOST).all():
        raise ValueError(f"{name}={short(value)}: expected three finite numbers")
    return tuple(vector.tolist())


def _color(value: ArrayLike) -> tuple[float, ...]:
    color = real_numbers(value, "color", "three numbers, 0 or more")
    if color.shape != (3,) or not ((color >= 0) & (color <= MOST)).all():
        raise ValueError(f"color={short(value)}: expected three finite numbers, 0 or more")
    return tuple(color.tolist())


def _map_size(value: object) -> int:
    size = whole_pixels("size", value)
    if size < 16:
        raise ValueError(f"size={short(value)}: a shadow map has at least 16 texels along an edge")
    return size

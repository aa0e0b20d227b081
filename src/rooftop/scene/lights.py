"""The lights of a scene, and the views of their shadow maps.

    scene.add_light(DirectionalLight((1, 0.5, -2)))
    scene.add_light(SpotLight((0, 0, 3), (0, 0, -1), angle_degrees=40))

A directional light has a shadow map for each cascade of each camera. A cascade is a range of distances in the camera's
view. Near cascades are small, so their maps are finer. A shadow map covers the sphere around its cascade. The sphere's
size does not change as the camera moves and rotates, and the map moves by whole texels, so a static scene has the same
shadows in every frame. A spot light has one map, a point light six.

Source: Zhang et al. 2006, "Parallel-Split Shadow Maps for Large-scale Virtual Environments"; Valient 2008, "Stable
Rendering of Cascaded Shadow Maps"; attenuation by distance as in glTF's KHR_lights_punctual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rooftop.scene.arguments import LEAST, MOST, number_in, real_numbers, short, whole_number, whole_pixels
from rooftop.scene.cameras import Camera, cross

MOST_CASCADES = 8
UNIFORM = 0.2  # spacing of the cascades' borders: 0 is logarithmic, 1 is uniform, values between mix the two
# start of the first cascade, as a share of the shadow distance, unless the camera's near plane is farther away
NEAREST = 1 / 500
MARGIN = 2  # width of the border beyond the area that a map must cover, in texels
NEAR_OF_RANGE = 1e-3  # distance from a spot or point light at which its shadows begin, as a share of its range

Floats = NDArray[np.float64]
Vector = Sequence[float]
"""Three numbers, in any form that NumPy accepts; stored as a tuple."""


@dataclass(frozen=True)
class DirectionalLight:
    """A light from infinitely far away, like the sun.

    Attributes:
        direction: the direction in which the light shines, in the world; a vector of any length.
        color: (3,) red, green and blue light on surfaces that face the source, 0 or more; (1, 1, 1) is white.
        cascades: number of shadow maps for each camera, 1 to 8.
        size: texels along each edge of a map, from 16 to 16384.
        distance: the distance from the camera up to which there are shadows, in world units; None chooses, for each
            camera, the least power of two that reaches the farthest corner of the box around all casters.
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
        """The views of the light's maps: the cascades of the first camera from near to far, then those of the next
        camera.

        Args:
            cameras: cameras of the frame.
            bounds: (2, 3), a box in the world around all objects that cast shadows.
        """
        return [view for camera in cameras for view in self._cascades_of(camera, bounds)]

    def _cascades_of(self, camera: Camera, bounds: Floats) -> list[Camera]:
        turn, corners, step, begin = _depths_along(self.direction, bounds.tobytes())
        distance = self.distance
        if distance is None:
            farthest = np.linalg.norm(corners - camera.position, axis=1).max()
            distance = 2.0 ** math.ceil(math.log2(max(farthest, LEAST)))
        ends = borders(max(camera.near, NEAREST * distance), distance, self.cascades)
        seen = camera.width, camera.height, camera.fx, camera.fy, camera.cx, camera.cy, camera.orthographic
        middles, radii = _spheres_of(*seen, tuple(ends))
        texels = 2 * radii / (self.size - 2 * MARGIN - 1)
        centers = (middles - camera.world_to_camera[:3, 3]) @ camera.world_to_camera[:3, :3] @ turn.T
        matrices = np.tile(np.eye(4), (self.cascades, 1, 1))
        matrices[:, :3, :3], matrices[:, 2, 3] = turn, -begin
        matrices[:, :2, 3] = -np.floor(centers[:, :2] / texels[:, None]) * texels[:, None]
        edge = (self.size - 1) / 2
        return [
            Camera(matrix, self.size, self.size, scale, scale, edge, edge, step / 4, orthographic=True)
            for matrix, scale in zip(matrices, (1 / texels).tolist(), strict=True)
        ]


@dataclass(frozen=True)
class SpotLight:
    """A light that shines from a point into a cone.

    Attributes:
        position: position in the world.
        direction: direction of the cone's axis, a vector of any length.
        angle_degrees: angle of the whole cone, up to 160; there is no light outside the cone.
        color: (3,) red, green and blue light on surfaces that face the source from a distance of one unit.
        range: distance in world units at which the light has faded to nothing.
        size: texels along each edge of the light's map.
        soft: fraction of the cone, from its edge inwards, over which the light fades, 0 to 1.
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
        """Return the view of the light's only shadow map, from the light. It does not depend on the cameras. Arguments
        are as in `DirectionalLight`."""
        turn = _turn_along(np.asarray(self.direction))
        wide = math.tan(math.radians(self.angle_degrees) / 2)
        return [_from_point(np.asarray(self.position), turn, wide, self.size, self.range)]


@dataclass(frozen=True)
class PointLight:
    """A light that shines from a point in all directions. Attributes are as in `SpotLight`; `size` applies to each of
    the light's six maps."""

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
        """Return the views of the light's six shadow maps, towards +x, -x, +y, -y, +z and -z. They do not depend on the
        cameras. Arguments are as in `DirectionalLight`."""
        turns = (_turn_along(sign * np.eye(3)[axis]) for axis in range(3) for sign in (1.0, -1.0))
        return [_from_point(np.asarray(self.position), turn, 1.0, self.size, self.range) for turn in turns]


Light = DirectionalLight | SpotLight | PointLight


def borders(near: float, far: float, count: int) -> list[float]:
    """The `count` + 1 distances between which `count` cascades lie, from `near` to `far`: a mix of uniform and
    logarithmic spacing. If `near` is not less than `far`, the cascades lie between `near` and `near + far`, or
    `2 * near` if `far` is 0, with uniform spacing."""
    if near >= far:
        return [near + (far if far > 0 else near) * k / count for k in range(count + 1)]
    shares = [k / count for k in range(count + 1)]
    return [(1 - UNIFORM) * near * (far / near) ** s + UNIFORM * (near + (far - near) * s) for s in shares]


@lru_cache(maxsize=64)
def _spheres_of(
    width: int, height: int, fx: float, fy: float, cx: float, cy: float, orthographic: bool, ends: tuple[float, ...]
) -> tuple[Floats, Floats]:
    """Compute spheres in a camera's coordinates: centres (N, 3) and radii (N,). Sphere k encloses the visible volume
    between the depths k and k + 1 of the N + 1 depths `ends`. Callers must not write to these cached arrays."""
    x = (np.array([-0.5, width - 0.5]) - cx) / fx
    y = (np.array([-0.5, height - 0.5]) - cy) / fy
    depths = np.array(ends)[:, None]
    corners = np.empty((len(ends), 4, 3))  # corners of the visible area at each depth
    corners[:, :, 0], corners[:, :, 1], corners[:, :, 2] = np.repeat(x, 2), np.tile(y, 2), depths
    if not orthographic:
        corners[:, :, :2] *= depths[:, None]
    # The sphere's centre lies on the line between the middles of the near and the far end, at the point that is equally
    # far from the corners of both ends. If that point is not between the ends, the centre is the middle of an end.
    middles = corners.mean(1)
    reach = np.linalg.norm(corners - middles[:, None], axis=2).max(1)
    between = middles[1:] - middles[:-1]
    length = np.linalg.norm(between, axis=1)
    share = 0.5 + np.diff(reach**2) / (2 * np.where(length > 0, length, 1.0) ** 2)
    share = np.where(length > 0, np.clip(share, 0.0, 1.0), 0.5)
    centers = middles[:-1] + share[:, None] * between
    both = np.concatenate([corners[:-1], corners[1:]], axis=1)
    return centers, np.linalg.norm(both - centers[:, None], axis=2).max(1) * (1 + 1e-9)


@lru_cache(maxsize=64)
def _depths_along(direction: tuple[float, ...], bounds: bytes) -> tuple[Floats, Floats, float, float]:
    """Compute the part of a shadow map's view that does not depend on the camera. This part depends on the light's
    direction and on the box (2, 3) around all casters.

    Returns:
        (turn, corners, step, begin). turn: a rotation whose rows point right, down and along the light. corners: the
            box's corners (8, 3). step: the smallest power of two that is at least 1/64 of the box's longest side and at
            least 1/64 of its extent along the light. begin: the coordinate along the light at which depths in the maps
            are 0; a multiple of `step`, at least one `step` in front of the box.
    """
    box = np.frombuffer(bounds).reshape(2, 3)
    turn = _turn_along(np.asarray(direction))
    corners = np.array(list(itertools.product(*box.T)))
    along = corners @ turn[2]
    step = 2.0 ** math.ceil(math.log2(max(np.ptp(along), np.ptp(box, axis=0).max(), LEAST) / 64))
    # `begin` is rounded to steps, so that it changes rarely when casters move
    begin = math.floor(along.min() / step) * step - step
    return turn, corners, step, begin


def _from_point(position: Floats, turn: Floats, wide: float, size: int, reach: float) -> Camera:
    """Make the square perspective view of a shadow map from a light's position. `wide` is the tangent of the angle
    between the axis and each edge of the area to cover. Of the map's `size` texels per side, `MARGIN` lie outside each
    of these edges."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = turn, -turn @ position
    focal = (size - 2 * MARGIN) / 2 / wide
    edge = (size - 1) / 2
    return Camera(matrix, size, size, focal, focal, edge, edge, NEAR_OF_RANGE * reach)


def _turn_along(direction: Floats) -> Floats:
    """Make a rotation whose third row is the given unit vector."""
    other = np.eye(3)[int(np.argmin(abs(direction)))]
    right = cross(direction, other)
    right /= np.linalg.norm(right)
    return np.stack([right, cross(direction, right), direction])


def _direction(name: str, value: ArrayLike) -> tuple[float, ...]:
    vector = np.array(_point(name, value))
    length = np.linalg.norm(vector / (abs(vector).max() or 1.0))
    if length == 0:
        raise ValueError(f"{name}={short(value)}: expected a direction that is not all zeros")
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
        raise ValueError(f"size={short(value)}: a shadow map needs at least 16 texels along an edge")
    return size

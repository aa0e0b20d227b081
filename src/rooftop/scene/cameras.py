"""Cameras: perspective, orthographic, or from OpenCV's calibration.

A camera looks along z, with x to the right and y down. The centre of the pixel in column i and row j is at (i, j).
These are OpenCV's conventions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rooftop.scene.arguments import LEAST, MOST, number_in, real_numbers, short, whole_pixels

# limit of |cx| and |cy|, in pixels: half of GUARD, the coordinate beyond which rasterize.py clips triangles
MOST_ASIDE = 2.0**19


@dataclass(frozen=True, eq=False)
class Camera:
    """A view of the world.

    Attributes:
        world_to_camera: (4, 4) float64, a rotation and a shift.
        width, height: pixels.
        fx, fy: focal lengths in pixels; in an orthographic view, pixels per world unit.
        cx, cy: the pixel coordinates through which the axis passes.
        near: the distance along the axis, in world units, below which surfaces are not shown. This distance does not
            affect the precision of depths.
        orthographic: True if all rays are parallel.
    """

    world_to_camera: NDArray[np.float64]
    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float
    near: float = 0.01
    orthographic: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            object.__setattr__(self, name, whole_pixels(name, getattr(self, name)))
        for name in ("fx", "fy", "near"):
            object.__setattr__(self, name, number_in(name, getattr(self, name), LEAST, MOST))
        for name in ("cx", "cy"):
            object.__setattr__(self, name, number_in(name, getattr(self, name), -MOST_ASIDE, MOST_ASIDE))
        matrix = affine(self.world_to_camera, "world_to_camera")
        turn = matrix[:3, :3]
        if not abs(turn @ turn.T - np.eye(3)).max() <= 1e-4 or turn[0] @ cross(turn[1], turn[2]) < 0:
            raise ValueError(
                "world_to_camera must be a rotation and a shift: its upper left 3 x 3 part scales, shears or "
                "mirrors; put scales into the transforms of instances"
            )
        matrix.setflags(write=False)  # read-only, because the next frame uses it as the previous view
        object.__setattr__(self, "world_to_camera", matrix)

    @classmethod
    def look_at(
        cls,
        eye: ArrayLike,
        target: ArrayLike,
        up: ArrayLike = (0.0, 0.0, 1.0),
        fov_y_degrees: float = 60.0,
        width: int = 1920,
        height: int = 1080,
        near: float = 0.01,
    ) -> Camera:
        """Make a perspective view from `eye` to `target`, with `up` towards the upper edge of the picture; all in world
        units.

        Raises:
            ValueError: eye and target are the same point, `up` points along the view, or an angle or size is out of
                range.
        """
        fov_y_degrees = number_in("fov_y_degrees", fov_y_degrees, 1e-3, 179.999)
        height = whole_pixels("height", height)
        matrix = _looking(eye, target, up)
        focal = height / 2 / math.tan(math.radians(fov_y_degrees) / 2)
        return cls(matrix, width, height, focal, focal, (whole_pixels("width", width) - 1) / 2, (height - 1) / 2, near)

    @classmethod
    def parallel(
        cls,
        eye: ArrayLike,
        target: ArrayLike,
        up: ArrayLike = (0.0, 0.0, 1.0),
        view_height: float = 1.0,
        width: int = 1920,
        height: int = 1080,
        near: float = 0.01,
    ) -> Camera:
        """Make an orthographic view of `view_height` world units from the lower to the upper edge."""
        scale = whole_pixels("height", height) / number_in("view_height", view_height, LEAST, MOST)
        matrix = _looking(eye, target, up)
        cx, cy = (whole_pixels("width", width) - 1) / 2, (height - 1) / 2
        return cls(matrix, width, height, scale, scale, cx, cy, near, orthographic=True)

    @classmethod
    def from_intrinsics(
        cls, K: ArrayLike, world_to_camera: ArrayLike, width: int, height: int, near: float = 0.01
    ) -> Camera:
        """Make a camera without distortion from OpenCV's intrinsic and extrinsic matrices.

        Args:
            K: (3, 3) with the rows (fx, 0, cx), (0, fy, cy) and (0, 0, 1), in pixels.
            world_to_camera: (4, 4) or (3, 4), [R | t].

        Raises:
            ValueError: K does not have this form (for example, it has skew), or `world_to_camera` is not a rotation and
                a shift.
        """
        k = real_numbers(K, "K", "(3, 3) numbers")
        if k.shape != (3, 3) or k[0, 1] or k[1, 0] or np.any(k[2] != (0, 0, 1)):
            raise ValueError(f"K must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], without skew; it is {k.tolist()}")
        (fx, _, cx), (_, fy, cy), _ = k.tolist()
        return cls(affine(world_to_camera, "world_to_camera"), width, height, fx, fy, cx, cy, near)

    @property
    def key(self) -> tuple[object, ...]:
        """A hashable value that is equal for two cameras if all their attributes are equal."""
        numbers = self.width, self.height, self.fx, self.fy, self.cx, self.cy, self.near, self.orthographic
        return self.world_to_camera.tobytes(), *numbers

    @property
    def position(self) -> NDArray[np.float64]:
        """The camera's position (3,) in the world."""
        position: NDArray[np.float64] = -self.world_to_camera[:3, :3].T @ self.world_to_camera[:3, 3]
        return position

    @property
    def corner_tangent(self) -> float:
        """Tangent of the angle between the axis and the farthest corner of the picture; 0 for a parallel view."""
        if self.orthographic:
            return 0.0
        x = max(abs(-0.5 - self.cx), abs(self.width - 0.5 - self.cx)) / self.fx
        y = max(abs(-0.5 - self.cy), abs(self.height - 0.5 - self.cy)) / self.fy
        return math.hypot(x, y)


def affine(matrix: ArrayLike, name: str) -> NDArray[np.float64]:
    """Check a (4, 4) or (3, 4) transform and return it as (4, 4) float64.

    Raises:
        ValueError: the matrix has another shape, is not finite, or its last row is not 0 0 0 1.
    """
    values = real_numbers(matrix, name, "(4, 4) numbers")
    if values.shape == (3, 4):
        values = np.vstack([values, (0.0, 0.0, 0.0, 1.0)])
    if values.shape != (4, 4):
        raise ValueError(f"{name} has shape {values.shape}: expected (4, 4), or (3, 4) without the last row")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has entries that are not finite")
    if np.any(values[3] != (0, 0, 0, 1)):
        raise ValueError(f"{name} has the last row {values[3].tolist()}: expected 0 0 0 1 (points are columns)")
    return values


def checked_cameras(cameras: object) -> tuple[Camera, ...]:
    """Check one camera or several, and return them as a tuple, in order.

    Raises:
        ValueError: the argument is neither a camera nor an iterable of cameras.
    """
    if not isinstance(cameras, Camera | Iterable):
        raise ValueError(f"cameras={short(cameras)}: expected a scene.Camera, or a list of them")
    views = (cameras,) if isinstance(cameras, Camera) else tuple(cameras)
    wrong = [view for view in views if not isinstance(view, Camera)]
    if wrong:
        raise ValueError(f"cameras has {short(wrong[0])}: expected a scene.Camera, e.g. from Camera.look_at")
    return views


def same_size(cameras: Sequence[Camera]) -> tuple[int, int]:
    """Check that all cameras of a batch have the same size, and return this size, (width, height).

    Raises:
        ValueError: there are no cameras, or their sizes differ.
    """
    sizes = {(camera.width, camera.height) for camera in cameras}
    if not sizes:
        raise ValueError("no cameras: expected at least one")
    if len(sizes) > 1:
        raise ValueError(
            f"cameras of one batch must have the same size, these have {sorted(sizes)}: use Renderer.render_each for "
            "different sizes"
        )
    return sizes.pop()


def _looking(eye: ArrayLike, target: ArrayLike, up: ArrayLike) -> NDArray[np.float64]:
    """Make the transform (4, 4) from the world to a camera at `eye` that looks towards `target`."""
    points = {}
    for name, point in (("eye", eye), ("target", target), ("up", up)):
        points[name] = real_numbers(point, name, "three finite numbers")
        if points[name].shape != (3,) or not (abs(points[name]) <= MOST).all():
            raise ValueError(f"{name}={short(point)}: expected three finite numbers")
    forward = points["target"] - points["eye"]
    if abs(forward).max() < LEAST:
        raise ValueError(f"eye and target are the same point, {points['eye'].tolist()}: the view has no direction")
    forward = forward / np.linalg.norm(forward)
    right = cross(forward, points["up"] / (abs(points["up"]).max() or 1.0))
    if np.linalg.norm(right) <= 1e-9:
        raise ValueError(f"up={points['up'].tolist()} points along the view: pass another direction")
    right = right / np.linalg.norm(right)
    turn = np.stack([right, cross(forward, right), forward])
    matrix = np.eye(4)
    matrix[:3, :3] = turn
    matrix[:3, 3] = -turn @ points["eye"]
    return matrix


def cross(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The cross product of two vectors. (`np.cross`, made for many vectors, takes ten times as long.)"""
    (ax, ay, az), (bx, by, bz) = a.tolist(), b.tolist()
    return np.array((ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx))

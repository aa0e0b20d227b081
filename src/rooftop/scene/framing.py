"""Frame a whole scene: points on its outline, directions around it, and the distance from which a camera sees
everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rooftop.errors import InputError
from rooftop.scene.cameras import Camera
from rooftop.scene.layouts import PAGE_CLUSTERS
from rooftop.scene.scenes import Scene

Floats = NDArray[np.float64]

THREE_QUARTERS = (-50.0, 25.0)  # azimuth and elevation of the default view, in degrees
MARGIN = 0.94  # largest share of the picture's width or height that the scene fills
NEAR = 1e-5  # distance of the near plane, as a share of the scene's diagonal; does not affect the precision of depths
FEW = 256  # for a mesh with up to this many instances, the outline is computed from vertices, not from the mesh's box


def outline(world: Scene) -> Floats:
    """Points (N, 3) in the world that outline the scene: for each instance, the vertices in the mesh's first page,
    which contains the coarsest levels. If this page does not cover the whole mesh, or the mesh has more than FEW
    instances, the corners of the mesh's box are used instead."""
    mesh_of, transforms = world.placed.mesh_of, world.placed.transforms
    found = []
    for number, mesh in enumerate(world.meshes):
        placed = transforms[mesh_of == number]
        low, high = np.add(mesh.meta["bounds"], mesh.meta["origin"])
        points = np.array([np.where([k & 1, k & 2, k & 4], high, low) for k in range(8)])
        # if the mesh has a single root, the mesh's first page covers the whole mesh
        if mesh.meta.get("roots") == 1 and len(placed) <= FEW:
            clusters = range(int(mesh.page(0)[PAGE_CLUSTERS]))
            points = np.concatenate([mesh.decode(cluster).positions for cluster in clusters])
        found.append((points @ placed[:, :3, :3].transpose(0, 2, 1) + placed[:, None, :3, 3]).reshape(-1, 3))
    return np.concatenate(found)


def around(up: Sequence[float]) -> Floats:
    """Return three directions as rows (3, 3): the horizontal directions of azimuth 0 and 90 degrees, and `up`.

    Raises:
        InputError: `up` is not a direction.
    """
    if len(up) != 3 or not np.isfinite(up).all() or not np.any(up):
        raise InputError(f"up={list(up)}: expected a direction, three numbers that are not all 0")
    axis = np.asarray(up) / np.linalg.norm(up)
    first = np.eye(3)[0] if abs(axis[0]) < 0.9 else np.eye(3)[1]
    first = first - (first @ axis) * axis
    first /= np.linalg.norm(first)
    return np.stack([first, np.cross(axis, first), axis])


def outward(azimuth_degrees: float, elevation_degrees: float, up: Sequence[float]) -> Floats:
    """The unit vector (3,) from the scene's middle to a camera at this azimuth and elevation."""
    azimuth, elevation = math.radians(azimuth_degrees), math.radians(elevation_degrees)
    level = (math.cos(azimuth), math.sin(azimuth))
    direction: Floats = np.array([*(math.cos(elevation) * part for part in level), math.sin(elevation)]) @ around(up)
    return direction


def distance_that_frames(camera: Camera, points: Floats) -> float:
    """The least distance from the target at which a perspective view shows all points; points are relative to the
    target.
    """
    x, y, z = camera.world_to_camera[:3, :3] @ points.T
    wide, high = (MARGIN * side / 2 / focal for side, focal in ((camera.width, camera.fx), (camera.height, camera.fy)))
    return float(max((np.abs(x) / wide - z).max(), (np.abs(y) / high - z).max(), (camera.near - z).max()))

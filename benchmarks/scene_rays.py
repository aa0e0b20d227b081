"""Another way to draw without levels of detail: a ray for each pixel, through Warp's tree of boxes."""

import numpy as np
import torch
import warp as wp
from torch import Tensor

from rooftop.launch.warp_launch import launch_warp, start_warp
from rooftop.scene import Camera

start_warp("pictures of scenes", "scene")
wp.set_module_options({"enable_backward": False})


@wp.kernel
def cast_rays(
    mesh: wp.uint64,
    to_world: wp.array(dtype=wp.float32),  # (12,)
    lens: wp.vec4,  # fx, fy, cx, cy
    longest: wp.float32,
    depths: wp.array2d(dtype=wp.float32),
):
    row = wp.tid() // depths.shape[1]
    column = wp.tid() % depths.shape[1]
    ahead = wp.vec3((wp.float32(column) - lens[2]) / lens[0], (wp.float32(row) - lens[3]) / lens[1], 1.0)
    way = wp.vec3()
    eye = wp.vec3()
    for axis in range(3):
        at = 4 * axis
        way[axis] = to_world[at] * ahead[0] + to_world[at + 1] * ahead[1] + to_world[at + 2] * ahead[2]
        eye[axis] = to_world[at + 3]
    found = wp.mesh_query_ray(mesh, eye, wp.normalize(way), longest)
    if found.result:
        depths[row, column] = found.t / wp.length(way)


class Rays:
    """A mesh and its tree.

    Args:
        vertices (V, 3), faces (F, 3).
    """

    def __init__(self, vertices: np.ndarray, faces: np.ndarray, device: str) -> None:
        self.device = torch.empty(0, device=device).device  # the device with its index
        points = wp.array(vertices.astype(np.float32), dtype=wp.vec3, device=device)
        self.mesh = wp.Mesh(points, wp.array(faces.astype(np.int32).ravel(), dtype=wp.int32, device=device))
        self.longest = 4.0 * float(np.linalg.norm(vertices.max(0) - vertices.min(0)))

    def draw(self, camera: Camera) -> Tensor:
        """Draw depths (H, W), with inf for background. Parallel views are not supported."""
        to_world = torch.from_numpy(np.linalg.inv(camera.world_to_camera)[:3].astype(np.float32).ravel())
        depths = torch.full((camera.height, camera.width), torch.inf, device=self.device)
        lens = wp.vec4(camera.fx, camera.fy, camera.cx, camera.cy)
        arguments = (wp.uint64(self.mesh.id), to_world.to(self.device), lens, self.longest, depths)
        launch_warp(cast_rays, (camera.width * camera.height,), *arguments, device=self.device)
        return depths

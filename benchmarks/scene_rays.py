"""A ray caster without levels of detail: one ray per pixel, through Warp's BVH."""

from collections.abc import Sequence

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
    to_world: wp.array2d(dtype=wp.float32),  # (cameras, 12)
    lens: wp.array2d(dtype=wp.float32),  # (cameras, 4): fx, fy, cx, cy
    longest: wp.float32,
    depths: wp.array3d(dtype=wp.float32),  # (cameras, H, W)
):
    pixel = wp.tid()
    column = pixel % depths.shape[2]
    row = (pixel // depths.shape[2]) % depths.shape[1]
    camera = pixel // (depths.shape[1] * depths.shape[2])
    right = (wp.float32(column) - lens[camera, 2]) / lens[camera, 0]
    ahead = wp.vec3(right, (wp.float32(row) - lens[camera, 3]) / lens[camera, 1], 1.0)
    way = wp.vec3()
    eye = wp.vec3()
    for axis in range(3):
        at = 4 * axis
        for k in range(3):
            way[axis] = way[axis] + to_world[camera, at + k] * ahead[k]
        eye[axis] = to_world[camera, at + 3]
    found = wp.mesh_query_ray(mesh, eye, wp.normalize(way), longest)
    if found.result:
        depths[camera, row, column] = found.t / wp.length(way)


class Rays:
    """A mesh and its BVH.

    Args:
        vertices (V, 3), faces (F, 3).
        tree: Warp's way to build the tree: "lbvh", "cubql", "sah" or "median"; None: its default.
    """

    def __init__(self, vertices: np.ndarray, faces: np.ndarray, device: str, tree: str | None = None) -> None:
        self.device = torch.empty(0, device=device).device  # resolves "cuda" to a device with an index
        points = wp.array(vertices.astype(np.float32), dtype=wp.vec3, device=device)
        corners = wp.array(faces.astype(np.int32).ravel(), dtype=wp.int32, device=device)
        self.mesh = wp.Mesh(points, corners, bvh_constructor=tree)
        self.longest = 4.0 * float(np.linalg.norm(vertices.max(0) - vertices.min(0)))

    def draw(self, camera: Camera) -> Tensor:
        """Draw depths (H, W), with inf for background. Parallel views are not supported."""
        return self.draw_all([camera])[0]

    def draw_all(self, cameras: Sequence[Camera]) -> Tensor:
        """Draw depths (cameras, H, W) of cameras of one size, by one launch."""
        first = cameras[0]
        to_world = np.stack([np.linalg.inv(each.world_to_camera)[:3].ravel() for each in cameras])
        lens = np.array([(each.fx, each.fy, each.cx, each.cy) for each in cameras])
        sent = [torch.from_numpy(each.astype(np.float32)).to(self.device) for each in (to_world, lens)]
        depths = torch.full((len(cameras), first.height, first.width), torch.inf, device=self.device)
        launch_warp(
            cast_rays, (depths.numel(),), wp.uint64(self.mesh.id), *sent, self.longest, depths, device=self.device
        )
        return depths

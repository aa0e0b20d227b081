"""A brute-force rasterizer without levels of detail: a plain Warp kernel draws every triangle of every instance.

A thread reads a triangle's three corners from vertex and index buffers, and transforms them. In the triangle's bounding
box, it draws the pixels whose centre is inside the triangle, by a 64-bit atomic maximum of depth and ids. This is the
rasterizer that an engineer would write first. It culls only triangles outside the picture. It does not clip: triangles
that cross the near plane are left out.
"""

import numpy as np
import torch
import warp as wp
from torch import Tensor

from rooftop.launch.warp_launch import launch_warp, start_warp
from rooftop.scene import Camera

start_warp("pictures of scenes", "scene")
wp.set_module_options({"enable_backward": False})


IDS = wp.constant(wp.int64((1 << 33) - 1))


@wp.kernel
def draw_all(
    points: wp.array(dtype=wp.vec3),
    faces: wp.array2d(dtype=wp.int32),
    to_view: wp.array2d(dtype=wp.float32),  # (instances, 12)
    lens: wp.vec4,  # fx, fy, cx, cy
    near: wp.float32,
    first: wp.int64,
    pixels: wp.array2d(dtype=wp.int64),
):
    i = first + wp.int64(wp.tid())
    face = wp.int32(i % wp.int64(faces.shape[0]))
    instance = wp.int32(i // wp.int64(faces.shape[0]))
    u = wp.vec3()
    v = wp.vec3()
    w = wp.vec3()
    nearest = wp.float32(1e30)
    for k in range(3):
        p = points[faces[face, k]]
        x = to_view[instance, 0] * p[0] + to_view[instance, 1] * p[1] + to_view[instance, 2] * p[2]
        y = to_view[instance, 4] * p[0] + to_view[instance, 5] * p[1] + to_view[instance, 6] * p[2]
        z = to_view[instance, 8] * p[0] + to_view[instance, 9] * p[1] + to_view[instance, 10] * p[2]
        z += to_view[instance, 11]
        nearest = wp.min(nearest, z)
        w[k] = near / z
        u[k] = lens[0] * (x + to_view[instance, 3]) / z + lens[2]
        v[k] = lens[1] * (y + to_view[instance, 7]) / z + lens[3]
    area = (u[1] - u[0]) * (v[2] - v[0]) - (v[1] - v[0]) * (u[2] - u[0])
    if nearest >= near and area != 0.0:
        left = wp.max(wp.int32(wp.ceil(wp.min(u))), 0)
        right = wp.min(wp.int32(wp.floor(wp.max(u))), pixels.shape[1] - 1)
        top = wp.max(wp.int32(wp.ceil(wp.min(v))), 0)
        bottom = wp.min(wp.int32(wp.floor(wp.max(v))), pixels.shape[0] - 1)
        for row in range(top, bottom + 1):
            for column in range(left, right + 1):
                x = wp.float32(column)
                y = wp.float32(row)
                a = ((u[2] - u[1]) * (y - v[1]) - (v[2] - v[1]) * (x - u[1])) / area
                b = ((u[0] - u[2]) * (y - v[2]) - (v[0] - v[2]) * (x - u[2])) / area
                c = 1.0 - a - b
                if a >= 0.0 and b >= 0.0 and c >= 0.0:
                    depth = wp.min(a * w[0] + b * w[1] + c * w[2], 1.0)
                    value = (wp.int64(wp.cast(depth, wp.int32)) << wp.int64(33)) | (i & IDS)
                    if value > pixels[row, column]:
                        wp.atomic_max(pixels, row, column, value)


class BruteForce:
    """A mesh and its instances, ready to draw.

    Args:
        vertices (V, 3), faces (F, 3), transforms (N, 4, 4): object to world.
    """

    def __init__(self, vertices: np.ndarray, faces: np.ndarray, transforms: np.ndarray, device: str) -> None:
        self.points = torch.from_numpy(vertices.astype(np.float32)).to(device)
        self.faces = torch.from_numpy(faces.astype(np.int32)).to(device)
        self.transforms = torch.from_numpy(transforms).to(device)
        self.triangles = len(faces) * len(transforms)

    def draw(self, camera: Camera) -> Tensor:
        """Draw the depths (H, W); background is inf."""
        device = self.points.device
        to_view = torch.tensor(camera.world_to_camera).to(device) @ self.transforms
        matrices = to_view[:, :3].reshape(-1, 12).float().contiguous()
        pixels = torch.zeros(camera.height, camera.width, dtype=torch.int64, device=device)
        points = wp.from_torch(self.points, dtype=wp.vec3)
        lens = wp.vec4(camera.fx, camera.fy, camera.cx, camera.cy)
        most = 1 << 30  # maximum number of threads in a launch
        for first in range(0, self.triangles, most):
            threads = (min(most, self.triangles - first),)
            launch_warp(
                draw_all, threads, points, self.faces, matrices, lens, camera.near, first, pixels, device=device
            )
        return camera.near / (pixels >> 33).int().view(torch.float32)

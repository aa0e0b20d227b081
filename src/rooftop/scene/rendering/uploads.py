"""The scene and the cameras on the device: what the stages read and none of them writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray
from torch import Tensor

from rooftop.errors import GeometryFileError, InputError
from rooftop.scene import layouts
from rooftop.scene.cameras import Camera
from rooftop.scene.geometry import Geometry
from rooftop.scene.rendering import buffers
from rooftop.scene.streaming.pool import Pool

LENS = 8  # numbers of a view
MOST_WORDS = 2**31 - 1  # an array of Warp has no more elements; `clusters.word_at` reads what is behind them, too
MOST_PAGES = 2**20  # of a mesh: a page and a cluster of it are 31 bits of an entry


class Meshes:
    """The meshes of a scene: their trees, and their pages, all of them or those that are in a pool."""

    def __init__(self, meshes: Sequence[Geometry], device: torch.device, pool: Pool | None = None) -> None:
        nodes: list[NDArray[np.int32]] = []
        first_page = np.cumsum([0, *(mesh.pages for mesh in meshes)])[:-1].tolist()
        first_node: list[int] = []
        for mesh in meshes:
            if mesh.pages > MOST_PAGES:
                raise InputError(f"{mesh.path}: {mesh.pages:,} pages; the renderer takes at most {MOST_PAGES:,}")
            first_node.append(sum(map(len, nodes)))
            _check_depth(mesh)
            nodes.append(mesh.nodes)
        tables = [
            [node, page, _attributes(mesh), 0] for node, page, mesh in zip(first_node, first_page, meshes, strict=True)
        ]
        boxes = np.array([mesh.meta["bounds"] for mesh in meshes])  # (meshes, 2, 3)
        box = np.concatenate([boxes.mean(1), (boxes[:, 1] - boxes[:, 0]) / 2], axis=1)
        self.count = len(meshes)
        self.depth = max(mesh.meta["depth"] for mesh in meshes)
        self.origins = np.array([mesh.meta["origin"] for mesh in meshes])
        self.words, self.page_at = _all_pages(meshes, device) if pool is None else (pool.words, pool.page_at)
        self.nodes = uploaded(device, np.concatenate(nodes))
        self.mesh = uploaded(device, np.array(tables, dtype=np.int32))
        steps = [[2.0 ** mesh.meta[name] for name in ("grid_exponent", "uv_exponent")] for mesh in meshes]
        self.mesh_steps = uploaded(device, np.array(steps, dtype=np.float32))
        self.mesh_box = uploaded(device, box.astype(np.float32))


def _all_pages(meshes: Sequence[Geometry], device: torch.device) -> tuple[Tensor, Tensor]:
    """The words of all pages, one after another, and where each page begins."""
    pages = [mesh.page(number) for mesh in meshes for number in range(mesh.pages)]
    ends = np.cumsum([len(page) for page in pages], dtype=np.int64)
    words = np.concatenate([*pages, np.zeros(2, np.int32)])  # a read of two words may begin at the last
    return uploaded(device, words), uploaded(device, np.concatenate([[0], ends[:-1]]).astype(np.int64))


def _attributes(mesh: Geometry) -> int:
    """Those that it has, as bits."""
    names = {"has_normals": buffers.HAS_NORMALS, "has_uv": buffers.HAS_UV, "has_colors": buffers.HAS_COLORS}
    return sum(int(bit) for name, bit in names.items() if mesh.meta[name])


def _check_depth(mesh: Geometry) -> None:
    """The tree is walked in as many steps as the file says it is deep.

    Raises:
        GeometryFileError: it is deeper.
    """
    kind = mesh.nodes[:, :, layouts.CHILD_KIND]
    level, depth = np.zeros(1, dtype=np.int64), 0
    while len(level):  # children stand after their parents: this ends
        depth += 1
        level = mesh.nodes[level, :, layouts.CHILD_AT][kind[level] == layouts.INNER]
    if depth > mesh.meta["depth"]:
        what = f"its tree has {depth} levels, and not {mesh.meta['depth']} as it says"
        raise GeometryFileError(mesh.path, what, mesh.nodes_offset)


@dataclass(frozen=True)
class Uploaded:
    """Tensors by the names of their fields in `buffers`, and the same as Warp's kernels take them."""

    tensors: dict[str, Tensor]
    values: Any

    @classmethod
    def into(cls, values: Any, tensors: dict[str, Tensor]) -> Uploaded:
        for name, tensor in tensors.items():
            setattr(values, name, wp.from_torch(tensor))
        return cls(tensors, values)

    def set(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Other numbers into the same memory."""
        for name, array in arrays.items():
            tensor = self.tensors[name]
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)).to(tensor.dtype))


class Inputs:
    """What a frame is drawn from, each in one place as long as there are as many instances and views: launches that are
    captured in a graph find it there.

    Attributes:
        resident, now, then: `buffers.Resident`, `buffers.Views`, and those of the frame before.
    """

    def __init__(self, meshes: Meshes, instances: int, views: int, size: tuple[int, int], device: torch.device) -> None:
        self.sizes, self.meshes = (instances, views, size), meshes
        kept = {name: getattr(meshes, name) for name in ("words", "page_at", "nodes", "mesh", "mesh_steps", "mesh_box")}
        kept["words"] = kept["words"][:MOST_WORDS]

        def of(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        kept["instance_mesh"] = of(torch.int32, instances)
        kept["instance_scale"] = of(torch.float32, instances)
        kept["instance_to_world"] = of(torch.float64, instances, 12)
        kept["instance_before"] = of(torch.float64, instances, 12)
        kept["instance_normals"] = of(torch.float32, instances, 9)
        self.resident = Uploaded.into(buffers.Resident(), kept)
        # The matrices and lenses of both frames are next to each other: they go to the device in one copy.
        sizes = (2 * views * 12 * 8, 2 * views * LENS * 4)  # bytes
        staged = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        there = torch.empty_like(staged, device=device)
        self._staged, self._there = staged, there
        (matrices, lenses), of_device = (
            (
                memory[: sizes[0]].view(torch.float64).view(2, views, 12),
                memory[sizes[0] :].view(torch.float32).view(2, views, LENS),
            )
            for memory in (staged, there)
        )
        self._matrices, self._lenses = matrices.numpy(), lenses.numpy()
        self.now, self.then = (views_of(size, *both) for both in zip(*of_device, strict=True))
        self._looked: Sequence[Camera] | None = None
        self._placed: tuple[NDArray[np.int32] | None, NDArray[np.float64] | None, bool] = (None, None, False)
        # Of each instance, and of which 3 x 3: what follows from that is computed anew only where it changes.
        self._linear = np.zeros((instances, 3, 3))
        self._scale, self._normals = np.zeros(instances), np.zeros((instances, 9))

    def place(self, mesh_of: NDArray[np.int32], now: NDArray[np.float64], before: NDArray[np.float64]) -> None:
        """The instances; where none has moved since the frame before, they are there already.

        Args:
            mesh_of: (instances,).
            now, before: (instances, 4, 4), object to world; the same array if none has moved.
        """
        still = before is now
        if self._placed[0] is mesh_of and self._placed[1] is now and self._placed[2] and still:
            return
        linear, origins = now[:, :3, :3], self.meshes.origins[mesh_of]
        new = np.flatnonzero((linear != self._linear).any((1, 2)))
        if len(new):
            stretch = np.linalg.svd(linear[new], compute_uv=False)[:, 0] * (1 + 1e-6)
            normals = np.linalg.inv(linear[new]).transpose(0, 2, 1) * stretch[:, None, None]
            self._scale[new] = np.where(np.linalg.det(linear[new]) < 0, -stretch, stretch)
            self._normals[new], self._linear[new] = normals.reshape(-1, 9), linear[new]
        self.resident.set(
            {
                "instance_mesh": mesh_of,
                "instance_scale": self._scale,
                "instance_to_world": _from_origin(now, origins),
                "instance_before": _from_origin(before, origins),
                "instance_normals": self._normals,
            }
        )
        self._placed = (mesh_of, now, still)

    def look(self, cameras: Sequence[Camera], before: Sequence[Camera]) -> None:
        """The views, and where each was in the frame before."""
        if before is self._looked:
            self._matrices[1], self._lenses[1] = self._matrices[0], self._lenses[0]
        else:
            self._stage(1, before)
        self._stage(0, cameras)
        self._looked = cameras
        self._there.copy_(self._staged, non_blocking=True)  # the frame has been waited for before another is staged

    def _stage(self, which: int, cameras: Sequence[Camera]) -> None:
        for view, c in enumerate(cameras):
            self._matrices[which, view] = c.world_to_camera[:3].reshape(12)
            self._lenses[which, view] = lens_of(c)


def lens_of(camera: Camera) -> tuple[float, ...]:
    """A row of `buffers.Views.lens`."""
    c = camera
    return c.fx, c.fy, c.cx, c.cy, c.near, float(c.orthographic), c.corner_tangent, 0.0


def views_of(size: tuple[int, int], from_world: Tensor, lens: Tensor) -> Uploaded:
    """`buffers.Views` of pictures of a size, in memory that is there."""
    values = buffers.Views()
    values.width, values.height = size
    return Uploaded.into(values, {"from_world": from_world, "lens": lens})


def _from_origin(transforms: NDArray[np.float64], origins: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N, 12): first by the mesh's origin, which its positions count from."""
    moved = transforms[:, :3].copy()
    moved[:, :, 3] += np.einsum("nij,nj->ni", transforms[:, :3, :3], origins)
    return moved.reshape(-1, 12)


def uploaded(device: torch.device, array: NDArray[Any]) -> Tensor:
    """An array of the host, on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)

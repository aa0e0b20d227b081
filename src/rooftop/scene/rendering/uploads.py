"""Upload the meshes and the cameras. The stages only read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray
from torch import Tensor

from rooftop.errors import GeometryFileError, InputError
from rooftop.scene.cameras import Camera
from rooftop.scene.geometry import Geometry
from rooftop.scene.rendering import buffers
from rooftop.scene.rendering.canvases import Canvas
from rooftop.scene.streaming.pool import Pool

LENS = 8  # numbers per view
MOST_WORDS = 2**31 - 1  # length limit of a Warp array; kernels read later words by `clusters.word_at`
STAGED_WORDS = 2**20  # size in words of each pinned buffer from which the device copies
MOST_PAGES = 2**20  # maximum number of pages of a mesh: page and cluster take 31 bits of an entry


class Meshes:
    """The meshes of a scene on the device: their trees, and all their pages or the pages in a pool."""

    def __init__(self, meshes: Sequence[Geometry], device: torch.device, pool: Pool | None = None) -> None:
        nodes: list[NDArray[np.int32]] = []
        first_page = np.cumsum([0, *(mesh.pages for mesh in meshes)])[:-1].tolist()
        first_node: list[int] = []
        for mesh in meshes:
            if mesh.pages > MOST_PAGES:
                raise InputError(f"{mesh.path}: {mesh.pages:,} pages; a mesh may have at most {MOST_PAGES:,}")
            first_node.append(sum(map(len, nodes)))
            _check_depth(mesh)
            nodes.append(mesh.nodes)
        tables = [
            [node, page, _attributes(mesh), 0] for node, page, mesh in zip(first_node, first_page, meshes, strict=True)
        ]
        boxes = np.array([mesh.meta["bounds"] for mesh in meshes])  # (meshes, 2, 3)
        box = np.concatenate([boxes.mean(1), (boxes[:, 1] - boxes[:, 0]) / 2], axis=1)
        self.count = len(meshes)
        self.has_attributes = any(table[2] for table in tables)
        self.depth = max(mesh.meta["depth"] for mesh in meshes)
        self.origins = np.array([mesh.meta["origin"] for mesh in meshes])
        self.words, self.page_at = _all_pages(meshes, device) if pool is None else (pool.words, pool.page_at)
        self.nodes = joined(device, nodes)
        self.mesh = uploaded(device, np.array(tables, dtype=np.int32))
        steps = [[2.0 ** mesh.meta[name] for name in ("grid_exponent", "uv_exponent")] for mesh in meshes]
        self.mesh_steps = uploaded(device, np.array(steps, dtype=np.float32))
        self.mesh_box = uploaded(device, box.astype(np.float32))

    def tensors(self) -> dict[str, Tensor]:
        """The meshes' tensors, by the names of `buffers.Resident`."""
        names = ("words", "page_at", "nodes", "mesh", "mesh_steps", "mesh_box")
        return {name: getattr(self, name) for name in names} | {"words": self.words[:MOST_WORDS]}


def _all_pages(meshes: Sequence[Geometry], device: torch.device) -> tuple[Tensor, Tensor]:
    """Upload all pages of all meshes: return the words of the pages, concatenated, and the index of each page's first
    word."""
    pages = [mesh.page(number) for mesh in meshes for number in range(mesh.pages)]
    ends = np.cumsum([len(page) for page in pages], dtype=np.int64)
    # padded with zeros, because kernels may read two words that begin at the last word
    words = np.concatenate([*pages, np.zeros(2, np.int32)])
    return uploaded(device, words), uploaded(device, np.concatenate([[0], ends[:-1]]).astype(np.int64))


def _attributes(mesh: Geometry) -> int:
    """The mesh's attributes, as bits."""
    names = {"has_normals": buffers.HAS_NORMALS, "has_uv": buffers.HAS_UV, "has_colors": buffers.HAS_COLORS}
    return sum(int(bit) for name, bit in names.items() if mesh.meta[name])


def _check_depth(mesh: Geometry) -> None:
    """Check that the tree is not deeper than the file says.

    Raises:
        GeometryFileError: the tree is deeper.
    """
    if mesh.tree_depth > mesh.meta["depth"]:
        what = f"its tree has {mesh.tree_depth} levels, but its metadata states {mesh.meta['depth']}"
        raise GeometryFileError(mesh.path, what, mesh.nodes_offset)


@dataclass(frozen=True)
class Uploaded:
    """A struct of `buffers`, which Warp's kernels accept, and the tensors behind the struct's fields, by field name."""

    tensors: dict[str, Tensor]
    values: Any

    @classmethod
    def into(cls, values: Any, tensors: dict[str, Tensor]) -> Uploaded:
        """Set the fields of a struct to tensors of the same names."""
        for name, tensor in tensors.items():
            setattr(values, name, wp.from_torch(tensor))
        return cls(tensors, values)


class Inputs:
    """The views of a frame on the device. The tensors' addresses stay the same while the number and sizes of views stay
    the same, because captured launches read from these addresses.

    Attributes:
        now, then: `buffers.Views` of this and of the previous frame.
    """

    def __init__(self, canvas: Canvas, device: torch.device) -> None:
        views = len(canvas.sizes)
        # The matrices and lenses of both frames are contiguous, so that one copy transfers them.
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
        self._frames = self._lenses[0].view(np.int32)[:, int(buffers.LENS_FRAME)]
        pictures = uploaded(device, canvas.table)
        self.now, self.then = (_views(canvas, pictures, *both) for both in zip(*of_device, strict=True))
        self._looked: Sequence[Camera] | None = None

    def look(
        self, frame: int, cameras: Sequence[Camera], before: Sequence[Camera], maps: Sequence[Camera] = ()
    ) -> None:
        """Set the views of a frame: its cameras, the same cameras in the previous frame (`before`), and its shadow
        maps."""
        numbers = (self._matrices, self._lenses)
        if before is self._looked:
            for of_both in numbers:
                of_both[1] = of_both[0]
        else:
            self._stage(1, 0, before)
        self._stage(0, 0, cameras)
        self._stage(0, len(cameras), maps)
        for of_both in numbers:
            of_both[1, len(cameras) :] = of_both[0, len(cameras) :]
        self._frames[:] = frame
        self._looked = cameras
        self._there.copy_(self._staged, non_blocking=True)  # it ends before the next frame writes `_staged`

    def _stage(self, which: int, first: int, cameras: Sequence[Camera]) -> None:
        for view, c in enumerate(cameras, first):
            self._matrices[which, view] = c.world_to_camera[:3].reshape(12)
            self._lenses[which, view] = lens_of(c)


def lens_of(camera: Camera) -> tuple[float, ...]:
    """Build a row of `buffers.Views.lens` from a camera."""
    c = camera
    return c.fx, c.fy, c.cx, c.cy, c.near, float(c.orthographic), c.corner_tangent, 0.0


def _views(canvas: Canvas, pictures: Tensor, from_world: Tensor, lens: Tensor) -> Uploaded:
    """Make a struct `buffers.Views` of existing tensors."""
    values = buffers.Views()
    values.same = canvas.same
    return Uploaded.into(values, {"from_world": from_world, "lens": lens, "pictures": pictures})


def uploaded(device: torch.device, array: NDArray[Any]) -> Tensor:
    """Copy a host array to the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def joined(device: torch.device, arrays: Sequence[NDArray[np.int32]]) -> Tensor:
    """Concatenate host arrays on the device. For a GPU, arrays are copied through two buffers of STAGED_WORDS, without
    a concatenated copy on the host."""
    there = torch.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), dtype=torch.int32, device=device)
    if device.type == "cpu":
        np.concatenate(arrays, out=there.numpy())
        return there
    words, at = there.view(-1), 0
    staged = [torch.empty(STAGED_WORDS, dtype=torch.int32, device="cpu", pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in staged]
    parts = (
        flat[k : k + STAGED_WORDS]
        for flat in (a.reshape(-1) for a in arrays)
        for k in range(0, len(flat), STAGED_WORDS)
    )
    for number, part in enumerate(parts):
        memory, event = staged[number % 2], copied[number % 2]
        event.synchronize()
        memory.numpy()[: len(part)] = part
        words[at : at + len(part)].copy_(memory[: len(part)], non_blocking=True)
        event.record(torch.cuda.current_stream(device))
        at += len(part)
    for event in copied:  # after this, the pinned memory is free again
        event.synchronize()
    return there

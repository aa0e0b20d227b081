"""The scene's instances on the device. Only rows that changed are uploaded."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rooftop.launch.warp_launch import launch_warp
from rooftop.scene.instances import GROWTH, REMOVED, Instances
from rooftop.scene.rendering import buffers, init_context
from rooftop.scene.rendering.uploads import Meshes, Uploaded

ROWS_AT_ONCE = 2**20  # of 112 bytes: the host and the device hold them twice
WIDTHS = {  # of a row of each tensor
    "instance_mesh": (torch.int32, ()),
    "instance_scale": (torch.float32, ()),
    "instance_to_world": (torch.float64, (12,)),
    "instance_before": (torch.float64, (12,)),
    "instance_normals": (torch.float32, (9,)),
}


class Placed:
    """A renderer's copy of the scene's instances. Addresses change only when capacity grows, so captured CUDA graphs
    stay valid.

    Attributes:
        places: capacity, in instances. Unused places and removed instances have no mesh.
        resident: `buffers.Resident`: these instances and the meshes.
    """

    resident: Uploaded

    def __init__(self, device: torch.device) -> None:
        self.device, self.places = device, 0
        self._meshes: Meshes | None = None
        self._tensors = {name: torch.empty(0, *row, dtype=of, device=device) for name, (of, row) in WIDTHS.items()}
        self._version = self._sent = 0
        self._framed = 0  # their number in the previous frame
        self._moved: list[Tensor] = []  # since the frame before

    def update(self, instances: Instances, meshes: Meshes) -> None:
        """Upload what has changed. Transforms of the previous frame are kept until `settle`."""
        grew = instances.count > self.places
        if grew:
            self._grow(instances.count)
        if grew or meshes is not self._meshes:
            self._meshes = meshes
            self._origins = torch.from_numpy(meshes.origins).to(self.device)
            self.resident = Uploaded.into(buffers.Resident(), meshes.tensors() | self._tensors)
        rows = instances.changed(self._version, self._sent)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            self._send(instances, rows[first : first + ROWS_AT_ONCE])
        self._version, self._sent = instances.changes.version, instances.count

    def settle(self) -> None:
        """Call after each frame: current transforms become those of the previous frame."""
        for sent in self._moved:
            launch_warp(init_context.settle_instances, (len(sent),), self.resident.values, sent, device=self.device)
        self._moved, self._framed = [], self._sent

    def _grow(self, count: int) -> None:
        """Grow the capacity, with room to spare except for the first upload."""
        self.places = max(count, int(GROWTH * self.places))
        for name, before in self._tensors.items():
            self._tensors[name] = torch.zeros(self.places, *before.shape[1:], dtype=before.dtype, device=self.device)
            self._tensors[name][: len(before)] = before
        self._tensors["instance_mesh"][self._sent :] = REMOVED

    def _send(self, instances: Instances, rows: NDArray[np.int64]) -> None:
        """Upload rows as one array; a kernel scatters them into place."""
        on_gpu = self.device.type == "cuda"  # pinned memory of the host, which PyTorch keeps for such copies
        here = torch.empty(len(rows), init_context.SENT, dtype=torch.float64, device="cpu", pin_memory=on_gpu)
        sent = here.numpy()
        sent[:, 0], sent[:, 1] = rows, instances.mesh_of[rows]
        sent[:, 2:] = instances.transforms[rows].reshape(-1, 16)[:, :12]
        there = here.to(self.device, non_blocking=True)
        arguments = (self.resident.values, self._origins, there, self._framed)
        launch_warp(init_context.put_instances, (len(rows),), *arguments, device=self.device)
        if rows[0] < self._framed:
            self._moved.append(there)

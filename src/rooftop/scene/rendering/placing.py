"""The scene's instances on the device. Only rows that changed are uploaded."""

from __future__ import annotations

import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray

from rooftop.launch.warp_launch import Launches, point
from rooftop.scene.instances import GROWTH, REMOVED, Instances
from rooftop.scene.rendering import buffers, init_context
from rooftop.scene.rendering.uploads import Meshes, Uploaded

ROWS_AT_ONCE = 2**20  # of 120 bytes: the host and the device hold them twice
MOST_THREADS = 2**17
NONE = np.zeros(0, np.int64)
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
        self._moved = NONE  # those of the previous frame that were uploaded since
        self._due = NONE  # those whose previous position is still the one of an earlier frame
        self._marks = np.zeros(0, dtype=bool)
        self._changes, self._launches = init_context.Changes(), Launches(device)

    def update(self, instances: Instances, meshes: Meshes) -> None:
        """Upload what has changed. Transforms of the previous frame are kept until a later frame."""
        grew = instances.count > self.places
        if grew:
            self._grow(instances.count)
        if grew or meshes is not self._meshes:
            self._meshes = meshes
            self._origins = wp.from_torch(torch.from_numpy(meshes.origins).to(self.device))
            self._launches.clear()
            self.resident = Uploaded.into(buffers.Resident(), meshes.tensors() | self._tensors)
        rows = instances.changed(self._version, self._sent)
        if len(rows):
            self._due = self._without(self._due, rows)  # those settle as they are put
        for first in range(0, len(rows), ROWS_AT_ONCE):
            self._send(instances, rows[first : first + ROWS_AT_ONCE])
        if len(self._due):
            self._put(self._rows(0))
        self._version, self._sent = instances.changes.version, instances.count

    def settle(self) -> None:
        """Call after each frame: current transforms become those of the previous frame. The device learns of it with
        the next changes."""
        self._due = np.union1d(self._due, self._moved) if len(self._due) else self._moved
        self._moved, self._framed = NONE, self._sent

    def _grow(self, count: int) -> None:
        """Grow the capacity, with room to spare except for the first upload."""
        self.places = max(count, int(GROWTH * self.places))
        for name, before in self._tensors.items():
            self._tensors[name] = torch.zeros(self.places, *before.shape[1:], dtype=before.dtype, device=self.device)
            self._tensors[name][: len(before)] = before
        self._tensors["instance_mesh"][self._sent :] = REMOVED

    def _without(self, rows: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that are not among the others."""
        if not len(rows) or not len(others):
            return rows
        if len(self._marks) < self.places:
            self._marks = np.zeros(self.places, dtype=bool)
        self._marks[others] = True
        left = rows[~self._marks[rows]]
        self._marks[others] = False
        return left

    def _send(self, instances: Instances, rows: NDArray[np.int64]) -> None:
        """Upload rows; with the first ones, those that settle."""
        here = self._rows(len(rows))
        sent = here.numpy()[: len(rows)]
        sent[:, 0], sent[:, 1], sent[:, 2] = rows, instances.mesh_of[rows], 1.0
        sent[:, 3:] = instances.transforms[rows].reshape(-1, 16)[:, :12]
        if len(self._moved):  # for a frame that was not completed: their previous position is already there
            sent[np.isin(rows, self._moved), 2] = 0.0
        self._put(here)
        moved = rows[rows < self._framed]
        self._moved = np.union1d(self._moved, moved) if len(self._moved) else moved

    def _rows(self, changed: int) -> torch.Tensor:
        """Memory of the host for changed rows, followed by those that only settle."""
        on_gpu = self.device.type == "cuda"  # pinned memory of the host, which PyTorch keeps for such copies
        sizes = (changed + len(self._due), init_context.SENT)
        here = torch.empty(sizes, dtype=torch.float64, device="cpu", pin_memory=on_gpu)
        if len(self._due):
            sent = here.numpy()[changed:]
            sent[:, 0], sent[:, 1], sent[:, 2] = self._due, init_context.SETTLED, 1.0
        return here

    def _put(self, here: torch.Tensor) -> None:
        """Copy rows to the device in one piece; a kernel scatters them into place."""
        there = here.to(self.device, non_blocking=True)
        point(self._changes, "rows", there)
        self._changes.count, self._changes.framed = len(there), self._framed
        threads = min(1 << (len(there) - 1).bit_length(), MOST_THREADS)  # one of few numbers: see `Launches`
        self._launches(
            *(init_context.put_instances, threads, self.resident.values, self._origins, self._changes, threads)
        )
        self._due = NONE

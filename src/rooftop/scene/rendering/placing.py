"""Keep the scene's instances on the device. Only rows that changed are uploaded."""

from __future__ import annotations

import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray

from rooftop.launch.warp_launch import Launches, launch_warp
from rooftop.scene.instances import GROWTH, REMOVED, Instances
from rooftop.scene.rendering import buffers, init_context
from rooftop.scene.rendering.host_rows import HostRows
from rooftop.scene.rendering.uploads import Meshes, Uploaded

ROWS_AT_ONCE = 2**20  # maximum number of rows of 112 bytes per copy; host and device each hold a buffer of this size
FEW_ROWS = 1024  # up to this many rows, the kernel reads host memory, because a copy would take more host time
MOST_THREADS = 2**17
MOST_FRAMES = 2**31
WIDTHS = {  # dtype and width of a row of each tensor
    "instance_mesh": (torch.int32, ()),
    "instance_scale": (torch.float32, ()),
    "instance_to_world": (torch.float64, (12,)),
    "instance_before": (torch.float64, (12,)),
    "instance_moved": (torch.int32, ()),
    "instance_normals": (torch.float32, (9,)),
}


class Placed:
    """A renderer's copy of the scene's instances. Addresses change only when capacity grows, so captured CUDA graphs
    stay valid.

    Attributes:
        places: capacity, in instances. Unused entries and removed instances have no mesh.
        frame: the number of the next frame, from 0 to 2^31 - 1, then again from 0.
        resident: `buffers.Resident` with these instances and the meshes.
    """

    resident: Uploaded

    def __init__(self, device: torch.device) -> None:
        self.device, self.places, self.frame = device, 0, 0
        self._meshes: Meshes | None = None
        self._tensors = {name: torch.empty(0, *row, dtype=of, device=device) for name, (of, row) in WIDTHS.items()}
        self._version = self._sent = 0
        self._framed = 0  # number of instances in the previous frame
        self._few = HostRows((1 + FEW_ROWS, init_context.SENT), torch.float64, device)
        self._launches = Launches(device)

    def update(self, instances: Instances, meshes: Meshes) -> None:
        """Upload the instances that have changed to the device. Their transforms of the previous frame are kept
        there."""
        grew = instances.count > self.places
        if grew:
            self._grow(instances.count)
        if grew or meshes is not self._meshes:
            self._meshes = meshes
            self._origins = wp.from_torch(torch.from_numpy(meshes.origins).to(self.device))
            self._launches.clear()
            self.resident = Uploaded.into(buffers.Resident(), meshes.tensors() | self._tensors)
        rows = instances.changed(self._version, self._sent)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            self._send(instances, rows[first : first + ROWS_AT_ONCE])
        self._version, self._sent = instances.changes.version, instances.count

    def settle(self) -> None:
        """End a frame: the current transforms become the transforms of the previous frame."""
        self.frame, self._framed = (self.frame + 1) % MOST_FRAMES, self._sent

    def _grow(self, count: int) -> None:
        """Grow the tensors to `count` instances, or to GROWTH times their size if that is more."""
        self.places = max(count, int(GROWTH * self.places))
        for name, before in self._tensors.items():
            self._tensors[name] = torch.zeros(self.places, *before.shape[1:], dtype=before.dtype, device=self.device)
            self._tensors[name][: len(before)] = before
        self._tensors["instance_mesh"][self._sent :] = REMOVED

    def _send(self, instances: Instances, rows: NDArray[np.int64]) -> None:
        """Send the instances with the indices `rows` to the device in one copy. The first row contains the number of
        rows that follow. A kernel writes the rows that follow to the instances' tensors."""
        count = len(rows)
        few = count <= FEW_ROWS
        if few:
            self._few.wait()
            sent = self._few.rows
        else:
            on_gpu = self.device.type == "cuda"
            here = torch.empty(1 + count, init_context.SENT, dtype=torch.float64, device="cpu", pin_memory=on_gpu)
            sent = here.numpy()
        sent[0, :3] = count, self.frame, self._framed
        sent[1 : 1 + count, 0], sent[1 : 1 + count, 1] = rows, instances.mesh_of[rows]
        sent[1 : 1 + count, 2:] = instances.transforms[rows].reshape(-1, 16)[:, :12]
        scene = self.resident.values, self._origins
        threads = min(1 << (count - 1).bit_length(), MOST_THREADS)  # rounded to one of few values: see `Launches`
        if few:
            self._launches(init_context.put_instances, threads, *scene, self._few.there, threads)
            self._few.launched()
        else:
            there = here.to(self.device, non_blocking=True)
            launch_warp(init_context.put_instances, (threads,), *scene, there, threads, device=self.device)

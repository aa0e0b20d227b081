"""Read Rooftop's checkpoints with `torch.distributed.checkpoint`, into tensors of any sharding.

    import torch.distributed.checkpoint as dcp

    state = {name: parameter for name, parameter in model.named_parameters()}  # tensors and DTensors, of any mesh
    dcp.load(state, storage_reader=CheckpointReader("run"))

PyTorch's planner determines which parts of which tensors each rank needs. `SavedTensors` reads only these parts and
verifies their checksums. The tensors have the names that `rooftop checkpoint inspect --json` prints. The files contain
no pickled data.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from rooftop.kernels import Box
from rooftop.train.checkpoints.saved_tensors import Readable
from rooftop.train.checkpoints.training_records import holds_training, read_record
from rooftop.train.checkpoints.trainings import open_tensors


class CheckpointReader(StorageReader):
    """Reads checkpoints of `rooftop train gpt --save` or `save_training`.

    Args:
        folder: the folder of a training, whose last step is read, or of one step.

    Raises:
        InputError: the folder has no training, or the checkpoint is damaged. Damaged tensor data raise only when they
            are read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.reset(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Open the given checkpoint; None: keep the checkpoint that is open."""
        if checkpoint_id is not None:
            self.saved: Readable = open_tensors(read_record(Path(checkpoint_id)))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the dtype and whole shape of each tensor; planners need nothing else."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=entry.dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size([0] * len(entry.shape)), torch.Size(entry.shape))],
                )
                for name, entry in self.saved.entries.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing; the constructor has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged, because reading needs no coordination of the ranks."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the data that a rank needs.

        Raises:
            InputError: the data of a tensor are damaged; the message names the tensor and the file.
        """
        with torch.no_grad():
            for item in plan.items:
                name = item.storage_index.fqn
                box = Box(self.saved.entries[name].shape, tuple(item.storage_offsets), tuple(item.lengths))
                place = planner.resolve_tensor(item)
                self.saved.fill(place.detach(), name, box)
                planner.commit_tensor(item, place)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path is the folder of a training, or the folder of one of its steps."""
        return holds_training(Path(checkpoint_id))

"""Read checkpoints of format 1, Rooftop's first format: a `torch.save` file for each tensor parallel rank.

    training.json     "format": 1
    tensor-0.pt       {"step", "shards", "weights": {name: tensor}, "optimizer": {number: {kind: tensor}}}
    tensor-1.pt

A rank's tensors are stored as the rank held them, with padding; "shards" lists the pieces of the whole tensors that the
rank's tensors consist of (`resharding`). The optimizer numbers the weights of two or more dimensions first, then all
other weights. This format is read through `saved_tensors.Readable`, and never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.kernels import Box
from rooftop.parallel import Piece, Shard
from rooftop.train.checkpoints.resharding import put_together, shards_from
from rooftop.train.checkpoints.saved_tensors import Entry
from rooftop.train.checkpoints.trainer_tensors import moment_name

UNREADABLE = (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError, UnpicklingError)
"""The exceptions that torch.load, or code that uses its result, raises for a damaged file."""


def part_name(tensor_rank: int) -> str:
    """Name of a tensor parallel rank's file."""
    return f"tensor-{tensor_rank}.pt"


class OlderTensors:
    """The tensors of a checkpoint of format 1, in the folder of the training step after which they were saved.

    Args:
        folder: folder of that step.
        ranks: number of tensor parallel ranks that saved the step.
        own: (this tensor parallel rank, its shard of each parameter by name) if the number of ranks is the same as in
            the save. With `own`, the rank reads only its own file.

    Attributes:
        entries: the dtype and the shape of each whole tensor, by the tensor's name.

    Raises:
        InputError: a file is missing or damaged, or does not record the pieces of each rank.
    """

    def __init__(self, folder: Path, ranks: int, own: tuple[int, Mapping[str, Shard]] | None = None) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._held: dict[str, list[tuple[Shard | None, Tensor]]] = {}
        path = folder
        try:
            for rank in range(ranks) if own is None else [own[0]]:
                path = folder / part_name(rank)
                part = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                if own is None and "shards" not in part and ranks > 1:
                    raise InputError(
                        f"{folder} has a training of {ranks} tensor parallel ranks, in a format that does not record "
                        "the pieces of each rank: resume it with the same number of ranks, and save it again"
                    )
                self._add(part, _as_first(own[1]) if own is not None else shards_from(part.get("shards", {})))
        except InputError:
            raise
        except UNREADABLE as error:
            raise _damaged(path, error) from error

    def _add(self, part: Mapping[str, Any], shards: Mapping[str, Shard]) -> None:
        weights: Mapping[str, Tensor] = part["weights"]
        counted = sorted(weights, key=lambda name: weights[name].dim() < 2)  # a stable sort keeps the model's order
        for number, name in enumerate(counted):
            weight, shard = weights[name], shards.get(name)
            self._add_one(name, shard, weight)
            for kind, value in part["optimizer"][number].items():
                self._add_one(moment_name(kind, name), shard if value.shape == weight.shape else None, value)

    def _add_one(self, name: str, shard: Shard | None, value: Tensor) -> None:
        self._held.setdefault(name, []).append((shard, value))
        if shard is None or shard.pieces:
            shape = tuple(value.shape) if shard is None else shard.pieces[0].box.shape
            self.entries.setdefault(name, Entry(value.dtype, shape))

    def fill(self, place: Tensor, name: str, box: Box) -> None:
        """See `Readable`."""
        held = self._held[name]
        if not box.size:
            place.copy_(held[0][1])
            return
        try:
            place.copy_(put_together(Shard((Piece(box),)), box.size, held))
        except UNREADABLE as error:
            raise _damaged(self.folder, error) from error


def _as_first(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """Mark this rank as the first holder of all its pieces, including pieces that an earlier rank also holds.
    `put_together` skips pieces that are not `first`, but the rank reads only its own file."""
    return {
        name: Shard(tuple(replace(piece, first=True) for piece in shard.pieces), shard.padding)
        for name, shard in shards.items()
    }


def _damaged(path: Path, error: BaseException) -> InputError:
    kind = type(error).__name__  # torch's message is a page long
    return InputError(f"{path} cannot be read as a part of a training ({kind}); is it complete?")

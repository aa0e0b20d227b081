"""Convert a checkpoint to the current format, with the files that ranks of a different layout would write.

    convert(read_record(Path("run")), Path("whole"))                    # one file, each tensor in one piece
    convert(read_record(Path("run")), Path("for-eight"), tensor_ranks=8)

Trainings of any layout can read any checkpoint. A conversion has three uses: to write whole tensors for the safetensors
library, to write one file per rank, and to update checkpoints of format 1. Only one piece of a tensor is in memory at a
time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch

from rooftop.errors import InputError
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.switches import GptConfig
from rooftop.parallel import Layout, Shard, shards_of
from rooftop.parallel.exchanges import Group
from rooftop.train.checkpoints.files import FilePiece, write_file
from rooftop.train.checkpoints.folders import complete, file_name, unfinished
from rooftop.train.checkpoints.plans import Held, box_of, planned
from rooftop.train.checkpoints.saved_tensors import DTYPES, KINDS, Readable
from rooftop.train.checkpoints.trainer_tensors import OPTIMIZER
from rooftop.train.checkpoints.training_records import FORMAT, TrainingRecord
from rooftop.train.checkpoints.trainings import open_tensors
from rooftop.user_paths import user_path

Progress = Callable[[str, float], None]


def convert(
    record: TrainingRecord,
    out: str | Path,
    *,
    tensor_ranks: int = 1,
    progress: Progress = lambda what, fraction: None,
) -> Path:
    """Convert a checkpoint. All data are verified by their checksums, which only format 1 lacks.

    Args:
        record: the record of the checkpoint.
        out: the folder to write, new or empty, which `--load` accepts later. The folder gets this name once all files
            are written.
        tensor_ranks: number of tensor parallel ranks; one file is written per rank. 1: one file with whole tensors.
        progress: called before each piece with (text that names its tensor, fraction of all bytes written so far).

    Returns:
        The folder of the step.

    Raises:
        InputError: the checkpoint is damaged, `out` is not empty or cannot be created, or the model cannot be split
            among `tensor_ranks` ranks.
        OSError: the new checkpoint cannot be written.
    """
    out = user_path(out)
    check_new(out)
    layout = _layout(record.config, tensor_ranks)
    saved = open_tensors(record)
    plans = planned([[*_held_by(rank, tensor_ranks, record.config, saved)] for rank in range(tensor_ranks)])
    total = sum(piece.bytes for pieces in plans for piece in pieces)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    temporary = unfinished(partial, record.step, "converted")
    described = {
        **record.plain,
        "format": FORMAT,
        "layout": {**asdict(layout), "fully_shard": False, "words": str(layout)},
    }
    try:
        temporary.mkdir(parents=True)
        done = 0
        for rank, pieces in enumerate(plans):
            write_file(temporary / file_name(rank), pieces, _contents(saved, pieces, done, total, progress))
            done += sum(piece.bytes for piece in pieces)
        name = complete(temporary, [file_name(rank) for rank in range(tensor_ranks)], described).name
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after a success, the temporary folder no longer exists
    return out / name


def check_new(out: Path) -> None:
    """Check that a folder can be written: it is new or empty.

    Raises:
        InputError: the folder is not empty or cannot be created, or its parent does not exist.
    """
    if out.name in ("", ".."):
        raise InputError(f"{out} cannot be written: expected a new or empty folder")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} already exists: give a new or empty folder")
        folder = out.resolve().parent
        if not folder.is_dir():
            raise InputError(f"{out} cannot be written: there is no folder {folder}")
        if not os.access(folder, os.W_OK):
            raise InputError(f"{out} cannot be written: permission denied")
        probe = out.with_name(f".{out.name}.{os.getpid()}.partial")  # temporary name of the folder until it is complete
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: no folder can be created there ({error.strerror}); give another path"
        ) from error


def _layout(config: GptConfig, tensor_ranks: int) -> Layout:
    layout = Layout(tp=tensor_ranks)
    try:
        config.check_layout(layout, tensor_ranks, axes=("tp",))
    except ValueError as error:
        raise InputError(str(error)) from error
    return layout


@dataclass(frozen=True)
class _Place:
    """Stand-in for a process group: layers on the meta device read their rank and the number of ranks from
    this object."""

    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


def _held_by(rank: int, ranks: int, config: GptConfig, saved: Readable) -> Iterator[Held]:
    """Yield a description of each tensor of the checkpoint as tensor parallel rank `rank` of `ranks` would hold it."""
    shards: dict[str, Shard] = {}
    if ranks > 1:
        shards = shards_of(Gpt(config, group=cast(Group, _Place(rank, ranks)), device="meta"))
    for name, entry in saved.entries.items():
        weight = name.split(".", 2)[2] if name.startswith(f"{OPTIMIZER}.") else name
        shard = shards.get(weight) if entry.shape == saved.entries[weight].shape else None
        yield Held.of(name, KINDS[entry.dtype], entry.shape, shard)


def _contents(
    saved: Readable, pieces: Sequence[FilePiece], done: int, total: int, progress: Progress
) -> Iterator[memoryview]:
    for piece in pieces:
        progress(f"writing {piece.name}", done / total)
        content = torch.empty(piece.size, dtype=DTYPES[piece.dtype])
        saved.fill(content, piece.name, box_of(piece))
        done += piece.bytes
        yield content.reshape(-1).view(torch.uint8).numpy().data

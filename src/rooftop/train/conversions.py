"""A checkpoint made into another: of today's format, in files as the ranks of another layout would have written them.

    convert(read_record(Path("run")), Path("whole"))                    # one file, each tensor in one piece
    convert(read_record(Path("run")), Path("for-eight"), tensor_ranks=8)

Any layout reads any checkpoint; a conversion is for files that other programs read (each tensor whole, by the
safetensors library), for many ranks that shall each read one file of their own, and for what was saved in format 1.
One piece is in memory at a time.
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
from rooftop.train.checkpoint_files import FilePiece, write_file
from rooftop.train.checkpoint_folders import complete, file_name, unfinished
from rooftop.train.checkpoint_plans import Held, box_of, planned
from rooftop.train.checkpoints import open_tensors
from rooftop.train.saved_tensors import DTYPES, KINDS, Readable
from rooftop.train.trainer_tensors import OPTIMIZER
from rooftop.train.training_records import FORMAT, TrainingRecord

Progress = Callable[[str, float], None]


def convert(
    record: TrainingRecord,
    out: str | Path,
    *,
    tensor_ranks: int = 1,
    progress: Progress = lambda what, fraction: None,
) -> Path:
    """Write a checkpoint anew. Everything that is read is compared with its checksums.

    Args:
        record: of what is read.
        out: a folder of a training, as `--load` takes it; not there yet, or empty. It appears when all is written.
        tensor_ranks: a file for each of so many tensor parallel ranks, with what it holds; 1: one, all tensors whole.
        progress: is told (the tensor, the share that is done).

    Returns:
        The folder of the step.

    Raises:
        InputError: what is read is damaged, `out` has something in it, or the model cannot be split so.
        OSError: it cannot be written.
    """
    out = Path(out)
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
        shutil.rmtree(partial, ignore_errors=True)  # which is gone if all went well
    return out / name


def check_new(out: Path) -> None:
    """See that a folder can be written: it is not there, or empty.

    Raises:
        InputError: something is in it, there is no folder for it, or none can be made there.
    """
    if out.name in ("", ".."):
        raise InputError(f"{out} cannot be written: expected the name of a folder that is not there yet, or empty")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} is there already: give a new folder, or an empty one")
        folder = out.resolve().parent
        if not folder.is_dir():
            raise InputError(f"{out} cannot be written: there is no folder {folder}")
        if not os.access(folder, os.W_OK):
            raise InputError(f"{out} cannot be written: permission denied")
        probe = out.with_name(f".{out.name}.{os.getpid()}.partial")  # as what is written is called until it is whole
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: no folder can be made there ({error.strerror}); give another one"
        ) from error


def _layout(config: GptConfig, tensor_ranks: int) -> Layout:
    layout = Layout(tp=tensor_ranks)
    try:
        layout.check(
            tensor_ranks,
            heads=config.heads,
            kv_heads=config.kv_heads,
            hidden=config.width,
            feed_forward=config.hidden,
            vocabulary=config.vocabulary,
            axes=("tp",),
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    return layout


@dataclass(frozen=True)
class _Place:
    """A rank of a group that there is not: all that a layer asks of it where nothing is computed."""

    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


def _held_by(rank: int, ranks: int, config: GptConfig, saved: Readable) -> Iterator[Held]:
    """What a tensor parallel rank would hold."""
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

"""Save a training atomically in any layout, and resume it in any other layout.

    save/
      latest              the name of the last complete step
      step-00000100/
        training.json     the training and its layout
        index.json        the position of each tensor
        rank-00000.safetensors ...

A checkpoint holds the whole model's weights and moments by name. Each rank writes some parts of these tensors (`plans`)
and reads its own parts (`saved_tensors`). So a checkpoint does not depend on the layout: any number of tensor, data,
context and pipeline parallel ranks can resume it, with or without a sharded model. The step determines the schedule and
the next data; seed and step determine the dropout masks.

`savers.Saver` saves in the background; this file contains the blocking save and the loading. Both formats can be loaded
(`older_checkpoints` reads format 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rooftop.errors import InputError
from rooftop.parallel import Shard
from rooftop.train.checkpoints.folders import last_step
from rooftop.train.checkpoints.older_checkpoints import OlderTensors
from rooftop.train.checkpoints.saved_tensors import Readable, SavedTensors
from rooftop.train.checkpoints.savers import Saver
from rooftop.train.checkpoints.trainer_tensors import fill_trainer, shards_here
from rooftop.train.checkpoints.training_records import FORMAT, TrainingRecord, check_same, read_record
from rooftop.train.gpt.trainer import GptTrainer
from rooftop.train.gpt.training import GptTraining
from rooftop.train.tokens.mixtures import Mixture
from rooftop.train.tokens.tokens import Tokens
from rooftop.user_paths import user_path


def save_training(folder: str | Path, trainer: GptTrainer, *, keep_last: int | None = None) -> Path:
    """Save the state of a training after its latest step, and wait until the data are on the disk.

    All ranks must call this together.

    Args:
        folder: folder of all steps; created if missing.
        keep_last: number of steps to keep, including this one; None: all.

    Returns:
        The folder of this step.

    Raises:
        OSError: the step cannot be written, and `latest` still names the previous step; or the step is complete, but an
            older step cannot be removed. All ranks raise this.
    """
    saver = Saver(folder, trainer, asynchronous=False, keep_last=keep_last)
    try:
        saver.begin()
        saved = saver.wait()
    finally:
        saver.close()
    assert saved is not None
    return saved


def nothing_saved(folder: str | Path) -> bool:
    """Whether a folder does not exist, or has no step of a training."""
    folder = user_path(folder)
    return not folder.exists() or (folder.is_dir() and last_step(folder) is None)


def find_training(folder: str | Path, training: GptTraining) -> tuple[Path, int]:
    """Find the last checkpoint in a folder and check that this training can resume it, without communication.

    Returns (folder of the checkpoint, its step).

    Raises:
        InputError: there is no checkpoint, or it belongs to another training.
    """
    record = read_record(folder)
    check_same(record, training)
    return record.folder, record.step


def other_data(found: str | Path, tokens: Tokens | Mixture) -> str | None:
    """Describe how the data differ from the checkpoint's data.

    The result is None if the data are the same, or if the checkpoint does not record its data.

    Different data do not raise an error, because the user may intend this.
    """
    saved = read_record(found).data
    if saved.get("fingerprint") in (None, tokens.fingerprint()):
        return None
    return (
        f"{found} was trained on {saved.get('source')}, {saved.get('tokens', 0):,} tokens, and resumes on "
        f"{tokens.source}, {len(tokens):,} tokens: its sequences differ from this step on"
    )


def load_training(found: str | Path, trainer: GptTrainer) -> None:
    """Load a checkpoint into a trainer. The trainer keeps its own learning rate and weight decay.

    Each rank reads its own parts and verifies their checksums, without communication.

    Raises:
        InputError: a tensor or a file is missing, is damaged or does not fit; the message names this tensor or file.
            The trainer is then partly loaded, and must not be used.
    """
    record = read_record(found)
    own = (trainer.place["tp"], shards_here(trainer)) if record.layout["tp"] == trainer.layout.tp else None
    fill_trainer(trainer, open_tensors(record, own), record.folder)
    trainer.step = record.step


def open_tensors(record: TrainingRecord, own: tuple[int, Mapping[str, Shard]] | None = None) -> Readable:
    """Open the tensors of a checkpoint, in either format.

    Args:
        own: (this tensor parallel rank, its parts), for a checkpoint of format 1 if the number of ranks is the same as
            in the save.

    Raises:
        InputError: a file is missing or damaged.
    """
    if record.format != FORMAT:
        return OlderTensors(record.folder, int(record.layout["tp"]), own)
    saved = SavedTensors(record.folder, record.index_checksum)
    if saved.step != record.step:
        raise InputError(
            f"{record.folder} was changed: its training.json says step {record.step}, its index step {saved.step}"
        )
    return saved

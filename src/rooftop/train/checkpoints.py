"""A training on disk: saved whole or not at all, in any layout, and gone on with in any other.

    save/
      latest              the name of the last one that is whole
      step-00000100/
        training.json     what was trained, in which layout
        index.json        where each tensor is
        rank-00000.safetensors ...

What is saved are the tensors of the whole model under their names, weights and moments; each rank writes parts of them
(`checkpoint_plans`) and reads what it holds (`saved_tensors`). So a layout is nothing that a checkpoint depends on: any
number of tensor, data, context and pipeline parallel ranks may go on, sharing the model or not. The schedule and the
next data follow from the step, and masks of dropout from seed and step.

`savers.Saver` writes beside the training; here are its blocking form and the way back. Checkpoints of format 1
(`older_checkpoints`) are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rooftop.errors import InputError
from rooftop.parallel import Shard
from rooftop.train.checkpoint_folders import last_step
from rooftop.train.gpt_trainer import GptTrainer
from rooftop.train.gpt_training import GptTraining
from rooftop.train.mixtures import Mixture
from rooftop.train.older_checkpoints import OlderTensors
from rooftop.train.saved_tensors import Readable, SavedTensors
from rooftop.train.savers import Saver
from rooftop.train.tokens import Tokens
from rooftop.train.trainer_tensors import fill_trainer, shards_here
from rooftop.train.training_records import FORMAT, TrainingRecord, check_same, read_record


def save_training(folder: str | Path, trainer: GptTrainer, *, keep_last: int | None = None) -> Path:
    """Save a training after its last step, and wait until it is on the disk. All ranks must call it together.

    Args:
        folder: of all steps; made if need be.
        keep_last: how many steps are left in it, this one among them; None: all.

    Returns:
        The folder of this step.

    Raises:
        OSError: it cannot be written; on all ranks. Then `latest` names the one before.
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
    """Whether a folder is missing, or has no step of a training: none was saved there before it ended."""
    folder = Path(folder)
    return not folder.exists() or (folder.is_dir() and last_step(folder) is None)


def find_training(folder: str | Path, training: GptTraining) -> tuple[Path, int]:
    """The last that was saved in a folder, and its step, if it can be gone on with so. Communicates with nobody.

    Raises:
        InputError: there is none, or it is of another training.
    """
    record = read_record(folder)
    check_same(record, training)
    return record.folder, record.step


def other_data(found: str | Path, tokens: Tokens | Mixture) -> str | None:
    """That the data are not those of what `find_training` found, in words; None if they are, or if it does not say.

    To go on with others is no error: it may be meant.
    """
    saved = read_record(found).data
    if saved.get("fingerprint") in (None, tokens.fingerprint()):
        return None
    return (
        f"{tokens.source}, {len(tokens):,} tokens, is not what {found} was trained on ({saved.get('source')}, "
        f"{saved.get('tokens', 0):,} tokens): it goes on with other sequences than it would have had"
    )


def load_training(found: str | Path, trainer: GptTrainer) -> None:
    """Give a trainer what `find_training` has found. Its own learning rate and weight decay stay.

    Each rank reads what it holds, and compares it with its checksums. Communicates with nobody.

    Raises:
        InputError: something is missing, damaged or does not fit; the tensor and the file are named. The trainer then
            has a part of it, and is of no use.
    """
    record = read_record(found)
    own = (trainer.place["tp"], shards_here(trainer)) if record.layout["tp"] == trainer.layout.tp else None
    fill_trainer(trainer, open_tensors(record, own), record.folder)
    trainer.step = record.step


def open_tensors(record: TrainingRecord, own: tuple[int, Mapping[str, Shard]] | None = None) -> Readable:
    """The tensors of a checkpoint, of either format.

    Args:
        own: of format 1: this tensor parallel rank and what it holds, where as many as saved it go on.

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

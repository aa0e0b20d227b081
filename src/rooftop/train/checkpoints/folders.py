"""The folder of a training's checkpoints: a step appears once it is complete, and `latest` names the last step.

    save/
      latest                          the name of the last complete step
      step-00000100/
        training.json                 the training, its layout and step; index.json's checksum
        index.json                    the position of each tensor, with checksums
        rank-00000.safetensors        the tensors that each rank wrote
        rank-00001.safetensors
      .step-00000200.8f3a.unfinished  a step that is being written, or that a killed training left incomplete

The order is: write the files to the disk, rename the folder, update `latest`, remove older steps. So the previous
checkpoint survives if the process is killed between two of these actions. If a step is saved again, its folder gets
another name (step-00000100.2). All ranks must see the same folder.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rooftop.errors import InputError
from rooftop.train.checkpoints.files import checksum, sync_folder, write_text
from rooftop.train.checkpoints.saved_tensors import INDEX, index_of

LATEST, TRAINING = "latest", "training.json"
STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
UNFINISHED = ".unfinished"
OF_TASKS, TASK = "checkpoints", "task"
"""OF_TASKS: name of the checkpoint folder in the folder of a task's run. TASK: value of "kind" in training.json, which
distinguishes the training of a task from the training of a GPT."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Add the name of a file or folder, and the remedy, to an OSError that the block raises.

    Raises:
        OSError: the disk is full.
        InputError: the path cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        words = f"{path} cannot be written ({error.strerror or error})"
        if error.errno in FULL:
            raise OSError(f"{words}: make room, then resume") from error
        raise InputError(f"{words}: expected a path in a folder with write permission") from error


def file_name(rank: int) -> str:
    """Name of the checkpoint file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def unfinished(folder: Path, step: int, token: str) -> Path:
    """The temporary folder in which a step is written; each save has its own token."""
    return folder / f".step-{step:08d}.{token}{UNFINISHED}"


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished folders of trainings that were killed while they saved."""
    for path in folder.glob(f".step-*{UNFINISHED}"):
        remove(path)
    remove(folder / f".{LATEST}{UNFINISHED}")


def complete(
    temporary: Path, files: Sequence[str], described: Mapping[str, Any], *, keep_last: int | None = None
) -> Path:
    """Turn the files of the ranks into a complete step, make `latest` name it, and remove older steps and
    earlier saves of this step.

    Args:
        temporary: the temporary folder of the files.
        files: the names of the files.
        described: the contents of training.json, including "step".
        keep_last: number of steps to keep: this step and the steps before it. Later steps are always kept. None: keep
            all steps.

    Returns:
        The folder of the step.

    Raises:
        OSError: a file cannot be written, and `latest` still names the previous step; or the step is complete, but an
            older step cannot be removed.
        ValueError: a file is incomplete.
    """
    folder = temporary.parent
    write_described(temporary, files, described)
    step = int(described["step"])
    before = steps_in(folder, step)
    stem = f"step-{step:08d}"
    names = (stem if number == 1 else f"{stem}.{number}" for number in count(1))
    name = next(name for name in names if not (folder / name).exists())
    os.replace(temporary, folder / name)
    sync_folder(folder)
    write_text(folder / f".{LATEST}{UNFINISHED}", f"{name}\n")
    os.replace(folder / f".{LATEST}{UNFINISHED}", folder / LATEST)
    sync_folder(folder)
    for path in before:  # an earlier save of this step; `latest` may have named it until now
        _remove_step(path)
    if keep_last is not None:
        older = sorted(((number, path) for number, path in _steps(folder) if number < step), reverse=True)
        for _, path in older[keep_last - 1 :]:
            _remove_step(path)
    return folder / name


def write_described(temporary: Path, files: Sequence[str], described: Mapping[str, Any]) -> None:
    """Write index.json and training.json into the folder of the checkpoint files, and wait until all these files are on
    the disk."""
    index = index_of(temporary, files, int(described["step"]))
    write_text(temporary / INDEX, index)
    said = {**described, "index_crc32": checksum(index.encode())}
    write_text(temporary / TRAINING, json.dumps(said, indent=1) + "\n")
    sync_folder(temporary)


def last_step(folder: Path) -> Path | None:
    """Return the folder of the step that was completed last; None if no step is complete.

    `latest` names this step. If `latest` is missing, the training was killed between the renaming of its first step and
    the writing of `latest`. A step with its final name is always complete.

    Raises:
        InputError: `latest` names a step that does not exist, but other steps exist.
    """
    steps = sorted(_steps(folder)) if folder.is_dir() else []
    if not steps:
        return None
    if not (folder / LATEST).is_file():
        return steps[-1][1]
    name = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    if folder / name not in {path for _, path in steps}:
        raise InputError(
            f"{folder / LATEST} names {name!r}, but this step does not exist; complete steps are "
            f"{', '.join(path.name for _, path in steps)}: give one of these folders, such as {steps[-1][1]}"
        )
    return folder / name


def steps_in(folder: Path, step: int) -> list[Path]:
    """List the folders of a step that contain a training.

    A step has several folders if it was saved again, and the earlier save is not removed yet.
    """
    return [path for number, path in _steps(folder) if number == step]


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = [(STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    return [(int(match[1]), path) for match, path in found if match is not None and (path / TRAINING).is_file()]


def _remove_step(path: Path) -> None:
    """Remove the folder of a step. If the process is killed midway, no incomplete folder keeps the name of a step."""
    hidden = path.with_name(f".{path.name}.removed{UNFINISHED}")
    try:
        os.replace(path, hidden)
        remove(hidden)
    except OSError as error:
        raise OSError(f"the newer checkpoint is complete, but {path} cannot be removed: {error}") from error


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

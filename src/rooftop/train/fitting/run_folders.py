"""The folder of a run: the recipe, the metrics, the exported weights and the checkpoints of a training.

    OUT/
      recipe.toml
      metrics.jsonl
      best.safetensors, last.safetensors    exported weights of the best and the last evaluation
      checkpoints/
        latest                              as in `rooftop.train.checkpoints.folders`
        step-00000100/
          training.json                     recipe, task and data; progress; the state without its tensors
          index.json, rank-00000.safetensors    the tensors, with checksums

A data parallel training has the same state on all ranks. So rank 0 writes the state, and any number of ranks may resume
the training.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from rooftop.data.pieces import flat_bytes
from rooftop.data.samples import Samples, sample
from rooftop.errors import InputError
from rooftop.train.checkpoints.files import ITEM_BYTES, FilePiece
from rooftop.train.checkpoints.folders import (
    OF_TASKS,
    TASK,
    TRAINING,
    complete,
    file_name,
    last_step,
    remove_unfinished,
    unfinished,
    writing_to,
)
from rooftop.train.checkpoints.saved_tensors import KINDS, SavedTensors, whole_tensor
from rooftop.train.checkpoints.writing import write_now
from rooftop.train.fitting.states import put_together, taken_apart
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.task import Task
from rooftop.whole_files import write_whole

RECIPE = "recipe.toml"
MAY_CHANGE = ("loading", "faults")
"""Sections of the recipe that may differ when a training is resumed, because these sections do not change the results.
"""
BEST, LAST = "best.safetensors", "last.safetensors"
LOOKED_AT = 3
"""Number of samples that identify the data: the first, the middle and the last sample."""


@dataclass(frozen=True)
class Saved:
    """A loaded checkpoint.

    Attributes:
        folder: folder of the step.
        progress: progress of the training, as JSON values.
        state: state of the stepper.
    """

    folder: Path
    progress: Mapping[str, Any]
    state: Any


# ---- identity of a training ----------------------------------------------------------------------------------------


def identity_of(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Describe the identity of a training: recipe, task and data, as JSON values by section and name."""
    named = [*task.model.named_parameters(), *task.model.named_buffers()]
    shapes = {name: [str(each.dtype).removeprefix("torch."), *each.shape] for name, each in named}
    plain = {
        "recipe": {section: values for section, values in recipe.plain().items() if section not in MAY_CHANGE},
        "task": {
            "model": type(task.model).__name__,
            "tensors": crc32(json.dumps(shapes).encode()),
            "parameters": sum(each.numel() for each in task.model.parameters()),
            "best": task.best,
            "maximize": task.maximize,
        },
        "data": {"train": _described(task.train), "valid": _described(task.valid)},
    }
    return json.loads(json.dumps(plain))  # type: ignore[no-any-return]


def _described(samples: Samples | None) -> dict[str, Any] | None:
    if samples is None:
        return None
    count = len(samples)
    places = sorted({int(place) for place in np.linspace(0, count - 1, LOOKED_AT)}) if count else []
    return {"type": type(samples).__name__, "samples": count, "content": [_content(samples, place) for place in places]}


def _content(samples: Samples, index: int) -> int | str:
    """A checksum of the tensors, arrays, strings and Python numbers in a sample.

    For a damaged sample, or one with a tensor that has no plain bytes (a sparse one), the name of the error's type.
    """
    found = 0
    try:
        for leaf in pytree.tree_leaves(sample(samples, index, 0, 0)):
            if isinstance(leaf, Tensor):
                leaf = flat_bytes(leaf.detach().cpu()).numpy()
            if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:  # its bytes are addresses
                found = crc32(repr(leaf.tolist()).encode(), found)
            elif isinstance(leaf, np.ndarray):
                found = crc32(np.ascontiguousarray(leaf).tobytes(), found)
            elif isinstance(leaf, str | bytes | int | float):
                found = crc32(repr(leaf).encode(), found)
    except Exception as error:  # a damaged sample is reported when the training reads it
        return type(error).__name__
    return found


def _with_defaults(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a saved identity: switches that are newer than the checkpoint get their defaults."""
    usual = json.loads(json.dumps(Recipe().plain()))
    recipe = {name: {**usual.get(name, {}), **values} for name, values in identity.get("recipe", {}).items()}
    return {**identity, "recipe": recipe}


def differences(here: Mapping[str, Any], there: Mapping[str, Any], path: str = "") -> list[str]:
    """List the differences between two identities: "recipe.optimizer.lr is 0.2 now and 0.1 in the checkpoint"."""
    found = []
    for name in dict.fromkeys([*here, *there]):
        one, other = here.get(name), there.get(name)
        where = f"{path}.{name}" if path else name
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += differences(one, other, where)
        elif one != other:
            found.append(f"{where} is {json.dumps(one)} now and {json.dumps(other)} in the checkpoint")
    return found


# ---- the folder ----------------------------------------------------------------------------------------------------


class RunFolder:
    """The folder of a run.

    Args:
        out: path of the folder; created if missing.
        keep_last: number of checkpoints to keep.
    """

    def __init__(self, out: Path, keep_last: int) -> None:
        self.out, self.keep_last = out, keep_last
        self.checkpoints = out / OF_TASKS

    def begin(self, recipe: Recipe) -> None:
        """Create the folder, write the recipe, and remove leftovers of killed trainings.

        Raises:
            InputError, OSError: see `writing_to`.
        """
        with writing_to(self.checkpoints):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self.checkpoints)
        with writing_to(self.out / RECIPE):
            write_whole(self.out / RECIPE, recipe.toml() + "\n")

    def check(self, state: Any) -> None:
        """Check before a training that `save` can write its state.

        Raises:
            InputError: the state has a value that a checkpoint cannot store.
        """
        try:
            taken_apart(state, "", {})
        except TypeError as error:
            raise InputError(f"the state of this training cannot be saved: {error}") from error

    def last(self) -> Path | None:
        """The folder of the last checkpoint; None if there is no checkpoint."""
        return last_step(self.checkpoints)

    def save(self, step: int, identity: Mapping[str, Any], progress: Mapping[str, Any], state: Any) -> Path:
        """Write a checkpoint atomically, and remove older checkpoints.

        Raises:
            OSError: the checkpoint cannot be written; the previous one is kept.
        """
        tensors: dict[str, Tensor] = {}
        described = {
            "kind": TASK,
            "step": step,
            "identity": identity,
            "progress": progress,
            "state": taken_apart(state, "", tensors),
        }
        pieces = [_piece(name, tensor) for name, tensor in tensors.items()]
        # wide dtypes first, so that all pieces are aligned
        order = sorted(range(len(pieces)), key=lambda number: -ITEM_BYTES[pieces[number].dtype])
        sources = list(tensors.values())
        temporary = unfinished(self.checkpoints, step, secrets.token_hex(4))
        try:
            write_now(temporary / file_name(0), [pieces[at] for at in order], [sources[at] for at in order])
            return complete(temporary, [file_name(0)], described, keep_last=self.keep_last)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            before = self.last()
            kept = "there is no earlier one" if before is None else f"{before} is kept"
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.checkpoints} "
                f"({error.strerror or error}); {kept}: make room, then --resume"
            ) from error

    def _is_longer(self, here: Mapping[str, Any], there: Mapping[str, Any], different: Sequence[str]) -> bool:
        """Whether the training `here` differs from the training `there` of the checkpoint only by more epochs or
        steps. Exported weights, from which it can start, must be in the folder."""
        of_length = all(each.startswith(("recipe.run.epochs ", "recipe.run.steps ")) for each in different)
        runs = [identity.get("recipe", {}).get("run", {}) for identity in (here, there)]
        now, then = ([run.get(name) or 0 for name in ("epochs", "steps")] for run in runs)
        return of_length and now > then and (self.out / LAST).is_file()

    def load(self, identity: Mapping[str, Any]) -> Saved | None:
        """Load the last checkpoint; returns None if there is no checkpoint.

        Raises:
            InputError: the checkpoint is damaged, or belongs to another training; the message lists the differences.
        """
        folder = self.last()
        if folder is None:
            return None
        try:
            described = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
            if described.get("kind") != TASK:
                raise InputError(
                    f"{folder} is a checkpoint of another kind: resume a GPT with rooftop train gpt --load"
                )
            index = str(described["index_crc32"])
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{folder / TRAINING} cannot be read: {error}") from error
        if different := differences(identity, _with_defaults(described["identity"])):
            longer = self._is_longer(identity, described["identity"], different)
            remedy = (
                f"To train longer, start from its weights: model.weights={self.out / LAST}, in another folder"
                if longer
                else "Resume with the same recipe, task and data, or give another folder"
            )
            raise InputError(f"{self.out} holds another training: {'; '.join(different)}. {remedy}")
        saved = SavedTensors(folder, index)
        tensors = {name: whole_tensor(saved, name) for name in saved.entries}
        return Saved(folder, described["progress"], put_together(described["state"], tensors))


def _piece(name: str, tensor: Tensor) -> FilePiece:
    shape = tuple(tensor.shape)
    return FilePiece(name, KINDS[tensor.dtype], shape, (0,) * len(shape), shape)

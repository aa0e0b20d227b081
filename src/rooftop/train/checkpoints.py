"""A training on disk: saved whole or not at all, and gone on with as if nothing had been.

    save/
      latest              the name of the last one that is whole
      step-00000100/
        training.json     what was trained, in which layout
        tensor-0.pt       weights and optimizer of the tensor parallel rank 0

Data parallel ranks hold the same, so the first of each writes. The folder has another name until all is in it; `latest`
is renamed last. A process that is killed on the way leaves the one before; a step that is saved again has another name
(step-00000100.2) than what it takes the place of. All ranks must see the same folder.

What each tensor parallel rank holds is saved as it is, with which pieces of the whole model that are. As many of them
read their own; of another number each takes from all files what it holds (`resharding`). Any number of data parallel
ranks fits, whether they share parameters (FSDP2), which are put together one by one, or not; and sequence parallelism
too, which splits no parameter.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rooftop.errors import InputError
from rooftop.models.gpt_switches import GptConfig
from rooftop.parallel import Shard, shards_of
from rooftop.parallel.sharded_data import part_like, whole_of
from rooftop.train.gpt_training import GptTrainer, GptTraining
from rooftop.train.mixtures import Mixture
from rooftop.train.resharding import put_together, records, shards_from
from rooftop.train.tokens import Tokens

FORMAT = 1
LATEST, TRAINING = "latest", "training.json"
RATES = {"learning_rate", "warmup", "decay", "decay_steps", "least_rate", "weight_decay", "clip"}
SWITCHES = [field for each in (GptConfig, GptTraining) for field in fields(each)]
NEWER = {field.name: field.default for field in SWITCHES if field.default is not MISSING}
"""What a training is of that was saved before there were these switches."""
SPEEDS = {"micro_batch", "recompute", "halves", "pipeline_schedule", "layers_per_virtual_stage", "transport", "near"}
MAY_CHANGE = RATES | SPEEDS | {"cuda_graph"}
"""Of a training that goes on; all else must be what it was saved with."""


def save_training(folder: Path, trainer: GptTrainer) -> Path:
    """Save a training after its last step. All ranks must call it together.

    Returns:
        The folder of this step.

    Raises:
        OSError: it cannot be written; then `latest` names the one before.
    """
    _refuse_pipelines(trainer)
    step = f"step-{trainer.step:08d}"
    temporary = folder / f".{step}.unfinished"
    if trainer.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.mkdir()
        _write(temporary / TRAINING, json.dumps(_described(trainer), indent=1) + "\n")
    _wait_for_all()
    part = _part_of(trainer)
    if trainer.place["dp"] == trainer.place["cp"] == 0:
        _save_part(temporary / part_name(trainer.place["tp"]), part)
    del part
    _wait_for_all()
    if trainer.rank == 0:
        before = [path for path in folder.iterdir() if path.name.split(".")[0] == step]
        names = (step if number == 1 else f"{step}.{number}" for number in count(1))
        name = next(name for name in names if not (folder / name).exists())
        os.replace(temporary, folder / name)
        _write(folder / f".{LATEST}.unfinished", f"{name}\n")
        os.replace(folder / f".{LATEST}.unfinished", folder / LATEST)
        for path in before:  # the same step, saved before: until now `latest` may have named it
            _remove(path)
    _wait_for_all()
    return folder / (folder / LATEST).read_text(encoding="utf-8").strip()


def find_training(folder: Path, training: GptTraining) -> tuple[Path, int]:
    """The last that was saved in a folder, and its step, if it can be gone on with so. Communicates with nobody.

    Raises:
        InputError: there is none, or it is of another training.
    """
    try:
        found = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
        saved: dict[str, Any] = json.loads((found / TRAINING).read_text(encoding="utf-8"))
        if saved["format"] != FORMAT:
            raise InputError(f"{found} has format {saved['format']}, this version of Rooftop reads {FORMAT}")
        then, step, _ = saved["training"], int(saved["step"]), int(saved["layout"]["tp"])
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"no training was saved in {folder}: {error.filename} is not there") from error
    except (NotADirectoryError, IsADirectoryError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{folder} does not hold a training as --save writes it ({error!r})") from error
    given = _plain(training)
    then = NEWER | then
    differing = [
        f"{name} is {then.get(name)!r} there, {value!r} here"
        for name, value in given.items()
        if name not in MAY_CHANGE and then.get(name) != value
    ]
    if differing:
        raise InputError(f"{found} is of another training: {'; '.join(differing)}")
    return found, step


def other_data(found: Path, tokens: Tokens | Mixture) -> str | None:
    """That the data are not those of what `find_training` found, in words; None if they are, or if it does not say.

    To go on with others is no error: it may be meant.
    """
    saved: dict[str, Any] = json.loads((found / TRAINING).read_text(encoding="utf-8")).get("data") or {}
    if saved.get("fingerprint") in (None, tokens.fingerprint()):
        return None
    return (
        f"{tokens.source}, {len(tokens):,} tokens, is not what {found} was trained on ({saved.get('source')}, "
        f"{saved.get('tokens', 0):,} tokens): it goes on with other sequences than it would have had"
    )


def load_training(found: Path, trainer: GptTrainer) -> None:
    """Give a trainer what `find_training` has found. Its own learning rate and weight decay stay.

    Saved by as many tensor parallel ranks, this rank's file is all that it reads; by another number, it takes from all
    of their files what it holds.

    Raises:
        InputError: a part is damaged or does not fit.
    """
    _refuse_pipelines(trainer)
    ranks = json.loads((found / TRAINING).read_text(encoding="utf-8"))["layout"]["tp"]
    path = found
    try:
        parts = []
        for rank in [trainer.place["tp"]] if ranks == trainer.layout.tp else range(ranks):
            path = found / part_name(rank)
            # Of what data ranks share, and of what others held, none reads the whole at once.
            piecewise = trainer.fully_shard or ranks != trainer.layout.tp
            where = torch.device("cpu") if piecewise else trainer.device
            parts.append(torch.load(path, map_location=where, mmap=piecewise, weights_only=True))
        path = path if ranks == trainer.layout.tp else found
        saved = _OwnPart(parts[0]) if ranks == trainer.layout.tp else _PartsOfOthers(parts, shards_of(trainer.model))
        trainer.weights.adopt()  # what was loaded before is put aside
        trainer.step = int(parts[0]["step"])
        with torch.no_grad():
            for name, weight in trainer.weights.named.items():
                value = saved.weight(name, weight.shape)
                if value.shape != weight.shape:
                    there, here = tuple(value.shape), tuple(weight.shape)
                    raise InputError(f"{path} does not fit: {name} is {there} there and {here} here")
                weight.copy_(part_like(weight, value))
        groups = trainer.optimizer.state_dict()["param_groups"]
        names = {id(weight): name for name, weight in trainer.weights.named.items()}
        state = {
            number: _state_like(weight, saved.state(number, names[id(weight)], weight.shape))
            for number, weight in _stepped(trainer)
        }
        trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})
    except InputError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError, UnpicklingError) as error:
        kind = type(error).__name__  # torch's message is a page
        raise InputError(f"{path} cannot be read as this rank's part of a training ({kind}); is it whole?") from error
    trainer.weights.publish()


def _refuse_pipelines(trainer: GptTrainer) -> None:
    if trainer.layout.pp > 1:
        raise ValueError(
            f"a training with pipeline ranks cannot be saved or loaded yet: the layout {trainer.layout} must have "
            "pp=1; leave out --save and --load, or use tensor and data parallel ranks"
        )


@dataclass(frozen=True)
class _OwnPart:
    """What this rank holds, as it was saved."""

    part: Mapping[str, Any]

    def weight(self, name: str, shape: Sequence[int]) -> Tensor:
        found: Tensor = self.part["weights"][name]
        return found

    def state(self, number: int, name: str, shape: Sequence[int]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.part["optimizer"][number]
        return found


class _PartsOfOthers:
    """What this rank holds, from what all tensor parallel ranks of another layout held; a tensor at a time."""

    def __init__(self, parts: Sequence[Mapping[str, Any]], here: Mapping[str, Shard]) -> None:
        if any("shards" not in part for part in parts):
            raise InputError(
                f"a training of {len(parts)} tensor parallel ranks, saved before Rooftop wrote which pieces each has: "
                "go on with as many, and save it again"
            )
        self.parts, self.here = parts, here
        self.shards = [shards_from(part["shards"]) for part in parts]

    def weight(self, name: str, shape: Sequence[int]) -> Tensor:
        return self._of(name, shape, [part["weights"][name] for part in self.parts])

    def state(self, number: int, name: str, shape: Sequence[int]) -> dict[str, Tensor]:
        states, weight = [part["optimizer"][number] for part in self.parts], self.parts[0]["weights"][name]
        return {
            key: self._of(name, shape, [state[key] for state in states]) if value.shape == weight.shape else value
            for key, value in states[0].items()
        }

    def _of(self, name: str, shape: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
        held = [(shards.get(name), tensor) for shards, tensor in zip(self.shards, tensors, strict=True)]
        return put_together(self.here.get(name), shape, held)


def _part_of(trainer: GptTrainer) -> dict[str, Any]:
    """What is saved of a tensor parallel rank. Of what data ranks share, only the first of them has it, on the CPU."""

    def whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        found = whole_of(tensor)
        return found.cpu() if trainer.place["dp"] == trainer.place["cp"] == 0 else found.new_empty(0)

    trainer.weights.adopt()
    states = trainer.optimizer.state_dict()["state"].items()
    return {
        "step": trainer.step,
        "shards": records(shards_of(trainer.model)),
        "weights": {name: whole(weight) for name, weight in trainer.weights.named.items()},
        "optimizer": {number: {key: whole(value) for key, value in state.items()} for number, state in states},
    }


def _stepped(trainer: GptTrainer) -> Iterator[tuple[int, Tensor]]:
    """Each weight with its number in the optimizer's state."""
    return enumerate(weight for group in trainer.optimizer.param_groups for weight in group["params"])


def _state_like(weight: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a weight's saved state what belongs to this rank; the count of steps has no shape of the weight."""
    return {key: part_like(weight, value) if value.shape == weight.shape else value for key, value in state.items()}


def _save_part(path: Path, part: Mapping[str, Any]) -> None:
    try:
        with path.open("wb") as file:
            torch.save(part, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before its name says so
    except RuntimeError as error:  # torch's word for a file that takes no more
        said = (str(error).splitlines() or [""])[0]
        raise OSError(
            f"{path} could not be written whole; is there room for it? What was saved before is there ({said})"
        ) from error


def _remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _described(trainer: GptTrainer) -> dict[str, Any]:
    layout = {**asdict(trainer.layout), "words": str(trainer.layout)}
    tokens = trainer.batches.tokens
    data = {"source": tokens.source, "tokens": len(tokens), "fingerprint": tokens.fingerprint()}
    data["text"] = tokens.text
    return {
        "format": FORMAT,
        "step": trainer.step,
        "layout": layout,
        "training": _plain(trainer.training),
        "data": data,
    }


def _plain(training: GptTraining) -> dict[str, Any]:
    """As JSON has it; the model's sizes beside the others."""
    values: dict[str, Any] = asdict(training)
    config: Mapping[str, Any] = values.pop("config")
    plain = {**config, **values, "dtype": str(training.dtype).removeprefix("torch.")}
    return json.loads(json.dumps(plain))  # type: ignore[no-any-return]  # tuples are lists there


def part_name(tensor_rank: int) -> str:
    """The file of what a tensor parallel rank holds."""
    return f"tensor-{tensor_rank}.pt"


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()

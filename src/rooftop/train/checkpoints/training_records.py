"""Read and write training.json, a checkpoint's description of its training, and check which training may resume it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rooftop.errors import InputError
from rooftop.models.gpt.rope_scaling import RopeScaling
from rooftop.models.gpt.switches import GptConfig
from rooftop.train.checkpoints.folders import OF_TASKS, TASK, TRAINING, last_step
from rooftop.train.gpt.trainer import GptTrainer
from rooftop.train.gpt.training import GptTraining
from rooftop.user_paths import user_path

FORMAT, OLDER_FORMAT = 2, 1
HUGGING_FACE = "config.json"
RATES = {"learning_rate", "warmup", "decay", "decay_steps", "least_rate", "weight_decay", "clip"}
SPEEDS = {
    "micro_batch",
    "recompute",
    "halves",
    "sum_once",
    "pipeline_schedule",
    "layers_per_virtual_stage",
    "transport",
    "near",
}
MAY_CHANGE = RATES | SPEEDS | {"cuda_graph"}
"""Settings that may change when a training is resumed; all other settings must equal the checkpoint's."""
OPTIONS = {
    "layers": "--num-layers",
    "width": "--hidden-size",
    "heads": "--num-attention-heads",
    "vocabulary": "--vocab-size",
    "hidden": "the width of the MLPs (from --hidden-size)",
    "length": "--seq-length",
    "global_batch": "--global-batch-size",
    "positions": "the model's positions (from --seq-length)",
    "document_end": "--eod-token",
    "reset_positions": "--reset-position-ids",
    "mask_ends": "--eod-mask-loss",
    "seed": "--seed",
    "dtype": "--dtype",
    "dropout": "--dropout",
}
"""Options of rooftop train gpt that set a field of `GptTraining` or of its `GptConfig`."""
SWITCHES = [field for each in (GptConfig, GptTraining) for field in fields(each)]
NEWER = {field.name: field.default for field in SWITCHES if field.default is not MISSING}
"""Values of newer options for a training that was saved before these options existed."""


@dataclass(frozen=True)
class TrainingRecord:
    """The contents of training.json in the folder of a step.

    Attributes:
        folder: folder of the step.
        format: 2, or 1 for `older_checkpoints`.
        step: the last step before the save.
        layout: layout of the ranks that saved: the sizes of `Layout`, and under "words" the layout as text.
        training: the fields of `GptTraining` and of its `GptConfig`, as JSON values.
        data: source, number of tokens, fingerprint, and whether the tokens were text; empty if unknown.
        index_checksum: checksum of index.json, for format 2.
    """

    folder: Path
    format: int
    step: int
    layout: Mapping[str, Any]
    training: Mapping[str, Any]
    data: Mapping[str, Any]
    index_checksum: str

    @property
    def config(self) -> GptConfig:
        """The config of the model. If an older record lacks an option, the value with the older behaviour is used.

        Raises:
            InputError: the record is not valid.
        """
        try:
            return self._config()
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.folder} is not a training of rooftop train gpt --save ({error!r})") from error

    def _config(self) -> GptConfig:
        found = {field.name: self.training[field.name] for field in fields(GptConfig) if field.name in self.training}
        if found.get("rope_scaling") is not None:
            found["rope_scaling"] = RopeScaling(**found["rope_scaling"])
        if found.get("window_layers") is not None:
            found["window_layers"] = tuple(found["window_layers"])
        return GptConfig(**found)

    @property
    def plain(self) -> dict[str, Any]:
        """The contents of training.json, without the checksum of index.json."""
        return {
            "format": self.format,
            "step": self.step,
            "layout": dict(self.layout),
            "training": dict(self.training),
            "data": dict(self.data),
        }


def holds_training(folder: str | Path) -> bool:
    """Whether a folder is the checkpoint folder of a training, or the folder of one of its steps."""
    folder = user_path(folder)
    return (folder / TRAINING).is_file() or last_step(folder) is not None


def read_record(folder: str | Path) -> TrainingRecord:
    """Read the training record of a checkpoint.

    Args:
        folder: the folder of a training, whose last step is read, or the folder of one step.

    Raises:
        InputError: the folder holds no training, or its training.json is damaged or has an unknown format.
    """
    folder = user_path(folder)
    found = folder
    try:
        found = last_step(folder) or folder
        said: dict[str, Any] = json.loads((found / TRAINING).read_text(encoding="utf-8"))
        if said.get("kind") == TASK:
            raise _of_a_task(found, found.parent.parent)
        if said["format"] not in (FORMAT, OLDER_FORMAT):
            raise InputError(
                f"{found} has format {said['format']}, but this version of Rooftop reads {OLDER_FORMAT} and {FORMAT}"
            )
        index = str(said["index_crc32"]) if said["format"] == FORMAT else ""
        int(said["layout"]["tp"])
        training, data = dict(said["training"]), dict(said.get("data") or {})
        return TrainingRecord(found, said["format"], int(said["step"]), said["layout"], training, data, index)
    except InputError:
        raise
    except FileNotFoundError as error:
        if (folder / OF_TASKS).is_dir() and last_step(folder / OF_TASKS) is not None:
            raise _of_a_task(folder, folder) from error
        missing = folder if not folder.exists() else error.filename
        hint = ""
        if (folder / HUGGING_FACE).is_file():
            hint = (
                f"; {folder / HUGGING_FACE} belongs to a Hugging Face model: start a training from it with --init-from"
            )
        raise InputError(
            f"no training was saved in {folder}: {missing} is missing; expected a folder of rooftop train gpt "
            f"--save{hint}"
        ) from error
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{found / TRAINING} is not a file of rooftop train gpt --save ({type(error).__name__}): it is damaged, or "
            "another program wrote it. Give the folder of another step"
        ) from error


def _of_a_task(found: Path, run: Path) -> InputError:
    return InputError(
        f"{found} holds the training of a task, not of a GPT: continue it with rooftop train TASK --out {run} "
        f"--resume; its weights are {run / 'last.safetensors'}"
    )


def check_same(record: TrainingRecord, training: GptTraining) -> None:
    """Check that a training may resume a checkpoint.

    Raises:
        InputError: the trainings differ in a setting that must not change.
    """
    then = NEWER | dict(record.training)
    differing = [
        f"{OPTIONS.get(name, name)} is {then.get(name)!r} in the checkpoint and {value!r} now"
        for name, value in plain_training(training).items()
        if name not in MAY_CHANGE and then.get(name) != value
    ]
    if differing:
        raise InputError(
            f"{record.folder} belongs to another training: {'; '.join(differing)}. Resume with the same settings, or "
            "leave out --load to start another training"
        )


def described(trainer: GptTrainer) -> dict[str, Any]:
    """Describe a training as it is after the latest step: the contents of training.json."""
    tokens = trainer.batches.tokens
    return {
        "format": FORMAT,
        "step": trainer.step,
        "layout": {
            **asdict(trainer.layout),
            "fully_shard": trainer.fully_shard,
            "words": str(trainer.layout),
        },
        "training": plain_training(trainer.training),
        "data": {
            "source": tokens.source,
            "tokens": len(tokens),
            "fingerprint": tokens.fingerprint(),
            "text": tokens.text,
        },
    }


def plain_training(training: GptTraining) -> dict[str, Any]:
    """Convert a training to JSON values; the fields of its config are at the same level as its own fields."""
    values: dict[str, Any] = asdict(training)
    config: Mapping[str, Any] = values.pop("config")
    plain = {**config, **values, "dtype": str(training.dtype).removeprefix("torch.")}
    return json.loads(json.dumps(plain))  # type: ignore[no-any-return]  # JSON turns tuples into lists

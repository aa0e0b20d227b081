"""training.json: what a checkpoint says of the training that it holds, and whether another one may go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rooftop.errors import InputError
from rooftop.models.gpt.rope_scaling import RopeScaling
from rooftop.models.gpt.switches import GptConfig
from rooftop.train.checkpoint_folders import TRAINING, last_step
from rooftop.train.gpt_trainer import GptTrainer
from rooftop.train.gpt_training import GptTraining

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
"""Of a training that goes on; all else must be what it was saved with."""
SWITCHES = [field for each in (GptConfig, GptTraining) for field in fields(each)]
NEWER = {field.name: field.default for field in SWITCHES if field.default is not MISSING}
"""What a training is of that was saved before there were these switches."""


@dataclass(frozen=True)
class TrainingRecord:
    """What the folder of a step says.

    Attributes:
        folder: of the step.
        format: 2; or 1, of `older_checkpoints`.
        step: after which it was saved.
        layout: of the ranks that saved it: `Layout`'s sizes, and "words".
        training: the fields of `GptTraining` and of its `GptConfig`, as JSON has them.
        data: source, tokens, fingerprint and whether they were text; empty: it does not say.
        index_checksum: of index.json, in format 2.
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
        """Of the model; what an older record lacks is what it was before there was a switch.

        Raises:
            InputError: it is not one.
        """
        try:
            return self._config()
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.folder} does not hold a training as --save writes it ({error!r})") from error

    def _config(self) -> GptConfig:
        found = {field.name: self.training[field.name] for field in fields(GptConfig) if field.name in self.training}
        if found.get("rope_scaling") is not None:
            found["rope_scaling"] = RopeScaling(**found["rope_scaling"])
        if found.get("window_layers") is not None:
            found["window_layers"] = tuple(found["window_layers"])
        return GptConfig(**found)

    @property
    def plain(self) -> dict[str, Any]:
        """As training.json has it, without what follows from its index."""
        return {
            "format": self.format,
            "step": self.step,
            "layout": dict(self.layout),
            "training": dict(self.training),
            "data": dict(self.data),
        }


def holds_training(folder: str | Path) -> bool:
    """Whether a folder is one that a training was saved in, or that of one of its steps."""
    folder = Path(folder)
    return (folder / TRAINING).is_file() or last_step(folder) is not None


def read_record(folder: str | Path) -> TrainingRecord:
    """What was saved in a folder last, or what is in the folder of a step.

    Raises:
        InputError: nothing, or something else.
    """
    folder = Path(folder)
    found = folder
    try:
        found = last_step(folder) or folder
        said: dict[str, Any] = json.loads((found / TRAINING).read_text(encoding="utf-8"))
        if said["format"] not in (FORMAT, OLDER_FORMAT):
            raise InputError(
                f"{found} has format {said['format']}, this version of Rooftop reads {OLDER_FORMAT} and {FORMAT}"
            )
        index = str(said["index_crc32"]) if said["format"] == FORMAT else ""
        int(said["layout"]["tp"])
        training, data = dict(said["training"]), dict(said.get("data") or {})
        return TrainingRecord(found, said["format"], int(said["step"]), said["layout"], training, data, index)
    except InputError:
        raise
    except FileNotFoundError as error:
        missing = folder if not folder.exists() else error.filename
        hint = ""
        if (folder / HUGGING_FACE).is_file():
            hint = f"; {folder / HUGGING_FACE} is a model's of Hugging Face: a training begins from one by --init-from"
        raise InputError(
            f"no training was saved in {folder}: {missing} is not there; expected a folder of rooftop train --save"
            f"{hint}"
        ) from error
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{found / TRAINING} does not hold a training as --save writes it ({type(error).__name__}): is it damaged, "
            "or another program's? Give the folder of another step"
        ) from error


def check_same(record: TrainingRecord, training: GptTraining) -> None:
    """See that a training may go on with what was saved.

    Raises:
        InputError: it is another one, in what it may not change.
    """
    then = NEWER | dict(record.training)
    differing = [
        f"{name} is {then.get(name)!r} there, {value!r} here"
        for name, value in plain_training(training).items()
        if name not in MAY_CHANGE and then.get(name) != value
    ]
    if differing:
        raise InputError(f"{record.folder} is of another training: {'; '.join(differing)}")


def described(trainer: GptTrainer) -> dict[str, Any]:
    """What training.json says of a training after its last step."""
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
    """Convert a training to plain JSON values, with the fields of its config at the same level."""
    values: dict[str, Any] = asdict(training)
    config: Mapping[str, Any] = values.pop("config")
    plain = {**config, **values, "dtype": str(training.dtype).removeprefix("torch.")}
    return json.loads(json.dumps(plain))  # type: ignore[no-any-return]  # tuples are lists there

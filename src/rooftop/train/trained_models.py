"""The model of a training on disk, whole on one device, to be used: the weights that its ranks saved, joined.

if holds_training(Path("run")):
    model = load_trained_gpt("run", device="cuda", dtype=torch.bfloat16).eval()
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from rooftop.errors import InputError
from rooftop.models.gpt import Gpt
from rooftop.models.gpt_switches import GptConfig
from rooftop.models.rope_scaling import RopeScaling
from rooftop.train.checkpoints import FORMAT, LATEST, TRAINING, part_name
from rooftop.train.resharding import put_together, shards_from


def holds_training(folder: Path) -> bool:
    """Whether a folder is one that a training was saved in, or that of one of its steps."""
    return (folder / LATEST).is_file() or (folder / TRAINING).is_file()


@dataclass(frozen=True)
class SavedTraining:
    """What a folder says of the training that it holds.

    Attributes:
        folder: of the step.
        config: of the model.
        step: after which it was saved.
        ranks: tensor parallel ranks that saved it.
        text: whether its tokens were the bytes of text; None: it does not say.
    """

    folder: Path
    config: GptConfig
    step: int
    ranks: int
    text: bool | None


def saved_training(folder: str | Path) -> SavedTraining:
    """What was saved in a folder last, or in the folder of a step.

    Raises:
        InputError: nothing, or something else.
    """
    folder = Path(folder)
    try:
        if (folder / LATEST).is_file():
            folder = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
        said: dict[str, Any] = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
        if said["format"] != FORMAT:
            raise InputError(f"{folder} has format {said['format']}, this version of Rooftop reads {FORMAT}")
        data = said.get("data") or {}
        return SavedTraining(
            folder, _config(said["training"]), int(said["step"]), int(said["layout"]["tp"]), data.get("text")
        )
    except FileNotFoundError as error:
        raise InputError(f"no training was saved in {folder}: {error.filename} is not there") from error
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{folder} does not hold a training as --save writes it ({error!r})") from error


def _config(given: Mapping[str, Any]) -> GptConfig:
    """Of what training.json says of the model, beside the training; an older one lacks newer switches."""
    found = {field.name: given[field.name] for field in fields(GptConfig) if field.name in given}
    if found.get("rope_scaling") is not None:
        found["rope_scaling"] = RopeScaling(**found["rope_scaling"])
    if found.get("window_layers") is not None:
        found["window_layers"] = tuple(found["window_layers"])
    return GptConfig(**found)


@torch.no_grad()
def load_trained_gpt(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Gpt:
    """The model of the training that was saved in a folder, by however many ranks.

    Args:
        folder: the one that `rooftop train gpt --save` was given, whose last step is taken, or that of a step.
        device, dtype: of the parameters; those that were saved are float32, or float64. float32 if not given.

    Returns:
        In training mode.

    Raises:
        InputError: there is no training in it, or it is damaged.
    """
    saved = saved_training(folder)
    model = Gpt(saved.config, device="meta", dtype=dtype or torch.float32).to_empty(device=device)
    model.tie()
    path = saved.folder
    try:
        parts = []
        for rank in range(saved.ranks):
            path = saved.folder / part_name(rank)
            parts.append(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        path = saved.folder
        shards = [shards_from(part.get("shards", {})) for part in parts]
        if saved.ranks > 1 and any("shards" not in part for part in parts):
            raise InputError(
                f"{saved.folder} was saved by {saved.ranks} tensor parallel ranks, before Rooftop wrote which pieces "
                "each has: go on with as many ranks, and save it again"
            )
        parameters = dict(model.named_parameters())
        for part in parts:
            if part["weights"].keys() != parameters.keys():
                other = sorted(part["weights"].keys() ^ parameters.keys())
                raise InputError(f"{saved.folder} does not fit its own {TRAINING}: {', '.join(other[:3])}")
        for name, parameter in parameters.items():
            held = [(shard.get(name), part["weights"][name]) for shard, part in zip(shards, parts, strict=True)]
            parameter.copy_(put_together(None, parameter.shape, held))
    except InputError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError, UnpicklingError) as error:
        kind = type(error).__name__  # torch's message is a page
        raise InputError(f"{path} cannot be read as a part of a training ({kind}); is it whole?") from error
    return model

"""The model of a training on disk, whole on one device, to be used: the weights that its ranks saved, joined.

if holds_training(Path("run")):
    model = load_trained_gpt("run", device="cuda", dtype=torch.bfloat16).eval()
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rooftop.errors import InputError
from rooftop.kernels import Box
from rooftop.models.gpt import Gpt
from rooftop.models.gpt_switches import GptConfig
from rooftop.train.checkpoints import open_tensors
from rooftop.train.saved_tensors import entry_of
from rooftop.train.trainer_tensors import OPTIMIZER
from rooftop.train.training_records import holds_training, read_record

__all__ = ["SavedTraining", "holds_training", "load_trained_gpt", "saved_training"]


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
    record = read_record(Path(folder))
    return SavedTraining(record.folder, record.config, record.step, int(record.layout["tp"]), record.data.get("text"))


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
    record = read_record(Path(folder))
    model = Gpt(record.config, device="meta", dtype=dtype or torch.float32).to_empty(device=device)
    model.tie()
    saved = open_tensors(record)
    parameters = dict(model.named_parameters())
    there = {name for name in saved.entries if not name.startswith(f"{OPTIMIZER}.")}
    if there != parameters.keys():
        other = sorted(there ^ parameters.keys())
        raise InputError(f"{record.folder} does not fit its own training.json: {', '.join(other[:3])}")
    for name, parameter in parameters.items():
        entry_of(saved, record.folder, name, saved.entries[name].dtype, parameter.shape)
        saved.fill(parameter, name, Box.whole(parameter.shape))
    return model

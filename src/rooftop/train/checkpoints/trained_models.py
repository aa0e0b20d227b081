"""Load the model of a checkpoint: join the weights that its ranks saved, or split the weights among the ranks that
load.

if holds_training(Path("run")):
    model = load_trained_gpt("run", device="cuda", dtype=torch.bfloat16).eval()
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rooftop.errors import InputError
from rooftop.kernels import Box
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.switches import GptConfig
from rooftop.models.gpt.weights import empty_gpt
from rooftop.parallel import Shard, shards_of
from rooftop.parallel.exchanges import Group
from rooftop.parallel.shards import Piece
from rooftop.train.checkpoints.saved_tensors import entry_of
from rooftop.train.checkpoints.trainer_tensors import OPTIMIZER
from rooftop.train.checkpoints.training_records import holds_training, read_record
from rooftop.train.checkpoints.trainings import open_tensors

__all__ = ["SavedTraining", "holds_training", "load_trained_gpt", "saved_training"]


@dataclass(frozen=True)
class SavedTraining:
    """The description of the training in a folder.

    Attributes:
        folder: folder of the step.
        config: config of the model.
        step: the last step before the save.
        ranks: number of tensor parallel ranks in the save.
        text: whether the tokens are bytes of text; None: unknown.
    """

    folder: Path
    config: GptConfig
    step: int
    ranks: int
    text: bool | None


def saved_training(folder: str | Path) -> SavedTraining:
    """Describe the last checkpoint in a folder, or the checkpoint in the folder of a step.

    Raises:
        InputError: the folder holds no training.
    """
    record = read_record(folder)
    return SavedTraining(record.folder, record.config, record.step, int(record.layout["tp"]), record.data.get("text"))


@torch.no_grad()
def load_trained_gpt(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    group: Group = None,
) -> Gpt:
    """Load the model of a checkpoint, saved by any number of ranks.

    Args:
        folder: the folder of `rooftop train gpt --save`, whose last step is loaded, or the folder of one step.
        device, dtype: device and dtype of the parameters; float32 by default. Saved parameters are float32 or float64.
        group: tensor parallel ranks that share the model; each reads its own part. None: this process has the whole
            model.

    Returns:
        The model, in training mode.

    Raises:
        InputError: the folder has no training, or the checkpoint is damaged.
        ValueError: the ranks cannot split the heads or features.
    """
    record = read_record(folder)
    model = empty_gpt(record.config, device=device, dtype=dtype, group=group)
    saved = open_tensors(record)
    parameters = dict(model.named_parameters())
    there = {name for name in saved.entries if not name.startswith(f"{OPTIMIZER}.")}
    if there != parameters.keys():
        other = sorted(there ^ parameters.keys())
        raise InputError(
            f"{record.folder} does not fit its own training.json: only one of them has {', '.join(other[:3])}"
        )
    shards = shards_of(model)
    for name, parameter in parameters.items():
        whole = Box.whole(parameter.shape)
        shard = shards.get(name, Shard((Piece(whole),)))
        # a shard that is only padding has no piece that records the whole shape
        shape = shard.pieces[0].box.shape if shard.pieces else saved.entries[name].shape
        entry_of(saved, record.folder, name, saved.entries[name].dtype, shape)
        if shard.padding:
            parameter[len(parameter) - shard.padding :] = 0
        for piece, part in shard.parts(parameter):
            saved.fill(part, name, piece.box)
    return model

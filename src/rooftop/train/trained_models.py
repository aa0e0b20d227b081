"""The model of a training on disk, to be used: the weights that its ranks saved, joined, or split among other ranks.

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
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    group: Group = None,
) -> Gpt:
    """The model of the training that was saved in a folder, by however many ranks.

    Args:
        folder: the one that `rooftop train gpt --save` was given, whose last step is taken, or that of a step.
        device, dtype: of the parameters; those that were saved are float32, or float64. float32 if not given.
        group: tensor parallel ranks that share the model now, of which each reads its own part; None: this one has all.

    Returns:
        In training mode.

    Raises:
        InputError: there is no training in it, or it is damaged.
        ValueError: heads or features that the ranks cannot split.
    """
    record = read_record(Path(folder))
    model = empty_gpt(record.config, device=device, dtype=dtype, group=group)
    saved = open_tensors(record)
    parameters = dict(model.named_parameters())
    there = {name for name in saved.entries if not name.startswith(f"{OPTIMIZER}.")}
    if there != parameters.keys():
        other = sorted(there ^ parameters.keys())
        raise InputError(f"{record.folder} does not fit its own training.json: {', '.join(other[:3])}")
    shards = shards_of(model)
    for name, parameter in parameters.items():
        whole = Box.whole(parameter.shape)
        shard = shards.get(name, Shard((Piece(whole),)))
        shape = (
            shard.pieces[0].box.shape if shard.pieces else saved.entries[name].shape
        )  # not known where all is padding
        entry_of(saved, record.folder, name, saved.entries[name].dtype, shape)
        if shard.padding:
            parameter[len(parameter) - shard.padding :] = 0
        for piece, part in shard.parts(parameter):
            saved.fill(part, name, piece.box)
    return model

"""Map the weights and the optimizer state of a trainer to a checkpoint's tensors, named as in the whole model.

    layers.0.mlp.up.weight                         a weight; float32 or float64 even if the model's dtype is narrower
    optimizer.exp_avg.layers.0.mlp.up.weight       AdamW's moments of this weight
    optimizer.exp_avg_sq.layers.0.mlp.up.weight
    optimizer.step.layers.0.mlp.up.weight          the number of steps that this weight has made, shape ()

A rank holds parts of these tensors (`Shard`). Padding is not saved, because the whole tensors have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.kernels import Box
from rooftop.models.gpt.stages import whole_name
from rooftop.parallel import Shard, shards_of
from rooftop.parallel.sharded_data import local_of, shard_here, sharded_like
from rooftop.train.checkpoints.plans import Held
from rooftop.train.checkpoints.saved_tensors import KINDS, Readable, entry_of
from rooftop.train.gpt.trainer import GptTrainer

OPTIMIZER = "optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = "step"


class HeldTensor(NamedTuple):
    """A rank's part of a tensor.

    Attributes:
        held: the position of the part in the whole tensor.
        local: the rank's tensor: the pieces, concatenated along the first dimension, then padding.
    """

    held: Held
    local: Tensor


def moment_name(kind: str, weight: str) -> str:
    """Name in a checkpoint of an optimizer state of a weight; `kind` is the key of this state in the optimizer."""
    return f"{OPTIMIZER}.{kind}.{weight}"


def tensors_of(trainer: GptTrainer) -> list[HeldTensor]:
    """List the weights and optimizer states that this rank holds, in the order of the model's weights. The listed
    tensors share memory with the trainer."""
    found = []
    for name, weight, shard in _weights(trainer):
        found.append(_held(name, weight, shard))
        for kind, value in trainer.optimizer.state.get(weight, {}).items():
            found.append(_held(moment_name(kind, name), value, shard if value.shape == weight.shape else None))
    return found


def _held(name: str, value: Tensor, shard: Shard | None) -> HeldTensor:
    local = local_of(value).detach()
    return HeldTensor(Held.of(name, KINDS[value.dtype], tuple(value.shape), shard), local)


def _weights(trainer: GptTrainer) -> Iterator[tuple[str, Tensor, Shard | None]]:
    """For each weight: its name in the whole model, this rank's tensor, and the shard that the tensor holds; None: the
    tensor is the whole weight."""
    shards = shards_here(trainer)
    for own_name, weight in trainer.weights.named.items():
        name = whole_name(trainer.training.config, own_name)
        here = shard_here(weight, shards.get(name))
        is_whole = here.padding == 0 and [piece.box for piece in here.pieces] == [Box.whole(weight.shape)]
        yield name, weight, None if is_whole else here


def shards_here(trainer: GptTrainer) -> dict[str, Shard]:
    """This rank's parts of the split weights, by their names in the whole model.

    Data parallel ranks may shard these parts further.
    """
    config = trainer.training.config
    return {whole_name(config, name): shard for name, shard in shards_of(trainer.model).items()}


@torch.no_grad()
def fill_trainer(trainer: GptTrainer, saved: Readable, folder: Path) -> None:
    """Load a trainer's weights, moments and step counts from a checkpoint, onto the trainer's device.

    Raises:
        InputError: a tensor is missing, damaged or of another model.
    """
    trainer.weights.adopt()  # adopt earlier writes to the model now: later they would overwrite the loaded values
    states: dict[int, dict[str, Tensor]] = {}
    numbers = {id(weight): n for n, weight in enumerate(w for g in trainer.optimizer.param_groups for w in g["params"])}
    stepped = any(name.startswith(f"{OPTIMIZER}.") for name in saved.entries)
    for name, weight, shard in _weights(trainer):
        _fill(weight, shard, saved, folder, name)
        if not stepped:
            continue
        state = {}
        for kind in MOMENTS:
            state[kind] = sharded_like(weight, torch.zeros_like(local_of(weight)))
            _fill(state[kind], shard, saved, folder, moment_name(kind, name))
        state[STEPS] = torch.zeros(())  # `load_state_dict` moves it to the weight's device
        _fill(state[STEPS], None, saved, folder, moment_name(STEPS, name))
        states[numbers[id(weight)]] = state
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": states, "param_groups": groups})
    trainer.weights.publish()


def _fill(value: Tensor, shard: Shard | None, saved: Readable, folder: Path, name: str) -> None:
    local = local_of(value).detach()
    if shard is None:
        shape: tuple[int, ...] = tuple(value.shape)
        entry_of(saved, folder, name, value.dtype, shape)
        saved.fill(local, name, Box.whole(shape))
        return
    if shard.padding:
        local[len(local) - shard.padding :] = 0
    for piece, place in shard.parts(local):
        entry_of(saved, folder, name, value.dtype, piece.box.shape)
        if place.numel():
            saved.fill(place, name, piece.box)

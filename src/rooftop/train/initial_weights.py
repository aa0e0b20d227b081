"""A training that begins from weights of Hugging Face, in any layout: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rooftop.errors import InputError
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.stages import GptStages
from rooftop.models.gpt.weights import load_gpt_weights
from rooftop.parallel.sharded_data import part_like
from rooftop.train.checkpoint_folders import TRAINING, last_step


def check_no_training(folder: str | Path) -> None:
    """Refuse a folder that a training of Rooftop was saved in.

    Raises:
        InputError: it is one.
    """
    folder = Path(folder)
    if (folder / TRAINING).is_file() or last_step(folder) is not None:
        raise InputError(
            f"{folder} holds a training that rooftop train --save wrote, and no model of Hugging Face: --load goes on "
            f"with it; to begin anew from its weights, export them: rooftop checkpoint export-hf {folder} -o FOLDER"
        )


def fill_from(model: Gpt | GptStages, folder: str | Path, unshared: Callable[[], Gpt | GptStages]) -> None:
    """Give this rank's part of a model the weights in a folder, as precise as the model's dtype.

    Args:
        model: as `parallel_gpt`, `parallel_gpt_stages` or `fully_sharded_gpt` makes it, with the folder's config. Where
            data ranks share it, each reads its tensor rank's part once, on the CPU.
        folder: with config.json and .safetensors files.
        unshared: makes the same part on the meta device, of a model that data ranks do not share.

    Raises:
        InputError: it holds a training of Rooftop.
        InputError, WeightsError, MissingExtraError: as of `rooftop.models.load_gpt`.
    """
    from torch.distributed.tensor import DTensor

    check_no_training(folder)
    named = dict(model.named_parameters())
    if not any(isinstance(parameter, DTensor) for parameter in named.values()):
        load_gpt_weights(model, folder)
        return
    whole = unshared().to_empty(device="cpu")
    whole.tie()
    load_gpt_weights(whole, folder)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            named[name].copy_(part_like(named[name], parameter))

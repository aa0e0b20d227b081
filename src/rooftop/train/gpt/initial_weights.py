"""Start a training from weights of Hugging Face, in any layout: each rank reads its own part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rooftop.errors import InputError
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.stages import GptStages
from rooftop.models.gpt.weights import load_gpt_weights
from rooftop.parallel.sharded_data import part_like
from rooftop.train.checkpoints.folders import TRAINING, last_step
from rooftop.user_paths import user_path


def check_no_training(folder: str | Path) -> None:
    """Raise an error if a folder holds a training of Rooftop.

    Raises:
        InputError: the folder holds a training.
    """
    folder = user_path(folder)
    if (folder / TRAINING).is_file() or last_step(folder) is not None:
        raise InputError(
            f"{folder} holds a training of rooftop train gpt --save, not a model of Hugging Face: resume it with "
            f"--load; to start from its weights, export them: rooftop checkpoint export-hf {folder} -o FOLDER"
        )


def fill_from(model: Gpt | GptStages, folder: str | Path, unshared: Callable[[], Gpt | GptStages]) -> None:
    """Load the weights in a folder into this rank's part of a model, rounded to the model's dtype.

    Args:
        model: result of `parallel_gpt`, `parallel_gpt_stages` or `fully_sharded_gpt`, with the folder's config. If data
            parallel ranks shard the model, each rank first loads its tensor parallel part of its pipeline stages,
            unsharded, into CPU memory, and then copies its own shard.
        folder: a folder with config.json and .safetensors files.
        unshared: creates this rank's part of the model on the meta device, not sharded over data parallel ranks.

    Raises:
        InputError: the folder holds a training of Rooftop.
        InputError, WeightsError, MissingExtraError: see `rooftop.models.load_gpt`.
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

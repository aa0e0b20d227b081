"""Find the device that --device names."""

from __future__ import annotations

import re

import click
import torch

from rooftop.words import counted


def pick_device(text: str | None) -> torch.device:
    """Return the device that --device names; without a name, the GPU if there is one, or the CPU.

    Raises:
        click.BadParameter: this machine has no such device.
    """
    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise click.BadParameter(f"expected cpu, cuda or cuda:N, got {text!r}", param_hint="--device")
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise click.BadParameter(
            f"{text} does not exist: torch {torch.__version__} can use {counted(torch.cuda.device_count(), 'GPU')} on "
            "this machine",
            param_hint="--device",
        )
    return device

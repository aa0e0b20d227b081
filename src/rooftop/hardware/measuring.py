"""Ceilings are measured once for each device, driver and set of versions, and kept in a cache."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import torch

from rooftop.hardware.ceilings import Ceilings, Progress
from rooftop.hardware.probes import identity, probe


def measure_ceilings(
    device: torch.device | str | None = None,
    refresh: bool = False,
    progress: Progress = lambda what, fraction: None,
) -> Ceilings:
    """Ceilings of a device, from the cache if it was measured before under the same driver and versions.

    Args:
        device: "cpu", "cuda", "cuda:1"; None is the GPU if there is one.
        refresh: measure again (under 30 s on a GPU, under 20 s on a CPU) and replace what is cached.
        progress: called with (what is being measured, fraction done).

    Raises:
        ValueError: no such device here.
        CeilingsFileError: the cached file is corrupt; `refresh=True` replaces it.
    """
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"ceilings can be measured on cpu and cuda devices, got {where}")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{where} is not there: torch can use {torch.cuda.device_count()} GPUs on this machine")
    path = cache_path(identity(where))
    if path.exists() and not refresh:
        return Ceilings.load(path)
    ceilings = probe(where, progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ceilings.save(path)
    except OSError as error:
        warnings.warn(
            f"the ceilings could not be kept in {path.parent} ({error.strerror or error}) and will be measured again "
            "next time: set ROOFTOP_CACHE to a folder that can be written",
            stacklevel=2,
        )
    return ceilings


def cache_path(identity: tuple[str, ...]) -> Path:
    """Where the ceilings of a device under given versions are kept."""
    return cache_folder() / f"ceilings-{re.sub(r'[^A-Za-z0-9.+-]+', '_', '-'.join(identity))}.json"


def cache_folder() -> Path:
    """What is measured or compiled once is kept in $ROOFTOP_CACHE, or rooftop/ in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("ROOFTOP_CACHE") or Path(home) / "rooftop")

"""How Warp's kernels of the rulebook start: on PyTorch's tensors, device and stream, loaded once, and counted."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rooftop.errors import MissingExtraError
from rooftop.launch.triton_launch import record_launch
from rooftop.sparse.geometries import MAX_DIMS

_LOADING = Lock()  # Warp cannot be started, nor kernels be loaded by their first launch, in two threads at once
_LOADED: set[torch.device] = set()


def load_kernels() -> ModuleType:
    """The module of Warp's kernels.

    Raises:
        MissingExtraError: Warp is not installed.
    """
    first = "warp" not in sys.modules
    try:
        import warp
    except ImportError as error:
        raise MissingExtraError('sparse convolutions need Warp: pip install "rooftop[sparse]"') from error
    if first:  # else what it says is the user's choice
        warp.config.log_level = warp.LOG_WARNING
    with _LOADING:
        warp.init()  # once; a stream of PyTorch's cannot be named before
    from rooftop.sparse import rulebook_kernels

    return rulebook_kernels


def launch_warp(kernel: Any, threads: tuple[int, ...], *arguments: Any) -> None:
    """Launch a Warp kernel on the device of its first tensor, on PyTorch's current stream; of no threads, nothing."""
    if 0 in threads:
        return
    import warp

    device = next(a.device for a in arguments if isinstance(a, Tensor))
    with nullcontext() if device in _LOADED else _LOADING:
        values = [warp.from_torch(a, return_ctype=True) if isinstance(a, Tensor) else a for a in arguments]
        where: dict[str, Any] = {"device": "cpu"}
        if device.type == "cuda":
            where = {"stream": _stream(device, torch.cuda.current_stream(device).cuda_stream)}
        warp.launch(kernel, threads, values, **where, record_tape=False)
    _LOADED.add(device)
    record_launch(kernel.key)


@cache
def _stream(device: torch.device, handle: int) -> Any:
    """Warp's name of a stream of PyTorch."""
    import warp

    return warp.Stream(warp.device_from_torch(device), cuda_stream=handle)


@cache
def four(values: tuple[int, ...]) -> Any:
    """Up to four sizes as the kernels take them."""
    return load_kernels().Four(*values, *[1] * (MAX_DIMS - len(values)))

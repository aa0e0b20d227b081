"""Launch Warp kernels: on PyTorch's tensors, device and stream, loaded once, and counted."""

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

_LOADING = Lock()  # two threads cannot start Warp, or load kernels by their first launch, at the same time
_LOADED: set[tuple[torch.device, str]] = set()


def start_warp(what: str, extra: str) -> ModuleType:
    """Warp, ready for kernels.

    Args:
        what: the words for the feature that needs it, for the error if it is missing.
        extra: the optional dependency of this package that installs it.

    Raises:
        MissingExtraError: Warp is not installed.
    """
    first = "warp" not in sys.modules
    try:
        import warp
    except ImportError as error:
        raise MissingExtraError(f'{what} need Warp: pip install "rooftop[{extra}]"') from error
    if first:  # later changes of this setting are the user's choice
        warp.config.log_level = warp.LOG_WARNING
    with _LOADING:
        warp.init()  # once; before this Warp cannot use PyTorch's stream
    return warp


def launch_warp(kernel: Any, threads: tuple[int, ...], *arguments: Any, device: torch.device | None = None) -> None:
    """Launch a Warp kernel on PyTorch's current stream; with no threads, do nothing.

    Args:
        threads: their number along each dimension.
        arguments: tensors, numbers, and Warp's own values.
        device: the device, if not that of the first tensor.
    """
    if 0 in threads:
        return
    import warp

    device = device or next(a.device for a in arguments if isinstance(a, Tensor))
    loaded = (device, kernel.module.name)
    with nullcontext() if loaded in _LOADED else _LOADING:
        values = [warp.from_torch(a, return_ctype=True) if isinstance(a, Tensor) else a for a in arguments]
        where: dict[str, Any] = {"device": "cpu"}
        if device.type == "cuda":
            where = {"stream": _stream(device, torch.cuda.current_stream(device).cuda_stream)}
        warp.launch(kernel, threads, values, **where, record_tape=False)
    _LOADED.add(loaded)
    record_launch(kernel.key)


@cache
def _stream(device: torch.device, handle: int) -> Any:
    """Warp's name of a stream of PyTorch."""
    import warp

    return warp.Stream(warp.device_from_torch(device), cuda_stream=handle)

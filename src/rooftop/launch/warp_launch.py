"""Launch Warp kernels on PyTorch's tensors, device and stream. Kernels are loaded once. `count_launches` counts the
launches.

`launch_warp` packs all arguments at each launch. `Launches` packs the arguments once, for kernels that are launched
repeatedly with the same structs.
"""

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

_LOADING = Lock()  # only one thread at a time may start Warp, or load kernels at a first launch
_LOADED: set[tuple[torch.device, str]] = set()


def start_warp(what: str, extra: str) -> ModuleType:
    """Import and initialize Warp, and return the module.

    Args:
        what: the feature that needs Warp, as a plural noun phrase for the error message.
        extra: the extra of the package `rooftop` that installs Warp.

    Raises:
        MissingExtraError: Warp is not installed.
    """
    first = "warp" not in sys.modules
    try:
        import warp
    except ImportError as error:
        raise MissingExtraError(f'{what} need Warp: pip install "rooftop[{extra}]"') from error
    if first:  # only once: the user may change the setting later
        warp.config.log_level = warp.LOG_WARNING
    with _LOADING:
        warp.init()  # only the first call has an effect; without this call Warp could not use PyTorch's stream
    return warp


def launch_warp(kernel: Any, threads: tuple[int, ...], *arguments: Any, device: torch.device | None = None) -> None:
    """Launch a Warp kernel on PyTorch's current stream; 0 threads launch nothing.

    Args:
        threads: the number of threads along each dimension.
        arguments: tensors, numbers, and Warp's own values.
        device: the device; None: the device of the first tensor.
    """
    if 0 in threads:
        return
    import warp

    device = device or next(a.device for a in arguments if isinstance(a, Tensor))
    loaded = (device, kernel.module.name)
    with nullcontext() if loaded in _LOADED else _LOADING:
        values = [warp.from_torch(a, return_ctype=True) if isinstance(a, Tensor) else a for a in arguments]
        stream = _current_stream(device)
        where: dict[str, Any] = {"device": "cpu"} if stream is None else {"stream": stream}
        warp.launch(kernel, threads, values, **where, record_tape=False)
    _LOADED.add(loaded)
    record_launch(kernel.key)


class Launches:
    """Launches of Warp kernels on one device and any stream. The arguments of a kernel are packed only once.

    Each launch reads the current fields of structs, so a changed field takes effect. One packed launch is kept for each
    combination of kernel, number of threads, and numbers among the arguments. If a launch of that combination gets
    another struct, array or vector object than the previous one, its arguments are packed again.

    Args:
        device: the device of all launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}  # (launch, its arguments except numbers)

    def __call__(self, kernel: Any, threads: int, *arguments: Any) -> None:
        """Launch a kernel on PyTorch's current stream; with no threads, do nothing.

        Args:
            threads: the number of threads.
            arguments: ints, and Warp's own arrays, structs and vectors.
        """
        if threads == 0:
            return
        numbers = tuple([a for a in arguments if type(a) is int])
        others = [a for a in arguments if type(a) is not int]
        key = (kernel, threads, numbers)
        kept = self._kept.get(key)
        if kept is None or any(a is not b for a, b in zip(kept[1], others, strict=True)):
            kept = self._kept[key] = self._packed(kernel, threads, arguments), others
        kept[0].launch(_current_stream(self.device))
        record_launch(kernel.key)

    def clear(self) -> None:
        """Drop all packed launches, and thereby release the memory of their arguments."""
        self._kept.clear()

    def _packed(self, kernel: Any, threads: int, arguments: tuple[Any, ...]) -> Any:
        import warp

        loaded = (self.device, kernel.module.name)
        warp.init()  # needed first: device_from_torch does not start Warp
        device = warp.device_from_torch(self.device)
        with nullcontext() if loaded in _LOADED else _LOADING:
            packed = warp.launch(kernel, threads, arguments, device=device, record_tape=False, record_cmd=True)
        _LOADED.add(loaded)
        return packed


def _current_stream(device: torch.device) -> Any:
    """PyTorch's current stream as a Warp stream; None on the CPU."""
    if device.type != "cuda":
        return None
    return _stream(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _stream(device: torch.device, handle: int) -> Any:
    """A PyTorch stream as a Warp stream."""
    import warp

    return warp.Stream(warp.device_from_torch(device), cuda_stream=handle)

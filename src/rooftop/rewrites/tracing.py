"""A tracer of torch.fx that other threads do not notice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.fx as fx
from torch import nn

_one_at_a_time = threading.RLock()
"""Two traces at the same time would restore `nn.Module` in the wrong order."""


class OwnThreadTracer(fx.Tracer):
    """A tracer whose trace concerns only its own thread.

    During a trace, torch.fx replaces `__call__` and `__getattr__` of `nn.Module` for the whole process. Modules that
    other threads call meanwhile are not submodules of the traced model, so torch.fx would raise an error.
    """

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        """Trace a module, as `torch.fx.Tracer.trace` does. If another thread is tracing, first wait until its trace has
        ended."""
        with _one_at_a_time:
            self._thread = threading.get_ident()
            return super().trace(*args, **kwargs)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

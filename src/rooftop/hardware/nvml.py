"""Query the driver through NVML; every query may fail.

In a container, in a virtual machine, with an old driver or an old `nvidia-ml-py`, a call may be missing, refused or not
supported by the GPU. A missing answer is None. NVML's errors are never raised to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Question = Callable[[Any, Any], Any]
"""A query, called with (the pynvml module, the GPU's handle)."""


class Nvml:
    """An open NVML session. `gpu(uuid)` queries one GPU, `system` queries the driver."""

    def __init__(self, module: Any) -> None:
        self._module = module  # the NVML module; None if no session could be opened
        self._handles: dict[str, Any] = {}

    def handle(self, uuid: str | None) -> Any:
        """The driver's handle of a GPU; None if the driver does not know the GPU."""
        if uuid is None:
            return None
        if uuid not in self._handles:
            self._handles[uuid] = self.system(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(uuid))
        return self._handles[uuid]

    def gpu(self, uuid: str | None, question: Question) -> Any:
        """The answer to a query about one GPU, or None."""
        handle = self.handle(uuid)
        return None if handle is None else self.system(lambda nvml: question(nvml, handle))

    def system(self, question: Callable[[Any], Any]) -> Any:
        """The answer to a query about no particular GPU, or None."""
        if self._module is None:
            return None
        try:
            return question(self._module)
        except (self._module.NVMLError, AttributeError):  # the driver refuses the call, or is too old to know it
            return None


@contextmanager
def nvml_session() -> Iterator[Nvml]:
    """A session with the driver. Without a driver, every answer of the session is None."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield Nvml(None)
        return
    try:
        yield Nvml(pynvml)
    finally:
        pynvml.nvmlShutdown()

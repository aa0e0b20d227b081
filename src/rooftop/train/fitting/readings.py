"""Read the results of steps from the device without a pause between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Reading:
    """Results of steps, on their way from the device to the host.

    The constructor starts the copy and does not wait for it: the caller may launch further steps before it calls
    `rows`.

    Args:
        step: the number of the last step in `results`.
        results: for each step, a tensor (columns,); all are on one device.
    """

    def __init__(self, step: int, results: Sequence[Tensor]) -> None:
        self.step = step
        self._rows = torch.stack(list(results))
        self._ready: torch.cuda.Event | None = None
        if self._rows.is_cuda:
            device = self._rows
            self._rows = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)
            self._rows.copy_(device, non_blocking=True)
            self._ready = torch.cuda.current_stream(device.device).record_event()

    def rows(self) -> list[Any]:
        """Wait for the copy to the host; return one list of numbers for each step."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._rows.tolist()  # type: ignore[no-any-return]

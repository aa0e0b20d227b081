"""Reset torch to its own defaults during a measurement.

A program may have set another default dtype or device, or may run inside a mode that observes every call. These
settings must not change a measurement, and the program's modes must not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def usual_defaults() -> Iterator[None]:
    """Within the block, the defaults are float32 and the CPU, and no mode of the program is active. The program's
    settings are restored afterwards.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # a default device is a mode
            yield
    finally:
        torch.set_default_dtype(dtype)

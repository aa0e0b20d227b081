"""Reset torch to its own defaults during a measurement.

A program may have set another default dtype or device, or may run inside a mode that observes every call. These
settings must not change a measurement, and the program's modes must not observe the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def usual_defaults() -> Iterator[None]:
    """Within the block, make float32 and the CPU the defaults, and switch the program's modes (torch function and
    dispatch modes) off. Restore the program's settings afterwards.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # the default device is a mode, too
            yield
    finally:
        torch.set_default_dtype(dtype)

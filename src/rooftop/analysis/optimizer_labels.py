"""Notice the end of an optimizer's step, even if the step raises.

PyTorch puts a profiler label around each `Optimizer.step`. The hooks of an optimizer run inside that label. If the step
raises, the hooks for its end do not run, but the label still ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch.autograd.profiler import record_function

OPTIMIZER_LABEL = "Optimizer.step#"  # the beginning of the label's name


@contextmanager
def optimizer_ends(tell: Callable[[bool], None]) -> Iterator[None]:
    """Within the block, call `tell(raised)` at the end of each optimizer's label, in any thread. `raised` is whether
    the step raised."""
    original = record_function.__exit__

    @wraps(original)
    def __exit__(label: Any, *error: Any) -> Any:
        result = original(label, *error)
        if label.name.startswith(OPTIMIZER_LABEL):
            tell(error[:1] != (None,))
        return result

    with patch.object(record_function, "__exit__", __exit__):
        yield

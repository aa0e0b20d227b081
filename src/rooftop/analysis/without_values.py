"""Functions of libraries that look at values, answered for fake tensors, which have none.

| function | why it looks | for fake tensors |
|---|---|---|
| `torch.nn.init.trunc_normal_` | draws until all values fit | draws nothing, as it does for meta tensors |
| `find_packed_sequence_indices` of transformers | several sequences in one row need another mask than a causal one | one |

Left to itself transformers builds a mask for every fake tensor, and a decoder is counted without its causal kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def answered_without_values() -> Iterator[None]:
    """Inside, these functions answer for fake tensors without their values; real tensors are none of its concern."""
    with ExitStack() as stack:
        for module, name, answered in ANSWERED:
            loaded = sys.modules.get(module)
            if hasattr(loaded, name):
                stack.enter_context(mock.patch.object(loaded, name, answered(getattr(loaded, name))))
        yield


def _draw_none(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw_real(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else draw(tensor, *args, **kwargs)

    return draw_real


def _find_one_sequence(find: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def find_real(positions: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        found = find(positions, *args, **kwargs)  # what it computes on the way counts
        return None if isinstance(found, FakeTensor) else found

    return find_real


ANSWERED = (
    (nn.init.__name__, "_no_grad_trunc_normal_", _draw_none),
    ("transformers.masking_utils", "find_packed_sequence_indices", _find_one_sequence),
)
"""(module, function, what to put in its place)"""

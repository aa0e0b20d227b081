"""Let a program's dispatch modes begin in one stage of a recording and end in another stage.

A recording enters a dispatch mode for a labelled step and removes it afterwards, possibly from below the program's own
contexts. PyTorch expects contexts to exit in reverse order of their entry. If contexts exit in another order, two kinds
of contexts fail:

    torch.inference_mode   turns dispatch modes on or off again as they were at its beginning
    TorchDispatchMode      removes the innermost mode, even if that is another mode, and restores earlier flags
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def modes_settled() -> Iterator[None]:
    """Within the block, let inference mode and dispatch modes (Rooftop's and the program's) end in any order."""
    inference_exit, mode_exit = torch.inference_mode.__exit__, TorchDispatchMode.__exit__

    def inference_settled(self: torch.inference_mode, *error: Any) -> None:
        inference_exit(self, *error)
        active = torch._C._len_torch_dispatch_stack() > 0
        for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
            torch._C._dispatch_tls_set_dispatch_key_included(key, active)

    def mode_settled(self: TorchDispatchMode, *error: Any) -> None:
        above = _modes_above(self)
        if not above:
            mode_exit(self, *error)
            return
        for _ in (self, *above):
            _python_dispatch._pop_mode()
        _flags_without(self, above)
        for mode in above:
            _python_dispatch._push_mode(mode)

    with (
        patch.object(torch.inference_mode, "__exit__", inference_settled),
        patch.object(TorchDispatchMode, "__exit__", mode_settled),
    ):
        yield


def _modes_above(mode: TorchDispatchMode) -> list[TorchDispatchMode]:
    """Active modes that began after this mode, the earliest first. PyTorch orders its own modes itself, so for such a
    mode the list is empty.
    """
    count = torch._C._len_torch_dispatch_stack()
    stack = [torch._C._get_dispatch_stack_at(index) for index in range(count)]
    places = [place for place, other in enumerate(stack) if other is mode]
    return stack[places[-1] + 1 :] if places and getattr(mode, "_mode_key", None) is None else []


_FLAGS = (  # (a mode's list of earlier values, the flag's name in `_python_dispatch`, the value that a mode sets)
    ("old_dispatch_mode_flags", "_is_in_torch_dispatch_mode", lambda mode: True),
    (
        "old_non_infra_dispatch_mode_flags",
        "_is_in_non_infra_torch_dispatch_mode",
        lambda mode: not mode.is_infra_mode(),
    ),
    (
        "old_without_ignore_compile_internals_dispatch_mode_flags",
        "_is_in_any_mode_without_ignore_compile_internals",
        lambda mode: not mode.ignore_compile_internals(),
    ),
)


def _flags_without(ended: TorchDispatchMode, above: list[TorchDispatchMode]) -> None:
    """Set PyTorch's flags, and the earlier flags that the modes `above` saved, as if the ended mode had never begun."""
    known = [flag for flag in _FLAGS if hasattr(_python_dispatch, flag[1])]  # the third flag exists since PyTorch 2.13
    for kept, name, turns_on in known:
        flag = getattr(ended, kept).pop()
        for mode in above:
            getattr(mode, kept)[-1] = flag
            flag = flag or turns_on(mode)
        setattr(_python_dispatch, name, flag)
    if len(known) == len(_FLAGS):
        _python_dispatch.set_is_in_mode_without_ignore_compile_internals(flag)  # type: ignore[attr-defined]

"""Copy a model's modules, but share its tensors."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from rooftop.nn.contents import Contents


def copy_sharing_tensors(model: nn.Module, name: str, unregistered: bool = False) -> nn.Module:
    """Copy a model's modules; the copy has the same parameter and buffer objects as the model.

    Args:
        name: name of the public function, for error messages.
        unregistered: also share the tensors that PyTorch does not register: tensors in plain attributes, and all
            tensors of modules that are not in `_modules`.

    Raises:
        TypeError: an object in the model cannot be copied, or the copy has its own tensors, or the copy shares modules
            with the model.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if unregistered:
        memo |= {id(tensor): tensor for tensor in Contents.of(model).tensors.values()}
    try:
        same = copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"{name}: {type(model).__name__} cannot be copied ({type(error).__name__}: {error}): give its modules a "
            "__deepcopy__, or remove the objects that cannot be copied"
        ) from error
    pairs = zip((*model.parameters(), *model.buffers()), (*same.parameters(), *same.buffers()), strict=False)
    if any(one is not other for one, other in pairs):
        raise TypeError(
            f"{name}: a copy of {type(model).__name__} does not share its parameters: pass the model before "
            "torch.jit.script, or let a module's own __deepcopy__ take tensors from its memo"
        )
    own = {id(module) for module in model.modules()}
    if shared := [name for name, module in same.named_modules() if id(module) in own]:
        raise TypeError(
            f"{name}: copying {type(model).__name__} does not copy its module {shared[0] or 'itself'}: let the "
            "__deepcopy__ of that module return a copy"
        )
    return same

"""Find attributes of a model that hide methods of `nn.Module`.

self.buffers = []        # model.buffers() then raises "'list' object is not callable"

Such a model runs, but nothing can look into it: PyTorch, too, calls these methods.
"""

from __future__ import annotations

from torch import nn

METHODS = (
    *("modules", "named_modules", "children", "named_children", "parameters", "named_parameters", "buffers"),
    *("named_buffers", "get_submodule", "add_module", "train", "eval", "state_dict", "register_forward_hook"),
)


def check_methods(model: nn.Module, name: str) -> None:
    """Check that no attribute of a model hides a method that Rooftop and PyTorch call on it.

    Args:
        name: the public function, for the error.

    Raises:
        TypeError: an attribute of the model or of a part hides a method, and is not callable.
    """
    seen: set[int] = set()
    parts = [("", model)]
    while parts:
        path, part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for method in METHODS:
            if not callable(getattr(part, method)):
                where = f"{path}.{method}" if path else method
                raise TypeError(
                    f"{name}: the attribute {where} of the model hides the method {method} of torch.nn.Module: rename "
                    "it"
                )
        inside = vars(part).get("_modules", {})
        parts += [(f"{path}.{key}" if path else key, each) for key, each in inside.items() if each is not None]

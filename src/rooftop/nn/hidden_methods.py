"""Find attributes of a model that hide methods of `nn.Module`.

self.buffers = []        # model.buffers() then raises "'list' object is not callable"

The model still runs. But Rooftop and PyTorch call these methods to find the model's submodules and tensors.
"""

from __future__ import annotations

from torch import nn

from rooftop.hardware.module_paths import inner_modules, joined

METHODS = (
    *("modules", "named_modules", "children", "named_children", "parameters", "named_parameters", "buffers"),
    *("named_buffers", "get_submodule", "add_module", "train", "eval", "state_dict", "register_forward_hook"),
)


def check_methods(model: nn.Module, name: str) -> None:
    """Check that no attribute of a model hides a method of `nn.Module` that Rooftop and PyTorch call.

    Args:
        name: name of the public function, for the error message.

    Raises:
        TypeError: an attribute of the model or of a submodule hides a method, and is not callable.
    """
    for path, part in inner_modules(model):
        for method in METHODS:
            if not callable(getattr(part, method)):
                raise TypeError(
                    f"{name}: the attribute {joined(path, method)} of the model hides the method {method} of "
                    "torch.nn.Module: rename it"
                )

"""Whether only the caller observes a module's call, so that the caller may fuse it with other calls."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook watches the calls of this module itself."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module has exactly that class, with the forward of its class, and no hooks."""
    return type(module) is kind and "forward" not in module.__dict__ and not has_hooks(module)

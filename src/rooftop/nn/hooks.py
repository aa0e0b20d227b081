"""Detect hooks and overridden forwards of modules. If a module has neither, its call may be fused with other calls."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks or pre-hooks. Hooks of its submodules do not count."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module has exactly this class, with the forward of the class and no hooks."""
    return type(module) is kind and "forward" not in module.__dict__ and not has_hooks(module)

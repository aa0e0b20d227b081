"""Whether a module's call is nobody's business but its caller's, who may then compute it together with others."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether someone wants to see the calls of this very module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it is of exactly that kind, with the forward of its class, and without hooks."""
    return type(module) is kind and "forward" not in module.__dict__ and not has_hooks(module)

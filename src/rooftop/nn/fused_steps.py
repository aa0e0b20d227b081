"""Two faults of the fused steps of PyTorch's optimizers: version counters, and narrow parameters on CPUs.

PyTorch raises a tensor's version counter at each change, but its fused steps change parameters without raising it
(PyTorch 2.13, on CPUs and GPUs). Code that compares version counters would then take the parameters for unchanged.

On CPUs, the fused step of SGD leaves parameters in float16 and bfloat16 as they are, if they have 16 elements or more
(PyTorch 2.13, with AVX-512).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


@functools.cache
def notice_fused_steps() -> None:
    """From now on, each fused step of PyTorch's optimizers in this process raises the version counters of the
    parameters that it changes."""
    register_optimizer_step_post_hook(_raise_versions)


def _raise_versions(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise the version counters of the parameters with a gradient in fused groups. A step that is not PyTorch's own,
    such as that of `rooftop.train.AdamW`, raises them itself.
    """
    if torch.compiler.is_compiling() or not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    changed = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
    if changed:
        torch.autograd.graph.increment_version(changed)


def skips_parameters(kind: type[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> bool:
    """Whether the fused step of this class of optimizers would leave some of the parameters as they are."""
    narrow = any(each.device.type == "cpu" and each.dtype in (torch.float16, torch.bfloat16) for each in parameters)
    return narrow and issubclass(kind, torch.optim.SGD)

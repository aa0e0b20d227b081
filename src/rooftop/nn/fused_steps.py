"""Tell which of PyTorch's optimizers have a fused step, and work around two faults of these steps.

PyTorch raises a tensor's version counter at each change, but its fused steps change parameters without raising it
(PyTorch 2.13, on CPUs and GPUs). Code that compares version counters would then take the parameters for unchanged.

On CPUs, the fused step of SGD leaves parameters in float16 and bfloat16 as they are, if they have 16 elements or more
(PyTorch 2.13, with AVX-512).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

_NOTICED: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id


def notice_fused_steps(tensors: Iterable[Tensor]) -> None:
    """From now on, each fused step of PyTorch's optimizers raises the version counters of those of the given tensors
    that it changes. Other tensors of the process stay as PyTorch leaves them."""
    _NOTICED.update((id(tensor), tensor) for tensor in tensors)
    _raise_versions()


@functools.cache
def _raise_versions() -> None:
    def raised(changed: list[Tensor]) -> None:
        torch.autograd.graph.increment_version([each for each in changed if _NOTICED.get(id(each)) is each])

    after_fused_steps(raised)


def after_fused_steps(call: Callable[[list[Tensor]], object]) -> RemovableHandle:
    """Until the handle is removed, call `call` after each fused step of PyTorch's optimizers, with the parameters that
    the step changed: those with a gradient in fused groups. A step that is not PyTorch's own, such as that of
    `rooftop.train.AdamW`, raises version counters itself.
    """

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not type(optimizer).step.__module__.startswith("torch.optim."):
            return
        groups = [group for group in optimizer.param_groups if group.get("fused")]
        if changed := [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]:
            call(changed)

    return register_optimizer_step_post_hook(after)


def has_fused_step(kind: type[torch.optim.Optimizer], on_gpu: bool) -> bool:
    """Whether PyTorch has a fused step for exactly this class of optimizers, on a GPU or on a CPU."""
    if kind is torch.optim.Adagrad:
        return not on_gpu or _adagrad_fuses_on_gpus()
    return kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@functools.cache
def _adagrad_fuses_on_gpus() -> bool:
    """PyTorch 2.11 has the kernel, but its Python code refuses parameters on GPUs. The change that accepts them also
    sets this attribute."""
    return hasattr(torch.optim.Adagrad([torch.zeros(1, device="cpu")], fused=True), "_step_supports_amp_scaling")


def skips_parameters(kind: type[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> bool:
    """Whether the fused step of this class of optimizers would leave some of the parameters as they are."""
    narrow = any(each.device.type == "cpu" and each.dtype in (torch.float16, torch.bfloat16) for each in parameters)
    return narrow and issubclass(kind, torch.optim.SGD)

"""Run a program on fake CPU tensors, but with the operators that PyTorch would choose on a GPU.

`rooftop.predict` counts a step on fake CPU tensors, because a PyTorch without CUDA cannot differentiate fake GPU
tensors. Nearly all operators are the same on CPU and GPU. Some composite operators call different operators on each
device; `rooftop.analysis.gpu_operators.CHOSEN_BY_DEVICE` has the GPU's version of each.

This table, and related choices, are applied at several levels of PyTorch, so that no caller is missed:

    dispatcher      a kernel for the autograd key of the CPU: calls from Python, C++ (`F.multi_head_attention_forward`,
                    TorchScript) and the backward pass all pass through it
    dispatch mode   applies the table under `torch.inference_mode`, where composite operators skip the autograd key
    foreach         optimizers and `clip_grad_norm_` ask PyTorch which devices have kernels for lists of tensors
    autocast        `torch.autocast("cuda")` casts, but by the CPU's list of operators, since the tensors are on the CPU

These replacements apply to one thread and one `with` block. Programs in other threads get their usual operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library
from torch.nn.attention import flex_attention
from torch.utils import _foreach_utils

from rooftop.analysis.gpu_operators import CHOSEN_BY_DEVICE
from rooftop.analysis.gpu_recurrent import RECURRENT_SHAPES, composed
from rooftop.hardware.observing import LightMode

_THREAD = threading.local()
_LOCK = threading.Lock()  # guards `_users` and `_registered`, which belong to the whole process
_users = 0
_registered = ExitStack()


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within the block, let composite operators on this thread's CPU tensors call the operators that they would call on
    an NVIDIA GPU.

    Enter this after every other dispatch mode that must see the operators.
    """
    _acquire()
    before = _is_active()
    _THREAD.active = True
    try:
        with _WholeComposites(), _autocast_in_force():
            yield
    finally:
        _THREAD.active = before
        _release()


def _is_active() -> bool:
    return getattr(_THREAD, "active", False)


class _WholeComposites(LightMode):
    """Apply `CHOSEN_BY_DEVICE` to composite operators that reach a dispatch mode without decomposition, which happens
    under `torch.inference_mode`.
    """

    supports_higher_order_operators = True  # else PyTorch raises an error at the first higher-order operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = CHOSEN_BY_DEVICE.get(func)
        if instead is None:
            return func(*args, **(kwargs or {}))
        with self:  # the mode also sees the operators that `instead` calls (attention: dropout)
            return instead(func, *args, **(kwargs or {}))


def _acquire() -> None:
    """Register the replacements, which act only in threads inside `as_on_gpu`. Skip this if an outer block or another
    thread has registered them."""
    global _users, _registered
    with _LOCK:
        if _users == 0:
            with ExitStack() as stack:
                _register_kernels(stack)
                _let_lists_be_taken(stack)
                _let_autocast_reach_the_cpu(stack)
                _let_flex_attention_have_gradients(stack)
                _registered = stack.pop_all()
        _users += 1


def _release() -> None:
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0:
            _registered.close()


def _register_kernels(stack: ExitStack) -> None:
    library = Library("aten", "IMPL")
    stack.callback(library._destroy)
    for func, instead in CHOSEN_BY_DEVICE.items():
        library.impl(func, _for_this_thread(func, instead), "AutogradCPU")
    for func, shapes in RECURRENT_SHAPES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta"):
            library.impl(func, shapes, "Meta")


def _for_this_thread(func: Any, instead: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _is_active():
            return instead(func, *args, **kwargs)
        return composed(func, *args, **kwargs)

    return kernel


def _let_lists_be_taken(stack: ExitStack) -> None:
    """Let PyTorch process a list of this thread's CPU tensors in one operator (such as `_foreach_add_`), as for GPU
    tensors."""
    devices = _foreach_utils._get_foreach_kernels_supported_devices

    def with_this_threads_cpu() -> list[str]:
        return [*devices(), *(["cpu"] if _is_active() else [])]

    optimizers, averages = (import_module(f"torch.optim.{name}") for name in ("optimizer", "swa_utils"))
    for module in (_foreach_utils, optimizers, averages):
        stack.enter_context(mock.patch.object(module, "_get_foreach_kernels_supported_devices", with_this_threads_cpu))
    for module in (_foreach_utils, optimizers):
        types = _Types(module._foreach_supported_types)
        stack.enter_context(mock.patch.object(module, "_foreach_supported_types", types))


class _Types(list[type]):
    """The tensor types that `_foreach_*` operators accept. While `as_on_gpu` is active in this thread, they also accept
    fake tensors and parameters."""

    def __contains__(self, kind: object) -> bool:
        return super().__contains__(kind) or (kind in (FakeTensor, nn.Parameter) and _is_active())


def _let_autocast_reach_the_cpu(stack: ExitStack) -> None:
    construct = torch.autocast.__init__

    def constructed(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if _is_active() and device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        construct(self, device_type, dtype, *args, **kwargs)

    stack.enter_context(mock.patch.object(torch.autocast, "__init__", constructed))


def _let_flex_attention_have_gradients(stack: ExitStack) -> None:
    """Let flex attention accept CPU tensors that require a gradient, which flex attention would refuse."""
    refuse = flex_attention._validate_device

    def refuse_others(*tensors: Any) -> None:
        if not _is_active():
            refuse(*tensors)

    stack.enter_context(mock.patch.object(flex_attention, "_validate_device", refuse_others))


def _autocast_in_force() -> AbstractContextManager[Any]:
    """If autocast is enabled for "cuda", a context that enables it for the CPU with the same dtype."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cpu", torch.get_autocast_dtype("cuda"))

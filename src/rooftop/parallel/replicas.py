"""Replicate a module: create modules that are the same, but with tensors on other devices.

A replica computes the same results as the module. A replica's parameters are copies through which gradients flow back.
A replica begins with the module's hooks, in dicts of its own, so a hook that a replica's forward registers applies only
to that replica. (Hugging Face's models register hooks when hidden states are first requested. If replicas shared the
dicts, each replica's hooks would run in all replicas.) A replica shares all other attributes that hold no tensors,
modules or bound methods. Each forward of `DataParallel` creates the replicas and drops them afterwards. So writes to a
replica are lost, except to the first replica, which is the module itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.hardware.threads import places_of as devices_of
from rooftop.parallel.containers import leaves, mapped, opened
from rooftop.parallel.device_copies import copies

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of attributes that torch.nn.Module itself sets."""

HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and "hooks" in name)
"""Names of a module's dicts that hold hooks."""

PLAIN = {bool, int, float, str, type(None)}
"""Types of most attributes, which hold no tensors and are checked first."""


def replicate(module: nn.Module, devices: Sequence[torch.device | str], detach: bool = False) -> list[nn.Module]:
    """Create a replica of the module on each device. The gradients of the replicas' parameters are added to the
    module's gradients.

    The first replica is the module itself. The first replica's writes to buffers (such as batch norms' running
    statistics) and attributes persist; the other replicas' writes are lost. Parameters and modules with several names
    keep all names in each replica. Tensors in attributes (also in lists, tuples, dicts and dataclasses) are copied if
    they are on the module's device. Modules and bound methods in attributes are also copied. A replica's `parameters()`
    returns the replica's tensors. Except in the first replica, these tensors are copies, not leaves, so their
    `.grad` stays None.

    Args:
        module: a module on the first device.
        devices: GPUs or "cpu". The list may repeat a device.
        detach: whether to detach replicas from autograd. The first replica is then a separate module that shares the
            module's memory.

    Returns:
        One replica for each device.

    Raises:
        ValueError: the list of devices is empty, a device is neither a GPU nor the CPU, or a parameter or buffer is not
            on the first device.
        TypeError: the module is compiled or scripted, and can compute only with its own parameters.
        RuntimeError: a module is lazy and not initialized yet.
    """
    places = places_of(devices)
    _check(module, places[0])
    holding = {child: _holding(child) for child in module.modules()}
    tensors = _tensors(holding, places[0])
    sources = [tensor.detach() for tensor in tensors] if detach else tensors
    made = [_replica(module, holding, tensors, sources) if detach else module]
    made += [_replica(module, holding, tensors, copied) for copied in copies(sources, places[1:])]
    return made


def places_of(devices: Sequence[torch.device | str] | None) -> list[torch.device]:
    """The devices, each with its index, as in a tensor's `device`. Default: all GPUs, or the CPU if there are none.

    Raises:
        ValueError: the list is empty, or a device does not exist or is neither a GPU nor the CPU.
    """
    places = devices_of(devices)
    for place in places:
        if place.type not in ("cpu", "cuda"):
            raise ValueError(f"replicas run on GPUs and on the CPU, got the device {str(place)!r}")
    return places


def _check(module: nn.Module, home: torch.device) -> None:
    for name, child in module.named_modules():
        for key, tensor in chain(child._parameters.items(), child._buffers.items()):
            if tensor is not None and tensor.device != home:
                raise ValueError(
                    f"{name}{'.' if name else ''}{key} is on {tensor.device}, but the first device is {home}: move "
                    f"the module there first, with module.to({str(home)!r})"
                )
        bound = "compiled" if _is_compiled(child) else "scripted" if isinstance(child, torch.jit.ScriptModule) else None
        if bound:
            raise TypeError(
                f"{name or 'the module'} ({type(child).__name__}) is {bound} for its own parameters and cannot be "
                "replicated: pass the original module, or use one process per GPU"
            )


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module was compiled by torch.compile(module) or module.compile()."""
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def _holding(module: nn.Module) -> dict[str, Any]:
    """The attributes with tensors, modules or bound methods, besides registered parameters, buffers and submodules."""
    own = vars(module).items()
    return {name: value for name, value in own if name not in OF_EVERY_MODULE and _holds(value)}


def _holds(value: Any) -> bool:
    if type(value) in PLAIN:
        return False
    if isinstance(value, Tensor | nn.Module | MethodType):
        return True
    found = opened(value)
    return found is not None and any(map(_holds, found.values))


def _tensors(holding: Mapping[nn.Module, dict[str, Any]], home: torch.device) -> list[Tensor]:
    """All tensors on the device `home` that a replica must copy, without duplicates."""
    found: dict[int, Tensor] = {}
    for module, attributes in holding.items():
        for value in chain(module._parameters.values(), module._buffers.values(), leaves(attributes)):
            if isinstance(value, Tensor) and value.device == home:
                found[id(value)] = value
    return list(found.values())


def _replica(
    module: nn.Module,
    holding: Mapping[nn.Module, dict[str, Any]],
    tensors: Sequence[Tensor],
    others: Sequence[Tensor],
) -> nn.Module:
    """Rebuild the module with other tensors. `holding` has the result of `_holding` for each submodule."""
    made = {id(child): child._replicate_for_data_parallel() for child in holding}
    instead: dict[int, Any] = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)} | made

    def swapped(value: Any) -> Any:
        if isinstance(value, MethodType):
            return MethodType(value.__func__, instead.get(id(value.__self__), value.__self__))
        return instead.get(id(value), value)

    for child, attributes in holding.items():
        # Bypasses __setattr__, which allows only leaves as parameters.
        vars(made[id(child)]).update(
            mapped(attributes, swapped),
            **{name: copy(vars(child)[name]) for name in HOOKS if name in vars(child)},
            _parameters={name: swapped(tensor) for name, tensor in child._parameters.items()},
            _buffers={name: swapped(tensor) for name, tensor in child._buffers.items()},
            _modules={name: swapped(grandchild) for name, grandchild in child._modules.items()},
        )
    return made[id(module)]

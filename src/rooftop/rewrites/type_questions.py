"""Give `isinstance` the same answer while torch.fx traces a forward as when the forward runs.

A proxy is not a tensor. So the trace of a forward that asks `isinstance(x, Tensor)` would take another path than a call
of this forward. A proxy must not set its `__class__` to `Tensor`, because PyTorch's C++ code would then read invalid
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

ASKED = "rooftop: its type was asked"
_NONE = object()


@contextmanager
def answered(model: nn.Module, gives_a_tensor: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Within the block, `isinstance` (in the files of the model's classes) and `torch.is_tensor` treat some proxies as
    tensors: those that stand for the results of certain modules. Other proxies do not count as tensors, because they
    may stand for lists or sizes.

    If a forward asks for the type of such a proxy, its node is marked (`was_asked`): a rewrite must not replace the
    node's value by an object that is not a tensor.

    Args:
        gives_a_tensor: whether a module certainly returns a tensor.
    """
    a_tensor = torch.empty(0)

    def is_instance(value: Any, kinds: Any) -> bool:
        if isinstance(value, kinds):
            return True
        if not isinstance(value, fx.Proxy) or not isinstance(a_tensor, kinds):
            return False
        module = _module_of(value)
        if module is None or not gives_a_tensor(module):
            return False
        value.node.meta[ASKED] = True
        return True

    def is_tensor(value: Any) -> bool:
        return is_instance(value, torch.Tensor)

    before = torch.is_tensor
    spaces = _spaces(model)
    names = [(space, space.get("isinstance", _NONE)) for space in spaces]
    try:
        torch.is_tensor = is_tensor  # type: ignore[assignment]
        for space in spaces:
            space["isinstance"] = is_instance
        yield
    finally:
        torch.is_tensor = before
        for space, name in names:
            if name is _NONE:
                del space["isinstance"]
            else:
                space["isinstance"] = name


def was_asked(node: fx.Node) -> bool:
    """Whether a forward has asked for the type of a node's value."""
    return ASKED in node.meta


def _module_of(proxy: fx.Proxy) -> nn.Module | None:
    """The module whose result a proxy stands for; None if the proxy does not stand for the result of a module."""
    if proxy.node.op != "call_module" or not isinstance(proxy.tracer, fx.Tracer):
        return None
    return proxy.tracer.root.get_submodule(str(proxy.node.target))


def _spaces(model: nn.Module) -> list[dict[str, Any]]:
    """The globals, one dict per Python file, of the files that define the classes of the model's modules and their
    replaced methods; without PyTorch's files.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    values = [vars(each) for each in (*model.modules(), *filter(_is_of_the_model, kinds))]
    functions = [each for names in values for each in names.values() if isinstance(each, FunctionType)]
    return list({id(each.__globals__): each.__globals__ for each in functions if _is_of_the_model(each)}.values())


def _is_of_the_model(named: Any) -> bool:
    return str(named.__module__).partition(".")[0] not in ("torch", "builtins")

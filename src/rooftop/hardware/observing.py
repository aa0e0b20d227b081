"""Dispatch modes that watch the operators of a program, and neither end nor change it.

PyTorch compiles nothing under a dispatch mode, and remembers for good that it did not: a function would never be
compiled afterwards, and `torch.cond`, which needs to be, would raise. So nothing is offered for compilation meanwhile.

Operators that take functions (`torch.cond`, `while_loop`, `map`, `scan`, `flex_attention`) rely on the compiler to make
arguments of all tensors that these functions use. Without it their own gradients would fail, so those of the operators
in their functions are taken. Control flow is run by its eager meaning, so that the mode sees what it runs.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, _higher_order_ops
from torch.utils._python_dispatch import TorchDispatchMode


class ObservingMode(TorchDispatchMode):
    """A mode whose `observe` runs each operator and looks at it."""

    supports_higher_order_operators = True  # without it PyTorch ends the program at the first of them

    def __init__(self) -> None:
        super().__init__()
        self._entered = 0  # how often: what consists of other operators is taken apart inside
        self._compiler = ExitStack()

    def __enter__(self) -> Any:
        if not self._entered:
            self._compiler.enter_context(uncompiled())
        self._entered += 1
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        self._entered -= 1
        if not self._entered:
            self._compiler.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meaning = eager_meaning(func) if isinstance(func, HigherOrderOperator) else None
        if meaning is None:
            return self.observe(func, types, args, kwargs or {})
        with self:
            return meaning(*args, **(kwargs or {}))

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the operator does. One that takes functions has no schema; control flow does not come here."""
        raise NotImplementedError


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, nothing is compiled, also for other threads. A stance that the program takes meanwhile stays.

    The compiler takes seconds to import. Where the program has not done so, this waits until it first compiles.
    """
    with ExitStack() as stack:
        _differentiate_what_functions_run(stack)
        if "torch._dynamo.eval_frame" in sys.modules:
            stack.enter_context(_eager_stance())
        else:
            stack.enter_context(patch.object(torch, "compile", _taking_the_stance(torch.compile, stack)))
        yield


def _taking_the_stance(compile: Callable[..., Any], stack: ExitStack) -> Callable[..., Any]:
    taken = False

    @wraps(compile)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        if not taken:
            taken = True
            stack.enter_context(_eager_stance())
        return compile(*args, **kwargs)

    return compiled


@contextmanager
def _eager_stance() -> Iterator[None]:
    stance = torch.compiler.set_stance("force_eager")
    ours = torch._dynamo.eval_frame._stance
    try:
        yield
    finally:
        if torch._dynamo.eval_frame._stance is ours:
            stance.__exit__(None, None, None)


def _differentiate_what_functions_run(stack: ExitStack) -> None:
    """Let control flow, and attention whose scores depend on other tensors, run by its eager meaning above autograd."""
    for operator in _higher_order_ops.values():
        kernel = eager_meaning(operator)
        if kernel is None and operator.name() == "flex_attention":
            kernel = _attention_by_autograd(operator, operator.py_kernels[DispatchKey.Autograd])
        if kernel is not None:
            stack.enter_context(patch.dict(operator.py_kernels, {DispatchKey.Autograd: kernel}))
            operator._dispatch_cache.clear()
            stack.callback(operator._dispatch_cache.clear)


def _attention_by_autograd(operator: Any, with_own_gradients: Callable[..., Any]) -> Callable[..., Any]:
    def attention(query: Any, key: Any, value: Any, score_mod: Any, *others: Any) -> Any:
        if not torch.is_grad_enabled() or not _uses_other_values(score_mod):
            return with_own_gradients(query, key, value, score_mod, *others)
        return operator.py_kernels[DispatchKey.CompositeExplicitAutograd](query, key, value, score_mod, *others)

    return attention


def _uses_other_values(function: Any) -> bool:
    """Whether a function uses anything beside its arguments that may hold a tensor."""
    if not isinstance(function, types.FunctionType):
        return True
    used = inspect.getclosurevars(function)
    values = [*used.nonlocals.values(), *used.globals.values()]
    return any(not isinstance(value, (types.ModuleType, types.FunctionType, type, int, float)) for value in values)


def eager_meaning(operator: HigherOrderOperator) -> Callable[..., Any] | None:
    """What runs the functions of control flow, operator by operator; None for other operators."""
    name = operator.name()
    if name == "cond":
        return _cond
    if name == "scan":
        return _scan
    if name in ("while_loop", "while_loop_stack_output", "map_impl", "associative_scan"):
        kernel: Callable[..., Any] | None = operator.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        return kernel
    return None


def _cond(predicate: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], operands: Iterable[Any]) -> Any:
    return if_true(*operands) if predicate else if_false(*operands)


def _scan(combine: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(combine, init, xs, additional_inputs=additional_inputs)

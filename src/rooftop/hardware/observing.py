"""Dispatch modes that watch a program's operators, and neither end nor change the program.

If a function's first call is under a dispatch mode, PyTorch does not compile the function, not even in later calls
without the mode. `torch.cond`, which must be compiled, would raise. So these modes disable compilation.

Operators that take functions (`torch.cond`, `while_loop`, `map`, `scan`, `flex_attention`) rely on the compiler, which
turns all tensors that these functions use into arguments. Without the compiler, the gradients of these operators would
fail. So autograd differentiates the operators inside these functions instead. Control flow runs eagerly, so that the
mode sees its operators.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, _higher_order_ops
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop.torch_versions import torch_at_least

_COMPILER = "torch._dynamo.eval_frame"


class LightMode(TorchDispatchMode):
    """A dispatch mode that does not import PyTorch's compiler, which takes seconds.

    The compiler must not compile a mode's `__torch_dispatch__`. To mark this method, PyTorch's class imports the
    compiler at the mode's first operator. This class marks the method only if the program has imported the compiler
    before the mode begins. The marked method is in a subclass of the mode's class. While the mode is active, the mode
    is an instance of this subclass.
    """

    _plain: Any = None  # the mode's original class while `__class__` is the subclass; else None

    def __init_subclass__(cls, **options: Any) -> None:
        own = vars(cls).get("__torch_dispatch__")
        super().__init_subclass__(**options)
        if own is not None and not isinstance(own, classmethod):  # a class method raises at the first operator
            cls.__torch_dispatch__ = own  # type: ignore[method-assign]  # in place of PyTorch's wrapper

    def __enter__(self) -> Any:
        if _COMPILER in sys.modules and self._plain is None:
            plain: Any = type(self)
            self.__class__ = _not_compiled(plain)
            self._plain, self._begun = plain, 0
        if self._plain is not None:
            self._begun += 1
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        if self._plain is not None:
            self._begun -= 1
            if not self._begun:
                self.__class__, self._plain = self._plain, None


@cache
def _not_compiled(mode: Any) -> Any:
    """A subclass of the torch dispatch mode class `mode` whose `__torch_dispatch__` torch.compile does not compile."""
    derived: Any = type(mode.__name__, (mode,), {})
    derived.__torch_dispatch__ = torch.compiler.disable(mode.__torch_dispatch__)
    return derived


class ObservingMode(LightMode):
    """A mode that passes each operator to `observe`, which runs the operator and observes it."""

    supports_higher_order_operators = True  # else PyTorch raises an error at the first higher-order operator

    def __init__(self) -> None:
        super().__init__()
        self._entered = 0  # nesting depth: the mode enters itself again to run control flow or to decompose operators
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
        """Run the operator and return its result. Each subclass must define this method.

        If `func` is an operator that takes functions, it has no schema. Control flow operators never reach this method,
        because the mode runs their functions operator by operator.
        """
        raise NotImplementedError(f"{type(self).__name__} must define observe")


_lock = threading.RLock()  # guards the changes that `uncompiled` makes to the whole process
_users = 0
_changed = ExitStack()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disable compilation in the block, in all threads. If the program sets a compiler stance in the block, that stance
    applies at once and stays after the block.

    The compiler takes seconds to import. So if the program has not imported the compiler yet, compilation is disabled
    when the program imports the compiler.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _changed.callback(_restore_flags, {name: getattr(_python_dispatch, name, None) for name in _FLAGS})
            _run_control_flow(_changed)
            _differentiate_what_functions_run(_changed)
            if _COMPILER in sys.modules:
                # waits if another thread is importing the compiler
                _take_eager_stance(_changed, import_module(_COMPILER))
            else:
                _TakesItWhenLoaded(_changed)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _changed.close()


_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",  # since PyTorch 2.13
)


def _restore_flags(before: dict[str, Any]) -> None:
    """Restore PyTorch's flags that decide whether to compile, unless this thread is still in a dispatch mode. All
    threads share these flags, and each mode restores the values that it found. So overlapping modes of two threads
    would otherwise leave the flags set."""
    if torch._C._len_torch_dispatch_stack() == 0:
        for name, value in before.items():
            if value is not None:
                setattr(_python_dispatch, name, value)


class _TakesItWhenLoaded(MetaPathFinder):
    """Set the eager stance when the program loads PyTorch's compiler (the module `_COMPILER`), by whatever import."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        sys.meta_path.insert(0, self)
        stack.callback(self._leave)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _COMPILER:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in specs if each is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_take_it(module: types.ModuleType) -> None:
                del loader.exec_module
                execute(module)
                with _lock:
                    if self in sys.meta_path:  # `uncompiled` has not ended
                        self._leave()
                        _take_eager_stance(self._stack, module)

            loader.exec_module = execute_and_take_it
        return spec

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _take_eager_stance(stack: ExitStack, compiler: Any) -> None:
    before, ours = compiler._stance, compiler.DynamoStance("force_eager")
    try:
        compiler._set_stance(ours)
    except RuntimeError:  # PyTorch is compiling the caller: the compiler does not compile Rooftop's mode
        return

    def end() -> None:
        if compiler._stance is ours:
            compiler._set_stance(before)
        else:  # the program has set a stance, and later restores Rooftop's stance
            for field in fields(ours):
                setattr(ours, field.name, getattr(before, field.name))

    stack.callback(end)


def _run_control_flow(stack: ExitStack) -> None:
    """Let `torch.cond` and similar functions run directly, even in modules that have imported these functions by
    name."""
    for place, meaning in _CONTROL_FLOW.items():
        module, _, name = place.rpartition(".")
        public = getattr(sys.modules.get(module), name, None)
        if not isinstance(public, types.FunctionType) or public.__closure__ is not None:
            continue
        itself = types.FunctionType(public.__code__, public.__globals__, name, public.__defaults__)
        itself.__kwdefaults__ = public.__kwdefaults__
        _running[place] = (meaning, itself)
        code = public.__code__
        public.__code__ = _entry(place)
        stack.callback(setattr, public, "__code__", code)


def _entry(place: str) -> types.CodeType:
    """The code object of a function that calls `run_control_flow(place, ...)`. The code can replace that of a function
    in any module, because it imports what it needs.
    """
    text = (
        "def entry(*arguments, **options):\n"
        f"    from {__name__} import run_control_flow\n"
        f"    return run_control_flow({place!r}, *arguments, **options)\n"
    )
    names: dict[str, Any] = {}
    exec(text, names)
    code: types.CodeType = names["entry"].__code__
    return code


def run_control_flow(place: str, *arguments: Any, **options: Any) -> Any:
    """Run the eager version of the control flow function at `place` (module and name). Under torch.export, run the
    function itself.
    """
    meaning, itself = _running[place]
    if torch.compiler.is_compiling():  # torch.export must record the operator itself into its graph
        return itself(*arguments, **options)
    return meaning(*arguments, **options)


def _differentiate_what_functions_run(stack: ExitStack) -> None:
    """Let autograd differentiate each operator that control flow runs: replace the Autograd kernels of control flow
    by kernels that run these operators one by one. Do the same for flex attention if its score function may use tensors
    other than its arguments.
    """
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
    """Whether a function uses closure or global values that may hold a tensor, besides its arguments. True for
    callables that are not Python functions.
    """
    if not isinstance(function, types.FunctionType):
        return True
    used = inspect.getclosurevars(function)
    values = [*used.nonlocals.values(), *used.globals.values()]
    return any(not isinstance(value, (types.ModuleType, types.FunctionType, type, int, float)) for value in values)


def eager_meaning(operator: HigherOrderOperator) -> Callable[..., Any] | None:
    """A function that runs a control flow operator's functions operator by operator; None for other operators."""
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


# ---- public functions, which accept nested tensors ------------------------------------------------------------------


def _cond_of_nests(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if not any(each.key() == torch._C._functorch.TransformType.Vmap for each in stack):
        return true_fn(*operands) if pred else false_fn(*operands)
    leaves, spec = pytree.tree_flatten(operands)  # each sample of the batch takes its own branch
    found: list[Any] = []

    def flat(branch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*tensors: Any) -> tuple[Any, ...]:
            results, result_spec = pytree.tree_flatten(branch(*pytree.tree_unflatten(tensors, spec)))
            found.append(result_spec)
            return tuple(results)

        return run

    results = torch.ops.higher_order.cond(pred, flat(true_fn), flat(false_fn), tuple(leaves))
    return pytree.tree_unflatten(results, found[-1])


def _while_loop_of_nests(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any) -> Any:
    if not cond_fn(*carried_inputs):
        return pytree.tree_map_only(Tensor, Tensor.clone, tuple(carried_inputs))
    carried = body_fn(*carried_inputs)
    while cond_fn(*carried):
        carried = body_fn(*carried)
    return carried


def _map_of_nests(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    return _stacked([f(row, *args) for row in _rows(xs, 0)])


def _scan_of_nests(
    combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    carry, results, rows = init, [], _rows(xs, dim)
    for row in reversed(rows) if reverse else rows:
        carry, result = combine_fn(carry, row)
        results.append(result)
    stacked = _stacked(results[::-1] if reverse else results)
    if not torch_at_least(2, 13):  # results are stacked along the first dimension, whatever `dim` is
        return carry, stacked
    return carry, pytree.tree_map(lambda leaf: leaf.movedim(0, dim) if dim < leaf.ndim else leaf, stacked)


def _rows(xs: Any, dim: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(xs)
    if not leaves or not leaves[0].shape[dim]:
        raise RuntimeError("expected tensors with at least one element to scan over")
    columns = [leaf.unbind(dim) for leaf in leaves]
    return [pytree.tree_unflatten(row, spec) for row in zip(*columns, strict=True)]


def _stacked(results: list[Any]) -> Any:
    flat = [pytree.tree_flatten(result) for result in results]
    leaves = zip(*(each for each, _ in flat), strict=True)
    return pytree.tree_unflatten([torch.stack(each) for each in leaves], flat[0][1])


_CONTROL_FLOW: dict[str, Callable[..., Any]] = {
    "torch._higher_order_ops.cond.cond": _cond_of_nests,
    "torch._higher_order_ops.while_loop.while_loop": _while_loop_of_nests,
    "torch._higher_order_ops.map.map": _map_of_nests,
    "torch._higher_order_ops.scan.scan": _scan_of_nests,
}
_running: dict[
    str, tuple[Callable[..., Any], Callable[..., Any]]
] = {}  # location of a function -> (its eager version, the function itself)

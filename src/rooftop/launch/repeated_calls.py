"""Repeat earlier calls of public functions and operators without Python: C++ makes the allocations, the launches and
autograd's node.

A small kernel runs for less time than Python needs to check arguments, view them as rows and find the launch. This work
has the same outcome for all calls with the same modes of PyTorch and the same *facts*: shapes, strides, dtypes,
devices, alignment, and values that are not tensors. So one call is observed. If the call only allocates memory,
launches kernels of Triton or CUDA C++ and runs PyTorch's own operators, and autograd records at most one operator of
Rooftop, the C++ code in `cpp/` gets a plan of the call, and executes this plan for later calls with the same facts. The
results are identical bit for bit to those of Python.

Compiled programs call operators by their overload in `torch.ops` instead of calling public functions.
`repeat_overload` repeats these calls. `repeated_operator` repeats calls through PyTorch's dispatcher, for example from
programs in C++.

The C++ code is compiled in the background, and stored in Rooftop's cache. The compilation starts at the latest at the
second call of an operator of `declare(..., known=...)` with the same facts on a GPU. Until the C++ code is compiled,
and on machines without a C++ compiler, Python makes the calls. `ROOFTOP_COMPILED_CALLS=0` disables the C++ code, and
`ROOFTOP_COMPILED_CALLS=wait` waits for its compilation. `rooftop doctor` shows the state of the C++ code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rooftop.launch import known_calls, native_calls
from rooftop.launch.call_plans import Places, Unplanned, plan_of
from rooftop.launch.lessons import Lesson
from rooftop.launch.native_calls import HOPELESS, ask, build, calls_made, reasons, state, wait
from rooftop.launch.recorded_calls import recording_of

__all__ = [
    "ask",
    "build",
    "calls_made",
    "forget",
    "in_python",
    "reasons",
    "repeat_overload",
    "repeated",
    "repeated_operator",
    "repeated_rows",
    "state",
    "wait",
]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LESSON_AT = 3
"""Which of the calls with the same facts (shapes, dtypes and so on) is observed: the third, because the operator's
launches are compiled by then.
"""
_functions: list[_Function] = []
_seen: dict[str, Counter[bytes]] = {}  # function name -> facts (shapes and so on) -> number of Python calls
_blocks = 0  # number of open `in_python` blocks


class _Function(NamedTuple):
    """A function decorated by `repeated` or `repeated_rows`, or wrapped by `repeat_overload` or `repeated_operator`.

    Attributes:
        now: a list of one item: the C++ object that currently makes the calls, or None if Python makes the calls.
        compiled: a list that contains the C++ object, or that is empty as long as there is no C++ object.
        varying: see `repeated_rows`.
    """

    function: Callable[..., Any]
    now: list[Any]
    compiled: list[Any]
    varying: tuple[int, ...] = ()


# ---- functions and operators -------------------------------------------------------------------------------------


def repeated(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function, so that its repeated calls run without Python after the C++ code is loaded.

    The decisions of the function may depend only on PyTorch's modes and on the facts of its arguments (shapes, strides,
    dtypes and so on). Python makes every call that does more than the module's docstring allows, or that runs an
    operator without `declare(..., known=...)`.
    """
    place = _place_of(function)

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        calls = place[0]
        return (function if calls is None else calls)(*arguments, **options)  # type: ignore[no-any-return]

    function.outermost = call  # type: ignore[attr-defined]  # for the programs of torch.fx
    return call


def repeat_overload(overload: Any) -> None:
    """Change an operator's `OpOverload`, so that its repeated calls run without Python and without the dispatcher.
    Compiled programs call operators by their overload.

    Call this before the overload is hashed: its hash is that of `_op`, which is replaced here.
    """
    dispatched = overload._op

    def function(*arguments: Any, **options: Any) -> Any:
        return dispatched(*arguments, **options)

    function.__name__ = function.__qualname__ = overload.name()
    place = _place_of(function)

    def call(*arguments: Any, **options: Any) -> Any:
        calls = place[0]
        return (dispatched if calls is None else calls)(*arguments, **options)

    overload._op = call


def repeated_operator(name: str, run: Callable[..., Result], raw: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap the function that computes an operator's results, so that repeated calls through PyTorch's dispatcher run
    without this function.

    Args:
        name: the operator's name.
        run: the function.
        raw: the function without caches of its own, which runs in the observed call.
    """

    def function(*arguments: Any) -> Result:
        return (run if known_calls.lesson_here() is None else raw)(*arguments)

    function.__name__ = function.__qualname__ = f"rooftop::{name}"
    place = _place_of(function)

    def call(*arguments: Any) -> Result:
        calls = place[0]
        return (function if calls is None else calls)(*arguments)  # type: ignore[no-any-return]

    return call


def repeated_rows(*varying: int) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a function, so that its repeated calls run without Python, even if the number of rows differs from call
    to call.

    The function's operators must read varying sizes by `row_counts.size`, allocate memory of such sizes by
    `row_counts.allocate`, and compute with such sizes only by operations of `Count`. Callers must pass all arguments
    by position.

    Args:
        varying: for each argument, which of the argument's sizes varies: FIRST, LAST or NONE. ITSELF: the argument is a
            number, which varies.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        place = _place_of(function, varying)

        @wraps(function)
        def call(*arguments: Any) -> Result:
            if torch.compiler.is_compiling():
                return function(*arguments)
            calls = place[0]
            if calls is None:
                if not native_calls.has_asked and arguments[0].is_cuda:
                    native_calls.ask()
                return function(*arguments)
            return calls(*arguments)  # type: ignore[no-any-return]

        return call

    return decorate


def _place_of(function: Callable[..., Any], varying: tuple[int, ...] = ()) -> list[Any]:
    place: list[Any] = [None]
    with native_calls.starting:
        _functions.append(_Function(function, place, [], varying))
        if native_calls.module is not None:
            _compile(_functions[-1])
    return place


def forget() -> None:
    """Drop all plans."""
    for each in _functions:
        for calls in each.compiled:
            native_calls.module.forget(calls)
    for seen in _seen.values():
        seen.clear()


known_calls.also_forget(forget)


def _calls_of(function: Callable[..., Any], varying: tuple[int, ...] = ()) -> Any:
    seen = _seen.setdefault(f"{function.__module__}.{function.__qualname__}", Counter())

    def miss(facts: bytes, *arguments: Any, **options: Any) -> Any:
        if not native_calls.is_due(seen, facts, LESSON_AT, bool(varying)):
            return function(*arguments, **options)
        given, which = native_calls.given_of((*arguments, *options.values()), varying)
        try:
            with native_calls.teaching(given, varying=which) as lesson, _hooked_later() as call_hooks:
                result = function(*arguments, **options)
        except (TypeError, ValueError, RuntimeError):  # call again unobserved, for the usual error message
            seen[facts] = HOPELESS
            return function(*arguments, **options)
        if lesson is None:
            seen[facts] -= 1  # another thread was being observed, so observe the next call
        else:
            keep_plan(facts, lesson, result)
        call_hooks()  # last, because hooks of checkpointing may raise
        return result

    def keep_plan(facts: bytes, lesson: Lesson, result: Any) -> None:
        try:
            plan = _plan_of(function.__name__, lesson, result)
        except Unplanned as reason:
            reasons[function.__name__] = str(reason)
            seen[facts] = HOPELESS
        else:
            if native_calls.module.keep(calls, facts, plan):
                seen.clear()  # the C++ code dropped all plans, because there were too many

    calls = native_calls.module.make_calls(function, miss, list(varying))
    return calls


class _Held:
    """What autograd saved in an observed call: at first a tensor, later what the hook for saved tensors made of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.value: Any = tensor


@contextmanager
def _hooked_later() -> Iterator[Callable[[], None]]:
    """Within the block, keep the tensors that autograd saves away from the hooks for saved tensors, because the work of
    the hooks is no part of the observed call. Yield a function to call after the block, which calls the hooks.
    """
    held: list[_Held] = []
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        yield lambda: None
        return
    pack, unpack = hooks

    def hold(tensor: Tensor) -> _Held:
        held.append(_Held(tensor))
        return held[-1]

    def call_hooks() -> None:
        while held:
            each = held.pop(0)
            each.value = pack(each.value)

    try:
        with saved_tensors_hooks(hold, lambda each: unpack(each.value)):
            yield call_hooks
    except BaseException:
        held.clear()  # PyTorch may keep the hooks alive, but the hooks must not keep tensors alive
        raise


@contextmanager
def in_python() -> Iterator[None]:
    """Within the `with` block, Python instead of C++ makes all calls of operators, of `repeated` and `repeated_rows`
    functions, and of their backward, in all threads."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(blocks: int) -> None:
    """Add `blocks` (1 or -1) to the number of open `in_python` blocks of all threads."""
    global _blocks
    with native_calls.starting:
        _blocks += blocks
        if native_calls.module is not None:
            native_calls.module.set_in_python(_blocks > 0)
        for each in _functions:
            each.now[0] = each.compiled[0] if each.compiled and not _blocks else None


def _compile(function: _Function) -> None:
    function.compiled.append(_calls_of(function.function, function.varying))
    function.now[0] = None if _blocks else function.compiled[0]


def _start() -> None:
    native_calls.module.set_in_python(_blocks > 0)
    for each in _functions:
        _compile(each)


native_calls.after_start.append(_start)


def _plan_of(name: str, lesson: Lesson, result: Any) -> Any:
    """Make the plan of an observed call.

    Raises:
        Unplanned: the call cannot be planned.
    """
    found: list[Tensor | None] = list(result) if isinstance(result, tuple | list) else [result]
    kind = "[" if type(result) is list else "(" if type(result) is tuple else "t"
    if kind == "t" and type(result) is not Tensor:
        raise Unplanned("the result is neither a tensor nor a list or tuple of tensors")
    places = Places(lesson)
    results = [places.of_result(each) for each in found]
    if len(places.shapes) < len(results) - found.count(None):
        raise Unplanned("two results share memory")
    if not any(each is not None and each.requires_grad for each in found):
        if lesson.records:
            raise Unplanned("autograd records an operator, but no result has a gradient")
        return plan_of(lesson, places, results, kind)
    recording, backward = recording_of(name, lesson, places, found, results)
    plan = plan_of(lesson, places, results, kind, recording)
    backward.recording = plan.recording()
    return plan

"""Repeat the allocations and launches of an earlier operator call with the same shapes, strides and dtypes, without new
decisions.

All decisions of an operator (views, grids, constants, choice of kernels) depend on the *facts* of its arguments. Facts
are shapes, strides, dtypes, device, alignment, and values that are not tensors. The second call with the same facts is
observed. If this call only allocates memory, makes views, and launches kernels of Triton or CUDA C++, later calls with
the same facts replay its allocations and launches. A pointer of a launch is the address of an argument or allocation
plus a constant offset. Calls that do anything else (copies, PyTorch's own operators) are not replayed.

An operator opts in by `declare(..., known=...)`. The decisions of the operator's `run` may depend only on the facts and
on settings that `known` returns, but not on the contents of memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from rooftop.hardware.observing import LightMode
from rooftop.launch import triton_launch
from rooftop.launch.compiled_kernels import Compiled, is_descriptor, is_watched
from rooftop.launch.counters import counters_now
from rooftop.launch.cuda import Configured

MOST_KNOWN = 4096
"""Maximum number of calls that are stored for an operator. If there are more, all are dropped. A typical model has tens
of shapes.
"""

_empty, _empty_like = torch.empty_strided, torch.empty_like
aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default,
    aten.new_empty_strided.default,
}  # fmt: skip
ON_CPU = triton_launch.INTERPRETED
"""Whether kernels are launched for tensors on the CPU."""
_VALUES = frozenset((type(None), bool, int, str, torch.dtype, torch.device))
_ITEMS = frozenset((bool, int))  # types of the items of lists and tuples
_SEEN = "seen once"  # one call had these facts (shapes and so on), and was not observed
_OTHER = "other"  # a call with these facts does more than allocate, make views and launch
_forgets: list[Callable[[], None]] = []


def facts_of(arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """The facts (shapes, dtypes and so on) on which an operator's decisions depend, as a hashable key. None if an
    argument has an unsupported type.
    """
    facts: list[Any] = []
    for each in arguments:
        kind = type(each)
        if kind is Tensor or kind is Parameter:
            if each.layout is not torch.strided:
                return None
            facts += (each.shape, each.stride(), each.dtype, each.device, each.data_ptr() & 15)
        elif kind in _VALUES:
            facts += (kind, each)
        elif kind is float:
            facts += (kind, each or repr(each))  # repr distinguishes 0.0 from -0.0
        elif kind in (list, tuple) and _ITEMS.issuperset(map(type, each)):
            facts += (kind, *each, None)
        else:
            return None
    return tuple(facts)


def remembering(run: Callable[..., Any], settings: Callable[[Sequence[Any]], Any] | None = None) -> Callable[..., Any]:
    """Wrap an operator's `run`, so that from the third call with the same facts (shapes, strides, dtypes and so on) on,
    the decisions of the second call are repeated if the second call can be replayed.

    Args:
        run: the function.
        settings: a function from the arguments to a hashable value of the settings on which decisions also depend.
    """
    known: dict[tuple[Any, ...] | None, Any] = {}
    _forgets.append(known.clear)

    def again(*arguments: Any) -> Any:
        if arguments[0].is_cpu and not ON_CPU:
            return run(*arguments)
        facts = facts_of(arguments if settings is None else (*arguments, settings(arguments)))
        found = known.get(facts)
        if type(found) is Steps:
            if not is_watched() and (result := found.run(arguments)) is not NotImplemented:
                return result
        elif found is _SEEN:
            result, known[facts] = _observed(run, arguments)
            became_known()
            return result
        elif found is None and facts is not None:
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[facts] = _SEEN
        return run(*arguments)

    return again


after_known: list[Callable[[], None]] = []
"""Functions to call after an operator call was observed and stored, so that it can be repeated."""


def depends(why: str) -> None:
    """Report that the work of an operator depends on more than shapes, strides and dtypes. Python then makes all calls
    of the observed function with the same facts.
    """
    if (here := lesson_here()) is not None:
        here.refuse(why)


def became_known() -> None:
    """Call the functions in `after_known`, because a call was observed and its record is stored."""
    for then in after_known:
        then()


def also_forget(clear: Callable[[], None]) -> None:
    """Register a function, which `forget` will call."""
    _forgets.append(clear)


def forget() -> None:
    """Drop all stored calls. Call this function after a change of the tables of launch parameters."""
    for each in _forgets:
        each()


# ---- steps of a known call ------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Memory that an operator's call allocates for a tensor.

    Attributes:
        like: index of a contiguous argument with the allocation's shape and dtype, or None. `empty_like` of such an
            argument takes half the time of an allocation by shape.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    like: int | None


class Zeros(NamedTuple):
    """Memory with `size` counters that are 0, which the current stream's kernels share (counters.py)."""

    size: int


class Pointer(NamedTuple):
    """A pointer among the arguments of a kernel launch.

    Attributes:
        place: index of the pointer among the launch's arguments.
        source: index into the list of the operator's tensor arguments followed by its allocations.
        offset: bytes from the beginning of the source.
        view: dtype, shape and strides of the tensor at this address, for interpreted kernels.
    """

    place: int
    source: int
    offset: int
    view: tuple[torch.dtype, torch.Size, tuple[int, ...]]


class Described(NamedTuple):
    """A tensor descriptor among the arguments of a kernel launch, without the tensor that it describes. A `Pointer`
    locates the tensor.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    padding: str

    def of(self, tensor: Tensor) -> Any:
        """Triton's descriptor of a tensor."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensor, list(self.shape), list(self.strides), list(self.block_shape), self.padding)


class Step(NamedTuple):
    """One launch of a kernel.

    Attributes:
        kernel: a `triton.jit` function, or a `cuda.Configured`.
        compiled: the object that launches the kernel; None for interpreted kernels.
        given: the kernel's arguments, except constants. Pointers are not included: `pointers` locates them.
        parameters: a Triton kernel's constants and launch parameters.
    """

    kernel: Any
    compiled: Compiled | Configured | None
    grid: tuple[int, ...]
    given: list[Any]
    pointers: tuple[Pointer, ...]
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name, by which launches are counted."""
        name: str = self.kernel.fn.__name__ if hasattr(self.kernel, "fn") else self.kernel.name
        return name


class Steps(NamedTuple):
    """The allocations, launches and results of an operator call, which can be replayed.

    Attributes:
        tensors: indices of the operator's arguments that are tensors.
        memory: the allocations, which launches use or the call returns as results.
        results: for each result, the index of its allocation in `memory`; None for a result that is None.
        kind: the type of the call's result: tuple or list, or Tensor for a single result.
    """

    device: torch.device
    tensors: tuple[int, ...]
    memory: tuple[Memory | Zeros, ...]
    steps: tuple[Step, ...]
    results: tuple[int | None, ...]
    kind: type

    def run(self, arguments: Sequence[Any]) -> Any:
        """Replay the call for arguments with the same facts. Return its results, or NotImplemented if no counters are
        left.
        """
        device = self.device
        made: list[Any] = []
        for each in self.memory:
            if isinstance(each, Zeros):
                zeros = counters_now(device, each.size)
                if zeros is None:
                    return NotImplemented
                made.append(zeros)
            elif each.like is not None:
                made.append(_empty_like(arguments[each.like]))
            else:
                made.append(_empty(each.shape, each.strides, dtype=each.dtype, device=device))
        sources = [arguments[i] for i in self.tensors] + made
        if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                self._launch(sources)
        else:
            self._launch(sources)
        if self.kind is Tensor:
            return made[self.results[0]]  # type: ignore[index]
        return self.kind([None if i is None else made[i] for i in self.results])

    def _launch(self, sources: list[Tensor]) -> None:
        launch_steps(self.steps, sources)


def launch_steps(steps: Sequence[Step], sources: Sequence[Any]) -> None:
    """Repeat recorded launches of kernels on the current device. `sources` has the tensors to which the kernels get
    pointers: the operator's arguments, then its allocations. An allocation that these launches do not use may be None.
    """
    addresses = [0 if each is None else each.data_ptr() for each in sources]
    for step in steps:
        kernel, compiled, grid, given, pointers, parameters = step
        given = given.copy()
        if compiled is None or compiled.takes_descriptors:
            for place, source, offset, view in pointers:
                tensor = _view(sources[source], offset, *view)
                given[place] = given[place].of(tensor) if type(given[place]) is Described else tensor
            kernel.run(*given, grid=grid, warmup=False, **parameters)
        else:
            for place, source, offset, _ in pointers:
                given[place] = addresses[source] + offset
            compiled.launch(grid, given)
        if triton_launch._counters:
            triton_launch._count(step.name)


def _view(source: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    storage = source.untyped_storage()
    begin = (source.data_ptr() - storage.data_ptr() + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=source.device).set_(storage, begin, shape, strides)


# ---- observing a call ------------------------------------------------------------------------------------------------

_one_at_a_time = Lock()
lesson: Any = None
"""The object that is observing a call of a public function or an operator (lessons.py), in any thread; None if there is
none.
"""


def lesson_here() -> Any:
    """The object that observes a call of this thread; None if there is none."""
    now = lesson  # a copy, because another thread may set `lesson` to None
    return now if now is not None and now.thread == get_ident() else None


def _observed(run: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, Any]:
    """Call an operator's `run` with the arguments, and observe this call. Return its result, and the `Steps` with which
    it can be replayed. The second value is `_OTHER` if the call does something that cannot be replayed, and `_SEEN` if
    the call could not be observed.
    """
    places = tuple(i for i, each in enumerate(arguments) if isinstance(each, Tensor))
    result, observer = _observe(run, arguments, [arguments[i] for i in places])
    return result, _SEEN if observer is None else observer.steps(places, result) or _OTHER


def _observe(run: Callable[..., Any], arguments: Sequence[Any], tensors: list[Tensor]) -> tuple[Any, Observer | None]:
    """Call an operator's `run` and observe this call. Return its result and the observer. The observer is None if
    another thread is observing a call, or if the same tensor is passed twice, because it is then unclear which argument
    a launch uses.
    """
    if len({id(each) for each in tensors}) < len(tensors):
        return run(*arguments), None
    with observing(Observer(tensors)) as observer:
        result = run(*arguments)
    return result, observer


def _forked() -> None:
    """Stop observing in a forked process, which does not have the observing thread."""
    global _one_at_a_time, lesson
    _one_at_a_time = Lock()
    lesson = triton_launch._observer = None


os.register_at_fork(after_in_child=_forked)


@contextmanager
def observing(observer: Observer) -> Iterator[Observer | None]:
    """Observe this thread within the `with` block. Yield None if another thread is being observed."""
    # kept in a variable, because os.fork replaces _one_at_a_time in the child; the lock that was acquired must be
    # released
    lock = _one_at_a_time
    if not lock.acquire(blocking=False):
        yield None
        return
    try:
        triton_launch._observer = observer
        with observer:
            yield observer
    finally:
        triton_launch._observer = None
        lock.release()


class Observer(LightMode):
    """Record the allocations, views and launches of one call. `why` describes the first operation that is none of
    these; "" if there is none.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.thread = get_ident()
        self.why = "" if len({each.device for each in tensors}) == 1 else "tensors on several devices, or none"
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.sources = list(tensors)  # followed by allocations
        self.source_of = {self.key(each): i for i, each in enumerate(tensors)}
        self.alive: list[Tensor] = []  # references, because Python reuses the ids of dead objects
        self.launched: list[Any] = []  # the recorded launches (`Step`)
        self.zeros_of: dict[int, int] = {}  # number of counters, by the index of their source
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.paused:
            return made
        if func in ALLOCATIONS:
            self._is_source(made)
            if made.device != self.device or made.layout != torch.strided or made.is_pinned():
                self._is_other(f"memory on {made.device}")
        elif func.is_view and self.key(args[0]) in self.source_of and _are_views(args[0], made):
            for each in made if isinstance(made, list | tuple) else (made,):
                self.source_of[self.key(each)] = self.source_of[self.key(args[0])]
                self.alive.append(each)
        elif not func._schema.returns or any(isinstance(each, Tensor) for each in tree_leaves((args, kwargs, made))):
            self.called(func, args, kwargs or {}, made)
        # all remaining operators have no tensors (such as `promote_types`), so their results do not vary
        return made

    key: Callable[[Tensor], int] = staticmethod(id)
    """A function from a tensor to its key in the dict `source_of`."""

    def called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> None:
        """Record in `why` that the call uses an operator that is neither an allocation nor a view."""
        self._is_other(str(func))

    def _is_source(self, made: Tensor) -> None:
        self.source_of[self.key(made)] = len(self.sources)
        self.sources.append(made)

    def _is_other(self, why: str) -> None:
        self.why = self.why or why

    def launch(
        self, start: Callable[..., Any], kernel: Any, grid: tuple[int, ...], device: torch.device, args: Sequence[Any],
        parameters: dict[str, Any],
    ) -> None:  # fmt: skip
        """Launch a kernel by calling `start`, and record the launch if this thread is being observed."""
        if get_ident() != self.thread:
            start(kernel, grid, device, args, parameters)
            return
        with self._unseen():
            compiled = start(kernel, grid, device, args, parameters)
        if not self.why:
            self._note(kernel, compiled, grid, args, parameters)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def _note(
        self, kernel: Any, compiled: Compiled | Configured | None, grid: Any, args: Sequence[Any], parameters: Any
    ) -> None:
        pointers: list[Pointer] = []
        given = list(args)
        for place, each in enumerate(args):
            described = None
            if is_descriptor(each):
                described = Described(tuple(each.shape), tuple(each.strides), tuple(each.block_shape), each.padding)
                if getattr(each, "round_f32_to_tf32", False):
                    self._is_other("a launch with a tensor descriptor that rounds float32 to TF32")
                each = each.base
            if type(each) not in (Tensor, Parameter):
                if type(each) not in (int, float, bool, type(None)):
                    self._is_other(f"a launch with {type(each).__name__}")
                continue
            source = self.source_of.get(self.key(each))
            if each.numel() == 0:  # an empty tensor has no address
                given[place] = each if triton_launch.INTERPRETED else 0
                continue
            if source is None:
                self._is_other("a launch with memory that is neither an argument nor an allocation of the call")
                return
            given[place] = described
            view = each.dtype, each.shape, each.stride()
            pointers.append(Pointer(place, source, each.data_ptr() - self.sources[source].data_ptr(), view))
        if compiled is None and not triton_launch.INTERPRETED:
            self._is_other(f"a launch of {kernel.fn.__name__} that only Triton can make")
        self.launched.append(Step(kernel, compiled, grid, given, tuple(pointers), dict(parameters)))

    def zeros(self, device: torch.device, count: int) -> Tensor | None:
        """Return zeroed counters, and record them as an allocation of the call."""
        if get_ident() != self.thread:
            return counters_now(device, count)
        with self._unseen():
            made = counters_now(device, count)
        if made is None:
            self._is_other("no zeroed counters are left")
        else:
            self.zeros_of[len(self.sources)] = count
            self._is_source(made)
        return made

    def was_launched(self, made: Configured, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """Record a launch of a CUDA C++ kernel that was just made with the arguments `args`."""
        if get_ident() == self.thread and not self.why:
            self._note(made, made, grid, args, {})

    def foreign(self) -> None:
        """Record that the call launches a kernel in a way that cannot be repeated."""
        if get_ident() == self.thread:
            self._is_other("a launch of a kernel that is neither Triton's nor CUDA C++")

    def steps(self, places: tuple[int, ...], result: Any) -> Steps | None:
        """The allocations and launches of the observed call; None if the call did anything that `Steps`
        cannot repeat.
        """
        count = len(places)
        kind = Tensor if isinstance(result, Tensor) else type(result)
        if self.why or kind not in (Tensor, tuple, list):
            return None
        results: list[int | None] = []
        for each in (result,) if isinstance(result, Tensor) else result:
            source = None if each is None else self.source_of.get(self.key(each), 0)
            if source is not None and (source < count or source in self.zeros_of or not self._is_whole(each, source)):
                return None
            if source is not None and each.numel() and not self.is_used(source):
                return None
            results.append(None if source is None else source - count)
        memory = tuple(
            Zeros(self.zeros_of[i])
            if i in self.zeros_of
            else Memory(tuple(t.shape), t.stride(), t.dtype, self._like(t, places))
            for i, t in enumerate(self.sources[count:], count)
        )
        return Steps(self.device, places, memory, tuple(self.launched), tuple(results), kind)

    def is_used(self, source: int) -> bool:
        """Whether an observed kernel launch has a pointer to this source, a tensor or allocation of the call. If not,
        code that was not observed computed the source.
        """
        return any(pointer.source == source for step in self.launched for pointer in step.pointers)

    def _is_whole(self, result: Tensor, source: int) -> bool:
        """Whether a result is a whole allocation. The result may be a different Python object for the same memory."""
        return _is_same(self.sources[source], result)

    def _like(self, memory: Tensor, places: tuple[int, ...]) -> int | None:
        if not memory.is_contiguous():
            return None
        for place, each in zip(places, self.sources, strict=False):
            if (each.shape, each.stride(), each.dtype) == (memory.shape, memory.stride(), memory.dtype):
                return place
        return None


def _are_views(base: Any, made: Any) -> bool:
    """Whether an operator's results are views of `base`. Operators such as `contiguous` return either a view or
    a copy.
    """
    storage = base.untyped_storage().data_ptr()
    return all(
        each.untyped_storage().data_ptr() == storage for each in (made if isinstance(made, list | tuple) else (made,))
    )


def _is_same(memory: Tensor, tensor: Tensor) -> bool:
    alike = memory.data_ptr() == tensor.data_ptr() and memory.dtype == tensor.dtype
    return alike and memory.shape == tensor.shape and memory.stride() == tensor.stride()

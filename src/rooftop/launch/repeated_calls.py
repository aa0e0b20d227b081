"""Calls of public functions that were made before: allocations, launches and autograd's node in C++, without Python.

A small kernel runs shorter than Python takes to check arguments, view them as rows and find the launch. For arguments
with the same facts (shapes, strides, dtypes, devices, alignment, values that are not tensors) and the same modes of
PyTorch, all of this has the same outcome. So a call is observed once: if it runs one operator that only allocates and
launches, a plan of it is given to `repeated_calls.cpp`, which makes the next such call. Its results have the same bits.

The C++ part is compiled in the background when a GPU first runs a known operator, and stored in Rooftop's cache. Until
then, and on machines without a C++ compiler, Python makes the calls. `ROOFTOP_COMPILED_CALLS=0` leaves it out, and
`ROOFTOP_COMPILED_CALLS=wait` waits for it. `rooftop doctor` says which is the case.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftop.launch import counters, known_calls, triton_launch
from rooftop.launch.compiled_kernels import is_watched
from rooftop.launch.cpp_extensions import Extension
from rooftop.launch.known_calls import Memory, Step, Zeros
from rooftop.launch.lessons import Called, Lesson, Part, Record, lesson_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LESSON_AT, BACKWARD_LESSON_AT = 3, 1
"""The call with the same facts that is observed. By then the operator's own launches are compiled."""
_functions: list[_Function] = []
_seen: dict[str, Counter[bytes]] = {}  # calls with the same facts that Python made, by function
_native: Any = None  # the compiled part
_starting = Lock()
_blocks = 0  # of `in_python` that are open
reasons: dict[str, str] = {}
"""Why calls of a function are made in Python: the reason for the last one that was observed, by its name."""


class _Function(NamedTuple):
    """A function of `repeated`.

    Attributes:
        now: a list of one item: who makes its calls, if not Python.
        compiled: a list of its compiled calls, once they are there.
    """

    function: Callable[..., Any]
    now: list[Any]
    compiled: list[Any]


# ---- public functions ------------------------------------------------------------------------------------------------


def repeated(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function, whose known calls run without Python once the compiled part is there.

    The outcome of the function's own decisions must depend on nothing but the facts of its arguments and on PyTorch's
    modes. It may compute anything: a call that does more than run one operator of `declare(..., known=...)` is always
    made in Python.
    """
    place: list[Any] = [None]
    with _starting:
        _functions.append(_Function(function, place, []))
        if _native is not None:
            _compile(_functions[-1])

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        calls = place[0]
        return (function if calls is None else calls)(*arguments, **options)  # type: ignore[no-any-return]

    function.outermost = call  # type: ignore[attr-defined]  # for the programs of torch.fx
    return call


def forget() -> None:
    """Drop all plans."""
    for each in _functions:
        for calls in each.compiled:
            _native.forget(calls)
    for seen in _seen.values():
        seen.clear()


known_calls.also_forget(forget)


def _calls_of(function: Callable[..., Any]) -> Any:
    seen = _seen.setdefault(f"{function.__module__}.{function.__qualname__}", Counter())

    def miss(facts: bytes, *arguments: Any, **options: Any) -> Any:
        if not _is_due(seen, facts, LESSON_AT):
            return function(*arguments, **options)
        given = _tensors_in((*arguments, *options.values()))
        try:
            with _teaching(given) as lesson:
                result = function(*arguments, **options)
        except Exception:  # it went through PyTorch's dispatcher, which has other messages
            return function(*arguments, **options)
        if lesson is None:
            seen[facts] -= 1  # another thread's call was observed: the next one may be
            return result
        try:
            plan = _plan_of(function.__name__, lesson, result)
        except Unplanned as reason:
            reasons[function.__name__] = str(reason)
        else:
            if _native.keep(calls, facts, plan):
                seen.clear()  # there were too many plans, and all were dropped
        return result

    calls = _native.make_calls(function, miss)
    return calls


def _is_due(seen: Counter[bytes], facts: bytes, at: int) -> bool:
    """Whether this call is to be observed: once only, because what cannot be planned stays so."""
    if len(seen) >= known_calls.MOST_KNOWN:
        seen.clear()
    seen[facts] += 1
    return seen[facts] == at


def calls_made() -> int:
    """How many calls of this process were made without Python, those of backward included."""
    return 0 if _native is None else int(_native.calls_made())


@contextmanager
def in_python() -> Iterator[None]:
    """Within the block, Python makes all calls, of all threads, those of backward included."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(blocks: int) -> None:
    """Note that so many more blocks of `in_python` are open, in any threads."""
    global _blocks
    with _starting:
        _blocks += blocks
        if _native is not None:
            _native.set_in_python(_blocks > 0)
        for each in _functions:
            each.now[0] = each.compiled[0] if each.compiled and not _blocks else None


def _compile(function: _Function) -> None:
    function.compiled.append(_calls_of(function.function))
    function.now[0] = None if _blocks else function.compiled[0]


@contextmanager
def _teaching(given: list[Tensor]) -> Iterator[Lesson | None]:
    """Observe what this thread does, in Python; None if another thread is observed."""
    with lesson_of(given) as lesson:
        _native.set_teaching(lesson is not None)
        try:
            yield lesson
        finally:
            if lesson is not None:
                _native.set_teaching(False)


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """All tensors, also those in lists and tuples, in the order of the compiled part."""
    found: list[Tensor] = []
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += _tensors_in(each)
    return found


# ---- plans -----------------------------------------------------------------------------------------------------------


class Unplanned(Exception):
    """Calls like this are made in Python; the message says why."""


def _plan_of(name: str, lesson: Lesson, result: Any) -> Any:
    """The plan of a call that was observed.

    Raises:
        Unplanned: Python has to make such calls.
    """
    found = list(result) if isinstance(result, tuple | list) else [result]
    kind = "[" if type(result) is list else "(" if type(result) is tuple else "t"
    if kind == "t" and type(result) is not Tensor:
        raise Unplanned("its result is no tensor")
    places = _Places(lesson)
    results = [None if each is None else places.of_result(each) for each in found]
    if len(places.shapes) < len(results) - results.count(None):
        raise Unplanned("two results share memory")
    recording, backward = None, None
    if any(each is not None and each.requires_grad for each in found):
        recording, backward = _recording(name, lesson, places, found, results)
    elif lesson.records:
        raise Unplanned("autograd watches an operator, but not its results")
    return _made(lesson, places, results, kind, recording, backward)


def _made(
    lesson: Lesson, places: _Places, results: list[int | None], kind: str, recording: Any = None, backward: Any = None
) -> Any:
    memory = [
        (each.shape, each.strides, each.dtype, -1)
        if isinstance(each, Memory)
        else ((), (), torch.int32, each.size if isinstance(each, Zeros) else -2)
        for each in places.memory
    ]
    description = {
        "device": lesson.device,
        "memory": memory,
        "launches": [_launch_of(step) for step in lesson.launched],
        "results": [(-1, (), ()) if place is None else (place, *places.shapes[place]) for place in results],
        "kind": kind,
        "recording": recording,
    }
    try:
        plan = _native.Plan(description)
    except ValueError:  # the driver does not say what a kernel takes, or it takes something else
        plan = _native.Plan(
            {**description, "launches": [_launch_of(step, by_driver=False) for step in lesson.launched]}
        )
    if backward is not None:
        backward.recording = plan.recording()
    return plan


class _Places:
    """The memory of each result of a call.

    Attributes:
        memory: what is allocated, with the shapes of the results of the call.
        shapes: shape and strides of each result, by its index in `memory`.
    """

    def __init__(self, lesson: Lesson) -> None:
        if lesson.why:
            raise Unplanned(lesson.why)
        self.lesson = lesson
        self.memory = lesson.memory()
        self.shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def of(self, tensor: Tensor) -> int | None:
        """The index in `memory` of the memory that a tensor fills; None if it has other memory."""
        source, count = self.lesson.source(tensor), len(self.lesson.given)
        if source is None or source < count:
            return None
        made = self.lesson.sources[source]
        alike = (made.shape, made.stride()) == (tensor.shape, tensor.stride())
        whole = alike or (made.numel() == tensor.numel() and _is_dense(made) and _is_dense(tensor))
        return source - count if whole and made.data_ptr() == tensor.data_ptr() and made.dtype == tensor.dtype else None

    def of_result(self, result: Tensor) -> int:
        """The same for a result, which may be given twice; memory that Rooftop allocates then gets its shape."""
        place = self.of(result)
        unseen = place is not None and not self.lesson.is_used(place + len(self.lesson.given))
        if place is None or unseen or type(result) is not Tensor or isinstance(self.memory[place], Zeros):
            raise Unplanned("a result is not what was observed to be computed")
        shape = tuple(result.shape), result.stride()
        if self.shapes.setdefault(place, shape) != shape:
            raise Unplanned("two results of other shapes share memory")
        if isinstance(self.memory[place], Memory):
            self.memory[place] = Memory(*self.shapes[place], result.dtype, None)
        return place

    def of_argument(self, tensor: Tensor) -> int:
        """The given tensor of which an operator's argument is a view with the same elements in the same order."""
        source = self.lesson.source(tensor)
        if source is None or source >= len(self.lesson.given):
            raise Unplanned("an operator that autograd records takes a tensor that the call computed")
        whole = self.lesson.given[source]
        if not _is_view(whole, tensor):
            raise Unplanned("an operator that autograd records takes a part of a tensor")
        return source


def _is_view(whole: Tensor, part: Tensor) -> bool:
    """Whether `part` is `whole.view(part.shape)`."""
    if whole.numel() != part.numel() or whole.data_ptr() != part.data_ptr() or whole.dtype != part.dtype:
        return False
    try:
        return whole.detach().view(part.shape).stride() == part.stride()
    except RuntimeError:
        return False


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((d, n) for n, d in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# ---- launches --------------------------------------------------------------------------------------------------------

_FORMATS = {
    "i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip


def _launch_of(step: Step | Called, by_driver: bool = True) -> dict[str, Any]:
    """A launch for the driver, or for Python where the driver cannot make it alone; or a call of PyTorch's operator."""
    if isinstance(step, Called):
        schema = step.func._schema
        return {
            "python": None,
            "operator": (schema.name, schema.overload_name),
            "arguments": {name: _argument(each) for name, each in step.arguments.items()},
            "made": step.made,
        }
    described = _for_driver(step) if by_driver and step.compiled is not None else None
    return described or {"python": partial(known_calls.launch_steps, (step,))}


def _argument(value: Any) -> Any:
    if isinstance(value, Part):
        return _native.Part(*value)
    return [_argument(each) for each in value] if isinstance(value, list) else value


def _for_driver(step: Step) -> dict[str, Any] | None:
    assert step.compiled is not None
    compiled: Any = step.compiled.whole
    about = compiled.metadata
    scratch = about.global_scratch_size or about.profile_scratch_size
    if about.num_ctas != 1 or about.launch_cooperative_grid or scratch:
        return None
    pointers = {each.place: each for each in step.pointers}
    maps = iter(getattr(about, "tensordesc_meta", None) or ())
    packed, patches, replaced = _Parameters(), [], []
    values = [*step.given, *step.compiled.constants]
    for i, (name, value) in enumerate(zip(step.kernel.arg_names, values, strict=True)):
        kind = compiled.src.signature[name]
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            made = _tensor_map(step, i, next(maps, None))
            if made is None:
                return None
            replaced.append((len(packed.offsets), pointers[i].source, pointers[i].offset))
            packed.add(made, 64)
            for size in value.shape:
                packed.add(struct.pack("i", size))
            for stride in value.strides:
                packed.add(struct.pack("q", stride))
        elif kind.startswith("*"):
            if i in pointers:
                patches.append((len(packed.offsets), pointers[i].source, pointers[i].offset))
            elif value:
                return None
            packed.add(bytes(8))
        elif kind in _FORMATS:
            packed.add(struct.pack(_FORMATS[kind], value))
        else:
            return None
    for _ in range(2):  # Triton's scratch memory, of which the kernel has none
        packed.add(bytes(8))
    return {
        "python": None,
        "function": compiled.function,
        "grid": (*step.grid, 1, 1)[:3],
        "threads": 32 * about.num_warps,
        "shared": about.shared,
        "early": bool(about.launch_pdl),
        "parameters": packed.values,
        "offsets": packed.offsets,
        "sizes": packed.sizes,
        "patches": patches,
        "maps": replaced,
    }


class _Parameters:
    """The values of a kernel's parameters, each aligned by its size."""

    def __init__(self) -> None:
        self.values, self.offsets, self.sizes = b"", list[int](), list[int]()

    def add(self, value: bytes, alignment: int | None = None) -> None:
        self.values += bytes(-len(self.values) % (alignment or len(value)))
        self.offsets.append(len(self.values))
        self.sizes.append(len(value))
        self.values += value


TENSOR_MAP_BYTES = 128  # of the driver's CUtensorMap


def _tensor_map(step: Step, place: int, about: Any) -> bytes | None:
    """A tensor descriptor as the driver encodes it, for any aligned address; the compiled part replaces the address."""
    from triton.backends.nvidia import driver

    if about is None:
        return None  # the kernel takes a pointer instead
    device = torch.device("cuda", torch._C._cuda_getDevice())
    pointer = next(each for each in step.pointers if each.place == place)
    dtype, shape, strides = pointer.view
    size = 1 + sum((n - 1) * d for n, d in zip(shape, strides, strict=True))
    memory = torch.empty(size, dtype=dtype, device=device).as_strided(shape, strides)
    made = driver.make_tensordesc_arg(step.given[place].of(memory), about)[0]
    if type(made).__name__ != "PyCUtensorMap":
        return None
    return ctypes.string_at(id(made) + type(made).__basicsize__ - TENSOR_MAP_BYTES, TENSOR_MAP_BYTES)


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Backward:
    """Gradients of a call that autograd recorded in C++, computed in Python; teaches the compiled part.

    It keeps no tensor of the call from which it was made.
    """

    def __init__(self, name: str, record: Record) -> None:
        self.name, self._again = name, record.gradients
        # of the operator's arguments: how many tensors each has, and whether it is a list
        self._counts = [len(a) if _is_list(a) else int(isinstance(a, Tensor)) for a in record.arguments]
        self._lists = [_is_list(a) for a in record.arguments]
        self.recording: Any = None  # a handle that does not keep it alive
        self._seen: Counter[bytes] = Counter()

    def __call__(
        self, facts: bytes, kept: list[Tensor], wanted: list[bool], slopes: list[Tensor | None]
    ) -> list[Tensor | None]:
        if not facts or not _is_due(self._seen, facts, BACKWARD_LESSON_AT):
            return self._gradients(kept, wanted, slopes)
        with _teaching([each for each in (*kept, *slopes) if each is not None]) as lesson:
            found = self._gradients(kept, wanted, slopes)
        if lesson is None:
            self._seen[facts] -= 1
            return found
        try:
            plan = self._plan_of(lesson, found)
        except Unplanned as reason:
            reasons[f"{self.name}, backward"] = str(reason)
        else:
            if _native.keep_backward(self.recording, facts, plan):
                self._seen.clear()
        return found

    def _plan_of(self, lesson: Lesson, found: list[Tensor | None]) -> Any:
        places = _Places(lesson)
        if any(each is not None and each.requires_grad for each in found) or lesson.records:
            raise Unplanned("its gradients have gradients")
        if not lesson.launched:
            return _views(lesson, found)
        return _made(lesson, places, [None if each is None else places.of_result(each) for each in found], "[")

    def _gradients(self, kept: list[Tensor], wanted: list[bool], slopes: list[Tensor | None]) -> list[Tensor | None]:
        flags = iter(wanted)
        of_arguments: list[Any] = []
        for count, is_list in zip(self._counts, self._lists, strict=True):
            each = [next(flags) for _ in range(count)]
            of_arguments.append(each if is_list else any(each))
        found = iter(self._again(kept, of_arguments, slopes))
        flat: list[Tensor | None] = []
        for count, is_list in zip(self._counts, self._lists, strict=True):
            gradient = next(found, None)
            if is_list:
                flat += [None] * count if gradient is None else gradient
            elif count:
                flat.append(gradient)
        return flat


def _is_list(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and bool(argument) and all(isinstance(each, Tensor) for each in argument)


def _views(lesson: Lesson, found: list[Tensor | None]) -> Any:
    """The plan of gradients that are views of tensors that were given, such as an expanded slope."""
    views: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = []
    for each in found:
        if each is None:
            views.append((-1, (), (), 0))
            continue
        source = lesson.source(each)
        if source is None or source >= len(lesson.given) or each.dtype != lesson.given[source].dtype:
            raise Unplanned("a gradient is neither computed nor a view")
        offset = int(each.storage_offset() - lesson.given[source].storage_offset())
        views.append((source, tuple(each.shape), each.stride(), offset))
    return _native.Plan({"device": lesson.device, "kind": "[", "views": views})


def _recording(
    name: str, lesson: Lesson, places: _Places, found: list[Any], results: list[int | None]
) -> tuple[dict[str, Any], _Backward]:
    """How autograd records the call in C++."""
    if len(lesson.records) != 1:
        raise Unplanned(f"autograd records {len(lesson.records)} operators of Rooftop")
    record, count = lesson.records[0], len(lesson.given)
    of_operator = [places.of(each) for each in record.results]
    watched = [i for i, each in enumerate(found) if each is not None and each.requires_grad]
    slopes = []
    for i, (each, place) in enumerate(zip(found, results, strict=True)):
        if each is None:
            continue
        mine = of_operator.index(place) if place in of_operator else None
        if each.requires_grad != (mine is not None):
            raise Unplanned("a result with a gradient is none of the operator's, or is detached")
        if mine is not None and i in watched:
            if not _is_view(record.results[mine], each):
                raise Unplanned("a result is not a view of the operator's whole result")
            slopes.append(mine)
    kept = []
    for each in record.kept:
        place = places.of(each)
        if place is None:
            kept.append((places.of_argument(each), False, tuple(each.shape)))
            continue
        output = place in [results[i] for i in watched]
        if not output and place in of_operator and not record.once:
            raise Unplanned("backward needs a result that the caller does not get")
        kept.append((count + place, output, tuple(each.shape)))
    tensors = _tensors_in(record.arguments)
    edges = [places.of_argument(each) for each in tensors]
    if any(lesson.given[i].requires_grad and not each.requires_grad for i, each in zip(edges, tensors, strict=True)):
        raise Unplanned("the operator takes a detached tensor")
    backward = _Backward(name, record)
    return {
        "name": record.name,
        "kept": kept,
        "edges": edges,
        "edge_sizes": [tuple(lesson.given[place].shape) for place in edges],
        "slope_sizes": [tuple(each.shape) for each in record.results],
        "slopes": slopes,
        "watched": watched,
        "zeros": record.zeros,
        "backward": backward,
    }, backward


# ---- the compiled part --------------------------------------------------------------------------------------------

_extension = Extension("repeated_calls", Path(__file__).with_suffix(".cpp"))
_asked = False


def ask() -> None:
    """Load the compiled part if it is stored, else have it compiled in the background. Further calls do nothing."""
    global _asked
    how = os.environ.get("ROOFTOP_COMPILED_CALLS", "1")
    if _asked or how == "0":
        return
    _asked = True
    if how == "wait":
        build()
    else:
        _extension.load_when_built(_start)


def build() -> None:
    """Compile the C++ part now, unless it is stored, and load it.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed.
    """
    _start(_extension.build())


def state() -> tuple[bool, str]:
    """For `rooftop doctor`: whether known calls run without Python, or will, and why (not)."""
    if os.environ.get("ROOFTOP_COMPILED_CALLS") == "0":
        return False, "left out by ROOFTOP_COMPILED_CALLS=0"
    return _extension.state()


if not triton_launch.INTERPRETED:
    known_calls.after_known.append(ask)


def _start(module: Any) -> None:
    global _native
    with _starting:
        if _native is not None:
            return
        with_cuda = hasattr(torch._C, "_cuda_getDevice")
        module.start(
            {
                "parameter": torch.nn.Parameter,
                "counts": triton_launch._counters,
                "is_watched": is_watched,
                "profiles": torch._C._autograd._profiler_enabled,
                "forward_mode": forward_ad,
                "counters": counters.counters_now,
                "device": torch._C._cuda_getDevice if with_cuda else None,
                "stream": torch._C._cuda_getCurrentRawStream if with_cuda else None,
                "captures": torch._C._cuda_isCurrentStreamCapturing if with_cuda else None,
            }
        )
        with ThreadPoolExecutor(1) as thread:  # a new thread has no modes, unlike perhaps this one
            thread.submit(module.note_keys, False).result()
            thread.submit(torch.inference_mode()(partial(module.note_keys, True))).result()
        _native = module
        module.set_in_python(_blocks > 0)
        for each in _functions:
            _compile(each)

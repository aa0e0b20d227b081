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

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftop.launch import counters, known_calls, triton_launch
from rooftop.launch.compiled_kernels import is_watched
from rooftop.launch.cpp_extensions import Extension
from rooftop.launch.known_calls import Lesson, Memory, Step, Taught, Zeros

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LESSON_AT, BACKWARD_LESSON_AT = 3, 1
"""The call with the same facts that is observed. By then the operator's own launches are compiled."""
_functions: list[tuple[Callable[..., Any], list[Any]]] = []  # of `repeated`, and the place of its calls
_seen: dict[str, Counter[bytes]] = {}  # calls with the same facts that Python made, by function
_native: Any = None  # the compiled part
reasons: dict[str, str] = {}
"""Why calls of a function are made in Python: the reason for the last one that was observed, by its name."""

# ---- public functions ------------------------------------------------------------------------------------------------


def repeated(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function, whose known calls run without Python once the compiled part is there.

    The outcome of the function's own decisions must depend on nothing but the facts of its arguments and on PyTorch's
    modes. It may compute anything: a call that does more than run one operator of `declare(..., known=...)` is always
    made in Python.
    """
    place: list[Any] = [None]
    _functions.append((function, place))
    if _native is not None:
        place[0] = _calls_of(function)

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        calls = place[0]
        return (function if calls is None else calls)(*arguments, **options)  # type: ignore[no-any-return]

    return call


def forget() -> None:
    """Drop all plans."""
    for _, place in _functions:
        if place[0] is not None:
            _native.forget(place[0])
    for seen in _seen.values():
        seen.clear()


known_calls.also_forget(forget)


def _calls_of(function: Callable[..., Any]) -> Any:
    seen = _seen.setdefault(f"{function.__module__}.{function.__qualname__}", Counter())

    def miss(facts: bytes, *arguments: Any, **options: Any) -> Any:
        if not _is_due(seen, facts, LESSON_AT):
            return function(*arguments, **options)
        with _lesson() as lesson:
            result = function(*arguments, **options)
        if lesson is None:
            seen[facts] -= 1  # another thread's call was observed: the next one may be
        plan = lesson and _plan_of(function.__name__, lesson, _tensors_in((*arguments, *options.values())), result)
        if plan is not None and _native.keep(calls, facts, plan):
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
    """Within the block, Python makes all calls, of all threads."""
    places = [place for _, place in _functions]
    before = [place[0] for place in places]
    for place in places:
        place[0] = None
    try:
        yield
    finally:
        for place, calls in zip(places, before, strict=True):
            place[0] = calls


@contextmanager
def _lesson() -> Iterator[Lesson | None]:
    """Observe the operators that this thread calls; None if another thread observes."""
    if known_calls.lesson is not None:
        yield None
        return
    lesson = known_calls.lesson = Lesson(get_ident())
    _native.set_teaching(True)
    try:
        yield lesson
    finally:
        known_calls.lesson = None
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


class _Unplanned(Exception):
    """A call is more than allocations and launches for one operator; the message says what."""


def _plan_of(name: str, lesson: Lesson, given: list[Tensor], result: Any) -> Any:
    """The plan of a call that was observed; None if Python has to make such calls."""
    try:
        taught = _only_operator(lesson)
        sources = _Sources(given, taught)
        found = list(result) if isinstance(result, tuple | list) else [result]
        kind = "[" if type(result) is list else "(" if type(result) is tuple else "t"
        if kind == "t" and type(result) is not Tensor:
            raise _Unplanned("its result is no tensor")
        places = [None if each is None else sources.memory_of(each) for each in found]
        recording, backward = None, None
        if any(each is not None and each.requires_grad for each in found):
            recording, backward = _recording(name, taught, sources, found, places)
        elif taught.record is not None:
            raise _Unplanned("autograd watches the operator, but not its results")
        return _made(sources, taught, places, kind, recording, backward)
    except _Unplanned as reason:
        reasons[name] = str(reason)
        return None


def _made(
    sources: _Sources, taught: Taught, places: list[int | None], kind: str, recording: Any = None, backward: Any = None
) -> Any:
    memory = [
        ((), (), torch.int32, each.size) if isinstance(each, Zeros) else (each.shape, each.strides, each.dtype, -1)
        for each in sources.memory
    ]
    description = {
        "device": taught.device,
        "memory": memory,
        "launches": [_launch_of(step, sources) for step in taught.steps],
        "results": [-1 if place is None else place for place in places],
        "kind": kind,
        "recording": recording,
    }
    try:
        plan = _native.Plan(description)
    except ValueError:  # the driver does not say what a kernel takes, or it takes something else
        python = [{"python": _by_python(step, sources)} for step in taught.steps]
        plan = _native.Plan({**description, "launches": python})
    if backward is not None:
        backward.plan = plan
    return plan


def _only_operator(lesson: Lesson) -> Taught:
    if lesson.why:
        raise _Unplanned(f"besides allocations, views and launches of Triton kernels there is: {lesson.why}")
    if len(lesson.taught) != 1:
        raise _Unplanned(f"it runs {len(lesson.taught)} operators")
    return lesson.taught[0]


class _Sources:
    """Where the memory of an observed operator's tensors is: in tensors that were given, or in its allocations.

    Attributes:
        given: the tensors of the call.
        memory: the operator's allocations, with the shapes of the results of the call.
    """

    def __init__(self, given: list[Tensor], taught: Taught) -> None:
        storages = [each.untyped_storage().data_ptr() for each in given]
        if not given or len(set(storages)) < len(storages) or any(each.numel() == 0 for each in given):
            raise _Unplanned("its tensors share memory, or have none")
        self.given, self.taught = given, taught
        self.memory: list[Memory | Zeros] = list(taught.memory)
        self._place_of = dict(zip(storages, range(len(given)), strict=True))
        self._offsets = [self._offset(each) for each in taught.tensors]

    def _offset(self, tensor: Tensor) -> tuple[int, int]:
        """(which given tensor, bytes from its beginning) of an operator's tensor."""
        place = self._place_of.get(tensor.untyped_storage().data_ptr())
        if place is None or tensor.device != self.given[place].device:
            raise _Unplanned("the operator's tensors are not those of the call")
        return place, tensor.data_ptr() - self.given[place].data_ptr()

    def at(self, source: int, offset: int) -> tuple[int, int]:
        """(source of the call, offset) for a source of the operator: its tensors, then its allocations."""
        count = len(self.taught.tensors)
        if source >= count:
            return len(self.given) + source - count, offset
        place, more = self._offsets[source]
        return place, more + offset

    def given_as(self, tensor: Tensor) -> int:
        """The given tensor of which an operator's tensor is a view with the same elements in the same order."""
        place, _ = self._offset(tensor)
        whole = self.given[place]
        if whole is not tensor and not _is_view(whole, tensor):
            raise _Unplanned("the operator's tensors are not views of whole tensors of the call")
        if whole.requires_grad != tensor.requires_grad and tensor.is_floating_point():
            raise _Unplanned("the operator has a tensor of the call without its gradient")
        return place

    def memory_of(self, result: Tensor) -> int:
        """The allocation that is a result of the call; it then gets the result's shape."""
        for i, made in enumerate(self.taught.made):
            each = self.memory[i]
            if isinstance(each, Zeros) or made.data_ptr() != result.data_ptr() or made.dtype != result.dtype:
                continue
            if not any(p.source == len(self.taught.tensors) + i for step in self.taught.steps for p in step.pointers):
                continue  # computed by what nobody observed
            alike = (made.shape, made.stride()) == (result.shape, result.stride())
            whole = alike or (made.numel() == result.numel() and _is_dense(made) and _is_dense(result))
            if type(result) is Tensor and whole and (result.is_inference() or result._version == 0):
                self.memory[i] = Memory(tuple(result.shape), result.stride(), result.dtype, None)
                return i
        raise _Unplanned("its results are not the operator's")


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


def _launch_of(step: Step, sources: _Sources) -> dict[str, Any]:
    """A launch for the driver, or for Python where the driver cannot make it alone."""
    described = None if step.compiled is None else _for_driver(step, sources)
    return described or {"python": _by_python(step, sources)}


def _for_driver(step: Step, sources: _Sources) -> dict[str, Any] | None:
    compiled: Any = step.compiled.whole  # type: ignore[union-attr]
    about = compiled.metadata
    special = (
        about.num_ctas != 1,
        about.launch_cooperative_grid,
        about.global_scratch_size,
        about.profile_scratch_size,
    )
    if any(special):
        return None
    pointers = {each.place: each for each in step.pointers}
    parameters = b""
    offsets: list[int] = []
    sizes: list[int] = []
    patches: list[tuple[int, int, int]] = []
    names = step.kernel.arg_names
    values = [*step.given, *step.compiled.constants]  # type: ignore[union-attr]
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        kind = compiled.src.signature[name]
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            code = "Q"
            if i in pointers:
                patches.append((len(offsets), *sources.at(pointers[i].source, pointers[i].offset)))
            elif value:
                return None
            value = 0
        elif (code := _FORMATS.get(kind, "")) == "":
            return None
        size = struct.calcsize(code)
        parameters += bytes(-len(parameters) % size)
        offsets.append(len(parameters))
        sizes.append(size)
        parameters += struct.pack(code, value)
    for _ in range(2):  # Triton's scratch memory, of which the kernel has none
        parameters += bytes(-len(parameters) % 8)
        offsets.append(len(parameters))
        sizes.append(8)
        parameters += bytes(8)
    return {
        "python": None,
        "function": compiled.function,
        "grid": (*step.grid, 1, 1)[:3],
        "threads": 32 * about.num_warps,
        "shared": about.shared,
        "early": bool(about.launch_pdl),
        "parameters": parameters,
        "offsets": offsets,
        "sizes": sizes,
        "patches": patches,
    }


def _by_python(step: Step, sources: _Sources) -> Callable[[list[Tensor]], None]:
    moved = step._replace(
        pointers=tuple(
            each._replace(source=place, offset=offset)
            for each in step.pointers
            for place, offset in [sources.at(each.source, each.offset)]
        )
    )

    def launch(tensors: list[Tensor]) -> None:
        known_calls.launch_steps((moved,), tensors)

    return launch


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Backward:
    """Gradients of a call that autograd recorded in C++, computed in Python; teaches the compiled part.

    It keeps no tensor of the call from which it was made.
    """

    def __init__(self, name: str, taught: Taught) -> None:
        assert taught.record is not None
        self.name, self._again = name, taught.record.gradients
        # of the operator's arguments: how many tensors each has, and whether it is a list
        self._counts = [len(a) if _is_list(a) else int(isinstance(a, Tensor)) for a in taught.arguments]
        self._lists = [_is_list(a) for a in taught.arguments]
        self.plan: Any = None
        self._seen: Counter[bytes] = Counter()

    def __call__(
        self, facts: bytes, kept: list[Tensor], wanted: list[bool], slopes: list[Tensor | None]
    ) -> list[Tensor | None]:
        if not facts or not _is_due(self._seen, facts, BACKWARD_LESSON_AT):
            return self._gradients(kept, wanted, slopes)
        with _lesson() as lesson:
            found = self._gradients(kept, wanted, slopes)
        if lesson is None:
            self._seen[facts] -= 1
        if lesson:
            try:
                self._learn(lesson, facts, [each for each in (*kept, *slopes) if each is not None], found)
            except _Unplanned as reason:
                reasons[f"{self.name}, backward"] = str(reason)
        return found

    def _learn(self, lesson: Lesson, facts: bytes, given: list[Tensor], found: list[Tensor | None]) -> None:
        if any(each is not None and each.requires_grad for each in found):
            raise _Unplanned("its gradients have gradients")
        if not lesson.taught and not lesson.why:
            plan = _views(given, found)
        else:
            taught = _only_operator(lesson)
            if taught.record is not None:
                raise _Unplanned("autograd records its backward")
            sources = _Sources(given, taught)
            places = [None if each is None else sources.memory_of(each) for each in found]
            plan = _made(sources, taught, places, "[")
        if _native.keep_backward(self.plan, facts, plan):
            self._seen.clear()

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


def _views(given: list[Tensor], found: list[Tensor | None]) -> Any:
    """The plan of gradients that are views of tensors that were given, such as an expanded slope."""
    views: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = []
    for each in found:
        if each is None:
            views.append((-1, (), (), 0))
            continue
        of = [i for i, t in enumerate(given) if t.untyped_storage().data_ptr() == each.untyped_storage().data_ptr()]
        if len(of) != 1 or each.dtype != given[of[0]].dtype or type(each) is not Tensor:
            raise _Unplanned("its gradients are neither an operator's results nor views")
        offset = int(each.storage_offset() - given[of[0]].storage_offset())
        views.append((of[0], tuple(each.shape), each.stride(), offset))
    return _native.Plan({"device": given[0].device, "kind": "[", "views": views})


def _recording(
    name: str, taught: Taught, sources: _Sources, results: list[Any], places: list[int | None]
) -> tuple[dict[str, Any], _Backward]:
    """How autograd records the call in C++."""
    record = taught.record
    if record is None:
        raise _Unplanned("its results have gradients that are not the operator's")
    count = len(sources.given)
    of_operator = [sources.taught.place_of(each) for each in record.results]  # allocations of results with gradients
    watched, slopes = [], []
    for i, (each, place) in enumerate(zip(results, places, strict=True)):
        if each is None or not each.requires_grad:
            continue
        if place not in of_operator:
            raise _Unplanned("a result with a gradient is none of the operator's")
        mine = record.results[of_operator.index(place)]
        if not _is_view(mine, each):
            raise _Unplanned("a result is not a view of the operator's whole result")
        watched.append(i)
        slopes.append(of_operator.index(place))
    alone = [i for i, each in enumerate(results) if each is not None and not each.requires_grad]
    if any(places[i] in of_operator for i in alone):
        raise _Unplanned("a result is detached")
    kept = []
    for each in record.kept:
        place = taught.place_of(each)
        if place is None:
            kept.append((sources.given_as(each), False, tuple(each.shape)))
        else:
            output = place in [places[i] for i in watched]
            if not output and place in of_operator:
                raise _Unplanned("backward needs a result that the caller does not get")
            kept.append((count + place, output, tuple(each.shape)))
    edges = [sources.given_as(each) for each in taught.tensors]
    backward = _Backward(name, taught)
    return {
        "name": record.name,
        "kept": kept,
        "edges": edges,
        "edge_sizes": [tuple(sources.given[place].shape) for place in edges],
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
_starting = Lock()


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
        for function, place in _functions:
            place[0] = _calls_of(function)

"""Make plans from observed calls. A plan lists the allocations, launches and results of a call, so that C++ code can
repeat the call. `repeated_calls.py` observes calls; `recorded_calls.py` adds how autograd records the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.launch import known_calls, native_calls
from rooftop.launch.driver_launches import for_driver
from rooftop.launch.known_calls import Memory, Step, Zeros
from rooftop.launch.lessons import ANY, Called, Lesson, Part, Varied
from rooftop.launch.row_counts import Code, codes_of, value_of
from rooftop.words import first_line

# Values in place of the number of arrival counters, for memory without such counters. In arrival counters, the programs
# of a kernel count their arrivals (counters.py).
ALLOCATED = -1  # the plan allocates the memory
NOT_ALLOCATED = -2  # an operator of PyTorch allocates the memory, or nothing uses it


class Unplanned(Exception):
    """The call cannot be planned, so Python makes this call and all calls like it. The error's message says why."""


class Result(NamedTuple):
    """A result of a plan.

    Attributes:
        source: index into the list of the given tensors followed by the allocations of the plan. -1: the result is
            None.
        offset: elements from the beginning of the source.
    """

    source: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0


def plan_of(lesson: Lesson, places: Places, results: Sequence[Result], kind: str, recording: Any = None) -> Any:
    """Make the plan with which C++ code repeats an observed call of a function.

    Args:
        lesson: the record of the observed call.
        places: the memory of the call's results.
        results: the location of each result in memory, in order.
        kind: "t" if the call returns a tensor, "[" for a list, "(" for a tuple.
        recording: how autograd records the call; None: autograd does not record it.

    Raises:
        Unplanned: the call cannot be planned.
    """
    count = len(lesson.given)
    kept = [] if recording is None else [source for source, *_ in recording["kept"]]
    needed = {*kept, *(each.source for each in results)} | lesson.read
    memory: list[tuple[Any, ...]] = []
    for source, each in enumerate(places.memory, count):
        if isinstance(each, Memory) and (source in needed or lesson.is_used(source)):
            memory.append((each.shape, each.strides, each.dtype, ALLOCATED, places.formulas(source - count)))
        else:
            memory.append(((), (), torch.int32, each.size if isinstance(each, Zeros) else NOT_ALLOCATED, []))
    description = {
        "device": lesson.device,
        "memory": memory,
        "results": [tuple(each) for each in results],
        "kind": kind,
        "varies": lesson.varies,
        "conditions": list(dict.fromkeys(map(tuple, lesson.conditions))),
        "recording": recording,
    }
    for by_driver in (True, False):
        try:
            return native_calls.module.Plan({**description, "launches": _launches_of(lesson, by_driver)})
        except ValueError:  # the driver does not report a kernel's parameters, or reports unexpected ones
            continue
        except (RuntimeError, TypeError) as error:  # an argument of an operator has no counterpart in C++
            raise Unplanned(first_line(error)) from error
    raise Unplanned("C++ cannot make the plan")


class Places:
    """Where the results of an observed call are in memory.

    Attributes:
        memory: the allocations. An allocation that is a result of the call has the shape of that result.
        shapes: shape and strides of each result that is an allocation, by the allocation's index in `memory`.
    """

    def __init__(self, lesson: Lesson) -> None:
        if lesson.why:
            raise Unplanned(lesson.why)
        self.lesson = lesson
        self.memory = lesson.memory()
        self.shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def formulas(self, place: int) -> list[Code]:
        """The formulas of the sizes of the allocation with index `place` in `memory`. The list is empty if these sizes
        do not vary from call to call.
        """
        shape = self.lesson.shapes.get(place + len(self.lesson.given))
        return [] if shape is None else codes_of(shape)

    def is_varied(self, place: int) -> bool:
        """Whether the sizes of the allocation with index `place` in `memory` differ from call to call."""
        source = place + len(self.lesson.given)
        return source in self.lesson.shapes or (self.lesson.varies and source in self.lesson.fresh)

    def of(self, tensor: Tensor) -> int | None:
        """The index in `memory` of the allocation that `tensor` uses; None if there is no such allocation."""
        source, count = self.lesson.source(tensor), len(self.lesson.given)
        if source is None or source < count:
            return None
        made = self.lesson.sources[source]
        alike = (made.shape, made.stride()) == (tensor.shape, tensor.stride())
        whole = alike or (made.numel() == tensor.numel() and _is_dense(made) and _is_dense(tensor))
        return source - count if whole and made.data_ptr() == tensor.data_ptr() and made.dtype == tensor.dtype else None

    def of_result(self, result: Tensor | None) -> Result:
        """The location in memory of a tensor that the call returns, as a `Result` of the plan. Two results may be the
        same tensor. If the result is an allocation of the plan, that allocation gets the result's shape.
        """
        if result is None:
            return Result(-1)
        if type(result) is Tensor and result.numel() == 0:
            return self._of_empty(result)
        place = self.of(result)
        unseen = place is not None and not self.lesson.is_used(place + len(self.lesson.given))
        if place is None or unseen or type(result) is not Tensor or isinstance(self.memory[place], Zeros):
            raise Unplanned("a result is not a tensor that an observed launch computed")
        shape = tuple(result.shape), result.stride()
        made = self.lesson.sources[place + len(self.lesson.given)]
        if self.is_varied(place) and shape != (tuple(made.shape), made.stride()):
            raise Unplanned("a result is a view of memory whose size varies")
        if self.shapes.setdefault(place, shape) != shape:
            raise Unplanned("two results of different shapes share memory")
        if isinstance(self.memory[place], Memory):
            self.memory[place] = Memory(*self.shapes[place], result.dtype, None)
        source = len(self.lesson.given) + place
        return Result(source, ANY, ANY) if self.is_varied(place) else Result(source, *shape)

    def _of_empty(self, result: Tensor) -> Result:
        """As `of_result`, for a tensor without elements, which has no memory: it must be an allocation itself."""
        count = len(self.lesson.given)
        for source, made in enumerate(self.lesson.sources[count:], count):
            if made is result and not self.lesson.varies:
                self.shapes[source - count] = tuple(result.shape), result.stride()
                return Result(source, tuple(result.shape), result.stride())
        raise Unplanned("a result without elements is not an allocation of the call")

    def of_gradient(self, gradient: Tensor | None) -> Result:
        """The location of a gradient in memory, as a `Result` of the plan. The gradient may also be a view of a given
        tensor, such as an expanded output gradient, or of a tensor that an operator of PyTorch has computed.
        """
        source = None if gradient is None else self.lesson.source(gradient)
        if gradient is None or source is None:
            return self.of_result(gradient)
        if source >= len(self.lesson.given):
            return self._of_computed(gradient, source) or self.of_result(gradient)
        if type(gradient) is not Tensor or gradient.dtype != self.lesson.given[source].dtype:
            raise Unplanned("a gradient is neither computed by an observed launch nor a view of a given tensor")
        offset = int(gradient.storage_offset() - self.lesson.given[source].storage_offset())
        if self.lesson.varies:
            whole = self.lesson.given[source]
            if offset or (gradient.shape, gradient.stride()) != (whole.shape, whole.stride()):
                raise Unplanned("a gradient is a view of a given tensor whose sizes vary")
            if source in self.lesson.shapes:
                return Result(source, ANY, ANY)
        return Result(source, tuple(gradient.shape), gradient.stride(), offset)

    def _of_computed(self, gradient: Tensor, source: int) -> Result | None:
        """The location of a gradient that is a part of an operator's result, or an expanded result. None if it is the
        whole result, or was not computed by an operator of PyTorch.
        """
        made, fresh = self.lesson.sources[source], source in self.lesson.fresh and self.lesson.is_used(source)
        if not fresh or self.lesson.varies or type(gradient) is not Tensor or self.of(gradient) is not None:
            return None
        if gradient.dtype != made.dtype:
            raise Unplanned("a gradient has another dtype than the memory that it views")
        offset = int(gradient.storage_offset() - made.storage_offset())
        return Result(source, tuple(gradient.shape), gradient.stride(), offset)

    def of_argument(self, tensor: Tensor) -> int:
        """Return the index of the given tensor of which `tensor` is a view. The operator that autograd records takes or
        keeps `tensor`. The view must have all elements of the given tensor, in the same order.
        """
        source = self.lesson.source(tensor)
        if source is None or source >= len(self.lesson.given):
            raise Unplanned("an operator that autograd records takes a tensor that the call computed")
        whole = self.lesson.given[source]
        if not is_view(whole, tensor):
            raise Unplanned("an operator that autograd records takes only a part of a tensor")
        if source in self.lesson.shapes and tensor.shape != whole.shape:
            raise Unplanned("an operator that autograd records reshapes a tensor whose size varies")
        return source


def is_view(whole: Tensor, part: Tensor) -> bool:
    """Whether `part` has the memory, shape and strides of `whole`, or of `whole.view(part.shape)` if the shapes differ.
    If the shapes are equal, the function does not use `view`, which may change the strides of dimensions of size 1.
    """
    if whole.numel() != part.numel() or whole.data_ptr() != part.data_ptr() or whole.dtype != part.dtype:
        return False
    if whole.shape == part.shape:
        return whole.stride() == part.stride()
    try:
        return whole.detach().view(part.shape).stride() == part.stride()
    except RuntimeError:
        return False


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill a memory range without gaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((d, n) for n, d in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# ---- launches --------------------------------------------------------------------------------------------------------


def _launches_of(lesson: Lesson, by_driver: bool = True) -> list[dict[str, Any]]:
    return [_launch_of(step, lesson.varied.get(i), by_driver) for i, step in enumerate(lesson.launched)]


def _launch_of(step: Step | Called, varied: Varied | None = None, by_driver: bool = True) -> dict[str, Any]:
    """Describe a step for the C++ code: a launch by the driver, a launch by Python if the driver alone cannot launch
    the kernel, or a call of an operator of PyTorch.
    """
    if isinstance(step, Called):
        schema = step.func._schema
        return {
            "python": None,
            "operator": (schema.name, schema.overload_name),
            "arguments": {name: _argument(each) for name, each in step.arguments.items()},
            "made": step.made,
        }
    described = for_driver(step, varied) if by_driver else None
    if described is None and varied is not None:
        described = {"python": partial(_launch_varying, step, *varied)}
    return described or {"python": partial(known_calls.launch_steps, (step,))}


def _launch_varying(
    step: Step, grid: Sequence[Any], numbers: dict[int, Any], sources: Sequence[Any], values: Sequence[int]
) -> None:
    """Repeat a recorded launch with other sizes. `grid` has a formula for each dimension; `numbers` has one for each
    varying kernel argument, by index. The formulas' variables have the values `values`. `sources` has the tensors to
    which the kernel gets pointers.
    """
    given = step.given.copy()
    for place, code in numbers.items():
        given[place] = value_of(code, values)
    # a view of one element suffices, because a kernel gets only the address, and the view must fit in the memory
    pointers = tuple(each._replace(view=(each.view[0], torch.Size((1,)), (1,))) for each in step.pointers)
    sizes = tuple(value_of(code, values) for code in grid)
    if 0 not in sizes:
        known_calls.launch_steps((step._replace(grid=sizes, given=given, pointers=pointers),), sources)


def _argument(value: Any) -> Any:
    if isinstance(value, Part):
        return native_calls.module.Part(*value)
    return [_argument(each) for each in value] if isinstance(value, list) else value

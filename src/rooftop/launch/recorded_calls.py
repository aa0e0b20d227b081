"""Describe how autograd records a repeated call in C++, and plan the call's backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rooftop.launch import native_calls
from rooftop.launch.call_plans import Places, Result, Unplanned, is_view, plan_of
from rooftop.launch.lessons import ANY, FIRST, NONE, Lesson, Record
from rooftop.launch.row_counts import Count

BACKWARD_LESSON_AT = 1
"""Which of the backward calls with the same facts (shapes, dtypes and so on) is observed: the first."""


class Backward:
    """The backward in Python of a call that autograd recorded in C++. A `Backward` also makes a plan of the backward,
    so that C++ code can repeat the backward.

    A `Backward` keeps no tensor of the call from which it was made.

    Attributes:
        recording: a weak reference to the C++ object that records the call.
        owned: indices of the kept tensors that backward may change, because nothing else refers to these tensors.
        varying: for each kept tensor and each slope (gradient of a result), which of the tensor's sizes varies. An
            empty list means that no size varies.
    """

    def __init__(self, name: str, record: Record, owned: frozenset[int]) -> None:
        self.name, self._again = name, record.gradients
        # for each argument of the operator: the number of tensors in the argument, and whether the argument is a list
        self._counts = [len(a) if _is_list(a) else int(isinstance(a, Tensor)) for a in record.arguments]
        self._lists = [_is_list(a) for a in record.arguments]
        self.recording: Any = None
        self.owned = owned
        self.varying: list[int] = []
        self._seen: Counter[bytes] = Counter()

    def __call__(
        self,
        facts: bytes,
        kept: list[Tensor],
        weak: list[Tensor | None],
        wanted: list[bool],
        slopes: list[Tensor | None],
    ) -> list[Tensor | None]:
        if not facts or not native_calls.is_due(self._seen, facts, BACKWARD_LESSON_AT, bool(self.varying)):
            return self._gradients(kept, weak, wanted, slopes)
        pairs = zip((*kept, *slopes), self.varying or [NONE] * (len(kept) + len(slopes)), strict=True)
        given = [(each, which) for each, which in pairs if each is not None]
        varying = [which for _, which in given] if self.varying else []
        with native_calls.teaching([each for each, _ in given], self.owned, varying) as lesson:
            found = self._gradients(kept, weak, wanted, slopes)
        if lesson is None:
            self._seen[facts] -= 1
            return found
        try:
            plan = self._plan_of(lesson, found)
        except Unplanned as reason:
            native_calls.reasons[f"{self.name}, backward"] = str(reason)
            self._seen[facts] = native_calls.HOPELESS
        else:
            if native_calls.module.keep_backward(self.recording, facts, plan):
                self._seen.clear()
        return found

    def _plan_of(self, lesson: Lesson, found: list[Tensor | None]) -> Any:
        places = Places(lesson)
        if any(each is not None and each.requires_grad for each in found) or lesson.records:
            raise Unplanned("autograd records the backward itself")
        return plan_of(lesson, places, [places.of_gradient(each) for each in found], "[")

    def _gradients(
        self, kept: list[Tensor], weak: list[Tensor | None], wanted: list[bool], slopes: list[Tensor | None]
    ) -> list[Tensor | None]:
        flags = iter(wanted)
        of_arguments: list[Any] = []
        for count, is_list in zip(self._counts, self._lists, strict=True):
            each = [next(flags) for _ in range(count)]
            of_arguments.append(each if is_list else any(each))
        found = iter(self._again(kept, weak, of_arguments, slopes))
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


def recording_of(
    name: str, lesson: Lesson, places: Places, found: list[Any], results: list[Result]
) -> tuple[dict[str, Any], Backward]:
    """Describe how autograd records the call in C++, and create the call's `Backward`.

    Args:
        name: name of the function.
        found: the function's results.
        results: the location of each result in memory.

    Raises:
        Unplanned: the call cannot be planned.
    """
    if len(lesson.records) != 1:
        raise Unplanned(f"autograd records {len(lesson.records)} operators of Rooftop instead of one")
    record, count = lesson.records[0], len(lesson.given)
    of_operator = [places.of(each) for each in record.results]
    watched = [i for i, each in enumerate(found) if each is not None and each.requires_grad]
    slopes: list[int] = []
    for each, result in zip(found, results, strict=True):
        if each is None:
            continue
        filled = result.source - count
        mine = of_operator.index(filled) if filled in of_operator else None
        if each.requires_grad != (mine is not None):
            raise Unplanned(
                "a result that requires grad does not come from the operator, or one from the operator is detached"
            )
        if mine is None:
            continue
        if not is_view(record.results[mine], each):
            raise Unplanned("a result is not a view of the operator's whole result")
        slopes.append(mine)
    sources = [each.source for each in results]
    kept, owned = [], set()
    for i, each in enumerate(record.kept):
        about = tuple(each.shape), each.dtype
        if each.numel() == 0 and not each.requires_grad and not lesson.varies:
            kept.append((-1, False, *about))  # backward can use any empty tensor of this shape
            continue
        place = places.of(each)
        if place is None:
            kept.append((places.of_argument(each), False, *about))
            continue
        output = count + place in [sources[i] for i in watched]
        if not output and place in of_operator and not record.once:
            raise Unplanned("backward needs a result that the caller does not get")
        if count + place not in sources:
            owned.add(i)
        kept.append((count + place, output, *about))
    tensors = native_calls.tensors_in(record.arguments)
    edges = [places.of_argument(each) for each in tensors]
    if any(lesson.given[i].requires_grad and not each.requires_grad for i, each in zip(edges, tensors, strict=True)):
        raise Unplanned("the operator takes a detached tensor")
    backward = Backward(name, record, frozenset(owned))
    varying_kept, varying_slopes = _varying_of(lesson, [source for source, *_ in kept], of_operator)
    backward.varying = [*varying_kept, *varying_slopes]
    return {
        "name": record.name,
        "kept": [
            (source, output, ANY if source in lesson.shapes else shape, dtype) for source, output, shape, dtype in kept
        ],
        # -1 for a tensor that only this call used, and which therefore no longer exists
        "weak": [next((i for i, given in enumerate(lesson.given) if given is each), -1) for each in record.weak],
        "edges": edges,
        "edge_sizes": [ANY if place in lesson.shapes else tuple(lesson.given[place].shape) for place in edges],
        "slope_sizes": [
            ANY if which != NONE else tuple(each.shape)
            for each, which in zip(record.results, varying_slopes or [NONE] * len(record.results), strict=True)
        ],
        "varying_kept": varying_kept,
        "varying_slopes": varying_slopes,
        "slopes": slopes,
        "watched": watched,
        "zeros": record.zeros,
        "backward": backward,
    }, backward


def _varying_of(lesson: Lesson, kept: Sequence[int], of_operator: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """Return which size varies (FIRST and so on, or NONE) in each kept tensor (given by its source), and in each
    gradient of a result. Both lists are empty if no size varies in this call.

    Raises:
        Unplanned: a size varies in this call, and an operator of PyTorch allocated one of these tensors; or the call
            allocated one of them, and a size other than its first varies.
    """
    if not lesson.varies:
        return [], []
    count = len(lesson.given)

    def which(source: int) -> int:
        if source < count:
            return lesson.varying[source]
        if source in lesson.fresh:
            raise Unplanned("backward takes memory that an operator of PyTorch made, and sizes vary")
        shape = lesson.shapes.get(source)
        if shape is None:
            return NONE
        if any(type(each) is Count for each in shape[1:]):
            raise Unplanned("backward takes memory in which a size other than the first one varies")
        return FIRST

    return [which(source) for source in kept], [
        NONE if place is None else which(count + place) for place in of_operator
    ]

"""How autograd records a known call in C++, and plans of its backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from rooftop.launch import native_calls
from rooftop.launch.call_plans import Places, Result, Unplanned, is_view, plan_of
from rooftop.launch.lessons import Lesson, Record

BACKWARD_LESSON_AT = 1
"""The backward with the same facts that is observed."""


class Backward:
    """Gradients of a call that autograd recorded in C++, computed in Python; teaches the compiled part.

    It keeps no tensor of the call from which it was made.

    Attributes:
        recording: the compiled part's handle, which does not keep it alive.
        owned: which of the kept tensors nobody else has, so that backward may change them.
    """

    def __init__(self, name: str, record: Record, owned: frozenset[int]) -> None:
        self.name, self._again = name, record.gradients
        # of the operator's arguments: how many tensors each has, and whether it is a list
        self._counts = [len(a) if _is_list(a) else int(isinstance(a, Tensor)) for a in record.arguments]
        self._lists = [_is_list(a) for a in record.arguments]
        self.recording: Any = None
        self.owned = owned
        self._seen: Counter[bytes] = Counter()

    def __call__(
        self,
        facts: bytes,
        kept: list[Tensor],
        weak: list[Tensor | None],
        wanted: list[bool],
        slopes: list[Tensor | None],
    ) -> list[Tensor | None]:
        if not facts or not native_calls.is_due(self._seen, facts, BACKWARD_LESSON_AT):
            return self._gradients(kept, weak, wanted, slopes)
        with native_calls.teaching([each for each in (*kept, *slopes) if each is not None], self.owned) as lesson:
            found = self._gradients(kept, weak, wanted, slopes)
        if lesson is None:
            self._seen[facts] -= 1
            return found
        try:
            plan = self._plan_of(lesson, found)
        except Unplanned as reason:
            native_calls.reasons[f"{self.name}, backward"] = str(reason)
        else:
            if native_calls.module.keep_backward(self.recording, facts, plan):
                self._seen.clear()
        return found

    def _plan_of(self, lesson: Lesson, found: list[Tensor | None]) -> Any:
        places = Places(lesson)
        if any(each is not None and each.requires_grad for each in found) or lesson.records:
            raise Unplanned("its gradients have gradients")
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
    """How autograd records the call in C++.

    Args:
        name: of the function.
        found: its results.
        results: where they are.

    Raises:
        Unplanned: Python has to make such calls.
    """
    if len(lesson.records) != 1:
        raise Unplanned(f"autograd records {len(lesson.records)} operators of Rooftop")
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
            raise Unplanned("a result with a gradient is none of the operator's, or is detached")
        if mine is None:
            continue
        if not is_view(record.results[mine], each):
            raise Unplanned("a result is not a view of the operator's whole result")
        slopes.append(mine)
    sources = [each.source for each in results]
    kept, owned = [], set()
    for i, each in enumerate(record.kept):
        about = tuple(each.shape), each.dtype
        if each.numel() == 0 and not each.requires_grad:
            kept.append((-1, False, *about))  # any empty tensor is like it
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
    return {
        "name": record.name,
        "kept": kept,
        # a tensor that only the call had, is gone
        "weak": [next((i for i, given in enumerate(lesson.given) if given is each), -1) for each in record.weak],
        "edges": edges,
        "edge_sizes": [tuple(lesson.given[place].shape) for place in edges],
        "slope_sizes": [tuple(each.shape) for each in record.results],
        "slopes": slopes,
        "watched": watched,
        "zeros": record.zeros,
        "backward": backward,
    }, backward

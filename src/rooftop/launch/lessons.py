"""What one call of a public function does, from its tensors to its results: allocations, launches of Triton kernels,
and PyTorch's own operators, in order.

`call_plans.py` makes plans of lessons, for the next calls with the same facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.launch import known_calls
from rooftop.launch.known_calls import Memory, Observer, Step, Zeros, observing

_UNKNOWN_RESULTS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators whose results may have other shapes, or end in Python."""


class Operator(NamedTuple):
    """How a lesson runs an operator of Rooftop.

    Attributes:
        run: from its arguments to its results.
        settings: from its arguments to what else its decisions depend on; None: on nothing.
        changes: indices of the arguments that it changes.
    """

    run: Callable[..., Any]
    settings: Callable[[Sequence[Any]], Any] | None
    changes: tuple[int, ...] = ()


operators: dict[Any, Operator] = {}
"""Those whose decisions depend on facts alone, by overload."""


class Fresh(NamedTuple):
    """Memory that an operator of PyTorch allocates for its result."""


class Part(NamedTuple):
    """A tensor among the arguments of a `Called`: where it is in its source.

    Attributes:
        source: index among the tensors of the call and, after them, what was allocated.
        offset: elements from the source's beginning.
    """

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Called(NamedTuple):
    """A call of PyTorch's own operator.

    Attributes:
        arguments: by the names of its schema; a tensor is a `Part`.
        made: for each result its source, which is `Fresh`, or an argument that the operator changed; -1: no tensor.
    """

    func: Any
    arguments: dict[str, Any]
    made: tuple[int, ...]


class Record(NamedTuple):
    """How autograd records an operator.

    Attributes:
        arguments: of the operator.
        results: those that have gradients.
        kept: tensors that backward needs.
        weak: tensors that backward uses if they still live unchanged.
        gradients: from (kept, weak, wanted of each argument, slopes) to gradients of the arguments; trailing ones may
            be missing.
        zeros: whether a missing slope counts as zeros.
        once: whether the gradients have no derivative.
    """

    name: str
    arguments: Sequence[Any]
    results: list[Tensor]
    kept: tuple[Tensor, ...]
    weak: tuple[Tensor | None, ...]
    gradients: Callable[[Sequence[Tensor], Sequence[Tensor | None], list[Any], Sequence[Tensor | None]], Sequence[Any]]
    zeros: bool
    once: bool


class Lesson(Observer):
    """Observes a call.

    Attributes:
        given: its tensors; all that are not empty have memory of their own.
        owned: indices of those that operators may change.
        read: the sources that operators of PyTorch take.
        records: what autograd records.
    """

    def __init__(self, given: list[Tensor], owned: frozenset[int] = frozenset()) -> None:
        super().__init__(given)
        self.given, self.owned = given, owned
        self.records: list[Record] = []
        self.read: set[int] = set()
        self.fresh: set[int] = set()  # sources that operators of PyTorch allocated
        self.source_of = {self.key(each): i for i, each in enumerate(given) if each.numel()}
        if len(self.source_of) < sum(each.numel() > 0 for each in given):
            self.refuse("its tensors share memory")
        elif not self.source_of:
            self.refuse("its tensors have no memory")

    key: Callable[[Tensor], int] = staticmethod(lambda tensor: tensor.untyped_storage().data_ptr())

    def refuse(self, why: str) -> None:
        """Have such calls made in Python."""
        self.why = self.why or why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "rooftop" or self.paused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        operator = operators.get(func)
        if operator is None or kwargs or (operator.settings is not None and operator.settings(args) is not None):
            self.refuse(f"the decisions of {func._opname} depend on more than facts")
            return func(*args, **(kwargs or {}))
        if any(self.source(args[i]) not in self.owned for i in operator.changes):
            self.refuse(f"{func._opname} changes a tensor of the caller")
        with self:
            return operator.run(*args)

    def called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> None:
        """Note a call of an operator of PyTorch."""
        schema = func._schema
        named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        if func.namespace != "aten" or not schema.returns or _UNKNOWN_RESULTS.intersection(func.tags):
            self.refuse(str(func))
            return
        if torch.Tag.nondeterministic_seeded in func.tags and named.get("dropout_p") not in (0, 0.0):
            self.refuse(str(func))
            return
        arguments = {name: self._part(value) for name, value in named.items()}
        results = made if isinstance(made, tuple | list) else (made,)
        only_numbers = not any(
            isinstance(each, Tensor) for each in results
        )  # Python decides by them, as by `is_nonzero`
        if only_numbers or len(results) != len(schema.returns):
            self.refuse(str(func))
            return
        places = []
        for each in results:
            if not isinstance(each, Tensor) or each.numel() == 0:
                places.append(-1)
                continue
            if self.key(each) not in self.source_of:
                self.fresh.add(len(self.sources))
                self._is_source(each)
            places.append(self.source_of.get(self.key(each), -1))
        self.launched.append(Called(func, arguments, tuple(places)))

    def _part(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._part(each) for each in value]
        if not isinstance(value, Tensor):
            return value
        if value.numel() == 0 and type(value) is Tensor and value.device == self.device:
            return value  # nothing is read from it, so that it can be given again
        source = self.source(value)
        if source is None or value.layout != torch.strided or value.dtype != self.sources[source].dtype:
            self.refuse("an operator of PyTorch takes other memory")
            return None
        self.read.add(source)
        offset = (value.data_ptr() - self.sources[source].data_ptr()) // value.itemsize
        return Part(source, tuple(value.shape), value.stride(), offset)

    def source(self, tensor: Tensor) -> int | None:
        """The source whose memory a tensor has."""
        return self.source_of.get(self.key(tensor)) if tensor.numel() else None

    def memory(self) -> list[Memory | Zeros | Fresh]:
        """What was allocated: the sources after the given tensors."""
        count = len(self.given)
        return [
            Zeros(self.zeros_of[i])
            if i in self.zeros_of
            else Fresh()
            if i in self.fresh
            else Memory(tuple(each.shape), each.stride(), each.dtype, None)
            for i, each in enumerate(self.sources[count:], count)
        ]

    def is_used(self, source: int) -> bool:
        """Whether a launch has a pointer to it, or an operator of PyTorch made or changed it. A result without either
        was computed by what nobody observed, and other memory without either has no values."""
        for step in self.launched:
            if isinstance(step, Called) and source in step.made:
                return True
            if isinstance(step, Step) and any(pointer.source == source for pointer in step.pointers):
                return True
        return False


@contextmanager
def lesson_of(given: list[Tensor], owned: frozenset[int] = frozenset()) -> Iterator[Lesson | None]:
    """Observe what this thread does in the block with these tensors; None if another thread is observed."""
    with observing(Lesson(given, owned)) as lesson:
        if lesson is None:
            yield None
            return
        assert isinstance(lesson, Lesson)
        known_calls.lesson = lesson
        try:
            yield lesson
        finally:
            known_calls.lesson = None

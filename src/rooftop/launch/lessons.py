"""Observe one call of a public function or an operator. A lesson, the record of the call, lists the allocations, the
launches of kernels, and the calls of PyTorch's own operators, in order.

`call_plans.py` makes a plan from a lesson. With the plan, C++ code can repeat the call for arguments with the same
facts (shapes, strides, dtypes and so on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.launch import known_calls
from rooftop.launch.known_calls import Memory, Observer, Step, Zeros, observing
from rooftop.launch.row_counts import VARIABLE, Code, Condition, Count, code_of, codes_of

_UNKNOWN_RESULTS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators whose results are Python values, or have shapes that depend on the contents of tensors."""


class Operator(NamedTuple):
    """How an operator of Rooftop is run while a call is observed.

    Attributes:
        run: computes the results from the arguments.
        changes: indices of the arguments that the operator changes.
    """

    run: Callable[..., Any]
    changes: tuple[int, ...] = ()


MORE_THAN_FACTS = "the decisions of {} depend on more than shapes, strides, dtypes and other facts"
operators: dict[Any, Operator] = {}
"""The operators whose decisions depend only on shapes, strides, dtypes and so on (facts). The keys are overloads of
`torch.ops`.
"""


class Fresh(NamedTuple):
    """Memory that an operator of PyTorch allocates for its result."""


class Part(NamedTuple):
    """A tensor argument of a `Called`, described as a view of a source. A source is a tensor that was passed to the
    observed call, or an allocation that the call made.

    Attributes:
        source: index into the list of the passed tensors, followed by the allocations.
        offset: elements from the beginning of the source.
    """

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Called(NamedTuple):
    """One call of an operator of PyTorch.

    Attributes:
        func: the operator, as an overload of `torch.ops`.
        arguments: the arguments, by their names in the operator's schema; a tensor is a `Part`.
        made: for each result, the index of the result's source (`Fresh` memory, or an argument that the operator
            changed), or -1 if the result is not a tensor.
    """

    func: Any
    arguments: dict[str, Any]
    made: tuple[int, ...]


class Record(NamedTuple):
    """How autograd records one call of an operator of Rooftop.

    Attributes:
        name: name of the operator.
        arguments: the arguments of the call.
        results: those of the call's results that have gradients.
        kept: tensors that the operator's backward needs.
        weak: tensors that the operator's backward uses if they still exist and were not changed.
        gradients: a function from (kept, weak, wanted, slopes) to gradients of the arguments. `wanted`: whether each
            argument needs a gradient. `slopes`: gradients of the results. The returned list may omit trailing
            gradients.
        zeros: whether backward gets zeros for a result whose gradient is missing.
        once: True if the gradients cannot be differentiated again.
    """

    name: str
    arguments: Sequence[Any]
    results: list[Tensor]
    kept: tuple[Tensor, ...]
    weak: tuple[Tensor | None, ...]
    gradients: Callable[[Sequence[Tensor], Sequence[Tensor | None], list[Any], Sequence[Tensor | None]], Sequence[Any]]
    zeros: bool
    once: bool


FIRST, LAST, ITSELF, NONE = 0, 1, 2, -1
"""What varies in an argument from call to call: the first size of a tensor, the last size of a tensor, an integer
argument itself, or nothing.
"""
ANY = (-1,)
"""A placeholder for the shape of a tensor whose sizes vary from call to call."""


class Varied(NamedTuple):
    """How the integers of a launch are computed from the sizes that vary from call to call.

    Attributes:
        grid: a formula for each dimension of the launch's grid.
        numbers: formulas of the kernel's integer arguments, by the argument's index.
    """

    grid: list[Code]
    numbers: dict[int, Code]


class Lesson(Observer):
    """Observes one call of a public function or an operator, and records the work of the call.

    Attributes:
        given: the call's tensor arguments. If two of them share memory, the call is refused.
        owned: indices of the tensors in `given` that operators may change.
        varying: for each tensor in `given`, which of its sizes varies: FIRST, LAST or NONE. An empty list means that no
            size varies.
        shapes: shapes of the sources (given tensors and allocations) whose sizes vary, by the source's index. The
            varying sizes are `Count`s.
        varied: how the grid and the integer arguments of a launch are computed, by the launch's index in `launched`.
        conditions: conditions on varying sizes under which a call makes the same decisions as the observed call.
        read: indices of the sources (given tensors and allocations) that PyTorch's operators read.
        records: a `Record` for each operator that autograd records.
    """

    def __init__(
        self, given: Sequence[Tensor | int], owned: frozenset[int] = frozenset(), varying: Sequence[int] = ()
    ) -> None:
        tensors = [each for each in given if isinstance(each, Tensor)]
        super().__init__(tensors)
        self.given, self.owned = tensors, owned
        self.varying = [which for each, which in zip(given, varying, strict=False) if isinstance(each, Tensor)]
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.varied: dict[int, Varied] = {}
        self.conditions: list[Condition] = []
        self.values: list[int] = []  # the value of each variable in the observed call
        if varying:
            self._name_sizes(given, varying)
        self.records: list[Record] = []
        self.read: set[int] = set()
        self.fresh: set[int] = set()  # sources that PyTorch's operators allocated
        self.source_of = {self.key(each): i for i, each in enumerate(tensors) if each.numel()}
        if len(self.source_of) < sum(each.numel() > 0 for each in tensors):
            self.refuse("tensors of the call share memory")
        elif not self.source_of:
            self.refuse("no tensor of the call has memory")

    key: Callable[[Tensor], int] = staticmethod(lambda tensor: tensor.untyped_storage().data_ptr())

    def _name_sizes(self, given: Sequence[Tensor | int], varying: Sequence[int]) -> None:
        """Assign a variable to each size of a tensor, or integer argument, that may vary from call to call (`varying`).
        Sizes that are equal in this call share a variable, as in `cpp/facts.h`, because C++ repeats the call.
        """
        source = 0
        for each, which in zip(given, varying, strict=True):
            if isinstance(each, Tensor):
                if which in (FIRST, LAST):
                    shape: list[int] = list(each.shape)
                    place = 0 if which == FIRST else each.dim() - 1
                    shape[place] = self._variable(shape[place])
                    self.shapes[source] = tuple(shape)
                source += 1
            elif which == ITSELF:
                self._variable(each)

    def _variable(self, value: int) -> Count:
        if value not in self.values:
            self.values.append(value)
        return Count.of(value, (VARIABLE, self.values.index(value)), self.conditions)

    @property
    def varies(self) -> bool:
        """Whether the plan is also for calls whose sizes differ from those of the observed call."""
        return bool(self.values)

    def size(self, tensor: Tensor, dim: int) -> int:
        """The size of dimension `dim` of a tensor, as a `Count` if the size varies from call to call."""
        if not self.varies:
            return tensor.shape[dim]
        source = self.source(tensor)
        if source is None or source in self.fresh:
            self.refuse("a size belongs to memory of unknown origin")
        elif (shape := self.shapes.get(source)) is not None:
            if self._is_whole_source(tensor, source):
                return shape[dim]
            self.refuse("a size belongs to a part of a tensor")
        return tensor.shape[dim]

    def number(self, number: int) -> int:
        """Convert an integer argument of the observed function. The result is a `Count`, an integer with its formula,
        if the argument may change from call to call.
        """
        return self._variable(number) if number in self.values else number

    def has_shape(self, made: Tensor, shape: Sequence[int]) -> None:
        """Record the shape of the new tensor `made` if one of its sizes varies from call to call."""
        source = self.source(made)
        if source is not None and any(type(each) is Count for each in shape):
            self.shapes[source] = tuple(shape)

    def _is_whole_source(self, tensor: Tensor, source: int) -> bool:
        whole = self.sources[source]
        return tensor.shape == whole.shape and tensor.stride() == whole.stride()

    def launch(
        self, start: Callable[..., Any], kernel: Any, grid: tuple[int, ...], device: torch.device, args: Sequence[Any],
        parameters: dict[str, Any],
    ) -> None:  # fmt: skip
        """Launch a kernel by calling `start`, and record the launch.

        If sizes vary from call to call, also record how the launch's grid and its integer arguments are computed from
        the sizes (see `Varied`).
        """
        counts = {place: each for place, each in enumerate(args) if type(each) is Count}
        if self.varies and get_ident() == self.thread:
            about = getattr(kernel, "params", None)  # interpreted kernels have none
            for place, each in counts.items():
                if each >= 1 << 31:
                    self.refuse("a launch with a size of 64 bits")
                if about is not None and about[place].do_not_specialize:
                    continue
                if each != 1:  # Triton specializes on 1 and on divisibility by 16
                    each.is_by_16()
        plain = [int(each) if type(each) is Count else each for each in args]
        before = len(self.launched)
        super().launch(start, kernel, tuple(int(each) for each in grid), device, plain, parameters)
        if self.varies and len(self.launched) > before:
            self.varied[before] = Varied(codes_of(grid), {place: code_of(each) for place, each in counts.items()})

    def was_launched(self, made: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """Record a launch of a CUDA C++ kernel that was just made with the arguments `args`."""
        if self.varies and get_ident() == self.thread:
            self.refuse(f"{made.name}, a kernel in CUDA C++, is launched for sizes that vary from call to call")
        super().was_launched(made, grid, args)

    def refuse(self, why: str) -> None:
        """Record the reason why no plan can be made of the observed call. Python then makes all calls with the same
        facts."""
        self.why = self.why or why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "rooftop" or self.paused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        operator = operators.get(func)
        if operator is None or kwargs:
            self.refuse(MORE_THAN_FACTS.format(func._opname))
            return func(*args, **(kwargs or {}))
        if any(self.source(args[i]) not in self.owned for i in operator.changes):
            self.refuse(f"{func._opname} changes a tensor of the caller")
        with self:
            return operator.run(*args)

    def called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> None:
        """Record a call of one of PyTorch's operators."""
        schema = func._schema
        named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        if func.namespace != "aten" or not schema.returns or _UNKNOWN_RESULTS.intersection(func.tags):
            self.refuse(str(func))
            return
        if torch.Tag.nondeterministic_seeded in func.tags:
            # PyTorch does not pass arguments whose value is the default
            default = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
            if (default | named).get("dropout_p") != 0:
                self.refuse(str(func))
                return
        arguments = {name: self._part(value) for name, value in named.items()}
        results = made if isinstance(made, tuple | list) else (made,)
        only_numbers = not any(
            isinstance(each, Tensor) for each in results
        )  # Python may branch on such results, for example of `is_nonzero`
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
        if value.numel() == 0 and type(value) is Tensor and value.device == self.device and not self.varies:
            return value  # an empty tensor has no contents, so later calls can pass the same empty tensor
        source = self.source(value)
        if source is None or value.layout != torch.strided or value.dtype != self.sources[source].dtype:
            self.refuse("an operator of PyTorch takes memory of unknown origin")
            return None
        self.read.add(source)
        if source in self.shapes:
            if not self._is_whole_source(value, source):
                self.refuse("an operator of PyTorch takes a part of a tensor whose size varies")
            return Part(source, ANY, ANY, 0)
        if source in self.fresh and self.varies:
            if not self._is_whole_source(value, source):
                self.refuse("an operator of PyTorch takes a part of another operator's result")
            return Part(source, ANY, ANY, 0)
        offset = (value.data_ptr() - self.sources[source].data_ptr()) // value.itemsize
        return Part(source, tuple(value.shape), value.stride(), offset)

    def source(self, tensor: Tensor) -> int | None:
        """The index of the source (a tensor or allocation of the call) whose memory `tensor` uses; None if there is
        none.
        """
        return self.source_of.get(self.key(tensor)) if tensor.numel() else None

    def memory(self) -> list[Memory | Zeros | Fresh]:
        """The allocations that the observed call made, in order. In the list `sources`, they follow the given
        tensors."""
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
        """Whether the observed call may have written to this source, a tensor or allocation of the call: a kernel
        launch has a pointer to it, or an operator of PyTorch made or changed it.
        """
        for step in self.launched:
            if isinstance(step, Called) and source in step.made:
                return True
            if isinstance(step, Step) and any(pointer.source == source for pointer in step.pointers):
                return True
        return False


@contextmanager
def lesson_of(
    given: Sequence[Tensor | int], owned: frozenset[int] = frozenset(), varying: Sequence[int] = ()
) -> Iterator[Lesson | None]:
    """Observe the operators that this thread runs and the kernels that it launches within the `with` block, which makes
    one call of a function. Yield the `Lesson`, or None if another thread is being observed.

    Args:
        given: the tensors among the call's arguments, and the numbers among them that vary from call to call.
        owned: indices of the tensors in `given` that operators may change.
        varying: for each of `given`, which of its sizes varies: FIRST, LAST or NONE; ITSELF for a number that varies.
            An empty list means that no size varies.
    """
    with observing(Lesson(given, owned, varying)) as lesson:
        if lesson is None:
            yield None
            return
        assert isinstance(lesson, Lesson)
        known_calls.lesson = lesson
        try:
            yield lesson
        finally:
            known_calls.lesson = None

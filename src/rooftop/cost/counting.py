"""The counting mode records every operator that a program executes, with its cost.

    with CountingMode() as counted:
        model(x)
    print(sum(r.cost.total_flops for r in counted.records if r.cost))

The mode is below autograd, so it sees the backward pass and the optimizer as well as the forward pass. The mode also
works on fake tensors, because counting needs no computation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.fx.experimental import proxy_tensor

from rooftop.cost.accounting import PRECISIONS, Call, Cost, counted_device_type, distinct_bytes, tensors_in
from rooftop.cost.lookup import formula_for, later_cost
from rooftop.hardware.interruptions import pass_on
from rooftop.hardware.observing import ObservingMode
from rooftop.hardware.source_lines import current_user_line
from rooftop.words import in_a_line

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape, dtype and layout of a tensor, without its data.

    Attributes:
        channels_last: whether the tensor is a batch of images, or convolution weights, in channels last format.
        memory: an identifier of the tensor's storage. Views of one tensor have the same identifier. After a tensor is
            released, a new tensor may get its identifier. 0 for a nested or sparse tensor and for an opaque layout.
            Comparisons of specs ignore the identifier.
    """

    shape: Shape
    dtype: torch.dtype
    channels_last: bool = False
    memory: int = field(default=0, compare=False)

    @property
    def bytes(self) -> int:
        """The size of a contiguous tensor with this shape and dtype."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CallSpec:
    """A call that can be repeated on other tensors of the same shapes: the operator and its arguments, with a
    `TensorSpec` in place of each tensor."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The schema name, e.g. "aten::convolution"."""
        name: str = self.func._schema.name
        return name

    def __getitem__(self, argument: str) -> Any:
        """The argument with that name, or its default if the call omitted it."""
        for position, declared in enumerate(self.func._schema.arguments):
            if declared.name == argument:
                given = self.args[position] if position < len(self.args) else declared.default_value
                return dict(self.kwargs).get(argument, given)
        raise KeyError(f"{self.name} has no argument {argument}")

    def __contains__(self, argument: str) -> bool:
        """Whether the operator has an argument with that name."""
        return any(declared.name == argument for declared in self.func._schema.arguments)


@dataclass(frozen=True, slots=True)
class Record:
    """One executed operator.

    Attributes:
        name: schema name, e.g. "aten::convolution".
        shapes: shape of each input tensor, in order; () for a nested tensor, which has no shape.
        dtype: dtype of the first floating-point or complex input, e.g. "bfloat16". If there is no such input, dtype of
            the first input. For an operator without inputs, the same rule applies to its outputs.
        device: the device on which the operator ran, e.g. "cuda:0".
        scope: the module that called the operator (see `rooftop.analysis`); "" outside all modules.
        phase: "forward", "backward" or "optimizer".
        cost: None if the operator is uncovered.
        uncovered: why there is no cost; "" if there is a cost.
        place: the line of the program ("train.py:12") that called the operator, if the host waits for the operator's
            result from a GPU, or the operator copies between host and GPU. "" for other operators, and if no line of
            the program is running (backward).
        spec: the call in repeatable form, for PyTorch's own operators.
        inputs, outputs: the operator's tensors, in order; empty for an operator of the optimizer, and for one that only
            the profiler recorded.
        title: name in reports if the schema name is ambiguous (see `title_of`).
    """

    name: str
    shapes: tuple[Shape, ...]
    dtype: str
    device: str
    scope: str
    phase: str
    cost: Cost | None
    uncovered: str = ""
    place: str = ""
    spec: CallSpec | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    title: str = ""

    @property
    def shown_name(self) -> str:
        """The name in reports, e.g. "aten::mm", "aten::conv_transpose2d"."""
        return self.title or self.name


class CountingMode(ObservingMode):
    """Record each operator executed inside the `with` block.

    Compiled functions run uncompiled (see `ObservingMode`). For control flow (`torch.cond`, `while_loop`, `map`,
    `scan`), the mode records the operators that run inside it.

    Args:
        locate: called at each operator, returns its (scope, phase).
        around: called with the record's index in `records`, returns a context manager around the operator, such as a
            label of the profiler.
        limit: after this many records, operators run unrecorded, and `full_at` has the time at which the limit was
            reached (`time.perf_counter`).
    """

    def __init__(
        self,
        locate: Callable[[], tuple[str, str]] = lambda: ("", "forward"),
        around: Callable[[int], AbstractContextManager[Any]] = lambda index: nullcontext(),
        limit: int = sys.maxsize,
    ) -> None:
        super().__init__()
        self._records: list[Record] = []
        self._later: dict[int, Callable[[], Cost]] = {}  # index of a record -> function that computes its cost later
        self._locate = locate
        self._around = around
        self._limit = limit
        self.full_at: float | None = None

    @property
    def records(self) -> list[Record]:
        """One record for each operator that the mode has seen, in the order of execution."""
        for index, cost in self._later.items():
            try:
                self._records[index] = replace(self._records[index], cost=cost(), uncovered="")
            except Exception as error:  # a formula must never end the user's program
                pass_on(error)
                self._records[index] = replace(self._records[index], uncovered=_failed(error))
        self._later.clear()
        return self._records

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper (DTensor, a nested tensor) handles the call first and calls operators on the tensors inside it.
            # Those operators count.
            return NotImplemented
        if func.namespace in _NO_PART_OF_THE_PROGRAM or _is_traced():
            return func(*args, **kwargs)
        if (
            _has_decomposition(func)
            and not _has_kernel(func, counted_device_type() or _device_type((args, kwargs)))
            # nested tensors have their own kernels
            and not any(tensor.is_nested for tensor in tensors_in((args, kwargs)))
        ):
            # Under inference_mode composite operators (linear, conv2d) arrive undecomposed: decompose them as autograd
            # does.
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        index = len(self._records)
        if index >= self._limit:
            self.full_at = self.full_at or time.perf_counter()
            return func(*args, **kwargs)
        scope, phase = self._locate()
        with self._around(index):
            out = func(*args, **kwargs)
        try:
            record = _record(func, args, kwargs, out, scope, phase)
            if isinstance(func, HigherOrderOperator) and (cost := later_cost(func, args, out)) is not None:
                self._later[index] = cost
        except Exception as error:  # tensors of an unknown kind must not end the program
            pass_on(error)
            why = f"its tensors cannot be read: {in_a_line(error)}"
            record = Record(str(func), (), "", "", scope, phase, None, why)
        self._records.append(record)
        return out


_NO_PART_OF_THE_PROGRAM = {"prim", "profiler"}
"""Namespaces of operators that are never recorded: `prim` reads devices of fake tensors, `profiler` sets labels."""


def _is_traced() -> bool:
    """Whether operators are being recorded into a graph. If so, nothing is counted: torch.jit.trace would record that
    the mode reads sizes, and operators that `make_fx` runs to differentiate control flow are no part of the step.
    """
    return torch._C._get_tracing_state() is not None or proxy_tensor._CURRENT_MAKE_FX_TRACER is not None


@cache
def _has_decomposition(func: Any) -> bool:
    """Whether PyTorch defines the operator by other operators. False for TorchScript's operators (prim::device), for
    which PyTorch cannot tell.
    """
    if isinstance(func, HigherOrderOperator) or not torch._C._dispatch_has_kernel(func.name()):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


_WHOLE_ON_CUDA = {"aten::_fused_rms_norm"}
"""Composite operators that have a CUDA kernel in PyTorch. A CPU build does not list these kernels."""


@cache
def _has_kernel(func: Any, device_type: str) -> bool:
    if device_type == "cuda" and func._schema.name in _WHOLE_ON_CUDA:
        return True
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _device_type(arguments: Any) -> str:
    return next((tensor.device.type for tensor in tensors_in(arguments)), "cpu")


def _record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, scope: str, phase: str) -> Record:
    if isinstance(func, HigherOrderOperator):  # it has no schema; see `later_cost`
        name, inputs = f"higher_order::{func.name()}", list(tensors_in((args, kwargs)))
        cost, uncovered, title = None, "no formula", ""
    else:
        call = Call(func, args, kwargs, out)
        name, inputs = func._schema.name, call.read_tensors
        cost, uncovered = counted(call)
        title = title_of(call)
    tensors = inputs or list(tensors_in(out))
    flowing = phase != "optimizer"
    specs: dict[int, TensorSpec] = {}
    leading = leading_of(tensors)
    return Record(
        name=name,
        shapes=tuple(() if t.is_nested else tuple(t.shape) for t in inputs),
        dtype=dtype_name(leading),
        device=str(leading.device) if leading is not None else "",
        scope=scope,
        phase=phase,
        cost=cost,
        uncovered=uncovered,
        place=_place(name, tensors, out),
        spec=_spec(func, args, kwargs, specs) if name.startswith("aten::") else None,
        inputs=tuple([_tensor_spec(t, specs) for t in inputs]) if flowing else (),
        outputs=tuple([_tensor_spec(t, specs) for t in tensors_in(out)]) if flowing else (),
        title=title,
    )


def leading_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first floating-point or complex tensor; the first tensor if there is none; None without tensors."""
    return next((t for t in tensors if t.is_floating_point() or t.is_complex()), tensors[0] if tensors else None)


def dtype_name(tensor: Tensor | None) -> str:
    """The name of a tensor's dtype, such as "bfloat16"; "" for None."""
    return str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""


def title_of(call: Call) -> str:
    """Return the name that reports show instead of the operator's schema name, if the schema name is ambiguous. A
    transposed convolution gets torch.nn.functional's name ("aten::conv_transpose2d"), its backward the same name with
    "_backward". Every other operator gets ""."""
    namespace, _, name = call.func._schema.name.partition("::")
    if (
        namespace != "aten"
        or "convolution" not in name
        or not (name.endswith("transpose") or call.get("transposed", False))
    ):
        return ""
    backward = "_backward" if "backward" in name else ""
    return f"aten::conv_transpose{call['weight'].dim() - 2}d{backward}"


def _spec(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: dict[int, TensorSpec]) -> CallSpec:
    return CallSpec(
        func, _without_data(args, specs), tuple((name, _without_data(v, specs)) for name, v in kwargs.items())
    )


def _without_data(value: Any, specs: dict[int, TensorSpec]) -> Any:
    """Copy nested values, with a spec in place of each tensor and a tuple in place of each list. The copy keeps no
    tensor's memory alive.
    """
    if isinstance(value, Tensor):
        return _tensor_spec(value, specs)
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage, torch.ScriptObject)):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        return tuple([_without_data(item, specs) for item in value])
    return value


def _tensor_spec(tensor: Tensor, known: dict[int, TensorSpec]) -> TensorSpec:
    """The spec of a tensor. `known` holds the specs already made for this record, by tensor id, because most tensors
    occur in the record's `spec` and again in its `inputs`."""
    spec = known.get(id(tensor))
    if spec is None:
        known[id(tensor)] = spec = _described(tensor)
    return spec


def _described(tensor: Tensor) -> TensorSpec:
    if tensor.is_nested or tensor.layout != torch.strided:
        return TensorSpec((), tensor.dtype)
    channels_last = (
        tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return TensorSpec(tuple(tensor.shape), tensor.dtype, channels_last, tensor.untyped_storage()._cdata)


_ANSWERED_ON_THE_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
"""Operators whose result the host must know before it can continue."""
_COPIES = {"aten::copy_", "aten::_to_copy"}


def _place(name: str, tensors: Sequence[Tensor], out: Any) -> str:
    """The line of the program that calls an operator, if the operator synchronizes, or copies between host and GPU. ""
    for any other operator.
    """
    waits = name in _ANSWERED_ON_THE_HOST and any(t.is_cuda for t in tensors)
    if not waits and name in _COPIES:
        waits = len({t.is_cuda for t in (*tensors, *tensors_in(out))}) > 1
    line = current_user_line() if waits else None
    return str(line) if line is not None else ""


def counted(call: Call) -> tuple[Cost | None, str]:
    """The cost of a call by its formula. Bytes that an in-place call both reads and writes are marked as shared
    (`Cost.shared_bytes`). If there is no cost: None and the reason."""
    formula = formula_for(call.func)
    if formula is None:
        return None, "no formula"
    try:
        cost = Cost(0, 0, {}) if _has_no_work(call) else formula(call)
        _require_figures(cost)
        return (_in_place(cost, call) if call.func._schema.is_mutable else cost), ""
    except Exception as error:  # an error must not end the user's program; the report lists the operator as uncovered
        pass_on(error)
        return None, _failed(error)


_OWN_SHAPES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators that read their operands to learn the shapes of their results, such as `nonzero`."""


def _has_no_work(call: Call) -> bool:
    """Whether all results of a call are empty tensors, so that no operand must be read. An expert to which a mixture of
    experts sends no token does not read its weights."""
    if call.func.namespace not in ("aten", "rooftop") or not _OWN_SHAPES.isdisjoint(call.func.tags):
        return False
    results = list(tensors_in(call.results))
    return bool(results) and all(result.numel() == 0 for result in results)


def _failed(error: Exception) -> str:
    return f"formula failed: {in_a_line(error)}"


def _require_figures(cost: Cost) -> None:
    """Check the bytes and flops of a cost. A custom operator's formula may return anything, and one wrong number would
    spoil the whole report.

    Raises:
        ValueError: bytes or flops are not integers, or a precision is unknown.
    """
    figures = (cost.read_bytes, cost.write_bytes, cost.shared_bytes, *cost.flops.values())
    if not all(isinstance(figure, int) and figure >= 0 for figure in figures):
        raise ValueError(f"expected bytes and flops as integers of 0 or more, got {cost}")
    if not set(cost.flops) <= set(PRECISIONS):
        raise ValueError(f"expected flops in {', '.join(PRECISIONS)}, got {', '.join(map(str, cost.flops))}")


def _in_place(cost: Cost, call: Call) -> Cost:
    """The cost, with `shared_bytes` set to the bytes that the call both reads and writes."""
    touched = distinct_bytes([*call.read_tensors, *call.written_tensors])
    return replace(cost, shared_bytes=max(0, cost.bytes - touched))

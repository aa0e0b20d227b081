"""Turn an operator that the profiler recorded into a `Call` that cost formulas understand.

A dispatch mode cannot watch compiled code: while a mode is active, compiled code does not run. But the profiler records
each operator that the compiled code calls: the shapes, strides and types of its tensors, and its other arguments as
text. With these, Rooftop repeats the call on meta tensors, which hold no data, to count its cost.

For a list of tensors (`cat`, `_foreach_add_`, fused optimizers), an event has only the shapes. The profiler's tree of
events also has the types of these tensors, and shows which entries are the same tensor (see `listed_tensors`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.cost.accounting import Call
from rooftop.cost.lookup import formula_for
from rooftop.hardware.interruptions import pass_on

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "long": torch.int64,
    "long int": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
}
"""dtypes by the profiler's names."""


class RecordedTensor(NamedTuple):
    """A tensor that was an argument of an operator. Equal numbers mean the same tensor."""

    dtype: torch.dtype
    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


Recorded = tuple[RecordedTensor, ...]
"""The tensors of one argument: a list's, or one tensor."""
RecordedTensors = Mapping[int, Sequence[Recorded | None]]
"""Maps the correlation id of an event to one value per argument: its tensors, or None if it has none."""


def recorded_tensors(results: Any) -> RecordedTensors:
    """The tensors that operators received, for every event that does not describe them itself: those with lists of
    tensors, and with PyTorch 2.11 all events, which lack strides.

    Args:
        results: results of the profiler, recorded with shapes (`kineto_results`).
    """
    wanted = {event.correlation_id() for event in results.events() if not _describes_its_tensors(event)}
    found = {}
    waiting = list(results.experimental_event_tree()) if wanted else []
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children)
        if node.correlation_id in wanted and hasattr(node.extra_fields, "inputs"):
            found[node.correlation_id] = [_recorded(value) for value in node.extra_fields.inputs]
    return found


def _describes_its_tensors(event: Any) -> bool:
    kinds = event.dtypes()
    if not hasattr(event, "structured_input_strides"):
        return not any(kind in DTYPES or kind == "TensorList" for kind in kinds)
    return "TensorList" not in kinds


def _recorded(value: Any) -> Recorded | None:
    tensors = value if isinstance(value, list) else [value] if hasattr(value, "impl_ptr") else None
    if tensors is None:
        return None
    return tuple(RecordedTensor(t.dtype, t.impl_ptr, tuple(t.sizes), tuple(t.strides)) for t in tensors)


class NotReconstructedError(Exception):
    """The recorded event lacks information that is needed to repeat the call."""


def reconstructed(event: Any, known: RecordedTensors = MappingProxyType({})) -> Call:
    """Repeat a call on meta tensors, from the profiler's event that recorded the call and its shapes.

    Args:
        event: an event from the profiler's flat list.
        known: result of `recorded_tensors` for the profile.

    Raises:
        NotReconstructedError: no operator with this name accepts the recorded arguments.
    """
    failures = []
    for func in _overloads(event.name()):
        try:
            args, kwargs = _arguments(event, func, known)
            return Call(func, args, kwargs, _result(func, args, kwargs))
        except Exception as error:  # another overload may fit; if none does, the operator is listed as uncovered
            pass_on(error)
            failures.append(f"{func}: {error}".splitlines()[0])
    raise NotReconstructedError("; ".join(failures) or "no such operator")


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator's result on meta tensors; None if it returns no tensor (`.item()`, optimizer steps)."""
    if func.namespace == "c10d" or not any("Tensor" in str(result.type) for result in func._schema.returns):
        return None  # a c10d collective writes into its arguments
    # the profiler records neither the name of the process group nor that of the reduction; no shape depends on them
    if func.namespace == "_c10d_functional":
        args = tuple("" if value is None else value for value in args)
    placed = {name: value for name, value in _ON_META.items() if name in kwargs}
    with torch.no_grad():
        return func(*args, **{**kwargs, **placed})


_ON_META: dict[str, Any] = {"device": torch.device("meta"), "pin_memory": False}
"""Arguments with which operators that create tensors (`randn`) create their tensors on the meta device, too. On another
device these operators would take memory and advance the program's random generator.
"""


@lru_cache(maxsize=4096)
def has_formula(name: str) -> bool:
    """Whether the operators with this name ("aten::mm") have a cost formula."""
    return any(formula_for(func) is not None for func in _overloads(name))


def _overloads(name: str) -> Sequence[Any]:
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), operator, None) if operator else None
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def _arguments(event: Any, func: Any, known: RecordedTensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator's call, made from the event that recorded it, by the operator's schema. The profiler
    records all arguments, including defaults."""
    schema = func._schema.arguments
    shapes, kinds = _shapes(event), list(event.dtypes())
    strides = _strides(event)
    values = list(event.concrete_inputs() or [])
    recorded = known.get(event.correlation_id(), [])
    same: dict[int, Tensor] = {}
    if len(schema) != len(kinds):
        raise NotReconstructedError(f"{len(kinds)} arguments were recorded, but the operator takes {len(schema)}")
    args, kwargs = [], {}
    for position, argument in enumerate(schema):
        value = _value(
            argument.type,
            kinds[position],
            shapes[position] if position < len(shapes) else [],
            strides[position] if position < len(strides) else [],
            values[position] if position < len(values) else "",
            recorded[position] if position < len(recorded) else None,
            same,
        )
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _value(
    wanted: Any, kind: str, shape: Any, stride: Any, text: Any, recorded: Recorded | None, same: dict[int, Tensor]
) -> Any:
    """Make one argument of an operator's call. Tensors and lists of tensors are made from the recorded shapes and
    dtypes; numbers, flags, None and lists of numbers are read from the recorded text.

    `same` has the tensors that earlier lists of this call contain, by the tensor's number. A tensor in several lists is
    made only once.
    """
    takes_tensor = "Tensor" in str(wanted)
    if kind in DTYPES:
        if not takes_tensor or "List[" in str(wanted):
            raise NotReconstructedError(f"a tensor was recorded, but the operator takes {wanted}")
        return _tensor(shape, stride, DTYPES[kind], recorded)
    if kind == "TensorList":
        if "List[" not in str(wanted) and "[]" not in str(wanted):
            raise NotReconstructedError(f"a list of tensors was recorded, but the operator takes {wanted}")
        if recorded is None:
            raise NotReconstructedError("the tensors in a list were not recorded")
        for tensor in recorded:
            same.setdefault(tensor.number, _meta(tensor.shape, tensor.stride, tensor.dtype))
        return [same[tensor.number] for tensor in recorded]
    if takes_tensor:
        if kind:  # a number where a tensor is expected: another overload takes it
            raise NotReconstructedError(f"{kind} was recorded, but the operator takes {wanted}")
        # an optional tensor may be None; `index` takes a list of optional tensors, which itself is never None
        if not str(wanted).startswith("Optional["):
            raise NotReconstructedError(f"an argument of type {wanted} was not recorded")
        return None
    return _literal(text, kind, str(wanted))


def _tensor(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, recorded: Recorded | None) -> Tensor:
    """A tensor argument: as recorded, or made from the shape and stride of its event."""
    return _meta(recorded[0].shape, recorded[0].stride, dtype) if recorded else _meta(shape, stride, dtype)


def _meta(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    if len(stride) == len(shape):
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _literal(text: Any, kind: str, wanted: str) -> Any:
    # for a list of numbers, the profiler always records the kind "ScalarList", but not always the numbers
    if kind == "ScalarList" and "List" not in wanted:
        raise NotReconstructedError(f"a list of numbers was recorded, but the operator takes {wanted}")
    if not isinstance(text, str):
        return text
    if not text:
        if "Optional" in wanted or wanted.endswith("?"):
            return None
        if kind == "ScalarList" or "List" in wanted:
            return []
        raise NotReconstructedError(f"the value of an argument of type {wanted} was not recorded")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if wanted in ("float", "Optional[float]") and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _shapes(event: Any) -> list[Any]:
    if hasattr(event, "structured_input_shapes"):
        return list(event.structured_input_shapes())
    return list(event.shapes())


def _strides(event: Any) -> list[Any]:
    return list(event.structured_input_strides()) if hasattr(event, "structured_input_strides") else []


def tensors_of(event: Any, known: RecordedTensors = MappingProxyType({})) -> Iterator[tuple[int, Tensor]]:
    """(position among the arguments, meta tensor) for each tensor argument of an event; for a Triton launch, for each
    pointer. `known` is the result of `recorded_tensors` for the profile."""
    shapes, strides, recorded = _shapes(event), _strides(event), known.get(event.correlation_id(), [])
    for position, kind in enumerate(event.dtypes()):
        if kind in DTYPES and position < len(shapes):
            found = recorded[position] if position < len(recorded) else None
            stride = strides[position] if position < len(strides) else []
            yield position, _tensor(shapes[position], stride, DTYPES[kind], found)

"""The cost of one call of an operator: the bytes that must be moved and the flops that must be done.

A `Cost` does not depend on the kernel. A cost is the least work of *any* implementation:

- each distinct element of each input is read once, and each element of each output is written once;
- elements that a view repeats (`expand`, stride 0) count once; elements that a view skips do not count;
- two arguments in the same memory count once;
- a multiplication, an addition and a transcendental function each count as one flop.

A formula receives a `Call` (one execution, with the arguments by their names in the schema) and returns a `Cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""The precisions for which hardware has a separate peak; integer and boolean arithmetic counts as fp32."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and flops of one call; `+` adds two calls that run one after the other.

    Attributes:
        read_bytes: distinct bytes that must be read.
        write_bytes: distinct bytes that must be written.
        flops: operations by precision (a key of `PRECISIONS`).
        shared_bytes: memory that is both read and written (in place), so it counts once in the working set.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    flops: Mapping[str, int] = field(default_factory=dict)
    shared_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def working_set_bytes(self) -> int:
        """The distinct bytes that the work touches. Only a cache that holds all of these bytes can replace memory."""
        return self.bytes - self.shared_bytes

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def __add__(self, other: Cost) -> Cost:
        flops = {p: self.flops.get(p, 0) + other.flops.get(p, 0) for p in (*self.flops, *other.flops)}
        return Cost(
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
            flops,
            self.shared_bytes + other.shared_bytes,
        )


FREE = Cost()
"""The cost of an operator that only changes metadata: a view, a size, an allocation."""


@dataclass(frozen=True)
class Call:
    """One execution of an operator, as seen by the dispatcher.

    `call["weight"]` is the argument with that name in the operator's schema, or its default if the caller omitted it.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by schema name, including defaults."""
        signature = _signature(self.func)
        bound = dict(signature.defaults)
        bound.update(zip(bound, self.args, strict=False))
        bound.update(self.kwargs)
        return bound

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def get(self, name: str, default: Any = None) -> Any:
        """The argument with that name, or `default` if this overload has none."""
        return self.arguments.get(name, default)

    @property
    def in_place(self) -> bool:
        """Whether the operator changes its first argument (`add_`, `_foreach_add_`)."""
        signature = _signature(self.func)
        return bool(signature.written) and signature.written[0] == next(iter(signature.defaults))

    @cached_property
    def read_tensors(self) -> list[Tensor]:
        """Input tensors in schema order, without `out=` arguments, which are only written."""
        return self.read_tensors_except()

    def read_tensors_except(self, *unread: str) -> list[Tensor]:
        """Input tensors in schema order, without the given arguments, of which the operator needs only the shapes."""
        skipped = {*_signature(self.func).out, *unread}
        return list(tensors_in([value for name, value in self.arguments.items() if name not in skipped]))

    @cached_property
    def results(self) -> tuple[Any, ...]:
        """The operator's outputs, one entry for each return of its schema (a tensor, or a list of tensors).

        For operators that return nothing, the arguments that they change in place.
        """
        signature = _signature(self.func)
        if signature.returns == 0:
            return tuple(self.arguments[name] for name in signature.written)
        return (self.out,) if signature.returns == 1 else tuple(self.out)

    @cached_property
    def written_tensors(self) -> list[Tensor]:
        """Output tensors, each once: returned tensors, and tensors that are only changed in place."""
        changed = [self.arguments[name] for name in _signature(self.func).written]
        return list({id(tensor): tensor for tensor in tensors_in([self.out, changed])}.values())


@dataclass(frozen=True, slots=True)
class _Signature:
    """What formulas need of an operator's schema: the arguments' defaults, the names of the arguments that the operator
    writes, and the number of results. It is read only once per operator, because reading a schema is slow.
    """

    defaults: dict[str, Any]
    out: frozenset[str]
    written: tuple[str, ...]
    returns: int


@cache
def _signature(func: torch._ops.OpOverload) -> _Signature:
    arguments = func._schema.arguments
    return _Signature(
        defaults={a.name: a.default_value for a in arguments},
        out=frozenset(a.name for a in arguments if a.is_out),
        written=tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        returns=len(func._schema.returns),
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order. A container may contain itself."""
    found: list[Tensor] = []
    _collect(value, found, ())
    return iter(found)


_WITHOUT_TENSORS = frozenset({int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.Size})


def _collect(value: Any, found: list[Tensor], inside: tuple[int, ...]) -> None:
    """Append the tensors in a value to the list `found`. `inside`: ids of the lists and dicts around the value.

    For speed this is not a generator: it runs several times for each counted operator.
    """
    kind = type(value)
    if kind in _WITHOUT_TENSORS:
        return
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found, inside)
    elif isinstance(value, list):
        if id(value) not in inside:
            inside = (*inside, id(value))
            for item in value:
                _collect(item, found, inside)
    elif isinstance(value, dict):
        if id(value) not in inside:
            inside = (*inside, id(value))
            for item in value.values():
                _collect(item, found, inside)
    elif hasattr(kind, "__dataclass_fields__") and id(value) not in inside:
        inside = (*inside, id(value))
        for name in value.__dataclass_fields__:
            _collect(getattr(value, name, None), found, inside)


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor is stored as indices and values: coordinates (COO), compressed rows or columns, or blocks."""
    return tensor.layout in _SPARSE_PARTS


def parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold a tensor's data: a sparse tensor's indices and, last, its values; for other
    tensors, the tensor itself.

    Inside `torch.func` (vmap, grad) a tensor wraps the batched tensor in memory. The result is then the parts of the
    batched tensor.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if not is_sparse(tensor):
        return [tensor]
    with _disable_current_modes():  # reading the parts is not part of the program
        return [getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout]]


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def stored_elements(tensor: Tensor) -> int:
    """Number of stored elements: the values of a sparse tensor, all elements of other tensors."""
    return parts(tensor)[-1].numel()


def distinct_elements(tensor: Tensor) -> int:
    """Number of elements in memory that a tensor covers. Repeated elements (stride 0) count once. The count of
    overlapping windows is an upper bound: at most the memory that they span.

    For a sparse tensor, the elements of its values count.
    """
    if is_sparse(tensor):
        return distinct_elements(parts(tensor)[-1])
    if _is_opaque(tensor):
        return tensor.numel()
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.numel()
    covered = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return min(prod(covered), _span(tensor))


def tensor_bytes(tensor: Tensor | None) -> int:
    """Distinct bytes of one tensor, including the indices of a sparse tensor; 0 for None."""
    if tensor is None:
        return 0
    if is_sparse(tensor):
        return sum(tensor_bytes(part) for part in parts(tensor))
    return distinct_elements(tensor) * tensor.element_size()


def distinct_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Distinct bytes of several tensors. Identical views count once. The count of overlapping views is an upper bound:
    at most the memory that they span."""
    by_memory: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            for part in parts(tensor):
                by_memory.setdefault(_memory(part), []).append(part)
    return sum(tensor_bytes(views[0]) if len(views) == 1 else _bytes_of_views(views) for views in by_memory.values())


def _memory(tensor: Tensor) -> int:
    """A key that identifies the tensor's memory: its storage, or for an opaque tensor the tensor itself."""
    return id(tensor) if _is_opaque(tensor) else tensor.untyped_storage()._cdata


def _is_opaque(tensor: Tensor) -> bool:
    """Whether the tensor has no readable strides (MKL-DNN's blocks, nested tensors). The bytes of such a tensor follow
    from its size."""
    return tensor.layout != torch.strided or tensor.is_nested


def _bytes_of_views(views: list[Tensor]) -> int:
    """An upper bound of the distinct bytes of several views of the same memory: the sum of the views' bytes or the
    bytes in the union of their spans, whichever is less."""
    if _is_opaque(views[0]):
        return tensor_bytes(views[0])
    spans: dict[tuple[Any, ...], tuple[Any, Any, int]] = {}
    for view in views:
        if view.numel():
            start = view.storage_offset() * view.element_size()
            key = (start, tuple(view.shape), view.stride(), view.dtype)
            spans[key] = (start, start + _span(view) * view.element_size(), tensor_bytes(view))
    union, end = 0, 0
    for start, stop, _ in sorted(spans.values()):
        union += max(0, stop - max(start, end))
        end = max(end, stop)
    return min(union, sum(size for *_, size in spans.values()))


def _span(tensor: Tensor) -> int:
    """Number of elements in memory from a tensor's first to its last element, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def precision_of(dtype: torch.dtype) -> str:
    """The precision whose peak bounds *elementwise* arithmetic on this dtype. Half dtypes are computed in fp32."""
    return "fp64" if dtype in (torch.float64, torch.complex128) else "fp32"


_MATRIX_PRECISION = {
    torch.float64: "fp64",
    torch.complex128: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


_COUNTED_FOR: ContextVar[str | None] = ContextVar("counted_for", default=None)


@contextmanager
def counted_for(device_type: str) -> Iterator[None]:
    """Inside the block, count costs as on this type of device ("cuda"), wherever the tensors are."""
    token = _COUNTED_FOR.set(device_type)
    try:
        yield
    finally:
        _COUNTED_FOR.reset(token)


def counted_device_type() -> str | None:
    """The device type for which costs are counted. None stands for the device type of each tensor."""
    return _COUNTED_FOR.get()


def matrix_precision(tensor: Tensor, *, convolution: bool = False) -> str:
    """The precision whose peak bounds a matrix product or convolution on this tensor.

    fp32 on a GPU counts as tf32 if PyTorch's own switches allow tf32 (by default for convolutions, on request for
    matrix products).
    """
    device_type = counted_device_type() or tensor.device.type
    if tensor.dtype in (torch.float32, torch.complex64) and device_type == "cuda":
        # `fp32_precision` also reflects the older switch `allow_tf32`. Reading `allow_tf32` itself raises an error if
        # the program has set `fp32_precision` to another precision.
        switch = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul  # type: ignore[attr-defined]
        return "tf32" if switch.fp32_precision == "tf32" else "fp32"
    return _MATRIX_PRECISION.get(tensor.dtype, "fp32")

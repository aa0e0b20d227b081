"""What one call of an operator must do: the bytes that must move and the flops that must be done.

A `Cost` knows no kernel. It is the least that *any* implementation must do:

- each distinct element of each input read once, each element of each output written once;
- elements that a view repeats (`expand`, stride 0) or skips count once or not at all;
- two arguments that are the same memory count once;
- flops count a multiplication and an addition separately, transcendental functions as one.

Formulas receive a `Call` (one execution seen by the dispatcher, arguments by their schema's names) and return a `Cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""Peaks that hardware distinguishes; integer and boolean arithmetic is counted as fp32."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and flops of one call; `+` adds two calls that run one after the other.

    Attributes:
        read_bytes: distinct bytes that must be read.
        write_bytes: distinct bytes that must be written.
        flops: operations by precision (a key of `PRECISIONS`).
    """

    read_bytes: int = 0
    write_bytes: int = 0
    flops: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def __add__(self, other: Cost) -> Cost:
        flops = {p: self.flops.get(p, 0) + other.flops.get(p, 0) for p in (*self.flops, *other.flops)}
        return Cost(self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes, flops)


FREE = Cost()
"""Of an operator that only changes metadata: a view, a size, an allocation."""


@dataclass(frozen=True)
class Call:
    """One execution of an operator, as the dispatcher saw it.

    `call["weight"]` is the argument of that name in the operator's schema, its default where the caller left it out.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by schema name, defaults filled in."""
        bound = {}
        for position, argument in enumerate(self.func._schema.arguments):
            if position < len(self.args):
                bound[argument.name] = self.args[position]
            else:
                bound[argument.name] = self.kwargs.get(argument.name, argument.default_value)
        return bound

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    @property
    def read_tensors(self) -> list[Tensor]:
        """Input tensors in schema order; `out=` arguments are written only and left out."""
        outs = {a.name for a in self.func._schema.arguments if a.is_out}
        return list(tensors_in([value for name, value in self.arguments.items() if name not in outs]))

    @property
    def written_tensors(self) -> list[Tensor]:
        """Output tensors: what is returned, and what is changed in place without being returned."""
        changed = [
            self.arguments[a.name]
            for a in self.func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        return list(tensors_in([self.out, changed]))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest of tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def distinct_elements(tensor: Tensor) -> int:
    """Elements of memory that a tensor covers: dimensions of stride 0 count once, overlapping windows at most their span."""
    if tensor.layout != torch.strided:
        return tensor._nnz() if tensor.is_sparse else tensor.numel()
    if tensor.numel() == 0:
        return 0
    covered = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    span = 1 + sum((size - 1) * stride for size, stride in covered)
    return min(prod(size for size, _ in covered), span)


def tensor_bytes(tensor: Tensor | None) -> int:
    """Distinct bytes of one tensor, 0 for None."""
    return 0 if tensor is None else distinct_elements(tensor) * tensor.element_size()


def distinct_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Distinct bytes of several tensors: the same view counted once, views of one storage at most the whole storage."""
    by_storage: dict[int, dict[tuple[Any, ...], int]] = {}
    storage_bytes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        storage, size = _storage_identity(tensor)
        view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) if size is not None else ()
        by_storage.setdefault(storage, {})[view] = tensor_bytes(tensor)
        if size is not None:
            storage_bytes[storage] = size
    return sum(
        min(sum(views.values()), storage_bytes.get(storage, sum(views.values())))
        for storage, views in by_storage.items()
    )


def _storage_identity(tensor: Tensor) -> tuple[int, int | None]:
    """A key for the tensor's memory and its size in bytes; tensors without a storage (sparse, wrappers) stand for themselves."""
    if tensor.layout != torch.strided:
        return id(tensor), None
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def precision_of(dtype: torch.dtype) -> str:
    """The precision whose peak bounds *elementwise* arithmetic on this dtype: half types are computed in fp32."""
    return "fp64" if dtype in (torch.float64, torch.complex128) else "fp32"


_MATRIX_PRECISION = {
    torch.float64: "fp64",
    torch.complex128: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


def matrix_precision(tensor: Tensor, *, convolution: bool = False) -> str:
    """The precision whose peak bounds a matrix product or convolution on this tensor.

    fp32 on a GPU counts as tf32 where PyTorch's own switches let the back end use it
    (by default for convolutions, on request for matrix products).
    """
    if tensor.dtype in (torch.float32, torch.complex64) and tensor.device.type == "cuda":
        allowed = torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32
        return "tf32" if allowed else "fp32"
    return _MATRIX_PRECISION.get(tensor.dtype, "fp32")

"""Graphs compiled for dynamic sizes: find the sizes of each call.

A graph compiled for dynamic sizes has symbols in place of numbers. The symbols' values are among the inputs of each
call, as numbers or as sizes of tensors. While a profiler is active, each call of the compiled code runs inside an event
that names the values:

    ## Call CompiledFxGraph rooftop graph 7 ##
        ## rooftop sizes 4,128 ##
            the kernels of the graph

Rooftop rebuilds the graph with numbers in place of symbols. The work of the rebuilt graph's kernels is then the work of
that call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

Sizes = tuple[int, ...]
"""Values of a graph's symbols, in the order of the graph's `SizeSource` objects."""

SIZES_LABEL = "## rooftop sizes "
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NEEDED = ("val", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "is_gradient_acc")
"""Keys of a node's `meta` that are read later."""


@dataclass(frozen=True)
class SizeSource:
    """The input of a call from which the value of a symbol is read.

    Attributes:
        symbol: symbol of sympy.
        input: position among the inputs of the graph.
        what: "value" (the input is the number), "size" or "stride" of a tensor.
        dimension: dimension of the tensor.
    """

    symbol: Any
    input: int
    what: str = "value"
    dimension: int = 0

    def read(self, inputs: Sequence[Any]) -> Any:
        """The symbol's value in a call."""
        value = inputs[self.input]
        if self.what == "value":
            return value
        return value.shape[self.dimension] if self.what == "size" else value.stride(self.dimension)


def is_dynamic(graph: fx.Graph) -> bool:
    """Whether the graph was compiled for dynamic sizes."""
    return any(True for _ in _symbolic(graph))


def _symbolic(graph: fx.Graph) -> Iterator[Any]:
    """Every scalar of the graph, and every size and stride of its tensors, that is an expression of symbols."""
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes = (*value.shape, *strides_of(value)) if isinstance(value, Tensor) else (value,)
            yield from (size for size in sizes if isinstance(size, _SYMBOLS))


def strides_of(tensor: Tensor) -> tuple[Any, ...]:
    """The strides of a tensor; () if it has none (a sparse tensor)."""
    return tensor.stride() if tensor.layout == torch.strided else ()


def size_sources(graph: fx.Graph) -> tuple[SizeSource, ...] | None:
    """For each symbol of the graph, the input from which its value is read in each call. () if the graph has no
    symbols; None if the graph needs a symbol whose value no input gives.
    """
    sources: dict[Any, SizeSource] = {}
    for number, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            told = [("size", i, size) for i, size in enumerate(value.shape)]
            told += [("stride", i, stride) for i, stride in enumerate(strides_of(value))]
        else:
            told = [("value", 0, value)]
        for what, dimension, size in told:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                sources.setdefault(size.node.expr, SizeSource(size.node.expr, number, what, dimension))
    needed = {symbol for v in _symbolic(graph) if isinstance(v, torch.SymInt) for symbol in v.node.expr.free_symbols}
    return tuple(sources.values()) if needed <= sources.keys() else None


def naming_its_sizes(call: Callable[..., Any], sources: Sequence[SizeSource]) -> Callable[..., Any]:
    """Wrap compiled code so that each call records its sizes in a profile. Without a profiler, the wrapper records
    nothing."""

    def running(inputs: Sequence[Any]) -> Any:
        if not torch.autograd.profiler._is_profiler_enabled:
            return call(inputs)
        values = ",".join(str(source.read(inputs)) for source in sources)
        # PyTorch marks a graph in the profile in the same way. `record_function` would call an operator, which dispatch
        # modes intercept.
        with torch._C._profiler._RecordFunctionFast(
            f"{SIZES_LABEL}{values} ##", keyword_values={"scope": "user_scope"}
        ):
            return call(inputs)

    return running


def named_sizes(name: str) -> Sizes | None:
    """The sizes in an event's name ("## rooftop sizes 4,128 ##"). None if the name has no sizes, or has symbols (if
    compiled code was itself traced)."""
    found = re.fullmatch(rf"{SIZES_LABEL}(-?\d+(?:,-?\d+)*) ##", name)
    return tuple(int(size) for size in found[1].split(",")) if found else None


def kept(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with only the data needed to replace symbols by numbers, without the graph's module and
    constants."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    for node in copied.nodes:
        node.meta = {name: node.meta[name] for name in _NEEDED if name in node.meta}
    return copied


def with_known_sizes(graph: fx.Graph, sizes: Mapping[Any, int] | None = None) -> fx.Graph:
    """The graph with its symbols replaced by numbers. `sizes` maps each symbol to its number. If `sizes` is None, use
    the numbers for which the graph was compiled.

    Raises:
        ValueError: the graph's sizes depend on data, or on symbols that `sizes` lacks.
    """
    if not is_dynamic(graph):
        return graph
    numbers = _Numbers(sizes)
    known = kept(graph)
    for node in known.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(numbers.of, node.meta["val"])
    return known


class _Numbers:
    """Replace symbols by numbers, and tensors of symbolic size by tensors of known size."""

    def __init__(self, sizes: Mapping[Any, int] | None) -> None:
        self._sizes = sizes
        self._memories: dict[int, Tensor] = {}

    def of(self, value: Any) -> Any:
        """A symbol's number, or a copy of a tensor with known sizes. Copies share memory if the given tensors do."""
        if isinstance(value, _SYMBOLS):
            return self._number(value)
        if not isinstance(value, FakeTensor) or value.layout != torch.strided:
            return value
        with value.fake_mode:
            shape, strides = ([self.of(size) for size in sizes] for sizes in (value.shape, value.stride()))
            storage = value.untyped_storage()
            if storage._cdata not in self._memories:
                room = self.of(storage.nbytes()) // 16 + 1
                self._memories[storage._cdata] = torch.empty(16 * room, dtype=torch.uint8, device=value.device)
            offset = self.of(value.storage_offset())
            return self._memories[storage._cdata].view(value.dtype).as_strided(shape, strides, offset)

    def _number(self, value: Any) -> Any:
        if self._sizes is None or not isinstance(value, torch.SymInt):  # a SymFloat: no size depends on it
            if value.node.hint is None:
                raise ValueError("its sizes depend on data")
            return value.node.hint
        number = value.node.expr.subs(self._sizes)
        if not number.is_number:
            raise ValueError(f"the value of {number} is unknown")
        return int(number)

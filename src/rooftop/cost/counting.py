"""The counting mode: every operator that a program executes, with its cost.

    with CountingMode() as counted:
        model(x)
    print(sum(r.cost.total_flops for r in counted.records if r.cost))

It sits below autograd, so the backward pass and the optimizer are seen as well as the forward pass,
and works on fake tensors: nothing needs to be computed to be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop.cost.accounting import Call, Cost, tensors_in
from rooftop.cost.registry import formula_for

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One executed operator.

    Attributes:
        name: schema name, e.g. "aten::convolution".
        shapes: shape of each input tensor, in order.
        dtype: of the first floating-point input (else of the first input or output), e.g. "bfloat16".
        device: where it ran, e.g. "cuda:0".
        scope: the module it belongs to (see `rooftop.analysis`), "" outside any.
        phase: "forward", "backward" or "optimizer".
        cost: None if the operator is uncovered.
        uncovered: why there is no cost, "" if there is one.
    """

    name: str
    shapes: tuple[Shape, ...]
    dtype: str
    device: str
    scope: str
    phase: str
    cost: Cost | None
    uncovered: str = ""


class CountingMode(TorchDispatchMode):
    """Records each operator executed inside the `with` block.

    Args:
        locate: called at each operator, returns its (scope, phase).
        around: called with the record's index, returns a context in which the operator runs: the profiler's label.
    """

    def __init__(
        self,
        locate: Callable[[], tuple[str, str]] = lambda: ("", "forward"),
        around: Callable[[int], AbstractContextManager[Any]] = lambda index: nullcontext(),
    ) -> None:
        super().__init__()
        self.records: list[Record] = []
        self._locate = locate
        self._around = around

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if formula_for(func) is None:
            # Under inference_mode composite operators (linear, conv2d) arrive whole: take them apart as autograd does.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        index = len(self.records)
        scope, phase = self._locate()
        with self._around(index):
            out = func(*args, **kwargs)
        self.records.append(_record(Call(func, args, kwargs, out), scope, phase))
        return out


def _record(call: Call, scope: str, phase: str) -> Record:
    cost, uncovered = _cost(call)
    inputs = call.read_tensors
    tensors = inputs or list(tensors_in(call.out))
    leading = next((t for t in tensors if t.is_floating_point() or t.is_complex()), tensors[0] if tensors else None)
    return Record(
        name=call.func._schema.name,
        shapes=tuple(tuple(t.shape) for t in inputs),
        dtype=str(leading.dtype).removeprefix("torch.") if leading is not None else "",
        device=str(leading.device) if leading is not None else "",
        scope=scope,
        phase=phase,
        cost=cost,
        uncovered=uncovered,
    )


def _cost(call: Call) -> tuple[Cost | None, str]:
    formula = formula_for(call.func)
    if formula is None:
        return None, "no formula"
    try:
        return formula(call), ""
    except Exception as error:  # a formula must never end the user's program; the report lists it as uncovered
        return None, f"formula failed: {type(error).__name__}: {error}"

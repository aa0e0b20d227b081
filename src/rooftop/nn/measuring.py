"""Decide which kinds of modules to replace, by timing each kind in the whole model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from rooftop.hardware.timing import SURE_ROUNDS, compare, is_sure
from rooftop.nn.copies import copy_sharing_tensors

ROUND_S, MOST_ROUNDS = 0.1, 9


@dataclass(frozen=True)
class Measured:
    """Times of a step of the model before and after one kind of modules is replaced. In both measurements, kinds that
    were accepted earlier are already replaced.

    Attributes:
        before_ms, after_ms: median times of a step.
        pays: whether the replacement saves more time than the noise of the measurements.
    """

    before_ms: float
    after_ms: float
    pays: bool

    @property
    def words(self) -> str:
        """The times as text, such as "3.21 ms a step before, 3.40 ms after"."""
        return f"{self.before_ms:.3g} ms a step before, {self.after_ms:.3g} ms after"


def worthwhile(
    model: nn.Module, kinds: Sequence[str], inputs: Any, swap: Callable[[nn.Module, list[str]], object]
) -> dict[str, Measured]:
    """Find the kinds whose replacement makes the whole model faster. The model, its buffers and the random state do not
    change.

    Args:
        model: the model, in the mode in which it will run. In training mode a step is forward and backward.
        kinds: the kinds that can be replaced in the model.
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
        swap: a function of (model, kinds) that replaces the modules of these kinds in the model.
    """
    kept: list[str] = []
    found: dict[str, Measured] = {}
    for kind in kinds:
        one, other = (_copy(model, names, swap) for names in (kept, [*kept, kind]))
        found[kind] = _compared(model, one, other, inputs)
        if found[kind].pays:
            kept.append(kind)
    return found


def _copy(model: nn.Module, kinds: list[str], swap: Callable[[nn.Module, list[str]], object]) -> nn.Module:
    same = copy_sharing_tensors(model, "replace")
    swap(same, kinds)
    return same


def _compared(model: nn.Module, one: nn.Module, other: nn.Module, inputs: Any) -> Measured:
    devices = {t.device for t in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}
    device = next((d for d in devices if d.type == "cuda"), next(iter(devices)))
    steps = {"one": _step(one, inputs), "other": _step(other, inputs)}
    before: list[float] = []
    gains: list[float] = []
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device.index] if device.index is not None else []):
        try:
            while True:
                times = compare(steps, device=device, seconds=ROUND_S, warm_up_seconds=ROUND_S / 5)
                before.append(times["one"].median_ms)
                gains.append(1 - times["other"].median_ms / times["one"].median_ms)
                undecided = statistics.median(gains) > 0 and not is_sure(gains) and len(gains) < MOST_ROUNDS
                if len(gains) >= SURE_ROUNDS and not undecided:
                    break
        finally:
            with torch.no_grad():
                for buffer, values in saved:
                    buffer.copy_(values)
    middle = statistics.median(before)
    return Measured(middle, middle * (1 - statistics.median(gains)), is_sure(gains))


def _step(model: nn.Module, inputs: Any) -> Callable[[], object]:
    args: tuple[Any, ...] = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
    kwargs: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not model.training or not parameters:

        def infer() -> None:
            with torch.no_grad():
                model(*args, **kwargs)

        return infer

    def train() -> None:
        outputs = [t for t in tree_flatten(model(*args, **kwargs))[0] if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.grad(outputs, parameters, [torch.ones_like(t) for t in outputs], allow_unused=True)

    return train

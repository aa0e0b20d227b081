"""Check that a changed optimizer makes the same steps as the original.

The changed and the original optimizer make some steps from the same state with the same gradients. The results of both
are compared with those of the original optimizer in float64. Kernels may store settings in float32 (float64 for float64
parameters), as PyTorch's fused steps on GPUs do. In float32, 1 - 0.999 has a relative error of 1e-5. So a correct step
can have a much larger error than the original, which computes such numbers in Python. Therefore the error that one
rounding of a setting causes in a step is also allowed.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftop.optimization.accuracy import RefusedError, as_accurate
from rooftop.optimization.outcomes import SEED
from rooftop.optimization.timing import same_state

STEPS = 3
ROUNDED = torch.finfo(torch.float32).eps / 2
"""The largest relative error of a number that is rounded to float32."""

OF_FLOAT64 = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Rounded:
    """An optimizer setting whose value is changed by one rounding in one step.

    Attributes:
        name: name of the setting in `param_groups`.
        place: index of the changed number if the setting is a tuple such as betas, otherwise None.
        step: index of the step in which the setting is changed.
    """

    name: str
    place: int | None
    step: int

    def of(self, value: Any) -> Any:
        """The setting's value after the rounding: `value`, or one number of the tuple `value`, times 1 + ROUNDED."""
        if self.place is None:
            return value * (1 + ROUNDED)
        return tuple(each * (1 + ROUNDED) if i == self.place else each for i, each in enumerate(value))


def parameters_after(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype | None = None, rounded: Rounded | None = None
) -> list[Tensor]:
    """Copies of an optimizer's parameters after some steps with random gradients. The optimizer and its parameters do
    not change.

    Args:
        dtype: dtype of the copies; None: the parameters' dtypes. The gradients have the same values for every dtype.
        rounded: a setting to change.
    """
    own: dict[int, Tensor] = {}
    dtypes: list[torch.dtype] = []
    same = same_state(optimizer)
    same.param_groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own[id(parameter)] = parameter.detach().clone().to(dtype or parameter.dtype)
            dtypes.append(parameter.dtype)
        same.param_groups.append({**group, "params": [own[id(parameter)] for parameter in group["params"]]})
    same.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        same.state[own[id(parameter)]] = {name: _copied(name, value, dtype) for name, value in state.items()}
    generators = {p.device: torch.Generator(p.device).manual_seed(SEED) for p in own.values()}
    for step in range(STEPS):
        for parameter, given in zip(own.values(), dtypes, strict=True):
            drawn = torch.randn(parameter.shape, generator=generators[parameter.device], device=parameter.device)
            parameter.grad = torch.empty_like(parameter).copy_(drawn.to(given))  # same strides, as `backward` does
        before = [dict(group) for group in same.param_groups]
        if rounded is not None and rounded.step == step:
            for group in same.param_groups:
                group[rounded.name] = rounded.of(group[rounded.name])
        same.step()
        for group, settings in zip(same.param_groups, before, strict=True):
            group.update(settings)
    return list(own.values())


def _copied(name: str, value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.clone() if dtype is None or name == "step" else value.clone().to(dtype)


def check_steps(changed: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Check that a changed optimizer is as accurate as the original, up to a rounding of each setting in each step.

    Raises:
        RefusedError: the changed optimizer is less accurate.
    """
    exact = parameters_after(original, torch.float64)
    got, plain = parameters_after(changed), parameters_after(original)
    try:
        _compare(got, plain, exact, [0.0] * len(exact))
    except RefusedError:
        sizes = zip(_by_rounding(original, exact), plain, strict=True)
        _compare(got, plain, exact, [size * (OF_FLOAT64 if p.dtype == torch.float64 else 1.0) for size, p in sizes])


def _compare(got: list[Tensor], plain: list[Tensor], exact: list[Tensor], usual: list[float]) -> None:
    for i, each in enumerate(zip(got, plain, exact, usual, strict=True)):
        as_accurate(f"parameter {i}", *each[:3], f"after {STEPS} steps", each[3])


def _by_rounding(optimizer: torch.optim.Optimizer, exact: list[Tensor]) -> list[float]:
    """For each parameter, the error that roundings of the optimizer's settings (learning rate, betas, ...) cause,
    summed over all settings and steps. `exact` has the parameters without these roundings.
    """
    found = [0.0] * len(exact)
    for rounded in _roundings(optimizer):
        others = parameters_after(optimizer, torch.float64, rounded)
        for i, (other, truth) in enumerate(zip(others, exact, strict=True)):
            found[i] += float((other - truth).abs().nan_to_num(0.0).max()) if truth.numel() else 0.0
    return found


def _roundings(optimizer: torch.optim.Optimizer) -> Iterator[Rounded]:
    """Yield a `Rounded` for each pair of a floating-point setting and an optimizer step, 0 to STEPS - 1."""
    names: dict[tuple[str, int | None], None] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, float):
                names[name, None] = None
            elif isinstance(value, tuple):
                names |= {(name, i): None for i, each in enumerate(value) if isinstance(each, float)}
    for name, place in names:
        for step in range(STEPS):
            yield Rounded(name, place, step)

"""Whether a changed optimizer makes the same steps."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from rooftop.optimization.outcomes import SEED
from rooftop.optimization.timing import same_state
from rooftop.testing import assert_as_accurate

STEPS = 3


def parameters_after(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copies of its parameters after some steps with random gradients; the optimizer and its parameters do not change.

    Args:
        dtype: dtype of the copies; None: unchanged.
    """
    own: dict[int, Tensor] = {}
    same = same_state(optimizer)
    same.param_groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own[id(parameter)] = parameter.detach().clone().to(dtype or parameter.dtype)
        same.param_groups.append({**group, "params": [own[id(parameter)] for parameter in group["params"]]})
    same.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        same.state[own[id(parameter)]] = {name: _copied(name, value, dtype) for name, value in state.items()}
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(STEPS):
        for parameter in own.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        same.step()
    return list(own.values())


def _copied(name: str, value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.clone() if dtype is None or name == "step" else value.clone().to(dtype)


def check_steps(changed: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Assert that a changed optimizer is as accurate as the original.

    Raises:
        AssertionError: it is not.
    """
    exact = parameters_after(original, torch.float64)
    pairs = zip(parameters_after(changed), parameters_after(original), exact, strict=True)
    for i, (got, plain, truth) in enumerate(pairs):
        assert_as_accurate(got, plain, truth, what=f"parameter {i} after {STEPS} steps")

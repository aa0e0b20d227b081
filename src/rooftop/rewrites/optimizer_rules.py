"""The rule for optimizers: fused steps, in which one kernel updates many parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from rooftop.nn.fused_steps import has_fused_step, skips_parameters
from rooftop.rewrites.candidates import Candidate, Rule, Times


class FusedOptimizer(Rule):
    """Use PyTorch's optimizer with `fused=True`."""

    name = "fused-optimizer"
    trains = True
    infers = False

    def refusal(self, candidate: Candidate) -> str | None:
        return "no optimizer was given" if candidate.optimizer is None else not_fusable(candidate.optimizer)

    def predicted_ms(self, times: Times) -> float:
        """The predicted time in ms that a step saves, from the times of the optimizer's step with and without
        `fused=True`."""
        now, then = times.optimizer, times.fused
        if then is None:
            return 0.0
        if times.device_ms is None:
            return now.wall_ms - then.wall_ms
        return times.gain_of(now.device_ms - then.device_ms, now.host_ms - then.host_ms)

    def apply(self, candidate: Candidate) -> str:
        assert candidate.optimizer is not None
        candidate.optimizer = fused(candidate.optimizer)
        return type(candidate.optimizer).__name__


def not_fusable(optimizer: torch.optim.Optimizer) -> str | None:
    """Why `fused` cannot be applied to an optimizer; None if it can."""
    on_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
    if not has_fused_step(type(optimizer), on_gpu):
        return f"PyTorch {torch.__version__} has no fused {type(optimizer).__name__}{' on GPUs' if on_gpu else ''}"
    if all(group.get("fused") for group in optimizer.param_groups):
        return "it is already fused"
    if "step" in vars(optimizer):
        return "its step was replaced, as by a learning rate scheduler: optimize before you create one"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has hooks"
    for group in optimizer.param_groups:
        asked = [name for name in ("differentiable", "capturable") if group.get(name)]
        if asked:
            return f"it was created with {asked[0]}=True"
        if any(not p.is_floating_point() for p in group["params"]):
            return "it has parameters that are not floating-point"
        if skips_parameters(type(optimizer), group["params"]):
            return "PyTorch's fused SGD does not update parameters in half precision on a CPU"
    return None


def fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimizer with a fused step: the same parameters, copies of its settings and state."""
    same = copy.copy(optimizer)
    same.param_groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    same.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        same.state[parameter] = {name: _own(name, value, parameter) for name, value in state.items()}
    same.__dict__["_step_supports_amp_scaling"] = True
    return same


def _own(name: str, value: Any, parameter: Tensor) -> Any:
    """A copy of an entry of the optimizer's state for one parameter. The step counter moves to the parameter's device,
    as a fused step requires.
    """
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), device=parameter.device) if name == "step" else copy.copy(value)
    return value.to(parameter.device, torch.float32, copy=True) if name == "step" else value.clone()

"""Advice about the optimizer: time PyTorch's fused kernel for this optimizer on parameters of the same shapes."""

from __future__ import annotations

from typing import Any

import torch

from rooftop.analysis.findings import LEAST_GAIN, Findings
from rooftop.analysis.kernel_times import watch_kernels
from rooftop.analysis.report_contents import Advice
from rooftop.nn.fused_steps import has_fused_step

MOST_MEMORY = 0.5  # largest share of the free memory for the copies of parameters, gradients and state


def fused_optimizer(findings: Findings) -> list[Advice]:
    """Advise `fused=True`, with the time that it saves."""
    if not (findings.repeatable and findings.on_gpu) or len(findings.optimizers) != 1:
        return []
    (optimizer,) = findings.optimizers
    now_ms = sum(op.measured_ms for op in findings.operators if op.record.phase == "optimizer")
    if now_ms < LEAST_GAIN * findings.summary.wall_ms or not _can_be_fused(optimizer):
        return []
    fused_ms = fused_step_ms(optimizer)
    if fused_ms is None:
        return []
    name, tensors = type(optimizer).__name__, sum(len(group["params"]) for group in optimizer.param_groups)
    return [
        Advice(
            "Step the optimizer in fused kernels",
            f"{name} takes {now_ms:.2f} ms for {tensors} parameters; fused, timed here on their shapes, "
            f"{fused_ms:.2f} ms",
            findings.saved_ms(now_ms - fused_ms),
            f"torch.optim.{name}(..., fused=True)",
        )
    ]


def _can_be_fused(optimizer: torch.optim.Optimizer) -> bool:
    if not has_fused_step(type(optimizer), on_gpu=True):
        return False
    groups = optimizer.param_groups
    plain = not any(group.get("fused") or group.get("differentiable") for group in groups)
    return plain and all(
        type(p) in (torch.nn.Parameter, torch.Tensor) and p.is_cuda and p.is_floating_point()
        for group in groups
        for p in group["params"]
    )


def fused_step_ms(optimizer: torch.optim.Optimizer) -> float | None:
    """Time in ms for which a fused step of the same optimizer keeps the GPU busy.

    None if the free memory cannot hold another copy of the parameters, their gradients and two states, or if repeated
    fused steps launch different kernels.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    needed = 4 * sum(p.numel() * p.element_size() for p in parameters)  # parameters, gradients and two states
    if needed > MOST_MEMORY * torch.cuda.mem_get_info(device)[0]:
        return None
    with torch.random.fork_rng([device]), torch.enable_grad():
        groups = [_twin_of(group) for group in optimizer.param_groups]
        twin = type(optimizer)(groups)  # type: ignore[call-arg]
        for group in twin.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        for _ in range(2):  # the first step creates the state
            twin.step()
        times = watch_kernels(twin.step, device, step_ms=1.0, kernels=4 * len(groups))
    return times.busy_ms if times is not None else None


def _twin_of(group: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in group.items() if name not in ("params", "foreach", "fused")}
    params = [torch.randn_like(p).requires_grad_() for p in group["params"]]
    return {**kept, "params": params, "foreach": False, "fused": True}

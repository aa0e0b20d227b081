"""AdamW in one pass over memory.

A bfloat16 model may have float32 weights for the optimizer. With one PyTorch operator per operation, an AdamW step on
float32 weights converts gradients to float32 (6 bytes of memory traffic per weight), clips them (8), runs AdamW (28),
and converts the weights to bfloat16 (6). Memory bandwidth bounds the step, and a single kernel needs only 30 bytes per
weight. This kernel reads gradients in the dtype of backward, scales them for clipping, and writes the model's weights
together with the float32 weights. Two of the 30 bytes are a read of the model's weights, to detect values that the user
has loaded. `adamw_launches.py` decides which weights share a kernel.

The kernel reads the step count and the learning rate from GPU memory, so the host never waits, and a CUDA graph can
capture the step.

Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization" (arXiv:1711.05101), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rooftop.launch.triton_launch import INTERPRETED, require_triton
from rooftop.parallel.sharded_data import local_of, sharded_like
from rooftop.train.optimizers.adamw_launches import AdamWOptions, AdamWPlan
from rooftop.train.optimizers.main_weights import MainWeights

_grad, _device = attrgetter("grad"), attrgetter("device")
DENSE = {torch.strided}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AdamW(torch.optim.AdamW):
    """AdamW with the results of `torch.optim.AdamW` up to rounding, and with the same state and `state_dict`.

    On a GPU one kernel computes the step, as described at the top of the file; on a CPU PyTorch computes it.

    Args:
        params, lr, betas, eps, weight_decay: see `torch.optim.AdamW`; `lr` may be a tensor.
        weights: the float32 weights to update. The step accepts gradients of these weights in any dtype, and writes the
            updated weights to the model. If the user writes values to the model, the next step starts from these
            values. So `weights.publish()` is not needed. This optimizer's `zero_grad` is enough, because `weights`
            moves the gradients out of the model's parameters.

    Raises:
        TypeError: a parameter is not floating point.
        ValueError: see `torch.optim.AdamW`.
        ValueError: a parameter has gaps in its memory (such as a slice) or is not in `weights.named`, or `amsgrad` or
            `maximize` is set.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        weights: MainWeights | None = None,
    ) -> None:
        self.weights = weights
        self._forget()
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if weights is not None:
            weights.step_adopts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in PyTorch's optimizers. Raises the same errors as the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        group["fused"] = _is_fused(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        _refuse_options(group)
        for parameter in group["params"]:
            _check(parameter)
            if self.weights is not None and not any(parameter is each for each in self.weights.named.values()):
                raise ValueError(
                    f"AdamW: a parameter {tuple(parameter.shape)} is not in weights.named: pass the parameters from "
                    "weights.named, not the model's"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in PyTorch's optimizers.

        The state may be on any device, and is moved to the parameters' device.
        """
        for group in state_dict["param_groups"]:
            _refuse_options(group)
        saved = zip(state_dict["param_groups"], self.param_groups, strict=False)
        groups = [{**group, "fused": _is_fused(own)} for group, own in saved]
        if len(groups) != len(self.param_groups):
            groups = state_dict["param_groups"]  # PyTorch raises an error if the number of groups differs
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "weights": self.weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        super().__setstate__(state)

    def _forget(self) -> None:
        self._plans: dict[tuple[int, torch.device], AdamWPlan] = {}
        self._known: list[dict[str, Any]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, scale: Tensor | None = None) -> Any:  # type: ignore[override]
        """Run one step.

        Args:
            closure: computes the loss and its gradients again; see PyTorch's optimizers.
            scale: factor for all gradients, () on the device of the parameters, such as the clipping factor of
                `ModelGradients.scale_for`. On a GPU the gradients in memory stay unscaled; on a CPU they are scaled in
                place.

        Returns:
            The loss of `closure`.

        Raises:
            TypeError, ValueError: the scale is not a tensor of one element.
            ValueError: a parameter and its optimizer state differ in shape.
            RuntimeError: a gradient is sparse, or other tensors have replaced the model's parameters (`load_state_dict`
                with assign=True). If this error is raised, no parameter is updated.
        """
        _check_scale(scale)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        by_kernel = all(parameter.device.type == "cuda" for parameter in every) or INTERPRETED
        if self.weights is not None:
            self.weights.before_step(contents=not by_kernel)  # the kernel itself compares the contents of the weights
        if by_kernel:
            require_triton()
            if len(self.state) != len(self._known) or not all(map(is_, self.state.values(), self._known)):
                self._plans.clear()  # the caller has replaced entries of `state`
            held = [self._held(group["params"]) for group in self.param_groups]
            if not {gradient.layout for gradients in held for gradient in gradients if gradient is not None} <= DENSE:
                raise RuntimeError("AdamW: a gradient is sparse: create the embedding with sparse=False")
            for number, group in enumerate(self.param_groups):
                self._step_of(number, group, held[number], scale)
            self._known = [*self.state.values()]
            if self.weights is not None:
                self.weights.synchronized()
            return loss
        if self.weights is not None:
            for parameter in every:
                self.weights.widen(parameter)
        gradients = [each for parameter in every if (each := _gradient_of(parameter)) is not None]
        if scale is not None and gradients:
            torch._foreach_mul_(gradients, scale)
        _plain_step(self)
        if self.weights is not None:
            self.weights.publish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release all gradients, including those that the `MainWeights` object holds in the model's dtype. If
        `set_to_none` is False, set them to 0 instead."""
        if self.weights is not None:
            for parameter in (each for group in self.param_groups for each in group["params"]):
                self.weights.forget_gradient(parameter) if set_to_none else self.weights.widen(parameter)
        super().zero_grad(set_to_none)

    def _held(self, every: Sequence[Tensor]) -> list[Tensor | None]:
        return [*map(_grad, every)] if self.weights is None else self.weights.gradients_of(every)

    def _step_of(self, number: int, group: dict[str, Any], held: Sequence[Tensor | None], scale: Tensor | None) -> None:
        every = group["params"]
        found = [parameter for parameter, gradient in zip(every, held, strict=True) if gradient is not None]
        gradients = [gradient for gradient in held if gradient is not None]
        options = AdamWOptions.of(group)
        devices = [*map(_device, found)]
        for device in dict.fromkeys(devices):
            is_here = [each == device for each in devices]
            here = [*compress(found, is_here)]
            plan = self._plans.get((number, device))
            if plan is None or not plan.holds(here):
                plan = self._plans[number, device] = self._plan_of(here)
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                factor = scale if scale is None or scale.device == device else scale.to(device)
                plan.step([*compress(gradients, is_here)], options, factor)

    def _plan_of(self, parameters: list[Tensor]) -> AdamWPlan:
        for each in parameters:
            _check(each)
            _complete(each, self.state[each])
        models = [None if self.weights is None else self.weights.model_has(each) for each in parameters]
        return AdamWPlan(parameters, [self.state[each] for each in parameters], models)


def _check_scale(scale: Tensor | None) -> None:
    if scale is not None and not isinstance(scale, Tensor):
        raise TypeError(f"AdamW: scale must be a tensor, as returned by scale_for, got {type(scale).__name__}")
    if scale is not None and scale.numel() != 1:
        raise ValueError(f"AdamW: scale must be one number, got {tuple(scale.shape)}")


def _plain_step(optimizer: AdamW) -> None:
    """Run PyTorch's own step, without the hooks that already run around the step of this class."""
    groups = optimizer.param_groups
    if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
        for group in groups:
            _step_of_parts(group, optimizer.state)
        return
    step: Any = torch.optim.AdamW.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def _step_of_parts(group: dict[str, Any], state: dict[Tensor, dict[str, Any]]) -> None:
    """Run PyTorch's step on this rank's parts. AdamW treats each element alone, so the result is the same. On DTensors,
    PyTorch would plan each operator for each new shape, which takes milliseconds."""
    found = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not found:
        return
    for each in found:
        _complete(each, state[each])
    beta1, beta2 = group["betas"]
    adamw(
        [local_of(each) for each in found],
        [local_of(each.grad) for each in found],
        [local_of(state[each]["exp_avg"]) for each in found],
        [local_of(state[each]["exp_avg_sq"]) for each in found],
        [],
        [state[each]["step"] for each in found],
        foreach=group["foreach"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    torch.autograd.graph.increment_version(found)


def _is_fused(group: dict[str, Any]) -> bool | None:
    """The entry `fused` of a group. True if all its parameters are on GPUs: then the state has the form of PyTorch's
    fused AdamW, with the step count on the GPU. Otherwise None, PyTorch's default."""
    return all(parameter.device.type == "cuda" for parameter in group["params"]) or None


def _refuse_options(group: dict[str, Any]) -> None:
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise ValueError(f"AdamW: {name}=True is not supported: use torch.optim.AdamW")


def _gradient_of(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local_of(parameter.grad)


def _check(parameter: Tensor) -> None:
    here = local_of(parameter)
    shape = tuple(parameter.shape)
    if here.dtype not in DTYPES:
        raise TypeError(f"AdamW: a parameter {shape} is {here.dtype}: expected a floating dtype")
    if here.numel() and torch.empty_like(here, device="meta").stride() != here.stride():
        raise ValueError(
            f"AdamW: a parameter {shape} has strides {here.stride()}, with gaps or overlaps in its memory: make it "
            "contiguous before training"
        )


def _complete(parameter: Tensor, state: dict[str, Any]) -> None:
    """Create a parameter's state, or convert a loaded state to the parameter's memory layout."""
    steps = state.get("step", 0.0)
    if not isinstance(steps, Tensor) or steps.dtype != torch.float32 or steps.device != parameter.device:
        state["step"] = torch.as_tensor(steps, dtype=torch.float32, device=parameter.device)
    for name in ("exp_avg", "exp_avg_sq"):
        held = state.get(name)
        if held is not None and held.shape != parameter.shape:
            raise ValueError(
                f"AdamW: a parameter has shape {tuple(parameter.shape)}, but its optimizer state has shape "
                f"{tuple(held.shape)}: create a new optimizer if you changed the parameter, or load a state of the "
                "same shape"
            )
        if held is None or local_of(held).stride() != local_of(parameter).stride():
            zeros = torch.zeros_like(local_of(parameter), memory_format=torch.preserve_format)
            state[name] = sharded_like(parameter, zeros)
            if held is not None:
                state[name].copy_(held)

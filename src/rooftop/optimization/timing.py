"""Measure the time of a step and of its operators."""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.observing import LightMode
from rooftop.hardware.sequences import synchronize
from rooftop.hardware.timing import LEAST_SAMPLES, Timing, compare, compare_slow
from rooftop.optimization.draws import Arguments
from rooftop.optimization.forecasts import OperatorClock, fusable_of
from rooftop.optimization.outcomes import Step, anew, preserved, restore
from rooftop.rewrites.candidates import Call, Candidate, OptimizerStep, Times
from rooftop.rewrites.convolution_rules import bias_ms, convolutions_of
from rooftop.rewrites.optimizer_rules import fused, not_fusable
from rooftop.rewrites.structures import mapped
from rooftop.rewrites.timed_alone import CYCLES_A_MS, alone_ms, between_events

SLOW_MS = 300.0
AHEAD_RUNS, MOST_AHEAD_MS = 3, 300.0


def step_of(candidate: Candidate, step: Step, given: Arguments) -> Callable[[], object]:
    """One whole step as a function without arguments: forward; in training also backward and the optimizer's step."""
    if not step.training:
        return lambda: step.run(candidate.call, candidate.model, anew(given))

    optimizer = candidate.optimizer

    def run() -> None:
        _, gradients = step.run(candidate.call, candidate.model, anew(given))
        if optimizer is None:
            return
        for name, parameter in candidate.model.named_parameters():
            parameter.grad = gradients.get(f"gradient of {name}")
        optimizer.step()

    return run


@contextmanager
def untouched(model: nn.Module, *candidates: Candidate) -> Iterator[None]:
    """After the block, restore a model's parameters, gradients and buffers, and the candidates' optimizers."""
    optimizers = [candidate.optimizer for candidate in candidates if candidate.optimizer is not None]
    states = [_copied_state(optimizer) for optimizer in optimizers]
    before = [(p, p.detach().clone() if p.requires_grad else None, p.grad) for p in model.parameters()]
    with preserved(model):
        try:
            yield
        finally:
            with torch.no_grad():
                restore([(parameter, values) for parameter, values, _ in before if values is not None])
                for parameter, _, gradient in before:
                    parameter.grad = gradient
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.state = state


def compare_steps(
    candidates: dict[str, Candidate], step: Step, given: Arguments, original: nn.Module, seconds: float, step_s: float
) -> dict[str, Timing]:
    """Time steps of candidates in turns; each candidate must have run before.

    Args:
        seconds: approximate time for each candidate; steps that take longer run once.
        step_s: approximate time of a step.
    """
    (device,) = {candidate.device for candidate in candidates.values()}
    runs = {name: step_of(candidate, step, given) for name, candidate in candidates.items()}
    with untouched(original, *candidates.values()):
        if device.type == "cpu" and step_s > seconds / LEAST_SAMPLES:
            return compare_slow(runs, max(1, int(seconds / step_s)))
        return compare(runs, device=device, seconds=seconds, warm_up_seconds=seconds / 5)


def times_of(
    candidate: Candidate, step: Step, given: Arguments, original: nn.Module, wall_ms: float, ceilings: Ceilings
) -> Times:
    """The times of a step and of its operators, and the operators that a compiler could fuse."""
    run = step_of(candidate, step, given)
    now, faster = OptimizerStep(), None
    with untouched(original, candidate):
        watched = OperatorTimes(candidate.device)
        with watched:
            run()
        if wall_ms <= SLOW_MS:  # the first run did lazy initialization
            watched = OperatorTimes(candidate.device, watched)
            with watched:
                run()
        calls = watched.calls()
        device_ms, host_ms = ahead(run, candidate.device, wall_ms, sum(call.ms for call in calls))
        copies_ms = _copies_ms(candidate, step, given)
        optimizer = candidate.optimizer
        if optimizer is not None:
            now = _optimizer_step(optimizer, candidate.device)
            faster = None if not_fusable(optimizer) else _optimizer_step(fused(optimizer), candidate.device)
    with untouched(original, candidate):
        fusable = fusable_of(step_of(replace(candidate, optimizer=None), step, given), candidate.device, ceilings)
    if candidate.device.type == "cuda":  # eager PyTorch adds a convolution's bias in a kernel of its own
        fusable = replace(fusable, now_ms=fusable.now_ms + sum(map(bias_ms, convolutions_of(calls))))
    return Times(
        wall_ms, calls, now, faster, device_ms, host_ms, fusable, ceilings.launch_eager_ms, copies_ms=copies_ms
    )


def _copies_ms(candidate: Candidate, step: Step, given: Arguments) -> float:
    """The device time in ms that copies of all arguments and results of a call take; 0 on a CPU."""
    if candidate.device.type != "cuda":
        return 0.0
    results, _ = step.run(candidate.call, candidate.model, anew(given))
    tensors = [t for t in tree_leaves((results, given)) if isinstance(t, Tensor) and t.is_cuda]
    return alone_ms(lambda: [t.detach().clone() for t in tensors], candidate.device)


def _optimizer_step(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerStep:
    """The times of an optimizer's step without forward and backward, with the gradients of the last run. An untimed
    first step creates the optimizer's state.
    """
    optimizer.step()
    synchronize(device)
    began = time.perf_counter()
    optimizer.step()
    synchronize(device)
    wall_ms = (time.perf_counter() - began) * 1e3
    device_ms, host_ms = ahead(optimizer.step, device, wall_ms)
    return OptimizerStep(wall_ms, device_ms or 0.0, host_ms or 0.0)


def ahead(
    run: Callable[[], object], device: torch.device, wall_ms: float, alone_ms: float = math.inf
) -> tuple[float | None, float | None]:
    """(ms of device time of a step if the host is far ahead, ms of host time to launch the step); None on a CPU.

    Before a run the GPU pauses for longer than the host needs to launch the step. A CUDA graph of the step would take
    about this device time. After a pause the GPU is cooler, so it runs faster than in a long series of steps. To
    correct for the cooler GPU, a run after a pause is compared with a run after another run, and `wall_ms` is scaled by
    their ratio. But if the host takes longer than the GPU, `wall_ms` is the host's time, so the device time of the run
    after a pause is returned, without scaling.

    Args:
        alone_ms: device time of the operators timed one by one. If the step makes the host wait for the GPU, the
            returned device time is at most this sum, because in such a step the host cannot be far ahead.
    """
    if device.type != "cuda":
        return None, None
    device_ms, called_ms, host_ms, waited_ms = math.inf, math.inf, math.inf, math.inf
    pause_ms = min(MOST_AHEAD_MS, 1 + 2 * wall_ms)
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(AHEAD_RUNS):
            torch.cuda._sleep(int(pause_ms * CYCLES_A_MS))
            ms, launched_ms = between_events(run, start, end)
            device_ms, waited_ms = min(device_ms, ms), min(waited_ms, launched_ms)
            run()  # so that the next run follows another run, as in a series
            ms, launched_ms = between_events(run, start, end)
            called_ms, host_ms = min(called_ms, ms), min(host_ms, launched_ms)
    waits, launched_ms = waited_ms >= pause_ms, min(host_ms, waited_ms)
    slow_host = launched_ms > device_ms
    far_ahead_ms = min(device_ms, wall_ms) if slow_host else wall_ms * min(1.0, device_ms / called_ms)
    return min(far_ahead_ms, alone_ms) if waits else far_ahead_ms, min(launched_ms, wall_ms)


class OperatorTimes(LightMode):
    """Measure the time of each operator below autograd, by an `OperatorClock`.

    Args:
        earlier: the times of an earlier run of the same step, which tell the clock how long the host takes for each
            operator.
    """

    def __init__(self, device: torch.device, earlier: OperatorTimes | None = None) -> None:
        super().__init__()
        self._clock: OperatorClock = OperatorClock(device, earlier._clock if earlier is not None else None)
        self.device = device
        self._found: dict[Any, list[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        index = self._clock.count
        with self._clock:
            result = func(*args, **(kwargs or {}))
        row = self._found.setdefault((func, _key(args)), [[], None])
        row[0].append(index)
        if row[1] is None:
            row[1] = mapped(args, _without_data)
        return result

    def calls(self) -> tuple[Call, ...]:
        """The calls that the mode has timed."""
        ms = self._clock.times_ms()
        return tuple(
            Call(operator, arguments, self.device, len(indices), sum(ms[index] for index in indices))
            for (operator, _), (indices, arguments) in self._found.items()
        )


def _key(args: tuple[Any, ...]) -> str:
    return repr(mapped(args, _without_data))


def _without_data(tensor: Tensor) -> Tensor:
    if tensor.is_nested:  # such a tensor has no sizes
        return torch.empty(0, dtype=tensor.dtype, device="meta")
    if tensor.layout != torch.strided:
        return tensor.detach().to("meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def same_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimizer for the same parameters, with its own settings, state and attributes.

    The copy has neither the original's hooks nor a replaced `step`, which a learning rate scheduler may have set.
    """
    same = copy.copy(optimizer)
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("step", "state") and "hook" not in name:
            same.__dict__[name] = copy.deepcopy(value, memo)
    same.state = _copied_state(optimizer)
    same.__dict__.pop("step", None)
    same._optimizer_step_pre_hooks, same._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return same


def _copied_state(optimizer: torch.optim.Optimizer) -> defaultdict[Tensor, Any]:
    copies = (
        (p, {name: copy.deepcopy(value) for name, value in state.items()}) for p, state in optimizer.state.items()
    )
    return defaultdict(dict, copies)

"""Find the module and the phase (forward, backward or optimizer) to which an operator belongs.

Forward: hooks on every module report which modules are running (see `running_calls`).
Backward: the module is the one that created the running autograd node (see `node_makers`). For a node that accumulates
    a gradient, the module is the one that owns the parameter.
Optimizer: hooks around `Optimizer.step`. Work in a closure that is passed to `step` (LBFGS, Lightning) counts as
forward and backward, not as optimizer.

The same hooks add up each module's inputs and outputs, because the fused roof of a module includes these tensors.

A program may drop a model or an optimizer to free its memory. So nothing here keeps a model or an optimizer alive.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from rooftop.analysis.node_makers import NodeMakers
from rooftop.analysis.optimizer_labels import optimizer_ends
from rooftop.cost import distinct_bytes
from rooftop.cost.accounting import tensors_in
from rooftop.hardware.interruptions import pass_on
from rooftop.hardware.module_paths import ModulePaths, inner_modules, own_parameters
from rooftop.hardware.running_calls import RunningCalls, caller_of_hook
from rooftop.words import in_a_line

LOSS, AUTOGRAD, OPTIMIZER = "(loss)", "(autograd)", "(optimizer)"
"""Scopes of operators outside any module: in the forward pass, in the backward pass, and in the optimizer."""


@dataclass
class ModuleTraffic:
    """Inputs and outputs of one module during one step, summed over all its calls.

    Attributes:
        type: class name.
        calls: forward calls.
        input_bytes: distinct bytes of each call's input tensors; `grad_input_bytes`: of the inputs that require a
            gradient.
        output_bytes: distinct bytes of the tensors that each call returns.
        parameter_bytes: bytes of parameters and buffers, counted once; `trainable_bytes`: bytes of the parameters that
            receive a gradient.
        parameters: number of elements of each parameter, by the id of the parameter.
    """

    type: str
    calls: int = 0
    input_bytes: int = 0
    grad_input_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    parameters: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerTraffic:
    """The minimum bytes that one step's optimizers read and write, and whether an optimizer refuses CUDA graph
    capture."""

    read: int = 0
    written: int = 0
    refuses_capture: bool = False


class ModuleTracker:
    """While active (`with`), determines the scope and phase of the operator that is being dispatched.

    A scope is the path of a module's call ("layer1.0.conv1"; "" is the root; see `module_paths`) or one of LOSS,
    AUTOGRAD, OPTIMIZER.

    Args:
        root: the module whose scopes have no prefix; None: the first module that is called.
        inside: use hooks to follow the modules as they run. Compiled code calls no hooks, so there the caller reports
            inputs and outputs with `observe`.

    Attributes:
        traffic: scope -> ModuleTraffic of this step. `restart()` clears the traffic for the next step.
        elsewhere: whether modules ran in other threads, where the tracker sees no operators.
        uncounted: class of each module and optimizer whose memory traffic could not be counted -> the reason.
    """

    def __init__(self, root: nn.Module | None = None, inside: bool = True) -> None:
        self.traffic: dict[str, ModuleTraffic] = {}
        self.elsewhere = False
        self.uncounted: dict[str, str] = {}
        self._thread = threading.get_ident()
        self._optimizers = WeakIdKeyDictionary()  # optimizers whose `step` ran -> number of steps
        self._optimizer_traffic: OptimizerTraffic | None = None  # set only in a copy (`snapshot`)
        self._paths = ModulePaths()
        self._running = RunningCalls()  # each call of a module, with the backward node that called it, or None
        self._makers = NodeMakers()
        self._optimizing = 0
        self._is_following = False
        self._inside = inside
        self._hooks = ExitStack()
        if root is not None:
            self._paths.adopt(root)

    def __enter__(self) -> ModuleTracker:
        for handle in (
            register_optimizer_step_pre_hook(self._optimizer_entering),
            register_optimizer_step_post_hook(self._optimizer_leaving),
        ):
            self._hooks.callback(handle.remove)
        self._hooks.enter_context(optimizer_ends(self._optimizer_ended))
        if self._inside:
            self._hooks.enter_context(self.following())
        return self

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow modules as they run inside the block (with `inside=True` the tracker does so anyway).

        Do not compile code inside the block: the code would contain the hooks, or not compile at all.
        """
        self._thread = threading.get_ident()
        self._makers.clear()
        with ExitStack() as hooks:
            entering = register_module_forward_pre_hook(self._entering)
            leaving = register_module_forward_hook(self._leaving, with_kwargs=True, always_call=True)
            hooks.callback(entering.remove)
            hooks.callback(leaving.remove)
            # `remove` leaves this entry behind, which makes torch take the slow path through each module
            hooks.callback(_global_forward_hooks_with_kwargs.pop, leaving.id, None)
            hooks.enter_context(_unwarned())
            self._is_following = True
            hooks.callback(setattr, self, "_is_following", False)
            yield

    def snapshot(self) -> ModuleTracker:
        """A copy of this tracker with its data about the present step. The copy never follows modules."""
        kept = ModuleTracker()
        kept.traffic = {scope: replace(traffic) for scope, traffic in self.traffic.items()}
        kept._optimizer_traffic = self.optimizer_traffic()
        kept.elsewhere = self.elsewhere
        kept.uncounted = dict(self.uncounted)
        return kept

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose `step` ran since the last `restart()`, and that still exist."""
        return list(self._optimizers)

    def optimizer_traffic(self) -> OptimizerTraffic:
        """The memory traffic of the optimizers, which read parameters, gradients and state, and write parameters and
        state.
        """
        if self._optimizer_traffic is not None:
            return self._optimizer_traffic
        read = written = 0
        refuses = False
        for optimizer, steps in self._optimizers.items():
            try:
                groups = optimizer.param_groups
                parameters = distinct_bytes(p for group in groups for p in group["params"] if p.requires_grad)
                state = distinct_bytes(tensors_in(list(optimizer.state.values())))
                refuses |= any(group.get("capturable") is False for group in groups)
            except Exception as error:  # an optimizer of an unknown kind must not end the program
                self.uncounted[type(optimizer).__name__] = in_a_line(error)
                continue
            read += steps * (2 * parameters + state)
            written += steps * (parameters + state)
        return OptimizerTraffic(read, written, refuses)

    def observe(self, module: nn.Module | None, inputs: Any, output: Any) -> None:
        """Add the inputs and outputs of one call of the root, `module`, to the root's traffic. If `module` is None, add
        nothing."""
        if module is not None:
            self._add_traffic("", module, list(tensors_in(inputs)), list(tensors_in(output)))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._hooks.close()

    def restart(self) -> None:
        """Before the next step, forget the traffic and the autograd nodes of the steps so far."""
        self.traffic.clear()
        self.uncounted.clear()
        self._optimizers = WeakIdKeyDictionary()
        self._running.clear()
        self._makers.clear()
        self._optimizing = 0

    def locate(self) -> tuple[str, str]:
        """(scope, phase) of the operator that is being dispatched now."""
        if self._running.settle(sys._getframe(1)):
            # an exception has ended module calls; nodes created since then belong to the code outside these calls
            self._makers.operator(self._outside())
        running = self._running.innermost
        node = torch._C._current_autograd_node()
        if node is not None:
            scope, recomputed = self._running_in(node)
            if torch.is_grad_enabled():
                self._makers.operator(scope, recomputed)
            return scope, "backward"
        self._makers.operator(AUTOGRAD if running is None else running)
        if self._optimizing:
            return OPTIMIZER, "optimizer"
        return (LOSS if running is None else running), "forward"

    def _running_in(self, node: Any) -> tuple[str, bool]:
        """The scope of a backward node's work, and whether that work recomputes a module.

        If the running module was started by the node itself, the node recomputes it (activation checkpointing), and the
        work is the module's. If the module was already running, the module has requested gradients
        (`torch.autograd.grad`, `torch.func.grad`), and the work belongs to the module that created the node.
        """
        running = self._running.innermost
        if running is not None and self._running.within is node:
            return running, True
        return self._maker_of(node), False

    def _maker_of(self, node: Any) -> str:
        variable = getattr(node, "variable", None)  # only an AccumulateGrad node has this attribute
        maker = self._paths.owner(variable) if isinstance(variable, Tensor) else self._makers.of(node)
        return AUTOGRAD if maker is None else maker

    def _is_elsewhere(self) -> bool:
        """Whether this thread is neither the step's thread nor an autograd thread (autograd threads recompute
        modules)."""
        return threading.get_ident() != self._thread and torch._C._current_autograd_node() is None

    def _entering(self, module: nn.Module, args: Any) -> None:
        if self._is_elsewhere():
            self.elsewhere = True
            return
        call = caller_of_hook(sys._getframe(1))
        self._running.settle(call.f_back)
        try:
            scope = self._paths.of_call(module, self._running.names)
        except Exception as error:  # reading an attribute of the module raised
            pass_on(error)
            self.uncounted[type(module).__name__] = in_a_line(error)
            scope = LOSS if self._running.innermost is None else self._running.innermost
        self._running.enter(scope, call, within=torch._C._current_autograd_node())
        self._makers.runs(scope)

    def _leaving(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        # After an exception, torch does not pass the keyword arguments. (Checkpointing ends a recomputation early with
        # such an exception.)
        *kwargs, output = kwargs_and_output
        scope = None if self._is_elsewhere() else self._running.leave(sys._getframe(1))
        if scope is None:  # the module's call began before the tracker was active, or in another thread
            return
        self._makers.runs(self._outside())
        if type(module).__name__ in self.uncounted:
            return
        if torch._C._get_tracing_state() is not None:  # reading a size would become part of the traced graph
            self.uncounted[type(module).__name__] = "it was being traced by torch.jit.trace"
            return
        try:
            self._add_traffic(scope, module, list(tensors_in([args, kwargs])), list(tensors_in(output)))
        except Exception as error:  # tensors of an unknown kind must not end the program
            pass_on(error)
            self.uncounted[type(module).__name__] = in_a_line(error)

    def _outside(self) -> str:
        """The scope of nodes created after a module's call has ended: the scope of the code that called the module."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._running_in(node)[0]
        return AUTOGRAD if self._running.innermost is None else self._running.innermost

    def _add_traffic(self, scope: str, module: nn.Module, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        taken, given = distinct_bytes(inputs), distinct_bytes(outputs)
        with_gradients = distinct_bytes(t for t in inputs if t.requires_grad)
        traffic = self.traffic.get(scope)
        if traffic is None:
            inner = [child for _, child in inner_modules(module)]
            parameters = list({id(p): p for child in inner for p in own_parameters(child)}.values())
            buffers = [each for child in inner for each in child._buffers.values() if each is not None]
            traffic = self.traffic[scope] = ModuleTraffic(
                type=type(module).__name__,
                parameter_bytes=distinct_bytes([*parameters, *buffers]),
                trainable_bytes=distinct_bytes(p for p in parameters if p.requires_grad),
                parameters={id(p): p.numel() for p in parameters},
            )
        traffic.calls += 1
        traffic.input_bytes += taken
        traffic.grad_input_bytes += with_gradients
        traffic.output_bytes += given

    def _optimizer_entering(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the hooks must not become part of a compiled step
            return None
        self._optimizing += 1
        try:
            self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
        except Exception as error:  # this optimizer's class allows no weak references
            pass_on(error)
            self.uncounted[type(optimizer).__name__] = in_a_line(error)
        return self._closure_outside(args, kwargs) if self._is_following else None

    def _optimizer_leaving(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._optimizing -= 1

    def _optimizer_ended(self, raised: bool) -> None:
        if raised:  # after an exception, PyTorch has not called `_optimizer_leaving`
            self._optimizing = max(0, self._optimizing - 1)

    def _closure_outside(self, args: Any, kwargs: Any) -> Any:
        """The arguments of `Optimizer.step`, the optimizer first. A closure among the arguments is replaced by a
        closure that marks its work as outside the optimizer.

        None, which means no change, if there is no closure.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        def outside(*inner: Any, **named: Any) -> Any:
            optimizing, self._optimizing = self._optimizing, 0
            try:
                return closure(*inner, **named)
            finally:
                self._optimizing = optimizing

        if len(args) > 1:
            return (args[0], outside, *args[2:]), kwargs
        return args, {**kwargs, "closure": outside}


@contextmanager
def _unwarned() -> Iterator[None]:
    """Suppress the warning that a compiled module runs under hooks, since the hooks are Rooftop's. The program's other
    filters stay.

    `warnings.filterwarnings` would make Python forget which warnings it has shown, and show them again.
    """
    message = re.compile(r"Using `torch\.compile\(module\)` when there are global hooks", re.IGNORECASE)
    ours = ("ignore", message, Warning, None, 0)
    warnings.filters.insert(0, ours)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]

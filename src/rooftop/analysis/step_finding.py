"""Find the ends of a program's steps if the program does not mark them.

A marker is an event that a program repeats in each step. The coarsest marker that has occurred so far is the leading
marker: a step ends each time the leading marker ends. The markers, from coarse to fine:

    OPTIMIZER   `Optimizer.step`, even if a GradScaler skips it
    BACKWARD    `loss.backward()`, for a loop that updates its weights by hand
    GRADIENT    `torch.autograd.grad`, also for a loop that updates its weights by hand
    CALL        the call of a module with parameters, from outside any module: inference
    BARE_CALL   the call of a module without parameters

A marker that is coarser than the leading marker becomes the leading marker when it first occurs. So if a program
evaluates before it trains, the training determines its steps. Of several optimizers, the first one is the leading
marker, unless another optimizer steps once for several steps of the first (a critic that trains five times as often as
a generator).

The finder replaces `nn.Module.__call__` to see module calls. The finder uses no hooks, because global hooks would be
compiled into the program's code. The replacement function takes about 0.2 us a call, and `torch.compile` adds no code
for it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from functools import wraps
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from rooftop.analysis.optimizer_labels import optimizer_ends
from rooftop.hardware.module_paths import inner_modules, own_parameters

# maximum steps of the leading marker in one step of a coarser marker; with more steps, the coarser marker ends an epoch
MOST_INNER_STEPS = 16
MOST_THREADS = 16  # largest number of threads kept by name: a program may start new threads at each step
# if another optimizer has made this many steps since the leading optimizer's last step, the program no longer uses the
# leading optimizer
FORGOTTEN_AFTER = 24


class Level(IntEnum):
    """Kinds of events that end a step, the finest kind first."""

    BARE_CALL = 1
    CALL = 2
    GRADIENT = 3
    BACKWARD = 4
    OPTIMIZER = 5


class Watcher(Protocol):
    """The interface to which a `StepFinder` reports. The finder calls these methods in the thread in which it was
    opened."""

    @property
    def in_charge(self) -> bool:
        """Whether the watcher accepts reports now. Events are ignored while the watcher does not accept reports."""

    def work_begins(self, compiled: bool) -> None:
        """The program calls a module for the first time since the finder was opened.

        Args:
            compiled: whether the module is compiled by `torch.compile`.
        """

    def work_goes_on(self) -> None:
        """A module is called from outside any module, after the first call."""

    def leader_changes(self) -> None:
        """A coarser marker has occurred, so the steps so far were only parts of a step. `step_ends` follows."""

    def step_ends(self, calls: tuple[int, int], whole: bool) -> None:
        """A step ends.

        Args:
            calls: number of calls of modules with parameters, from outside any module, and number of computations of
                gradients, both since the last call of this method.
            whole: whether the step began at an earlier occurrence of the marker that ends it.
        """

    def compiles(self) -> None:
        """The program calls `torch.compile`."""


class StepFinder:
    """While active (`with`), reports the ends of steps to the watcher.

    Attributes:
        level: level of the leading marker; None until a marker has occurred.
        began_at: the time (`time.perf_counter`) at which the first step began: the time of the first call of a module.
            If the leading marker is GRADIENT or coarser, the time of the first call of a module with parameters while
            gradients are enabled. None if there was no such call.
        threads: CPU seconds that every thread other than the one that runs the steps spent in calls of modules, by the
            thread's name. After `MOST_THREADS` threads, all further threads count together under the name "".
    """

    def __init__(self, watcher: Watcher) -> None:
        self.level: Level | None = None
        self.threads: defaultdict[str, float] = defaultdict(float)
        self._watcher = watcher
        self._thread = 0
        self._inside: set[int] = set()  # ids of the threads that are running a module now
        self._leading: weakref.ref[Any] | None = None
        self._calls = [0, 0]
        self._first_call_at: float | None = None
        self._first_training_at: float | None = None
        self._parameters = WeakIdKeyDictionary()  # module -> whether it has parameters
        self._optimizing = 0
        self._optimizer_steps = 0
        # the optimizer whose step has ended, but whose label is still open
        self._stepped: torch.optim.Optimizer | None = None
        self._led = 0  # number of steps of the leading marker
        # object of each marker other than the leading one, or this StepFinder if the marker has none -> its `_Other`
        self._others = WeakIdKeyDictionary()
        self._is_over = False
        self._around = ExitStack()
        self._calls_patched = ExitStack()

    @property
    def began_at(self) -> float | None:
        if self.level is not None and self.level >= Level.GRADIENT:
            return self._first_training_at
        return self._first_call_at

    def __enter__(self) -> StepFinder:
        self._thread = threading.get_ident()
        around = self._around
        for handle in (
            register_optimizer_step_pre_hook(self._optimizer_entering),
            register_optimizer_step_post_hook(self._optimizer_leaving),
        ):
            around.callback(handle.remove)
        around.enter_context(patch.object(torch.amp.GradScaler, "step", self._scaled(torch.amp.GradScaler.step)))
        backward = self._differentiating(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
        around.enter_context(patch.object(torch.autograd, "_engine_run_backward", backward))
        around.enter_context(optimizer_ends(self._optimizer_ended))
        around.enter_context(patch.object(torch, "compile", self._compiling(torch.compile)))
        self._calls_patched.enter_context(patch.object(nn.Module, "__call__", self._calling(nn.Module.__call__)))
        around.enter_context(self._calls_patched)
        return self

    def __exit__(self, *error: object) -> None:
        self._around.close()
        self._stepped = None
        self._is_over = True

    # ---- calls of the program ------------------------------------------------------------------------------------

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        inside, get_ident, is_compiling = self._inside, threading.get_ident, torch.compiler.is_compiling

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() in inside:
                return original(module, *args, **kwargs)
            return self._called(original, module, args, kwargs)

        return wraps(original)(__call__)

    def _called(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Handle a call of a module from outside any module. In other threads only the CPU time is recorded, and
        recomputation in backward is ignored.
        """
        thread = threading.get_ident()
        if torch._C._current_autograd_node() is not None:
            return original(module, *args, **kwargs)
        ours = thread == self._thread and self._watcher.in_charge
        level = self._entering(module) if ours else None
        cpu_s = 0.0 if thread == self._thread else time.thread_time()
        self._inside.add(thread)
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._inside.discard(thread)
            if thread != self._thread:
                name = threading.current_thread().name
                is_known = name in self.threads or len(self.threads) < MOST_THREADS
                self.threads[name if is_known else ""] += time.thread_time() - cpu_s
        # a call inside an optimizer's closure is part of the optimizer's step
        if level is not None and not self._optimizing:
            self._marked(level, module)
        return output

    def _entering(self, module: nn.Module) -> Level:
        with_parameters = self._parameters.get(module)
        if with_parameters is None:
            with_parameters = any(own_parameters(inner) for _, inner in inner_modules(module))
            self._parameters[module] = with_parameters
        if with_parameters:
            self._calls[0] += 1
            if self._first_training_at is None and torch.is_grad_enabled():
                self._first_training_at = time.perf_counter()
        if self._first_call_at is None:
            self._first_call_at = time.perf_counter()
            self._watcher.work_begins(_is_compiled(module))
        else:
            self._watcher.work_goes_on()
        return Level.CALL if with_parameters else Level.BARE_CALL

    def _differentiating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def differentiating(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_elsewhere() or not self._watcher.in_charge:
                return original(*args, **kwargs)
            result = original(*args, **kwargs)
            self._calls[1] += 1
            if not self._optimizing and self._thread not in self._inside:
                level = Level.BACKWARD if kwargs.get("accumulate_grad") else Level.GRADIENT
                self._marked(level, None)
            return result

        return differentiating

    def _scaled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Handle GradScaler.step, which skips the optimizer's step if a gradient is infinite."""

        @wraps(original)
        def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            steps = self._optimizer_steps
            result = original(scaler, optimizer, *args, **kwargs)
            if self._optimizer_steps == steps and not self._is_elsewhere():
                self._optimizer_steps += 1
                self._marked(Level.OPTIMIZER, optimizer)
            return result

        return step

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of `torch.compile`. A module that imports the function by name (`from torch import compile`)
        keeps the replacement even after the recording.
        """
        known = weakref.ref(self)

        @wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            finder = known()
            if finder is not None and not finder._is_over and not finder._is_elsewhere():
                finder._watcher.compiles()
            return original(*args, **kwargs)

        return compile

    def _optimizer_entering(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not self._is_elsewhere():
            self._optimizing += 1

    def _optimizer_leaving(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_elsewhere():
            return
        self._optimizing = max(0, self._optimizing - 1)
        self._optimizer_steps += 1
        self._stepped = optimizer

    def _optimizer_ended(self, raised: bool) -> None:
        """Handle the end of an optimizer's step, which marks the end of a step of the program. If an optimizer wraps
        another one, only the end of the outer optimizer's step counts."""
        if self._is_elsewhere():
            return
        if raised:  # the step raised, so its last hook did not run
            self._optimizing = max(0, self._optimizing - 1)
            self._stepped = None
        elif self._stepped is not None and not self._optimizing:
            optimizer, self._stepped = self._stepped, None
            self._marked(Level.OPTIMIZER, optimizer)

    def _is_elsewhere(self) -> bool:
        """Whether this code runs in another thread than the recorded one, or inside a backward pass."""
        return threading.get_ident() != self._thread or torch._C._current_autograd_node() is not None

    # ---- the event that ends a step --------------------------------------------------------------------------------

    def _marked(self, level: Level, what: Any) -> None:
        if not self._watcher.in_charge or (self.level is not None and level < self.level):
            return
        whole = True
        if self.level is None or level > self.level:
            if self.level is not None:
                self._watcher.leader_changes()
            whole = False
            self._lead(level, what)
        elif what is not None and what is not self._leader():
            if self._is_coarser(what):
                self._watcher.leader_changes()
                self._lead(level, what)
            elif self._is_forgotten(what):
                whole = False
                self._lead(level, what)
            else:
                return
        self._led += 1
        calls, self._calls = self._calls, [0, 0]
        self._watcher.step_ends((calls[0], calls[1]), whole)

    def _leader(self) -> Any:
        return self._leading() if self._leading is not None else None

    def _lead(self, level: Level, what: Any) -> None:
        self.level, self._leading = level, weakref.ref(what) if what is not None else None
        self._led = 0
        self._others.clear()

    def _is_coarser(self, what: Any) -> bool:
        """Record an occurrence of this marker. Whether its last two occurrences each came after the same number (2 to
        `MOST_INNER_STEPS`) of the leading marker's steps."""
        other = self._others.setdefault(self if what is None else what, _Other())
        since, before = self._led - other.led, other.since
        other.led, other.since = self._led, since
        return 1 < since <= MOST_INNER_STEPS and since == before

    def _is_forgotten(self, what: Any) -> bool:
        """Whether this marker replaces the leading marker, because the leader's object is gone or the leader has not
        occurred for a long time.
        """
        other = self._others[self if what is None else what]
        other.alone = other.alone + 1 if other.alone_since == self._led else 1
        other.alone_since = self._led
        return self._leader() is None or other.alone >= FORGOTTEN_AFTER


class _Other:
    """Counts of a marker other than the leading marker. `led`: number of leading steps from the beginning until the
    marker's last occurrence. `since`: number of leading steps between its last two occurrences. `alone`: how often the
    marker has occurred since the last leading step. `alone_since`: the number of that leading step, counted from 1.
    """

    def __init__(self) -> None:
        self.led, self.since = 0, 0
        self.alone, self.alone_since = 0, -1


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None

"""Find the module that created a node of autograd's graph.

Autograd numbers its nodes in the order in which a thread creates them. So each change of the running module is noted
with the number that the next node will get. A node belongs to the module that was running when the node got its number.

Nodes are also created during the backward pass: a reentrant checkpoint runs its modules again and differentiates their
results, and `create_graph=True` records a graph of the backward pass itself. Nodes created during the backward pass
belong to the module that runs again. If no module runs again, the nodes belong to the module that created the running
node. Each thread has its own numbers, and on a GPU the backward pass has its own thread. If two threads assigned the
same number, the number refers to the node that can still run, because a checkpoint's recomputed nodes run at once or
never. If both nodes can still run, the module is unknown.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

_next_number = torch._C._autograd._get_sequence_nr
"""A function that returns the number that autograd will assign to this thread's next node."""


@dataclass
class _Made:
    """The nodes of autograd's graph that one thread created. The nodes with the numbers `numbers[i]` to
    `numbers[i + 1] - 1` were created while the module `scopes[i]` ran."""

    numbers: list[int] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    # for each scope, whether a later backward pass may run the nodes that were created in it
    run_later: list[bool] = field(default_factory=list)
    next: int = 0  # autograd's next number when this thread was last checked

    def change(self, scope: str, number: int, run_later: bool) -> None:
        if not self.scopes or self.scopes[-1] != scope or self.run_later[-1] != run_later:
            self.numbers.append(number)
            self.scopes.append(scope)
            self.run_later.append(run_later)

    def maker(self, number: int) -> str | None:
        position = bisect_right(self.numbers, number) - 1
        return self.scopes[position] if position >= 0 else None

    def may_run(self, number: int) -> bool:
        """Whether this thread has created the autograd node `number`, and an ordinary backward pass may run it. An
        ordinary backward pass is one that no autograd node started.
        """
        position = bisect_right(self.numbers, number) - 1
        return position >= 0 and number < self.next and self.run_later[position]

    def ran(self, number: int) -> None:
        """Record that a nested backward pass has run the autograd node `number`. No later ordinary pass will run this
        node, or the other nodes of its range in `numbers`."""
        position = bisect_right(self.numbers, number) - 1
        if position >= 0:
            self.run_later[position] = False


class NodeMakers:
    """The scope (the name of the running module) in which each autograd node of one step was created. The step runs in
    the thread that creates this object."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}  # thread id -> nodes; the first id is the step's thread
        self.clear()

    def clear(self) -> None:
        """Forget all autograd nodes. Call this before the next step, which creates new nodes in this thread."""
        self._made = {threading.get_ident(): _Made(next=_next_number())}

    def runs(self, scope: str) -> None:
        """Record that this thread creates its autograd nodes in this scope from now on."""
        made = self._of_this_thread()
        made.next = _next_number()
        made.change(scope, made.next, run_later=torch._C._current_autograd_node() is None)

    def operator(self, scope: str | None = None, recomputed: bool = False) -> None:
        """Record that an operator runs and may have created an autograd node.

        Args:
            scope: name of the module that runs the operator. None: the scope last recorded for this thread.
            recomputed: whether a checkpoint is recomputing the operator's module. If nodes of a recomputed module run
                at all, they run in an inner backward pass that another node starts.
        """
        made = self._of_this_thread()
        since, made.next = made.next, _next_number()
        if scope is not None and since < made.next:
            made.change(scope, since, run_later=not recomputed)

    def of(self, node: Any) -> str | None:
        """The scope in which an autograd node was created; None if unknown."""
        number: int = node._sequence_nr()
        first, *others = self._made.values()
        if not others:
            return first.maker(number)
        here = self._of_this_thread()
        if here is not first and number < here.next and _is_inside_a_backward():
            here.ran(number)
            return here.maker(number)
        makers = {made.maker(number) for made in (first, *others) if made.may_run(number)}
        return makers.pop() if len(makers) == 1 else None

    def _of_this_thread(self) -> _Made:
        thread = threading.get_ident()
        made = self._made.get(thread)
        if made is None:
            made = self._made[thread] = _Made(next=max(0, _next_number() - 1))
        return made


def _is_inside_a_backward() -> bool:
    """Whether this thread runs a backward pass that a node of another backward pass started."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False

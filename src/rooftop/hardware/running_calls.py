"""Track the running calls of modules and optimizers, as their hooks report them.

PyTorch calls no hook if a module raises something other than an `Exception` (KeyboardInterrupt, SystemExit,
asyncio.CancelledError), or if an optimizer raises anything. If the program then catches the exception and continues,
that call seems to run forever, and everything that runs later outside any other call would be reported under its name.
So each call is identified by the frame that runs it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import CodeType, FrameType


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    thread: int
    frame: int  # only the frame's id, since the frame would keep the tensors of the call alive
    code: CodeType
    within: object


class RunningCalls:
    """The calls that hooks have reported, the outermost first. The object keeps no frame alive.

    A new call's frame may get the memory address of an ended call's frame. So the ended calls must be removed
    (`settle`) before a new call is recorded (`enter`).
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    @property
    def names(self) -> list[str]:
        """Names of the calls whose end no hook has reported. (`settle` removes calls that ended without a report.)"""
        return [call.name for call in self._calls]

    @property
    def innermost(self) -> str | None:
        return self._calls[-1].name if self._calls else None

    @property
    def within(self) -> object:
        """The object that `enter` received as its argument `within` for the innermost call; None if no call runs."""
        return self._calls[-1].within if self._calls else None

    def settle(self, frame: FrameType | None) -> bool:
        """Forget this thread's calls, except those that this frame or one of its callers runs. Return whether any call
        was forgotten.

        Calls that began in another thread stay, because they wait for this thread: autograd runs backward passes in its
        own threads.
        """
        if not self._calls or self._calls[-1].thread != threading.get_ident():
            return False
        codes: dict[int, CodeType] = {}
        top = self._calls[-1]
        while frame is not None:
            if id(frame) == top.frame and frame.f_code is top.code:
                return False
            codes[id(frame)] = frame.f_code
            frame = frame.f_back
        while self._calls and self._calls[-1].thread == top.thread:
            last = self._calls[-1]
            if codes.get(last.frame) is last.code:
                break
            self._calls.pop()
        return True

    def enter(self, name: str, frame: FrameType, within: object = None) -> None:
        """Record the beginning of a call that this frame runs. Call `settle` first.

        Args:
            within: an object in which the call runs, such as a node of autograd's graph.
        """
        self._calls.append(_Call(name, threading.get_ident(), id(frame), frame.f_code, within))

    def leave(self, frame: FrameType) -> str | None:
        """Record the end of the call that this frame or its caller runs, and of all calls inside that call. Return the
        call's name.

        The returned name is None if the call began before the hooks existed.
        """
        thread, frames = threading.get_ident(), (id(frame), id(frame.f_back))
        for place in reversed(range(len(self._calls))):
            call = self._calls[place]
            if call.thread == thread and call.frame in frames:
                del self._calls[place:]
                return call.name
        return None

    def clear(self) -> None:
        self._calls.clear()


def caller_of_hook(frame: FrameType) -> FrameType:
    """The frame that runs a module's call, given the frame that calls its first hook.

    PyTorch runs the module and its hooks in a function inside the call's own function. If the call fails, only the
    outer function still runs.
    """
    return frame.f_back if frame.f_back is not None else frame

"""The calls of modules and optimizers that are running, as their hooks tell.

PyTorch calls no hook where a module ends with what is no `Exception` (KeyboardInterrupt, SystemExit,
asyncio.CancelledError), or an optimizer with anything. A program that catches it goes on, and a call that seems to run
for ever would give its name to all that follows. So each call is known by the frame that runs it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import CodeType, FrameType


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    thread: int
    frame: int  # its id: the frame itself would keep the tensors of the call alive
    code: CodeType
    within: object


class RunningCalls:
    """The calls that hooks have told of, the outermost first. Keeps no frame alive.

    A frame of one call may take the place in memory of an earlier one. It enters here when it does, and what is above
    its caller has ended then.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    @property
    def names(self) -> list[str]:
        """Names of the calls whose end no hook has reported; `settle` removes those that have ended."""
        return [call.name for call in self._calls]

    @property
    def innermost(self) -> str | None:
        return self._calls[-1].name if self._calls else None

    @property
    def within(self) -> object:
        """What the innermost one was called within; None if there is none."""
        return self._calls[-1].within if self._calls else None

    def settle(self, frame: FrameType | None) -> bool:
        """Forget the calls of this thread that neither this frame nor any of its callers runs; whether there were any.

        Calls that began in another thread wait for this one: autograd runs backward passes in threads of its own.
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
        """A call begins, which this frame runs. Those above its caller must be settled.

        Args:
            within: what the call is a part of besides, such as a node of autograd's graph.
        """
        self._calls.append(_Call(name, threading.get_ident(), id(frame), frame.f_code, within))

    def leave(self, frame: FrameType) -> str | None:
        """A call ends, which this frame or its caller runs, and with it all that is above it. Returns its name.

        None: it began before it could be seen.
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
    """The frame that runs a module's call, where `frame` is that which calls a hook at its beginning.

    PyTorch runs the module and its hooks in a function inside that of the call, which alone also sees it fail.
    """
    return frame.f_back if frame.f_back is not None else frame

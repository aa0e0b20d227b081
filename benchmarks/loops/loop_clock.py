"""A clock with which a loop records its own step times and losses, independently of Rooftop.

    clock = LoopClock(device)
    for batch in loader:
        ...
        clock.step(loss)
    clock.finish()

The clock starts at the end of the second step. It waits for the device there, at pauses (for an evaluation) and at the
end, as loops that print their speed do. `finish` prints one line of JSON. Its `late_ms` is the mean time of the steps
after the first 12 (`watched`), which `rooftop analyze` no longer watches.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import torch

WARM_UP = 2
WATCHED = 12
MARK = "LOOP "


class LoopClock:
    def __init__(self, device: str = "cpu", watched: int = WATCHED) -> None:
        self.device, self.watched = device, watched
        self.steps = 0
        self.seconds = 0.0
        self.losses: list[Any] = []
        self._since: float | None = None
        self._timed = 0
        self._marks: list[Any] = []  # the ends of steps; None: a pause

    def step(self, loss: Any = None) -> None:
        """Record the end of a step. The loss may stay on the device until the end."""
        self.steps += 1
        self._timed += self._since is not None
        if loss is not None:
            self.losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._marks.append(self._mark())
        if self.steps == WARM_UP:
            self.go_on()

    def pause(self) -> None:
        """Stop the clock until the next step, for example during an evaluation."""
        self._marks.append(None)
        if self._since is not None:
            self._wait()
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def go_on(self) -> None:
        if self.steps >= WARM_UP:
            self._wait()
            self._since = time.perf_counter()

    def finish(self) -> None:
        self.pause()
        losses = [float(loss) for loss in self.losses]
        ms = 1e3 * self.seconds / self._timed if self._timed else None
        said = {"steps": self.steps, "step_ms": ms, "late_ms": self._late_ms(), "losses": losses}
        print(MARK + json.dumps(said), flush=True)

    def _late_ms(self) -> float | None:
        pairs = [(begin, end) for begin, end in pairwise(self._marks) if begin is not None and end is not None]
        late = pairs[self.watched :]
        if self.device.startswith("cuda"):
            durations = [begin.elapsed_time(end) for begin, end in late]
        else:
            durations = [1e3 * (end - begin) for begin, end in late]
        return sum(durations) / len(durations) if durations else None

    def _mark(self) -> Any:
        """Record the present time on the device's stream, without waiting for the device."""
        if not self.device.startswith("cuda"):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

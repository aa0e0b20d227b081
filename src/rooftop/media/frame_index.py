"""The index of a video: the time of each frame, and the key frames from which decoding can start."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class FrameIndex:
    """The times of all frames in display order, and the key frames. The index takes 8 bytes of memory per frame, and 16
    more per key frame.

    Attributes:
        pts: (N,), increasing: the time at which each frame is shown, in ticks of the stream's clock.
        last_duration: duration of the last frame, in ticks.
        starts: pts of the key frames from which decoding can start, increasing; some of these key frames are not shown
            themselves.
        keys: positions of the key frames among all frames in display order, from 0.
        seekable: whether the file itself stores the times of frames; if not, decoding always starts at the first frame.
        damage: the damage that was found in the file's packets, or None.
        discontinuity: a description of where the file's clock goes back or its packets are not consecutive, or None.
    """

    pts: array[int]
    last_duration: int
    starts: array[int]
    keys: array[int]
    seekable: bool
    damage: str | None
    discontinuity: str | None = None

    def __len__(self) -> int:
        return len(self.pts)

    def position(self, pts: int) -> int | None:
        """The position of the frame whose tick is `pts`; None if there is no such frame."""
        at = bisect_left(self.pts, pts)
        return at if at < len(self.pts) and self.pts[at] == pts else None

    def shown_at(self, ticks: Fraction) -> int:
        """The position of the last frame that starts at or before `ticks`; -1 if all frames start later."""
        return bisect_right(self.pts, ticks) - 1

    def start_before(self, position: int) -> int:
        """The index in `starts` of the last key frame that is not later than the frame at this position. -1 if all key
        frames in `starts` are later."""
        return bisect_right(self.starts, self.pts[position]) - 1

    def duration(self, position: int) -> int:
        """The duration of the frame at `position`, in ticks."""
        if position + 1 < len(self.pts):
            return self.pts[position + 1] - self.pts[position]
        return self.last_duration

    def constant_rate(self, time_base: Fraction, stated: Fraction | None) -> Fraction | None:
        """The constant frame rate, in frames per second: frame k is shown k / rate seconds after frame 0, to the
        precision of the clock. None if the frame rate is not constant. With fewer than two frames, this is `stated`.

        Args:
            time_base: duration of a tick in seconds.
            stated: the frame rate that the file states, or None.
        """
        if len(self.pts) < 2:
            return stated
        span = (self.pts[-1] - self.pts[0]) * time_base
        mean = ((len(self.pts) - 1) / span).limit_denominator(1001)
        return next((rate for rate in (stated, mean) if rate and self._is_at(rate, time_base)), None)

    def grid(self, time_base: Fraction) -> Fraction:
        """The lowest constant frame rate, in frames per second, at which each frame of the video starts together with a
        frame of this rate."""
        step = math.gcd(*(tick - self.pts[0] for tick in self.pts)) or 1
        return 1 / (step * time_base)

    def _is_at(self, rate: Fraction, time_base: Fraction) -> bool:
        step = 1 / (rate * time_base)  # duration of a frame, in ticks
        slack = 0 if step.denominator == 1 else min(Fraction(1), step / 4)
        return all(abs(tick - self.pts[0] - k * step) <= slack for k, tick in enumerate(self.pts))

    @property
    def end(self) -> int:
        """The tick at which the video's last frame ends."""
        return self.pts[-1] + self.last_duration

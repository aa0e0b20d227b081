"""The path of a camera over time. The viewer's page records and replays paths, and `rooftop scene render --path`
renders a path.

{"rooftop_path": 1, "views": [{"seconds": 0.0, "eye": [3, 0, 1], "target": [0, 0, 0], "up": [0, 0, 1],
                               "fov_y_degrees": 50}, ...]}
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rooftop.errors import InputError
from rooftop.scene.viewing.viewpoints import Viewpoint, finite_numbers

FORMAT = 1
MOST_VIEWS = 100_000
MOST_SECONDS = 1e5


@dataclass(frozen=True)
class RecordedPath:
    """The views of a path, with their times.

    Attributes:
        seconds: (N,) ascending.
        views: (N,) the view at each time.
    """

    seconds: tuple[float, ...]
    views: tuple[Viewpoint, ...]

    @property
    def duration(self) -> float:
        """Seconds from the first view to the last."""
        return self.seconds[-1] - self.seconds[0]

    def at(self, seconds: float) -> Viewpoint:
        """The view at a time, interpolated linearly between the recorded views. For times before the first view, the
        result is the first view; for times after the last view, it is the last view."""
        after = bisect_right(self.seconds, seconds)
        if after == 0 or after == len(self.views):
            return self.views[min(after, len(self.views) - 1)]
        (start, end), (a, b) = self.seconds[after - 1 : after + 1], self.views[after - 1 : after + 1]
        share = (seconds - start) / (end - start)

        def between(name: str) -> Any:
            first, last = np.asarray(getattr(a, name)), np.asarray(getattr(b, name))
            return (first + share * (last - first)).tolist()

        eye, target, up = (tuple(between(name)) for name in ("eye", "target", "up"))
        return Viewpoint(eye, target, up, between("fov_y_degrees"))

    def evenly(self, frames: int) -> list[Viewpoint]:
        """`frames` views at equal time intervals, from the first to the last."""
        times = np.linspace(self.seconds[0], self.seconds[-1], frames)
        return [self.at(seconds) for seconds in times.tolist()]

    def plain(self) -> dict[str, Any]:
        """The path as an object for JSON."""
        both = zip(self.seconds, self.views, strict=True)
        return {"rooftop_path": FORMAT, "views": [{"seconds": seconds} | view.plain() for seconds, view in both]}

    @classmethod
    def of_plain(cls, content: object, where: str = "path") -> RecordedPath:
        """Read a path from a parsed JSON object.

        Raises:
            InputError: the object is not a path; the message begins with `where`.
        """
        if not isinstance(content, Mapping) or "rooftop_path" not in content:
            raise InputError(f"{where}: expected a path recorded by `rooftop scene view`, with rooftop_path and views")
        if content["rooftop_path"] != FORMAT:
            raise InputError(
                f"{where}: rooftop_path is {content['rooftop_path']!r:.80}, expected {FORMAT}; record the path again"
            )
        views = content.get("views")
        if not isinstance(views, Sequence) or isinstance(views, str) or not 1 <= len(views) <= MOST_VIEWS:
            raise InputError(f"{where}: expected views, a list of 1 to {MOST_VIEWS:,}")
        seconds: list[float] = []
        read: list[Viewpoint] = []
        for number, view in enumerate(views):
            named = f"{where}: view {number}"
            if not isinstance(view, Mapping) or "seconds" not in view:
                raise InputError(f"{named}: expected an object with seconds, eye and target")
            (time,) = finite_numbers([view["seconds"]], 1, f"{named}: seconds")
            if not (seconds[-1] if seconds else -MOST_SECONDS) < time < MOST_SECONDS:
                raise InputError(
                    f"{named}: seconds is {time:g}: expected more than in the view before, up to {MOST_SECONDS:g}"
                )
            seconds.append(time)
            read.append(Viewpoint.of_plain({name: view[name] for name in view if name != "seconds"}, named))
        return cls(tuple(seconds), tuple(read))

    @classmethod
    def read(cls, path: Path) -> RecordedPath:
        """Read a path from a file.

        Raises:
            InputError: the file cannot be read, or does not contain a path.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from None
        return cls.of_plain(content, str(path))

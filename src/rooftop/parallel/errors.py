"""The errors of `rooftop.parallel`; a layout that does not fit is a `ValueError`."""

from __future__ import annotations

from rooftop.errors import RooftopError


class RankError(RooftopError, RuntimeError):
    """A rank failed, is missing or was started with other settings than the rest; raised on every rank, with the rank's
    number.
    """

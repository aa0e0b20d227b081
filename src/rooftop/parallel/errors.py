"""The errors of `rooftop.parallel`. (A layout that does not fit raises a `ValueError`.)"""

from __future__ import annotations

from rooftop.errors import RooftopError


class RankError(RooftopError, RuntimeError):
    """A rank failed, is missing, cannot start, or was started with other settings than the other ranks.

    All ranks raise this error, which names the rank at fault. Only the rank whose own exception is the first failure
    raises that exception instead.
    """

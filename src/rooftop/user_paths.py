"""Paths as users give them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """Replace "~" or "~user" at the beginning with the home folder. If there is no such user, the path stays as it is,
    since "~draft.mp4" is a valid file name.
    """
    given = Path(path)
    with suppress(RuntimeError):
        return given.expanduser()
    return given

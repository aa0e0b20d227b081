"""Paths as users give them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """Replace "~" and "~user" at the beginning by the home folder. A name such as "~draft.mp4" stays as it is if there
    is no such user."""
    given = Path(path)
    with suppress(RuntimeError):
        return given.expanduser()
    return given

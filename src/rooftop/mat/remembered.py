"""Small caches of the most recently added values, safe with threads and forks."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any

_remembering = Lock()
os.register_at_fork(
    before=_remembering.acquire, after_in_parent=_remembering.release, after_in_child=_remembering.release
)


def remember(found: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Store a value in the cache `found`. If the cache already has `most` entries, first drop the oldest."""
    with _remembering:
        if len(found) >= most and key not in found:
            found.pop(next(iter(found)))
        found[key] = value

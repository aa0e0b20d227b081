"""Lock the folder of a training, so that a second training cannot mix its files with those of the first.

The lock is a record lock on a file. Worker processes that outlive a killed training do not keep this lock, as they
would keep a lock by `flock`.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooftop.errors import InputError
from rooftop.train.checkpoints.folders import writing_to

LOCK = ".lock"
_held: set[Path] = set()
"""The folders that this process has locked. Closing a second descriptor of a lock file would release the lock."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep the lock of a folder within the block; create the folder if it is missing.

    A nested block for the same folder has no effect. On a file system without locks, nothing is locked.

    Raises:
        InputError: another process has locked the folder, or the folder cannot be written.
        OSError: the disk is full.
    """
    resolved = folder.resolve()
    if resolved in _held:
        yield
        return
    path = folder / LOCK
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    with file:
        if not _lock(file.fileno()):
            file.seek(0)
            other = file.read().decode().strip() or "which is starting"
            raise InputError(
                f"{folder} is used by another training, {other}: wait for its end, or choose another folder"
            )
        with writing_to(folder):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        _held.add(resolved)
        try:
            yield
        finally:
            _held.discard(resolved)


def _lock(descriptor: int) -> bool:
    """Lock a file; returns False if another process has locked it."""
    try:
        import fcntl  # Windows lacks this module
    except ImportError:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True

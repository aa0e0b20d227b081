"""Measure ceilings once for each device, driver and set of versions, and keep the ceilings and their history in a
cache.

Only the requested parts are measured. Missing parts are added to the cache when they are needed.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rooftop.errors import CeilingsFileError
from rooftop.hardware.ceilings import Ceilings, Progress
from rooftop.hardware.figures import PRECISIONS
from rooftop.hardware.histories import History, history_of
from rooftop.hardware.probes import identity, machine_of, parts_of, probe
from rooftop.whole_files import write_whole
from rooftop.words import counted, did_you_mean


def measure_ceilings(
    device: torch.device | str | None = None,
    refresh: bool = False,
    progress: Progress = lambda what, fraction: None,
    *,
    precisions: Collection[str] | None = None,
    transfers: bool = True,
    links: bool = True,
) -> Ceilings:
    """Ceilings of a device. Parts that were measured before, under the same driver and versions, are read from the
    cache.

    Launches and bandwidths are always included.

    Args:
        device: "cpu", "cuda", "cuda:1"; None is the GPU if there is one.
        refresh: measure again (under 30 s on a GPU, under 20 s on a CPU). The best value of each figure in
            all measurements, old and new, is kept. `ceilings_history` shows the kept measurements; `forget_ceilings`
            discards them.
        progress: called with (the current measurement, fraction done).
        precisions: the matrix rates that are needed ("bf16"); None for all. Precisions that the device lacks are
            omitted.
        transfers: whether rates between host and device are needed.
        links: whether rates between GPUs are needed.

    Raises:
        ValueError: the device is not on this machine, or the precision is unknown.
        CeilingsFileError: the cached file is corrupt; `refresh=True` replaces it.
    """
    where = _device(device)
    unknown = sorted(set(precisions or ()) - set(PRECISIONS))
    if unknown:
        raise ValueError(
            f"unknown precision {unknown[0]!r}; known are {', '.join(PRECISIONS)}{did_you_mean(unknown[0], PRECISIONS)}"
        )
    path = cache_path(identity(where))
    known = None if refresh else _known(path)
    unwanted = {*(() if transfers else ("transfers",)), *(() if links else ("links",))}
    if precisions is not None:
        unwanted |= set(PRECISIONS) - set(precisions)
    measured = known.parts if known is not None else set()
    missing = [part for part in parts_of(where) if part not in measured | unwanted]
    if known is not None and not missing:
        return known.ceilings()
    return _add(path, probe(where, missing, progress), replace_corrupt=refresh).ceilings()


def keep(ceilings: Ceilings, device: torch.device | str | None = None) -> Ceilings:
    """Write raised ceilings into the cache of a device, and return the best known values.

    Two processes may call this function at the same time without losing values.

    Raises:
        ValueError: the device is not on this machine, or the ceilings are those of another device.
        CeilingsFileError: the cached file is corrupt.
    """
    where = _device(device)
    found = history_of(ceilings)
    path = cache_path(identity(where))
    known = _known(path)
    here = machine_of(where).device_id
    if here != found.machine.device_id:
        raise ValueError(
            f"the ceilings are those of {ceilings.device} ({ceilings.device_id}), not of {where} ({here}): only "
            "measurements of this machine are kept"
        )
    if known is not None:  # store only the raised figures: the cache already has the measurements
        found = History(known.machine, known.measurements, found.raises)
    return _add(path, found, replace_corrupt=False).ceilings()


def ceilings_history(device: torch.device | str | None = None) -> History | None:
    """The kept measurements of a device under the present driver and versions; None if there are none.

    Raises:
        ValueError: the device is not on this machine.
        CeilingsFileError: the cached file is corrupt.
        OSError: the cached file cannot be read.
    """
    return _read(cache_path(identity(_device(device))))


def forget_ceilings(device: torch.device | str | None = None) -> bool:
    """Delete the cached ceilings of a device. Return whether there were cached ceilings.

    Raises:
        ValueError: the device is not on this machine.
    """
    path = cache_path(identity(_device(device)))
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def cache_path(identity: tuple[str, ...]) -> Path:
    """The cache file of the ceilings of a device. `identity` contains the device and the versions (see
    `probes.identity`).
    """
    return cache_folder() / f"ceilings-{re.sub(r'[^A-Za-z0-9.+-]+', '_', '-'.join(identity))}.json"


def cache_folder() -> Path:
    """The folder for cached measurements and compilations: $ROOFTOP_CACHE, or rooftop/ in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("ROOFTOP_CACHE") or Path(home) / "rooftop")


def _device(device: torch.device | str | None) -> torch.device:
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"ceilings can be measured on cpu and cuda devices, got {where}")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{where} does not exist: torch can use {counted(torch.cuda.device_count(), 'GPU')} on this machine"
        )
    return where


def _read(path: Path) -> History | None:
    """The history in a file. None if there is no file, or if the file has the first format.

    Raises:
        CeilingsFileError: the file is corrupt.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise _unusable(path, error) from error
    try:
        plain = json.loads(text)
        if isinstance(plain, dict) and plain.get("format") == 1:
            Ceilings.from_dict(plain)
            return None
        return History.from_dict(plain)
    except (ValueError, RecursionError) as error:
        raise _unusable(path, error) from error


def _known(path: Path) -> History | None:
    """The history in a file, as `_read` returns it. None also if the system refuses to read the file: `_add` warns
    about that."""
    try:
        return _read(path)
    except OSError:
        return None


def _unusable(path: Path, error: BaseException) -> CeilingsFileError:
    return CeilingsFileError(
        f"{path} is not a usable ceilings file ({error}); measure again with: rooftop ceilings --refresh"
    )


def _add(path: Path, found: History, replace_corrupt: bool) -> History:
    """Merge a history into the file, completely or not at all, and return the merged history."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            try:
                known = _read(path)
            except CeilingsFileError:
                if not replace_corrupt:
                    raise
                known = None
            together = found if known is None else known.merged(found)
            write_whole(path, json.dumps(together.to_dict(), indent=1) + "\n")
            return together
    except OSError as error:
        warnings.warn(
            f"the ceilings could not be stored in {path.parent} ({error.strerror or error}) and will be measured "
            "again next time: set ROOFTOP_CACHE to a writable folder",
            stacklevel=3,
        )
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock, so that only one process at a time changes the file. If the process is killed, the system releases
    the lock."""
    with open(path.with_suffix(".lock"), "a", encoding="utf-8") as lock:
        try:
            import fcntl  # Windows lacks this module: there the last of two simultaneous writers wins

            fcntl.flock(lock, fcntl.LOCK_EX)
        except (ImportError, OSError):  # some network file systems have no locks
            pass
        yield

"""The instances of a scene, with a log of changes for renderers that keep copies."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)

REMOVED = -1  # the mesh number of a removed instance
GROWTH = 1.5  # factor by which a full array grows
FEW_CHANGES = 1024  # maximum number of rows of the log, or half the number of instances if that is larger


class Instances:
    """The mesh and transform of each instance, by number. Numbers never change and are never reused.

    Attributes:
        count: number of instances ever added, including removed ones.
        live: number of instances that are not removed.
        changes: the log of moves and removals.
    """

    def __init__(self) -> None:
        self.count = self.live = 0
        self.changes = Changes()
        self._mesh_of: NDArray[np.int32] = np.empty(0, np.int32)
        self._transforms: Floats = np.empty((0, 4, 4))

    @property
    def mesh_of(self) -> NDArray[np.int32]:
        """The mesh of each instance, (count,), as a view; REMOVED for removed instances."""
        return self._mesh_of[: self.count]

    @property
    def transforms(self) -> Floats:
        """The transform of each instance from object to world, (count, 4, 4), as a view."""
        return self._transforms[: self.count]

    def add(self, mesh: int, transforms: Floats) -> range:
        """Add one instance for each transform (N, 4, 4); return their numbers."""
        first, self.count = self.count, self.count + len(transforms)
        self._mesh_of = grown(self._mesh_of, self.count)
        self._transforms = grown(self._transforms, self.count)
        self._mesh_of[first : self.count] = mesh
        self._transforms[first : self.count] = transforms
        self.live += len(transforms)
        self.changes.version += bool(len(transforms))
        return range(first, self.count)

    def move(self, numbers: NDArray[np.int64], transforms: Floats) -> None:
        """Set transforms (N, 4, 4) of existing, distinct instances. Unchanged transforms are not logged."""
        differ = (self._transforms[numbers] != transforms).reshape(-1, 16)
        moved = differ.view(np.uint64).any(1)  # compares eight booleans at a time
        self._transforms[numbers] = transforms
        self.changes.note(numbers[moved], self.count)

    def remove(self, numbers: NDArray[np.int64]) -> None:
        """Remove existing, distinct instances."""
        self._mesh_of[numbers] = REMOVED
        self.live -= len(numbers)
        self.changes.note(numbers, self.count)

    def changed(self, version: int, known: int) -> NDArray[np.int64]:
        """The instances that changed after `version` or were added after the first `known` ones, in ascending order."""
        if known == self.count and version == self.changes.version:
            return np.zeros(0, np.int64)
        rows = self.changes.since(version)
        if rows is None or known == 0:
            return np.arange(self.count)
        return np.concatenate([rows[rows < known], np.arange(known, self.count)])


class Changes:
    """A bounded log of changed rows. Each change gets a new version. A reader whose version is older than the log must
    read all rows again.

    Attributes:
        version: the current version.
    """

    def __init__(self) -> None:
        self.version = 0
        self._log: deque[tuple[int, NDArray[np.int64]]] = deque()
        self._logged = 0  # number of rows in the log
        self._from = 0  # the log contains all changes after this version

    def note(self, rows: NDArray[np.int64], count: int) -> None:
        """Log that these rows of an array changed. The array has `count` rows, which limits the length of the log."""
        if not len(rows):
            return
        self.version += 1
        self._log.append((self.version, rows.copy()))
        self._logged += len(rows)
        while self._logged > max(FEW_CHANGES, count // 2):
            self._from, forgotten = self._log.popleft()
            self._logged -= len(forgotten)

    def since(self, version: int) -> NDArray[np.int64] | None:
        """The rows that changed after a version, unique and ascending. None if the log no longer contains all changes
        since that version."""
        if version < self._from:
            return None
        rows = [changed for made, changed in takewhile(lambda entry: entry[0] > version, reversed(self._log))]
        if len(rows) == 1:  # the rows of one change are distinct
            return np.sort(rows[0])
        return np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)


def grown(array: NDArray[Number], count: int) -> NDArray[Number]:
    """Return the array itself if it has at least `count` rows, and a larger copy if not."""
    if count <= len(array):
        return array
    room = max(count, int(GROWTH * len(array)))
    larger = np.empty((room, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def most_stretch(linear: Floats) -> Floats:
    """The largest singular value (N,) of each linear map (N, 3, 3), computed in closed form."""
    squared = linear.transpose(0, 2, 1) @ linear
    mean = np.trace(squared, axis1=1, axis2=2) / 3
    rest = squared - mean[:, None, None] * np.eye(3)
    spread = np.sqrt((rest * rest).sum((1, 2)) / 6)
    over = np.where(spread > 0, spread, 1.0)
    cosine = np.clip(np.linalg.det(rest / over[:, None, None]) / 2, -1.0, 1.0)
    largest: Floats = np.sqrt(mean + 2 * spread * np.cos(np.arccos(cosine) / 3))
    return largest


def first_flat(linear: Floats, ratio: float, least: float) -> int | None:
    """The index of the first linear map (N, 3, 3) that is too flat or too small, or None. A map is too flat if its
    smallest singular value is below `ratio` times its largest, and too small if its largest is below `least`."""
    # the Frobenius norm is at least the largest singular value, and at most sqrt(3) times that value
    size = np.sqrt((linear * linear).sum((1, 2)))
    # The smallest singular value is at least |determinant| / largest^2. If that bound suffices for a map, its singular
    # values need not be computed.
    doubtful = np.flatnonzero((abs(_determinants(linear)) < 2 * ratio * size**3) | (size < 2 * least))
    if not len(doubtful):
        return None
    stretch = np.linalg.svd(linear[doubtful], compute_uv=False)  # singular values (N, 3), the largest first
    flat = (stretch[:, 2] < stretch[:, 0] * ratio) | (stretch[:, 0] < least)
    return int(doubtful[flat.argmax()]) if flat.any() else None


def _determinants(linear: Floats) -> Floats:
    """The determinants (N,) of (N, 3, 3), by the explicit formula, which takes a seventh of the time of NumPy's
    decompositions."""
    a, b, c, d, e, f, g, h, i = linear.reshape(-1, 9).T
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)  # type: ignore[no-any-return]

"""The memory layout of a frame's pictures, which are concatenated and may differ in size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from rooftop.scene.arguments import MAX_SIDE

# maximum number of levels of hierarchical z: level 0 is the pixels, the last level is one texel
MOST_LEVELS = (MAX_SIDE - 1).bit_length() + 1

MOST_THREADS = 2**30  # maximum number of texels of a launch, so that an index plus a stride fits into int32

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Canvas:
    """The sizes of all views: cameras first, then shadow maps.

    Attributes:
        sizes: (width, height) of each view, in pixels.
        cameras: number of views that belong to cameras.
    """

    sizes: tuple[tuple[int, int], ...]
    cameras: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.sizes, self.cameras))

    @cached_property
    def starts(self) -> list[int]:
        """The index of each view's first texel, followed by the total number of texels."""
        ends = np.cumsum([width * height for width, height in self.sizes], dtype=np.int64)
        return [0, *ends.tolist()]

    @property
    def texels(self) -> int:
        """Number of texels of all views."""
        return self.starts[-1]

    @property
    def camera_texels(self) -> int:
        """Number of texels of the cameras' views."""
        return self.starts[self.cameras]

    @cached_property
    def tiled_texels(self) -> int:
        """Number of threads that process the cameras' pixels. If `same` is not 0, these are whole squares of 16 x 16
        threads; if it is 0, one thread for each pixel."""
        return self._squares * 256 if self.same else self.camera_texels

    @property
    def _squares(self) -> int:
        """Number of squares of 16 x 16 pixels that cover the pictures of all cameras. It is computed from the size of
        the first picture, so it is correct only if all sizes are equal."""
        width, height = self.sizes[0] if self.cameras else (0, 0)
        return self.cameras * -(-width // 16) * -(-height // 16)

    @cached_property
    def same(self) -> int:
        """Number of texels of one camera's view if all cameras have the same size. 0 if the sizes differ, or if the
        squares of 16 x 16 threads that cover all cameras' views would have more than MOST_THREADS threads."""
        first, *others = self.sizes[: self.cameras] or ((0, 0),)
        is_same = all(size == first for size in others) and self._squares * 256 <= MOST_THREADS
        return first[0] * first[1] if is_same else 0

    @cached_property
    def table(self) -> Ints:
        """The table (views, 4) that becomes `buffers.Views.pictures`."""
        rows = [(*size, start, levels_of(size)) for size, start in zip(self.sizes, self.starts[:-1], strict=True)]
        return np.array(rows, dtype=np.int32)

    @cached_property
    def levels(self) -> int:
        """Number of hierarchical z levels of the camera that has the most levels."""
        return max(map(levels_of, self.sizes[: self.cameras]), default=1)

    @property
    def hzb_steps(self) -> list[tuple[int, int]]:
        """For each launch that builds hierarchical z, the two levels that it computes: a level and the next one. If
        there is no next level, both are the last level."""
        return [(level, min(level + 1, self.levels - 1)) for level in range(1, self.levels, 2)]

    @cached_property
    def hzb_at(self) -> Ints:
        """Where each level of each camera's view begins in `Frame.hzb`: indices (cameras, MOST_LEVELS). Level 0 and
        levels that a view lacks are not stored there, and have 0."""
        table, at = np.zeros((self.cameras, MOST_LEVELS), np.int32), 0
        for view, size in enumerate(self.sizes[: self.cameras]):
            for level in range(1, levels_of(size)):
                table[view, level] = at
                at += texels_of(size, level)
        return table

    @cached_property
    def hzb_texels(self) -> int:
        """Number of texels of levels 1 and up of all cameras."""
        return sum(texels_of(size, k) for size in self.sizes[: self.cameras] for k in range(1, levels_of(size)))


@lru_cache(maxsize=32)
def canvas_of(sizes: tuple[tuple[int, int], ...], cameras: int) -> Canvas:
    """Return the canvas of these views from a cache, so that its tables are computed only once."""
    return Canvas(sizes, cameras)


def levels_of(size: tuple[int, int]) -> int:
    """Number of hierarchical z levels of a picture of this size, including level 0 (its pixels)."""
    return (max(size) - 1).bit_length() + 1


def texels_of(size: tuple[int, int], level: int) -> int:
    """Number of texels of one level of a picture."""
    width, height = size
    return (((width - 1) >> level) + 1) * (((height - 1) >> level) + 1)

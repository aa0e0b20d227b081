"""The common interface of data sets."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from rooftop.errors import InputError
from rooftop.media.errors import DamagedVideoError

DAMAGE = (
    DamagedVideoError, EOFError, Image.DecompressionBombError, OSError, SyntaxError, ValueError, struct.error,
    zlib.error,
)  # fmt: skip
"""Exceptions for a sample that cannot be read. Other exceptions are errors of the program and are never skipped."""


@runtime_checkable
class Samples(Protocol):
    """A data set with numbered samples, e.g. any map-style data set of torch.utils.data.

    A loader may use the data set from several threads simultaneously. A data set that is not thread-safe must set
    `thread_safe = False`. If a data set has a method `name(index)`, messages about damaged samples contain the sample's
    name.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class DrawnSamples(Samples, Protocol):
    """A data set whose samples are augmented at random."""

    def draw(self, index: int, generator: np.random.Generator) -> Any:
        """Return the sample, augmented with `generator`; the same generator state gives the same sample."""


@runtime_checkable
class StagedSamples(Samples, Protocol):
    """A data set whose samples are made in steps, which `headspace` times one by one."""

    def content(self, index: int) -> bytes:
        """The encoded bytes of the sample, as they are stored on disk."""

    def decoded(self, index: int, content: bytes, generator: np.random.Generator | None = None) -> Any:
        """Decode the sample's bytes to an image. The augmentation is drawn from `generator` now, and `changed` applies
        it."""

    def changed(self, index: int, decoded: Any, generator: np.random.Generator | None) -> Any:
        """Make the sample from the decoded image that `decoded` returned. Augmentation that `decoded` has not drawn
        uses `generator`."""


def sample(samples: Samples, index: int, seed: int, epoch: int, copy: int = 0) -> Any:
    """Return a sample of an epoch.

    `draw` of a data set gets a generator that depends only on `index`, `seed`, `epoch` and `copy`. So the sample is the
    same in every process and thread, and each copy has its own augmentation. For a data set without `draw`, this is
    `samples[index]`.
    """
    draw = getattr(samples, "draw", None)  # faster than isinstance with the protocol
    if draw is not None:
        return draw(index, np.random.default_rng((seed, epoch, index, copy) if copy else (seed, epoch, index)))
    return samples[index]


class Part:
    """A subset of a data set in the given order, e.g. the held-out samples.

        data = ImageFolder("photographs")
        held_out, rest = Part(data, range(0, len(data), 10)), ...

    Unlike `torch.utils.data.Subset`, a `Part` keeps the augmentation and the names of the samples.

    Raises:
        InputError: the indices are not a list of integers (for example a mask), or one is out of the data set's
            range.
    """

    def __init__(self, samples: Samples, indices: Sequence[int]) -> None:
        given = np.asarray(indices)
        if given.dtype == object and all(isinstance(each, int | np.integer) for each in given.flat):
            given = np.asarray(given.tolist())
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InputError(
                f"indices of shape {given.shape} and dtype {given.dtype}: expected a list of integers; for a mask, "
                "pass np.flatnonzero(mask)"
            )
        self.samples, self.indices = samples, given.astype(np.int64)
        if len(self.indices) and not 0 <= self.indices.min() <= self.indices.max() < len(samples):
            raise InputError(
                f"indices from {self.indices.min()} to {self.indices.max()}: expected 0 to {len(samples) - 1}"
            )
        self.thread_safe = getattr(samples, "thread_safe", True)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.samples[int(self.indices[index])]

    def draw(self, index: int, generator: np.random.Generator) -> Any:
        """Return a sample, augmented if the data set augments samples."""
        own = int(self.indices[index])
        draw = getattr(self.samples, "draw", None)
        return draw(own, generator) if draw is not None else self.samples[own]

    def name(self, index: int) -> str | None:
        """The sample's name in the data set."""
        return name_of(self.samples, int(self.indices[index]))


def name_of(samples: Samples, index: int) -> str | None:
    """A sample's name in a data set, e.g. its path; None if the data set has no names."""
    name = getattr(samples, "name", None)
    if name is not None:
        return str(name(index)) if callable(name) else None
    inner, indices = getattr(samples, "dataset", None), getattr(samples, "indices", None)
    return name_of(inner, indices[index]) if inner is not None and indices is not None else None  # torch's Subset

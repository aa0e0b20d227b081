"""Make a batch in pieces: each worker makes one piece, and the pieces are joined.

With PyTorch's `default_collate` a batch has one piece per worker, so that the first batch is ready soon. Joined pieces
are bit-identical to one collation of all samples. With any other `collate` function a batch has a single piece, because
the function needs all samples of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate as collate_by
from torch.utils.data._utils.collate import default_collate_fn_map

from rooftop.data.orders import Numbers, Order
from rooftop.data.samples import DAMAGE, Samples, name_of, sample
from rooftop.errors import InputError

ONE_THREAD = 32768  # PyTorch's operators use one thread up to this many elements (at::internal::GRAIN_SIZE)


class Damaged(NamedTuple):
    """A damaged sample that was skipped: its index in the data set, its name if it has one, and the reason."""

    sample: int
    name: str | None
    reason: str


@dataclass(frozen=True)
class Made:
    """A piece of a batch, or a whole batch.

    Attributes:
        value: collated samples; None if there are none.
        places, indices: positions and indices of the samples, as in `Order.part`.
        damaged: the samples that were skipped.
        finished: time of completion by `time.monotonic`, a clock that all processes share.
    """

    value: Any
    places: Numbers
    indices: Numbers
    damaged: tuple[Damaged, ...] = ()
    finished: float = 0.0


@dataclass(frozen=True)
class Job:
    """The description of the batches that a loader makes: the samples, their order, and the collate function.

    Attributes:
        pieces: number of pieces in a batch.
        skip: whether damaged samples are skipped. If False, a damaged sample raises.
    """

    samples: Samples
    order: Order
    collate: Callable[[list[Any]], Any]
    pieces: int
    skip: bool

    def make(self, epoch: int, number: int, piece: int) -> Made:
        """Make piece `piece` of batch `number` of an epoch.

        Raises:
            InputError: a sample is damaged, and damaged samples are not skipped.
        """
        places, indices, copies = (self._cut(part, piece) for part in self.order.part(epoch, number))
        found, kept, damaged = [], [], []
        for at, (index, copy) in enumerate(zip(indices.tolist(), copies.tolist(), strict=True)):
            try:
                found.append(sample(self.samples, index, self.order.seed, epoch, copy))
                kept.append(at)
            except DAMAGE as error:
                name = name_of(self.samples, index)
                if not self.skip:
                    raise InputError(f"{damage_in_words(index, name, error)}{TO_SKIP}") from error
                damaged.append(Damaged(index, name, str(error) or type(error).__name__))
            except Exception as error:
                error.add_note(f"while sample {index} was read")
                raise
        value = collated(found, self.collate) if found else None
        return Made(value, places[kept], indices[kept], tuple(damaged), time.monotonic())

    def _cut(self, part: Numbers, piece: int) -> Numbers:
        return part[piece * len(part) // self.pieces : (piece + 1) * len(part) // self.pieces]


TO_SKIP = '; on_damage="skip" leaves such samples out (in a recipe: faults.damaged=skip)'
"""The end of the error message about a damaged sample."""


def damage_in_words(index: int, name: str | None, error: BaseException) -> str:
    """Say which sample cannot be read, and why."""
    reason = str(error) or type(error).__name__
    if name is None:
        return f"sample {index} cannot be read: {reason}"
    return f"sample {index}: {reason}" if name in reason else f"sample {index} ({name}) cannot be read: {reason}"


def pieces_of(collate: Callable[[list[Any]], Any], workers: int) -> int:
    """The number of pieces into which a batch is divided: one per worker if `collate` is PyTorch's, else one."""
    return workers if collate is default_collate else 1


def collated(samples: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """Collate samples to a batch.

    `default_collate` is replaced by a version that starts no threads of PyTorch and returns bit-identical batches.

    Raises:
        InputError: the samples' tensors differ in shape, or `collate` returns None.
    """
    if collate is not default_collate:
        batch = collate(samples)
        if batch is None:
            raise InputError("collate returned None: expected a batch of the samples")
        return batch
    return collate_by(samples, collate_fn_map={**default_collate_fn_map, Tensor: _stacked})


def _stacked(batch: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    first = batch[0]
    if any(each.shape != first.shape for each in batch):
        raise _different(batch)
    small = len(batch) * first.numel() <= ONE_THREAD
    if small or not all(_plain(each) and each.dtype == first.dtype for each in batch):
        return torch.stack(list(batch))
    whole = torch.empty((len(batch), *first.shape), dtype=first.dtype)
    for row, each in zip(_bytes(whole), batch, strict=True):
        np.copyto(row, _bytes(each[None])[0])
    return whole


def joined(pieces: Sequence[Made], pin: bool = False, copy: bool = False) -> Made:
    """Join all pieces of a batch, in order, to the batch.

    Args:
        pin: whether to put joined or copied tensors into pinned memory, for asynchronous copies to a GPU.
        copy: whether to copy the tensors even if there is only one piece.
    """
    full = [piece for piece in pieces if len(piece.indices)]
    value = None
    if full:
        value = full[0].value if len(full) == 1 and not copy else _join([piece.value for piece in full], pin)
    return Made(
        value,
        np.concatenate([piece.places for piece in pieces]),
        np.concatenate([piece.indices for piece in pieces]),
        tuple(chain.from_iterable(piece.damaged for piece in pieces)),
        max(piece.finished for piece in pieces),
    )


def _join(values: Sequence[Any], pin: bool) -> Any:
    """Join the results of `default_collate`: tensors, strings, and containers of tensors and strings."""
    first = values[0]
    if isinstance(first, Tensor):
        return _joined_tensors(values, pin)
    if isinstance(first, Mapping):
        parts = {key: _join([value[key] for value in values], pin) for key in first}
        return parts if type(first) is dict else type(first)(parts)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        if all(isinstance(each, (str, bytes)) for each in first):  # a string for each sample
            return type(first)(chain.from_iterable(values))
        fields = [_join(field, pin) for field in zip(*values, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    return first


def _joined_tensors(pieces: Sequence[Tensor], pin: bool) -> Tensor:
    first = pieces[0]
    if any(piece.shape[1:] != first.shape[1:] for piece in pieces):
        raise _different([piece[0] for piece in pieces])
    if not all(_plain(piece) and piece.dtype == first.dtype for piece in pieces):
        return torch.cat(list(pieces))
    whole = torch.empty((sum(map(len, pieces)), *first.shape[1:]), dtype=first.dtype, pin_memory=pin)
    rows, start = _bytes(whole), 0
    for piece in pieces:
        np.copyto(rows[start : start + len(piece)], _bytes(piece))
        start += len(piece)
    return whole


def _different(tensors: Sequence[Tensor]) -> InputError:
    shapes = sorted({tuple(each.shape) for each in tensors})
    said = " and ".join(map(str, shapes[:3]))
    return InputError(f"samples of shapes {said} cannot form a batch: resize them, or give the loader a collate=")


def _plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
    )


def _bytes(tensor: Tensor) -> Any:
    """View a tensor of any dtype as a NumPy array, (rows, bytes per row), because NumPy copies in a single thread."""
    rows = tensor.shape[0]
    if tensor.numel() == 0:
        return np.empty((rows, 0), dtype=np.uint8)
    return flat_bytes(tensor).numpy().reshape(rows, -1)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor of any dtype, (bytes,) uint8: a view if the tensor is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

"""Split a batch into a share for each device. Each value is split, copied or passed on unchanged, or raises an error.

Tensors determine the number of samples. Lists and arrays with one item per sample are also split, so that an image
stays with its label.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import IOBase
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from rooftop.parallel.caches import is_cache
from rooftop.parallel.containers import full_name, holds_tensors, leaves, mapped, opened
from rooftop.parallel.replicas import places_of

SETTINGS = (bool, int, float, complex, type(None), torch.dtype, torch.device)
"""A tuple whose values all have these types contains settings instead of samples, so each device gets the whole tuple.
"""


def scatter(inputs: Any, devices: Sequence[torch.device | str], dim: int = 0) -> list[Any]:
    """Split a batch into a share for each device.

    Args:
        inputs: a tensor, or tensors in tuples, named tuples, lists, Mappings and dataclasses. Tensors with at least one
            dimension are split. All of them must have the same size along `dim`, which is the number of samples. Scalar
            tensors are copied to each device. Containers with one item per sample are split like tensors: lists (also
            of one tensor or dict per sample), tuples of strings or of other objects of one type that are not settings
            (numbers, None, dtypes, devices), NumPy arrays, `array.array` and `range`. Any other value is the same
            object in every share.
        devices: the devices. With n samples, at most the first n devices get a share. With no samples, only the first
            device gets a share. Without tensors to split, all devices get a share.
        dim: the dimension along which tensors and arrays are split, which may be negative.

    Returns:
        The shares in order, each with the structure of `inputs`. If the batch cannot be divided equally, the first
        shares have one more sample. A share that stays on its device is a view.

    Raises:
        ValueError: there are no devices, tensors lack the dimension or have different sizes along it, or a list of
            tensors is ambiguous (it may have one item per sample, or tensors to split).
        TypeError: a value cannot be split, although it contains tensors or can only be read once (such as an unknown
            object, a PackedSequence, a cache, an iterator).
    """
    places = places_of(devices)
    for leaf in leaves(inputs):
        _refuse_what_cannot_be_cut(leaf)
    samples = _Samples.of(inputs, dim)
    if samples is None:
        return [_Share(place, None, 0, 0).opened(inputs) for place in places]
    count = min(len(places), max(1, samples.count))
    if len(places) > 1:
        samples.refuse_ambiguous_lists(inputs)
    samples.check(inputs)
    bounds = [number * (samples.count // count) + min(number, samples.count % count) for number in range(count + 1)]
    return [
        _Share(place, samples, start, end).opened(inputs)
        for place, start, end in zip(places, bounds, bounds[1:], strict=False)
    ]


def _refuse_what_cannot_be_cut(leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided or leaf.is_nested:
            kind = "nested tensor" if leaf.is_nested else f"tensor of the layout {leaf.layout}"
            raise TypeError(f"a {kind} cannot be split: pass a dense tensor (from to_padded_tensor() or to_dense())")
        return
    name = full_name(leaf)
    if isinstance(leaf, PackedSequence):
        raise TypeError(
            f"a {name} cannot be split, since its rows are sorted by time. Pass the padded tensor and the lengths, and "
            "pack them inside the module (torch.nn.utils.rnn.pad_packed_sequence, pack_padded_sequence)"
        )
    if is_cache(leaf):
        raise TypeError(
            f"a {name} cannot be split: the module writes to it, and the replicas' writes would be lost. To continue "
            f"from a cache, call the module itself (parallel.module(...))"
        )
    if isinstance(leaf, Iterator) and not isinstance(leaf, IOBase):
        raise TypeError(
            f"a {name} cannot be split, because all replicas would read the same iterator: pass a list (list(...))"
        )
    if holds_tensors(leaf):
        raise TypeError(
            f"a {name} holds tensors and cannot be split: pass its tensors in tuples, lists, dicts or dataclasses. "
            f"Tensors that all samples share should be buffers of the module"
        )


@dataclass(frozen=True)
class _Samples:
    """The number of samples of a batch, the dimension of tensors along which samples are counted, and a test for
    containers with one item per sample.

    Attributes:
        lists_tell: whether all tensors are in lists. If so, a list contains tensors to split, instead of one item per
            sample.
    """

    dim: int
    count: int
    lists_tell: bool

    @classmethod
    def of(cls, inputs: Any, dim: int) -> _Samples | None:
        """Find the samples of a batch; None if no tensor has a dimension."""
        outside = list(_tensors_outside_lists(inputs, outermost=True))
        sizes = {_size(tensor, dim): tensor for tensor in outside or _with_dimensions(inputs)}
        if len(sizes) > 1:
            raise ValueError(_differ(dim, sizes.values()))
        return cls(dim, next(iter(sizes)), not outside) if sizes else None

    def cut(self, part: Any) -> bool:
        """Whether a container has one item for each sample."""
        if not isinstance(part, list | deque) and type(part) is not tuple:
            return False
        if len(part) != self.count:
            return False
        found = list(leaves(part))
        tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
        if type(part) is tuple:  # tuples often hold sizes, steps or states instead of samples
            return not tensors and len(set(map(type, part))) == 1 and not all(isinstance(n, SETTINGS) for n in found)
        with_dimensions = _with_dimensions(part)
        return not with_dimensions or not (self.lists_tell or all(map(self._fits, with_dimensions)))

    def cut_leaf(self, leaf: Any) -> bool:
        """Whether a value that is neither a container nor a tensor is split: a NumPy array whose dimension `dim` has
        `count` items, or a range or `array.array` of `count` items."""
        if isinstance(leaf, np.ndarray):
            return -leaf.ndim <= self.dim < leaf.ndim and leaf.shape[self.dim] == self.count
        return isinstance(leaf, range | array) and len(leaf) == self.count

    def check(self, part: Any, outermost: bool = True) -> None:
        """Raise an error for tensors with another number of samples, except in a list with one item per sample."""
        if isinstance(part, Tensor):
            if part.dim() and _size(part, self.dim) != self.count:
                here = torch.empty(self.count, device="meta")
                raise ValueError(_differ(self.dim, [here, part]))
        elif outermost or not self.cut(part):
            for value in _values(part):
                self.check(value, outermost=False)

    def refuse_ambiguous_lists(self, part: Any, outermost: bool = True) -> None:
        """Raise an error for ambiguous lists. For example, if a list of two tensors of two rows each is passed with two
        images, the list may have one tensor per image, or each tensor may have one row per image.
        """
        if self.lists_tell or self.count < 2:
            return
        if not outermost and isinstance(part, list | deque) and len(part) == self.count:
            tensors = _with_dimensions(part)
            if all(map(self._fits, tensors)) and all(map(_with_dimensions, part)):
                raise ValueError(
                    f"a {type(part).__name__} of {len(part)} items is ambiguous with {self.count} samples along dim "
                    f"{self.dim}: it may have one item per sample, or tensors to split. To split each tensor, pass a "
                    f"tuple. If it has one item per sample, stack the items into one tensor (torch.stack)"
                )
        for value in _values(part):
            self.refuse_ambiguous_lists(value, outermost=False)

    def _fits(self, tensor: Tensor) -> bool:
        return -tensor.dim() <= self.dim < tensor.dim() and tensor.shape[self.dim] == self.count


@dataclass(frozen=True)
class _Share:
    """Takes a device's share of values: the samples from `start` to `end`, or whole values if there are no samples.

    A repeated tensor is copied once.
    """

    device: torch.device
    samples: _Samples | None
    start: int
    end: int
    done: dict[tuple[int, bool], Tensor] = field(default_factory=dict)

    def opened(self, container: Any) -> Any:
        """Return this device's share of the outermost container of the inputs. This container is never treated as a
        list with one item per sample."""
        found = opened(container)
        return self.of(container) if found is None else found.made([self.of(value) for value in found.values])

    def of(self, part: Any) -> Any:
        found = opened(part)
        if found is None:
            return self._of_leaf(part)
        if self.samples is None or not self.samples.cut(part):
            return found.made([self.of(value) for value in found.values])
        items, attributes = found.values[self.start : self.end], found.values[len(part) :]
        return found.made([*(mapped(item, self._whole) for item in items), *map(self.of, attributes)])

    def _of_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._moved(leaf, narrowed=self.samples is not None and leaf.dim() > 0)
        if self.samples is None or not self.samples.cut_leaf(leaf):
            return leaf
        if isinstance(leaf, np.ndarray):
            return leaf[(slice(None),) * (self.samples.dim % leaf.ndim) + (slice(self.start, self.end),)]
        return leaf[self.start : self.end]

    def _whole(self, leaf: Any) -> Any:
        """Move a value to the device without splitting it, because it belongs to one sample."""
        return self._moved(leaf, narrowed=False) if isinstance(leaf, Tensor) else leaf

    def _moved(self, tensor: Tensor, narrowed: bool) -> Tensor:
        key = (id(tensor), narrowed)
        if key not in self.done:
            part = tensor
            if narrowed and self.samples is not None:
                part = tensor.narrow(self.samples.dim, self.start, self.end - self.start)
            self.done[key] = moved(part, self.device)
        return self.done[key]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device. The host waits for copies to the CPU, which are safe to read only once they are
    complete."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def _values(part: Any) -> list[Any]:
    found = opened(part)
    return [] if found is None else found.values


def _tensors_outside_lists(part: Any, outermost: bool = False) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        if part.dim():
            yield part
    elif outermost or not isinstance(part, list | deque):
        for value in _values(part):
            yield from _tensors_outside_lists(value)


def _with_dimensions(part: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(part) if isinstance(leaf, Tensor) and leaf.dim() > 0]


def _size(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"inputs are split along dim {dim}, but a tensor of shape {tuple(tensor.shape)} has no such dimension"
        )
    return tensor.shape[dim]


def _differ(dim: int, tensors: Iterable[Tensor]) -> str:
    return (
        f"all tensors are split along dim {dim} and must have the same size there, got the shapes "
        f"{', '.join(str(tuple(tensor.shape)) for tensor in tensors)}: expand those that all samples share "
        "(tensor.expand), or make them buffers of the module"
    )

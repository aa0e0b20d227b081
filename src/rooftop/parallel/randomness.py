"""Random numbers that do not depend on the layout. Seed, name and global position determine initial values and dropout
masks.

For its part of a tensor, which a `Box` describes, a rank draws exactly the values that the whole tensor has at the
positions of this part. So a model is bit for bit the same on CPU and GPU, on any number of ranks, and for any way of
splitting the model. The dropout masks are also the same, even when forward is recomputed.
`rooftop.kernels.random_normal`, `random_uniform` and `counter_dropout` generate the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from rooftop.kernels import Box, counter_dropout, random_key, random_normal, random_uniform

Boxes = Box | Sequence[Box]  # Several boxes are consecutive parts of a local tensor along its first dimension.


@dataclass(frozen=True)
class Stream:
    """The random numbers of a seed (0 to 2^64 - 1). Each name has its own sequence.

    Use the whole model's names, which are the same on every rank. In each method, `box` says which part of the
    whole tensor the given tensor is. Several boxes describe consecutive parts of the given tensor along its first
    dimension. None: the given tensor is the whole tensor.
    """

    seed: int

    def normal_(
        self,
        tensor: Tensor,
        name: str,
        box: Boxes | None = None,
        mean: float = 0.0,
        std: float = 1.0,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> Tensor:
        """Fill a tensor of any floating point dtype with normal numbers, truncated to [low, high], and return it.

        Raises:
            TypeError, ValueError: as in `random_normal`, or the boxes and the tensor differ in their number of
                elements.
        """
        key = random_key(self.seed, name)
        with torch.no_grad():
            for part, place in _parts(name, tensor, box):
                numbers = random_normal(
                    place, key, mean=mean, std=std, low=low, high=high, dtype=part.dtype, device=part.device
                )
                part.copy_(numbers.view(part.shape))
        return tensor

    def uniform_(
        self, tensor: Tensor, name: str, box: Boxes | None = None, low: float = 0.0, high: float = 1.0
    ) -> Tensor:
        """Fill a tensor of any floating point dtype with uniform numbers in [low, high), and return it.

        Raises:
            TypeError, ValueError: as in `random_uniform`, or the boxes and the tensor differ in their number of
                elements.
        """
        key = random_key(self.seed, name)
        with torch.no_grad():
            for part, place in _parts(name, tensor, box):
                numbers = random_uniform(place, key, low=low, high=high, dtype=part.dtype, device=part.device)
                part.copy_(numbers.view(part.shape))
        return tensor

    def dropout(
        self, x: Tensor, name: str, p: float, step: int | Tensor, box: Boxes | None = None, training: bool = True
    ) -> Tensor:
        """Drop elements of x with probability p, and divide the others by 1 - p. Return x itself if p is 0 or
        `training` is False.

        Args:
            x: any shape, bfloat16, float16, float32 or float64.
            name: name of this dropout. Two dropouts with the same name drop the same elements.
            p: probability to drop an element, from 0 to 1.
            step: training step, from 0. Each step has a different mask, so count each micro-batch as a step. The step
                may be a tensor, as for `counter_dropout`.
            box: the part of the whole tensor, as in `Stream`.
            training: whether to drop elements, like `module.training`.

        Raises:
            TypeError, ValueError: as in `counter_dropout`, or the boxes and x differ in their number of elements.
        """
        if not training or p == 0:
            return x
        key = random_key(self.seed, name)
        if box is None or isinstance(box, Box):
            return counter_dropout(x, p, key, step=step, box=box)
        parts = [counter_dropout(part, p, key, step=step, box=place) for part, place in _parts(name, x, box)]
        return torch.cat(parts)


def _parts(name: str, tensor: Tensor, box: Boxes | None) -> list[tuple[Tensor, Box]]:
    """Split a rank's part of a tensor along its first dimension, into one piece for each box. A box says where a piece
    lies in the whole tensor."""
    boxes = _listed(box) or [Box.whole(tensor.shape)]
    counts = [math.prod(each.size) for each in boxes]
    row = math.prod(tensor.shape[1:])
    if sum(counts) != tensor.numel() or (len(boxes) > 1 and any(row == 0 or count % row for count in counts)):
        raise ValueError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} does not consist of boxes of the sizes "
            f"{[each.size for each in boxes]}: together, the boxes must have as many elements as the tensor. If there "
            "are several boxes, each must cover whole rows of the first dimension"
        )
    if len(boxes) == 1:
        return [(tensor, boxes[0])]
    return list(zip(tensor.split([count // row for count in counts]), boxes, strict=True))


def _listed(box: Boxes | None) -> list[Box]:
    if box is None:
        return []
    return [box] if isinstance(box, Box) else list(box)


# ---- modules ---------------------------------------------------------------------------------------------------

Init = Callable[[Stream, Tensor, str, Boxes | None], object]
"""A function of (stream, tensor, name, box) that fills a tensor."""


@dataclass(frozen=True)
class Normal:
    """An initializer with normally distributed numbers, truncated to [low, high]."""

    mean: float = 0.0
    std: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    def __call__(self, stream: Stream, tensor: Tensor, name: str, box: Boxes | None) -> Tensor:
        return stream.normal_(tensor, name, box, self.mean, self.std, self.low, self.high)


@dataclass(frozen=True)
class Uniform:
    """An initializer with uniformly distributed numbers in [low, high)."""

    low: float = 0.0
    high: float = 1.0

    def __call__(self, stream: Stream, tensor: Tensor, name: str, box: Boxes | None) -> Tensor:
        return stream.uniform_(tensor, name, box, self.low, self.high)


@dataclass(frozen=True)
class Constant:
    """An initializer that sets all elements to one constant."""

    value: float

    def __call__(self, stream: Stream, tensor: Tensor, name: str, box: Boxes | None) -> Tensor:
        return tensor.detach().fill_(self.value)


def materialize(
    module: nn.Module,
    rules: Sequence[tuple[str, Init]],
    stream: Stream,
    *,
    boxes: Mapping[str, Boxes] | None = None,
    device: torch.device | str = "cpu",
    whole_name: Callable[[str], str] = lambda name: name,
) -> nn.Module:
    """Allocate and initialize all parameters and buffers of a module that are on the meta device.

    For a tensor with a box, only the box's part is ever allocated. Tied parameters (one tensor under several names)
    stay one tensor, with the first name's values. A new parameter keeps the dtype, requires_grad and attributes of the
    meta parameter.

    Args:
        module: the module, which is changed in place. A tensor with a box may have the shape of the box or of the whole
            tensor.
        rules: pairs (pattern, init). The first pattern that matches a tensor's name in the whole model determines its
            init. Patterns are shell patterns, such as "*.bias". An init is Normal, Uniform, Constant or any function of
            (stream, tensor, name, box).
        stream: the random numbers of a seed.
        boxes: for each tensor of which this rank has only a part, the box of that part, by the tensor's name in the
            whole model.
        device: the device of the new tensors.
        whole_name: for pipeline stages, a function from a name in this module to the name in the whole model.

    Returns:
        The module.

    Raises:
        ValueError: no rule matches a name, a box has no tensor in the module, or a box and its tensor differ in size.
    """
    boxes = dict(boxes or {})
    planned: dict[Tensor, tuple[str, Init, tuple[int, ...]]] = {}
    for local_name, old in (*module.named_parameters(), *module.named_buffers()):
        name = whole_name(local_name)
        box = boxes.get(name)
        if old.is_meta:
            planned[old] = name, _rule(name, rules), _local_shape(name, old, box)
    unknown = set(boxes) - {name for name, *_ in planned.values()}
    if unknown:
        raise ValueError(
            f"materialize: got boxes for {', '.join(sorted(unknown))}, but the module has no such tensors on meta"
        )
    made: dict[Tensor, Tensor] = {}
    for old, (name, init, shape) in planned.items():
        new = torch.empty(shape, dtype=old.dtype, device=device)
        init(stream, new, name, boxes.get(name))
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        made[old] = new
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor in made:
                    tensors[key] = made[tensor]  # type: ignore[assignment]
    return module


def init_on_meta(
    build: Callable[[], nn.Module],
    rules: Sequence[tuple[str, Init]],
    seed: int,
    *,
    boxes: Mapping[str, Boxes] | None = None,
    device: torch.device | str = "cpu",
    whole_name: Callable[[str], str] = lambda name: name,
) -> nn.Module:
    """Build a module on the meta device, and `materialize` it with the same arguments.

    Without boxes, the result is the whole model. With boxes, each tensor equals its part of the whole model bit for
    bit.
    """
    with torch.device("meta"):
        module = build()
    return materialize(module, rules, Stream(seed), boxes=boxes, device=device, whole_name=whole_name)


def _rule(name: str, rules: Sequence[tuple[str, Init]]) -> Init:
    for pattern, init in rules:
        if fnmatchcase(name, pattern):
            return init
    patterns = ", ".join(pattern for pattern, _ in rules)
    raise ValueError(f"materialize: no rule matches {name}: add a rule; the patterns are {patterns or 'none'}")


def _local_shape(name: str, tensor: Tensor, box: Boxes | None) -> tuple[int, ...]:
    """The shape of this rank's part of a tensor. The given tensor has the shape of the part or of the whole tensor."""
    boxes = _listed(box)
    shape = tuple(tensor.shape)
    if not boxes or sum(math.prod(each.size) for each in boxes) == tensor.numel():
        return shape
    if len(boxes) == 1 and boxes[0].shape == shape:
        return boxes[0].size
    raise ValueError(
        f"materialize: {name} has shape {shape}, which fits neither the part nor the whole tensor of its box: "
        f"{', '.join(map(str, boxes))}"
    )

"""Inputs for which a change must be correct: the given inputs, and similar ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftop.rewrites.structures import mapped, signature

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[Tensor], Tensor]
LARGE = 1e3
ROUNDINGS = 4
"""Largest difference between neighbouring inputs, in roundings of their dtype."""


@dataclass(frozen=True)
class Draw:
    """The arguments of one call, and a description of them.

    Attributes:
        what: a readable name, such as "NaN in the inputs".
        given: (args, kwargs).
        special: whether the values may make a model overflow or divide by zero.
        uniform: whether all values of a tensor are equal.
        otherwise: arguments to try, in this order, if the model refuses `given`.
        needed: words for the error that is raised if the model refuses all these arguments; "": the draw is skipped.
    """

    what: str
    given: Arguments
    special: bool = False
    uniform: bool = False
    otherwise: tuple[Arguments, ...] = ()
    needed: str = ""


def draws(given: Arguments, generator: torch.Generator) -> list[Draw]:
    """The given inputs, then other inputs of the same shapes and dtypes.

    Floating-point values are drawn from the given ones, so that they have the given spread and range. Integers are
    permuted, so that an index stays valid.
    """
    found = [
        Draw("the given inputs", given),
        others(given, generator),
        Draw("non-contiguous inputs", mapped(given, non_contiguous)),
    ]
    if any(t.is_floating_point() and t.numel() for t in tensors_of(given)):
        found += [
            Draw(what, mapped(given, _floats(change)), special=True, uniform=uniform)
            for what, uniform, change in (
                ("constant inputs", True, lambda t: torch.full_like(t, float(t.double().mean()))),
                (f"inputs {LARGE:g} times as large", False, lambda t: t * LARGE),
                ("inputs of -0.0", True, lambda t: torch.full_like(t, -0.0)),
                ("NaN in the inputs", False, with_nan),
            )
        ]
    return found


def others(given: Arguments, generator: torch.Generator) -> Draw:
    """The given arguments with other random values. A model may raise for other integers, such as indices. So each
    alternative in `otherwise` keeps the values of one integer tensor, and the last alternative keeps those of all.
    """

    def but(fixed: list[Tensor]) -> Arguments:
        other = lambda t: t if any(t is each for each in fixed) else other_values(t, generator)  # noqa: E731
        return mapped(given, other)  # type: ignore[no-any-return]

    integers = [t for t in tensors_of(given) if not t.is_floating_point()]
    fixed = [[each] for each in integers] + [integers]
    return Draw(
        "other values",
        but([]),
        otherwise=tuple(but(each) for each in fixed if len(each) < len(tensors_of(given))),
        needed="values drawn from the given ones: pass draw=, a function that creates other arguments",
    )


def tensors_of(structure: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses, each once."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(structure, note)
    return found


def _floats(change: Change) -> Change:
    def changed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.layout != torch.strided:
            return tensor
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    return changed


def other_values(tensor: Tensor, generator: torch.Generator, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor with values drawn from those of `tensor`; integers and booleans are permuted if `shape` does not change
    the number of elements.

    If all values of the tensor are equal, floating-point values are drawn between 0 and this constant, or between 0 and
    1 if it is 0; integers between 0 and the constant, if it is above 0; and booleans from both values. Sparse tensors
    stay unchanged.
    """
    if tensor.layout != torch.strided:
        return tensor
    flat, size = tensor.detach().reshape(-1), torch.Size(tensor.shape if shape is None else shape)
    count = size.numel()
    if flat.numel() == 0 or count == 0:
        return tensor.new_empty(size)
    generator = _on(flat.device, generator)
    if tensor.is_floating_point() or count != flat.numel():
        places = torch.randint(flat.numel(), (count,), generator=generator, device=flat.device)
    else:
        places = torch.randperm(count, generator=generator, device=flat.device)
    drawn = _varied(flat[places], generator).reshape(size)
    if shape is None:
        drawn = torch.empty_like(tensor, requires_grad=False).copy_(drawn)  # with the strides of `tensor`
    return drawn.requires_grad_(tensor.requires_grad)


def _varied(flat: Tensor, generator: torch.Generator) -> Tensor:
    """If all values are equal, replace them by random values between 0 and this constant.

    For the constant 0, floats are drawn between 0 and 1. Booleans are drawn from both values. Integers of at most 0
    stay, since other values may not be valid indices.
    """
    first = flat[0]
    if flat.is_complex() or not bool((flat == first).all()):
        return flat
    if flat.is_floating_point():
        shares = torch.rand(flat.shape, generator=generator, device=flat.device).to(flat.dtype)
        return shares * (first if first else 1)
    high = 1 if flat.dtype == torch.bool else int(first)
    if high <= 0:
        return flat
    end = min(high + 1, torch.iinfo(torch.int64).max)
    return torch.randint(end, flat.shape, generator=generator, device=flat.device).to(flat.dtype)


def _on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """The generator itself if its device has the type of `device`, otherwise a new generator on `device` that is seeded
    by it. For a GPU, drawing millions of values on the CPU would take seconds."""
    if generator.device.type == device.type:
        return generator
    return torch.Generator(device).manual_seed(int(torch.randint(1 << 62, (), generator=generator)))


def neighbour(given: Arguments, generator: torch.Generator) -> Arguments:
    """The given arguments, with each floating-point value changed by at most `ROUNDINGS` roundings.

    Values stay in the range of their tensor, since a model may need probabilities, for example. 0, NaN and infinities
    stay as they are.
    """

    def changed(tensor: Tensor) -> Tensor:
        finite = tensor[tensor.isfinite()].double()
        if not finite.numel():
            return tensor
        own, device = _on(tensor.device, generator), tensor.device
        steps = torch.randint(-ROUNDINGS, ROUNDINGS + 1, tensor.shape, generator=own, device=device)
        moved = tensor.double() * (1 + torch.finfo(tensor.dtype).eps * steps.double())
        moved = moved.clamp(finite.min(), finite.max())
        return torch.empty_like(tensor).copy_(torch.where(tensor.isfinite(), moved, tensor.double()))

    return mapped(given, _floats(changed))  # type: ignore[no-any-return]


def same_kinds(one: Draw, other: Draw) -> bool:
    """Whether the tensors of two draws have the same shapes and dtypes."""
    ours, theirs = ([(t.shape, t.dtype) for t in tensors_of(each.given)] for each in (one, other))
    return ours == theirs


def non_contiguous(tensor: Tensor) -> Tensor:
    """A tensor with the same values, and with gaps between them in memory."""
    if tensor.dim() == 0 or tensor.numel() < 2 or tensor.layout != torch.strided:
        return tensor
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    apart = wide[..., ::2]
    apart.copy_(tensor.detach())
    return apart.detach().requires_grad_(tensor.requires_grad)


def with_nan(tensor: Tensor) -> Tensor:
    """A copy of the tensor in which the middle value is NaN."""
    middle = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    middle[tensor.numel() // 2] = True
    return tensor.masked_fill(middle.view(tensor.shape), torch.nan)


def of_shape(given: Arguments, shape: Sequence[int], generator: torch.Generator) -> Arguments:
    """The given arguments with the first tensor in another shape.

    Tensors whose first dimension is as large belong to the same batch, so their first dimension changes as well.
    """
    first, *_ = tensors_of(given)

    def changed(tensor: Tensor) -> Tensor:
        if tensor is first:
            return other_values(tensor, generator, shape)
        of_batch = tensor.dim() and first.dim() and tensor.shape[0] == first.shape[0] and len(shape)
        return other_values(tensor, generator, (shape[0], *tensor.shape[1:])) if of_batch else tensor

    return mapped(given, changed)


def key_of(given: Arguments) -> Any:
    """The key of a call. A proof for one call holds for all calls with the same key; strides, and the order of keyword
    arguments, may differ.

    Raises:
        TypeError: an argument is not a tensor, number, string or structure of them, or a tensor is float8.
    """
    args, kwargs = given
    return signature((args, dict(sorted(kwargs.items()))), _kind)[0]


def names_of(key: Any) -> tuple[int, tuple[str, ...]]:
    """(number of positional arguments, names of keyword arguments) of the calls with this key."""
    _, (_, *args), (_, *kwargs) = key
    return len(args), tuple(name for name, _ in kwargs)


def without_shapes(key: Any) -> Any:
    """The key of a call without the shapes of its tensors."""
    if not isinstance(key, tuple):
        return key
    if len(key) == 3 and key[0] is Tensor:
        return *key[:2], key[2][1:]
    return tuple(map(without_shapes, key))


def _kind(tensor: Tensor) -> Hashable:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.is_quantized:
        raise TypeError(f"optimize: tensors must be plain tensors, got {_name(tensor)}: pass the plain tensors in it")
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:  # PyTorch has no arithmetic to vary such values
        raise TypeError(f"optimize: got a tensor of {tensor.dtype}: pass a wider dtype, and let the model cast it")
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def _name(tensor: Tensor) -> str:
    kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else ""
    return f"a {kind} tensor" if kind else f"a {type(tensor).__module__}.{type(tensor).__qualname__}"


def in_words(given: Arguments) -> str:
    """Shapes and dtypes of the tensors as text, such as "8x3x224x224 float32, 8 int64"."""
    kinds = [
        (("x".join(map(str, t.shape)) or "scalar"), str(t.dtype).removeprefix("torch.")) for t in tensors_of(given)
    ]
    return ", ".join(f"{shape} {dtype}" for shape, dtype in kinds) or "no tensors"

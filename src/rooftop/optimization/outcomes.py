"""The effects of one call of a model: results, gradients, changed buffers and arguments, and shared memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.optimization.draws import Arguments, Draw, tensors_of
from rooftop.rewrites.structures import mapped, signature

SEED = 20_240_229
_USUAL = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
"""Dtypes that `==` supports on every device."""
DELAY_CYCLES = 4_000_000
"""2 ms on a GPU: longer than the host takes to launch a small model."""


@dataclass(frozen=True)
class Outcome:
    """The effects of one call.

    Attributes:
        values: copies of the values after the call, by name: "result 0", "gradient of fc.weight", "buffer
            bn.running_mean", "argument 0 afterwards". Sparse tensors are dense here.
        structure: the results, and the arguments after the call, with the layout and class of each tensor instead of
            the tensor.
        strides: strides of each result. The strides of results that are empty or have a dimension of size 1 are left
            out, because some of their strides do not matter.
        shared: pairs of values that share memory: ("result 0", "argument 0").
        results: the results themselves, to check them again after another call. The results are detached because a live
            autograd graph ties its parameters to the stream of its forward pass, and later captures on other streams
            would fail.
    """

    values: Mapping[str, Tensor]
    structure: Hashable
    strides: Mapping[str, tuple[int, ...]]
    shared: frozenset[tuple[str, str]]
    results: tuple[Tensor, ...]


@dataclass(frozen=True)
class Known:
    """The reference results for one draw.

    Attributes:
        draw: the inputs.
        eager: the original's outcome.
        truth: the float64 model's outcome; None if the float64 model does not run.
    """

    draw: Draw
    eager: Outcome
    truth: Outcome | None


@dataclass(frozen=True)
class Step:
    """How a model is run: forward, or forward and backward.

    Attributes:
        training: also run backward.
        loss: computes the loss from the output; None: if only one output tensor requires a gradient, and it has one
            element, it is the loss; otherwise all outputs get fixed random gradients.
    """

    training: bool
    loss: Callable[[Any], Tensor] | None = None
    _slopes: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def run(self, call: Callable[..., Any], model: nn.Module, given: Arguments) -> tuple[Any, dict[str, Tensor]]:
        """Return the output of one call, and its gradients: those of the parameters of `model`, and those of inputs
        that require gradients.
        """
        args, kwargs = given
        if not self.training:
            with torch.no_grad():
                return call(*args, **kwargs), {}
        output = call(*args, **kwargs)
        wanted: dict[str, Tensor] = {f"gradient of {name}": p for name, p in model.named_parameters()}
        wanted |= {f"gradient of argument {i}": tensor for i, tensor in enumerate(tensors_of(given))}
        wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
        lost, slopes = self._lost(output)
        if not lost or not wanted:
            return output, {}
        found = torch.autograd.grad(lost, list(wanted.values()), slopes, allow_unused=True)
        pairs = zip(wanted.items(), found, strict=True)
        return output, {name: _as_accumulated(grad, leaf) for (name, leaf), grad in pairs if grad is not None}

    def _lost(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """(the tensors at which backward starts, the gradients with which it starts): the loss with gradient 1, or
        without a loss function the outputs with random gradients (1 for a single number).
        """
        if self.loss is not None:
            loss = self.loss(output)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(f"optimize: loss must return one element with a gradient, got {_kind(loss)}")
            return [loss], [torch.ones_like(loss)]
        outputs = [t for t in tensors_of(output) if t.requires_grad]
        if len(outputs) == 1 and outputs[0].numel() == 1:
            return outputs, [torch.ones_like(outputs[0])]
        return outputs, [self._slope(i, output) for i, output in enumerate(outputs)]

    def _slope(self, place: int, output: Tensor) -> Tensor:
        """A random gradient with which backward starts at an output. Its values are the same in each call and for all
        dtypes."""
        key = place, output.shape, output.dtype, output.device
        known = self._slopes.get(key)
        if known is None or known._version != 0:  # or a backward function wrote to the kept tensor
            generator = torch.Generator(output.device).manual_seed(SEED + place)
            values = torch.randn(output.shape, generator=generator, device=output.device)
            known = self._slopes[key] = values.to(output.dtype, copy=True)
        return known


def _as_accumulated(gradient: Tensor, leaf: Tensor) -> Tensor:
    """A gradient with the strides of its leaf, as `backward` would store it. Optimizers rely on these strides."""
    if gradient.layout != torch.strided or leaf.layout != torch.strided:
        return gradient
    if all(
        one == other or size == 1 for size, one, other in zip(leaf.shape, gradient.stride(), leaf.stride(), strict=True)
    ):
        return gradient
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient.detach())


def _kind(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__}"
    return f"{loss.numel()} elements{'' if loss.requires_grad else ' without a gradient'}"


def outcome_of(step: Step, call: Callable[..., Any], model: nn.Module, given: Arguments, seed: int = SEED) -> Outcome:
    """Run `call` on copies of the arguments, and restore the model's buffers and the random state afterwards.

    Args:
        model: the model that `call` runs; its parameters and buffers are read.

    Raises:
        TypeError: the outputs may contain tensors that cannot be compared.
        Exception: any error that the call raises.
    """
    _delay(given)
    given = copied(given)
    with preserved(model):
        seed_all(seed, model)
        arguments = {f"argument {i}": t for i, t in enumerate(tensors_of(given))}
        output, gradients = step.run(call, model, given)
        results = tensors_of(output)
        if any(tensor.is_nested for tensor in results):
            raise TypeError("optimize: a result is a nested tensor, which cannot be compared: return a padded tensor")
        try:
            structure = signature((output, given), _layout)[0]
        except TypeError as error:
            raise TypeError(
                f"optimize: the outputs may contain tensors that cannot be compared: {error}. Let the model return "
                "tensors (transformers: use_cache=False)"
            ) from error
        values = {f"result {i}": _dense(t) for i, t in enumerate(results)}
        values |= {name: _dense(gradient) for name, gradient in gradients.items()}
        values |= {f"{name} afterwards": _dense(t) for name, t in arguments.items()}
        buffers = dict(model.named_buffers())
        values |= {f"buffer {name}": _dense(t) for name, t in buffers.items()}
    structure = structure, *((name, gradient.layout) for name, gradient in gradients.items())
    strides = {f"result {i}": t.stride() for i, t in enumerate(results) if _has_strides(t)}
    named = {f"result {i}": t for i, t in enumerate(results)}
    others = {**arguments, **buffers, **dict(model.named_parameters())}
    return Outcome(values, structure, strides, _shared(named, others), tuple(t.detach() for t in results))


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.layout == torch.strided else tensor.to_dense()


def _layout(tensor: Tensor) -> Hashable:
    return tensor.layout, type(tensor)


def _has_strides(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 1 and 1 not in tensor.shape


def same_values(one: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors have the same shape, dtype, device and values; NaN equals NaN."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.device != other.device:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def same_each(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> list[bool]:
    """`same_values` of each pair of tensors. The host waits for a GPU once for all pairs, not once for each pair.

    Pairs that contain a NaN, and tensors of unusual dtypes, are then compared one by one.
    """
    flags: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with torch.no_grad():
        for i, (one, other) in enumerate(pairs):
            if other is not None and _compares_elements(one, other):
                flags.setdefault(one.device, []).append((i, (one == other).all()))
    equal: set[int] = set()
    for found in flags.values():
        truths = torch.stack([flag for _, flag in found]).tolist()
        equal |= {i for (i, _), truth in zip(found, truths, strict=True) if truth}
    return [i in equal or same_values(*pair) for i, pair in enumerate(pairs)]


def _compares_elements(one: Tensor, other: Tensor) -> bool:
    return (
        one.layout == other.layout == torch.strided
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
        and one.dtype in _USUAL
    )


def seed_all(seed: int, model: nn.Module) -> None:
    """Seed the random generators that a model may use: of its devices, of Python and of NumPy.

    `torch.manual_seed` would also seed the generators of other devices.
    """
    torch.default_generator.manual_seed(seed)
    for device in _gpus(model):
        torch.cuda.default_generators[device].manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _gpus(model: nn.Module) -> list[int]:
    """The GPUs of a model's tensors; all GPUs for a model without tensors."""
    tensors = (*model.parameters(), *model.buffers())
    if not tensors and torch.cuda.is_initialized():
        return list(range(torch.cuda.device_count()))
    return sorted({t.device.index for t in tensors if t.is_cuda})


def _shared(results: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> frozenset[tuple[str, str]]:
    found = []
    names = list(results)
    for i, name in enumerate(names):
        address = _address(results[name])
        if address is not None:
            found += [(name, other) for other in names[:i] if _address(results[other]) == address]
            found += [(name, other) for other, tensor in others.items() if _address(tensor) == address]
    return frozenset(found)


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and tensor.numel() else None


def _delay(given: Arguments) -> None:
    """Make the GPU wait for a while.

    The arguments are copied after this delay. So a kernel on another stream that fails to wait for this stream reads
    the old values, and its wrong results reveal the missing synchronization.
    """
    device = next((t.device for t in tensors_of(given) if t.is_cuda), None)
    if device is not None:
        with torch.cuda.device(device):
            torch.cuda._sleep(DELAY_CYCLES)


def copied(given: Arguments) -> Arguments:
    """Copies of the arguments, with the same values and strides."""

    def copy(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if overlaps(tensor):  # an expanded tensor, or overlapping windows
            memory = tensor.detach().as_strided((_span(tensor),), (1,)).clone()
            return memory.as_strided(tensor.shape, tensor.stride(), 0).requires_grad_(tensor.requires_grad)
        same = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return same.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    return mapped(given, copy)  # type: ignore[no-any-return]


def anew(given: Arguments) -> Arguments:
    """The same tensors in new structures, because a model may remove entries from a dict."""
    return mapped(given, lambda t: t)  # type: ignore[no-any-return]


def overlaps(tensor: Tensor) -> bool:
    """Whether several elements of a tensor share a memory address."""
    return tensor.layout == torch.strided and _span(tensor) < tensor.numel()


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """After the block, restore the model's buffers, and PyTorch's random generators of the CPU and of the model's
    GPUs."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(_gpus(model)):
        try:
            yield
        finally:
            with torch.no_grad():
                restore(before)


def restore(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values to tensors; `pairs` has each tensor with its values. Tensors that have these values are not written,
    because a write of equal values also raises the version counter.
    """
    for (tensor, values), same in zip(pairs, same_each(pairs), strict=True):
        if not same:
            tensor.copy_(values)


def poison(outcome: Outcome) -> None:
    """Create tensors of the same sizes as those of an outcome, fill them with NaN, and free them. The next allocations
    then probably contain NaN.
    """
    left = [torch.empty_like(value) for value in outcome.values.values() for _ in range(2)]
    for tensor in left:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

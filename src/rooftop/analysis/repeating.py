"""Recorded calls made again, alone, on random data, as they were or in another dtype, layout or size.

On a GPU the profiler times their kernels, which is how operators are timed; all calls share one session of it. Before
each run the tensors are made anew, so a call finds its input as in a program: just written. On a CPU it is the host's
clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, max_pool2d, scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from rooftop.cost import CallSpec, TensorSpec
from rooftop.hardware.kernel_times import Variant, kernel_times

REPEATS = 4
MOST_BYTES = 0.4  # of a GPU's free memory, for one call


@dataclass(frozen=True)
class Form:
    """In which form a call is made again.

    Attributes:
        dtype: in place of its floating-point dtypes; None: as they were.
        channels_last: images and convolution weights lie channels last; else as they lay.
        multiple: sides of matrices and lengths of vectors are rounded up to a multiple of it.
    """

    dtype: torch.dtype | None = None
    channels_last: bool = False
    multiple: int = 1


AS_IT_WAS = Form()


@dataclass(frozen=True)
class Times:
    """Of the runs of one call, in ms."""

    median_ms: float
    best_ms: float


def times_again(
    calls: Sequence[tuple[CallSpec, Form]], device: torch.device, repeats: int = REPEATS
) -> list[Times | None]:
    """The time of each call; None where PyTorch refuses it (no such operator for that dtype, no room).

    Raises:
        torch.AcceleratorError: the device failed; nothing measured after that would hold.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        repeated = [_Repeated(spec, form, device) for spec, form in calls]
        accepted = [call.accepted() for call in repeated]
        return _times([call for call, good in zip(repeated, accepted, strict=True) if good], accepted, device, repeats)


def _times(
    calls: Sequence[_Repeated], accepted: Sequence[bool], device: torch.device, repeats: int
) -> list[Times | None]:
    if device.type == "cuda":
        variants = [Variant(call.run, call.prepare, repeats) for call in calls]
        by_call = [[sum(kernels) for kernels in runs] for runs in kernel_times(variants, device)] if variants else []
    else:
        by_call = [[_on_host(call) for _ in range(repeats)] for call in calls]
    times = iter([Times(median(runs), min(runs)) for runs in by_call])
    return [next(times) if good else None for good in accepted]


def _on_host(call: _Repeated) -> float:
    call.prepare()
    began = time.perf_counter_ns()
    call.run()
    return (time.perf_counter_ns() - began) / 1e6


class _Repeated:
    """A call that can be run again and again: `prepare`, then `run`."""

    def __init__(self, spec: CallSpec, form: Form, device: torch.device) -> None:
        self._spec, self._form, self._device = spec, form, device
        self._ready: Callable[[], object] | None = None

    def prepare(self) -> None:
        """Make the tensors; of a backward operator also its forward pass."""
        family = next((part for part in _PUBLIC if part in self._spec.name), None)
        if family is None:
            args, kwargs = tree_map_only(TensorSpec, self._made, (self._spec.args, dict(self._spec.kwargs)))
            self._ready = lambda: self._spec.func(*args, **kwargs)
            return
        forward, inputs = _PUBLIC[family](self._spec, self._made)
        if not self._spec.name.endswith("_backward"):
            self._ready = forward
            return
        with torch.enable_grad():
            for tensor in inputs:
                tensor.requires_grad_()
            output = forward()
            gradient = torch.randn_like(output)
        self._ready = lambda: torch.autograd.grad(output, inputs, gradient)

    def run(self) -> None:
        """Make the call. Its tensors are gone afterwards."""
        assert self._ready is not None
        try:
            with torch.no_grad():
                self._ready()
        finally:
            self._ready = None

    def accepted(self) -> bool:
        """Whether PyTorch takes the call, and there is room for it. Makes it once: libraries choose their kernels."""
        if self._device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            if _bytes(self._spec) > MOST_BYTES * free_bytes:
                return False
        try:
            self.prepare()
            self.run()
        except torch.AcceleratorError:
            raise
        except (RuntimeError, TypeError, ValueError):  # PyTorch has no type of its own for "not for this dtype"
            return False
        return True

    def _made(self, spec: TensorSpec) -> Tensor:
        return tensor_like(spec, self._form, self._device)


def tensor_like(spec: TensorSpec, form: Form, device: torch.device) -> Tensor:
    """Random numbers (zeros, of integers) of the same shape and layout, as far as the form leaves these."""
    kind = form.dtype if form.dtype is not None and spec.dtype.is_floating_point else spec.dtype
    sides = len(spec.shape) - 2 if len(spec.shape) > 1 else 0
    shape = [-(-n // form.multiple) * form.multiple if i >= sides else n for i, n in enumerate(spec.shape)]
    if not kind.is_floating_point:
        return torch.zeros(shape, dtype=kind, device=device)
    made = kind if kind in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    tensor = torch.randn(shape, device=device, dtype=made).to(kind)
    if tensor.dim() == 4 and (form.channels_last or spec.channels_last):
        return tensor.to(memory_format=torch.channels_last)
    return tensor


def on_numbers(spec: CallSpec) -> bool:
    """Whether the call takes floating-point tensors alone, so that random numbers do for its arguments."""
    tensors = _tensors(spec)
    return bool(tensors) and all(t.dtype.is_floating_point and t.shape for t in tensors)


def _tensors(spec: CallSpec) -> list[TensorSpec]:
    found: list[TensorSpec] = []
    waiting: list[Any] = [*spec.args, *(value for _, value in spec.kwargs)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting.extend(item)
        elif isinstance(item, TensorSpec):
            found.append(item)
    return found


def _bytes(spec: CallSpec) -> int:
    return sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in _tensors(spec))


Make = Callable[[TensorSpec], Tensor]


def _batch_norm(spec: CallSpec, make: Make) -> tuple[Callable[[], Tensor], list[Tensor]]:
    tensors = [item for item in spec.args if isinstance(item, TensorSpec)]
    x = make(next(t for t in tensors if len(t.shape) > 1))
    parameters = next(t.dtype for t in tensors if len(t.shape) == 1)  # autocast leaves them in float32
    weight, bias, mean, variance = (torch.ones(x.shape[1], device=x.device, dtype=parameters) for _ in range(4))
    training = spec.name.endswith("_backward") or spec["training"]
    return lambda: batch_norm(x, mean, variance, weight, bias, training), [x, weight, bias]


def _attention(spec: CallSpec, make: Make) -> tuple[Callable[[], Tensor], list[Tensor]]:
    tensors = [item for item in spec.args if isinstance(item, TensorSpec)]
    first = 1 if spec.name.endswith("_backward") else 0  # after the gradient
    query, key, value = (make(item) for item in tensors[first : first + 3])
    options = {"is_causal": spec["is_causal"], "dropout_p": spec["dropout_p"]}
    return lambda: scaled_dot_product_attention(query, key, value, **options), [query, key, value]


def _max_pool(spec: CallSpec, make: Make) -> tuple[Callable[[], Tensor], list[Tensor]]:
    first = 1 if spec.name.endswith("_backward") else 0
    x, *window = spec.args[first:]
    image = make(x)
    return lambda: max_pool2d(image, *window[:5]), [image]


_PUBLIC: dict[str, Callable[[CallSpec, Make], tuple[Callable[[], Tensor], list[Tensor]]]] = {
    "batch_norm": _batch_norm,
    "attention": _attention,
    "max_pool2d": _max_pool,
}
"""Operators made again through the public function, forward and backward: which of them serves it depends on dtype
and layout, and their backward takes what only their forward can make."""

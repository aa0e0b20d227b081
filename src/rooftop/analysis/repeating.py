"""Time recorded calls again, each alone and on new data: unchanged, or in another dtype, layout or size.

On a GPU the profiler times the operators' kernels; all calls share one profiler session. The tensors are created again
before each run, so a call finds freshly written inputs, as in a program. On a CPU the host's clock times the calls.
On a CPU the changed call may take a thousand times as long as the original (bfloat16 on a processor without bfloat16
instructions). So a slow call runs only once, and no call begins once all calls together have taken `MOST_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn.functional import batch_norm, max_pool2d, scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from rooftop.cost import CallSpec, TensorSpec
from rooftop.hardware.defaults import usual_defaults
from rooftop.hardware.kernel_times import Variant, kernel_times

REPEATS = 4
MOST_BYTES = 0.4  # maximum size of a call's input tensors, as a share of the free memory
MOST_SECONDS = 1.0  # on a CPU, after this many seconds `times_again` skips the remaining calls of its list
SLOW_MS = 100.0  # on a CPU, a call whose first run takes longer than this is not run again; the first run's time counts


@dataclass(frozen=True)
class Form:
    """The form in which a call is repeated.

    Attributes:
        dtype: replaces the call's floating-point dtypes; None: unchanged.
        channels_last: whether to make images and convolution weights channels last. If False, images and weights keep
            their layout. Images of one pixel always keep theirs, because PyTorch counts feature maps that are averaged
            to one pixel as channels first.
        multiple: sides of matrices and lengths of vectors are rounded up to a multiple of this number.
    """

    dtype: torch.dtype | None = None
    channels_last: bool = False
    multiple: int = 1


AS_IT_WAS = Form()


@dataclass(frozen=True)
class Times:
    """Times of the runs of one call, in ms."""

    median_ms: float
    best_ms: float


def times_again(
    calls: Sequence[tuple[CallSpec, Form]], device: torch.device, repeats: int = REPEATS
) -> list[Times | None]:
    """The times of each call; None if PyTorch refuses the call (dtype not supported, not enough memory). On a CPU, also
    None for the remaining calls once all calls together have taken `MOST_SECONDS`.

    Raises:
        torch.AcceleratorError: the device failed; no later measurement would be valid.
    """
    with usual_defaults(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        repeated = [_Repeated(spec, form, device) for spec, form in calls]
        return _times_on_gpu(repeated, device, repeats) if device.type == "cuda" else _times_on_host(repeated, repeats)


def _times_on_gpu(calls: Sequence[_Repeated], device: torch.device, repeats: int) -> list[Times | None]:
    accepted = [call.accepted() for call in calls]
    variants = [Variant(call.run, call.prepare, repeats) for call, good in zip(calls, accepted, strict=True) if good]
    runs = kernel_times(variants, device) if variants else []
    times = iter([[sum(kernels) for kernels in each] for each in runs])
    return [_times_of(next(times)) if good else None for good in accepted]


def _times_on_host(calls: Sequence[_Repeated], repeats: int) -> list[Times | None]:
    found: list[Times | None] = []
    began = perf_counter()
    for call in calls:
        if perf_counter() - began > MOST_SECONDS or not call.accepted():
            found.append(None)
        elif call.ms > SLOW_MS:
            found.append(Times(call.ms, call.ms))
        else:
            found.append(_times_of([call.timed_ms() for _ in range(repeats)]))
    return found


def _times_of(runs: Sequence[float]) -> Times:
    return Times(median(runs), min(runs))


class _Repeated:
    """A call that can be repeated: first `prepare`, then `run`."""

    def __init__(self, spec: CallSpec, form: Form, device: torch.device) -> None:
        self._spec, self._form, self._device = spec, form, device
        self._ready: Callable[[], object] | None = None
        self.ms = 0.0  # ms of the last run, by the host's clock

    def prepare(self) -> None:
        """Create the tensors. For a backward operator, also run its forward pass."""
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
        """Run the call, and release its tensors."""
        assert self._ready is not None
        began = perf_counter()
        try:
            with torch.no_grad():
                self._ready()
        finally:
            self._ready = None
        self.ms = 1e3 * (perf_counter() - began)

    def timed_ms(self) -> float:
        """The time of one run by the host's clock."""
        self.prepare()
        self.run()
        return self.ms

    def accepted(self) -> bool:
        """Whether PyTorch accepts the call and the device has enough memory for it (see `MOST_BYTES`). This runs the
        call once, so that libraries choose their kernels.
        """
        if _bytes(self._spec) > MOST_BYTES * _free_bytes(self._device):
            return False
        try:
            self.prepare()
            self.run()
        except torch.AcceleratorError:
            raise
        except (RuntimeError, TypeError, ValueError):  # PyTorch has no error type of its own for "not for this dtype"
            return False
        return True

    def _made(self, spec: TensorSpec) -> Tensor:
        keeps = self._form.channels_last and spec.shape[2:] == (1, 1) and not self._is_weight(spec)
        return tensor_like(spec, replace(self._form, channels_last=False) if keeps else self._form, self._device)

    def _is_weight(self, spec: TensorSpec) -> bool:
        return "convolution" in self._spec.name and spec is self._spec["weight"]


def tensor_like(spec: TensorSpec, form: Form, device: torch.device) -> Tensor:
    """Create a tensor with the recorded shape and layout, changed by the form. Integers are zero. Floating-point
    numbers are random on a GPU.

    On a CPU, all floating-point numbers are equal: this does not change the time of a call, and drawing random numbers
    would take longer than most calls.
    """
    kind = form.dtype if form.dtype is not None and spec.dtype.is_floating_point else spec.dtype
    sides = len(spec.shape) - 2 if len(spec.shape) > 1 else 0
    shape = [-(-n // form.multiple) * form.multiple if i >= sides else n for i, n in enumerate(spec.shape)]
    if not kind.is_floating_point:
        return torch.zeros(shape, dtype=kind, device=device)
    made = kind if kind in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    if device.type == "cuda":
        tensor = torch.randn(shape, device=device, dtype=made).to(kind)
    else:
        tensor = torch.full(shape, 0.5, device=device, dtype=made).to(kind)
    if tensor.dim() == 4 and (form.channels_last or spec.channels_last):
        return tensor.to(memory_format=torch.channels_last)
    return tensor


def on_numbers(spec: CallSpec) -> bool:
    """Whether the call takes only floating-point tensors, so that random numbers are valid arguments."""
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
    return sum(t.bytes for t in _tensors(spec))


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available)


Make = Callable[[TensorSpec], Tensor]


def _batch_norm(spec: CallSpec, make: Make) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Create weights and running statistics if the recorded call had them, in the dtypes of that call."""
    x = make(spec["input"])

    def given(name: str) -> Tensor | None:
        was = spec[name]
        return torch.ones(was.shape, dtype=was.dtype, device=x.device) if isinstance(was, TensorSpec) else None

    backward = spec.name.endswith("_backward")
    mean, variance = given("running_mean"), given("running_var")
    weight = given("weight")
    bias = weight if backward else given("bias")
    if backward and bias is not None:  # the backward operator returns the bias's gradient, but does not take the bias
        bias = torch.ones_like(bias)
    # cuDNN's backward operator has no argument `training`, because it is used only in training
    training = next((spec[name] for name in ("training", "train") if name in spec), True)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    return lambda: batch_norm(x, mean, variance, weight, bias, training), inputs


def _attention(spec: CallSpec, make: Make) -> tuple[Callable[[], Tensor], list[Tensor]]:
    tensors = [item for item in spec.args if isinstance(item, TensorSpec)]
    # a backward operator takes the gradient before query, key and value
    first = 1 if spec.name.endswith("_backward") else 0
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
"""Operators that are repeated through PyTorch's public function, forward and backward. In that function, dtype and
layout decide which operator runs, and backward needs results of the same operator's forward.
"""

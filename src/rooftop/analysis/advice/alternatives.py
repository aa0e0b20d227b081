"""Operators of a step in another dtype, layout or kernel, timed here and now: what advice promises is measured where it
is given.

A convolution, a batch norm, a matrix product or an attention is made again on random data of the same shapes, alone, in
a CUDA graph. How much faster it is in bfloat16 or channels last depends on which kernel the libraries have for it, and
no model of the hardware tells that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, max_pool2d, scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.report import OperatorRow
from rooftop.cost import CallSpec, TensorSpec
from rooftop.hardware.timing import measure

REPEATED_SECONDS, WARM_UP_SECONDS = 0.01, 0.005  # of one call among many
MOST_TIME, MOST_CALLS = 0.9, 24  # of the operators' time, and how many calls, that is timed again

Make = Callable[[TensorSpec], Tensor]


def repeated_ratios(
    operators: Sequence[MeasuredOperator],
    *,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    device: str = "cuda",
) -> dict[CallSpec | None, float]:
    """For recorded calls, the time in another dtype or layout over the time as they are.

    The longest calls are timed, at most `MOST_CALLS`, together `MOST_TIME` of the time; others get the mean ratio of
    their operator.

    Args:
        operators: those of other kinds than `_TIMED_AGAIN` are left out.
        dtype: in place of floating-point dtypes. channels_last: images and convolution weights lie that way.
        device: where they are timed.
    """
    times: Counter[CallSpec] = Counter()
    for op in operators:
        if op.record.spec is not None and op.record.name in _TIMED_AGAIN:
            times[op.record.spec] += op.measured_ms  # type: ignore[assignment]
    ratios: dict[CallSpec | None, float] = {}
    seen_ms, total_ms = 0.0, sum(times.values())
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for spec, ms in times.most_common(MOST_CALLS):
        if seen_ms > MOST_TIME * total_ms:
            break
        seen_ms += ms
        now_ms = repeated_ms(spec, device=device)
        other_ms = repeated_ms(spec, dtype, channels_last, device)
        if not now_ms or other_ms is None:
            continue
        ratios[spec] = other_ms / now_ms
        before[spec.name] += ms  # type: ignore[assignment]
        after[spec.name] += ms * ratios[spec]  # type: ignore[assignment]
    for spec in times:
        if spec not in ratios and before[spec.name]:
            ratios[spec] = after[spec.name] / before[spec.name]
    return ratios


_TIMED_AGAIN = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward"),
    *("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::native_batch_norm_backward"),
    *("aten::cudnn_batch_norm_backward", "aten::_scaled_dot_product_efficient_attention"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"),
    *("aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_flash_attention_backward"),
    "aten::_scaled_dot_product_cudnn_attention_backward",
    *("aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward"),
}
"""Matrix work and what has kernels of its own for a dtype or layout. What others take follows from their bytes."""


@lru_cache(maxsize=4096)
def repeated_ms(
    spec: CallSpec, dtype: torch.dtype | None = None, channels_last: bool = False, device: str = "cuda"
) -> float | None:
    """Time in ms of a recorded call on tensors of its shapes.

    Args:
        spec: the call.
        dtype: in place of its floating-point dtypes.
        channels_last: images and convolution weights lie channels last; else as they lay.
        device: where.

    Returns:
        None if PyTorch refuses: it has no such operator for that dtype or layout, or no room. Advice says how much of
        the time could be timed.

    Raises:
        torch.AcceleratorError: the device failed; nothing measured after that would hold.
    """
    make = partial(tensor_like, dtype=dtype, channels_last=channels_last, device=device)
    family = next((part for part in _PUBLIC if part in spec.name), None)
    try:
        with torch.random.fork_rng([device] if device != "cpu" else []):
            if family is not None:
                forward, inputs = _PUBLIC[family](spec, make)
                backward = spec.name.endswith("_backward")
                return _gradient_ms(forward, inputs, device) if backward else _forward_ms(forward, device)
            args, kwargs = tree_map_only(TensorSpec, make, (spec.args, dict(spec.kwargs)))
            return _forward_ms(lambda: spec.func(*args, **kwargs), device)
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # a refusal: PyTorch has no type of its own for "not implemented for this dtype"
        return None


def tensor_like(
    spec: TensorSpec, dtype: torch.dtype | None = None, channels_last: bool = False, device: str = "cuda"
) -> Tensor:
    """Random numbers (zeros, of integers) of the same shape; see `repeated_ms` for the other arguments."""
    kind = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
    if not kind.is_floating_point:
        return torch.zeros(spec.shape, dtype=kind, device=device)
    tensor = torch.randn(spec.shape, device=device).to(kind)
    if tensor.dim() == 4 and (channels_last or spec.channels_last):
        return tensor.to(memory_format=torch.channels_last)
    return tensor


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


def _forward_ms(call: Callable[[], object], device: str) -> float:
    with torch.no_grad():
        return _measured(call, device)


def _gradient_ms(forward: Callable[[], Tensor], inputs: list[Tensor], device: str) -> float:
    """The backward pass alone: both passes less the forward pass."""
    for tensor in inputs:
        tensor.requires_grad_()
    gradient = torch.randn_like(forward())

    def both() -> object:
        return torch.autograd.grad(forward(), inputs, gradient)

    return max(_measured(both, device) - _measured(forward, device), 0.0)


def _measured(call: Callable[[], object], device: str) -> float:
    graph = device != "cpu"
    return measure(
        call, device=device, seconds=REPEATED_SECONDS, warm_up_seconds=WARM_UP_SECONDS, graph=graph
    ).median_ms


def layer_norm_ms(row: OperatorRow) -> float:
    """Time in ms of one call of Rooftop's layer norm, forward or backward, on the shapes of a row of the table."""
    backward = row.name.endswith("_backward")
    # native_layer_norm(x, weight, bias), native_layer_norm_backward(dy, x, mean, rstd, weight, bias)
    x = row.shapes[1] if backward else row.shapes[0]
    parameters = row.shapes[4:] if backward else row.shapes[1:]
    columns = prod(parameters[0]) if parameters else x[-1]
    return _layer_norm_ms(backward, prod(x) // max(1, columns), columns, len(parameters), row.dtype)


@lru_cache(maxsize=256)
def _layer_norm_ms(backward: bool, rows: int, columns: int, parameters: int, dtype: str, device: str = "cuda") -> float:
    from rooftop.kernels import layer_norm

    def norm(x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer_norm(x, columns, weight, bias)

    with torch.random.fork_rng([device] if device == "cuda" else []), torch.enable_grad():
        shapes = [(rows, columns), *[(columns,)] * parameters]
        inputs = [torch.randn(shape, device=device, dtype=getattr(torch, dtype)) for shape in shapes]
        taped = [tensor.detach().requires_grad_() for tensor in inputs]
        gradient = torch.randn_like(inputs[0])
        forward_ms = _measured(lambda: norm(*inputs), device)
        if not backward:
            return forward_ms
        both_ms = _measured(lambda: torch.autograd.grad(norm(*taped), taped, gradient), device)
        return max(both_ms - forward_ms, 0.0)

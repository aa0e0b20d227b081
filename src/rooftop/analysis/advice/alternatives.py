"""Operators of a step in another dtype, layout or kernel, timed here and now: what advice promises is measured where it
is given.

A convolution, a batch norm, a matrix product or an attention is made again on random data of the same shapes, alone, in
a CUDA graph. How much faster it is in bfloat16 or channels last depends on which kernel the libraries have for it, and
no model of the hardware tells that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rooftop.analysis.report import OperatorRow
from rooftop.cost import CallSpec, TensorSpec
from rooftop.hardware.timing import measure

SECONDS = 0.05
REPEATED_SECONDS, WARM_UP_SECONDS = 0.01, 0.005  # of one operator among many: a third of a second for thirty shapes


@lru_cache(maxsize=4096)
def repeated_ms(
    spec: CallSpec, dtype: torch.dtype | None = None, channels_last: bool = False, device: str = "cuda"
) -> float | None:
    """Time in ms of a recorded call on tensors of its shapes.

    Args:
        spec: the call.
        dtype: in place of its floating-point dtypes.
        channels_last: images and convolution weights lie channels last.
        device: where.

    Returns:
        None if PyTorch has no such operator for that dtype or layout.
    """
    make = partial(_tensor, dtype=dtype, channels_last=channels_last, device=device)
    name = spec.func._schema.name.removeprefix("aten::")
    try:
        with torch.random.fork_rng([device] if device != "cpu" else []):
            if "batch_norm" in name:
                return _batch_norm_ms(spec, make, name.endswith("_backward"), device)
            if "attention" in name:
                return _attention_ms(spec, make, name.endswith("_backward"), device)
            args, kwargs = tree_map_only(TensorSpec, make, (spec.args, dict(spec.kwargs)))
            with torch.no_grad():
                return _measured(lambda: spec.func(*args, **kwargs), device)
    except (RuntimeError, NotImplementedError):
        return None


def _tensor(spec: TensorSpec, dtype: torch.dtype | None, channels_last: bool, device: str) -> Tensor:
    kind = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
    if not kind.is_floating_point:
        return torch.zeros(spec.shape, dtype=kind, device=device)
    tensor = torch.randn(spec.shape, device=device).to(kind)
    return tensor.to(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor


def _batch_norm_ms(spec: CallSpec, make: Callable[[TensorSpec], Tensor], backward: bool, device: str) -> float:
    """Through the public function: which operator serves a batch norm depends on dtype and layout."""
    tensors = [item for item in spec.args if isinstance(item, TensorSpec)]
    x = make(next(t for t in tensors if len(t.shape) > 1)).requires_grad_(backward)
    channels = x.shape[1]
    weight, bias, mean, variance = (torch.ones(channels, device=device, dtype=x.dtype) for _ in range(4))
    weight.requires_grad_(backward)
    bias.requires_grad_(backward)
    training = backward or bool(spec.args[5])

    def forward() -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, training)

    return _gradient_ms(forward, [x, weight, bias], device) if backward else _measured(forward, device)


def _attention_ms(spec: CallSpec, make: Callable[[TensorSpec], Tensor], backward: bool, device: str) -> float:
    """Through the public function: which kernel serves an attention depends on the dtype."""
    arguments = [item for item in spec.args if isinstance(item, TensorSpec)]
    query, key, value = (make(item).requires_grad_(backward) for item in arguments[backward : 3 + backward])
    causal = next((item for item in reversed(spec.args) if isinstance(item, bool)), False)

    def forward() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return _gradient_ms(forward, [query, key, value], device) if backward else _measured(forward, device)


def _gradient_ms(forward: Callable[[], Tensor], inputs: list[Tensor], device: str) -> float:
    """The backward pass alone: both passes less the forward pass."""
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
def _layer_norm_ms(backward: bool, rows: int, columns: int, parameters: int, dtype: str) -> float:
    import rooftop.kernels  # noqa: F401  (registers torch.ops.rooftop)

    kind = getattr(torch, dtype)
    x = torch.randn(rows, columns, device="cuda", dtype=kind)
    weight = torch.randn(columns, device="cuda", dtype=kind) if parameters > 0 else None
    bias = torch.randn(columns, device="cuda", dtype=kind) if parameters > 1 else None
    operators = torch.ops.rooftop
    with torch.no_grad(), torch.random.fork_rng(["cuda"]):
        if not backward:
            return measure(
                lambda: operators.layer_norm(x, weight, bias, 1e-5), device="cuda", seconds=SECONDS, graph=True
            ).median_ms
        dy = torch.randn_like(x)
        _, mean, rstd = operators.layer_norm(x, weight, bias, 1e-5)
        mask = [weight is not None, bias is not None]
        return measure(
            lambda: operators.layer_norm_backward(dy, x, weight, bias, mean, rstd, mask),
            device="cuda",
            seconds=SECONDS,
            graph=True,
        ).median_ms

"""Time operators of a step in another dtype, layout or kernel, on this machine, so that advice promises only measured
gains.

The gain of bfloat16 or channels last for a convolution, a batch norm, a matrix product or an attention depends on the
libraries' kernels, and no model of the hardware predicts this gain. So each operator is repeated alone, on new data of
the same shapes (see `repeating`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from statistics import median

import torch
from torch import Tensor

from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.repeating import AS_IT_WAS, REPEATS, Form, times_again
from rooftop.analysis.report_contents import OperatorRow
from rooftop.cost import CallSpec, TensorSpec
from rooftop.hardware.kernel_times import Variant, kernel_times

# limits for the calls that are timed again: their share of the time of all `_TIMED_AGAIN` operators, and their number
MOST_TIME, MOST_CALLS = 0.95, 40


def repeated_ratios(
    operators: Sequence[MeasuredOperator], form: Form, device: torch.device
) -> dict[CallSpec | None, float]:
    """For each recorded call of an operator, its time in another dtype or layout divided by its original time.

    Only the longest calls are timed: those that together take the share `MOST_TIME` of the time of all `_TIMED_AGAIN`
    operators, but at most `MOST_CALLS` calls. Equal calls count as one. Other calls get the mean ratio of their kind
    (see `_kind`). If no call of a kind could be timed, its calls keep their times, so no gain is promised.

    Args:
        operators: recorded operators; those whose names are not in `_TIMED_AGAIN` are ignored.
        form: the other dtype or layout.
        device: the device on which the operators are timed.
    """
    times: Counter[CallSpec] = Counter()
    for op in operators:
        if op.record.spec is not None and op.record.name in _TIMED_AGAIN:
            times[op.record.spec] += op.measured_ms  # type: ignore[assignment]
    longest = _longest(times)
    seen = times_again([(spec, f) for spec in longest for f in (AS_IT_WAS, form)], device)
    ratios: dict[CallSpec | None, float] = {}
    before: Counter[tuple[str, bool, bool]] = Counter()
    after: Counter[tuple[str, bool, bool]] = Counter()
    for spec, now, other in zip(longest, seen[::2], seen[1::2], strict=True):
        if now is None or other is None or now.best_ms <= 0:
            continue
        ratios[spec] = other.best_ms / now.best_ms
        before[_kind(spec)] += times[spec]
        after[_kind(spec)] += times[spec] * ratios[spec]  # type: ignore[assignment]
    for spec in times:
        if spec not in ratios:
            kind = _kind(spec)
            ratios[spec] = after[kind] / before[kind] if before[kind] else 1.0
    return ratios


def _kind(spec: CallSpec) -> tuple[str, bool, bool]:
    """The kind of an operator's call: (operator, whether it is a grouped convolution, whether it is a pointwise
    convolution).
    Calls of one kind gain about equally in another dtype or layout.
    """
    weight = spec["weight"] if "convolution" in spec.name else None
    if not isinstance(weight, TensorSpec):
        return spec.name, False, False
    return spec.name, spec["groups"] > 1, prod(weight.shape[2:]) == 1


def _longest(times: Counter[CallSpec]) -> list[CallSpec]:
    chosen: list[CallSpec] = []
    seen_ms, total_ms = 0.0, sum(times.values())
    for spec, ms in times.most_common(MOST_CALLS):
        if seen_ms > MOST_TIME * total_ms:
            break
        seen_ms += ms
        chosen.append(spec)
    return chosen


_POOLINGS = ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d")
_RESIZINGS = (
    *("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_nearest_exact2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
)
_TIMED_AGAIN = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward"),
    *("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::native_batch_norm_backward"),
    *("aten::cudnn_batch_norm_backward", "aten::_scaled_dot_product_efficient_attention"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"),
    *("aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_flash_attention_backward"),
    "aten::_scaled_dot_product_cudnn_attention_backward",
    *(
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    *("aten::native_group_norm", "aten::native_group_norm_backward"),
    *(f"aten::{name}{way}" for name in (*_POOLINGS, *_RESIZINGS) for way in ("", "_backward")),
}
"""Matrix work, and operators with special kernels for a dtype or layout. The time of all other operators follows from
their bytes.
"""


MOST_NORMS = 3
"""Largest number of layer norm shapes to time in each direction (forward or backward), since the first call of each
shape compiles kernels."""


def layer_norms_ms(rows: Sequence[OperatorRow], device: torch.device) -> list[float]:
    """For each row of PyTorch's layer norms, the time in ms of the row's calls on a GPU if Rooftop's layer norm is
    used.

    In each direction (forward or backward) the `MOST_NORMS` rows with the longest times are timed. The other rows of
    the direction get the mean ratio of the new time to the measured time.
    """
    by_direction: dict[str, list[OperatorRow]] = {}
    for row in sorted(rows, key=lambda row: -row.measured_ms):
        by_direction.setdefault(row.name, []).append(row)
    ratios = {}
    for name, several in by_direction.items():
        timed = several[:MOST_NORMS]
        ours_ms = sum(row.calls * _layer_norm_ms(device, *_layer_norm_of(row)) for row in timed)
        ratios[name] = ours_ms / sum(row.measured_ms for row in timed)
    return [row.measured_ms * ratios[row.name] for row in rows]


def _layer_norm_of(row: OperatorRow) -> tuple[bool, int, int, int, str]:
    """(whether the row is a backward, number of rows, of columns and of parameters, dtype)"""
    backward = row.name.endswith("_backward")
    # native_layer_norm(x, weight, bias), native_layer_norm_backward(dy, x, mean, rstd, weight, bias)
    x = row.shapes[1] if backward else row.shapes[0]
    parameters = row.shapes[4:] if backward else row.shapes[1:]
    columns = prod(parameters[0]) if parameters else x[-1]
    return backward, prod(x) // max(1, columns), columns, len(parameters), row.dtype


@lru_cache(maxsize=256)
def _layer_norm_ms(device: torch.device, backward: bool, rows: int, columns: int, parameters: int, dtype: str) -> float:
    """Median time in ms of one call of Rooftop's layer norm, or of its backward pass, on random data."""
    from rooftop.kernels import layer_norm

    def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return layer_norm(x, columns, weight, bias)

    with torch.cuda.device(device), torch.random.fork_rng([device]), torch.enable_grad():
        shapes = [(rows, columns), *[(columns,)] * parameters]
        inputs = [torch.randn(shape, device=device, dtype=getattr(torch, dtype)) for shape in shapes]
        taped = [tensor.detach().requires_grad_() for tensor in inputs]
        gradient = torch.randn_like(inputs[0])
        if not backward:
            norm(*inputs)
            return _median_ms(Variant(lambda: norm(*inputs), repeats=REPEATS), device)
        outputs: list[Tensor] = []
        work = Variant(
            lambda: torch.autograd.grad(outputs.pop(), taped, gradient), lambda: outputs.append(norm(*taped)), REPEATS
        )
        work.prepare()
        work.run()
        return _median_ms(work, device)


def _median_ms(work: Variant, device: torch.device) -> float:
    (runs,) = kernel_times([work], device)
    return median(sum(kernels) for kernels in runs)

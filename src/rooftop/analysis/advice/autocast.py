"""The effect of autocast on a float32 step: which tensors become bfloat16, and which casts autocast adds.

Autocast decides operator by operator: matrix work takes bfloat16, sums and logarithms take float32, and all other
operators keep their inputs' dtype. So this module tracks, from operator to operator, which memory of a recorded step
contains bfloat16. Results of matrix work, and of other operators whose inputs are bfloat16, make their memory
bfloat16, until a float32 result is written there. Autocast has a separate list of operators for each kind of device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch.nn.functional import linear

from rooftop.cost import Record
from rooftop.torch_versions import torch_at_least

_MATRIX_WORK = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"),
    "_scaled_dot_product_flash_attention_for_cpu",
}
IN_BFLOAT16 = {
    "cpu": _MATRIX_WORK,
    "cuda": _MATRIX_WORK | {"mv", "addmv", "addr", "_cudnn_rnn", "_prelu_kernel"},
}
"""Operators that run in bfloat16 under autocast. The backward operators of these operators run in bfloat16, too,
because gradients have the dtype of the outputs.
"""

_LOSSES = {
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "nll_loss_forward", "nll_loss2d_forward"),
    *("multi_margin_loss", "multilabel_margin_loss_forward", "binary_cross_entropy_with_logits"),
}
IN_FLOAT32 = {
    "cpu": _LOSSES | {"prod", "_cdist_forward"},
    "cuda": _LOSSES
    | ({"_fused_rms_norm"} if torch_at_least(2, 12) else set())
    | {
        *("native_layer_norm", "native_group_norm", "_softmax", "_log_softmax", "softplus"),
        *("pow", "prod", "sum", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "norm"),
        *("cumsum", "cumprod", "renorm", "linalg_vector_norm", "_cdist_forward", "_pdist_forward", "cosh", "sinh"),
        *("tan", "acos", "asin", "erfinv"),
    },
}
"""Operators that run in float32 under autocast."""

BY_FIRST_INPUT = {
    *("native_batch_norm", "cudnn_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm_backward"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("_fused_rms_norm", "_fused_rms_norm_backward"),
}
"""Operators whose parameters stay float32 even if their inputs are bfloat16."""


@dataclass(frozen=True, slots=True)
class Recast:
    """An operator of the step as it would run under autocast.

    Attributes:
        matrix: whether the operator does matrix work in bfloat16.
        bytes_ratio: bytes of the operator's tensors under autocast, divided by their present bytes.
        casts: for each tensor that the operator casts between float32 and bfloat16, the number of elements; each cast
            is a kernel.
    """

    matrix: bool
    bytes_ratio: float
    casts: tuple[int, ...] = ()


def under_autocast(records: Iterable[Record], kind: str) -> list[Recast]:
    """Each operator of a step as autocast would run it on a kind of device, "cpu" or "cuda".

    Casts are counted in the forward pass. In training each cast has a counterpart in the backward pass, which casts the
    gradient back; the caller of this function counts these backward casts.
    """
    half: set[int] = set()  # memory that holds bfloat16 under autocast
    written: set[int] = set()
    cached: set[int] = set()  # memory from outside the step (parameters) that has been cast: once only
    steps = list(records)
    in_float32 = [_plain(record) in IN_FLOAT32[kind] for record in steps]
    logarithms: dict[int, int] = {}  # memory of a log softmax's result -> index of the operator
    for place, record in enumerate(steps):
        if _plain(record) == "_log_softmax" and record.outputs:
            logarithms[record.outputs[0].memory] = place
        elif _plain(record).startswith("nll_loss") and record.phase == "forward" and record.inputs:
            # This loss and its `_log_softmax` form `F.cross_entropy`, which runs in float32 on CPU and GPU.
            in_float32[logarithms.get(record.inputs[0].memory, place)] = True
    return [
        _recast(record, kind, widened, half, written, cached) for record, widened in zip(steps, in_float32, strict=True)
    ]


def _plain(record: Record) -> str:
    return record.name.removeprefix("aten::").removesuffix("_")


def _recast(record: Record, kind: str, in_float32: bool, half: set[int], written: set[int], cached: set[int]) -> Recast:
    if record.phase == "optimizer" or record.dtype != "float32":
        _write(record, half, written, becomes_half=False)
        return Recast(False, 1.0)
    name = record.name.removeprefix("aten::")
    matrix = name.removesuffix("_backward") in IN_BFLOAT16[kind]
    if not record.outputs:  # the profiler recorded the operator, but no tensors of it
        return Recast(matrix, 1.0 if in_float32 else 0.5)
    forward = record.phase == "forward"
    floats = [t for t in record.inputs if t.dtype == torch.float32 and t.shape]
    were_half = [t.memory in half for t in floats]
    casts: tuple[int, ...] = ()
    if matrix:
        takes_half = [True] * len(floats)
        gives_half = True
        wanted = [t for t, is_half in zip(floats, were_half, strict=True) if not is_half and t.memory not in cached]
        cached.update(t.memory for t in wanted if t.memory not in written)
        casts = tuple(prod(t.shape) for t in wanted) if forward else ()
    elif forward and in_float32:
        takes_half = [False] * len(floats)
        gives_half = False
        casts = tuple(prod(t.shape) for t, is_half in zip(floats, were_half, strict=True) if is_half)
    else:
        takes_half = were_half
        gives_half = (were_half[:1] == [True]) if name in BY_FIRST_INPUT else (bool(floats) and all(were_half))
    _write(record, half, written, gives_half)
    sizes = [prod(t.shape) for t in (*floats, *record.outputs)]
    halves = [*takes_half, *(gives_half and t.dtype == torch.float32 for t in record.outputs)]
    saved = sum(2 * size for size, is_half in zip(sizes, halves, strict=True) if is_half)
    full = sum(t.bytes for t in (*record.inputs, *record.outputs))
    return Recast(matrix, 1.0 - saved / full if full else 1.0, casts)


def _write(record: Record, half: set[int], written: set[int], becomes_half: bool) -> None:
    read = {t.memory for t in record.inputs}
    for tensor in record.outputs:
        if tensor.memory not in read:  # the output is new memory: no view of an input, and no input changed in place
            written.add(tensor.memory)
        if becomes_half and tensor.dtype == torch.float32:
            half.add(tensor.memory)
        else:
            half.discard(tensor.memory)


LAYERS, REPEATS = 64, 7  # number of products in the chain whose launch is timed, and number of timings


def cast_host_ms(device: str, training: bool) -> float:
    """Host time in ms of one autocast cast: an allocation, a copy and, in training, an autograd node. A cast takes the
    host much longer than the launch of a kernel.

    The measurement launches a chain of small matrix products with and without autocast, forward and (for training)
    backward. Other work of the host can only lengthen a measurement, so the shortest of several measurements is taken.
    """
    weights = [torch.zeros(16, 16, device=device, dtype=torch.float32, requires_grad=training) for _ in range(LAYERS)]
    x = torch.zeros(16, 16, device=device, dtype=torch.float32)

    def launched_ms(half: bool) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=half), torch.set_grad_enabled(training):
            y = x
            for weight in weights:
                y = linear(y, weight)
        if training:
            torch.autograd.grad(y, weights, torch.zeros_like(y))
        return 1e3 * (time.perf_counter() - began)

    taken = [(launched_ms(False), launched_ms(True)) for _ in range(REPEATS)]
    plain_ms, half_ms = (min(times) for times in zip(*taken, strict=True))
    return max(0.0, half_ms - plain_ms) / (2 * LAYERS if training else LAYERS)

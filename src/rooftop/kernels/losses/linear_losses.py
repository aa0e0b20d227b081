"""Cross entropy of a linear layer (hidden states and a weight), without storing all logits.

The forward pass computes the logits of one chunk of rows at a time. It turns the logits into their gradient in place,
and immediately multiplies this gradient by weight and hidden (as in Hsu et al. 2024, "Liger Kernel"). Backward only
scales the gradients. The three matrix products of the forward pass take most of the time. `losses.py` defines the loss
of a row. Results are deterministic: the results of the chunks are added in order, and the size of a chunk depends only
on the shapes and on `chunk_size`.

In float16 the gradient of the logits is not divided by the mean's divisor (the sum of the targets' weights) before the
products, because the gradient would underflow before a loss scale can help. Backward divides by the mean's divisor
while the gradient of the weight is still float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Cost, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.losses.formulas import (
    cross_entropy_gradient_reference,
    cross_entropy_reference,
    inverse_by_formula,
    loss_formula,
    reduced_gradient_formula,
    reference_dtype,
)
from rooftop.kernels.losses.launches import Terms
from rooftop.kernels.losses.losses import (
    LogitsShape,
    check_arguments,
    check_index,
    check_targets,
    inverse_dtype,
    inverse_of_targets,
    losses_of_rows,
    row_flops,
    scaled,
    total_of,
)
from rooftop.kernels.operands.autocasting import cast_by_autocast, result_dtype
from rooftop.kernels.operands.checks import check_dtype, check_same_dtype, check_shape, check_tensors, is_integer
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.padded_rows import missing_columns, padded
from rooftop.launch.operators import declare, keeps_for_backward, without_autocast
from rooftop.launch.symbolic import recorded_whole

# ---- chunks ----------------------------------------------------------------------------------------------------

MOST_CHUNK_ROWS = 8192  # with more rows, the matrix products take as long per row as with this number
LEAST_CHUNK_ROWS = 4096  # with fewer rows, products are slower per row, and the weight's gradient is read more often
# Up to this many logits form one chunk, since their memory is negligible. On a CPU, PyTorch's matrix product of few
# rows adds in a different order from its product of many rows. With chunks of 3 and 2 rows, the results for half of all
# random inputs of 5 x 768 differed too much from the reference.
ONE_CHUNK_LOGITS = 1 << 20


def chunk_rows(rows: int, features: int, classes: int) -> int:
    """The number of rows whose logits are computed at a time.

    Up to `ONE_CHUNK_LOGITS` logits are one chunk. More logits are split into at least two chunks of about the same
    size. A chunk then has at most H rows, so that its logits take no more memory than the weight (V, H). If H is below
    `LEAST_CHUNK_ROWS` or above `MOST_CHUNK_ROWS`, that limit replaces H.
    """
    if rows * classes <= ONE_CHUNK_LOGITS:
        return max(1, rows)
    most = min(max(features, LEAST_CHUNK_ROWS), MOST_CHUNK_ROWS)
    count = max(2, -(-rows // most))
    return max(1, -(-rows // count))


# ---- operator --------------------------------------------------------------------------------------------------


class LinearCrossEntropy(NamedTuple):
    """The operator of `linear_cross_entropy`, which returns (loss (), dhidden, dweight, dbias, factor). Forward
    computes the gradients that `wanted` selects; backward only multiplies these gradients by `factor` and by the
    gradient of the loss. `factor` is 1, or 1 / the mean's divisor if forward has not divided by it (float16).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    mean: bool
    chunk: int
    wanted: list[int]

    @property
    def terms(self) -> Terms:
        return Terms(*self[4:8])

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        hidden, weight, bias, target, terms = *self[:4], self.terms
        check_targets(target, weight.shape[0], terms.ignore_index)
        rows, classes, wide = hidden.shape[0], weight.shape[0], accumulator_dtype(hidden.dtype)
        inverse = inverse_of_targets(target, classes, terms, inverse_dtype(hidden)) if self.mean else None
        within = None if _scaled_late(hidden) else inverse  # factor of the gradient of the logits
        weight, bias = _of_aligned_classes(weight, bias)
        dhidden, dweight, dbias = (
            torch.zeros(t.shape, dtype=wide if i else t.dtype, device=t.device) if t is not None and w else None
            for i, (t, w) in enumerate(zip((hidden, weight, bias), self.wanted, strict=True))
        )
        losses = torch.empty(rows, dtype=reference_dtype(hidden.dtype), device=hidden.device)
        for start in range(0, rows, self.chunk):
            stop = min(start + self.chunk, rows)
            part = hidden[start:stop]  # (chunk, H)
            logits = torch.mm(part, weight.t()) if bias is None else torch.addmm(bias, part, weight.t())  # (chunk, V)
            real = logits[:, :classes]
            gradient = real if any(self.wanted) else None
            losses[start:stop] = losses_of_rows(real, target[start:stop], terms, within, gradient)[0]
            logits[:, classes:] = 0.0  # padding classes are not 0 in rows with inf or NaN in hidden
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[start:stop])
            if dweight is not None:
                _add_product(dweight, logits.t(), part)
            if dbias is not None:
                dbias += logits.sum(0, dtype=wide)
            del logits, real, gradient  # free memory before the next chunk's logits are computed
        factor = inverse.clone() if inverse is not None and within is None else losses.new_ones(())
        dweight, dbias = (t[:classes] if t is not None else None for t in (dweight, dbias))
        return total_of(losses, inverse, hidden), *self._stored([dhidden, dweight, dbias]), factor.to(wide)

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        loss = self.hidden.new_empty((), dtype=accumulator_dtype(self.hidden.dtype))
        made = [
            self.hidden.new_empty(t.shape, dtype=t.dtype) if t is not None and w else None
            for t, w in zip(self[:3], self.wanted, strict=True)
        ]
        return loss, *self._stored(made), torch.empty_like(loss)

    @without_autocast
    def in_pytorch(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute the loss and the gradients with all logits in memory at once."""
        hidden, weight, bias, target, terms = *self[:4], self.terms
        wide, late = accumulator_dtype(hidden.dtype), _scaled_late(hidden)
        logits = functional.linear(hidden, weight, bias)
        losses, _ = cross_entropy_reference(logits, target, terms)
        one = losses.new_ones(())
        inverse = inverse_by_formula(target, logits, terms) if self.mean else one
        slope = cross_entropy_gradient_reference(one if late else inverse, logits, target, terms)  # (N, V)
        made = [
            slope @ weight if self.wanted[0] else None,
            slope.t().to(wide) @ hidden.to(wide) if self.wanted[1] else None,
            slope.sum(0, dtype=wide) if self.wanted[2] else None,
        ]
        loss, factor = (losses.sum() * inverse).to(wide), (inverse if late else losses.new_ones(())).to(wide)
        return loss, *self._stored(made), factor

    def _stored(self, gradients: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """Cast the gradients of hidden, weight and bias to the dtypes in which forward stores them for backward: the
        tensors' own dtypes, except float32 for weight and bias if hidden is float16. Missing gradients become empty
        tensors.
        """
        hidden, dtype = self.hidden, accumulator_dtype(self.hidden.dtype)
        dhidden, dweight, dbias = (
            hidden.new_empty(0) if g is None or t is None else g.to(dtype if i and _scaled_late(hidden) else t.dtype)
            for i, (g, t) in enumerate(zip(gradients, self[:3], strict=True))
        )
        return dhidden, dweight, dbias

    def formula(self) -> tuple[Tensor, None, None, None, None]:
        logits = functional.linear(*self[:3])
        return loss_formula(logits, self.target, self.terms, "mean" if self.mean else "sum"), None, None, None, None

    def keep(self, made: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return *self, *made[1:]

    @staticmethod
    def gradients(kept: tuple[Any, ...], wanted: Sequence[bool], dloss: Tensor) -> list[Tensor | None]:
        call, made = LinearCrossEntropy(*kept[:11]), kept[11:]
        needed = [int(each) for each in wanted[:3]]
        if torch.is_grad_enabled():  # create_graph: autograd does not know how saved values depend on hidden
            slopes = call.gradients_formula(dloss)
            return [slope if need else None for slope, need in zip(slopes, needed, strict=True)]
        if any(need and not there for need, there in zip(needed, call.wanted, strict=True)):  # in a traced program
            made = _linear_cross_entropy(*call._replace(wanted=needed))[1:]
        *gradients, factor = made
        factor = factor * dloss
        return [
            scaled(gradient, factor).to(t.dtype) if need and t is not None else None
            for gradient, need, t in zip(gradients, needed, call[:3], strict=True)
        ]

    @without_autocast
    def gradients_formula(self, dloss: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the gradients of hidden, weight and bias by PyTorch's operators, with all logits in memory
        at once.
        """
        hidden, weight, bias, target, *_ = self
        logits = functional.linear(hidden, weight, bias)
        slope = reduced_gradient_formula(dloss, logits, target, self.terms, self.mean)  # (N, V)
        return slope @ weight, slope.t() @ hidden, None if bias is None else slope.sum(0)

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops: one matrix product for the logits, one for the gradient of hidden if `wanted`, one for the gradient of
        the weight if `wanted`, and the flops of the loss for each logit. Logits do not count as memory traffic.
        """
        hidden, weight, bias, wanted = *self[:3], self.wanted
        logits = hidden.shape[0] * weight.shape[0]
        pointwise = row_flops(self.terms) + (bias is not None) + wanted[2]
        pointwise += any(wanted) * (1 + (self.label_smoothing > 0))
        flops = Counter({matrix_precision(hidden): 2 * logits * hidden.shape[1] * (1 + wanted[0] + wanted[1])})
        flops[precision_of(hidden.dtype)] += pointwise * logits
        return Cost(distinct_bytes(self[:5]), distinct_bytes(made), dict(flops))


_linear_cross_entropy = declare("linear_cross_entropy", LinearCrossEntropy, slopes=1)


def _of_aligned_classes(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Append zeros to weight and bias as padding classes, so that the rows of the logits are aligned."""
    more = missing_columns(weight.shape[0], weight)
    if more == 0:
        return weight, bias
    return padded(weight, rows=more), functional.pad(bias, (0, more)) if bias is not None else None


def _scaled_late(hidden: Tensor) -> bool:
    """Whether backward instead of forward applies the mean's factor: in float16, gradients of the logits that contain
    this factor would underflow before a loss scale can help.
    """
    return hidden.dtype == torch.float16


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in the dtype of `total`: float32 if a and b have half precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total += a @ b


# ---- public -----------------------------------------------------------------------------------------------------


@recorded_whole
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute cross_entropy(hidden @ weight.T + bias, target) without all logits in memory at once.

    The forward pass also computes the gradients, chunk by chunk; backward only scales these gradients. The gradient of
    the weight is added up in float32.

    Args:
        hidden: (..., H), bfloat16, float16, float32 or float64. Under autocast, hidden, weight and bias are cast to
            autocast's dtype.
        weight: (V, H), as in `torch.nn.Linear`, with the dtype of hidden.
        target: class indices (...), int64.
        bias: (V,), with the dtype of hidden.
        class_weight, ignore_index, label_smoothing, z_loss: as in `cross_entropy`.
        reduction: "mean" or "sum".
        chunk_size: rows whose logits are computed at a time. None: up to 2^20 logits are one chunk; more logits are
            split into two or more chunks of at most H rows each, whose logits take no more memory than the weight. If H
            is below 4096 or above 8192, a chunk has at most 4096 or 8192 rows instead.

    Returns:
        The loss, a tensor () in the dtype of hidden, or float32 under autocast.

    Raises:
        TypeError, ValueError: as in `cross_entropy`.
    """
    check_tensors("linear_cross_entropy", None, ("bias",), hidden=hidden, weight=weight, bias=bias)
    check_tensors("linear_cross_entropy", target=target)
    dtype = result_dtype("cross_entropy", hidden)
    hidden, weight, bias = cast_by_autocast(hidden, weight, bias)
    _check_linear(hidden, weight, bias, target)
    rows = hidden.flatten(0, -2) if hidden.dim() > 1 else hidden.unsqueeze(0)  # (N, H)
    logits = LogitsShape((rows.shape[0], weight.shape[0]), hidden.dtype, hidden.device)
    indices = target.reshape(-1)
    check_arguments("linear_cross_entropy", logits, indices, class_weight, reduction, label_smoothing, z_loss)
    check_index("linear_cross_entropy", ignore_index)
    if reduction == "none":
        raise ValueError(
            "linear_cross_entropy: reduction must be 'mean' or 'sum', got 'none': forward already computes the "
            "gradients, which needs a scalar loss"
        )
    if chunk_size is not None and (not is_integer(chunk_size) or chunk_size < 1):
        raise ValueError(f"linear_cross_entropy: chunk_size must be a positive int, got {chunk_size!r}")
    wanted = [int(keeps_for_backward(t)) for t in (hidden, weight, bias)]  # torch.jit.trace takes no list of bools
    chunk = chunk_size or chunk_rows(rows.shape[0], rows.shape[1], weight.shape[0])
    class_weight = class_weight.detach() if class_weight is not None else None
    numbers = (ignore_index, float(label_smoothing), float(z_loss))
    loss, *_ = _linear_cross_entropy(
        rows, weight, bias, indices, class_weight, *numbers, reduction == "mean", chunk, wanted
    )
    return loss.to(dtype)


def _check_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
    name = "linear_cross_entropy"
    check_dtype(name, "hidden", hidden.dtype, FLOATS)
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: expected hidden (..., H) and weight (V, H), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    check_shape(name, "target", target, tuple(hidden.shape[:-1]))
    check_same_dtype(name, "hidden", hidden, "cast one, or use autocast", weight=weight, bias=bias)
    check_shape(name, "bias", bias, (weight.shape[0],))

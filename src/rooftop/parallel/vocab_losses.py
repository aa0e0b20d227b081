"""Cross entropy of logits whose vocabulary is split over tensor parallel ranks. The logits are never gathered.

For its columns, each rank computes the maximum m, the sum of exponentials relative to m, the target's logit if this
rank has it, and with label smoothing the sum of all logits. Two exchanges of a few numbers per row combine these values
as if one rank had all columns. The first exchange finds the overall maximum M, the second adds up the sums relative to
M: s = sum of s_r exp(m_r - M). The gradient needs no exchange, since each rank computes its own columns of softmax -
one_hot. `rooftop.kernels.cross_entropy` defines the loss of a row.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rooftop.kernels import cross_entropy, linear_cross_entropy
from rooftop.kernels.losses.formulas import inverse_of_count
from rooftop.kernels.losses.linear_losses import chunk_rows
from rooftop.kernels.losses.losses import LogitsShape, check_arguments, check_index, check_targets
from rooftop.kernels.operands.autocasting import cast_by_autocast, under_autocast
from rooftop.kernels.operands.dtypes import accumulator_dtype
from rooftop.parallel.exchanges import Group, place_in, start_sum

CHUNK_ELEMENTS = 1 << 24  # number of logits to process at a time: 64 MiB for each intermediate tensor in float32


@dataclass(frozen=True)
class Classes:
    """This rank's classes, and the settings of the loss.

    Attributes:
        group: the ranks.
        vocabulary: number of classes over all ranks. Columns after the last class are padding.
        start: the class to which this rank's first column belongs.
        here: number of this rank's columns that are classes, without padding.
        ignore_index, label_smoothing, z_loss: as in `rooftop.kernels.cross_entropy`.
    """

    group: ProcessGroup
    vocabulary: int
    start: int
    here: int
    ignore_index: int
    label_smoothing: float
    z_loss: float

    def places(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors (N,): the column of each target on this rank (0 if another rank has the target), and
        whether this rank has the target."""
        column = target - self.start
        here = (column >= 0) & (column < self.here) & (target != self.ignore_index)
        return column.where(here, 0), here


# ---- arithmetic ------------------------------------------------------------------------------------------------


def own_statistics(x: Tensor, target: Tensor, classes: Classes) -> tuple[Tensor, Tensor]:
    """Compute the statistics of logits (N, columns). Return the maximum of each row, (N,), and three values of each
    row relative to this maximum, (3, N): the sum of exponentials, the target's logit (0 if another rank has it), and
    the sum of all logits (0 without label smoothing)."""
    values = x[:, : classes.here].to(accumulator_dtype(x.dtype))
    if classes.here == 0:
        return values.new_full(values.shape[:1], -math.inf), values.new_zeros(3, len(values))
    column, here = classes.places(target)
    maximum = values.amax(1)
    # if all logits of this rank are -inf, another rank may have finite logits
    apart = values - maximum.masked_fill(maximum == -math.inf, 0.0)[:, None]
    found = apart.gather(1, column[:, None])[:, 0].where(here, 0.0)
    every = apart.sum(1) if classes.label_smoothing else torch.zeros_like(maximum)
    return maximum, torch.stack((apart.exp_().sum(1), found, every))


def of_all_ranks(maximum: Tensor, sums: Tensor, target: Tensor, classes: Classes) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the ranks' statistics. Returns the losses, the maximum, and the log of the sum of exponentials relative
    to the maximum, (N,) each.
    """
    most = maximum.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=classes.group)
    if classes.here:
        apart, (exponentials, found, every) = maximum - most, sums
        _, here = classes.places(target)
        sums = torch.stack((exponentials * apart.exp(), (found + apart).where(here, 0.0), every + classes.here * apart))
    exponentials, found, every = start_sum(sums, classes.group)()
    logarithm = exponentials.log()
    losses = (1 - classes.label_smoothing) * (logarithm - found)
    if classes.label_smoothing:
        losses = losses + classes.label_smoothing * (logarithm - every / classes.vocabulary)
    if classes.z_loss:
        losses = losses + classes.z_loss * (most + logarithm).square()
    return losses.where(target != classes.ignore_index, 0.0), most, logarithm


def own_gradient(
    x: Tensor, target: Tensor, maximum: Tensor, logarithm: Tensor, factor: Tensor, classes: Classes, dx: Tensor
) -> None:
    """Write the derivative of each row's loss times `factor`, (N,) or (), to dx (N, columns). dx may be x."""
    kept, spread = 1 - classes.label_smoothing, classes.label_smoothing / classes.vocabulary
    values = x[:, : classes.here].to(accumulator_dtype(x.dtype))
    power = ((values - maximum[:, None]) - logarithm[:, None]).exp_()
    # The maximum and the logarithm are subtracted one by one, which is most exact for probabilities near 1.
    made = power * kept
    if classes.here:
        column, here = classes.places(target)
        made.scatter_add_(1, column[:, None], (here.to(made.dtype) * -kept)[:, None])
    if spread:
        made += spread * (power * classes.vocabulary - 1)
    if classes.z_loss:
        made += power * (2 * classes.z_loss * (maximum + logarithm))[:, None]
    made *= factor.reshape(-1, 1)
    dx[:, : classes.here] = made.masked_fill_((target == classes.ignore_index)[:, None], 0.0)
    dx[:, classes.here :] = 0.0


def _inverse(target: Tensor, mean: bool, classes: Classes, dtype: torch.dtype) -> Tensor:
    """The factor, (), by which the summed loss is multiplied. For a mean, the factor is 1 / (number of targets that are
    not ignored), or 0 if all targets are ignored. For a sum, the factor is 1.
    """
    if mean:
        return inverse_of_count((target != classes.ignore_index).sum(), dtype)
    return torch.ones((), dtype=dtype, device=target.device)


class _CrossEntropy(torch.autograd.Function):
    """Computes the losses (N,) from this rank's columns of the logits, (N, columns)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, classes: Classes) -> Tensor:
        rows = max(1, CHUNK_ELEMENTS // max(1, x.shape[1]))
        chunks = [own_statistics(part, t, classes) for part, t in zip(x.split(rows), target.split(rows), strict=True)]
        maximum, sums = torch.cat([each[0] for each in chunks]), torch.cat([each[1] for each in chunks], 1)
        losses, most, logarithm = of_all_ranks(maximum, sums, target, classes)
        ctx.save_for_backward(x, target, most, logarithm)
        ctx.classes, ctx.rows = classes, rows
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        x, dx = ctx.saved_tensors[0], torch.empty_like(ctx.saved_tensors[0])
        parts = [t.split(ctx.rows) for t in (x, *ctx.saved_tensors[1:], dlosses, dx)]
        for values, target, most, logarithm, factor, made in zip(*parts, strict=True):
            own_gradient(values, target, most, logarithm, factor, ctx.classes, made)
        return dx, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the loss () of hidden (N, H) and this rank's rows of the weight. The forward pass also computes the
    gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, classes: Classes, mean: bool, chunk: int
    ) -> Tensor:
        wide = accumulator_dtype(hidden.dtype)
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        dhidden = torch.empty_like(hidden) if for_hidden else None
        dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if for_weight else None
        inverse = _inverse(target, mean, classes, wide)
        # In float16, dividing the logits' gradient by the number of rows would underflow before a loss scale can help.
        late = hidden.dtype == torch.float16
        within = torch.ones_like(inverse) if late else inverse
        losses = hidden.new_empty(len(hidden), dtype=wide)
        for start in range(0, len(hidden), chunk):
            part, aim = hidden[start : start + chunk], target[start : start + chunk]
            logits = part @ weight.t()  # (chunk, columns)
            maximum, sums = own_statistics(logits, aim, classes)
            losses[start : start + chunk], most, logarithm = of_all_ranks(maximum, sums, aim, classes)
            if dhidden is None and dweight is None:
                continue
            own_gradient(logits, aim, most, logarithm, within, classes, logits)
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[start : start + chunk])
            if dweight is not None:
                dweight += logits.t() @ part
        if dweight is not None and not late:
            dweight = dweight.to(weight.dtype)
        ctx.save_for_backward(dhidden, dweight, inverse if late else within.new_ones(()))
        ctx.dtype = weight.dtype
        return losses.sum() * inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        *made, left = ctx.saved_tensors
        factor = dloss * left
        scaled = [None if d is None else (d * factor).to(ctx.dtype) for d in made]
        return (*scaled, None, None, None, None)


# ---- public ----------------------------------------------------------------------------------------------------


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Group,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute `rooftop.kernels.cross_entropy` of logits that are split by class over the ranks, without gathering them.

    All ranks of the group must call this function together. The function processes some rows at a time, with arithmetic
    in float32 (float64 for float64).

    Args:
        logits: (..., columns) for this rank's classes, the same number on each rank; bfloat16, float16, float32 or
            float64.
        target: (...), int64, classes of the whole vocabulary, the same on all ranks.
        group: the ranks, in the order of their classes; None: this process has all classes.
        vocabulary: number of classes; None: all columns of all ranks. Columns after the last class are padding, and are
            ignored.
        ignore_index, reduction, label_smoothing, z_loss: as in `rooftop.kernels.cross_entropy`.

    Returns:
        The loss, in the dtype of the logits, the same on all ranks: a scalar, or with reduction="none" a tensor of the
        shape of `target`. Each rank's backward computes the gradient of its own logits.

    Raises:
        TypeError, ValueError: as in `cross_entropy`, or the vocabulary does not fit the number of ranks and columns.
        RuntimeError: a second derivative is requested.
    """
    check_index("vocab_parallel_cross_entropy", ignore_index)
    if logits.dim() == 0:
        raise ValueError("vocab_parallel_cross_entropy: expected logits (..., columns), got a scalar")
    rows = LogitsShape((target.numel(), logits.shape[-1]), logits.dtype, logits.device)
    flat = target.reshape(-1)
    check_arguments("vocab_parallel_cross_entropy", rows, flat, None, reduction, label_smoothing, z_loss)
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"vocab_parallel_cross_entropy: expected target of shape {tuple(logits.shape[:-1])} for logits of "
            f"{tuple(logits.shape)}, got {tuple(target.shape)}"
        )
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    classes = _classes(logits.shape[-1], vocabulary, group, **options)  # type: ignore[arg-type]
    x = logits.reshape(-1, logits.shape[-1])
    if classes is None:
        loss = cross_entropy(x[:, :vocabulary], flat, reduction=reduction, **options)  # type: ignore[arg-type]
        return loss.reshape(target.shape) if reduction == "none" else loss
    check_targets(flat, classes.vocabulary, ignore_index)
    losses: Tensor = _CrossEntropy.apply(x, flat, classes)
    if reduction == "none":
        return losses.reshape(target.shape).to(logits.dtype)
    return (losses.sum() * _inverse(flat, reduction == "mean", classes, losses.dtype)).to(logits.dtype)


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Group,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute `vocab_parallel_cross_entropy` of hidden @ weight.T, with only some rows of this product in memory at a
    time.

    The forward pass computes the gradients chunk by chunk, and backward only scales them.

    Args:
        hidden: (..., H), the same on all ranks. Backward computes only this rank's summand of the gradient of hidden:
            pass hidden through `copy_to_ranks` or `gather_of_ranks`, which sum the gradient over the ranks.
        weight: (columns, H), this rank's rows, the same number on each rank.
        target, group, vocabulary, ignore_index, label_smoothing, z_loss: as in `vocab_parallel_cross_entropy`.
        reduction: "mean" or "sum".
        chunk_size: number of rows per chunk; None: as in `rooftop.kernels.linear_cross_entropy`.

    Returns:
        The loss, a scalar in the dtype of hidden (float32 under autocast), the same on all ranks.

    Raises:
        TypeError, ValueError: as in `rooftop.kernels.linear_cross_entropy`, or the vocabulary does not fit the number
            of ranks and columns.
        RuntimeError: a second derivative is requested.
    """
    check_index("vocab_parallel_linear_cross_entropy", ignore_index)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    classes = _classes(weight.shape[0], vocabulary, group, **options)  # type: ignore[arg-type]
    if classes is None:
        return linear_cross_entropy(
            hidden, weight[:vocabulary], target, reduction=reduction, chunk_size=chunk_size, **options  # type: ignore[arg-type]
        )  # fmt: skip
    if reduction not in ("mean", "sum"):
        raise ValueError(f"vocab_parallel_linear_cross_entropy: reduction must be 'mean' or 'sum', got {reduction!r}")
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(
            f"vocab_parallel_linear_cross_entropy: chunk_size must be a positive int or None, got {chunk_size!r}"
        )
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != target.shape:
        raise ValueError(
            "vocab_parallel_linear_cross_entropy: expected hidden (..., H), weight (columns, H) and target (...), got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}"
        )
    result = torch.float32 if under_autocast(hidden) else hidden.dtype
    hidden, weight = cast_by_autocast(hidden, weight)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"vocab_parallel_linear_cross_entropy: hidden is {hidden.dtype}, weight {weight.dtype}: cast one, or use "
            "autocast"
        )
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    shape = LogitsShape((len(flat), weight.shape[0]), hidden.dtype, hidden.device)
    check_arguments("vocab_parallel_linear_cross_entropy", shape, flat, None, reduction, label_smoothing, z_loss)
    check_targets(flat, classes.vocabulary, ignore_index)
    chunk = chunk_size or chunk_rows(rows.shape[0], rows.shape[1], classes.vocabulary)
    loss: Tensor = _LinearCrossEntropy.apply(rows, weight, flat, classes, reduction == "mean", chunk)
    return loss.to(result)


def _classes(
    columns: int,
    vocabulary: int | None,
    group: Group,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Classes | None:
    """This rank's `Classes`. A vocabulary of None means all columns of all ranks."""
    index, count = place_in(group)
    total = columns * count if vocabulary is None else vocabulary
    if total < 1:
        raise ValueError(f"the vocabulary must have at least one class, got {total}")
    if total > columns * count:
        needed = -(-total // count)
        raise ValueError(
            f"a vocabulary of {total} over {count} ranks needs {needed} columns on each rank, got {columns}: give each "
            f"rank {needed} columns, padded after the last class"
        )
    if group is None:
        return None
    start = index * columns
    here = min(max(total - start, 0), columns)
    return Classes(group, total, start, here, ignore_index, float(label_smoothing), float(z_loss))

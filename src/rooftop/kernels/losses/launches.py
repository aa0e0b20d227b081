"""Launch the kernels of cross entropy, with parameters from tables by the length of a row.

The functions here serve the operators in `losses.py`, which explains the formulas. The kernels of
`softmaxes/clusters.py` compute the rows that `CLUSTER_FUSED` in `softmaxes/tables.py` lists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.kernels.losses import tables
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.row_tiles import group_of, long_tile, tile, tile_config
from rooftop.kernels.operands.strided_rows import rows_of, unit
from rooftop.kernels.softmaxes import clusters
from rooftop.launch.triton_launch import launch, processors, require_triton


class Terms(NamedTuple):
    """The options of a cross entropy: class weights, the target to ignore, label smoothing, and the factor of the
    z-loss.
    """

    weight: Tensor | None  # (V,)
    ignore_index: int
    label_smoothing: float
    z_loss: float

    def contiguous(self) -> Terms:
        """The same terms with contiguous class weights, which kernels can read."""
        return self if self.weight is None else self._replace(weight=self.weight.contiguous())


# ---- launch ----------------------------------------------------------------------------------------------------


def inverse_of_targets(target: Tensor, classes: int, terms: Terms) -> Tensor:
    """Compute 1 / (sum of the valid targets' weights) as a float32 tensor (). The result is 0 if no target is valid."""
    require_triton()
    from rooftop.kernels.losses.triton_kernels import inverse_of_target_weights

    inverse = torch.empty((), dtype=torch.float32, device=target.device)
    terms = terms.contiguous()
    arguments = (target.contiguous(), _or(terms.weight, inverse), inverse, target.numel(), classes, terms.ignore_index)
    constants = {"HAS_WEIGHT": terms.weight is not None, **tables.TARGETS}
    launch(inverse_of_target_weights, (1,), target.device, *arguments, **constants)
    return inverse


def total_of(losses: Tensor, inverse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of losses (N,) times `inverse`, rounded to float32 and returned as a tensor () of `dtype`."""
    if losses.numel() > tables.TOTAL_ROWS:
        total = losses.sum(dtype=torch.float64)
        return (total if inverse is None else total * inverse).to(torch.float32).to(dtype)
    require_triton()
    from rooftop.kernels.losses.triton_kernels import total_of_losses

    total = torch.empty((), dtype=dtype, device=losses.device)
    arguments = (losses, _or(inverse, losses), total, losses.numel())
    launch(total_of_losses, (1,), losses.device, *arguments, HAS_INVERSE=inverse is not None, **tables.TOTAL)
    return total


def losses_of_rows(
    x: Tensor, target: Tensor, terms: Terms, inverse: Tensor | None, dx: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute (losses (N,), statistics (2, N)) of logits x (N, V). If `dx` is given, the kernel writes the gradient of
    the logits, times `inverse` if given, to dx, and returns None instead of the statistics. The rows of dx need not be
    adjacent in memory. For float32 logits, losses are float64, except that cluster kernels always return float32
    losses.
    """
    require_triton()
    from rooftop.kernels.losses import triton_kernels as kernels

    x, target, terms = rows_of(x), target.contiguous(), terms.contiguous()
    rows, columns = x.shape
    if dx is not None and terms.weight is None:
        plan = clusters.fused_plan(x, dx)
        if plan is not None:
            losses = torch.empty(rows, dtype=torch.float32, device=x.device)
            clusters.cross_entropy(plan, x, target, inverse, losses, dx, _numbers(terms, columns))
            return losses, None
    wide = x.dtype == torch.float32
    losses = torch.empty(rows, dtype=torch.float64 if wide else torch.float32, device=x.device)
    kept = torch.empty((2, rows), dtype=torch.float32, device=x.device) if dx is None else None
    dx_stride = columns if dx is None else dx.stride(0)
    group = unit(columns, x.stride(0), dx_stride)
    tensors = (x, target, *_weight_arguments(terms, losses), _or(inverse, losses), losses)
    sizes = (rows, columns // group, x.stride(0) // group, dx_stride // group, *_numbers(terms, columns))
    constants = _constants(terms, inverse) | {"GRADIENT": dx is not None, "WIDE": wide, "UNIT": group}
    arguments = (*tensors, _or(kept, losses), _or(dx, losses), *sizes)
    config = tile_config(tables.LOSS if dx is None else tables.FUSED, columns * x.element_size())
    if config is None:
        table = tables.LOSS_LONG if dx is None else tables.FUSED_LONG
        per_sm, block = long_tile(table, columns * x.element_size(), x.element_size())
        shifted = _is_shifted(x, dx, terms)
        block |= {"GROUP": 16 // x.element_size() if shifted else group_of(group, x.element_size()), "SHIFTED": shifted}
        grid = (min(rows, per_sm * processors(x)),)
        launch(kernels.cross_entropy_rows_long, grid, x.device, *arguments, **constants, **block)
    else:
        block = tile(config, columns, x.element_size())
        launch(kernels.cross_entropy_rows, (-(-rows // config.rows),), x.device, *arguments, **constants, **block)
    return losses, kept


def _is_shifted(x: Tensor, dx: Tensor | None, terms: Terms) -> bool:
    """Whether the kernel shifts its loads: there are no class weights, the tensors are contiguous and begin at
    multiples of 16 bytes, but the length of a row is not a multiple of 16 bytes.
    """
    elements = 16 // x.element_size()
    as_one = all(t.data_ptr() % 16 == 0 and t.is_contiguous() for t in (x, dx) if t is not None)
    return terms.weight is None and as_one and x.shape[1] % elements != 0


def gradient(
    dloss: Tensor, x: Tensor, target: Tensor, statistics: Tensor, terms: Terms, inverse: Tensor | None
) -> Tensor:
    """Compute dx (N, V) from dloss (N,) or ()."""
    require_triton()
    from rooftop.kernels.losses.triton_kernels import cross_entropy_gradient

    x, target, terms = rows_of(x), target.contiguous(), terms.contiguous()
    rows, columns = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    group = unit(columns, x.stride(0))
    elements = tables.GRADIENT_BYTES // x.element_size()
    block = min(elements, power_of_two(columns))
    tensors = (dloss, x, target, *_weight_arguments(terms, statistics), _or(inverse, statistics), statistics, dx)
    strides = (x.stride(0) // group, dloss.stride(0) if dloss.dim() else 0)
    sizes = (rows, columns // group, *strides, *_numbers(terms, columns))
    constants = {"UNIT": group, "ROWS": elements // block, "COLUMNS": block, "num_warps": tables.GRADIENT_WARPS}
    grid = (-(-rows // (elements // block)) * -(-columns // block),)
    launch(cross_entropy_gradient, grid, x.device, *tensors, *sizes, **_constants(terms, inverse), **constants)
    return dx


def scale(gradient: Tensor, factor: Tensor, result: Tensor) -> None:
    """Compute result = gradient * factor. If `result` is `gradient` itself and the factor is 1, the kernel reads only
    the factor.
    """
    require_triton()
    from rooftop.kernels.losses.triton_kernels import scale_unless_one

    elements = gradient.numel()
    grid = (min(-(-elements // tables.SCALE["BLOCK"]), tables.SCALE_PROGRAMS_PER_SM * processors(gradient)),)
    constants = {"IN_PLACE": result is gradient, **tables.SCALE}
    launch(scale_unless_one, grid, gradient.device, gradient, factor, result, elements, **constants)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return `tensor`, or `other` as a placeholder if `tensor` is None, because a kernel's argument must be
    a tensor.
    """
    return other if tensor is None else tensor


def _weight_arguments(terms: Terms, other: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel arguments for class weights and their sum; placeholders if unused."""
    if terms.weight is None:
        return other, other
    return terms.weight, terms.weight.sum(dtype=torch.float32) if terms.label_smoothing else other


def _numbers(terms: Terms, classes: int) -> tuple[int | float, ...]:
    """The kernels' arguments for the terms: the ignored index, 1 - e and e / V for the label smoothing e, and the
    factor of the z-loss.
    """
    return terms.ignore_index, 1 - terms.label_smoothing, terms.label_smoothing / classes, terms.z_loss


def _constants(terms: Terms, inverse: Tensor | None) -> dict[str, bool]:
    """The kernel constants that state which terms are used and whether the loss is a mean."""
    return {
        "HAS_WEIGHT": terms.weight is not None,
        "SMOOTH": terms.label_smoothing > 0,
        "Z": terms.z_loss != 0,
        "MEAN": inverse is not None,
    }

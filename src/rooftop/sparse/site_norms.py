"""Batch norm over the rows that are sites: y = (x - mean) * rate * weight + bias, with rate = 1 / sqrt(var + eps).

Mean and variance are over the rows of x (N, C) that `sites` (N,) marks. Only the device knows the number of such rows.
With fewer than two sites, there is no variance, and the running statistics are used. Source: Ioffe and Szegedy 2015,
"Batch Normalization". The kernels are memory-bound: forward reads x twice and writes y; backward reads dy and x twice
each, and writes dx. Rows that are not sites may have any values. The kernels do not read these rows, and set their
results and gradients to 0.

Sums and statistics are float64 (float32 if x is float16 or bfloat16). Each sum is computed in parts of equal length,
which are merged in a fixed order, so results are the same bit for bit in each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.launch.lessons import FIRST
from rooftop.launch.operators import declare, no_second_derivative
from rooftop.launch.repeated_calls import repeated_rows
from rooftop.launch.row_counts import allocate, size
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# These sizes are predicted, not measured: 16 elements of a tile per thread, and two parts per multiprocessor.
TILE, COLUMNS, PARTS_PER_SM, MERGED, WARPS = 2048, 64, 2, 64, 4

# ---- reference -------------------------------------------------------------------------------------------------


def site_norm_reference(
    x: Tensor, sites: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, eps: float,
) -> Six:  # fmt: skip
    """Compute (y (N, C), mean (C,), var (C,), count (1,), center (C,), rate (C,)). mean, var and count are the
    statistics of the sites. The rows are normalized as (x - center) * rate.
    """
    known, wide = sites[:, None], _wide(x)
    values = x.to(wide).where(known, 0)
    count = sites.sum().to(wide).view(1)
    mean = values.sum(0) / count.clamp(min=1)
    var = (values - mean).square().where(known, 0).sum(0) / count.clamp(min=1)
    center, used = mean.clone(), var
    if running_mean is not None and running_var is not None:
        center, used = torch.where(count < 2, running_mean, mean), torch.where(count < 2, running_var, var)
    rate = 1 / (used + eps).sqrt()
    y = (values - center) * rate
    if weight is not None and bias is not None:
        y = y * weight + bias
    statistics = (t.to(wide) for t in (mean, var, count, center, rate))
    return y.where(known, 0).to(x.dtype), *statistics  # type: ignore[return-value]


def site_norm_gradient_reference(
    dy: Tensor, x: Tensor, sites: Tensor, weight: Tensor | None, center: Tensor, rate: Tensor, count: Tensor,
    by_running: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute dx (N, C), dweight (C,) and dbias (C,). `by_running` means that running statistics exist. With fewer than
    two sites, forward normalizes the rows by the running statistics, which do not depend on x."""
    known = sites[:, None]
    slope, values = (t.to(rate.dtype).where(known, 0) for t in (dy, x))
    rest = (values - center).where(known, 0).sum(0) / count.clamp(min=1)  # corrects the rounding error of center
    if by_running:
        rest = torch.where(count < 2, 0, rest)
    normal = ((values - center - rest) * rate).where(known, 0)
    dbias, dweight = slope.sum(0), (slope * normal).sum(0)
    through = (dbias + normal * dweight) / count.clamp(min=1)
    if by_running:
        through = torch.where(count < 2, 0, through)
    scale = rate if weight is None else rate * weight
    return ((slope - through) * scale).where(known, 0).to(x.dtype), dweight, dbias


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums and statistics: float64 for float32 and float64, float32 for half precision."""
    return torch.float64 if x.dtype in (torch.float32, torch.float64) else torch.float32


# ---- launches --------------------------------------------------------------------------------------------------


def _by_reference(x: Tensor) -> bool:
    return x.numel() == 0 or x.dtype == torch.float64 or (x.is_cpu and not INTERPRETED)


def _tile(x: Tensor) -> dict[str, int]:
    columns = min(COLUMNS, 1 << (x.shape[1] - 1).bit_length())
    return {"CHANNELS": x.shape[1], "ROWS": TILE // columns, "COLUMNS": columns, "num_warps": WARPS}


def _parts(x: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    """Return the number of parts into which rows are divided for sums, and the number of rows in a part."""
    tiles = -(-size(x, 0) // tile["ROWS"])
    each = -(-tiles // (PARTS_PER_SM * processors(x)))
    return -(-tiles // each), each * tile["ROWS"]


def _forward(
    x: Tensor, sites: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, eps: float,
) -> Six:  # fmt: skip
    require_triton()
    from rooftop.sparse.site_norm_kernels import merge_moments, normalize_sites, site_moments

    x, sites = x.contiguous(), sites.contiguous()
    rows, channels = size(x, 0), x.shape[1]
    tile = _tile(x)
    (parts, length), blocks = _parts(x, tile), -(-channels // tile["COLUMNS"])
    means, squares = (allocate(x, parts, channels, dtype=_wide(x)) for _ in range(2))
    counts = allocate(means, parts)
    launch(site_moments, (parts, blocks), x.device, x, sites, means, squares, counts, rows, length, **tile)
    mean, var, center, rate = (means.new_empty(channels) for _ in range(4))
    count = means.new_empty(1)
    running = running_mean is not None and running_var is not None
    launch(
        merge_moments, (blocks,), x.device, means, squares, counts, running_mean, running_var, mean, var, center, rate,
        count, parts, eps, CHANNELS=channels, RUNNING=running, PARTS=MERGED, COLUMNS=tile["COLUMNS"], num_warps=WARPS,
    )  # fmt: skip
    y = allocate(x, rows, channels)
    affine = weight is not None and bias is not None
    grid = (-(-rows // tile["ROWS"]), blocks)
    launch(normalize_sites, grid, x.device, x, sites, center, rate, weight, bias, y, rows, AFFINE=affine, **tile)
    return y, mean, var, count, center, rate


def _backward(
    dy: Tensor, x: Tensor, sites: Tensor, weight: Tensor | None, center: Tensor, rate: Tensor, count: Tensor,
    by_running: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    require_triton()
    from rooftop.sparse.site_norm_kernels import site_gradient, site_gradient_sums

    dy, x, sites = dy.contiguous(), x.contiguous(), sites.contiguous()
    tile, rows, channels = _tile(x), size(x, 0), x.shape[1]
    (parts, length), blocks = _parts(x, tile), -(-channels // tile["COLUMNS"])
    sums = [allocate(x, parts, channels, dtype=rate.dtype) for _ in range(2)]
    launch(site_gradient_sums, (parts, blocks), x.device, dy, x, sites, center, rate, *sums, rows, length, **tile)
    dbias, dweight = (each.sum(0) for each in sums)
    dx = allocate(x, rows, channels)
    launch(
        site_gradient, (-(-rows // tile["ROWS"]), blocks), x.device, dy, x, sites, center, rate, weight, dbias, dweight,
        count, dx, rows, AFFINE=weight is not None, RUNNING=by_running, **tile,
    )  # fmt: skip
    return dx, dweight, dbias


# ---- operators -------------------------------------------------------------------------------------------------


class SiteNorm(NamedTuple):
    """Operator that computes y, mean, var, count, center and rate as `site_norm_reference` does.

    x is (N, C), bfloat16, float16, float32 or float64. sites is (N,), bool. All other tensors are (C,), float32 or
    wider. weight and bias are both given or both None, and so are running_mean and running_var. The results mean, var
    (biased), center and rate are float64 if x is float32 or float64, and float32 otherwise.
    """

    x: Tensor
    sites: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    eps: float

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.in_pytorch() if _by_reference(self.x) else _forward(*self)

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, channels = self.x, self.x.shape[1]
        mean, var, center, rate = (x.new_empty(channels, dtype=_wide(x)) for _ in range(4))
        return x.new_empty(x.shape), mean, var, x.new_empty(1, dtype=_wide(x)), center, rate

    def in_pytorch(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return site_norm_reference(*self)

    def keep(self, made: Six) -> tuple[Any, ...]:
        """Save the dtype of the bias, and all arguments of the backward operator except dy."""
        x, sites, weight, bias, running_mean, *_ = self
        _, _, _, count, center, rate = made
        return x, sites, weight, center, rate, count, running_mean is not None, None if bias is None else bias.dtype

    @staticmethod
    def gradients(kept: tuple[Any, ...], wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor | None, ...]:
        _, _, weight, *_, bias_dtype = kept
        dx, dweight, dbias = _site_norm_backward(dy, *kept[:-1])
        return (dx,) if weight is None else (dx, None, dweight.to(weight.dtype), dbias.to(bias_dtype))

    def cost(self, made: Six) -> Cost:
        """Per element, count four operations for the moments (a sum, a difference, a square and its sum), two to
        normalize, and two more with weights. Count only one read of x, as if a cache served the second read."""
        flops = (4 + 2 + 2 * (self.weight is not None)) * self.x.numel()
        read = distinct_bytes(self[:6])
        return Cost(read, distinct_bytes(made), {precision_of(self.x.dtype): flops} if flops else {})


class SiteNormBackward(NamedTuple):
    """Operator that computes dx (N, C), dweight (C,) and dbias (C,) as `site_norm_gradient_reference` does."""

    dy: Tensor
    x: Tensor
    sites: Tensor
    weight: Tensor | None
    center: Tensor
    rate: Tensor
    count_: Tensor
    by_running: bool

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        return site_norm_gradient_reference(*self) if _by_reference(self.x) else _backward(*self)

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.rate.shape
        return self.x.new_empty(self.x.shape), self.rate.new_empty(shape), self.rate.new_empty(shape)

    def cost(self, made: tuple[Tensor, Tensor, Tensor]) -> Cost:
        """Per element, count nine operations: two recompute the normalized x, three form the two sums, three subtract
        the terms of mean and variance, and one multiplies by the scale."""
        flops = 9 * self.x.numel()
        read = distinct_bytes(self[:7])
        return Cost(read, distinct_bytes(made), {precision_of(self.x.dtype): flops} if flops else {})


_site_norm = declare("site_norm", SiteNorm, slopes=1, known="itself")
_site_norm_backward = declare(
    "site_norm_backward",
    SiteNormBackward,
    derivative=no_second_derivative("site_norm", "torch.nn.functional.batch_norm"),
    known="itself",
)


@repeated_rows(FIRST, FIRST)
def site_norm(
    x: Tensor, sites: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, eps: float,
) -> Six:  # fmt: skip
    """Compute the results of `SiteNorm`. C++ repeats calls without Python, even with another number of rows
    (`repeated_calls.py`)."""
    return _site_norm(x, sites, weight, bias, running_mean, running_var, eps)

"""Batch norm over the rows that are sites: y = (x - mean) * rate * weight + bias, rate = 1 / sqrt(var + eps).

Mean and variance are of the rows (N, C) that `sites` (N,) names, of which only the device knows how many there are; of
fewer than two there is no variance, and the running statistics stand in. Ioffe and Szegedy 2015, "Batch Normalization".
Bound by memory: forward reads x twice and writes y, backward reads dy and x twice and writes dx. Rows that are no sites
hold anything: they are not read, and their results and gradients are 0.

Sums and statistics are float64, of half precision float32, in parts of equal length that are merged in order: the same
bits each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.launch.operators import differentiable, in_pytorch, no_second_derivative, operator
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# Predicted, not measured: a tile of 16 elements a thread, and parts enough for every multiprocessor twice.
TILE, COLUMNS, PARTS_PER_SM, MERGED, WARPS = 2048, 64, 2, 64, 4

# ---- reference -------------------------------------------------------------------------------------------------


def site_norm_reference(
    x: Tensor, sites: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, eps: float,
) -> Six:  # fmt: skip
    """(y (N, C), mean, var, count (1,), center, rate): what the sites have, and what they are normalized by, (C,)."""
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
    """(dx (N, C), dweight (C,), dbias (C,)); `by_running`: fewer than two sites were normalized by constants."""
    known = sites[:, None]
    slope, values = (t.to(rate.dtype).where(known, 0) for t in (dy, x))
    rest = (values - center).where(known, 0).sum(0) / count.clamp(min=1)  # what the center lacks: it was rounded
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
    """The dtype of sums and statistics: wide enough that only results are rounded."""
    return torch.float64 if x.dtype in (torch.float32, torch.float64) else torch.float32


# ---- launches --------------------------------------------------------------------------------------------------


def _by_reference(x: Tensor) -> bool:
    return x.numel() == 0 or x.dtype == torch.float64 or (x.is_cpu and not INTERPRETED)


def _tile(x: Tensor) -> dict[str, int]:
    columns = min(COLUMNS, 1 << (x.shape[1] - 1).bit_length())
    return {"CHANNELS": x.shape[1], "ROWS": TILE // columns, "COLUMNS": columns, "num_warps": WARPS}


def _parts(x: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    """How many parts the rows are summed in, and how long one is."""
    tiles = -(-x.shape[0] // tile["ROWS"])
    each = -(-tiles // (PARTS_PER_SM * processors(x)))
    return -(-tiles // each), each * tile["ROWS"]


def _forward(
    x: Tensor, sites: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, eps: float,
) -> Six:  # fmt: skip
    require_triton()
    from rooftop.sparse.site_norm_kernels import merge_moments, normalize_sites, site_moments

    x, sites = x.contiguous(), sites.contiguous()
    rows, channels = x.shape
    tile = _tile(x)
    (parts, length), blocks = _parts(x, tile), -(-channels // tile["COLUMNS"])
    means, squares = torch.empty(2, parts, channels, dtype=_wide(x), device=x.device).unbind(0)
    counts = means.new_empty(parts)
    launch(site_moments, (parts, blocks), x.device, x, sites, means, squares, counts, rows, length, **tile)
    mean, var, center, rate = (means.new_empty(channels) for _ in range(4))
    count = means.new_empty(1)
    running = running_mean is not None and running_var is not None
    launch(
        merge_moments, (blocks,), x.device, means, squares, counts, running_mean, running_var, mean, var, center, rate,
        count, parts, eps, CHANNELS=channels, RUNNING=running, PARTS=MERGED, COLUMNS=tile["COLUMNS"], num_warps=WARPS,
    )  # fmt: skip
    y = torch.empty_like(x)
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
    tile = _tile(x)
    (parts, length), blocks = _parts(x, tile), -(-x.shape[1] // tile["COLUMNS"])
    sums = torch.empty(2, parts, x.shape[1], dtype=rate.dtype, device=x.device)
    launch(site_gradient_sums, (parts, blocks), x.device, dy, x, sites, center, rate, sums, x.shape[0], length, **tile)
    dbias, dweight = (each.sum(0) for each in sums)
    dx = torch.empty_like(x)
    launch(
        site_gradient, (-(-x.shape[0] // tile["ROWS"]), blocks), x.device, dy, x, sites, center, rate, weight, dbias,
        dweight, count, dx, x.shape[0], AFFINE=weight is not None, RUNNING=by_running, **tile,
    )  # fmt: skip
    return dx, dweight, dbias


# ---- registration ----------------------------------------------------------------------------------------------


@operator("site_norm")
def site_norm(
    x: Tensor, sites: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, mean, var, count, center, rate) as of `site_norm_reference`.

    x: (N, C), bfloat16, float16, float32 or float64. sites: (N,), bool. All others are (C,), float32 or wider than x;
    weight and bias come together or not at all, and so do running_mean and running_var. The results mean, var (biased),
    center and rate are float64 if x is float32 or float64, else float32.
    """
    arguments = (x, sites, weight, bias, running_mean, running_var, eps)
    return site_norm_reference(*arguments) if _by_reference(x) else _forward(*arguments)


@torch.library.register_fake("rooftop::site_norm")
def _(
    x: Tensor, sites: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def of(size: int) -> Tensor:
        return x.new_empty(size, dtype=_wide(x))

    channels = x.shape[1]
    return x.new_empty(x.shape), of(channels), of(channels), of(1), of(channels), of(channels)


@operator("site_norm_backward")
def _site_norm_backward(
    dy: Tensor, x: Tensor, sites: Tensor, weight: Tensor | None, center: Tensor, rate: Tensor, count: Tensor,
    by_running: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    arguments = (dy, x, sites, weight, center, rate, count, by_running)
    return site_norm_gradient_reference(*arguments) if _by_reference(x) else _backward(*arguments)


@torch.library.register_fake("rooftop::site_norm_backward")
def _(
    dy: Tensor, x: Tensor, sites: Tensor, weight: Tensor | None, center: Tensor, rate: Tensor, count: Tensor,
    by_running: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), rate.new_empty(rate.shape), rate.new_empty(rate.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Six) -> None:
    x, sites, weight, bias, running_mean, _, _ = inputs
    _, *others = output
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)
    _, _, count, center, rate = others
    ctx.save_for_backward(x, sites, weight, center, rate, count)
    ctx.by_running, ctx.bias_dtype = running_mean is not None, None if bias is None else bias.dtype


def _differentiate(ctx: Any, dy: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    x, sites, weight, center, rate, count = ctx.saved_tensors
    dx, dweight, dbias = _site_norm_backward(dy, x, sites, weight, center, rate, count, ctx.by_running)
    if weight is None:
        return dx, *(None,) * 6
    return dx, None, dweight.to(weight.dtype), dbias.to(ctx.bias_dtype), None, None, None


differentiable("site_norm", _differentiate, _save)
in_pytorch("site_norm", site_norm_reference)
differentiable("site_norm_backward", no_second_derivative("site_norm", "torch.nn.functional.batch_norm"))


@cost_of("rooftop::site_norm")
def _forward_cost(call: Call) -> Cost:
    """A sum, a difference, a square and its sum for the moments; a difference and a product, and two more with weights.

    x is counted once, as if a cache could hold it.
    """
    x = call["x"]
    flops = (4 + 2 + 2 * (call["weight"] is not None)) * x.numel()
    read = distinct_bytes([x, call["sites"], call["weight"], call["bias"], call["running_mean"], call["running_var"]])
    return Cost(read, distinct_bytes(list(call.out)), {precision_of(x.dtype): flops} if flops else {})


@cost_of("rooftop::site_norm_backward")
def _backward_cost(call: Call) -> Cost:
    """What x was normalized to (2), two sums and a product; a product and two differences, and the scale."""
    dy, x = call["dy"], call["x"]
    flops = 9 * x.numel()
    read = distinct_bytes([dy, x, *(call[name] for name in ("sites", "weight", "center", "rate", "count"))])
    return Cost(read, distinct_bytes(list(call.out)), {precision_of(x.dtype): flops} if flops else {})

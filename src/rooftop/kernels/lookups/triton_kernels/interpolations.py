"""Triton kernels of the trilinear interpolation; `../interpolations.py` has the operator.

A program computes POINTS points and CHANNELS channels at a time. A program starts the loads of all eight corners before
it uses the first corner, and neighbouring threads read neighbouring channels. The argument `units` is C / UNIT, so that
the compiler knows that UNIT divides C, and loads several channels at a time. All offsets of points are 64-bit. One
program sums a point's gradient, so the gradient is deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.rows import is_inside


@triton.jit
def trilinear_forward(
    features, points, out,  # shapes: (B, 8, C), (B, 3), (B, C)
    count, units,
    UNIT: tl.constexpr, EVEN: tl.constexpr, POINTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum the eight corners of each point's cell, weighted by the point's position in the cell; sums are float32."""
    channels = units * UNIT
    blocks = tl.cdiv(channels, CHANNELS)
    point = (tl.program_id(0) // blocks).to(tl.int64) * POINTS + tl.arange(0, POINTS)  # (POINTS,)
    channel = (tl.program_id(0) % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    inside = is_inside(point, count, channel, channels, EVEN)
    place = features + point[:, None] * (8 * channels) + channel[None, :]  # (POINTS, CHANNELS)
    corners = ()
    for corner in tl.static_range(8):
        corners = corners + (tl.load(place + corner * channels, mask=inside, other=0.0),)
    u, v, w = _upper_weights(points, point, count)
    total = tl.zeros((POINTS, CHANNELS), tl.float32)
    for corner in tl.static_range(8):
        weight = _end(u, corner // 4) * _end(v, corner // 2 % 2) * _end(w, corner % 2)
        total += weight[:, None] * corners[corner].to(tl.float32)
    target = out + point[:, None] * channels + channel[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def trilinear_backward(
    gradient, features, points, dfeatures, dpoints,  # gradient (B, C); (d)features (B, 8, C); (d)points (B, 3)
    count, units,
    FEATURES: tl.constexpr, COORDINATES: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, POINTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the features if FEATURES is set, and of the points if COORDINATES is set."""
    channels = units * UNIT
    point = tl.program_id(0).to(tl.int64) * POINTS + tl.arange(0, POINTS)  # (POINTS,)
    u, v, w = _upper_weights(points, point, count)
    along_u = tl.zeros((POINTS, CHANNELS), tl.float32)  # summed over blocks of channels
    along_v = tl.zeros((POINTS, CHANNELS), tl.float32)
    along_w = tl.zeros((POINTS, CHANNELS), tl.float32)
    for start in range(0, channels, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        inside = is_inside(point, count, channel, channels, EVEN)
        first = point[:, None] * (8 * channels) + channel[None, :]  # (POINTS, CHANNELS)
        dout = tl.load(gradient + point[:, None] * channels + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        corners = ()
        if COORDINATES:
            for corner in tl.static_range(8):
                corners = corners + (tl.load(features + first + corner * channels, mask=inside, other=0.0),)
        if FEATURES:
            for corner in tl.static_range(8):
                weight = _end(u, corner // 4) * _end(v, corner // 2 % 2) * _end(w, corner % 2)
                result = (weight[:, None] * dout).to(dfeatures.dtype.element_ty)
                tl.store(dfeatures + first + corner * channels, result, mask=inside)
        if COORDINATES:
            for corner in tl.static_range(8):
                product = dout * corners[corner].to(tl.float32)
                end_u, end_v, end_w = _end(u, corner // 4), _end(v, corner // 2 % 2), _end(w, corner % 2)
                along_u += (_slope(corner // 4) * (end_v * end_w))[:, None] * product
                along_v += (_slope(corner // 2 % 2) * (end_u * end_w))[:, None] * product
                along_w += (_slope(corner % 2) * (end_u * end_v))[:, None] * product
    if COORDINATES:
        for axis in tl.static_range(3):
            along = along_u if axis == 0 else (along_v if axis == 1 else along_w)
            total = tl.sum(along, axis=1).to(dpoints.dtype.element_ty)
            tl.store(dpoints + point * 3 + axis, total, mask=point < count)


# ---- functions that several kernels share --------------------------------------------------------------------------


@triton.jit
def _upper_weights(points, point, count):
    """The weight w of the cell's upper end in each dimension; the lower end has the weight 1 - w."""
    known = point < count
    u = tl.load(points + point * 3, mask=known, other=0.0).to(tl.float32)
    v = tl.load(points + point * 3 + 1, mask=known, other=0.0).to(tl.float32)
    w = tl.load(points + point * 3 + 2, mask=known, other=0.0).to(tl.float32)
    return (u + 1.0) * 0.5, (v + 1.0) * 0.5, (w + 1.0) * 0.5


@triton.jit
def _end(upper, UPPER: tl.constexpr):
    if UPPER:
        return upper
    else:
        return 1.0 - upper


@triton.jit
def _slope(UPPER: tl.constexpr):
    """The derivative of the weight of a cell's end with respect to the point's coordinate."""
    return 0.5 if UPPER else -0.5

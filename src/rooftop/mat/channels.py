"""Combine and separate channels: merge, split, extractChannel, insertChannel, mixChannels.

Results are written to `dst` if it is given. `dst` may be a region of a larger Mat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index as as_integer
from typing import Any

import numpy as np
import torch

from rooftop.mat.allocation import same_device
from rooftop.mat.copies import apart, overlap
from rooftop.mat.expressions import MatExpr
from rooftop.mat.matrix import Mat, as_mat
from rooftop.mat.type_codes import CV_CN_MAX, CV_MAKETYPE, typeToString


def merge(mv: Sequence[Mat | MatExpr], dst: Mat | None = None) -> Mat:
    """One Mat with the channels of all Mats, in order. Each Mat may have several channels.

    Raises:
        ValueError: there are no Mats, or one of them has no sizes; the sizes, depths or devices of the Mats differ; or
            the Mats have more than 512 channels together.
    """
    if not mv:
        raise ValueError("merge needs at least one Mat")
    mats = [as_mat(m) for m in mv]
    _check_alike("merge", mats)
    if not mats[0].dims:
        raise ValueError(f"merge needs Mats with sizes, got {mats[0]}: leave out empty Mats")
    channels = sum(m.channels() for m in mats)
    if channels > CV_CN_MAX:
        raise ValueError(f"{channels} channels are too many: a Mat has at most {CV_CN_MAX}")
    sources = [m._bits() for m in mats]
    dst = _destination(mats[0], channels, dst)
    if dst.empty():
        return dst
    target = dst._writable_bits()
    if any(overlap(source, target) or source.data_ptr() == target.data_ptr() for source in sources):
        target.copy_(torch.cat(sources, -1))
        return dst
    first = 0
    for source in sources:
        target[..., first : first + source.shape[-1]].copy_(source)
        first += source.shape[-1]
    return dst


def split(m: Mat | MatExpr, mv: Sequence[Mat] | None = None) -> list[Mat]:
    """One Mat for each channel. If `mv` is given, the channels are written into its Mats."""
    m = as_mat(m)
    if mv is not None and len(mv) != m.channels():
        raise ValueError(f"split of {m} writes {m.channels()} Mats, got {len(mv)}")
    return [extractChannel(m, coi, None if mv is None else mv[coi]) for coi in range(m.channels())]


def extractChannel(src: Mat | MatExpr, coi: int, dst: Mat | None = None) -> Mat:
    """Channel `coi` as a Mat of one channel."""
    src = as_mat(src)
    _check_channel("extractChannel", coi, src)
    given = src._bits()
    dst = _destination(src, 1, dst)
    if not dst.empty():
        target = dst._writable_bits()
        target.copy_(apart(given[..., coi : coi + 1], target))
    return dst


def insertChannel(src: Mat | MatExpr, dst: Mat, coi: int) -> Mat:
    """Write a Mat of one channel into channel `coi` of `dst`, and return `dst`."""
    src = as_mat(src)
    _check_channel("insertChannel", coi, dst)
    _check_alike("insertChannel", (src, dst))
    if src.channels() != 1:
        raise ValueError(f"insertChannel takes a Mat of one channel, got {src}")
    if not dst.empty():
        target = dst._writable_bits()[..., coi : coi + 1]
        target.copy_(apart(src._bits(), target))
    return dst


def mixChannels(
    src: Mat | Sequence[Mat],
    dst: Mat | Sequence[Mat],
    fromTo: Sequence[int] | Sequence[tuple[int, int]] | np.ndarray[Any, Any],
) -> list[Mat]:
    """Copy single channels from some Mats to channels of others.

    Args:
        src, dst: Mats whose channels are numbered consecutively: first the channels of the first Mat, then the
            second's, and so on. All Mats have the same size, depth and device. The given
            channels of dst are overwritten.
        fromTo: pairs (channel of src, channel of dst), or the same numbers as one flat sequence; lists, tuples or a
            NumPy array. A negative channel of src sets the channel of dst to 0.

    Returns:
        dst.
    """
    sources = [src] if isinstance(src, Mat) else list(src)
    targets = [dst] if isinstance(dst, Mat) else list(dst)
    if not sources or not targets:
        raise ValueError("mixChannels needs at least one Mat in src and in dst")
    _check_alike("mixChannels", [*sources, *targets])
    givens = [m._bits()[..., c : c + 1] for m in sources for c in range(m.channels())]
    into = [m._writable_bits()[..., c : c + 1] for m in targets for c in range(m.channels())]
    pairs = _pairs(fromTo, len(givens), len(into))
    # If source and target share memory, all channels are read before any is written, so that channels can be swapped.
    shared = any(overlap(given, target) or given.data_ptr() == target.data_ptr() for given in givens for target in into)
    values = [None if a < 0 else givens[a].clone() if shared else givens[a] for a, _ in pairs]
    for value, (_, b) in zip(values, pairs, strict=True):
        if value is None:
            into[b].zero_()
        else:
            into[b].copy_(value)
    return targets


def _pairs(numbers: Iterable[Any], sources: int, targets: int) -> list[tuple[int, int]]:
    flat = [
        as_integer(n) for each in numbers for n in (each if isinstance(each, (tuple, list, np.ndarray)) else [each])
    ]
    if len(flat) % 2:
        raise ValueError(f"fromTo must be pairs of a channel of src and a channel of dst, got {len(flat)} numbers")
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    for a, b in pairs:
        if a >= sources or not 0 <= b < targets:
            raise IndexError(f"fromTo {a} -> {b}: src has channels 0 to {sources - 1}, dst 0 to {targets - 1}")
    return pairs


def _destination(like: Mat, channels: int, dst: Mat | None) -> Mat:
    dst = Mat(device=like.device) if dst is None else dst
    dst.prepare_for(like._sizes, CV_MAKETYPE(like.depth(), channels), like._device)
    return dst


def _check_channel(of: str, coi: int, m: Mat) -> None:
    if not 0 <= coi < m.channels():
        raise IndexError(f"{of}: there is no channel {coi} in {m}")


def _check_alike(of: str, mats: Sequence[Mat]) -> None:
    first = mats[0]
    for m in mats[1:]:
        if m.size != first.size or m.depth() != first.depth() or not same_device(m.device, first.device):
            raise ValueError(
                f"{of} takes Mats of the same size, depth and device, got {first} and {m} "
                f"({typeToString(first.depth())} and {typeToString(m.depth())} for each channel)"
            )

"""Choose the rulebook of a layer: the one that an earlier layer stored under its `indice_key`, or a new one.

Layers also share the data derived from a rulebook (orders of rows, lists of pairs). A rulebook belongs to one geometry
and one tensor of indices. A layer that asks for it with another geometry or other indices gets an error instead of
wrong neighbours.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

import torch
from torch import Tensor

from rooftop.sparse.geometries import Geometry, PerDimension, geometry, whole_number, whole_numbers
from rooftop.sparse.rulebook import Rulebook, build_rulebook, version_of
from rooftop.sparse.tensor import SparseConvTensor

Sizes = tuple[int, ...]


def per_dimension(what: str, value: PerDimension, dims: int, least: int) -> tuple[int, ...]:
    """One integer for each dimension. Raise `TypeError` for other values, and `ValueError` if their number is wrong or
    one is below `least`."""
    sizes = whole_numbers(what, value, dims)
    if len(sizes) != dims or min(sizes) < least:
        raise ValueError(f"{what} must be an integer of at least {least}, or {dims} of them, got {value}")
    return sizes


def rows_of_outputs(num_out_act_bound: int | None) -> int | None:
    """A layer's `num_out_act_bound` as an integer; raises `TypeError` for other values, and `ValueError` for one below
    0."""
    if num_out_act_bound is None:
        return None
    rows = whole_number("num_out_act_bound", num_out_act_bound)
    if rows < 0:
        raise ValueError(f"num_out_act_bound must be at least 0, or None for no bound, got {rows}")
    return rows


NAMES = tuple(field.name for field in fields(Geometry))
_remembered = lru_cache(maxsize=1024)(geometry)  # checking the same sizes at each call takes longer than a look-up


def layer_geometry(
    x: SparseConvTensor,
    ksize: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    out_padding: Sizes | int = 0,
    subm: bool = False,
    transpose: bool = False,
) -> Geometry:
    """The `Geometry` of a layer on the grid of x."""
    # compilers trace through caches, and warn about them
    made = geometry if torch.compiler.is_compiling() else _remembered
    shape = tuple(x.spatial_shape)
    return made(x.batch_size, shape, ksize, stride, padding, dilation, out_padding, subm, transpose)


def layer_rulebook(
    x: SparseConvTensor, shape: Geometry, indice_key: str | None, num_out_act_bound: int | None = None
) -> Rulebook:
    """The rulebook of a layer on x: the one under `indice_key`, if it exists, else a new one.

    `on_outputs` stores it under that key.

    Raises:
        ValueError: the rulebook under the key has another geometry, other indices or another bound, or indices were
            changed in place since.
        MissingExtraError, TypeError, ValueError: as `build_rulebook`.
    """
    found = x.find_indice_pair(indice_key)
    if found is None:
        return build_rulebook(x.indices, shape, num_out_act_bound)
    # geometries are cached, so they are most often the same object
    if found.shape is not shape and not _same(found.shape, shape):
        raise ValueError(
            f"indice_key {indice_key!r} has the rulebook of another layer: {_told(found.shape)}; this layer is "
            f"{_told(shape)}. Give it its own indice_key"
        )
    if found.inverse or found.in_indices is not x.indices:
        raise ValueError(
            f"indice_key {indice_key!r} has a rulebook of other sites, {len(found.in_indices)} rows of indices; this "
            f"layer's input has {len(x.indices)}. Give the layer its own indice_key, or keep the tensor of indices "
            "from layer to layer with replace_feature"
        )
    if found.version is not None and found.version != version_of(x.indices):
        raise ValueError(
            f"indice_key {indice_key!r} has a rulebook of indices that were later changed in place: create a new "
            "tensor of indices, and a SparseConvTensor from it"
        )
    if num_out_act_bound is not None and not shape.subm and num_out_act_bound != found.out_indices.shape[0]:
        raise ValueError(
            f"indice_key {indice_key!r} has a rulebook of {len(found.out_indices)} output rows; this layer's "
            f"num_out_act_bound is {num_out_act_bound}. Give both layers the same bound, or give this layer its own "
            "key"
        )
    return found  # type: ignore[no-any-return]


def inverse_rulebook(x: SparseConvTensor, ksize: Sizes, indice_key: str) -> Rulebook:
    """The rulebook that leads back to the inputs of the layer that stored one under `indice_key`.

    Raises:
        ValueError: there is none, it belongs to a submanifold convolution or to another kernel, or x does not have its
            output sites.
    """
    found = x.find_indice_pair(indice_key)
    if found is None:
        known = ", ".join(map(repr, x.indice_dict)) or "none"
        raise ValueError(
            f"no layer left a rulebook under indice_key {indice_key!r} (stored keys: {known}): give the same key to "
            "the strided layer that this one inverts. Kernels of size 1 with stride 1 leave no rulebook"
        )
    if found.subm:
        raise ValueError(
            f"indice_key {indice_key!r} has the rulebook of a submanifold convolution, which keeps its sites: an "
            "inverse convolution needs the key of a strided convolution or of pooling"
        )
    if ksize != found.ksize:
        raise ValueError(
            f"indice_key {indice_key!r} has the rulebook of a kernel of {found.ksize}: an inverse convolution "
            f"needs the same kernel, got {ksize}"
        )
    if found.out_indices is not x.indices:
        raise ValueError(
            f"the outputs of the layer with indice_key {indice_key!r} have other sites ({len(found.out_indices)} "
            f"rows) than this input ({len(x.indices)} rows): an inverse convolution starts from those outputs"
        )
    return found.swapped()  # type: ignore[no-any-return]


def on_outputs(
    x: SparseConvTensor, features: Tensor, rulebook: Rulebook, indice_key: str | None = None
) -> SparseConvTensor:
    """The result of a layer on x: features (O, C) on the outputs of its rulebook, which is stored under `indice_key`.

    As in spconv, only the new tensor and tensors derived from it have that rulebook; x does not change.
    """
    new = x.derived(features, rulebook.out_indices, rulebook.out_shape, rulebook.bounded)
    if indice_key is None or indice_key not in x.indice_dict:
        new.faults = (*x.faults, rulebook.told_faults)
        if indice_key is not None:
            new.indice_dict = {**x.indice_dict, indice_key: rulebook}
    return new


def _same(one: Geometry, other: Geometry) -> bool:
    """one == other, compared size by size, so that it works for a compiler's symbolic sizes."""
    for name in NAMES:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, tuple):
            if len(a) != len(b) or any(m != n for m, n in zip(a, b, strict=True)):
                return False
        elif a != b:
            return False
    return True


def _told(shape: Geometry) -> str:
    kind = "submanifold" if shape.subm else "transposed" if shape.transpose else "regular"
    return (
        f"{kind}, kernel {shape.ksize}, stride {shape.stride}, padding {shape.padding}, dilation {shape.dilation}, "
        f"on a grid {shape.in_shape} and a batch of {shape.batch_size}"
    )

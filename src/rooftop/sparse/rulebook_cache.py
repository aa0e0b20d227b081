"""Find the rulebook of a layer: reuse the rulebook that an earlier layer stored under the same `indice_key`, or build a
new one.

Layers also share the data that are derived from a rulebook (row orders, pair lists). A rulebook belongs to one geometry
and one tensor of indices. A layer with another geometry or other indices gets an error instead of wrong neighbours.
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
    """Convert a value to one integer per dimension. Raise `TypeError` if a value is not an integer, and `ValueError`
    if the number of values is wrong or a value is below `least`."""
    sizes = whole_numbers(what, value, dims)
    if len(sizes) != dims or min(sizes) < least:
        raise ValueError(f"{what} must be an integer of at least {least}, or {dims} such integers, got {value}")
    return sizes


def rows_of_outputs(num_out_act_bound: int | None) -> int | None:
    """Convert a layer's `num_out_act_bound` to an integer, or keep None. Raise `TypeError` if the value is not an
    integer, and `ValueError` if it is below 0."""
    if num_out_act_bound is None:
        return None
    rows = whole_number("num_out_act_bound", num_out_act_bound)
    if rows < 0:
        raise ValueError(f"num_out_act_bound must be at least 0, or None for no bound, got {rows}")
    return rows


NAMES = tuple(field.name for field in fields(Geometry))
_remembered = lru_cache(maxsize=1024)(geometry)  # a look-up is faster than checking the same sizes in each call


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
    # no cache when compiling: compilers trace through caches, and warn about them
    made = geometry if torch.compiler.is_compiling() else _remembered
    shape = tuple(x.spatial_shape)
    return made(x.batch_size, shape, ksize, stride, padding, dilation, out_padding, subm, transpose)


def layer_rulebook(
    x: SparseConvTensor, shape: Geometry, indice_key: str | None, num_out_act_bound: int | None = None
) -> Rulebook:
    """Return the rulebook of a layer on x: the rulebook stored under `indice_key`, or a new rulebook if none is stored.

    `on_outputs` stores a new rulebook under the key.

    Raises:
        ValueError: the rulebook under the key has another geometry, other indices or another bound than this layer, or
            its indices were changed in place after it was built.
        MissingExtraError, TypeError, ValueError: as `build_rulebook`.
    """
    found = x.find_indice_pair(indice_key)
    if found is None:
        return build_rulebook(x.indices, shape, num_out_act_bound)
    # equal geometries are usually the same object, since `layer_geometry` caches them
    if found.shape is not shape and not _same(found.shape, shape):
        raise ValueError(
            f"indice_key {indice_key!r} has the rulebook of another layer: {_told(found.shape)}; this layer is "
            f"{_told(shape)}. Give this layer its own indice_key"
        )
    if found.inverse or found.in_indices is not x.indices:
        raise ValueError(
            f"indice_key {indice_key!r} has a rulebook of other sites, with {len(found.in_indices)} rows of indices; "
            f"this layer's input has {len(x.indices)} rows. Give this layer its own indice_key, or keep the same "
            f"tensor of indices between the layers by replace_feature"
        )
    if found.version is not None and found.version != version_of(x.indices):
        raise ValueError(
            f"indice_key {indice_key!r} has a rulebook whose indices were later changed in place: create a new tensor "
            f"of indices, and a SparseConvTensor from it"
        )
    if num_out_act_bound is not None and not shape.subm and num_out_act_bound != found.out_indices.shape[0]:
        raise ValueError(
            f"indice_key {indice_key!r} has a rulebook of {len(found.out_indices)} output rows; this layer's "
            f"num_out_act_bound is {num_out_act_bound}. Give both layers the same bound, or this layer its own key"
        )
    return found  # type: ignore[no-any-return]


def inverse_rulebook(x: SparseConvTensor, ksize: Sizes, indice_key: str) -> Rulebook:
    """Return the rulebook from the outputs back to the inputs of the layer that stored its rulebook under `indice_key`.

    Raises:
        ValueError: no rulebook is stored under the key, the rulebook is for a submanifold convolution or for another
            kernel, or the sites of x are not the rulebook's output sites.
    """
    found = x.find_indice_pair(indice_key)
    if found is None:
        known = ", ".join(map(repr, x.indice_dict)) or "none"
        raise ValueError(
            f"no layer has stored a rulebook under indice_key {indice_key!r} (stored keys: {known}): give this key to "
            "the strided layer that this layer inverts. Layers with kernel size 1 and stride 1 store no rulebook"
        )
    if found.subm:
        raise ValueError(
            f"indice_key {indice_key!r} has the rulebook of a submanifold convolution, which keeps its sites: an "
            f"inverse convolution needs the key of a strided convolution or of a pooling layer"
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
    """Make the result of a layer on x, with features (O, C) on the outputs of `rulebook`, and store the rulebook under
    `indice_key`.

    As in spconv, only the new tensor and tensors derived from it have this rulebook. x does not change.
    """
    new = x.derived(features, rulebook.out_indices, rulebook.out_shape, rulebook.bounded)
    if indice_key is None or indice_key not in x.indice_dict:
        new.faults = (*x.faults, rulebook.told_faults)
        if indice_key is not None:
            new.indice_dict = {**x.indice_dict, indice_key: rulebook}
    return new


def _same(one: Geometry, other: Geometry) -> bool:
    """Whether two geometries are equal. Geometries are compared size by size, which works for a compiler's symbolic
    sizes."""
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

"""`SparseConvTensor`: features on the active sites of a grid, with spconv's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rooftop.hardware.large_tensors import allocated
from rooftop.sparse.geometries import batch_size_of, check_cells, sizes_of
from rooftop.sparse.rulebook import Faults
from rooftop.sparse.sites import (
    check_indices,
    check_int32,
    check_range,
    check_sites,
    checks_values,
    in_range,
    keys_of,
    sites_of,
)
from rooftop.words import did_you_mean

REDUCTIONS = ("sum", "mean", "max", "min")


class SparseConvTensor:
    """Features on the active sites of a batch of grids.

    A row of indices that consists of -1 is not a site. If the number of output rows of a convolution is fixed, the last
    rows may be -1.

    Attributes:
        features: (N, C). Change features with `replace_feature`.
        indices: (N, 1 + dims) int32 or int64, batch first.
        spatial_shape: list of the grid's sizes in 1 to 4 dimensions.
        batch_size: number of batch elements, some of which may have no sites.
        indice_dict: the rulebooks of the layers that computed this tensor, by `indice_key`.
        padded: whether `indices` may contain rows that are not sites. Outputs of a layer with `num_out_act_bound` are
            padded. For the network's input, the caller sets `padded`. Batch norms of padded tensors use only sites.
        faults: flags of the errors that earlier layers found in their sites, in the order of the layers. `check()`
            raises the first of these errors.
    """

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[int],
        batch_size: int,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[str, Any] | None = None,
        *,
        padded: bool = False,
    ) -> None:
        """Use the given tensors without copies. Values are not checked in compiled code or for fake tensors.

        Arguments are in spconv's order. `grid` and `voxel_num` are ignored, and accepted only for networks that pass
        them.

        Raises:
            TypeError, ValueError: a shape, dtype or device is wrong; the grid, including the batch, has 2^63 cells or
                more; or a site is out of range (checked on the CPU, and on a GPU with ROOFTOP_CHECK=1 in the
                environment). Repeated sites raise an error later: in the first layer that builds a rulebook, or
                in `dense()`. `coalesce()` merges repeated sites.
        """
        self.spatial_shape = list(sizes_of(spatial_shape))
        check_indices(indices, len(self.spatial_shape))
        _check_features(features, indices)
        batch_size = batch_size_of(batch_size)
        check_cells("spatial_shape", self.spatial_shape, batch_size)
        if _has_values(indices) and checks_values(indices):
            check_range(indices, batch_size, self.spatial_shape)
        self._features, self.indices, self.batch_size = features, indices, batch_size
        self.indice_dict: dict[str, Any] = {} if indice_dict is None else indice_dict
        self.grid, self.voxel_num, self.padded = grid, voxel_num, padded
        self.faults: tuple[Faults, ...] = ()

    _with_sites: tuple[int, Tensor] | None = None  # (version of the indices, mask of the rows that are sites)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy, without `_with_sites`: copied tensors have their own version counters."""
        return {name: value for name, value in self.__dict__.items() if name != "_with_sites"}

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """Create a sparse tensor from a dense tensor (B, *spatial_shape, C). Cells with a nonzero channel become sites.

        Indices are int32 and sorted. The host waits for the device.

        Raises:
            ValueError: x does not have 1 to 4 dimensions besides batch and channels, or a size exceeds 2^31.
        """
        if x.dim() < 3:
            raise ValueError(f"from_dense needs (batch, 1 to 4 dimensions, channels), got {tuple(x.shape)}")
        check_int32("from_dense: the shape (batch, *spatial_shape)", x.shape[:-1], "split the tensor")
        active = (x != 0).any(-1)
        return cls(x[active], active.nonzero().int(), x.shape[1:-1], x.shape[0])

    def __repr__(self) -> str:
        rows, channels = self.features.shape
        kind = "rows, some of them padding" if self.padded else "sites"
        grid = " x ".join(map(str, self.spatial_shape))
        return f"SparseConvTensor({rows} {kind}, {channels} channels, grid {grid}, batch of {self.batch_size})"

    @property
    def features(self) -> Tensor:
        return self._features

    @features.setter
    def features(self, value: Tensor) -> None:
        raise AttributeError("features cannot be set: use x = x.replace_feature(features), which returns a new tensor")

    @property
    def dims(self) -> int:
        """The number of dimensions of the grid."""
        return len(self.spatial_shape)

    @property
    def spatial_size(self) -> int:
        """The number of cells in one grid."""
        return math.prod(self.spatial_shape)

    @property
    def sparity(self) -> float:
        """The number of sites divided by the number of cells in the batch. spconv uses the same name.

        If the tensor is padded, the host waits for the device, which counts the sites.
        """
        sites = int((self.indices[:, 0] >= 0).sum()) if self.padded else len(self.indices)
        return sites / (self.spatial_size * self.batch_size)

    def replace_feature(self, feature: Tensor) -> SparseConvTensor:
        """Return a tensor with the same sites and rulebooks, and these features (N, any number of channels)."""
        _check_features(feature, self.indices)
        return self.derived(feature, self.indices, self.spatial_shape)

    def shadow_copy(self) -> SparseConvTensor:
        """Return a new object that shares this tensor's features, sites and rulebooks, without a copy."""
        return self.derived(self.features, self.indices, self.spatial_shape)

    def minus(self) -> SparseConvTensor:
        """Return a tensor with the same sites and negated features."""
        return self.replace_feature(-self.features)

    def select_by_index(self, valid_indices: Tensor) -> SparseConvTensor:
        """Select sites by int64 row numbers or by a bool for each row. The result has no rulebooks."""
        new = self.derived(self.features[valid_indices], self.indices[valid_indices], self.spatial_shape)
        new.indice_dict = {}
        return new

    def __add__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        """Add features (N, C), or the features of a sparse tensor with the same sites in the same order.

        Raises:
            ValueError: `indices` of the two sparse tensors are not the same tensor object, even if their values are
                equal. Use `functional.sparse_add` instead.
        """
        if not isinstance(other, SparseConvTensor):
            return self.replace_feature(self.features + other)
        if other.indices is not self.indices:
            raise ValueError(
                f"{self} + {other} have different indices: add tensors that share one tensor `indices`, or use "
                "rooftop.sparse.functional.sparse_add"
            )
        return self.replace_feature(self.features + other.features)

    __radd__ = __add__

    def derived(
        self, features: Tensor, indices: Tensor, spatial_shape: Sequence[int], padded: bool = False
    ) -> SparseConvTensor:
        """Create a layer's result from this tensor, with the same batch size and rulebooks. Sites are not
        checked."""
        new = object.__new__(type(self))
        new._features, new.indices, new.batch_size = features, indices, self.batch_size
        new.spatial_shape, new.indice_dict = list(spatial_shape), self.indice_dict
        new.grid, new.voxel_num = self.grid, self.voxel_num
        new.padded, new.faults = self.padded or padded, self.faults
        new._with_sites = self._with_sites if indices is self.indices else None
        return new

    def rows_with_sites(self) -> Tensor:
        """Return which rows are sites, (N,) bool. Results of layers with the same indices share this mask. The
        network's input does not store the mask, since its indices may change between replays of a CUDA graph."""
        if torch.compiler.is_compiling() or not self.faults:
            return self.indices[:, 0] >= 0
        if torch.is_inference_mode_enabled() or self.indices.is_inference():  # autograd cannot save inference tensors
            return self.indices[:, 0] >= 0
        if self._with_sites is None or self._with_sites[0] != self.indices._version:
            self._with_sites = self.indices._version, self.indices[:, 0] >= 0
        return self._with_sites[1]

    def check(self) -> None:
        """Raise `ValueError` if earlier layers have found an error: a site out of range, a repeated site, or too small
        a bound. On a GPU, this method waits for the device. Layers do not wait only to raise errors; they record
        errors in `faults`."""
        for fault in self.faults:
            fault.check()

    def find_indice_pair(self, key: str | None) -> Any:
        """The rulebook that a layer stored under this `indice_key`, or None."""
        return None if key is None else self.indice_dict.get(key)

    def dense(self, channels_first: bool = True) -> Tensor:
        """Convert to a dense tensor with zeros in cells without a site: (B, C, *spatial_shape), or (B, *spatial_shape,
        C).

        The conversion is differentiable.

        Raises:
            ValueError: a site is repeated or out of range (checked on the CPU, and on a GPU with ROOFTOP_CHECK=1 in the
                environment), or the dense tensor would have 2^63 bytes or more. Without the check of sites, only one
                row of a repeated site is used (which one is not defined), and sites out of range are ignored.
            MemoryError: the host has too little memory. On a GPU, PyTorch raises `torch.OutOfMemoryError`.
        """
        if _has_values(self.indices) and checks_values(self.indices):
            check_sites(self.indices, self.batch_size, self.spatial_shape)
        sites, cells = self.indices.long(), self.batch_size * self.spatial_size
        inside = in_range(sites, self.batch_size, self.spatial_shape)
        # an additional cell collects rows that are not sites
        cell = torch.where(inside, keys_of(sites, self.spatial_shape), cells)
        channels, new_zeros = self.features.shape[1], self.features.new_zeros
        shape = (self.batch_size, *self.spatial_shape, channels)
        zeros = allocated("dense(): a tensor", shape, self.features.dtype, lambda: new_zeros(cells + 1, channels))
        grid = zeros.index_copy(0, cell, self.features)[:cells].view(shape)
        return grid.movedim(-1, 1).contiguous() if channels_first else grid

    def coalesce(self, reduce: str = "sum") -> SparseConvTensor:
        """Merge rows of the same site, by the "sum", "mean", "max" or "min" of their features. The result's sites are
        in row-major order of (batch, *coordinates).

        The operation is differentiable and deterministic. Rows are reduced in ascending order of their numbers, and
        summed in float32 or wider. The host waits for the device. The result has no rulebooks.

        Raises:
            TypeError: the features are integers.
            ValueError: the reduction is unknown, or a site is out of range.
        """
        if reduce not in REDUCTIONS:
            raise ValueError(
                f"reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}{did_you_mean(reduce, REDUCTIONS)}"
            )
        dtype = self.features.dtype
        if not dtype.is_floating_point:
            raise TypeError(f"coalesce needs floating-point features, got {dtype}: convert with .float()")
        check_range(self.indices, self.batch_size, self.spatial_shape)
        sites = self.indices.long()
        rows = (sites[:, 0] >= 0).nonzero().squeeze(1)
        keys, order = keys_of(sites[rows], self.spatial_shape).sort(stable=True)
        keys, lengths = keys.unique_consecutive(return_counts=True)
        features = self.features[rows[order]]
        if len(keys):
            wide = features.to(torch.promote_types(dtype, torch.float32))
            features = torch.segment_reduce(wide, reduce, lengths=lengths, axis=0).to(dtype)
        indices = sites_of(keys, self.spatial_shape).to(self.indices.dtype)
        return SparseConvTensor(features, indices, self.spatial_shape, self.batch_size)


def _has_values(tensor: Tensor) -> bool:
    """Whether the tensor has data: it is not a fake tensor, and the code is not being compiled."""
    return not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)


def _check_features(features: Tensor, indices: Tensor) -> None:
    if not isinstance(features, Tensor):
        raise TypeError(f"features must be a tensor, got {type(features).__name__}")
    if features.dim() != 2 or features.shape[0] != indices.shape[0]:
        raise ValueError(
            f"features must be (N, C) with a row for each of the {indices.shape[0]} rows of indices, "
            f"got {tuple(features.shape)}"
        )
    if features.device != indices.device:
        raise ValueError(f"features are on {features.device}, indices on {indices.device}: move both to one device")

"""Pooling as modules, with spconv's names and arguments.

    down = SparseMaxPool3d(2, indice_key="down1")

| class | result |
|---|---|
| `SparseMaxPool1d` to `4d` | the maximum of the sites in each window that has a site |
| `SparseAvgPool1d` to `3d` | the mean of the sites in each window; cells without a site do not count |
| `SparseGlobalMaxPool`, `SparseGlobalAvgPool` | maximum or mean of all sites of a batch element, as a dense tensor |

A pooling layer with an `indice_key` stores its rulebook under this key. A `SparseInverseConv3d` with the same key maps
back to the pooling layer's input sites.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rooftop.kernels import sparse_avg_pool, sparse_global_avg_pool, sparse_global_max_pool, sparse_max_pool
from rooftop.sparse.convolutions import VOXEL_COUNT, ConvAlgo, check_submanifold, record_most
from rooftop.sparse.geometries import MAX_DIMS, PerDimension, check_kernel
from rooftop.sparse.modules import SparseModule, check_input
from rooftop.sparse.rulebook_cache import layer_geometry, layer_rulebook, on_outputs, per_dimension, rows_of_outputs
from rooftop.sparse.tensor import SparseConvTensor


class SparsePool(SparseModule):
    """Base class of all pooling layers with windows. Use one of the subclasses.

    Attributes:
        ndim, subm, indice_key, algo, record_voxel_count, num_out_act_bound: as passed.
        kernel_size, stride, padding, dilation: one integer per dimension.
    """

    average: ClassVar[bool]

    def __init__(
        self,
        ndim: int,
        kernel_size: PerDimension = 3,
        stride: PerDimension | None = 1,
        padding: PerDimension = 0,
        dilation: PerDimension = 1,
        indice_key: str | None = None,
        subm: bool = False,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
        *,
        num_out_act_bound: int | None = None,
    ) -> None:
        """Create the layer. Positional arguments are spconv's, in spconv's order. The keyword-only argument,
        `num_out_act_bound`, is Rooftop's.

        Args:
            ndim: number of dimensions of the grid, 1 to 4.
            kernel_size, stride, padding, dilation: as in `torch.nn.MaxPool3d`; one value for all dimensions or one per
                dimension. A stride of None means the kernel size, or 1 with `subm`.
            indice_key: the key under which layers share a rulebook. An inverse convolution finds the rulebook by this
                key.
            subm: whether the output sites are the input sites. With `subm`, kernel sizes must be odd, the stride must
                be 1, and the padding is ignored.
            algo: ignored; see `ConvAlgo`.
            record_voxel_count: whether to record the largest number of output sites (without padding rows) of any call,
                for `get_max_num_voxels()`.
            name: as in `SparseModule`.
            num_out_act_bound: the fixed number of output rows. If there are fewer sites, the last rows are not sites.
                With this bound, the host does not wait for the device. None: one row per output site.

        Raises:
            TypeError, ValueError: invalid ndim, sizes or algo.
        """
        super().__init__(name)
        if algo is not None and not isinstance(algo, ConvAlgo):
            raise TypeError(f"algo must be a rooftop.sparse.ConvAlgo or None, got {algo!r}")
        if not 1 <= ndim <= MAX_DIMS:
            raise ValueError(f"ndim must be from 1 to {MAX_DIMS}, got {ndim}")
        if stride is None:
            stride = 1 if subm else kernel_size
        self.ndim, self.subm, self.indice_key, self.algo = ndim, subm, indice_key, algo
        self.kernel_size = per_dimension("kernel_size", kernel_size, ndim, 1)
        self.stride = per_dimension("stride", stride, ndim, 1)
        self.padding = per_dimension("padding", padding, ndim, 0)
        self.dilation = per_dimension("dilation", dilation, ndim, 1)
        if subm:
            check_submanifold(self.kernel_size, self.stride)
        check_kernel(self.kernel_size)
        self.record_voxel_count, self.num_out_act_bound = record_voxel_count, rows_of_outputs(num_out_act_bound)
        if record_voxel_count and not subm:
            self.register_buffer(VOXEL_COUNT, torch.zeros(1, dtype=torch.int32))

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Pool x, whose grid has `ndim` dimensions. The result has the output grid, and the batch size and
        channels of x.

        Raises:
            TypeError, ValueError: x is not a sparse tensor of `ndim` dimensions, or the rulebook under `indice_key` is
                for another geometry or for other sites than those of x; or as in `build_rulebook`.
            MissingExtraError: Warp is not installed or, on a GPU, Triton is not.
        """
        check_input(self, x, self.ndim)
        shape = layer_geometry(x, self.kernel_size, self.stride, self.padding, self.dilation, subm=self.subm)
        rulebook = layer_rulebook(x, shape, self.indice_key, self.num_out_act_bound)
        pool = sparse_avg_pool if self.average else sparse_max_pool
        features = pool(x.features, rulebook.neighbours, None if rulebook.reached is None else rulebook.reverse)
        y = on_outputs(x, features, rulebook, self.indice_key)
        if self.record_voxel_count and hasattr(self, VOXEL_COUNT):
            record_most(getattr(self, VOXEL_COUNT), y)
        return y

    def get_max_num_voxels(self) -> Tensor | None:
        """Return the largest number of output sites of any call so far, (1,) int32. None without `record_voxel_count`,
        and for a submanifold layer. For the same inputs, a fixed `num_out_act_bound` must be at least this number."""
        return getattr(self, VOXEL_COUNT, None)

    def extra_repr(self) -> str:
        told = f"kernel_size={self.kernel_size}, stride={self.stride}"
        for name, plain in (("padding", 0), ("dilation", 1)):
            sizes = getattr(self, name)
            told += f", {name}={sizes}" if set(sizes) != {plain} else ""
        for name, usual in (("subm", False), ("indice_key", None), ("algo", None), ("num_out_act_bound", None)):
            value = getattr(self, name)
            told += f", {name}={value!s}" if value != usual else ""
        return told


class SparseMaxPool(SparsePool):
    """The maximum of the sites in each window. As in spconv, each site that equals the maximum gets the whole
    gradient.

    spconv 2.3 returns max(0, maximum). This equals the maximum if the features come from a ReLU.
    """

    average = False


class SparseAvgPool(SparsePool):
    """The mean of the sites in each window: their sum divided by their number."""

    average = True


# ---- by dimension ----------------------------------------------------------------------------------------------


class _OfDimensions(SparsePool):
    dimensions: ClassVar[int]

    def __init__(
        self,
        kernel_size: PerDimension,
        stride: PerDimension | None = None,
        padding: PerDimension = 0,
        dilation: PerDimension = 1,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
        *,
        subm: bool = False,
        num_out_act_bound: int | None = None,
    ) -> None:
        """Take the arguments of `SparsePool` in spconv's order. The default stride is the kernel's size."""
        super().__init__(
            self.dimensions, kernel_size, stride, padding, dilation, indice_key, subm, algo, record_voxel_count, name,
            num_out_act_bound=num_out_act_bound,
        )  # fmt: skip


class SparseMaxPool1d(_OfDimensions, SparseMaxPool):
    """`SparseMaxPool` over grids of 1 dimension."""

    dimensions = 1


class SparseMaxPool2d(_OfDimensions, SparseMaxPool):
    """`SparseMaxPool` over grids of 2 dimensions."""

    dimensions = 2


class SparseMaxPool3d(_OfDimensions, SparseMaxPool):
    """`SparseMaxPool` over grids of 3 dimensions."""

    dimensions = 3


class SparseMaxPool4d(_OfDimensions, SparseMaxPool):
    """`SparseMaxPool` over grids of 4 dimensions."""

    dimensions = 4


class SparseAvgPool1d(_OfDimensions, SparseAvgPool):
    """`SparseAvgPool` over grids of 1 dimension."""

    dimensions = 1


class SparseAvgPool2d(_OfDimensions, SparseAvgPool):
    """`SparseAvgPool` over grids of 2 dimensions."""

    dimensions = 2


class SparseAvgPool3d(_OfDimensions, SparseAvgPool):
    """`SparseAvgPool` over grids of 3 dimensions."""

    dimensions = 3


# ---- batch elements --------------------------------------------------------------------------------------------


class SparseGlobalMaxPool(SparseModule):
    """The maximum over all sites of each batch element: (batch_size, C), 0 for elements without sites.

    If several sites equal the maximum, they share the gradient equally.
    """

    def forward(self, x: SparseConvTensor) -> Tensor:
        check_input(self, x)
        return sparse_global_max_pool(x.features, x.indices[:, 0], x.batch_size)


class SparseGlobalAvgPool(SparseModule):
    """The mean over all sites of each batch element: (batch_size, C), 0 for elements without sites.

    This layer of spconv 2.3 returns only the first channel.
    """

    def forward(self, x: SparseConvTensor) -> Tensor:
        check_input(self, x)
        return sparse_global_avg_pool(x.features, x.indices[:, 0], x.batch_size)

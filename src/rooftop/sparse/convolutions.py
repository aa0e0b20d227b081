"""Sparse convolutions as modules, with spconv's names, arguments, initialization and weight layout.

    block = SparseSequential(SubMConv3d(4, 16, 3, indice_key="subm1"), torch.nn.BatchNorm1d(16), torch.nn.ReLU())

| class | outputs | definition |
|---|---|---|
| `SubMConv1d` to `4d` | the sites of the input | odd kernel, stride 1, and the padding that keeps sites in place |
| `SparseConv1d` to `4d` | cells to which an input contributes | `torch.nn.Conv3d` on the dense grid |
| `SparseConvTranspose1d` to `4d` | cells to which an input contributes | `torch.nn.ConvTranspose3d` on the dense grid |
| `SparseInverseConv1d` to `4d` | the input sites of the layer with the same key | that layer's pairs, reversed |

Layers with the same `indice_key` share one rulebook. Such layers must have the same geometry and the same input sites.
An inverse layer must have the kernel size of the layer that it inverts, and its input sites are that layer's output
sites.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.hardware.large_tensors import allocated
from rooftop.sparse.functional import convolve, linear
from rooftop.sparse.geometries import PerDimension, check_kernel, whole_number
from rooftop.sparse.modules import SparseModule, check_input
from rooftop.sparse.rulebook import Rulebook
from rooftop.sparse.rulebook_cache import (
    inverse_rulebook,
    layer_geometry,
    layer_rulebook,
    on_outputs,
    per_dimension,
    rows_of_outputs,
)
from rooftop.sparse.tensor import SparseConvTensor
from rooftop.sparse.weight_layouts import OWN_VERSION, as_krsc, fitting

VOXEL_COUNT = "max_num_voxels_during_training"


class ConvAlgo(Enum):
    """spconv's algorithms for a convolution. Layers accept an algorithm and ignore it. Rooftop chooses kernels by
    the numbers of channels and sites and by the dtype, and results do not depend on the argument `algo`."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class SparseConvolution(SparseModule):
    """Base class of all sparse convolutions. Use one of its subclasses.

    Attributes:
        weight: (out_channels, *kernel_size, in_channels / groups).
        bias: (out_channels,) or None.
        ndim, in_channels, out_channels, kernel_size, stride, padding, dilation, output_padding, groups, subm,
            transposed, inverse, indice_key, algo, fp32_accum, record_voxel_count: as passed; sizes are one integer per
            dimension.
        num_out_act_bound: fixed number of output rows, or None.
        conv1x1: whether the layer is a matrix product without a rulebook.
    """

    _version = OWN_VERSION  # `state_dict` records that weights are (out, *kernel, in)

    ndim: int
    subm = transposed = inverse = False
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: PerDimension,
        stride: PerDimension = 1,
        padding: PerDimension = 0,
        dilation: PerDimension = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        *,
        output_padding: PerDimension = 0,
        num_out_act_bound: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the layer. Positional arguments are spconv's, in spconv's order. Keyword-only arguments are Rooftop's.

        Args:
            in_channels, out_channels: numbers of channels. `groups` must divide both.
            kernel_size, stride, padding, dilation: as in `torch.nn.Conv3d`; one value for all dimensions or one per
                dimension.
            indice_key: the key under which layers share a rulebook. An inverse convolution finds the rulebook by this
                key.
            algo: ignored; see `ConvAlgo`.
            fp32_accum, large_kernel_fast_algo: ignored. Accumulation is in float32 or wider for kernels of any size.
            record_voxel_count: whether to record the largest number of output sites (without padding rows) of any call,
                for `get_max_num_voxels()`.
            name: as in `SparseModule`.
            output_padding: for a transposed convolution, as in `torch.nn.ConvTranspose3d`.
            num_out_act_bound: the fixed number of output rows. If there are fewer sites, the last rows are not sites.
                With this bound, the host does not wait for the device. None: one row per output site.
            device, dtype: device and dtype of weight and bias.

        Raises:
            TypeError, ValueError: invalid channels, sizes, groups or algo, or a weight of 2^63 bytes or more.
            MemoryError: the host has too little memory for the weight.
        """
        super().__init__(name)
        if algo is not None and not isinstance(algo, ConvAlgo):
            raise TypeError(f"algo must be a rooftop.sparse.ConvAlgo or None, got {algo!r}")
        in_channels, out_channels = whole_number("in_channels", in_channels), whole_number("out_channels", out_channels)
        groups = whole_number("groups", groups)
        if min(in_channels, out_channels) < 0:
            raise ValueError(f"numbers of channels must be at least 0, got {in_channels} and {out_channels}")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"groups must divide {in_channels} and {out_channels} channels, got {groups}")
        sizes = [
            per_dimension(what, value, self.ndim, least)
            for what, value, least in (
                ("kernel_size", kernel_size, 1),
                ("stride", stride, 1),
                ("padding", padding, 0),
                ("dilation", dilation, 1),
                ("output_padding", output_padding, 0),
            )
        ]
        self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding = sizes
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.indice_key, self.algo, self.fp32_accum = indice_key, algo, fp32_accum
        self.record_voxel_count, self.large_kernel_fast_algo = record_voxel_count, large_kernel_fast_algo
        self.num_out_act_bound = rows_of_outputs(num_out_act_bound)
        in_place = self.subm or not (any(self.padding) or any(self.output_padding) or max(self.stride) > 1)
        in_place = in_place and num_out_act_bound is None
        self.conv1x1 = max(self.kernel_size) == 1 and in_place and not self.inverse
        if self.subm:
            check_submanifold(self.kernel_size, self.stride)
        check_kernel(self.kernel_size)
        shape = (out_channels, *self.kernel_size, in_channels // groups)
        numbers = dtype or torch.get_default_dtype()
        weight = allocated("a weight", shape, numbers, lambda: torch.empty(shape, device=device, dtype=dtype))
        self.weight = nn.Parameter(weight)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        if record_voxel_count and not self.subm and not self.inverse:
            self.register_buffer(VOXEL_COUNT, torch.zeros(1, dtype=torch.int32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly between +-1 / sqrt(in_channels / groups * kernel volume), as in spconv."""
        fan_in = math.prod(self.weight.shape[1:])
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Apply the convolution to x, which has `in_channels` channels and a grid of `ndim` dimensions. Returns a
        sparse tensor with the same batch size and with `out_channels` channels.

        Raises:
            TypeError, ValueError: x is not a sparse tensor of `ndim` dimensions, or the rulebook under `indice_key` is
                for another geometry or for other sites than those of x; or as in `build_rulebook`.
            MissingExtraError: Warp is not installed or, on a GPU, Triton is not.
        """
        check_input(self, x, self.ndim)
        if x.features.shape[1] != self.in_channels:
            raise ValueError(f"{type(self).__name__} takes {self.in_channels} channels, got {x}")
        if self.conv1x1:
            # Unlike the kernels of sparse convolution, a matrix product also reads rows that are not sites. A NaN in
            # such a row would make the weight's gradient NaN.
            features = x.features.where(x.indices[:, :1] >= 0, 0) if x.padded else x.features
            y = x.replace_feature(linear(features, self.weight, self.bias, self.groups))
        else:
            rulebook = self._rulebook(x)
            features = convolve(x.features, self.weight, self.bias, rulebook, self.groups)
            y = on_outputs(x, features, rulebook, self.indice_key)
        if self.record_voxel_count and hasattr(self, VOXEL_COUNT):
            record_most(getattr(self, VOXEL_COUNT), y)
        return y

    def _rulebook(self, x: SparseConvTensor) -> Rulebook:
        shape = layer_geometry(
            x, self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding, self.subm,
            self.transposed,
        )  # fmt: skip
        return layer_rulebook(x, shape, self.indice_key, self.num_out_act_bound)

    def get_max_num_voxels(self) -> Tensor | None:
        """Return the largest number of output sites of any call so far, (1,) int32. None without `record_voxel_count`,
        and for submanifold and inverse layers. For the same inputs, a fixed `num_out_act_bound` must be at least this
        number."""
        return getattr(self, VOXEL_COUNT, None)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load like any module, but permute the weight first if its shape shows that it is in one of spconv's other
        layouts."""
        key, shape = prefix + "weight", tuple(self.weight.shape)
        weight = state_dict.get(key)
        if isinstance(weight, Tensor) and (local_metadata or {}).get("version", 1) < OWN_VERSION:
            layouts = fitting(weight, shape)
            if len(layouts) == 1:
                state_dict[key] = as_krsc(weight, layouts[0]).contiguous()
            elif layouts:
                error_msgs.append(
                    f"{key} of shape {tuple(weight.shape)} may be in spconv's layout {' or '.join(layouts)}: load it "
                    "with rooftop.sparse.load_spconv_state_dict, which decides by the other weights or by layout="
                )
                if tuple(weight.shape) == shape:
                    state_dict[key] = self.weight  # so that the load keeps the current weight
        count = prefix + VOXEL_COUNT
        if hasattr(self, VOXEL_COUNT) and count not in state_dict:
            state_dict[count] = getattr(self, VOXEL_COUNT)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        told = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        if not self.inverse:
            told += f", stride={self.stride}"
        for name, plain in (("padding", 0), ("dilation", 1), ("output_padding", 0)):
            sizes = getattr(self, name)
            told += f", {name}={sizes}" if set(sizes) != {plain} else ""
        for name, usual in (("groups", 1), ("indice_key", None), ("algo", None), ("num_out_act_bound", None)):
            value = getattr(self, name)
            told += f", {name}={value!s}" if value != usual else ""
        return told + (", bias=False" if self.bias is None else "")


def check_submanifold(kernel_size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Raise `ValueError` if a submanifold layer with these arguments would not keep the sites."""
    if max(stride) > 1:
        raise ValueError(f"a submanifold layer keeps its sites: stride must be 1, got {stride}")
    if any(size % 2 == 0 for size in kernel_size):
        raise ValueError(
            f"the kernel of a submanifold layer needs a centre: kernel_size must be odd, got {kernel_size}"
        )


@torch.no_grad()
def record_most(count: Tensor, y: SparseConvTensor) -> None:
    """Raise the running maximum `count`, (1,), to the number of sites of y if y has more sites."""
    count.copy_(torch.maximum(count, (y.indices[:, 0] >= 0).sum().to(count.dtype)))


# ---- by kind ---------------------------------------------------------------------------------------------------


class _SubMConv(SparseConvolution):
    subm = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: PerDimension,
        stride: PerDimension = 1,
        padding: PerDimension = 0,
        dilation: PerDimension = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take spconv's arguments in spconv's order.

        Args:
            kernel_size, dilation: one value for all dimensions or one per dimension. Kernel sizes must be odd.
            stride: must be 1.
            padding: ignored, since the outputs are always at the input sites.
            indice_key: the key under which layers share a rulebook.
            others: as in `SparseConvolution`, with the same errors.
        """
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, indice_key, algo,
            fp32_accum, False, large_kernel_fast_algo, name, device=device, dtype=dtype,
        )  # fmt: skip


class _SparseConvTranspose(SparseConvolution):
    transposed = True


class _SparseInverseConv(SparseConvolution):
    inverse = True
    indice_key: str

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: PerDimension,
        indice_key: str,
        bias: bool = True,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        *,
        groups: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take spconv's arguments in spconv's order.

        Args:
            kernel_size, indice_key: kernel size and key of the layer to invert.
            others: as in `SparseConvolution`, with the same errors.

        Raises:
            TypeError: no key is given.
        """
        if not isinstance(indice_key, str):
            raise TypeError(
                f"indice_key must be the key of the layer to invert, got {indice_key!r}: the arguments are "
                "in_channels, out_channels, kernel_size, indice_key"
            )
        super().__init__(
            in_channels, out_channels, kernel_size, groups=groups, bias=bias, indice_key=indice_key, algo=algo,
            fp32_accum=fp32_accum, large_kernel_fast_algo=large_kernel_fast_algo, name=name, device=device,
            dtype=dtype,
        )  # fmt: skip

    def _rulebook(self, x: SparseConvTensor) -> Rulebook:
        return inverse_rulebook(x, self.kernel_size, self.indice_key)


# ---- by dimension ----------------------------------------------------------------------------------------------


class SubMConv1d(_SubMConv):
    """A submanifold convolution, over grids of 1 dimension."""

    ndim = 1


class SubMConv2d(_SubMConv):
    """A submanifold convolution, over grids of 2 dimensions."""

    ndim = 2


class SubMConv3d(_SubMConv):
    """A submanifold convolution, over grids of 3 dimensions."""

    ndim = 3


class SubMConv4d(_SubMConv):
    """A submanifold convolution, over grids of 4 dimensions."""

    ndim = 4


class SparseConv1d(SparseConvolution):
    """A convolution with stride, padding and dilation, over grids of 1 dimension."""

    ndim = 1


class SparseConv2d(SparseConvolution):
    """A convolution with stride, padding and dilation, over grids of 2 dimensions."""

    ndim = 2


class SparseConv3d(SparseConvolution):
    """A convolution with stride, padding and dilation, over grids of 3 dimensions."""

    ndim = 3


class SparseConv4d(SparseConvolution):
    """A convolution with stride, padding and dilation, over grids of 4 dimensions."""

    ndim = 4


class SparseConvTranspose1d(_SparseConvTranspose):
    """A transposed convolution, over grids of 1 dimension."""

    ndim = 1


class SparseConvTranspose2d(_SparseConvTranspose):
    """A transposed convolution, over grids of 2 dimensions."""

    ndim = 2


class SparseConvTranspose3d(_SparseConvTranspose):
    """A transposed convolution, over grids of 3 dimensions."""

    ndim = 3


class SparseConvTranspose4d(_SparseConvTranspose):
    """A transposed convolution, over grids of 4 dimensions."""

    ndim = 4


class SparseInverseConv1d(_SparseInverseConv):
    """The convolution back to the input sites of the layer with the same `indice_key`, over grids of 1 dimension."""

    ndim = 1


class SparseInverseConv2d(_SparseInverseConv):
    """The convolution back to the input sites of the layer with the same `indice_key`, over grids of 2 dimensions."""

    ndim = 2


class SparseInverseConv3d(_SparseInverseConv):
    """The convolution back to the input sites of the layer with the same `indice_key`, over grids of 3 dimensions."""

    ndim = 3


class SparseInverseConv4d(_SparseInverseConv):
    """The convolution back to the input sites of the layer with the same `indice_key`, over grids of 4 dimensions."""

    ndim = 4

"""Sparse convolutional networks that label the sites of a point cloud: MinkUNet and a plain U-Net.

MinkUNet's stages, widths and blocks are from Choy et al. 2019, "4D Spatio-Temporal ConvNets: Minkowski Convolutional
Neural Networks". The stem has two 3 x 3 x 3 convolutions instead of one 5 x 5 x 5 convolution, as in Tang et al. 2020,
"Searching Efficient 3D Architectures with Sparse Point-Voxel Convolution". The plain U-Net follows Ronneberger et al.
2015, "U-Net".

    model = minkunet18(in_channels=4, num_classes=19)
    logits = model(x).features  # (N, 19), in the rows of x

Within a level, submanifold convolutions keep the sites and share one rulebook (the table of neighbouring sites). Each
downsampling step halves the grid. The upsampling step is an inverse convolution that restores exactly the sites from
before the downsampling, so skip connections match row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import nn

from rooftop.launch.symbolic import refuse_proxies
from rooftop.sparse import SparseConv3d, SparseConvTensor, SparseInverseConv3d, SparseSequential, SubMConv3d

LEVELS = 4  # downsampling steps of a MinkUNet
MINK_PLANES = (32, 64, 128, 256, 256, 128, 96, 96)
PLANES = (32, 64, 128, 256)


class UShape(nn.Module):
    """A U-Net: a stem, downsampling stages, upsampling stages with skips, and the logits of each site.

    Args:
        stem, encoder, decoder, head: the modules of the network. The decoder consists of `Up` modules, in reverse order
            of the encoder.
        multiple: each dimension of the grid is enlarged to a multiple of this number, so that no stage drops sites.
    """

    def __init__(
        self,
        stem: nn.Module,
        encoder: Iterable[nn.Module],
        decoder: Iterable[nn.Module],
        head: nn.Module,
        multiple: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.head = head
        self.multiple = multiple

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Map N sites with C channels to the same N sites with `num_classes` channels.

        All rulebooks are cached in the input's `indice_dict`. Another tensor with this `indice_dict` and the same
        indices reuses the rulebooks.

        Raises:
            TypeError, ValueError: x is not a `SparseConvTensor`, or has a wrong number of dimensions or channels.
        """
        refuse_proxies(self, x)
        if not isinstance(x, SparseConvTensor):
            raise TypeError(f"{type(self).__name__} takes a rooftop.sparse.SparseConvTensor, got {type(x).__name__}")
        levels = [self.stem(enlarged(x, self.multiple))]
        for stage in self.encoder:
            levels.append(stage(levels[-1]))
        y = levels.pop()
        for stage in self.decoder:
            y = stage(y, levels.pop())
        return on_grid(y.replace_feature(self.head(y.features)), x.spatial_shape)


class MinkUNet(UShape):
    """A MinkUNet: four downsampling and four upsampling stages of residual blocks.

    Args:
        layers: blocks in each of the eight stages.
        in_channels, num_classes: input and output channels of a site.
        planes: channels of the eight stages; the stem has as many channels as the first stage.

    Raises:
        ValueError: `layers` or `planes` does not have eight numbers.
    """

    def __init__(
        self, layers: Sequence[int], in_channels: int, num_classes: int, planes: Sequence[int] = MINK_PLANES
    ) -> None:
        if len(layers) != 2 * LEVELS or len(planes) != 2 * LEVELS:
            raise ValueError(
                f"expected {2 * LEVELS} numbers in layers and in planes, got {list(layers)} and {list(planes)}"
            )
        widths = [planes[0], *planes[:LEVELS]]  # channels of the stem and of each downsampling stage
        stem = nn.Sequential(unit(in_channels, widths[0], "level0"), unit(widths[0], widths[0], "level0"))
        encoder = [
            nn.Sequential(
                halving(widths[level - 1], widths[level - 1], 2, 0, f"down{level}"),
                residual_blocks(widths[level - 1], widths[level], layers[level - 1], f"level{level}"),
            )
            for level in range(1, LEVELS + 1)
        ]
        decoder, channels = [], widths.pop()
        for out, blocks in zip(planes[LEVELS:], layers[LEVELS:], strict=True):
            level, skip = len(widths) - 1, widths.pop()
            up = doubling(channels, out, 2, f"down{level + 1}")
            decoder.append(Up(up, residual_blocks(out + skip, out, blocks, f"level{level}")))
            channels = out
        super().__init__(stem, encoder, decoder, nn.Linear(channels, num_classes), multiple=2**LEVELS)


class SparseUNet(UShape):
    """A plain U-Net of 3 x 3 x 3 convolutions with norm and ReLU.

    Each level has two submanifold convolutions in the encoder and, except for the coarsest level, two in the decoder. A
    convolution of stride 2 leads to the next coarser level, and its inverse convolution leads back.

    Args:
        in_channels, num_classes: input and output channels of a site.
        planes: channels of each level, from the finest to the coarsest level.

    Raises:
        ValueError: there are no levels.
    """

    def __init__(self, in_channels: int, num_classes: int, planes: Sequence[int] = PLANES) -> None:
        if not planes:
            raise ValueError("expected channels of at least one level, got no planes")
        encoder, decoder = [], []
        for level, (fine, coarse) in enumerate(pairwise(planes)):
            down = halving(fine, coarse, 3, 1, f"down{level + 1}")
            encoder.append(nn.Sequential(down, two_units(coarse, coarse, f"level{level + 1}")))
            up = doubling(coarse, fine, 3, f"down{level + 1}")
            decoder.append(Up(up, two_units(2 * fine, fine, f"level{level}")))
        stem, head = two_units(in_channels, planes[0], "level0"), nn.Linear(planes[0], num_classes)
        super().__init__(stem, encoder, reversed(decoder), head, multiple=1)


# ---- parts -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block: relu(f(x) + shortcut(x)), where f has two convolutions.

    The shortcut is the identity or, if the channels change, a linear layer.
    """

    def __init__(self, channels: int, out: int, key: str) -> None:
        super().__init__()
        self.first = unit(channels, out, key)
        self.second = SparseSequential(SubMConv3d(out, out, 3, bias=False, indice_key=key), nn.BatchNorm1d(out))
        self.shortcut = (
            None if channels == out else SparseSequential(nn.Linear(channels, out, bias=False), nn.BatchNorm1d(out))
        )

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        shortcut: SparseConvTensor = x if self.shortcut is None else self.shortcut(x)
        y: SparseConvTensor = self.second(self.first(x))
        return y.replace_feature(torch.relu(y.features + shortcut.features))


class Up(nn.Module):
    """Upsamples to the sites of the next finer level, concatenates the skip connection's features, then runs blocks."""

    def __init__(self, up: nn.Module, blocks: nn.Module) -> None:
        super().__init__()
        self.up, self.blocks = up, blocks

    def forward(self, x: SparseConvTensor, skip: SparseConvTensor) -> SparseConvTensor:
        y: SparseConvTensor = self.up(x)
        y = y.replace_feature(torch.cat((y.features, skip.features), 1))  # (N, out + skip)
        found: SparseConvTensor = self.blocks(y)
        return found


def unit(channels: int, out: int, key: str) -> SparseSequential:
    """A 3 x 3 x 3 submanifold convolution, norm and ReLU."""
    return SparseSequential(
        SubMConv3d(channels, out, 3, bias=False, indice_key=key), nn.BatchNorm1d(out), nn.ReLU(inplace=True)
    )


def two_units(channels: int, out: int, key: str) -> nn.Sequential:
    """A level of the plain U-Net: two submanifold convolutions, each with norm and ReLU."""
    return nn.Sequential(unit(channels, out, key), unit(out, out, key))


def residual_blocks(channels: int, out: int, count: int, key: str) -> nn.Sequential:
    """A level of a MinkUNet: `count` residual blocks."""
    return nn.Sequential(*(Block(channels if i == 0 else out, out, key) for i in range(count)))


def halving(channels: int, out: int, kernel: int, padding: int, key: str) -> SparseSequential:
    """A convolution of stride 2, which halves the grid, then norm and ReLU."""
    return SparseSequential(
        SparseConv3d(channels, out, kernel, 2, padding, bias=False, indice_key=key),
        nn.BatchNorm1d(out),
        nn.ReLU(inplace=True),
    )


def doubling(channels: int, out: int, kernel: int, key: str) -> SparseSequential:
    """The inverse convolution of the `halving` with the same key, which restores that layer's input sites, then norm
    and ReLU."""
    return SparseSequential(
        SparseInverseConv3d(channels, out, kernel, bias=False, indice_key=key),
        nn.BatchNorm1d(out),
        nn.ReLU(inplace=True),
    )


def enlarged(x: SparseConvTensor, multiple: int) -> SparseConvTensor:
    """Enlarge the grid to multiples, with the same sites.

    A kernel of 2 with stride 2 would drop the last cells along a dimension of odd size.
    """
    return on_grid(x, [-(-size // multiple) * multiple for size in x.spatial_shape])


def on_grid(x: SparseConvTensor, shape: Sequence[int]) -> SparseConvTensor:
    """Change the size of the grid without changing its active sites."""
    return x if list(shape) == list(x.spatial_shape) else x.derived(x.features, x.indices, shape)


# ---- by name ---------------------------------------------------------------------------------------------------


def minkunet18(in_channels: int, num_classes: int) -> MinkUNet:
    """MinkUNet-18: two blocks in each stage."""
    return MinkUNet((2,) * 8, in_channels, num_classes)


def minkunet34(in_channels: int, num_classes: int) -> MinkUNet:
    """MinkUNet-34: 2, 3, 4 and 6 blocks in the downsampling stages, two in each upsampling stage."""
    return MinkUNet((2, 3, 4, 6, 2, 2, 2, 2), in_channels, num_classes)

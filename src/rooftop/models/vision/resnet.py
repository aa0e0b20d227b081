"""ResNet, ResNeXt and Wide ResNet, with torchvision's keys.

He et al. 2015, "Deep Residual Learning for Image Recognition". The stride of a bottleneck is in the 3x3 convolution
("v1.5", Goyal et al. 2017). ResNeXt (Xie et al. 2016) adds groups; Wide ResNet (Zagoruyko and Komodakis 2016) widens
the 3x3 convolution.

A block computes relu(f(x) + shortcut(x)); the shortcut is the identity unless the block has a stride above 1 or
changes the number of channels.

    model = resnet50(weights="IMAGENET1K_V2").eval()

Every builder accepts `weights` and the options of `ResNet`. `weights` is a published name, "DEFAULT" for the newest
weights, or a file (`rooftop.models.weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rooftop.models.class_counts import check_classes
from rooftop.models.registry import register
from rooftop.models.weights.files import load_weights

Norm = Callable[[int], nn.Module]


def conv3x3(channels: int, out: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Conv2d:
    """A 3x3 convolution without a bias, which keeps the size at stride 1."""
    return nn.Conv2d(channels, out, 3, stride, dilation, dilation, groups, bias=False)


def conv1x1(channels: int, out: int, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution without a bias."""
    return nn.Conv2d(channels, out, 1, stride, bias=False)


@dataclass(frozen=True)
class Variant:
    """Settings that all blocks of one network share.

    Attributes:
        groups: number of groups of the bottleneck's 3x3 convolution (ResNeXt).
        base_width: channels of a group of this convolution in a block with 64 planes (ResNeXt, Wide ResNet). With more
            planes, the channels grow in proportion.
        norm: creates a norm from a number of channels.
    """

    groups: int = 1
    base_width: int = 64
    norm: Norm = nn.BatchNorm2d


class Block(nn.Module):
    """A residual block: relu(f(x) + shortcut(x)).

    The block maps (B, channels, H, W) to (B, expansion * planes, H / stride, W / stride).
    """

    expansion: ClassVar[int]
    relu: nn.Module
    downsample: nn.Module | None  # assigned in torchvision's order, so that state dicts have the same order

    @property
    def last_norm(self) -> nn.Module:
        """The norm at the end of the residual branch f. If its weights and biases are zero, f(x) is zero."""
        raise NotImplementedError

    def residual(self, x: Tensor) -> Tensor:
        """Compute f(x), the residual branch of the block, without the shortcut."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.residual(x)
        x += shortcut
        return self.relu(x)


class BasicBlock(Block):
    """A residual block of two 3x3 convolutions.

    Raises:
        ValueError: groups, width or dilation is not the default; only the bottleneck supports other values.
    """

    expansion = 1

    def __init__(self, channels: int, planes: int, stride: int, dilation: int, variant: Variant) -> None:
        super().__init__()
        groups, base_width, norm = variant.groups, variant.base_width, variant.norm
        if groups != 1 or base_width != 64 or dilation != 1:
            raise ValueError(
                "BasicBlock has no groups, width or dilation: use a ResNet of bottlenecks (resnet50 and deeper); "
                f"got groups={groups}, width_per_group={base_width}, dilation={dilation}"
            )
        self.conv1 = conv3x3(channels, planes, stride)
        self.bn1 = norm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = norm(planes)
        self.downsample = projection(channels, planes, stride, norm)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn2

    def residual(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))  # (B, planes, H / stride, W / stride)
        return self.bn2(self.conv2(x))


class Bottleneck(Block):
    """A residual block of three convolutions: 1x1, which reduces the channels; 3x3; and 1x1, which expands them."""

    expansion = 4

    def __init__(self, channels: int, planes: int, stride: int, dilation: int, variant: Variant) -> None:
        super().__init__()
        norm = variant.norm
        width = int(planes * (variant.base_width / 64)) * variant.groups
        self.conv1 = conv1x1(channels, width)
        self.bn1 = norm(width)
        self.conv2 = conv3x3(width, width, stride, variant.groups, dilation)
        self.bn2 = norm(width)
        self.conv3 = conv1x1(width, 4 * planes)
        self.bn3 = norm(4 * planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(channels, 4 * planes, stride, norm)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn3

    def residual(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))  # (B, width, H, W)
        x = self.relu(self.bn2(self.conv2(x)))  # (B, width, H / stride, W / stride)
        return self.bn3(self.conv3(x))  # (B, 4 * planes, H / stride, W / stride)


def projection(channels: int, out: int, stride: int, norm: Norm) -> nn.Module | None:
    """The shortcut of a block: a 1x1 convolution and a norm if the block has a stride above 1 or changes the number of
    channels; None for the identity.
    """
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(conv1x1(channels, out, stride), norm(out))


class ResNet(nn.Module):
    """A ResNet: stem, four stages of blocks, global average and linear head: (B, 3, H, W) -> (B, num_classes).

    Args:
        block: BasicBlock or Bottleneck.
        layers: blocks in each of the four stages.
        num_classes: number of output logits.
        zero_init_residual: initialize each block so that f(x) is zero (the last norm's weight is 0).
        groups: number of groups of the bottleneck's 3x3 convolution (ResNeXt).
        width_per_group: channels of a group of this convolution in the first stage, if it has 64 planes (ResNeXt, Wide
            ResNet). In stages with more planes, the channels grow in proportion.
        replace_stride_with_dilation: for stages 2, 3 and 4, whether the stage has dilation instead of a stride.
        norm_layer: makes a norm from a number of channels.
        small_images: use a 3x3 stem that keeps the size, for images of about 64 pixels or less.
        channels: channels of the stem, and planes of the first stage; each later stage has twice as many planes as the
            previous stage.

    Raises:
        ValueError: the length of `layers` or `replace_stride_with_dilation` is wrong, or BasicBlock does not support an
            option.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: Sequence[int],
        num_classes: int = 1000,
        zero_init_residual: bool = False,
        groups: int = 1,
        width_per_group: int = 64,
        replace_stride_with_dilation: Sequence[bool] | None = None,
        norm_layer: Norm | None = None,
        small_images: bool = False,
        channels: int = 64,
    ) -> None:
        super().__init__()
        check_classes(num_classes)
        replace = replace_stride_with_dilation
        dilate = (False, *((False, False, False) if replace is None else replace))
        if len(layers) != 4 or len(dilate) != 4:
            raise ValueError(
                "expected 4 layers and None or 3 values for replace_stride_with_dilation, "
                f"got {list(layers)} and {replace!r}"
            )
        variant = Variant(groups, width_per_group, norm_layer or nn.BatchNorm2d)
        self.conv1 = (
            conv3x3(3, channels) if small_images else nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        )
        self.bn1 = variant.norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        stages, widths, dilation = [], [channels << place for place in range(4)], 1
        for planes, blocks, stride, dilated in zip(widths, layers, (1, 2, 2, 2), dilate, strict=True):
            # the first block changes stride and width, and keeps the previous stage's dilation
            first_dilation = dilation
            if dilated:
                dilation, stride = dilation * stride, 1
            stage = [block(channels, planes, stride, first_dilation, variant)]
            channels = planes * block.expansion
            stage += [block(channels, planes, 1, dilation, variant) for _ in range(1, blocks)]
            stages.append(nn.Sequential(*stage))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, num_classes)
        self._initialize(zero_init_residual)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))  # (B, 64, H / 2, W / 2)
        x = self.maxpool(x)  # (B, 64, H / 4, W / 4)
        x = self.layer1(x)  # (B, 64 * e, H / 4, W / 4), e = block.expansion
        x = self.layer2(x)  # (B, 128 * e, H / 8, W / 8)
        x = self.layer3(x)  # (B, 256 * e, H / 16, W / 16)
        x = self.layer4(x)  # (B, 512 * e, H / 32, W / 32)
        x = torch.flatten(self.avgpool(x), 1)  # (B, 512 * e)
        return self.fc(x)

    def _initialize(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, Block):
                weight = module.last_norm.weight
                if isinstance(weight, Tensor):  # a norm may have no weights
                    nn.init.zeros_(weight)


@register
def resnet18(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """ResNet-18: 11,689,512 parameters."""
    return _built("resnet18", weights, BasicBlock, (2, 2, 2, 2), options)


@register
def resnet34(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """ResNet-34: 21,797,672 parameters."""
    return _built("resnet34", weights, BasicBlock, (3, 4, 6, 3), options)


@register
def resnet50(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """ResNet-50: 25,557,032 parameters."""
    return _built("resnet50", weights, Bottleneck, (3, 4, 6, 3), options)


@register
def resnet101(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """ResNet-101: 44,549,160 parameters."""
    return _built("resnet101", weights, Bottleneck, (3, 4, 23, 3), options)


@register
def resnet152(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """ResNet-152: 60,192,808 parameters."""
    return _built("resnet152", weights, Bottleneck, (3, 8, 36, 3), options)


@register
def resnext50_32x4d(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """ResNeXt-50 with 32 groups of width 4: 25,028,904 parameters."""
    return _built("resnext50_32x4d", weights, Bottleneck, (3, 4, 6, 3), {"groups": 32, "width_per_group": 4, **options})


@register
def resnext101_32x8d(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """ResNeXt-101 with 32 groups of width 8: 88,791,336 parameters."""
    return _built(
        "resnext101_32x8d", weights, Bottleneck, (3, 4, 23, 3), {"groups": 32, "width_per_group": 8, **options}
    )


@register
def resnext101_64x4d(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """ResNeXt-101 with 64 groups of width 4: 83,455,272 parameters."""
    return _built(
        "resnext101_64x4d", weights, Bottleneck, (3, 4, 23, 3), {"groups": 64, "width_per_group": 4, **options}
    )


@register
def wide_resnet50_2(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """Wide ResNet-50, with 3x3 convolutions twice as wide: 68,883,240 parameters."""
    return _built("wide_resnet50_2", weights, Bottleneck, (3, 4, 6, 3), {"width_per_group": 128, **options})


@register
def wide_resnet101_2(*, weights: str | Path | None = None, **options: Any) -> ResNet:
    """Wide ResNet-101, with 3x3 convolutions twice as wide: 126,886,696 parameters."""
    return _built("wide_resnet101_2", weights, Bottleneck, (3, 4, 23, 3), {"width_per_group": 128, **options})


def _built(
    name: str,
    weights: str | Path | None,
    block: type[BasicBlock | Bottleneck],
    layers: Sequence[int],
    options: dict[str, Any],
) -> ResNet:
    model = ResNet(block, layers, **options)
    if weights is not None:
        load_weights(model, name, weights)
    return model
